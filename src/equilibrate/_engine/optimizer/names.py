"""Names of the parameters of an optimizer: as given, or the optimizer's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from equilibrate._engine.optimizer.parameters import all_parameters
from equilibrate._engine.sharding import Layout

T = TypeVar("T")
NO_NAMES = (
    "there is no name for any parameter: pass named_parameters=model.named_parameters() to the "
    "monitor"
)
NamedParameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Names:
    """Names that a monitor uses for parameters, which may be added to the optimizer later.

    Args:
        optimizer: The optimizer, which may have been created from named parameters itself.
        named_parameters: Pairs of a name and a parameter; None to use the optimizer's names.

    Raises:
        TypeError: If they are not pairs of a name and a parameter.
        ValueError: If a parameter of the optimizer has no name.
    """

    def __init__(self, optimizer: Optimizer, named_parameters: NamedParameters | None) -> None:
        self._optimizer = optimizer
        self._given = None if named_parameters is None else _read(named_parameters)
        if self._given is not None:
            _check(optimizer, self._given)

    def __bool__(self) -> bool:
        """Return whether there is a name for any parameter."""
        groups = self._optimizer.param_groups
        return self._given is not None or any("param_names" in group for group in groups)

    def _by_identity(self) -> dict[int, str]:
        """Return the name of every parameter: as given, the optimizer's own, or its place."""
        names: dict[int, str] = {}
        for i, group in enumerate(self._optimizer.param_groups):
            own = group.get("param_names", [])
            for j, p in enumerate(group["params"]):
                fallback = own[j] if j < len(own) else f"group {i}, parameter {j}"
                names[id(p)] = (self._given or {}).get(id(p), fallback)
        return names

    def label(self, found: Mapping[int, T]) -> dict[str, T]:
        """Return what was found for each parameter by its name, in the order of the names given."""
        names = self._by_identity()
        named = {names[key]: value for key, value in found.items()}
        order = [name for name in (self._given or {}).values() if name in named]
        return {name: named[name] for name in dict.fromkeys([*order, *named])}

    def given(self) -> dict[str, Tensor] | None:
        """Return the parameters whose names were given; None if none were."""
        if self._given is None:
            return None
        params = all_parameters(self._optimizer)
        return {self._given[id(p)]: p for p in params if id(p) in self._given}

    def fingerprint(self, layout: Layout) -> list[list[Any]]:
        """Return name, shape and dtype of each parameter of each group, to tell models apart."""
        names = self._by_identity() if self else {}
        return [
            [[names.get(id(p), ""), layout.shape(p), str(p.dtype)] for p in group["params"]]
            for group in self._optimizer.param_groups
        ]


def describe(fingerprint: list[list[Any]]) -> str:
    """Return what a fingerprint of parameters holds, for an error message."""
    tensors = sum(len(group) for group in fingerprint)
    numbers = sum(math.prod(shape) for group in fingerprint for _, shape, _ in group)
    named = any(name for group in fingerprint for name, _, _ in group)
    return (
        f"{tensors} tensors of {numbers} parameters in {len(fingerprint)} group(s), "
        f"{'with' if named else 'without'} names"
    )


def _read(named_parameters: NamedParameters) -> dict[int, str]:
    try:
        return {id(p): name for name, p in dict(named_parameters).items()}
    except (TypeError, ValueError) as error:
        raise TypeError(
            "named_parameters must be pairs of a name and a parameter, got "
            f"{type(named_parameters).__name__}: pass model.named_parameters()"
        ) from error


def _check(optimizer: Optimizer, names: Mapping[int, str]) -> None:
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
