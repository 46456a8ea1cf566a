"""The coefficients with which the sums of a measurement make up L − R and R."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibrate._engine.arithmetic.sums import send
from equilibrate._engine.optimizer.updates import Scalar, Update
from equilibrate.observables import fdr1_coefficient


def over_one_step(update: Update, *, fresh: bool) -> tuple[Scalar, ...]:
    """Return the coefficients for a single step, of θ′·d, of θ·b before it, and of d²."""
    lr, mu, scale = update.lr, update.momentum, _scale(update)
    keep = 1 - update.dampening
    right = fdr1_coefficient(lr, mu, update.dampening) * scale**2
    if fresh:  # the first step is undampened: L = θ·b′ = θ′·b′ + ηb′²
        return _if_moving(lr, (1.0, 0.0, 0.0, lr - right, right))
    square = (1 - mu) / 2 * lr * scale**2 / keep
    return _if_moving(lr, (scale / keep, -mu / keep, 0.0, square, right))


def over_an_interval(update: Update, begun: Update | None = None) -> tuple[Scalar, ...]:
    """Return those for an interval, of θ·b at both ends and of the difference of norms."""
    lr, mu, keep = update.lr, update.momentum, 1 - update.dampening
    if begun is not None and not isinstance(lr, Tensor) and not isinstance(begun.lr, Tensor):
        lr = (lr + begun.lr) / 2
    right = fdr1_coefficient(update.lr, mu, update.dampening) * _scale(update) ** 2
    along = mu / keep if mu else 0.0
    drift = -(1 - mu) / (2 * keep) * _inverse(lr)
    return _if_moving(lr, (along, -along, drift, 0.0, right))


def _if_moving(lr: Scalar, coefficients: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """Return the coefficients, or zeros for η = 0, at which nothing moves and FDR1 says nothing."""
    if isinstance(lr, Tensor):
        moving = (lr != 0).to(lr.dtype)  # in double precision, as all coefficients
        return tuple(c * moving for c in coefficients)
    return coefficients if lr else (0.0,) * len(coefficients)


def times(coefficient: Tensor, value: Tensor) -> Tensor:
    """Return the product, zero where the coefficient is: a NaN that is not used has no effect."""
    return torch.where(coefficient == 0, 0.0, coefficient * value)


def _scale(update: Update) -> Scalar:
    """Return what turns the measured direction into d: a difference θ − θ′ is ηd."""
    return _inverse(update.lr) if update.source == "difference" else 1.0


def _inverse(lr: Scalar) -> Scalar:
    """Return 1/η; 0 for η = 0, at which nothing moves."""
    if isinstance(lr, Tensor):
        return torch.where(lr == 0, 0.0, 1 / lr)
    return 1 / lr if lr else 0.0


def stack(like: Tensor, rows: Sequence[Sequence[Scalar]]) -> Tensor:
    """Return the numbers as a float64 tensor, of which some may be tensors on the device.

    All others are sent there together, since sending one by one would wait for it.
    """
    on_device = {
        (i, j): value
        for i, row in enumerate(rows)
        for j, value in enumerate(row)
        if isinstance(value, Tensor) and value.device == like.device
    }
    sent = host_to(
        like,
        [
            [0.0 if (i, j) in on_device else float(value) for j, value in enumerate(row)]
            for i, row in enumerate(rows)
        ],
    )
    if not on_device:
        return sent
    cells = [
        on_device.get((i, j), cell)
        for i, row in enumerate(sent.unbind(0))
        for j, cell in enumerate(row.unbind(0))
    ]
    return torch.stack(cells).view(sent.shape)


def host_to(like: Tensor, values: Any) -> Tensor:
    """Return numbers on the device of `like`, without waiting for it."""
    return send(values, torch.float64, like.device)
