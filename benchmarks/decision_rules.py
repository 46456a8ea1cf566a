"""Rules that `decisions.py` compares: functions from a run to the check at which each acts first.

To add a rule, write a function that takes a `Run` and returns an array with one integer for each
repetition: the index of the end of the epoch at which the rule acts first, or −1. It may use what
the run holds up to that epoch. Add it to `rules()` with a name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from decision_processes import Array, Run, stride
from equilibrate.rules import Stationary
from numpy.typing import NDArray

from equilibrate.estimates import student_quantile
from equilibrate.stationarity import assess

Fired = NDArray[np.int64]
RuleFunction = Callable[[Run], Fired]
SLOW = 60
"""Repetitions for rules of other packages, which take one series at a time."""


def rules() -> dict[str, RuleFunction]:
    """Return all rules by name; those of packages that are not installed are left out."""
    found: dict[str, RuleFunction] = {
        "lagging centre": lagging_centre,
        "threshold 0.01": partial(threshold, bound=0.01),
        "threshold 0.1": partial(threshold, bound=0.1),
        "SASA+, as shipped (i.i.d.)": partial(sasa, overlapping=False),
        "SASA+, overlapping batch means": partial(sasa, overlapping=True),
        "ReduceLROnPlateau": plateau,
        "ABEL": abel,
        "Pflug": pflug,
        "distance (Pesme et al.)": distance,
    }
    if importlib.util.find_spec("pymbar"):
        found["pymbar detect_equilibration"] = pymbar
    if importlib.util.find_spec("red"):
        found["MSER (red)"] = mser
    return found


def missing() -> list[str]:
    """Return the optional packages that are not installed."""
    names = {"pymbar": "pymbar", "red": "red-molsim", "statopt": "statopt"}
    return [package for module, package in names.items() if not importlib.util.find_spec(module)]


def first(acts: NDArray[np.bool_]) -> Fired:
    """Return the first epoch at which a rule acts, −1 if it never does."""
    return np.where(acts.any(1), acts.argmax(1), -1)


def stationary(run: Run, rule: Stationary) -> Fired:
    """`rules.Stationary` on the trace that a monitor would hold."""
    return several(run, [rule])[0]


def several(run: Run, settings: Sequence[Stationary]) -> list[Fired]:
    """Return what `stationary` does for settings of equal persistence, assessed together."""
    fired = np.full((len(settings), len(run.norm)), -1)
    for epoch in range(1, len(run.epochs)):
        step = int(run.epochs[epoch])
        rows = np.flatnonzero((fired < 0).any(0))
        if not len(rows):
            break
        late = step > 25 * run.process.relaxation and epoch % 2  # look less often
        if late or epoch // stride(epoch) <= settings[0].shortest:
            continue
        acts = fired < 0
        x, _ = run.trace(epoch, rows)
        for end in settings[0].moments(x.shape[1] - 1):
            found = assess(x[:, : end + 1])
            for rule, mine in zip(settings, acts, strict=True):
                mine[rows] &= rule.holds(found)
            left = acts[:, rows].any(0)
            rows, x = rows[left], x[left]
            if not len(rows):
                break
        kept = np.zeros(acts.shape[1], bool)
        kept[rows] = True
        fired[acts & kept] = epoch
    return list(fired)


def diffusing(run: Run, rule: Stationary) -> float:
    """Return the share of runs in which the rule reports diffusion or drift at the end."""
    rows = np.arange(len(run.norm))
    x, _ = run.trace(len(run.epochs) - 1, rows)
    found = assess(x)
    return float(rule.is_diffusing(found).mean())


def lagging_centre(run: Run, bound: float = 0.2, persistence: float = 1.2) -> Fired:
    """|r| + se < 0.2 with the mean of the second quarter as centre, held for 1.2 times as long."""
    fired, since = np.full(len(run.norm), -1), np.full(len(run.norm), np.inf)
    for epoch in range(1, len(run.epochs)):
        waiting = np.flatnonzero(fired < 0)
        if not len(waiting):
            break
        x, v = run.trace(epoch, waiting)
        n = x.shape[1] - 1
        if n < 8:
            continue
        centre = x[:, n // 4 + 1 : n // 2 + 1].mean(1, keepdims=True)
        squares = ((x[:, n // 2 :] - centre) ** 2).sum(2)
        total = v[:, -1] - v[:, n // 2]
        size = np.abs(squares[:, -1] - squares[:, 0]) + np.sqrt(2) * squares.std(1)
        step = float(run.epochs[epoch])
        since[waiting] = np.where(size < bound * total, np.minimum(since[waiting], step), np.inf)
        fired[waiting[step >= persistence * since[waiting]]] = epoch
    return fired


def threshold(run: Run, bound: float) -> Fired:
    """The paper's rule: |L̄/R̄ − 1| below a threshold over the later half of the steps."""
    acts = np.zeros_like(run.norm, bool)
    for epoch in range(2, len(run.epochs)):
        half = epoch // 2
        difference = run.potential[:, half] - run.potential[:, epoch]
        acts[:, epoch] = np.abs(difference) < bound * (run.right[:, epoch] - run.right[:, half])
    return first(acts)


