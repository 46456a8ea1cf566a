"""The forms of SGD, a small model, and a loop with a naive accumulation around each step."""

import pytest
import torch
from torch import nn

from support.naive import half_running_mean

STEPS = 45
RELATIVE = 1e-5

SGD_FORMS = {
    "plain": {},
    "decay": {"weight_decay": 0.05},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.02},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "maximize momentum": {"maximize": True, "momentum": 0.5, "weight_decay": 0.1},
    "maximize nesterov": {"maximize": True, "momentum": 0.5, "nesterov": True},
}


def small_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, optimizer, naive=None, steps=STEPS, sign=1.0, on_step=None):
    """A plain loop on random data, with a naive accumulation around each step."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for t in range(steps):
        x = torch.randn(16, 6, generator=generator).to(dtype)
        y = torch.randint(3, (16,), generator=generator)
        optimizer.zero_grad()
        (sign * nn.functional.cross_entropy(model(x), y)).backward()
        if naive:
            naive.before()
        optimizer.step()
        if naive:
            naive.after()
        if on_step:
            on_step(t)


def assert_agrees(reading, lefts, rights, relative=RELATIVE):
    assert reading.left == pytest.approx(half_running_mean(lefts), rel=relative)
    assert reading.right == pytest.approx(half_running_mean(rights), rel=relative)
