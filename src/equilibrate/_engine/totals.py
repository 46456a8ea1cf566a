"""From the rows of a window to both sides of FDR1 with their error bar, over all processes.

The error bar needs the series of Σ(L − R), whose sum over all processes, devices and parameters is
the change of one potential. So each probe merges its rows into 64 at first, between times that are
the same fractions of every window, and these are added up like all other sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equilibrate._engine.probe import Probe
from equilibrate._engine.sharding import Layout
from equilibrate.telescoped import INTERVALS, Floats, spread, times

_TIMES = times()


class Totals(NamedTuple):
    """The averages of one probe, for each series that it keeps, and how they came about."""

    left: list[float]
    """Mean of the left side."""
    right: list[float]
    """Mean of the right side."""
    steps: float
    """Steps in the window."""
    potential: Floats
    """−Σ(L − R)/steps from the window's start to each of the times, of shape (times, series)."""
    positions: Floats
    """Steps from the window's start to each of the times."""
    sums: Tensor
    """All sums over the window."""
    samples: Tensor | None
    """Samples of each parameter, from which scale-invariant ones are recognised, if taken."""


class Sides(NamedTuple):
    """Both sides of FDR1 for some part of a model."""

    steps: float
    left: float
    right: float
    stderr: float
    """Standard error of left/right − 1; nan if there are too few measurements."""
    margin: float
    """Half the width of its 95 % confidence interval."""


def take(probes: Sequence[Probe], layout: Layout, samples: Sequence[Tensor] = ()) -> list[Totals]:
    """Return the averages of each probe over all processes, which all must call it.

    Args:
        probes: The probes.
        layout: How parameters are distributed over processes.
        samples: This process's samples of each probe (`Alignments.sums`), if any are taken.
    """
    rows = [probe.rows() for probe in probes]
    parts = [
        *(each.sum(0) for each in rows),
        *(merged(each, probe.series) for each, probe in zip(rows, probes, strict=True)),
        *samples,
    ]
    totals, n = layout.total(parts), len(probes)
    taken = totals[2 * n :] or [None] * n
    return [
        _averaged(*each, layout.processes)
        for each in zip(probes, totals[:n], totals[n : 2 * n], taken, strict=True)
    ]


def together(parts: Sequence[Totals]) -> Sides:
    """Return the sides of several probes as one: both sides and potentials are additive."""
    left = right = steps = 0.0
    for part in parts:
        left += sum(part.left)
        right += sum(part.right)
        steps = max(steps, part.steps)
    potential = sum((part.potential.sum(1) for part in parts), np.zeros(INTERVALS + 1))
    positions = sum((part.positions for part in parts), np.zeros(INTERVALS + 1))
    return _sides(steps, [left], [right], potential[:, None], positions)[0]


def apart(part: Totals) -> list[Sides]:
    """Return the sides of each series of a probe."""
    return _sides(part.steps, part.left, part.right, part.potential, part.positions)


def merged(rows: Tensor, series: int) -> Tensor:
    """Merge rows into 64, which end where a row does that is nearest to each of `times`.

    Args:
        rows: Rows of a window, with Σ(L − R) of each series in front and the steps in the last
            column but one.
        series: Number of series.

    Returns:
        Σ(L − R) of each series and the steps, of shape (64, series + 1). Some are zero if there
        are fewer rows.
    """
    if not len(rows):
        return rows.new_zeros(INTERVALS, series + 1)
    ends = np.concatenate([[0.0], rows[:, -2].cumsum(0).cpu().numpy()])
    bounds = _nearest(ends, _TIMES * ends[-1])
    bounds[0], bounds[-1] = 0, len(rows)
    members = torch.from_numpy(np.diff(bounds)).to(rows.device)
    columns = torch.cat([rows[:, :series], rows[:, -2:-1]], dim=1)
    return torch.segment_reduce(columns, "sum", lengths=members, axis=0, unsafe=True)


def _nearest(ends: Floats, wanted: Floats) -> np.ndarray:
    """Return for each number the index of the nearest end."""
    above = np.searchsorted(ends, wanted).clip(1, len(ends) - 1)
    return above - (wanted - ends[above - 1] < ends[above] - wanted)


def _averaged(
    probe: Probe, total: Tensor, merged_rows: Tensor, samples: Tensor | None, processes: int
) -> Totals:
    *sides, steps = probe.means(total).tolist()
    changes = merged_rows.numpy()
    path = np.concatenate([np.zeros((1, changes.shape[1])), np.cumsum(changes, axis=0)])
    with np.errstate(invalid="ignore", divide="ignore"):  # no step, or a gradient not finite
        potential = -path[:, :-1] / steps
    left, right = sides[: probe.series], sides[probe.series :]
    return Totals(left, right, steps, potential, path[:, -1] / processes, total, samples)


def _sides(
    steps: float,
    lefts: Sequence[float],
    rights: Sequence[float],
    potential: Floats,
    positions: Floats,
) -> list[Sides]:
    deviations, margins = spread(potential, positions)
    numbers = zip(lefts, rights, deviations.tolist(), margins.tolist(), strict=True)
    return [
        Sides(steps, left, right, *(_over(size, right) for size in sizes))
        for left, right, *sizes in numbers
    ]


def _over(size: float, right: float) -> float:
    """Return an error of left − right as one of left/right − 1; nan where that is undefined."""
    return size / abs(right) if right and math.isfinite(right) else math.nan
