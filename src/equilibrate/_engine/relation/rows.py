"""From measurements to rows of sums: Σ(L − R), ΣR, steps, and steps represented in ΣR.

Rows that keep the sums of each tensor also have ΣN, over the same steps as ΣR.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equilibrate._engine.arithmetic.sums import ALONG, NORM, SQUARE
from equilibrate._engine.optimizer.updates import Scalar
from equilibrate._engine.relation.coefficients import host_to, stack, times


class Entry(NamedTuple):
    """One measurement: what it ends, and how to turn it into a row."""

    steps: int
    """Steps since the measurement before it; 0 if it only begins an interval."""
    sampled: bool
    """Whether d² is that of the last step."""
    coefficients: tuple[Scalar, ...]
    """Those of θ′·d, of θ·b before, of N′ − N and of d² in L − R, and of d² in R."""
    moving: Tensor | None
    """1 for each tensor that the step moved and 0 for the others; None if it moved all."""
    skips: tuple[Tensor, Tensor] | None
    """Whether gradient scaling skipped the step, and how many it has skipped so far."""


def make_rows(
    ring: Tensor,
    entries: Sequence[Entry],
    share: Tensor | None,
    skipped: Tensor | None,
    *,
    each: bool,
) -> Tensor:
    """Return a row for each measurement.

    Args:
        ring: What was measured, (measurements + 1, tensors, 3), beginning with the one before.
        entries: How to turn each into a row.
        share: A factor for each tensor, if several processes hold parts of them.
        skipped: Steps that gradient scaling had skipped before the first measurement.
        each: Whether to keep the sums of each tensor instead of their total.
    """
    now, before = ring[1:], ring[:-1]
    c = stack(ring, [entry.coefficients for entry in entries])
    along, earlier, drift, square, right = (column[:, None] for column in c.unbind(1))
    difference = (
        times(along, now[..., ALONG])
        + times(earlier, before[..., ALONG])
        + times(drift, now[..., NORM] - before[..., NORM])
        + times(square, now[..., SQUARE])
    )
    sampled, norms = times(right, now[..., SQUARE]), now[..., NORM]
    if any(entry.moving is not None for entry in entries):
        ones = torch.ones_like(sampled[0])
        moving = torch.stack([ones if e.moving is None else e.moving for e in entries])
        sampled, norms = sampled * moving, norms * moving
        alone = host_to(ring, [float(e.steps == 1) for e in entries])[:, None]
        difference = difference * torch.where(alone > 0, moving, 1.0)
    if share is not None:
        difference, sampled, norms = difference * share, sampled * share, norms * share
    steps = host_to(ring, [float(entry.steps) for entry in entries])
    weights = host_to(ring, [float(entry.steps * entry.sampled) for entry in entries])
    if any(entry.skips is not None for entry in entries):
        steps, weights = _without_skips(entries, steps, weights, skipped)
    counted = weights[:, None]
    if each:
        sums = [difference, counted * sampled, times(counted, norms)]
    else:
        sums = [difference.sum(1, keepdim=True), counted * sampled.sum(1, keepdim=True)]
    return torch.cat([*sums, steps[:, None], counted], dim=1)


def _without_skips(
    entries: Sequence[Entry], steps: Tensor, weights: Tensor, skipped: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the counts, and the weights in the sample of R, without skipped steps."""
    zero = steps.new_zeros(())
    pairs = [(zero, zero) if e.skips is None else e.skips for e in entries]
    last, total = torch.stack([torch.stack(pair) for pair in pairs]).unbind(1)
    first = zero if skipped is None else skipped
    steps = steps - torch.diff(total, prepend=first[None])
    return steps, torch.where(last > 0, 0.0, torch.where(weights > 0, steps, 0.0))
