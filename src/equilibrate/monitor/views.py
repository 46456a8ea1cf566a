"""The whole model, its groups and its layers: views of what a monitor reads at one moment."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from equilibrate.monitor.layers import Layer, LayerTable, norm_balance
from equilibrate.monitor.totals import Totals, combine, separate
from equilibrate.monitor.updates import steps_as_sgd
from equilibrate.monitor.weight_decay import angular_step_of, weight_decay_of
from equilibrate.readings import Reading
from equilibrate.scale_invariance import Rotation, is_scale_invariant

if TYPE_CHECKING:
    from equilibrate.monitor.monitor import Monitor


@dataclass(frozen=True, eq=False)
class Readings:
    """What a monitor reads at one moment: the whole model, its groups and its layers."""

    monitor: Monitor
    step: int
    """Number of steps so far, without those that gradient scaling has skipped."""
    parts: tuple[Totals, ...]
    """Averages of each tensor of each bucket."""
    alignments: tuple[list[tuple[float, int]], ...]
    """Alignment of each tensor, and its samples; empty if they are not measured."""

    @cached_property
    def whole(self) -> Reading:
        """FDR1 for the whole model, or for those weights that are not scale-invariant."""
        parts: Sequence[Totals] = self.parts
        if not self.monitor.scale_invariant:
            kept = [[not is_scale_invariant(*each) for each in part] for part in self.alignments]
            if not any(map(any, kept)):
                warnings.warn(
                    "every parameter was found to be scale-invariant, so that nothing is left to "
                    "read: pass scale_invariant=True to read the balance of norms and weight decay",
                    stacklevel=4,
                )
                return Reading(self.step, 0, math.nan, math.nan, math.nan)
            parts = [part.select(keep) for part, keep in zip(parts, kept, strict=True)]
        reading = combine(self.step, parts)
        if reading.count and reading.right <= self._rounding_floor():
            # Full batches, or interpolation: the difference of two rounding errors tells nothing.
            return replace(reading, left=0.0, right=0.0, stderr=math.nan, margin=math.nan)
        return reading

    @cached_property
    def groups(self) -> dict[str, Reading]:
        """FDR1 for each parameter group."""
        count = len(self.monitor.optimizer.param_groups)
        return {
            f"group {i}": combine(self.step, [part for part in self.parts if part.group == i])
            for i in range(count)
        }

    def layers(self, threshold: float = 0.01, budget: float = math.inf) -> LayerTable:
        """Return a table of the layers; see `Monitor.layers`."""
        names, optimizer = self.monitor._labels(), self.monitor.optimizer
        found: dict[int, Layer] = {}
        rows = zip(self.monitor._ledgers, self.parts, self.alignments, strict=True)
        for ledger, part, aligned in rows:
            group = optimizer.param_groups[part.group]
            equilibrium = angular_step_of(optimizer, group, part.lr)
            relaxation = weight_decay_of(optimizer, group).relaxation
            readings = separate(self.step, part)
            for i, p in enumerate(ledger.bucket.params):
                known = math.isfinite(equilibrium)
                decay = group["weight_decay"] * float(part.norms[i]) if known else math.nan
                free = steps_as_sgd(type(optimizer)) and not is_scale_invariant(*aligned[i])
                rotation = Rotation(
                    *aligned[i],
                    angular_step=float(part.relative_steps[i]),
                    equilibrium=equilibrium,
                    decay=decay,
                    relaxation=2 * relaxation if free else relaxation,
                )
                reading = norm_balance(readings[i], rotation)
                found[id(p)] = Layer(names[id(p)], reading, rotation, threshold)
        ordered = [found[key] for key in names if key in found]
        return LayerTable(tuple(ordered), self.step, budget)

    def _rounding_floor(self) -> float:
        """Return the right side below which steps are lost in rounding.

        That is the case for |Δ| < 2ε|θ|, and where gradient and weight decay cancel to within ε.
        """
        epsilon, floor = torch.finfo(torch.float32).eps, 0.0
        norm = sum(float(part.norms.sum()) for part in self.parts)
        for part, ledger in zip(self.parts, self.monitor._ledgers, strict=True):
            decay = self.monitor.optimizer.param_groups[part.group].get("weight_decay", 0.0)
            single = ledger.bucket.dtype is torch.float32 and isinstance(decay, float | int)
            if single and part.lr > 0 and math.isfinite(norm):
                floor += 2 * epsilon**2 * norm / part.lr + 4 * epsilon * part.lr * decay**2 * norm
        return floor
