// The page of one run: panels that share a horizontal axis, a cursor and a zoom.
(() => {
  "use strict";
  const run = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { left: 64, right: 14, top: 8, bottom: 26 };
  const state = { axis: "step", zoom: null, row: null, layer: null };
  const panels = [];
  const byId = (id) => document.getElementById(id);
  const tip = byId("tip"), readout = byId("readout");

  // Elements. Texts are only ever set as text, never as HTML.
  function make(name, attributes = {}, children = []) {
    const isSvg = ["svg", "g", "path", "line", "rect", "circle", "text", "title", "clipPath"];
    const node = isSvg.includes(name)
      ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null) node.setAttribute(key, value);
    }
    node.append(...[children].flat().filter((child) => child !== null));
    return node;
  }

  // The horizontal axis -----------------------------------------------------------------------

  const AXES = { step: "step", epoch: "epoch", time: "time" };
  function timeUnit() {
    const longest = run.x.time[run.x.time.length - 1];
    return longest > 3 * 3600 ? ["hours", 3600] : longest > 180 ? ["minutes", 60] : ["seconds", 1];
  }
  // Rows, learning rates, lowerings and layers each have an x, with a list for each axis.
  function xValues({ x } = run) {
    if (state.axis !== "time") return x[state.axis];
    const [, seconds] = timeUnit();
    return x.time.map((t) => t / seconds);
  }
  const xLabel = () => (state.axis === "time" ? timeUnit()[0] : state.axis);
  function xDomain() {
    if (state.zoom) return state.zoom;
    const [low, high] = Plot.extent(xValues());
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  // Panels ------------------------------------------------------------------------------------

  const withMargin = (values, margin, sign) => values.map((v, i) => (
    v === null || margin[i] === null ? null : v + sign * margin[i]));
  const present = (column) => column.some((v) => v !== null);
  const positive = (curves) => curves.every((c) => c.values.every((v) => v === null || v > 0));

  // The vertical scales of a panel and what their buttons say. "bulk" leaves out extreme values.
  const FULL = { bulk: "bulk", linear: "full" };
  const LOG = { log: "log", linear: "linear" };
  const ALL = { linear: "full", bulk: "bulk" };

  function curvePanels() {
    const found = [];
    const { after, after_margin: margin, staying } = run.forecast;
    const losses = [
      { name: "loss", color: "loss", values: run.loss },
      { name: "forecast: after a cooldown", color: "more-1", values: after, margin },
      { name: "after staying as long", color: "right", dash: "6 3", values: staying },
    ].filter((c) => present(c.values));
    if (losses.length) {
      found.push({ id: "loss", title: "Loss", curves: losses,
        kinds: positive(losses.slice(0, 1)) ? LOG : FULL,
        note: present(after) ? "Each forecast stands where it was made." : "" });
    }
    const rates = run.rates.values.map((values, g) => ({
      name: run.lrs.length > 1 ? `group ${g}` : "learning rate", values,
      color: ["rate", "left", "right", "more-1", "more-2"][g % 5], dash: g ? `${2 + 2 * g} 3` : null,
    })).filter((c) => present(c.values));
    if (rates.length) {
      const dots = run.decays ? "Dot: it begins to decay." : "Dots: a decision lowered it.";
      found.push({ id: "rate", title: "Learning rate", curves: rates, of: run.rates, dots: true,
        zero: true, kinds: positive(rates) ? { linear: "linear", log: "log" } : { linear: "" },
        note: run.lowerings.lrs.length ? dots : "" });
    }
    for (const [name, values] of Object.entries(run.others)) {
      found.push({ id: `other-${name}`, title: name, kinds: ALL,
        curves: [{ name, color: "more-1", values }] });
    }
    const sides = [
      { name: "left side", color: "left", values: run.left },
      { name: "right side", color: "right", dash: "6 3", values: run.right },
    ];
    if (sides.some((c) => present(c.values))) {
      found.push({ id: "sides", title: "Both sides of FDR1", curves: sides, zero: true,
        kinds: FULL, note: "They meet when training is stationary." });
    }
    if (present(run.residual)) {
      found.push({ id: "residual", title: "Residual L/R − 1", kinds: { symlog: "log ±", ...FULL },
        curves: [{ name: "residual", color: "left", values: run.residual, margin: run.margin }],
        zone: run.threshold, zero: true,
        note: run.threshold ? `Shaded: below the threshold of ${Plot.format(run.threshold)}.` : "" });
    }
    return found;
  }

  function key(curve) {
    const line = make("line", { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 2,
      stroke: `var(--${curve.color})`, "stroke-dasharray": curve.dash || null });
    return make("span", { class: "key" }, [
      make("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, line), curve.name]);
  }

  function figureOf(panel, legend, label) {
    const tools = make("span", { class: "tools" });
    const plot = make("div", { class: "plot" });
    const caption = make("figcaption", {}, [make("b", {}, panel.title), ...legend,
      panel.note ? make("span", {}, panel.note) : null, tools]);
    const figure = make("figure", { class: "panel", id: `panel-${panel.id}` }, [caption, plot]);
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", label);
    byId("panels").append(figure);
    return { plot, tools };
  }

  function addCurvePanel(panel) {
    const legend = panel.curves.length > 1 ? panel.curves.map(key) : [];
    const { plot, tools } = figureOf(panel, legend,
      `${panel.title}. Left and right arrow keys move the cursor.`);
    panel.plot = plot;
    panel.kind = Object.keys(panel.kinds)[0];
    for (const [kind, text] of Object.entries(panel.kinds).filter(([, shown]) => shown)) {
      const button = make("button", { type: "button", "aria-pressed": kind === panel.kind }, text);
      button.addEventListener("click", () => {
        panel.kind = kind;
        for (const other of tools.children) {
          other.setAttribute("aria-pressed", String(other === button));
        }
        panel.draw();
      });
      tools.append(button);
    }
    panel.draw = () => drawCurves(panel);
    panel.select = () => selectInCurves(panel);
    listen(panel);
    panels.push(panel);
  }

  function yScale(panel, height) {
    const range = [height - MARGIN.bottom, MARGIN.top];
    const [first, last] = xDomain();
    const inside = xValues(panel.of).map((x) => x >= first && x <= last);
    const seen = (column) => column.filter((_, i) => inside[i]);
    const all = panel.curves.flatMap((c) => seen(c.values));
    const wide = panel.curves.flatMap((c) => (c.margin
      ? [...seen(withMargin(c.values, c.margin, -1)), ...seen(withMargin(c.values, c.margin, 1))]
      : []));
    let domain = (panel.kind === "bulk" ? Plot.bulk(all)
      : Plot.extent(panel.kind === "log" ? all.filter((v) => v > 0) : [...all, ...wide]))
      || [0.1, 1];
    if (panel.kind === "log") {
      const [low, high] = domain;
      return Plot.scale("log", low < high ? [low / 1.08, high * 1.08] : [low / 2, high * 2], range);
    }
    if (panel.zero) domain = [Math.min(0, domain[0]), Math.max(0, domain[1])];
    if (panel.kind === "symlog") {
      const width = panel.zone || 0.01;
      const edge = Math.max(2 * width, 1.3 * domain[1]);
      return Plot.scale("symlog", [Math.min(-2 * width, 1.3 * domain[0]), edge], range, width);
    }
    return Plot.scale("linear", Plot.padded(domain), range);
  }

  function frame(panel, width, height, x, yTicks) {
    const g = make("g");
    for (const tick of x.ticks(tickCount(width))) {
      const px = x.map(tick);
      g.append(make("line", { class: "grid", x1: px, x2: px, y1: MARGIN.top,
        y2: height - MARGIN.bottom }));
    }
    g.append(...xTexts(width, height, x));
    for (const [py, text] of yTicks) {
      g.append(make("line", { class: "grid", x1: panel.left, x2: width - MARGIN.right, y1: py,
        y2: py }));
      g.append(make("text", { x: panel.left - 6, y: py + 4, "text-anchor": "end" }, text));
    }
    return g;
  }

  // As many ticks as fit with their labels.
  const tickCount = (width) => Math.max(2,
    Math.floor(width / (60 + 7 * Plot.format(xDomain()[1], 4).length)));

  // The labels of the horizontal axis; its name stands at the end.
  function xTexts(width, height, x) {
    const place = { y: height - 10, "text-anchor": "middle" };
    const free = width - MARGIN.right - 58;
    return [...x.ticks(tickCount(width)).filter((t) => x.map(t) < free).map((t) => make("text",
      { ...place, x: x.map(t) }, Plot.format(t, 4))),
    make("text", { ...place, x: width - MARGIN.right, "text-anchor": "end" }, xLabel())];
  }

  function lowerings(x, height) {
    const path = xValues(run.lowerings).map(
      (at) => `M${x.map(at).toFixed(1)},${MARGIN.top}V${height - MARGIN.bottom}`);
    return make("path", { class: "lowering", d: path.join("") });
  }

  function drawCurves(panel) {
    const width = Math.max(280, panel.plot.clientWidth), height = 210;
    panel.left = MARGIN.left;
    const x = Plot.scale("linear", xDomain(), [panel.left, width - MARGIN.right]);
    const y = yScale(panel, height);
    Object.assign(panel, { x, y, width, height });
    const px = xValues(panel.of).map(x.map);
    const clip = `clip-${panel.id}`;
    const inner = make("g", { "clip-path": `url(#${CSS.escape(clip)})` });
    if (panel.zone) {
      const top = y.map(panel.zone), bottom = y.map(-panel.zone);
      inner.append(make("rect", { class: "zone", x: panel.left, y: Math.min(top, bottom),
        width: width - panel.left - MARGIN.right, height: Math.abs(bottom - top) }));
    }
    inner.append(lowerings(x, height));
    for (const curve of panel.curves) {
      const py = curve.values.map(y.map);
      const stroke = `var(--${curve.color})`;
      if (curve.margin && present(curve.margin)) {
        // On a logarithmic scale the band goes down to the edge where its lower end is negative.
        const low = withMargin(curve.values, curve.margin, -1).map(
          (v) => (v === null ? null : y.map(v) ?? height));
        const high = withMargin(curve.values, curve.margin, 1).map(y.map);
        inner.append(make("path", { class: "band", fill: stroke, "fill-opacity": 0.16,
          d: Plot.bandPath(px, low, high) }));
      }
      inner.append(make("path", { class: "curve", d: Plot.linePath(px, py), stroke,
        "stroke-dasharray": curve.dash || null }));
    }
    if (panel.dots) {
      xValues(run.lowerings).forEach((at, k) => {
        const py = y.map(run.lowerings.lrs[k][0]);
        if (py === null) return;
        inner.append(make("circle", { class: "dot", cx: x.map(at), cy: py, r: 4.5,
          fill: "var(--right)" }, make("title", {}, run.lowerings.reasons[k])));
      });
    }
    panel.cursor = make("g");
    panel.drag = make("rect", { class: "drag", y: MARGIN.top, height: height - MARGIN.top - MARGIN.bottom, width: 0 });
    inner.append(panel.drag, panel.cursor);
    const ticks = Plot.apart(y.ticks(4), y.map, 14).map((t) => [y.map(t), Plot.format(t)]);
    panel.svg = make("svg", { viewBox: `0 0 ${width} ${height}` }, [
      make("clipPath", { id: clip }, make("rect", { x: panel.left - 5, y: MARGIN.top - 5,
        width: width - panel.left - MARGIN.right + 10,
        height: height - MARGIN.top - MARGIN.bottom + 10 })),
      frame(panel, width, height, x, ticks), inner]);
    panel.plot.replaceChildren(panel.svg);
    panel.select();
  }

  // The place of a row in what a panel shows: the last one that is not after it.
  function rowIn(panel, row) {
    if (!panel.of) return row;
    const xs = xValues(panel.of), x = xValues()[row];
    let place = Plot.nearest(xs, x);
    while (place > 0 && xs[place] > x) place--;
    while (xs[place + 1] <= x) place++;
    return place;
  }

  function selectInCurves(panel) {
    panel.cursor.replaceChildren();
    if (state.row === null) return;
    const px = panel.x.map(xValues()[state.row]);
    panel.cursor.append(make("line", { class: "cursor", x1: px, x2: px, y1: MARGIN.top,
      y2: panel.height - MARGIN.bottom }));
    const place = rowIn(panel, state.row);
    for (const curve of panel.curves) {
      const py = panel.y.map(curve.values[place]);
      if (py !== null) {
        panel.cursor.append(make("circle", { class: "dot", cx: px, cy: py, r: 4,
          fill: `var(--${curve.color})` }));
      }
    }
  }

  // The heat map of layers --------------------------------------------------------------------

  function addLayers() {
    const layers = run.layers;
    const legend = [make("span", { class: "scale" }, ["≤ −3", make("canvas", { width: 181, height: 1,
      "aria-hidden": "true" }), "≥ 3"]), make("span", {}, "L/R − 1; white: the sides are equal."),
    make("span", {}, layers.margin.some(present) ? "Pale: within its error." : ""),
    make("span", {}, layers.scale_invariant.some((v) => v) ? "⊥: scale-invariant." : "")];
    const panel = { id: "layers", title: "Layers" };
    const { plot } = figureOf(panel, legend, "Residual of each layer. Arrow keys move the cursor.");
    paint(plot.parentNode.querySelector(".scale canvas"), 181, 1, (k) => k / 90 - 1);
    panel.plot = plot;
    panel.draw = () => drawLayers(panel, layers);
    panel.select = () => selectInLayers(panel, layers);
    listen(panel);
    panels.push(panel);
  }

  // Colour each pixel (column, row) of a canvas by a number between −1 and 1.
  function paint(canvas, columns, rows, valueAt) {
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < columns; c++) {
        const colour = Plot.diverging(valueAt(c, r));
        if (colour) image.data.set([...colour, 255], 4 * (r * columns + c));
      }
    }
    context.putImageData(image, 0, 0);
  }

  const elided = (name, most) => (name.length <= most ? name
    : `${name.slice(0, Math.ceil(most / 2) - 1)}…${name.slice(-Math.floor(most / 2))}`);

  function drawLayers(panel, layers) {
    const width = Math.max(280, panel.plot.clientWidth);
    const most = width < 600 ? 14 : 26;
    const names = Plot.shortNames(layers.names).map(
      (name, r) => elided(name, most - 2) + (layers.scale_invariant[r] ? " ⊥" : ""));
    const longest = Math.min(most, Math.max(...names.map((n) => n.length)));
    panel.left = Math.max(MARGIN.left, 12 + 6.2 * longest);
    const size = Math.max(1, Math.min(18, Math.floor(480 / layers.names.length)));
    const height = MARGIN.top + size * layers.names.length + MARGIN.bottom;
    const x = Plot.scale("linear", xDomain(), [panel.left, width - MARGIN.right]);
    const edges = Plot.borders(xValues(layers).map(x.map));
    const inside = width - MARGIN.right - panel.left;
    Object.assign(panel, { x, width, height, size, edges });
    // Each pixel column shows the reading that is nearest to it.
    const columns = Math.max(1, Math.round(inside));
    const chosen = Array.from({ length: columns }, (_, k) => {
      const at = panel.left + k + 0.5;
      return at < edges[0] || at > edges[edges.length - 1]
        ? null : edges.findIndex((edge, c) => c > 0 && at <= edge) - 1;
    });
    const canvas = make("canvas", { "aria-hidden": "true" });
    paint(canvas, columns, layers.names.length, (k, r) => (chosen[k] === null
      ? null : Plot.shade(layers.residual[r][chosen[k]], layers.margin[r][chosen[k]])));
    canvas.style.cssText = `left:${100 * panel.left / width}%;top:${100 * MARGIN.top / height}%;`
      + `width:${100 * inside / width}%;height:${100 * size * layers.names.length / height}%`;
    const stride = Math.max(1, Math.ceil(11 / size));
    const labels = names.map((name, r) => [name, r]).filter(([, r]) => r % stride === 0);
    panel.cursor = make("g");
    panel.drag = make("rect", { class: "drag", y: MARGIN.top, height: size * layers.names.length,
      width: 0 });
    panel.svg = make("svg", { viewBox: `0 0 ${width} ${height}`, class: "over" }, [
      ...labels.map(([name, r]) => make("text", { x: panel.left - 6, "text-anchor": "end",
        y: MARGIN.top + (r + 0.5) * size + 4 }, name)),
      ...xTexts(width, height, x),
      make("rect", { class: "axis", x: panel.left, y: MARGIN.top, width: inside,
        height: size * layers.names.length }), panel.drag, panel.cursor]);
    panel.plot.replaceChildren(canvas, panel.svg);
    panel.select();
  }

  function selectInLayers(panel, layers) {
    panel.cursor.replaceChildren();
    if (state.row === null) return;
    const column = Plot.nearest(xValues(layers), xValues()[state.row]);
    const [first, last] = [panel.edges[column], panel.edges[column + 1]].map(
      (e) => Math.max(panel.left, Math.min(panel.width - MARGIN.right, e)));
    const all = state.layer === null;
    panel.cursor.append(make("rect", { class: "cell", x: first, width: Math.max(2, last - first),
      y: MARGIN.top + (all ? 0 : state.layer * panel.size),
      height: panel.size * (all ? layers.names.length : 1) }));
  }

  // The cursor --------------------------------------------------------------------------------

  function describe(row) {
    const parts = [`step ${Plot.format(run.x.step[row])}`];
    if (run.x.epoch) parts.push(`epoch ${Plot.format(run.x.epoch[row])}`);
    if (run.loss[row] !== null) parts.push(`loss ${Plot.format(run.loss[row], 4)}`);
    if (run.forecast.after[row] !== null) {
      parts.push(`after a cooldown ${Plot.plusMinus(run.forecast.after[row],
        run.forecast.after_margin[row])}`);
    }
    if (run.residual[row] !== null) {
      parts.push(`L/R − 1 = ${Plot.plusMinus(run.residual[row], run.margin[row])}`);
    }
    const rates = run.lrs.map((column) => column[row]).filter((v) => v !== null);
    if (rates.length) parts.push(`lr ${rates.map((v) => Plot.format(v)).join(", ")}`);
    return parts;
  }

  function select(row, layer = null) {
    state.row = row;
    state.layer = layer;
    for (const panel of panels) panel.select();
    if (row === null) {
      readout.textContent = "Point at a curve to read it; drag to zoom.";
      return;
    }
    readout.textContent = [...describe(row), run.reasons[row]].filter((t) => t).join(" · ");
  }

  function tipLines(panel, row, layer) {
    if (panel.id === "layers") {
      const column = Plot.nearest(xValues(run.layers), xValues()[row]);
      const state = run.layers.states[run.layers.state[layer][column]];
      const drifts = state && state.startsWith("norm");  // its margin is no error
      return [run.layers.names[layer] + (run.layers.scale_invariant[layer] ? " ⊥" : ""),
        `L/R − 1 = ${Plot.plusMinus(run.layers.residual[layer][column],
          drifts ? null : run.layers.margin[layer][column])}`, ...(state ? [state] : []),
        `step ${Plot.format(run.layers.x.step[column])}`];
    }
    const place = rowIn(panel, row);
    const shown = panel.curves.filter((c) => c.values[place] !== null);
    const curves = shown.map((c) => `${c.name}: ${Plot.plusMinus(c.values[place],
      c.margin ? c.margin[place] : null)}`);
    const where = describe(row).slice(0, run.x.epoch ? 2 : 1).join(", ");
    const time = run.x.time ? ` (${Plot.formatTime(run.x.time[row])})` : "";
    const window = Plot.isNumber(run.count[row]) && ["sides", "residual"].includes(panel.id)
      ? [`window of ${Plot.format(run.count[row])} steps`] : [];
    const horizon = run.forecast.after[row] !== null && panel.id === "loss"
      ? [`cooldown over ${Plot.format(run.forecast.horizon[row])} steps`] : [];
    return [where + time, ...curves, ...window, ...horizon];
  }

  function showTip(panel, row, layer, pageX, pageY) {
    const why = panel.id === "layers" ? null : run.reasons[row];
    tip.replaceChildren(...tipLines(panel, row, layer).map((text) => make("p", {}, text)),
      ...(why ? [make("p", { class: "why" }, why)] : []));
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const right = pageX + 16;
    tip.style.left = `${Math.max(4, right > room ? pageX - tip.offsetWidth - 16 : right)}px`;
    tip.style.top = `${pageY + 18}px`;
  }

  function zoomTo(domain) {
    state.zoom = domain;
    byId("reset").disabled = domain === null;
    for (const panel of panels) panel.draw();
  }

  function layerAt(panel, y) {
    if (panel.id !== "layers") return null;
    const r = Math.floor((y - MARGIN.top) / panel.size);
    return Math.max(0, Math.min(run.layers.names.length - 1, r));
  }

  function listen(panel) {
    let start = null;
    const place = (event) => {
      const box = panel.svg.getBoundingClientRect();
      const factor = panel.width / box.width;
      return [(event.clientX - box.left) * factor, (event.clientY - box.top) * factor];
    };
    const inside = (x) => Math.max(panel.left, Math.min(panel.width - MARGIN.right, x));
    panel.plot.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      const row = Plot.nearest(xValues(), panel.x.invert(inside(x)));
      const layer = layerAt(panel, y);
      select(row, layer);
      showTip(panel, row, layer, event.pageX, event.pageY);
      if (start !== null) {
        panel.drag.setAttribute("x", Math.min(start, inside(x)));
        panel.drag.setAttribute("width", Math.abs(inside(x) - start));
      }
    });
    panel.plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch" && event.button === 0) start = inside(place(event)[0]);
    });
    panel.plot.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const end = inside(place(event)[0]);
      const ends = [start, end].sort((a, b) => a - b).map(panel.x.invert);
      const moved = Math.abs(end - start) > 6;
      start = null;
      panel.drag.setAttribute("width", 0);
      if (moved) zoomTo(ends);
    });
    panel.plot.addEventListener("pointerleave", () => {
      start = null;
      panel.drag.setAttribute("width", 0);
      tip.hidden = true;
      select(null);
    });
    panel.plot.addEventListener("dblclick", () => zoomTo(null));
    panel.plot.addEventListener("keydown", (event) => onKey(panel, event));
  }

  function onKey(panel, event) {
    const last = run.x.step.length - 1;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    let row = state.row === null ? last : state.row;
    let layer = panel.id === "layers" ? state.layer || 0 : null;
    if (event.key in by) {
      row = state.row === null && event.key !== "Home" ? last
        : Math.max(0, Math.min(last, row + by[event.key]));
    } else if (layer !== null && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
      layer += event.key === "ArrowUp" ? -1 : 1;
      layer = Math.max(0, Math.min(run.layers.names.length - 1, layer));
    } else if (event.key === "Escape") {
      tip.hidden = true;
      select(null);
      zoomTo(null);
      return;
    } else {
      return;
    }
    event.preventDefault();
    select(row, layer);
    const box = panel.svg.getBoundingClientRect();
    const px = panel.x.map(xValues()[row]) * box.width / panel.width;
    const py = layer === null ? 40 : (MARGIN.top + layer * panel.size) * box.width / panel.width;
    showTip(panel, row, layer, box.left + window.scrollX + px, box.top + window.scrollY + py);
    if (layer !== null) {
      readout.textContent = tipLines(panel, row, layer).join(" · ");
    }
  }

  // Start -------------------------------------------------------------------------------------

  for (const axis of Object.keys(AXES)) {
    if (run.x[axis]) byId("axis").append(make("option", { value: axis }, AXES[axis]));
  }
  byId("axis").addEventListener("change", (event) => {
    state.axis = event.target.value;
    zoomTo(null);
  });
  byId("reset").addEventListener("click", () => zoomTo(null));
  curvePanels().forEach(addCurvePanel);
  if (run.layers) addLayers();
  byId("bar").hidden = false;
  let width = byId("panels").clientWidth;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (byId("panels").clientWidth === width) return;
    width = byId("panels").clientWidth;
    for (const panel of panels) panel.draw();
  })).observe(byId("panels"));
  for (const panel of panels) panel.draw();
  select(null);
  document.documentElement.dataset.drawn = panels.map((panel) => panel.id).join(" ");
})();
