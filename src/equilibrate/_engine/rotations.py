"""From sums and samples to the rotation of each parameter, with the settings of the optimizer."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from torch import Tensor
from torch.optim import Adam, Optimizer

from equilibrate._engine.alignment import alignments
from equilibrate._engine.probe import Probe
from equilibrate._engine.totals import Totals
from equilibrate._engine.updates import Group, steps_as_sgd
from equilibrate.scale_invariance import (
    Rotation,
    adamw_angular_step,
    adamw_relaxation,
    is_scale_invariant,
    sgd_angular_step,
    sgd_relaxation,
)


def rotations(
    probe: Probe, part: Totals, optimizer: Optimizer, lr: float
) -> Iterator[tuple[Tensor, Rotation]]:
    """Yield each parameter of a bucket with its rotation.

    Args:
        probe: The bucket.
        part: Its averages over the window and all processes, with samples.
        optimizer: The optimizer.
        lr: The learning rate of the last measured step.
    """
    assert part.samples is not None
    group = optimizer.param_groups[probe.group]
    norms, steps = (numbers.tolist() for numbers in probe.norms(part.sums))
    columns = zip(probe.params, norms, steps, alignments(part.samples), strict=True)
    for p, norm, step, (alignment, count) in columns:
        invariant = bool(is_scale_invariant(alignment, count))
        equilibrium, relaxation = norm_equilibrium(optimizer, group, lr, scale_invariant=invariant)
        decay = math.nan if math.isnan(equilibrium) else group["weight_decay"] * norm
        yield p, Rotation(alignment, count, step, equilibrium, decay, relaxation)


def others_alone(parts: Sequence[Totals]) -> list[Totals]:
    """Return the averages of each bucket without those of scale-invariant parameters.

    Their sides and potentials are zero. It warns if there are no other parameters; the sides are
    nan then.

    Args:
        parts: The averages of each bucket, with samples.
    """
    left_out: list[list[bool]] = []
    for part in parts:
        assert part.samples is not None
        left_out.append([bool(is_scale_invariant(*each)) for each in alignments(part.samples)])
    nothing = 0.0
    if all(out for bucket in left_out for out in bucket):
        warnings.warn(
            "every parameter was found to be scale-invariant, so that nothing is left to read: "
            "pass scale_invariant=True to read the balance of norms and weight decay",
            stacklevel=4,
        )
        nothing = math.nan
    return [
        part._replace(
            left=[nothing if out else side for side, out in zip(part.left, bucket, strict=True)],
            right=[nothing if out else side for side, out in zip(part.right, bucket, strict=True)],
            potential=np.where(bucket, nothing, part.potential),
        )
        for part, bucket in zip(parts, left_out, strict=True)
    ]


def norm_equilibrium(
    optimizer: Optimizer, group: Group, lr: float, *, scale_invariant: bool
) -> tuple[float, float]:
    """Return the equilibrium angular step and the relaxation time of a norm; nan if not known.

    Args:
        optimizer: The optimizer.
        group: The parameter group of the weight.
        lr: The learning rate.
        scale_invariant: Whether the weight is scale-invariant.
    """
    kind, decay = type(optimizer), group.get("weight_decay")
    if not isinstance(decay, int | float) or not math.isfinite(lr):
        return math.nan, math.nan
    if steps_as_sgd(kind):
        momentum, dampening = group["momentum"], group["dampening"] if group["momentum"] else 0.0
        return (
            sgd_angular_step(lr, decay, momentum, dampening, nesterov=group["nesterov"]),
            sgd_relaxation(lr, decay, momentum, dampening, scale_invariant=scale_invariant),
        )
    if _steps_as_adam(kind) and (group.get("decoupled_weight_decay") or not decay):
        beta1 = float(group["betas"][0])
        return adamw_angular_step(lr, decay, beta1), adamw_relaxation(lr, decay)
    return math.nan, math.nan


@cache
def _steps_as_adam(kind: type[Optimizer]) -> bool:
    return issubclass(kind, Adam) and inspect.unwrap(kind.step) is inspect.unwrap(Adam.step)
