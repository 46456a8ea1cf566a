"""A small model, optimizers of every kind, and a training loop with a monitor and its twin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import equilibrate as eq
from support.naive import Twin


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def noisy_gradients(params: Iterable[Any]) -> None:
    """Gradients of a quadratic with its minimum at 1, and noise."""
    for p in params:
        p.grad = 0.3 * (p.detach() - 1) + torch.randn_like(p)


def fused_step(optimizer: Optimizer, *, skip: bool) -> None:
    """A step as GradScaler makes it with a fused optimizer, which skips it on the device."""
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(skip))  # pyright: ignore
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]


class Loop:
    """A training loop on noise, with a monitor and its twin."""

    def __init__(
        self,
        make: Callable[[Any], Optimizer],
        every: int,
        dtype: torch.dtype = torch.float64,
        model: nn.Module | None = None,
        **watch: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = small_model(dtype) if model is None else model
        self.optimizer = make(list(self.model.parameters()))
        self.monitor = eq.Monitor(self.optimizer, self.model, every=every, **watch)
        self.twin = Twin(self.optimizer, every)
        self.generator = torch.Generator().manual_seed(1)

    def backward(self) -> torch.Tensor:
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(4, 6, generator=self.generator).to(dtype)
        y = torch.randn(4, 3, generator=self.generator).to(dtype)
        self.optimizer.zero_grad()
        sign = -1 if self.optimizer.param_groups[0].get("maximize") else 1
        loss = sign * nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        return loss

    def step(self, take: Callable[[], Any] | None = None, without: Iterable[int] = ()) -> None:
        """Make a step, by the optimizer's own method or another way.

        Args:
            take: What makes the step.
            without: Which parameters have no gradient.
        """
        self.backward()
        for i in without:
            list(self.model.parameters())[i].grad = None
        self.twin.before()
        (take or self.optimizer.step)()
        if self.monitor.step > len(self.twin.rows):  # not a first step with a rate of zero
            self.twin.after()

    def skip(self) -> None:
        """A step of a fused optimizer that gradient scaling skips."""
        self.backward()
        self.twin.before()
        fused_step(self.optimizer, skip=True)
        self.twin.after(skipped=True)

    def run(self, steps: int, on_step: Callable[[], Any] = lambda: None) -> None:
        for _ in range(steps):
            self.step()
            on_step()

    def check(self, tolerance: float) -> eq.Reading:
        """Compare all readings with the twin's, and return that of the model."""
        read = self.monitor.read()
        reading, named = read.whole, dict(self.model.named_parameters())
        left, right = self.twin.expected(reading.count)
        assert reading.right == pytest.approx(right, rel=tolerance)
        assert reading.left == pytest.approx(left, rel=tolerance, abs=tolerance * right)
        counted = self.twin.counted()
        assert abs(reading.count - len(counted) / 2) <= 2 * self.monitor.every
        assert reading.step == sum(row is not None for row in self.twin.rows)
        for layer in read.layers().layers:
            found = layer.reading
            _, right = self.twin.expected(found.count, [named[layer.name]])
            assert found.right == pytest.approx(right, rel=10 * tolerance, abs=1e-12)
        return reading


class SignDescent(Optimizer):
    """Somebody's own optimizer, whose groups have no learning rate called lr."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"size": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["size"] * p.grad.sign())


class OddKeys(Optimizer):
    """Its keys are called as SGD's are and mean something else."""

    def __init__(self, params: Any) -> None:
        defaults = {"lr": 0.1, "momentum": torch.tensor([0.9, 0.8]), "nesterov": None}
        super().__init__(params, {**defaults, "dampening": "none", "weight_decay": "some"})

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["momentum"] = group["momentum"] * 0.99
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


class HalvedSGD(SGD):
    """A subclass that does something else must not be taken for SGD."""

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] / 2 * p.grad)


def decayed(parent: type[Optimizer]) -> Any:
    """A class that decays the weights by itself and leaves the rest of a step to its parent."""

    class Decayed(parent):
        fails = ""

        @torch.no_grad()
        def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
            if self.fails == "before":
                raise InterruptedError
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
            super().step(closure)
            if self.fails == "after":
                raise InterruptedError

    return Decayed


FORMS: dict[str, Callable[..., Optimizer]] = {
    "plain": lambda p, **k: SGD(p, lr=0.05, weight_decay=0.05, **k),
    "momentum": lambda p, **k: SGD(p, lr=0.05, momentum=0.9, **k),
    "dampening": lambda p, **k: SGD(p, lr=0.05, momentum=0.9, dampening=0.2, **k),
    "nesterov": lambda p, **k: SGD(p, lr=0.05, momentum=0.9, nesterov=True, **k),
    "AdamW": lambda p, **k: AdamW(p, lr=1e-2, **k),
}
"""SGD in all its forms, and AdamW, each of which may be fused."""
_WITHOUT_CASE = {"Optimizer", "SGD", "LBFGS", "SparseAdam", "Muon"}
OTHERS: dict[str, Callable[[Any], Optimizer]] = {
    **{
        name: (lambda p, kind=kind: kind(p, lr=1e-2))
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in _WITHOUT_CASE
    },
    "Adam, amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW, fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "AdamW, foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "RMSprop, momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "SGD, nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.02),
    "SGD, dampening 1": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=1),
    "SignDescent": SignDescent,
    "OddKeys": OddKeys,
    "HalvedSGD": lambda p: HalvedSGD(p, lr=0.1),
    "decayed SGD": lambda p: decayed(SGD)(p, lr=0.1),
}
"""Optimizers that are read through the step form, and step without a closure."""
if hasattr(torch.optim, "Muon"):  # not in torch 2.8
    OTHERS["Muon"] = lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2)
