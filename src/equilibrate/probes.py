"""How one step of an optimizer becomes the two sides of FDR1, in a few dot products.

Torch's conventions live here: its momentum buffer is b = −v; `maximize` flips the gradient before
the weight decay is added, w = ±g + λθ; the first momentum step is undampened, b′ = w instead of
μb + (1−ν)w; Nesterov steps along d = w + μb′.

Everything is read after the step, from θ′, g and b′, and θ = θ′ + ηd is solved for: so closures,
clipping in other hooks and unscaling inside fused kernels are seen as the optimizer saw them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from functools import cache
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from equilibrate.dots import gram, products
from equilibrate.observables import Scalar, fdr1_coefficient

Group = dict[str, Any]


class Probe(ABC):
    """Watches parameter tensors of one group, on one device, of one dtype."""

    block: ClassVar[int] = 1
    """`take` is due after so many steps."""

    def __init__(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        self._optimizer = optimizer
        self._params = params
        self._sides: list[Tensor] = []
        self.noted = 0
        """Steps since the last `take`."""

    def before(self, group: Group) -> None:
        """Note what the step will destroy."""
        return

    @abstractmethod
    def after(self, group: Group) -> None:
        """Note both sides of the step, or what they can be worked out from."""

    def take(self) -> Tensor:
        """Both sides of the noted steps, (steps, 2, tensors) in double precision."""
        sides = torch.cat(self._sides)
        self._sides, self.noted = [], 0
        return sides

    def skip_last_if(self, skipped: Tensor) -> None:
        """Count nothing for the last step where `skipped` turns out to be true."""
        self._sides[-1] = torch.where(skipped, 0.0, self._sides[-1])

    def state_dict(self) -> dict[str, Any]:
        """What readings need to go on bit by bit after a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        return


def probe_type(optimizer: Optimizer, group: Group) -> type[Probe]:
    """The cheapest probe that is right for this optimizer and group as they are now."""
    if not _steps_as_sgd(type(optimizer)):
        return StepProbe
    if group["momentum"] == 0:
        return PlainProbe
    return NesterovProbe if group["nesterov"] else MomentumProbe


@cache
def _steps_as_sgd(kind: type[Optimizer]) -> bool:
    return issubclass(kind, SGD) and inspect.unwrap(kind.step) is inspect.unwrap(SGD.step)


