"""Steps that gradient scaling has skipped inside a fused optimizer, counted on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Skips:
    """Counts skipped steps without waiting for the device.

    Args:
        device: Where to count.
        skipped: Steps skipped so far.
        pending: How many of them were skipped since the last measurement that became a row.
    """

    def __init__(self, device: torch.device, skipped: int | Tensor = 0, pending: int = 0) -> None:
        self._device = device
        self.total: Tensor | None = None
        """Skipped steps so far; None if gradient scaling was never seen."""
        if isinstance(skipped, Tensor):
            self.total = skipped.to(device, copy=True, non_blocking=True)
        elif skipped:
            self.total = torch.full((), float(skipped), dtype=torch.float64, device=device)
        self.settled = None if self.total is None else self.total - pending
        """Skipped steps before the first measurement that has not become a row yet."""

    def count(self, found: Tensor) -> None:
        """Count a step, given whether its gradients were found to be infinite."""
        if self.total is None:
            self.total = torch.zeros((), dtype=torch.float64, device=self._device)
        self.total += on_device(found, self.total) > 0

    def note(self, found: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return whether the last step was skipped, and how many were so far, for an `Entry`."""
        if self.total is None:
            return None
        skipped = None if found is None else on_device(found, self.total) > 0
        last = torch.zeros_like(self.total) if skipped is None else skipped.double()
        return last, self.total.clone()

    @property
    def pending(self) -> int:
        """Steps skipped since the last measurement that became a row; it waits for the device."""
        return int(self) - (0 if self.settled is None else int(self.settled))

    def __int__(self) -> int:
        return 0 if self.total is None else int(self.total)


def on_device(found: Tensor, like: Tensor) -> Tensor:
    """Return what gradient scaling has found as a scalar on the device of another tensor."""
    return found.detach().reshape(()).to(like.device, non_blocking=True)
