"""How one step of an optimizer becomes the two sides of FDR1, in a few dot products.

Torch's conventions live here: its momentum buffer is b = −v; `maximize` flips the gradient before
the weight decay is added, w = ±g + λθ; the first momentum step is undampened, b′ = w instead of
μb + (1−ν)w; Nesterov steps along d = w + μb′.

Everything is read after the step, from θ′, g and b′, and θ = θ′ + ηd is solved for: so closures,
clipping in other hooks and unscaling inside fused kernels are seen as the optimizer saw them.
"""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from equilibrate.observables import Scalar, fdr1_coefficient

Group = dict[str, Any]
Pairs = Sequence[tuple[Tensor, ...]]

# A single-precision dot product loses digits as it grows (3e-5 at two million terms on a CPU).
_PIECE = 1 << 18
# |θ|² is carried from step to step by the update's own identity, and measured this often so that
# rounding, or a parameter edited behind autograd's back (`p.data`), cannot last.
_MEASURE_NORM_EVERY = 16


class Probe(ABC):
    """Watches parameter tensors of one group, on one device, of one dtype."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def before(self, group: Group, params: list[Tensor]) -> None:
        """Note what the step will destroy."""
        return

    @abstractmethod
    def after(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Both sides for each tensor that has a gradient, (2, n) in double precision."""

    def state_dict(self) -> dict[str, Any]:
        """What readings need to go on bit by bit after a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        return


def probe_type(optimizer: Optimizer, group: Group) -> type[Probe]:
    """The cheapest probe that is right for this optimizer and group as they are now."""
    is_sgd = isinstance(optimizer, SGD) and (
        inspect.unwrap(type(optimizer).step) is inspect.unwrap(SGD.step)
    )
    if not is_sgd:
        return StepProbe
    if group["momentum"] == 0:
        return PlainProbe
    return NesterovProbe if group["nesterov"] else MomentumProbe


class StepProbe(Probe):
    """Any optimizer: −θ·Δ/η and Δ²/(2η), with one copy of the parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._copies: list[Tensor] = []

    def before(self, group: Group, params: list[Tensor]) -> None:
        if len(self._copies) != len(params):
            self._copies = [torch.empty_like(p) for p in params]
        for copy, p in zip(self._copies, params, strict=True):
            copy.copy_(p)

    def after(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        lr = learning_rate(group)
        flat = []
        for step, p in zip(self._copies, params, strict=True):
            torch.sub(p, step, out=step)
            flat.append(flatten(p, step))
        moved, square = dots([(p, d) for p, d in flat] + [(d, d) for _, d in flat]).view(2, -1)
        sides = torch.stack([square - moved, square / 2])  # −θ·Δ = Δ² − θ′·Δ
        return torch.nan_to_num(sides / lr) if isinstance(lr, Tensor) else sides / (lr or 1.0)


class PlainProbe(Probe):
    """SGD without momentum: w = κ(±g + λθ′), κ = 1/(1 − ηλ), hence θ·w = θ′·w + ηw²."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._norm: Tensor | None = None  # |θ|² of each watched tensor after the last step
        self._age = 0
        self._watched: list[Tensor] = []
        self._versions: list[int] | None = []  # None: just loaded, taken on trust
        self._settings: tuple[Scalar, float, int] | None = None
        self._weights = torch.empty(0)

    def before(self, group: Group, params: list[Tensor]) -> None:
        versions = [p._version for p in self._watched]
        if self._versions is not None and versions != self._versions:
            self._norm = None

    def after(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        settings = (learning_rate(group), group["weight_decay"], -1 if group["maximize"] else 1)
        flat = [flatten(p, g) for p, g in zip(params, grads, strict=True)]
        products = dots(flat + [(g, g) for _, g in flat]).view(2, -1)
        if settings != self._settings or isinstance(settings[0], Tensor):
            self._weights = self._coefficients(*settings, device=products.device)
            self._settings = settings
        if settings[1] == 0:
            return self._weights[:2, :2] @ products
        products = torch.cat([products, self._norm_after(products, params, flat)])
        return self._weights[:2] @ products

    def _norm_after(self, products: Tensor, params: list[Tensor], flat: Pairs) -> Tensor:
        same = self._versions is None or (
            len(params) == len(self._watched)
            and all(p is q for p, q in zip(params, self._watched, strict=True))
        )
        # Under gradient scaling a fused step may have been skipped, unknown to the host.
        maybe_skipped = getattr(self._optimizer, "found_inf", None) is not None
        due = self._age == _MEASURE_NORM_EVERY or maybe_skipped
        if self._norm is None or not same or due:
            self._norm = dots([(p, p) for p, _ in flat])[None]
            self._age = 0
        else:
            self._norm = self._weights[2:] @ torch.cat([products, self._norm])
        self._age += 1
        self._watched = params
        self._versions = [p._version for p in params]
        return self._norm

    @staticmethod
    def _coefficients(lr: Scalar, decay: float, sign: int, device: torch.device) -> Tensor:
        """Rows: θ·w and (η/2)w² from (θ′·g, g², |θ′|²); |θ′|² from (θ′·g, g², |θ|²)."""
        if lr * decay == 1:
            raise ValueError(
                f"lr × weight_decay is 1 (lr={lr}, weight_decay={decay}): such a step forgets the "
                "parameters, and FDR1 cannot be read off it; lower one of the two"
            )
        shrink = 1 - lr * decay
        kappa = 1 / shrink
        cross, square, norm = 2 * decay * sign * kappa**2, kappa**2, (decay * kappa) ** 2  # of w²
        half = fdr1_coefficient(lr)
        return matrix(
            [
                [kappa * sign + lr * cross, lr * square, kappa * decay + lr * norm],
                [half * cross, half * square, half * norm],
                [-2 * lr * sign, -(lr**2), shrink**2],
            ],
            device,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"norm": self._norm, "age": self._age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norm, self._age = state["norm"], state["age"]
        self._watched, self._versions = [], None


class MomentumProbe(Probe):
    """SGD with momentum: θ′·b′ = μ θ·b + (1−ν) θ·w − ηb′² is solved for θ·w."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._overlap: dict[Tensor, Tensor] = {}  # θ·b before the step, where there is a buffer

    def before(self, group: Group, params: list[Tensor]) -> None:
        held = [(p, b) for p in params if (b := momentum_buffer(self._optimizer, p)) is not None]
        overlaps = dots([flatten(p, b) for p, b in held]) if held else ()
        self._overlap = {p: q for (p, _), q in zip(held, overlaps, strict=True)}

    def after(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        lr, momentum, dampening = learning_rate(group), group["momentum"], group["dampening"]
        flat = [flatten(p, self._optimizer.state[p]["momentum_buffer"]) for p in params]
        overlap, square = dots(flat + [(b, b) for _, b in flat]).view(2, -1)
        zero = torch.zeros_like(overlap[0])
        before = torch.stack([self._overlap.get(p, zero) for p in params])
        # The first step of a tensor is undampened: b′ = w.
        share = [1 - dampening if p in self._overlap else 1.0 for p in params]
        left = overlap - momentum * before + lr * square
        if dampening:
            left = left / matrix([share], left.device)[0]
        return torch.stack([left, fdr1_coefficient(lr, momentum, dampening) * square])


class NesterovProbe(Probe):
    """SGD with Nesterov momentum: the step form along d = κ(±g + λθ′ + μb′), κ = 1/(1 − ηλ)."""

    def after(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        lr, decay = learning_rate(group), group["weight_decay"]
        sign = -1 if group["maximize"] else 1
        pairs = [
            pair
            for p, g in zip(params, grads, strict=True)
            for pair in itertools.combinations_with_replacement(
                flatten(p, g, self._optimizer.state[p]["momentum_buffer"]), 2
            )
        ]
        pp, pg, pb, gg, gb, bb = dots(pairs).view(-1, 6).T
        kappa, momentum = 1 / (1 - lr * decay), group["momentum"]
        along = kappa * (sign * pg + decay * pp + momentum * pb)  # θ′·d
        square = kappa**2 * (
            gg
            + decay**2 * pp
            + momentum**2 * bb
            + 2 * (sign * decay * pg + sign * momentum * gb + decay * momentum * pb)
        )
        return torch.stack([along + lr * square, lr / 2 * square])


def learning_rate(group: Group) -> Scalar:
    """η of a group as a number or a 0-dim double tensor; 1 where the optimizer has none."""
    lr = group.get("lr", 1.0)
    return lr.detach().double().reshape(()) if isinstance(lr, Tensor) else lr


def momentum_buffer(optimizer: Optimizer, p: Tensor) -> Tensor | None:
    """Torch's b = −v of one parameter, None before its first step."""
    return optimizer.state[p].get("momentum_buffer") if p in optimizer.state else None


def dots(pairs: Pairs) -> Tensor:
    """Inner products of pairs of flat tensors, in double precision, without waiting for them."""
    return torch.stack([_dot(a, b) for a, b in pairs]).double()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    wide = a.dtype == b.dtype and a.dtype in (torch.float32, torch.float64)
    if wide and (a.numel() <= _PIECE or a.is_cuda):
        return torch.dot(a, b)
    pieces = zip(a.split(_PIECE), b.split(_PIECE), strict=True)
    if wide:
        return torch.stack([torch.dot(x, y) for x, y in pieces]).sum()
    return torch.stack([torch.dot(x.float(), y.float()) for x, y in pieces]).sum()


def flatten(first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """One-dimensional views with one order of elements, fit for `dots`.

    Beside a sparse tensor the other is restricted to what it touches, which leaves their product
    unchanged.
    """
    tensors = (first, *others)
    if any(t.is_sparse for t in others):
        return _flatten_sparse(first, *others)
    if all(t.is_contiguous() for t in tensors):
        return tuple(t.view(-1) for t in tensors)
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    moved = [t.permute(order) for t in tensors]
    return tuple(t.reshape(-1) for t in moved)  # views for channels_last and the like


def _flatten_sparse(first: Tensor, other: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    if more:
        raise ValueError(
            "sparse gradients with nesterov=True cannot be read; "
            "use plain momentum, or sparse=False in the embedding"
        )
    sparse = other.coalesce()
    return first.sparse_mask(sparse).values().reshape(-1), sparse.values().reshape(-1)


def matrix(rows: list[list[Scalar]], device: torch.device) -> Tensor:
    """A small double matrix of numbers and 0-dim tensors, made without waiting for the device."""
    if device.type == "cpu" and not any(isinstance(c, Tensor) for row in rows for c in row):
        return torch.tensor(rows, dtype=torch.float64)
    cells = [
        c if isinstance(c, Tensor) else torch.full((), c, dtype=torch.float64, device=device)
        for row in rows
        for c in row
    ]
    return torch.stack(cells).view(len(rows), -1)
