"""Twins of the library, written as a new user would: slow, literal, in float64."""

from __future__ import annotations

import copy

import torch
from torch import Tensor


def half_running_mean(values: list[float]) -> float:
    """The paper's equation, literally."""
    t = len(values)
    t0 = t // 2
    return sum(values[t0:t]) / (t - t0)


class NaiveSGDSides:
    """O_L = θ·∇f and O_R = (1+μ)/(2(1−ν)) η v² of one SGD step, by copying everything.

    Nesterov momentum and half precision are read through the step form: −θ·Δ/η and Δ²/(2η).
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
            mu, nu = group.get("momentum", 0.0), group.get("dampening", 0.0)
            for p in group["params"]:
                theta, grad, lr = self.old[p]
                lr = float(lr)
                if grad is None:
                    one_left = one_right = 0.0
                elif (
                    isinstance(self.optimizer, torch.optim.SGD)
                    and not group["nesterov"]
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
