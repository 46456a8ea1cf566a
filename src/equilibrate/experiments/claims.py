"""Each claim of the paper's text as a function of the records.

A claim is held to a bound by its 95 % interval over seeds: it holds where the interval lies inside
the bound, it fails where the interval lies outside, and where the interval straddles the bound the
runs at hand do not decide it. What a shortened protocol, or another data set, cannot refute or
confirm is said to be not tested at this scale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from equilibrate.experiments.profiles import PROFILES
from equilibrate.experiments.results import Array, Result, Tread
from equilibrate.experiments.statistics import Estimate, estimate

Verdict = Literal["holds", "fails", "not tested at this scale"]
Results = Mapping[str, Result]

MEETING = 0.05
RELAXED = 0.1
STRAIGHT = 0.2
VANISHING = 0.5


@dataclass(frozen=True)
class Claim:
    """What the paper says, what was measured, the bound it is held to and why, and the verdict."""

    id: str
    figure: str
    statement: str
    measured: float | None
    """None where nothing was measured."""
    error: float | None
    """Half the 95 % interval over seeds; None with fewer than two."""
    bound: str
    why: str
    verdict: Verdict
    remark: str


@dataclass(frozen=True)
class _Inside:
    """The interval from `low` to `high` in which the measured value is to lie."""

    low: float = -math.inf
    high: float = math.inf

    def decides(self, measured: Estimate) -> bool | None:
        """True: surely inside; False: surely outside; None: the interval straddles an end."""
        if math.isnan(measured.half_width):
            return None
        if measured.low > self.low and measured.high < self.high:
            return True
        if measured.high <= self.low or measured.low >= self.high:
            return False
        return None


@dataclass(frozen=True)
class _Finding:
    measured: Estimate
    inside: _Inside


@dataclass(frozen=True)
class _Statement:
    """A claim before it is measured.

    A `general` one is about any stationary SGD, so that any complete profile can test it; the
    others are about the paper's own data and models, trained for as long as there.
    """

    id: str
    figure: str
    statement: str
    runs: tuple[str, ...]
    bound: str
    why: str
    measure: Callable[..., _Finding | None]
    general: bool = False


def check(results: Results) -> list[Claim]:
    """Hold every claim to the records; one that lacks its runs is not tested."""
    ordered = sorted(_STATEMENTS, key=lambda s: (s.figure.startswith("S"), s.figure))
    return [_hold(statement, results) for statement in ordered]


def save(claims: list[Claim], path: Path | str) -> None:
    """Write a list of objects with the fields of `Claim`."""
    text = json.dumps([asdict(claim) for claim in claims], indent=1, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _hold(s: _Statement, results: Results) -> Claim:
    mine = [results[name] for name in s.runs if name in results and len(results[name].epoch)]
    # A general claim is about the task at hand, any other about the paper's own.
    own = mine[0].run.task if mine and s.general else PROFILES["paper"].runs[s.runs[0]].task
    statement = s.statement.format(title=own.title)

    def claim(finding: _Finding | None, verdict: Verdict, remark: str) -> Claim:
        measured = error = None
        if finding is not None:
            measured = _number(finding.measured.mean)
            error = _number(finding.measured.half_width)
        return Claim(s.id, s.figure, statement, measured, error, s.bound, s.why, verdict, remark)

    if len(mine) < len(s.runs):
        missing = set(s.runs) - {result.run.name for result in mine}
        remark = f"not run: {', '.join(sorted(missing))}"
        return claim(None, "not tested at this scale", remark)
    finding = s.measure(*mine)
    if finding is None or math.isnan(finding.measured.mean):
        return claim(None, "not tested at this scale", "the runs at hand do not reach it")
    decided = finding.inside.decides(finding.measured)
    elsewhere = {r.profile for r in mine} != {"paper"}
    short = [f"{r.run.name}: {r.shortfall}" for r in mine if not r.whole]
    if elsewhere and not s.general:
        remark = f"measured on {mine[0].run.task.data}; the claim is about the paper's own data"
        return claim(finding, "not tested at this scale", remark)
    if short and not (s.general and decided and all(r.finished for r in mine)):
        return claim(finding, "not tested at this scale", f"incomplete – {'; '.join(short)}")
    if decided is None:
        few = math.isnan(finding.measured.half_width)
        remark = "one seed gives no interval" if few else "the interval straddles the bound"
        return claim(finding, "not tested at this scale", remark)
    return claim(finding, "holds" if decided else "fails", "; ".join(short))


def _worst(estimates: list[Estimate], inside: _Inside) -> Estimate:
    """The one that is furthest out for sure or, where none is out, the one that comes nearest."""
    out = [e for e in estimates if inside.decides(e) is False]
    reach = {e: -e.half_width if out else np.nan_to_num(e.half_width) for e in out or estimates}
    return max(reach, key=lambda e: abs(e.mean) + reach[e])


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


# FDR1 -----------------------------------------------------------------------------------------


def _residual(tread: Tread) -> Array:
    return tread.last("left") / tread.last("right") - 1


def _meets(result: Result) -> _Finding | None:
    """L̄/R̄ − 1 at the end, at the learning rate where it is furthest from zero."""
    treads = [tread for tread in result.treads() if tread.finished]
    if not treads:
        return None
    inside = _Inside(-MEETING, MEETING)
    return _Finding(_worst([estimate(_residual(tread)) for tread in treads], inside), inside)


def meeting_times(tread: Tread) -> Array:
    """Epochs after which |L̄/R̄ − 1| < 0.1 for the rest of the tread; its length where never.

    >>> import types
    >>> sides = {"left": np.array([[3.0], [1.2], [1.05], [1.0]]), "right": np.ones((4, 1))}
    >>> tread = types.SimpleNamespace(time=np.arange(1.0, 5.0), column=sides.get)
    >>> meeting_times(tread)
    array([3.])
    """
    apart = ~(np.abs(tread.column("left") / tread.column("right") - 1) < RELAXED)
    rows = len(apart)
    last_apart = np.where(apart.any(0), rows - 1 - np.argmax(apart[::-1], axis=0), -1)
    return tread.time[np.minimum(last_apart + 1, rows - 1)]


def _slows(result: Result) -> _Finding | None:
    """The slope of log(meeting time) against log η, fitted for each seed."""
    treads = [tread for tread in result.treads() if tread.finished]
    if len(treads) < 2:
        return None
    lrs = np.log([tread.lr for tread in treads])
    times = np.log([meeting_times(tread) for tread in treads])
    return _Finding(estimate(np.polyfit(lrs, times, 1)[0]), _Inside(high=0.0))


# FDR2 -----------------------------------------------------------------------------------------


def _landscape(result: Result) -> tuple[Array, Array]:
    """Learning rates from small to large, and O_FB of shape (learning rates, seeds)."""
    treads = sorted((t for t in result.treads() if t.finished), key=lambda t: t.lr)
    return np.array([t.lr for t in treads]), np.array([t.last("landscape") for t in treads])


def _quotient(above: Estimate, below: Estimate) -> Estimate:
    """Relative errors add in squares: the two were measured one after the other."""
    ratio = above.mean / below.mean
    relative = math.hypot(above.half_width / above.mean, below.half_width / below.mean)
    return Estimate(ratio, abs(ratio) * relative)


def _vanishes(result: Result) -> _Finding | None:
    """What is left of O_FB at the smallest learning rate, of that at the largest."""
    lrs, values = _landscape(result)
    if len(lrs) < 2:
        return None
    left = _quotient(estimate(values[0]), estimate(values[-1]))
    return _Finding(left, _Inside(high=VANISHING))


def _departures(result: Result, largest: float) -> list[Estimate]:
    """How far O_FB/η is from its value at the smallest η, for each further η up to `largest`."""
    lrs, values = _landscape(result)
    small = lrs <= largest * (1 + 1e-9)
    per_lr = values[small] / lrs[small, None]
    if len(per_lr) < 2:
        return []
    origin = estimate(per_lr[0])
    quotients = [_quotient(estimate(row), origin) for row in per_lr[1:]]
    return [Estimate(q.mean - 1, q.half_width) for q in quotients]


def _linear_below(largest: float) -> Callable[[Result], _Finding | None]:
    def measure(result: Result) -> _Finding | None:
        inside = _Inside(-STRAIGHT, STRAIGHT)
        found = _departures(result, largest)
        return _Finding(_worst(found, inside), inside) if found else None

    return measure


def _bent_at(lr: float) -> Callable[[Result], _Finding | None]:
    def measure(result: Result) -> _Finding | None:
        found = _departures(result, lr)
        if not found:
            return None
        size = Estimate(abs(found[-1].mean), found[-1].half_width)
        return _Finding(size, _Inside(low=STRAIGHT))

    return measure


# Schedules ------------------------------------------------------------------------------------


def _accuracy(result: Result, arm: str, part: slice) -> Array:
    """Test accuracy of each seed, averaged over a part of the epochs."""
    _, values = result.measured("test_accuracy", arm)
    count = len(values)
    start = round((part.start or 0.0) * (count - 1))
    stop = max(1, round((part.stop or 1.0) * count))
    return values[start:stop].mean(0) if count else np.array([])


_END = slice(0.95, None)
_BEGINNING = slice(None, 0.125)


def _difference(
    first: tuple[int, str], second: tuple[int, str], part: slice, inside: _Inside | None
) -> Callable[..., _Finding | None]:
    """Accuracy of one arm less that of another, paired by initial seed.

    With no interval given, they are to be no further apart than the test images can tell.
    """

    def measure(*results: Result) -> _Finding | None:
        a = _accuracy(results[first[0]], first[1], part)
        b = _accuracy(results[second[0]], second[1], part)
        n = min(len(a), len(b))
        return _Finding(estimate(a[:n] - b[:n]), inside or _within_noise(float(b.mean())))

    return measure


def _within_noise(accuracy: float, images: int = 10_000) -> _Inside:
    """Twice the sampling error of a difference of two accuracies on the paper's test images."""
    width = 2 * math.sqrt(2 * accuracy * (1 - accuracy) / images)
    return _Inside(-width, width)


