"""From the rows of a window to both sides of FDR1 with their error bar, over all processes.

The error bar needs the series of Σ(L − R), whose sum over all processes, devices and parameters is
the change of one potential. So each probe merges its rows into 64 at first, between times that are
the same fractions of every window, and these are added up like all other sums.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equilibrate._engine.relation.alignment import alignments
from equilibrate._engine.relation.probe import Probe
from equilibrate._engine.sharding import Layout
from equilibrate.scale_invariance import is_scale_invariant
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
    norms: list[float]
    """⟨N⟩ of each parameter; empty if only their total is kept."""
    relative_steps: list[float]
    """√(⟨Δ²⟩/⟨N⟩) of each parameter, nan if it has not moved; empty like `norms`."""
    alignments: list[tuple[float, int]]
    """Root mean square of z of each parameter and its samples; empty like `norms`."""


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
        layout: How their parameters are distributed over processes.
        samples: What `Alignments.sums` returns.
    """
    parts: list[Tensor] = []
    for probe in probes:
        rows = probe.ring.rows()
        parts += [rows.sum(0), merged(rows, probe.ring.series)]
    totals = layout.total([*parts, *samples])
    both, sampled = totals[: len(parts)], totals[len(parts) :]
    return [
        _averaged(probe, total, changes.numpy(), layout.processes, sampled[i : i + 1])
        for i, (probe, total, changes) in enumerate(zip(probes, both[::2], both[1::2], strict=True))
    ]


def others_alone(parts: Sequence[Totals]) -> list[Totals]:
    """Return the averages without those of scale-invariant parameters.

    It warns if there are no other parameters; the sides are nan then.

    Args:
        parts: The averages, with norms.
    """
    kept = [[not is_scale_invariant(*each) for each in part.alignments] for part in parts]
    nothing = 0.0
    if not any(map(any, kept)):
        warnings.warn(
            "every parameter was found to be scale-invariant, so that nothing is left to read: "
            "pass scale_invariant=True to read the balance of norms and weight decay",
            stacklevel=4,
        )
        nothing = math.nan
    return [
        part._replace(
            left=[side if keep else nothing for side, keep in zip(part.left, keeps, strict=True)],
            right=[side if keep else nothing for side, keep in zip(part.right, keeps, strict=True)],
            potential=np.where(keeps, part.potential, 0.0),
        )
        for part, keeps in zip(parts, kept, strict=True)
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
    probe: Probe, total: Tensor, changes: Floats, processes: int, samples: Sequence[Tensor]
) -> Totals:
    series = probe.ring.series
    # Steps are counted by every process, and added up with the rest.
    steps, sampled = (total[-2:] / processes).tolist()
    difference, right, *norms = total[:-2].unflatten(0, (-1, series))
    right = right / sampled
    path = np.concatenate([np.zeros((1, changes.shape[1])), np.cumsum(changes, axis=0)])
    with np.errstate(invalid="ignore", divide="ignore"):  # no step, or a gradient not finite
        potential = -path[:, :-1] / steps
    norm = norms[0] / sampled if norms else right[:0]
    return Totals(
        (right + difference / steps).tolist(),
        right.tolist(),
        steps,
        potential,
        path[:, -1] / processes,
        norm.tolist(),
        # The learning rate is taken as constant within the window.
        (probe.squared_step() * right[: len(norm)] / norm).sqrt().tolist(),
        alignments(samples[0]) if samples else [],
    )


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
