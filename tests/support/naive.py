"""Twins of the library, written as a new user would: slow, literal, in float64."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor


def half_running_mean(values: list[float]) -> float:
    """The paper's equation, literally."""
    t = len(values)
    t0 = t // 2
    return sum(values[t0:t]) / (t - t0)


class NaiveSGDSides:
    """O_L = θ·∇f and O_R = (1+μ)/(2(1−ν)) η v² of one SGD step, by copying everything.

    Nesterov momentum, dampening 1 and half precision are read through the step form: −θ·Δ/η and
    Δ²/(2η). A step with learning rate 0 moves nothing and counts zero.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.left: list[float] = []
        self.right: list[float] = []
        self.by_parameter: dict[Tensor, tuple[list[float], list[float]]] = {}

    def before(self) -> None:
        """Call after backward, before the step."""
        self.old = {}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                grad = None if p.grad is None else p.grad.detach().to_dense().double().clone()
                self.old[p] = (p.detach().double().clone(), grad, copy.deepcopy(group["lr"]))

    def after(self) -> None:
        left = right = 0.0
        for group in self.optimizer.param_groups:
            mu = group.get("momentum", 0.0)
            nu = group.get("dampening", 0.0) if mu else 0.0
            for p in group["params"]:
                theta, grad, lr = self.old[p]
                lr = float(lr)
                if grad is None or lr == 0:  # nothing moves
                    one_left = one_right = 0.0
                elif (
                    isinstance(self.optimizer, torch.optim.SGD)
                    and not group["nesterov"]
                    and nu != 1
                    and p.dtype in (torch.float32, torch.float64)
                ):
                    if group["maximize"]:
                        grad = -grad
                    grad = grad + group["weight_decay"] * theta
                    if mu:
                        v = -self.optimizer.state[p]["momentum_buffer"].to_dense().double()
                    else:
                        v = -grad
                    one_left = float((theta * grad).sum())
                    one_right = float((1 + mu) / (2 * (1 - nu)) * lr * (v * v).sum())
                else:
                    delta = p.detach().double() - theta
                    one_left = float(-(theta * delta).sum() / lr)
                    one_right = float((delta * delta).sum() / (2 * lr))
                lefts, rights = self.by_parameter.setdefault(p, ([], []))
                lefts.append(one_left)
                rights.append(one_right)
                left += one_left
                right += one_right
        self.left.append(left)
        self.right.append(right)


class ThinnedTwin:
    """What a monitor with `every` reads, from the sides of each single step.

    The steps of a window are cut into intervals as the monitor does it. Both sides of each step are
    known here, so the difference over an interval is a plain sum. R is taken from the measured
    steps, each with the weight of its interval.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.naive = NaiveSGDSides(optimizer)
        self.every = every
        self.reset()

    def reset(self) -> None:
        """Begin a new window."""
        self.since_reset = 0
        self.intervals: list[tuple[int, float, float, bool]] = []
        """Steps, sum of L − R, R of the last step, whether that was measured."""
        self.open: list[tuple[float, float]] | None = None

    def before(self, *, edited: bool = False, changed: bool = False) -> None:
        """Call before a step.

        Args:
            edited: Whether something else has moved the parameters since the last step.
            changed: Whether settings have changed too much for one interval.
        """
        measured = self.since_reset == 0 or (self.since_reset + 1) % self.every == 0
        if edited:
            self.open = None
        if changed and self.open:
            self._close(measured=False)
        if measured and self.open is None:
            self.open = []
        self.measured = measured
        self.naive.before()

    def after(self) -> None:
        """Call after a step."""
        self.naive.after()
        if self.open is not None:
            self.open.append((self.naive.left[-1], self.naive.right[-1]))
        if self.measured:
            self._close(measured=True)
        self.since_reset += 1

    def _close(self, *, measured: bool) -> None:
        assert self.open
        difference = sum(left - right for left, right in self.open)
        self.intervals.append((len(self.open), difference, self.open[-1][1], measured))
        self.open = []

    def read(self) -> tuple[int, float, float]:
        """Return the number of steps in the window, the mean of L − R and that of R."""
        window = self.window()
        steps = sum(row[0] for row in window)
        weight = sum(row[0] for row in window if row[3])
        right = sum(row[0] * row[2] for row in window if row[3]) / weight
        return steps, sum(row[1] for row in window) / steps, right

    def error_bar(self) -> tuple[float, float]:
        """Return the standard error of L/R − 1 and the margin of its interval, or nan."""
        steps, _, right = self.read()
        deviation, margin = naive_spread([row[:2] for row in self.window()])
        return (deviation / steps / right, margin / steps / right) if right else (math.nan,) * 2

    def window(self) -> list[tuple[int, float, float, bool]]:
        """Return the intervals of the later half."""
        ends = [0]
        for steps, *_ in self.intervals:
            ends.append(ends[-1] + steps)
        first = min(range(len(self.intervals)), key=lambda i: abs(ends[i] - ends[-1] // 2))
        while not any(measured for *_, measured in self.intervals[first:]):
            first -= 1
        return self.intervals[first:]


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


class SkippingTwin(ThinnedTwin):
    """A twin for steps that may be skipped: those make up no part of an interval."""

    def after(self, *, skipped: bool = False) -> None:
        """Call after a step, or after a fused one that gradient scaling has skipped."""
        if not skipped:
            super().after()
            return
        if self.measured:
            if self.open:
                self._close(measured=False)
            self.open = []
        self.since_reset += 1