class StepProbe(Probe):
    """Any optimizer: −θ·Δ/η and Δ²/(2η), with one copy of the parameters."""

    def __init__(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        super().__init__(optimizer, params)
        self._copies = [torch.empty_like(p) for p in params]

    def before(self, group: Group) -> None:
        for copy, p in zip(self._copies, self._params, strict=True):
            copy.copy_(p.detach())

    def after(self, group: Group) -> None:
        for step, p in zip(self._copies, self._params, strict=True):
            torch.sub(p, step, out=step)
        moved, square = products(self._params, self._copies).double().view(-1, 2).unbind(1)
        sides = torch.stack([square - moved, square / 2])  # −θ·Δ = Δ² − θ′·Δ
        lr = learning_rate(group)
        # At η = 0 nothing moves, and 0/0 is to count nothing.
        scale = torch.where(lr == 0, 1.0, lr) if isinstance(lr, Tensor) else lr or 1.0
        self._sides.append((sides / scale)[None])
        self.noted += 1


class Settings(NamedTuple):
    """What a group says of its SGD."""

    lr: Scalar
    momentum: float
    dampening: float
    decay: float
    sign: int

    @classmethod
    def of(cls, group: Group) -> Settings:
        """As they are now."""
        _, momentum, dampening, decay, maximize = _raw_settings(group)
        return cls(learning_rate(group), momentum, dampening, decay, -1 if maximize else 1)

    @property
    def kappa(self) -> Scalar:
        """1/(1 − ηλ), which takes the decay of a step back."""
        if not isinstance(self.lr, Tensor) and self.lr * self.decay == 1:
            raise ValueError(
                f"lr × weight_decay is 1 (lr={self.lr}, weight_decay={self.decay}): such a step "
                "forgets the parameters, and FDR1 cannot be read off it; lower one of the two"
            )
        return 1 / (1 - self.lr * self.decay)


_raw_settings = itemgetter("lr", "momentum", "dampening", "weight_decay", "maximize")


class SGDProbe(Probe):
    """SGD: only tensors with a gradient move."""

    def after(self, group: Group) -> None:
        moving = [i for i, p in enumerate(self._params) if p.grad is not None]
        if moving:
            self._after(group, moving)
        else:
            self._close()
            like = self._params[0]
            self._sides.append(like.new_zeros((1, 2, len(self._params)), dtype=torch.float64))
        self.noted += 1

    def take(self) -> Tensor:
        self._close()
        return super().take()

    @abstractmethod
    def _after(self, group: Group, moving: list[int]) -> None:
        """Note a step of the tensors at `moving`, of which there are some."""

    def _close(self) -> None:
        """Work out what has been noted."""
        return

    def _note(self, left: Tensor, right: Tensor, moving: list[int]) -> None:
        """Keep the sides of one step, (moving), or of several, (steps, moving)."""
        sides = torch.stack([left, right], dim=-2)
        if len(moving) < len(self._params):
            columns = dict(zip(moving, sides.unbind(-1), strict=True))
            zero = torch.zeros_like(columns[moving[0]])
            every = range(len(self._params))
            sides = torch.stack([columns.get(i, zero) for i in every], dim=-1)
        self._sides.append(sides.view(-1, 2, len(self._params)))


class BlockProbe(SGDProbe):
    """SGD in two dot products a step, θ′·z and z², where z is the gradient or torch's buffer.

    Both sides follow from these and from one number of each tensor that is carried from step to
    step. Small tensor operations cost as much as a dot product, so a step only notes its two, and
    a block of steps is worked out at once.
    """

    block = 128

    def __init__(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        super().__init__(optimizer, params)
        self._given: tuple[Any, ...] | None = None
        self._settings = Settings(1.0, 0.0, 0.0, 0.0, 1)
        self._watched: list[int] = []  # which tensors moved last
        self._live: list[Tensor] = []  # these tensors
        self._versions: list[int] | None = None  # theirs; None: taken on trust
        self._carried: Tensor | None = None  # where the open block begins
        self._rows: list[Tensor] = []  # the open block
        self._age = 0  # steps since it was measured

    @abstractmethod
    def _vectors(self) -> list[Tensor]:
        """The z of each watched tensor."""

    @abstractmethod
    def _is_due(self) -> bool:
        """Whether the carried number is needed and missing."""

    @abstractmethod
    def _measure(self, vectors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Both sides of a step and the carried number after it, from scratch."""

    @abstractmethod
    def _work_out(self, along: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Both sides of a block, (steps, tensors), and the carried number after it."""

    def before(self, group: Group) -> None:
        trusted = self._carried is None or self._versions is None
        if not trusted and self._versions != self._versions_with(self._vectors()):
            self._close()
            self._carried = None

    def _after(self, group: Group, moving: list[int]) -> None:
        given = _raw_settings(group)
        # A tensor is changed in place, and comparing it would wait for the device.
        if isinstance(given[0], Tensor) or given != self._given:
            self._close()
            self._given, self._settings = given, Settings.of(group)
        if moving != self._watched:
            self._close()
            self._carried = None
            self._watch(moving)
        vectors = self._vectors()
        # Under gradient scaling a fused step may have been skipped, unknown to the host.
        maybe_skipped = getattr(self._optimizer, "found_inf", None) is not None
        if maybe_skipped or self._is_due():
            self._close()
            left, right, self._carried = self._measure(vectors)
            self._note(left, right, moving)
            self._age = 0
        else:
            self._rows.append(products(self._live, vectors))
        self._age += 1
        if self._carried is not None:
            self._versions = self._versions_with(vectors)

    def _watch(self, moving: list[int]) -> None:
        self._watched, self._live = moving, [self._params[i] for i in moving]

    def _close(self) -> None:
        if self._rows:
            block = torch.stack(self._rows).double().unflatten(1, (-1, 2))
            self._rows = []
            left, right, self._carried = self._work_out(*block.unbind(-1))
            self._note(left, right, self._watched)

    def _versions_with(self, vectors: list[Tensor]) -> list[int]:
        """Those of all that the carried number was made of."""
        return [p._version for p in self._live]

    def state_dict(self) -> dict[str, Any]:
        return {"carried": self._carried, "age": self._age, "watched": self._watched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        carried = state["carried"]
        self._carried = None if carried is None else carried.to(self._params[0].device)
        self._age = state["age"]
        self._watch(state["watched"])
        self._versions = None


class PlainProbe(BlockProbe):
    """SGD without momentum: w = κ(±g + λθ′), κ = 1/(1 − ηλ), hence θ·w = θ′·w + ηw².

    With decay, |θ|² is carried: |θ′|² = (1−ηλ)²|θ|² ∓ 2η θ′·g − η²g². It is measured again now and
    then, so that a parameter edited behind autograd's back (`p.data`) is not off for long.
    """

    measured_every = 32

    def __init__(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        super().__init__(optimizer, params)
        self._measured: dict[int, Tensor] = {}  # |θ′|² of some rows of the open block

    def _after(self, group: Group, moving: list[int]) -> None:
        super()._after(group, moving)
        if self._carried is not None and self._age > self.measured_every:
            (self._measured[len(self._rows) - 1],) = gram(self._live)
            self._age = 1

    def _vectors(self) -> list[Tensor]:
        return [p.grad for p in self._live]  # pyright: ignore[reportReturnType]

    def _is_due(self) -> bool:
        return self._settings.decay != 0 and self._carried is None

    def _measure(self, vectors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        norm, along, square = gram(self._live, vectors)
        return *self._both(along, square, norm), norm

    def _work_out(self, along: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._carried is None:
            return *self._both(along, square, 0.0), None
        lr, _, _, decay, sign = self._settings
        shrink, norm, norms = (1 - lr * decay) ** 2, self._carried, []
        for row, drift in enumerate((-2 * lr * sign * along - lr**2 * square).unbind(0)):
            norm = self._measured[row] if row in self._measured else shrink * norm + drift
            norms.append(norm)
        self._measured = {}
        return *self._both(along, square, torch.stack(norms)), norm

    def _both(self, along: Tensor, square: Tensor, norm: Scalar) -> tuple[Tensor, Tensor]:
        lr, _, _, decay, sign = self._settings
        kappa = self._settings.kappa
        step = kappa**2 * (square + 2 * decay * sign * along + decay**2 * norm)  # w²
        left = kappa * (sign * along + decay * norm) + lr * step
        return left, fdr1_coefficient(lr) * step


class MomentumProbe(BlockProbe):
    """SGD with momentum: θ′·b′ = μ θ·b + (1−ν) θ·w − ηb′² is solved for θ·w; θ·b is carried."""

    def _vectors(self) -> list[Tensor]:
        return momentum_buffers(self._optimizer, self._live)

    def _is_due(self) -> bool:
        return self._carried is None

    def _measure(self, vectors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        lr, momentum, dampening, decay, sign = self._settings
        grads = [p.grad.to_dense() for p in self._live if p.grad is not None]
        buffers = [b.to_dense() for b in vectors]
        pp, pg, pb, _, gb, bb = gram(self._live, grads, buffers)
        left = sign * (pg + lr * gb) + decay * (pp + 2 * lr * pb + lr**2 * bb)  # (θ′ + ηb′)·w
        return left, fdr1_coefficient(lr, momentum, dampening) * bb, pb

    def _work_out(self, along: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        lr, momentum, dampening, _, _ = self._settings
        assert self._carried is not None
        before = torch.cat([self._carried[None], along[:-1]])
        left = (along - momentum * before + lr * square) / (1 - dampening)
        return left, fdr1_coefficient(lr, momentum, dampening) * square, along[-1]

    def _versions_with(self, vectors: list[Tensor]) -> list[int]:
        return [t._version for t in (*self._live, *vectors)]


class NesterovProbe(SGDProbe):
    """SGD with Nesterov momentum: the step form along d = κ(±g + λθ′ + μb′), κ = 1/(1 − ηλ)."""

    def _after(self, group: Group, moving: list[int]) -> None:
        params = [self._params[i] for i in moving]
        settings = Settings.of(group)
        lr, momentum, _, decay, sign = settings
        kappa = settings.kappa
        grads = [p.grad for p in params if p.grad is not None]
        if any(g.is_sparse for g in grads):
            raise ValueError(
                "sparse gradients with nesterov=True cannot be read; "
                "use plain momentum, or sparse=False in the embedding"
            )
        pp, pg, pb, gg, gb, bb = gram(params, grads, momentum_buffers(self._optimizer, params))
        along = kappa * (sign * pg + decay * pp + momentum * pb)  # θ′·d
        square = kappa**2 * (
            gg
            + decay**2 * pp
            + momentum**2 * bb
            + 2 * (sign * decay * pg + sign * momentum * gb + decay * momentum * pb)
        )
        self._note(along + lr * square, lr / 2 * square, moving)


def learning_rate(group: Group) -> Scalar:
    """η of a group as a number, or as a 0-dim double tensor of its own; 1 where there is none."""
    lr = group.get("lr", 1.0)
    if isinstance(lr, Tensor):
        return lr.detach().to(torch.float64, copy=True).reshape(())
    return lr


def momentum_buffers(optimizer: Optimizer, params: list[Tensor]) -> list[Tensor]:
    """Torch's b = −v of those parameters that have one."""
    states = [optimizer.state.get(p, {}) for p in params]
    return [b for state in states if (b := state.get("momentum_buffer")) is not None]
