"""Losses of mini-batches at the parameters and at their mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibrate.forecast.outcome import Samples
from equilibrate.forecast.running_mean import SampleLog
from equilibrate.watching.sharding import mean_over_processes

_ROWS = 256
"""Comparisons that are kept."""
_BETWEEN = 50
"""Steps between two comparisons. A forward pass is a third of a step, so they take 0.7 % of the
time."""


class Comparisons:
    """The last comparisons of the loss at the parameters with that at their mean.

    Args:
        device: Where they are kept.
        step: Number of steps so far.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        self._log = SampleLog(_ROWS)
        self._pairs = torch.zeros(_ROWS, 2, dtype=torch.float64, device=device)
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
        self.due = step + max(_BETWEEN, since_reset // _ROWS)

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