def sasa(run: Run, *, overlapping: bool, least: int = 100, significance: float = 0.05) -> Fired:
    """SASA+'s test of zero mean difference over the later half, with its two half tests.

    `least` is the smallest number of samples that the package accepts.
    """
    acts = np.zeros_like(run.norm, bool)
    sums = np.concatenate(
        [np.zeros((len(run.norm), 1)), np.cumsum(run.differences, 1, dtype=np.float64)], 1
    )
    squares = np.concatenate(
        [np.zeros((len(run.norm), 1)), np.cumsum(run.differences.astype(np.float64) ** 2, 1)], 1
    )
    for epoch in range(1, len(run.epochs)):
        end = int(run.epochs[epoch])
        count = end // 2
        begin = end - count
        if count <= least:
            continue
        mean = (sums[:, end] - sums[:, begin]) / count
        if overlapping:
            size = int(np.sqrt(count))
            means = (sums[:, begin + size : end + 1] - sums[:, begin : end + 1 - size]) / size
            parts = means.shape[1]
            spread = np.sqrt(size * count / (parts * (parts - 1)))
            deviation = spread * np.sqrt(((means - mean[:, None]) ** 2).sum(1))
            degrees = count - size
        else:
            variance = (squares[:, end] - squares[:, begin]) / count - mean**2
            deviation, degrees = np.sqrt(variance * count / (count - 1)), count - 1
        width = deviation * student_quantile(1 - significance, degrees) / np.sqrt(count)
        middle = begin + count // 2
        one = (sums[:, middle] - sums[:, begin]) / (middle - begin)
        two = (sums[:, end] - sums[:, middle]) / (end - middle)
        acts[:, epoch] = (np.abs(one) < width) & (np.abs(two) < width) & (one * two > 0)
    return first(acts)


def plateau(run: Run, patience: int = 10, tolerance: float = 1e-4) -> Fired:
    """`ReduceLROnPlateau` with its defaults, on the mean training loss of each epoch."""
    best, bad = np.full(len(run.norm), np.inf), np.zeros(len(run.norm), int)
    fired = np.full(len(run.norm), -1)
    for epoch in range(1, len(run.epochs)):
        better = run.loss[:, epoch] < best * (1 - tolerance)
        best = np.where(better, run.loss[:, epoch], best)
        bad = np.where(better, 0, bad + 1)
        fired[(fired < 0) & (bad > patience)] = epoch
    return fired


def abel(run: Run) -> Fired:
    """ABEL: lower when the weight norm has turned around twice."""
    change = np.sign(np.diff(run.norm, axis=1))
    turns = np.cumsum(change[:, 1:] * change[:, :-1] < 0, axis=1)
    return np.where((found := first(turns >= 2)) >= 0, found + 2, -1)


def pflug(run: Run, burn: int = 2) -> Fired:
    """Pflug's statistic: lower when the sum of g_t·g_{t+1} has become negative."""
    acts = run.inner < 0
    acts[:, :burn] = False
    return first(acts)


def distance(run: Run, ratio: float = 1.5, bound: float = 0.6, burn: int = 8) -> Fired:
    """Pesme et al.: the distance from the start grows more slowly than a power of the steps."""
    acts = np.zeros_like(run.norm, bool)
    before, epoch = 1, 2.0
    while epoch < len(run.epochs):
        now = int(epoch)
        if now > before:
            growth = np.log(run.moved[:, now] / run.moved[:, before])
            slope = growth / np.log(run.epochs[now] / run.epochs[before])
            acts[:, now] = (slope < bound) & (now >= burn // 2)
            before = now
        epoch *= ratio
    return first(acts)


def _on_series(run: Run, start: Callable[[Array], tuple[int, float]]) -> Fired:
    """Act when a detector places the start of equilibrium in the first half of the losses."""
    fired = np.full(SLOW, -1)
    for i in range(SLOW):
        for epoch in range(8, len(run.epochs), 4):
            begun, samples = start(run.loss[i, 1 : epoch + 1])
            if begun <= epoch / 2 and samples >= 5:
                fired[i] = epoch
                break
    return fired


def pymbar(run: Run) -> Fired:
    """`pymbar.timeseries.detect_equilibration`, with at least 5 independent samples after it."""
    from pymbar.timeseries import detect_equilibration  # pyright: ignore[reportMissingImports]

    def start(losses: Array) -> tuple[int, float]:
        begun, _, samples = detect_equilibration(losses, nskip=2)
        return int(begun), float(samples)

    return _on_series(run, start)


def mser(run: Run) -> Fired:
    """MSER as in `red`: the truncation that minimises the squared standard error."""
    from red import detect_equilibration_window  # pyright: ignore[reportMissingImports]

    def start(losses: Array) -> tuple[int, float]:
        index, _, samples = detect_equilibration_window(
            losses, method="min_sse", window_size_fn=None, window_size=1
        )
        return int(index), float(samples)

    return _on_series(run, start)
