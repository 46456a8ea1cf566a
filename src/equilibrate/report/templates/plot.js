// Pure functions for drawing: scales, ticks, paths, colours and numbers as text.
// They know nothing of the page, so that they can be tested without a browser.
const Plot = (() => {
  "use strict";

  const isNumber = (v) => typeof v === "number" && Number.isFinite(v);

  // The least and greatest number, or null if there is none.
  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (isNumber(v)) { if (v < low) low = v; if (v > high) high = v; }
    return low <= high ? [low, high] : null;
  }

  // The range of all values but the most extreme ones: the first readings may be far off.
  function bulk(values, share = 0.05) {
    const sorted = values.filter(isNumber).sort((a, b) => a - b);
    if (!sorted.length) return null;
    const cut = Math.floor(sorted.length * share);
    return [sorted[cut], sorted[sorted.length - 1 - cut]];
  }

  // A range with some space at both ends; a single value gets a range around it.
  function padded([low, high], share = 0.06) {
    const size = high - low || Math.abs(high) || 1;
    return [low - share * size, high + share * size];
  }

  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = rough / power;
    return power * (unit < Math.SQRT2 ? 1 : unit < 3.16 ? 2 : unit < 7.07 ? 5 : 10);
  }

  function linearTicks(low, high, count = 5) {
    if (!(high > low)) return [low];
    const step = niceStep((high - low) / count);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) {
      ticks.push(Number((k * step).toPrecision(12)));
    }
    return ticks;
  }

  // Powers of ten; with 2 and 5 in between if there are few of them.
  function logTicks(low, high, count = 5) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const decades = Math.log10(high / low);
    const units = decades > 2.5 ? [1] : decades > 0.8 ? [1, 2, 5] : null;
    if (units === null) return linearTicks(low, high, count);
    const stride = Math.max(1, Math.ceil(decades / (count + 1)));
    const ticks = [];
    for (let k = first; k <= last; k++) {
      if (units.length === 1 && (k - first) % stride) continue;
      for (const unit of units) {
        const tick = Number((unit * 10 ** k).toPrecision(12));
        if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) ticks.push(tick);
      }
    }
    return ticks;
  }

  // Zero and powers of ten on both sides of it, down to the width of the linear part.
  function symlogTicks(low, high, width) {
    const ticks = new Set([0]);
    const start = Math.round(Math.log10(width));
    for (let k = start; 10 ** k <= Math.max(Math.abs(low), Math.abs(high)) * (1 + 1e-9); k++) {
      ticks.add(Number((10 ** k).toPrecision(12)));
      ticks.add(Number((-(10 ** k)).toPrecision(12)));
    }
    return [...ticks].filter((t) => t >= low && t <= high).sort((a, b) => a - b);
  }

  // Ticks that are at least `pixels` apart: zero first, then the largest.
  function apart(ticks, map, pixels) {
    const kept = [];
    for (const tick of [...ticks].sort((a, b) => (a === 0 ? -1 : b === 0 ? 1
      : Math.abs(b) - Math.abs(a)))) {
      if (kept.every((other) => Math.abs(map(other) - map(tick)) >= pixels)) kept.push(tick);
    }
    return kept.sort((a, b) => a - b);
  }

  const shapes = {
    linear: () => ({ to: (v) => v, from: (u) => u, ticks: linearTicks }),
    log: () => ({ to: (v) => Math.log(v), from: (u) => Math.exp(u), ticks: logTicks }),
    // Linear within ± width, logarithmic outside, smooth in between.
    symlog: (width) => ({
      to: (v) => Math.asinh(v / width),
      from: (u) => width * Math.sinh(u),
      ticks: (low, high) => symlogTicks(low, high, width),
    }),
  };

  // A map from the numbers of `domain` to the pixels of `range`; null for what it cannot show.
  function scale(kind, domain, range, width = 0.01) {
    const shape = shapes[kind](width);
    const low = shape.to(domain[0]), high = shape.to(domain[1]);
    const factor = (range[1] - range[0]) / (high - low || 1);
    return {
      domain,
      map(v) {
        if (!isNumber(v) || (kind === "log" && v <= 0)) return null;
        return range[0] + (shape.to(v) - low) * factor;
      },
      invert: (p) => shape.from(low + (p - range[0]) / factor),
      ticks: (count) => shape.ticks(domain[0], domain[1], count),
    };
  }

  const at = (x, y) => `${x.toFixed(1)},${y.toFixed(1)}`;

  // A line through the points; one that is missing interrupts it, and a single one is a dot.
  function linePath(xs, ys) {
    const parts = [];
    let open = false;
    for (let i = 0; i < xs.length; i++) {
      if (xs[i] === null || ys[i] === null) { open = false; continue; }
      parts.push((open ? "L" : "M") + at(xs[i], ys[i]));
      const alone = !open && (i + 1 === xs.length || xs[i + 1] === null || ys[i + 1] === null);
      if (alone) parts.push("h0.1");
      open = true;
    }
    return parts.join("");
  }

  // The area between two curves, one polygon for each run of points that have both.
  function bandPath(xs, lows, highs) {
    const parts = [];
    let run = [];
    const flush = () => {
      if (run.length > 1) {
        const up = run.map((i) => at(xs[i], highs[i]));
        const down = run.slice().reverse().map((i) => at(xs[i], lows[i]));
        parts.push(`M${[...up, ...down].join("L")}Z`);
      }
      run = [];
    };
    for (let i = 0; i < xs.length; i++) {
      if (xs[i] === null || lows[i] === null || highs[i] === null) flush();
      else run.push(i);
    }
    flush();
    return parts.join("");
  }

  // The index of the number closest to x in an ascending list; -1 if the list is empty.
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    if (high < 0) return -1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(xs[high] - x) < Math.abs(x - xs[low]) ? high : low;
  }

  // Borders between columns: halfway between neighbours, and as far out at both ends.
  function borders(xs) {
    if (xs.length < 2) return xs.length ? [xs[0] - 0.5, xs[0] + 0.5] : [];
    const middle = xs.slice(1).map((x, i) => (x + xs[i]) / 2);
    return [2 * xs[0] - middle[0], ...middle, 2 * xs[xs.length - 1] - middle[middle.length - 1]];
  }

  // A number for people: about `digits` significant ones, with a true minus sign.
  function format(v, digits = 3) {
    if (!isNumber(v)) return "–";
    if (Number.isInteger(v) && Math.abs(v) < 1e12) {
      return String(v).replace(/\B(?=(\d{3})+$)/g, ",").replace("-", "−");
    }
    const size = Math.abs(v);
    let text = size >= 1e5 || (size < 1e-3 && size > 0)
      ? v.toExponential(digits - 1)
      : String(Number(v.toPrecision(digits)));
    text = text.replace("e+", "e");
    return text.replace(/-/g, "−");
  }

  // A number with its margin of error, rounded to the margin's second digit.
  function plusMinus(v, margin) {
    if (!isNumber(v) || !(isNumber(margin) && margin > 0)) return format(v);
    const places = Math.max(0, 1 - Math.floor(Math.log10(margin)));
    if (places > 7) return `${format(v)} ± ${format(margin, 2)}`;
    const rounded = Number(v.toFixed(places)).toFixed(places);  // no sign on a zero
    return `${rounded} ± ${margin.toFixed(places)}`.replace("-", "−");
  }

  // The names without the beginning that all of them share, up to a dot.
  function shortNames(names) {
    if (names.length < 2) return names;
    let end = 0;
    while (end < names[0].length && names.every((name) => name[end] === names[0][end])) end++;
    end = names[0].lastIndexOf(".", end - 1) + 1;
    return names.map((name) => name.slice(end));
  }

  function formatTime(seconds) {
    if (!isNumber(seconds)) return "–";
    const whole = Math.round(seconds);
    const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
    if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
    return minutes ? `${minutes} min ${whole % 60} s` : `${format(seconds)} s`;
  }

  // Where a residual lies on the colour scale, −1 to 1: linear up to 0.05, logarithmic up to 3. One
  // that noise alone could explain is pale.
  function shade(residual, margin = null) {
    if (!isNumber(residual)) return null;
    const t = Math.asinh(residual / 0.05) / Math.asinh(60);
    const pale = isNumber(margin) && Math.abs(residual) <= margin ? 0.35 : 1;
    return pale * Math.max(-1, Math.min(1, t));
  }

  // From blue through white to orange, which people with any colour vision tell apart.
  const STOPS = [[5, 66, 128], [67, 147, 195], [178, 213, 232], [247, 247, 247],
    [253, 203, 143], [224, 120, 20], [140, 58, 4]];
  function diverging(t) {
    if (t === null) return null;
    const place = (t + 1) / 2 * (STOPS.length - 1);
    const k = Math.min(Math.floor(place), STOPS.length - 2), share = place - k;
    return STOPS[k].map((c, j) => Math.round(c + share * (STOPS[k + 1][j] - c)));
  }

  return {
    isNumber, extent, bulk, padded, linearTicks, logTicks, symlogTicks, apart, scale, linePath,
    bandPath, nearest, borders, format, plusMinus, shortNames, formatTime, shade, diverging,
  };
})();
if (typeof module !== "undefined") module.exports = Plot;
