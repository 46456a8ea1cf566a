"""The squared norm |θ|² at every step, computed on the host from the two sides of FDR1.

With v′ = μv − g and θ′ = θ + ηv′, the left side L = θ·g and the right side R = (1+μ)/2 · ηv′²
determine how |θ|² and θ·v change:

    |θ′|² = |θ|² + 2η(μ θ·v − L + R/(1+μ))
    θ′·v′ = μ θ·v − L + 2R/(1+μ)

Both sides are known for each step, so that the norm needs no further reduction in a training step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibrate.averages import HalfRunningMean
from equilibrate.observables import inner
from equilibrate_paper.ensemble import Epoch
from equilibrate_paper.ensemble.averages import HalfRunningBlocks


def squared_norm(parameters: Mapping[str, Tensor]) -> Tensor:
    """Compute |θ|² of each replica, on the device of the parameters.

    >>> squared_norm({"weight": torch.ones(2, 3, 4), "bias": torch.zeros(2, 3)}).tolist()
    [12.0, 12.0]

    Args:
        parameters: Parameters by name, with the replicas on the first axis.

    Returns:
        The squared norms in float64, (R,).
    """
    return torch.stack([inner(p.flatten(1), p.flatten(1)) for p in parameters.values()]).sum(0)


def norms_before_steps(
    epoch: Epoch, start: Tensor, product: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Compute |θ|² before each step of an epoch of SGD without dampening.

    Args:
        epoch: The measurements of the epoch.
        start: |θ|² of each replica before the epoch, (R,).
        product: θ·v of each replica before the epoch, (R,).
        momentum: μ.

    Returns:
        |θ|² before each step, (steps, R), and θ·v after the epoch, (R,), both in float64.
    """
    left, right = epoch.left.numpy(), epoch.right.numpy()
    products = np.empty((len(left) + 1, left.shape[1]))
    products[0] = product.numpy()
    gains = 2 / (1 + momentum) * right - left
    for step, gain in enumerate(gains):
        products[step + 1] = momentum * products[step] + gain
    changes = 2 * np.array(epoch.lr) * (momentum * products[:-1] - left + right / (1 + momentum))
    norms = start.numpy() + np.cumsum(changes, axis=0) - changes
    return torch.from_numpy(norms), torch.from_numpy(products[-1])


class NormAverages:
    """|θ|² before each step of the latest epoch, and its half-running averages.

    Args:
        replicas: Number of replicas.
        steps: Steps in an epoch.
        momentum: μ.
    """

    def __init__(self, replicas: int, steps: int, momentum: float) -> None:
        self._momentum = momentum
        self._product = torch.zeros(replicas, dtype=torch.float64)
        self._whole = HalfRunningBlocks((replicas,), size=steps)
        self._early = HalfRunningMean((replicas,))
        self._values = torch.empty((0, replicas), dtype=torch.float64)

    def add(self, epoch: Epoch, start: Tensor) -> None:
        """Add an epoch.

        Args:
            epoch: The measurements of the epoch.
            start: |θ|² of each replica before the epoch, on any device.
        """
        self._values, self._product = norms_before_steps(
            epoch, start.cpu(), self._product, self._momentum
        )
        self._whole.extend(self._values)

    def at_end(self) -> dict[str, list[float]]:
        """Return the columns of the row at the end of the epoch."""
        return self._columns(self._whole.value, self._values[-1])

    def within(self, used: int, step: int) -> dict[str, list[float]]:
        """Return the columns of a row within the epoch.

        Args:
            used: The number of steps that the averages within epochs contain already.
            step: The number of steps of the epoch up to the row.
        """
        self.extend(used, step)
        return self._columns(self._early.value, self._values[step - 1])

    def extend(self, used: int, step: int | None = None) -> None:
        """Add steps to the averages within epochs.

        Args:
            used: The number of steps that they contain already.
            step: The last step to add, by default that of the epoch.
        """
        self._early.extend(self._values[used:step])

    def restart(self, *, zero_velocity: bool) -> None:
        """Restart the averages.

        Args:
            zero_velocity: Whether the velocity is set to zero as well.
        """
        self._whole.reset()
        self._early.reset()
        if zero_velocity:
            self._product.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two epochs."""
        return {
            "product": self._product.clone(),
            "whole": self._whole.state_dict(),
            "early": self._early.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._product = state["product"].clone()
        self._whole.load_state_dict(state["whole"])
        self._early.load_state_dict(state["early"])

    @staticmethod
    def _columns(average: Tensor, value: Tensor) -> dict[str, list[float]]:
        return {"norm_square": average.tolist(), "step_norm_square": value.tolist()}
