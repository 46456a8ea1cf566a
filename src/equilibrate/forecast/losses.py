"""Training losses, and those at the mean of the parameters, in bounded memory."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibrate.forecast.outcome import Samples
from equilibrate.forecast.running_mean import SampleLog
from equilibrate.watching.sharding import as_dtensor, mean_over_processes
from equilibrate.watching.sums import send
from equilibrate.watching.window import Window

_CAPACITY = 512
"""Rows of the window."""
_PENDING = 64
"""Losses that are added to it together."""
_COMPARISONS = 256
"""Comparisons that are kept."""
_BETWEEN = 50
"""Steps between two comparisons. A forward pass is a third of a step, so they take 0.7 % of the
time."""


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
        if self._window is None:
            return
        own = self._window.rows().cpu()
        if (mean := mean_over_processes(own)) is not own:  # also where this process has no loss
            self._window.rows().copy_(mean)

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


class Comparisons:
    """The last comparisons of the loss at the parameters with that at their mean.

    Args:
        device: Where they are kept.
        step: Number of steps so far.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        self._log = SampleLog(_COMPARISONS)
        self._pairs = torch.zeros(_COMPARISONS, 2, dtype=torch.float64, device=device)
        self.due = step + _BETWEEN
        """Step of the next one."""

    @property
    def taken(self) -> int:
        """Number of comparisons so far."""
        return self._log.taken

    def add(self, step: int, age: float, own: float | Tensor, averaged: float | Tensor) -> None:
        """Note a comparison; tensors are not waited for.

        Args:
            step: Number of steps so far.
            age: Mean age of the parameters in the mean, in steps.
            own: The loss at the parameters.
            averaged: The loss at their mean.
        """
        row = self._log.add(step, age)
        for number, out in zip((own, averaged), self._pairs[row], strict=True):
            if isinstance(number, Tensor):
                out.copy_(number.detach().reshape(()), non_blocking=True)
            else:
                out.fill_(number)

    def spread_out(self, step: int, since_reset: int) -> None:
        """Choose the step of the next comparison, so that those kept reach far enough back."""
        self.due = step + max(_BETWEEN, since_reset // _COMPARISONS)

    def differences(self, since: int) -> Samples:
        """Return by how much the loss at the mean was lower. It waits for the device.

        Args:
            since: Step before which no parameters may have a noticeable weight in the mean.
        """
        own, averaged = self._pairs.cpu().numpy().T
        return self._log.samples(own - averaged, since)

    def share(self) -> None:
        """Give all processes the mean of their comparisons; all of them must call it."""
        own = self._pairs.cpu()
        if (mean := mean_over_processes(own)) is not own:
            self._pairs.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {**self._log.state_dict(self._pairs), "due": self.due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.due = state["due"]
        rows = self._log.load_state_dict(state, width=2)
        self._pairs.copy_(self._pairs.new_tensor(rows))


def check_loss(loss: Any) -> float | Tensor:
    """Return a loss as a number, or as it is if it is a tensor.

    Args:
        loss: What a user has handed over. Every process must hand over a DTensor.

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
    what = type(loss).__name__
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}"
    raise TypeError(
        f"loss must be a number or a floating-point tensor with one element, got {what}: pass the "
        "training loss of the step"
    )