_ABOVE, _BELOW = _Inside(low=0.0), _Inside(high=0.0)
_SIGN = "The paper ranks the two and gives no numbers, so only the sign of the difference is held."


def _about(task: str) -> list[_Statement]:
    """The claims that the paper makes of both tasks."""
    letter = {"mlp": "a", "cnn": "b"}[task]
    schedules, amsgrad, adam = f"{task}-schedules", f"{task}-amsgrad", f"{task}-adam"
    return [
        _Statement(
            f"initial-meet-{task}",
            f"1{letter}",
            "{title}: L̄ and R̄ converge to each other in the initial run at η = 0.1.",
            (f"{task}-initial",),
            f"|L̄/R̄ − 1| < {MEETING:g} at the end",
            "The paper shows curves that coincide; on its axes 5 % is about a line's width.",
            _meets,
            general=True,
        ),
        _Statement(
            f"sequence-meet-{task}",
            f"2{letter}",
            "{title}: L̄ and R̄ agree at sufficiently long times at every η of the sequence.",
            (f"{task}-sequence",),
            f"|L̄/R̄ − 1| < {MEETING:g} at the end, at the η where it is largest",
            "The paper shows curves that coincide; on its axes 5 % is about a line's width.",
            _meets,
            general=True,
        ),
        _Statement(
            f"sequence-slows-{task}",
            f"2{letter}",
            "{title}: the smaller the learning rate, the longer it takes to equilibrate.",
            (f"{task}-sequence",),
            "d log(time until |L̄/R̄ − 1| stays below 0.1) / d log η < 0",
            "The paper claims the direction only; a relaxation time 1/(ηλ) would give −1.",
            _slows,
            general=True,
        ),
        _Statement(
            f"landscape-vanishes-{task}",
            f"3{letter}",
            "{title}: O_FB approaches zero as the learning rate does.",
            (f"{task}-sequence",),
            f"O_FB at the smallest η / O_FB at the largest η < {VANISHING:g}",
            "FDR2 has a right side of order η, and the largest η is at least five times the least.",
            _vanishes,
            general=True,
        ),
        _Statement(
            f"adaptive-like-preset-{task}",
            f"4{letter}",
            "{title}: the adaptive schedule attains an accuracy comparable to the preset one.",
            (schedules,),
            "|final test accuracy, adaptive − preset| < 2 √(2p(1−p)/10000)",
            "Two sampling errors of a difference on 10000 test images: closer is comparable.",
            _difference((0, "adaptive"), (0, "preset"), _END, None),
        ),
        _Statement(
            f"adaptive-beats-amsgrad-{task}",
            f"4{letter}",
            "{title}: the adaptive schedule outperforms AMSGrad in the end.",
            (schedules, amsgrad),
            "final test accuracy, adaptive − AMSGrad > 0",
            _SIGN,
            _difference((0, "adaptive"), (1, "amsgrad"), _END, _ABOVE),
        ),
        _Statement(
            f"amsgrad-beats-adam-{task}",
            f"S1{letter}",
            "{title}: AMSGrad marginally outperforms Adam.",
            (amsgrad, adam),
            "final test accuracy, AMSGrad − Adam > 0",
            _SIGN,
            _difference((0, "amsgrad"), (1, "adam"), _END, _ABOVE),
        ),
    ]


