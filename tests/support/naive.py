"""Twins of the library, written as a new user would: slow, literal, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from equilibrate.watching.watcher import measured_position


def half_running_mean(values: list[float]) -> float:
    """The paper's equation, literally."""
    t = len(values)
    t0 = t // 2
    return sum(values[t0:t]) / (t - t0)


class Twin:
    """Both sides of FDR1 of every single step, by copying everything; steps weigh by their rate.

    Nesterov momentum, dampening 1, half precision and other optimizers are read through the step
    form: −θ·Δ/η and Δ²/(2η).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 1) -> None:
        self.optimizer = optimizer
        self.every = every
        self.start = 0
        self.rows: list[dict[Tensor, tuple[float, float, float]] | None] = []
        """η, L and R of each tensor at each step; None for one that was skipped."""

    def reset(self) -> None:
        self.start = len(self.rows)

    def before(self) -> None:
        """Call after backward, before the step."""
        self.old = {}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                grad = None if p.grad is None else p.grad.detach().to_dense().double().clone()
                self.old[p] = p.detach().double().clone(), grad, float(group["lr"])

    def after(self, *, skipped: bool = False) -> None:
        """Call after the step; a fused one may have been skipped, and is then not counted."""
        self.rows.append(
            None
            if skipped
            else {
                p: self._sides(group, p, *self.old[p])
                for group in self.optimizer.param_groups
                for p in group["params"]
            }
        )

    def counted(self) -> int:
        """Steps since the last reset that were made."""
        return sum(row is not None for row in self.rows[self.start :])

    def _sides(
        self, group: dict, p: Tensor, theta: Tensor, grad: Tensor | None, lr: float
    ) -> tuple[float, float, float]:
        if grad is None or lr == 0:  # nothing moves
            return lr, 0.0, 0.0
        sgd = type(self.optimizer) is torch.optim.SGD and not group["nesterov"]
        mu = group["momentum"] if sgd else 0.0
        nu = group["dampening"] if mu else 0.0
        if not sgd or nu == 1 or p.dtype not in (torch.float32, torch.float64):
            delta = p.detach().double() - theta
            left, right = -(theta * delta).sum() / lr, (delta * delta).sum() / (2 * lr)
            return lr, left.item(), right.item()
        grad = (-grad if group["maximize"] else grad) + group["weight_decay"] * theta
        v = -grad
        if mu:
            v = -self.optimizer.state[p]["momentum_buffer"].to_dense().double()
        factor = (1 + mu) / (2 * (1 - nu)) * lr
        return lr, (theta * grad).sum().item(), factor * (v * v).sum().item()

    def is_measured(self, step: int) -> bool:
        """Whether a step, from 0, is measured: the first, and one in each block."""
        block = step // self.every
        position = block * self.every + measured_position(block, self.every)
        return step in (self.start, position)

    def expected(
        self, count: int, params: Iterable[Tensor] | None = None, *, last: int | None = None
    ) -> tuple[float, float]:
        """L and R over a window of some steps up to the last measured one, or another."""
        if last is None:
            last = max(i for i in range(self.start, len(self.rows)) if self.is_measured(i))
        made = [(i, row) for i, row in enumerate(self.rows[: last + 1]) if row is not None]
        window = dict(made[len(made) - count :])
        chosen = list(made[-1][1]) if params is None else list(params)
        left = right = 0.0
        for p in chosen:
            rows = {i: row[p] for i, row in window.items()}
            sampled = [rows[i] for i in window if self.is_measured(i)]
            difference = sum(lr * (x - y) for lr, x, y in rows.values())
            one = sum(lr * y for lr, _, y in sampled) / sum(lr for lr, _, _ in sampled)
            right += one
            left += one + difference / sum(lr for lr, _, _ in rows.values())
        return left, right


def naive_spread(rows: list[tuple[int, float]]) -> tuple[float, float]:
    """Root mean square and 95 % quantile of the changes over at least half of a window.

    Args:
        rows: Steps of each row, and the change of the potential.
    """
    positions, potential = [0], [0.0]
    for steps, change in rows:
        positions.append(positions[-1] + steps)
        potential.append(potential[-1] + change)
    total, chosen = positions[-1], []
    for k in range(65):  # 64 intervals, shorter towards the ends
        near = min(k, 64 - k) / 32
        wanted = total * (near**1.5 / 2 if k < 32 else 1 - near**1.5 / 2)
        nearest = min(range(len(positions)), key=lambda i: (abs(positions[i] - wanted), -i))
        if positions[nearest] not in [positions[i] for i in chosen]:
            chosen.append(nearest)
    if len(chosen) < 9:
        return math.nan, math.nan
    changes = sorted(
        abs(potential[t] - potential[s])
        for s in chosen
        for t in chosen
        if positions[t] - positions[s] >= total / 2
    )
    place = 0.95 * (len(changes) - 1)
    low = changes[int(place)]
    high = changes[min(int(place) + 1, len(changes) - 1)]
    mean_square = sum(change**2 for change in changes) / len(changes)
    return math.sqrt(mean_square), low + (place - int(place)) * (high - low)
