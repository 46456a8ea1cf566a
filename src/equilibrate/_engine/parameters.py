"""Parameters of an optimizer that a monitor accepts, and their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

NamedParameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def check_parameters(optimizer: Optimizer) -> None:
    """Check that there is a reading for every parameter.

    Raises:
        TypeError: If one is complex, or on a device without float64.
    """
    for i, group in enumerate(optimizer.param_groups):
        if any(p.is_complex() for p in group["params"]):
            raise TypeError(
                f"parameter group {i} has complex parameters, which have no FDR1 reading here; "
                "optimize torch.view_as_real of them instead"
            )
        if any(p.device.type == "mps" for p in group["params"]):
            raise TypeError(
                f"parameter group {i} is on an MPS device, which has no float64: a monitor needs "
                "a CPU or a CUDA device"
            )


def check_names(optimizer: Optimizer, names: dict[int, str]) -> None:
    """Check that every parameter of the optimizer has a name.

    Raises:
        ValueError: If one has none.
    """
    missing = [
        f"group {i}, parameter {j} of shape {tuple(p.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if id(p) not in names
    ]
    if missing:
        raise ValueError(
            f"named_parameters lacks {len(missing)} parameter(s) of the optimizer ({missing[0]}): "
            "pass model.named_parameters() of the model that is optimized"
        )


def names_of(named_parameters: NamedParameters) -> dict[int, str]:
    """Return the name of each parameter by its identity.

    Raises:
        TypeError: If they are not pairs of a name and a parameter.
    """
    try:
        return {id(p): name for name, p in dict(named_parameters).items()}
    except (TypeError, ValueError) as error:
        raise TypeError(
            "named_parameters must be pairs of a name and a parameter, got "
            f"{type(named_parameters).__name__}: pass model.named_parameters()"
        ) from error


def describe(fingerprint: list[list[Any]]) -> str:
    """Return what a fingerprint of parameters holds, for an error message."""
    tensors = sum(len(group) for group in fingerprint)
    numbers = sum(math.prod(shape) for group in fingerprint for _, shape, _ in group)
    named = any(name for group in fingerprint for name, _, _ in group)
    return (
        f"{tensors} tensors of {numbers} parameters in {len(fingerprint)} group(s), "
        f"{'with' if named else 'without'} names"
    )