_STATEMENTS: tuple[_Statement, ...] = (
    *_about("mlp"),
    *_about("cnn"),
    _Statement(
        "landscape-linear-mlp",
        "3a",
        "{title}: O_FB is linear in the learning rate for η ≲ 0.01.",
        ("mlp-sequence",),
        f"|(O_FB/η) / (O_FB/η at the smallest η) − 1| < {STRAIGHT:g} for η ≤ 0.01",
        "The paper judges by eye against the red line; 20 % off it would be seen.",
        _linear_below(0.01),
    ),
    _Statement(
        "landscape-bent-cnn",
        "3b",
        "{title}: anharmonicity is pronounced even down to η ∼ 0.001.",
        ("cnn-sequence",),
        f"|(O_FB/η) / (O_FB/η at the smallest η) − 1| > {STRAIGHT:g} at η = 0.001",
        "The same 20 % off the red line that the MLP is held to.",
        _bent_at(0.001),
    ),
    _Statement(
        "adaptive-lags-cnn",
        "4b",
        "{title}: the adaptive schedule gains accuracy more slowly than AMSGrad at first.",
        ("cnn-schedules", "cnn-amsgrad"),
        "test accuracy over the first eighth of the epochs, adaptive − AMSGrad < 0",
        _SIGN,
        _difference((0, "adaptive"), (1, "amsgrad"), _BEGINNING, _BELOW),
    ),
    _Statement(
        "eager-faster-cnn",
        "S2",
        "{title}: X = 0.1, Y = 0.3 gains accuracy faster at first than X = 0.01, Y = 0.1.",
        ("cnn-schedules",),
        "test accuracy over the first eighth of the epochs, eager − adaptive > 0",
        _SIGN,
        _difference((0, "eager"), (0, "adaptive"), _BEGINNING, _ABOVE),
    ),
    _Statement(
        "eager-ends-lower-cnn",
        "S2",
        "{title}: X = 0.1, Y = 0.3 ends at a lower accuracy than X = 0.01, Y = 0.1.",
        ("cnn-schedules",),
        "final test accuracy, eager − adaptive < 0",
        _SIGN,
        _difference((0, "eager"), (0, "adaptive"), _END, _BELOW),
    ),
)
