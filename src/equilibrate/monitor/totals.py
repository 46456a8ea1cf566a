"""From the rows of all ledgers to readings, with one sum over the processes.

The error bar needs the series of Σ η(L − R), whose sum over all processes, devices and parameters
is the change of one potential. So each ledger merges its rows into 64 at first, between times that
are the same fractions of every window, and these are added up like all other sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equilibrate.monitor.ledger import Ledger
from equilibrate.readings import Reading
from equilibrate.telescoped import INTERVALS, Floats, spread, times
from equilibrate.watching.sharding import Layout

_TIMES = times()


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """The averages of each tensor of one bucket over a window, and how they came about."""

    group: int
    """Index of the parameter group."""
    lr: float
    """Its learning rate at the last measured step."""
    left: Floats
    """Mean of the left side of each tensor."""
    right: Floats
    """Mean of the right side of each tensor."""
    norms: Floats
    """⟨N⟩ of each tensor."""
    relative_steps: Floats
    """√(⟨Δ²⟩/⟨N⟩) of each tensor; nan if no step was measured."""
    steps: float
    """Steps in the window."""
    potential: Floats
    """−Σ η(L − R)/Ση from the window's start to each of the times, of shape (times, tensors)."""
    positions: Floats
    """Steps from the window's start to each of the times."""

    def select(self, chosen: Sequence[bool]) -> Totals:
        """Return the averages of some of the tensors."""
        keep = np.array(chosen, dtype=bool)
        columns = {name: getattr(self, name)[keep] for name in _PER_TENSOR}
        return Totals(
            self.group,
            self.lr,
            steps=self.steps,
            potential=self.potential[:, keep],
            positions=self.positions,
            **columns,
        )


_PER_TENSOR = ("left", "right", "norms", "relative_steps")


def total(
    ledgers: Sequence[Ledger], layout: Layout, lrs: Sequence[float], more: Sequence[Tensor] = ()
) -> tuple[list[Totals], list[Tensor]]:
    """Return the averages of each ledger over all processes, which all must call it.

    Args:
        ledgers: The ledgers.
        layout: How their parameters are distributed over processes.
        lrs: Learning rate of each parameter group.
        more: Other tensors to add up over processes, in the same collective.

    Returns:
        The averages, and the totals of the other tensors.
    """
    parts: list[Tensor] = []
    for ledger in ledgers:
        rows = ledger.rows()
        parts += [rows.sum(0), _merged(rows, ledger.series)]
    sums = layout.total([*parts, *more])
    pairs = zip(sums[: len(parts) : 2], sums[1 : len(parts) : 2], strict=True)
    found = [
        _averaged(ledger, row.numpy(), changes.numpy(), layout.processes, lrs)
        for ledger, (row, changes) in zip(ledgers, pairs, strict=True)
    ]
    return found, sums[len(parts) :]


def combine(step: int, parts: Sequence[Totals]) -> Reading:
    """Return the reading of several buckets together: sides and potentials are additive."""
    lrs = {part.lr for part in parts}
    left, right = (sum(float(getattr(p, side).sum()) for p in parts) for side in ("left", "right"))
    nothing = np.zeros(INTERVALS + 1)
    potential = sum((part.potential.sum(1) for part in parts), nothing)
    positions = sum((part.positions for part in parts), nothing)
    steps = max((part.steps for part in parts), default=0.0)
    lr = lrs.pop() if len(lrs) == 1 else math.nan
    return _readings(step, steps, lr, [left], [right], potential[:, None], positions)[0]


def separate(step: int, part: Totals) -> list[Reading]:
    """Return the reading of each tensor of a bucket."""
    sides = part.left.tolist(), part.right.tolist()
    return _readings(step, part.steps, part.lr, *sides, part.potential, part.positions)


def _merged(rows: Tensor, series: int) -> Tensor:
    """Merge rows into 64, which end where a row does that is nearest to each of the times.

    Returns:
        Σ η(L − R) of each tensor and the steps, of shape (64, tensors + 1). Some are zero if there
        are fewer rows.
    """
    if not len(rows):
        return rows.new_zeros(INTERVALS, series + 1)
    ends = np.concatenate([[0.0], rows[:, -3].cumsum(0).cpu().numpy()])
    wanted = _TIMES * ends[-1]
    above = np.searchsorted(ends, wanted).clip(1, len(ends) - 1)
    bounds = above - (wanted - ends[above - 1] < ends[above] - wanted)
    bounds[0], bounds[-1] = 0, len(rows)
    members = torch.from_numpy(np.diff(bounds)).to(rows.device)
    columns = torch.cat([rows[:, :series], rows[:, -3:-2]], dim=1)
    return torch.segment_reduce(columns, "sum", lengths=members, axis=0, unsafe=True)


def _averaged(
    ledger: Ledger, row: Floats, changes: Floats, processes: int, lrs: Sequence[float]
) -> Totals:
    # Steps and weights are counted by every process, and added up with the rest.
    steps, weight, sampled = (row[-3:] / processes).tolist()
    difference, squares, norms = row[:-3].reshape(3, ledger.series)
    path = np.concatenate([np.zeros((1, changes.shape[1])), np.cumsum(changes, axis=0)])
    with np.errstate(invalid="ignore", divide="ignore"):  # no step, or a gradient not finite
        right = squares / sampled if sampled or not steps else squares
        drift = difference / weight if weight or not steps else difference
        norm = norms / sampled
        relative = np.sqrt(ledger.squared_step() * right / norm)
        potential = -path[:, :-1] / (weight if weight or not steps else 1.0)
    group = ledger.bucket.group
    return Totals(
        group, lrs[group], right + drift, right, norm, relative, steps, potential,
        path[:, -1] / processes,
    )  # fmt: skip


def _readings(
    step: int,
    steps: float,
    lr: float,
    lefts: Sequence[float],
    rights: Sequence[float],
    potential: Floats,
    positions: Floats,
) -> list[Reading]:
    deviations, margins = spread(potential, positions)
    numbers = zip(lefts, rights, deviations.tolist(), margins.tolist(), strict=True)
    return [
        Reading(step, round(steps), left, right, lr, _over(deviation, right), _over(margin, right))
        for left, right, deviation, margin in numbers
    ]


def _over(size: float, right: float) -> float:
    """Return an error of left − right as one of left/right − 1; nan where that is undefined."""
    return size / abs(right) if right and math.isfinite(right) else math.nan
