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
    form: −θ·Δ/η and Δ²/(2η). What is measured, and what is lost by an edit, it knows from the
    documentation alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 1) -> None:
        self.optimizer = optimizer
        self.every = every
        self.start = 0
        self.rows: list[dict[Tensor, tuple[float, float, float]] | None] = []
        """η, L and R of each tensor at each step; None for a skipped one."""
        self.edits: set[int] = set()
        """Numbers of the steps before which parameters or buffers were edited."""
        self.changes: set[int] = set()
        """Numbers of the steps before which the coefficients of the relation changed."""
        self.coefficients: list[tuple[float, float] | None] | None = None

    def reset(self) -> None:
        self.start = len(self.rows)

    def edit(self) -> None:
        """Call it after parameters were edited, before the next step."""
        self.edits.add(len(self.rows))

    def before(self) -> None:
        """Call after backward, before the step."""
        self.old = {}
        coefficients = []
        for group in self.optimizer.param_groups:
            coefficients.append(self._coefficients(group, group["params"][0]))
            lr = group.get("lr")
            for p in group["params"]:
                grad = None if p.grad is None else p.grad.detach().to_dense().double().clone()
                self.old[p] = p.detach().double().clone(), grad, 1.0 if lr is None else float(lr)
        if self.coefficients not in (None, coefficients):
            self.changes.add(len(self.rows))
        self.coefficients = coefficients

    def after(self, *, skipped: bool = False) -> None:
        sides = {
            p: self._sides(group, p, *self.old[p])
            for group in self.optimizer.param_groups
            for p in group["params"]
        }
        self.rows.append(None if skipped else sides)

    def _coefficients(self, group: dict, p: Tensor) -> tuple[float, float] | None:
        """Momentum and dampening of SGD; None for the step form."""
        precise = p.dtype in (torch.float32, torch.float64)
        if type(self.optimizer) is not torch.optim.SGD or group["nesterov"] or not precise:
            return None
        mu, nu = group["momentum"], group["dampening"] if group["momentum"] else 0.0
        return None if nu == 1 else (mu, nu)

    def _sides(
        self, group: dict, p: Tensor, theta: Tensor, grad: Tensor | None, lr: float
    ) -> tuple[float, float, float]:
        if grad is None or lr == 0:  # nothing moves
            return lr, 0.0, 0.0
        coefficients = self._coefficients(group, p)
        if coefficients is None:
            delta = p.detach().double() - theta
            return lr, -(theta * delta).sum().item() / lr, (delta * delta).sum().item() / (2 * lr)
        mu, nu = coefficients
        grad = (-grad if group["maximize"] else grad) + group["weight_decay"] * theta
        v = self.optimizer.state[p]["momentum_buffer"].to_dense().double() if mu else grad
        right = (1 + mu) / (2 * (1 - nu)) * lr * (v * v).sum().item()
        return lr, (theta * grad).sum().item(), right

    def is_measured(self, step: int) -> bool:
        """Whether a step, from 0, is measured: the first, and one in each block."""
        block = step // self.every
        position = block * self.every + measured_position(block, self.every)
        return step in (self.start, position)

    def counted(self) -> list[int]:
        """Steps up to the last measured one, or the last change of the coefficients.

        An edit loses the steps since the last of these, and those up to the next measured one.
        """
        counted: list[int] = []
        opened: list[int] = []
        is_open = False
        for i in range(self.start, len(self.rows)):
            if i in self.edits:
                is_open, opened = False, []
            if i in self.changes:
                counted, opened = counted + opened, []
            is_open = is_open or self.is_measured(i)
            opened += [i] * is_open
            if self.is_measured(i):
                counted, opened = counted + opened, []
        return [i for i in counted if self.rows[i] is not None]

    def expected(self, count: int, params: Iterable[Tensor] | None = None) -> tuple[float, float]:
        """L and R over the last `count` steps that are counted."""
        window = self.counted()[-count:]
        samples = {i for i in window if self.is_measured(i)}
        left = right = 0.0
        for p in self.old if params is None else params:
            rows = {i: self.rows[i][p] for i in window}  # pyright: ignore[reportOptionalSubscript]
            sampled = sum(rows[i][0] for i in samples) or 1.0
            one = sum(rows[i][0] * rows[i][2] for i in samples) / sampled
            difference = sum(lr * (x - y) for lr, x, y in rows.values())
            right += one
            left += one + difference / (sum(lr for lr, _, _ in rows.values()) or 1.0)
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
