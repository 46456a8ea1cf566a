"""Readings equal a naive twin, whatever the loop does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.naive import Twin
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR

import equilibrate as eq


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


class Loop:
    """A training loop with a monitor and its twin."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, every: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.monitor = eq.Monitor(optimizer, model, every=every)
        self.twin = Twin(optimizer, every)
        self.generator = torch.Generator().manual_seed(1)
        self.dtype = next(model.parameters()).dtype

    def backward(self) -> None:
        x = torch.randn(4, 6, generator=self.generator).to(self.dtype)
        y = torch.randn(4, 3, generator=self.generator).to(self.dtype)
        self.optimizer.zero_grad()
        sign = -1 if self.optimizer.param_groups[0].get("maximize") else 1
        (sign * nn.functional.mse_loss(self.model(x), y)).backward()

    def step(self) -> None:
        self.backward()
        self.twin.before()
        self.optimizer.step()
        if self.monitor.step > len(self.twin.rows):  # not a first step with a rate of zero
            self.twin.after()

    def check(self, tolerance: float, last: int | None = None) -> None:
        read = self.monitor.read()
        reading = read.whole
        left, right = self.twin.expected(reading.count, last=last)
        assert reading.right == pytest.approx(right, rel=tolerance)
        assert reading.left == pytest.approx(left, rel=tolerance, abs=tolerance * right)
        seen = len(self.twin.rows) - self.twin.start
        assert abs(reading.count - seen / 2) <= 2 * self.monitor.every
        for (_, p), layer in zip(
            self.model.named_parameters(), read.layers().layers, strict=True
        ):
            _, right = self.twin.expected(layer.reading.count, [p], last=last)
            assert layer.reading.right == pytest.approx(right, rel=tolerance)


SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 0.02},
    "momentum": {"momentum": 0.9, "weight_decay": 0.02},
    "dampening": {"momentum": 0.8, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"momentum": 0.5, "maximize": True},
    "fused": {"momentum": 0.9, "fused": True},
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler] | None] = {
    "constant": None,
    "warm-up": lambda o: LinearLR(o, 0.1, total_iters=60),
    "from zero": lambda o: LambdaLR(o, lambda step: min(1.0, step / 60)),
    "cosine": lambda o: CosineAnnealingLR(o, 400),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=400),
}


@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_readings_of_sgd_in_double_precision_equal_the_twin(settings, schedule, every):
    if schedule == "one-cycle" and not SETTINGS[settings].get("momentum"):
        pytest.skip("OneCycleLR cycles a momentum, which this optimizer does not have")
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.05, **SETTINGS[settings])
    make = SCHEDULES[schedule]
    scheduler = None if make is None else make(optimizer)
    loop = Loop(optimizer, model, every)
    for _ in range(330):
        loop.step()
        if scheduler is not None:
            scheduler.step()
    # A change of the momentum ends an interval, measured or not.
    cycles = schedule == "one-cycle" and every == 16 and settings != "nesterov"
    loop.check(1e-9, last=328 if cycles else None)
    assert math.isfinite(loop.monitor.reading().stderr)
