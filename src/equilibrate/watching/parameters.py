"""The parameters of an optimizer, sorted into buckets that are measured together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate.watching.sharding import Layout, as_dtensor, local, local_like


class Bucket:
    """Those parameters of one group that share a device and a dtype.

    Args:
        group: Index of the parameter group.
        params: The parameters.
        layout: How the parameters of the optimizer are distributed over processes.
    """

    def __init__(self, group: int, params: Sequence[Tensor], layout: Layout) -> None:
        self.group = group
        self.params = list(params)
        self.layout = layout
        self.distributed = any(as_dtensor(p) is not None for p in self.params)
        first = local(self.params[0])
        self.device, self.dtype = first.device, first.dtype

    def local(self) -> list[Tensor]:
        """Return the parts of the parameters that this process holds."""
        return [local(p) for p in self.params] if self.distributed else self.params

    def local_like(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the local parts of gradients or buffers."""
        if not self.distributed:
            return tensors
        return [local_like(p, t) for p, t in zip(self.params, tensors, strict=True)]

    def shares(self) -> list[float]:
        """Return a factor for each parameter with which a total over processes counts it once."""
        return [self.layout.shards(p) / self.layout.processes for p in self.params]


class ParameterSet:
    """The parameters of an optimizer when it was laid out.

    Args:
        optimizer: The optimizer.

    Raises:
        TypeError: If a parameter is complex, or on a device without float64.
        ValueError: If there are none, or one is distributed in a way that is not supported.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.params = list(self._current())
        self._shapes = [p.shape for p in self.params]
        if not self.params:
            raise ValueError("optimizer has no parameters: pass model.parameters() to it first")
        self.layout = Layout(self.params)
        found: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for i, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                _check(i, p)
                found.setdefault((i, local(p).device, p.dtype), []).append(p)
        self.buckets = [Bucket(i, params, self.layout) for (i, _, _), params in found.items()]

    def has_same_parameters(self) -> bool:
        """Return whether the optimizer still holds the same parameters, wherever they are.

        One that was given a tensor of another shape, through `.data`, is not the same.
        """
        now = list(self._current())
        if len(now) != len(self.params) or not all(map(is_, now, self.params)):
            return False
        return [p.shape for p in now] == self._shapes

    def are_converted(self) -> bool:
        """Return whether parameters have another dtype now."""
        return any(p.dtype is not bucket.dtype for bucket in self.buckets for p in bucket.params)

    def is_current(self) -> bool:
        """Return whether parameters were neither exchanged nor moved nor converted."""
        return (
            self.has_same_parameters()
            and not self.are_converted()
            and all(p.device == each.device for each in self.buckets for p in each.local())
        )

    def fingerprint(self) -> list[list[str]]:
        """Return shape and dtype of each parameter of each group, to tell models apart."""
        return [
            [f"{tuple(p.shape)} {p.dtype}" for p in group["params"]]
            for group in self._optimizer.param_groups
        ]

    def _current(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]


def _check(group: int, param: Tensor) -> None:
    if param.is_complex():
        raise TypeError(
            f"parameter group {group} has complex parameters, which have no FDR1 reading here; "
            "optimize torch.view_as_real of them instead"
        )
    if param.device.type == "mps":
        raise TypeError(
            f"parameter group {group} is on an MPS device, which has no float64: a monitor needs "
            "a CPU or a CUDA device"
        )
