"""Training losses in bounded memory."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibrate.watching.sharding import as_dtensor, share_mean
from equilibrate.watching.sums import send
from equilibrate.watching.window import Window

_CAPACITY = 512
"""Rows of the window."""
_PENDING = 64
"""Losses that are added to it together."""
_SLACK = 16
"""By how many more than by half as many again calls and steps may differ."""


class Losses:
    """The losses of successive steps over the half-running window, one for each call of `add`.

    Losses that are not finite are left out. Nothing waits for the device until `blocks` is
    asked for.
    """

    def __init__(self) -> None:
        self._window: Window | None = None
        self.restart()

    def restart(self) -> None:
        """Forget all losses."""
        self.calls = 0
        """Calls of `add` since then, each of which is a step."""
        self._given: list[bool] = []
        if self._window is not None:
            self._window.reset()

    def add(self, loss: Any) -> None:
        """Record the loss of a step.

        Args:
            loss: A number, a tensor with one element, which is not waited for, or None.
        """
        if self._window is None or (isinstance(loss, Tensor) and loss.device != self._device):
            self._allocate(loss.device if isinstance(loss, Tensor) else torch.device("cpu"))
        if loss is not None:
            checked, slot = check_loss(loss), self._slots[len(self._given)]
            if isinstance(checked, Tensor):
                slot.copy_(checked.detach().reshape(()), non_blocking=True)
            else:
                slot.fill_(checked)
        self._given.append(loss is not None)
        self.calls += 1
        if len(self._given) == _PENDING:
            self._settle()

    def blocks(self, *, shared: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean losses over the later half of the steps. It waits for the device.

        Args:
            shared: Whether to average over all processes, each of which must then call it.

        Returns:
            How many steps ago the middle of each mean was, the means, and how many losses are in
            each. Steps without a finite loss are left out.
        """
        if shared:
            self.share()
        self._settle()
        if self._window is None:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        rows, lengths = self._window.rows().cpu().numpy(), self._window.lengths().astype(float)
        ago = lengths.sum() - np.cumsum(lengths) + lengths / 2
        used = rows[:, 1] > 0
        return ago[used], rows[used, 0] / rows[used, 1], rows[used, 1]

    def share(self) -> None:
        """Give all processes the mean of their losses; all of them must call it."""
        self._settle()
        if self._window is not None:  # also where this process has no loss
            share_mean(self._window.rows())

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state; None before the first loss."""
        self._settle()
        return None if self._window is None else self._window.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a state that `state_dict` returned."""
        self._window = None
        self.restart()
        if state is not None:
            self._allocate(state["rows"].device).load_state_dict(state)
            self.calls = int(state["lengths"].sum() + state["dropped"])

    def _allocate(self, device: torch.device) -> Window:
        """Keep losses on a device, those that there are included.

        Returns:
            Their window.
        """
        state = self.state_dict()
        self._device, self._window = device, Window(2, device, _CAPACITY)
        self._pending = torch.zeros(_PENDING, dtype=torch.float64, device=device)
        self._slots = self._pending.unbind(0)
        if state is not None:
            self._window.load_state_dict(state)
        return self._window

    def _settle(self) -> None:
        if self._window is None or not self._given:
            return
        values = self._pending[: len(self._given)]
        used = values.isfinite()
        if not all(self._given):
            used &= send(self._given, torch.bool, values.device)
        rows = torch.stack([torch.where(used, values, 0.0), used.double()], dim=1)
        self._window.extend(rows, [1] * len(rows))
        self._given = []


def are_mismatched(calls: int, steps: int) -> bool:
    """Return whether a function is not called once after each optimizer step.

    Gradient scaling skips some sixteen steps at the start.
    """
    return max(calls - 1.5 * steps, steps - 1.5 * calls) > _SLACK


def check_loss(loss: Any, what: str = "loss") -> float | Tensor:
    """Return a loss as a number, or as it is if it is a tensor.

    Args:
        loss: What a user has handed over. Every process must hand over a DTensor.
        what: What it is called.

    Raises:
        TypeError: If it is not a number or a floating-point tensor with one element.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        distributed = as_dtensor(loss)
        return loss if distributed is None else distributed.full_tensor()
    if isinstance(loss, Real) and not isinstance(loss, bool):
        return float(loss)
    if not isinstance(loss, Tensor) and hasattr(loss, "item") and getattr(loss, "size", 0) == 1:
        return float(loss.item())  # a number of NumPy's
    got = type(loss).__name__
    if isinstance(loss, Tensor):
        got = f"a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}"
    raise TypeError(
        f"{what} must be a number or a floating-point tensor with one element, got {got}: it is "
        "the training loss of the step"
    )
