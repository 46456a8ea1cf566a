"""Records losses in bounded memory, without waiting for the device that they are on."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equilibrate._engine.sharding import device_for
from equilibrate.gains import Losses

_CAPACITY = 512


class LossRecord:
    """Losses handed over during training, and how many steps had been made each time.

    When `_CAPACITY` entries are stored, neighbours are merged into their means. If the default
    process group is initialized, losses are averaged over its processes when they are read, so
    that all of them decide alike.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(_CAPACITY, dtype=torch.float64, device="cpu")
        self._steps: list[int] = []
        self._counts: list[int] = []
        self._start = 0

    def restart(self, step: int) -> None:
        """Forget all losses; the next one is of an interval that begins at this step."""
        self._steps, self._counts, self._start = [], [], step

    def add(self, step: int, loss: float | Tensor) -> None:
        """Record a loss.

        Args:
            step: Number of steps so far.
            loss: A number, or a tensor with one element.
        """
        if len(self._steps) == _CAPACITY:
            self._merge()
        place = self._sums[len(self._steps)]
        if isinstance(loss, Tensor):
            if loss.device != self._sums.device:
                self._sums = self._sums.to(loss.device, non_blocking=True)
                place = self._sums[len(self._steps)]
            place.copy_(loss.detach().reshape(()))
        else:
            place.fill_(float(loss))
        self._steps.append(step)
        self._counts.append(1)

    def losses(self) -> Losses:
        """Return what was recorded. It waits for the device.

        If there are several processes, all of them must call it.
        """
        kept = len(self._steps)
        counts = torch.zeros(_CAPACITY, dtype=torch.float64, device="cpu")
        counts[:kept] = counts.new_tensor(self._counts)
        sums = torch.where(counts > 0, self._sums.cpu(), 0.0)
        own = torch.stack([sums, counts])
        total = over_processes(own)
        means = total[0, :kept] / total[1, :kept]
        if total is not own:  # what any one of the processes saves from now on is right for all
            self._sums[:kept] = (means * counts[:kept]).to(self._sums.device)
        return Losses(self._start, tuple(self._steps), tuple(means.tolist()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in lists: tensors must have the same shape at any time to be loaded."""
        return {
            "start": self._start,
            "steps": list(self._steps),
            "counts": list(self._counts),
            "sums": self._sums[: len(self._steps)].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._start = state["start"]
        self._steps, self._counts = list(state["steps"]), list(state["counts"])
        self._sums[: len(self._steps)] = self._sums.new_tensor(state["sums"])

    def _merge(self) -> None:
        half = _CAPACITY // 2
        self._sums[:half] = self._sums.view(half, 2).sum(1)
        self._steps = self._steps[1::2]
        self._counts = [a + b for a, b in zip(self._counts[::2], self._counts[1::2], strict=True)]


def over_processes(values: Tensor) -> Tensor:
    """Return the sum over all processes, each of which must call it.

    Args:
        values: Numbers of the host, as many on each process.

    Returns:
        Numbers of the host; those of this process if there is no other.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return values
    total = values.to(device_for(None, values.device), copy=True)  # NCCL adds up on GPUs only
    dist.all_reduce(total)
    return total.cpu()


def check_loss(loss: object) -> float | Tensor:
    """Return a loss that can be recorded.

    Args:
        loss: What a user has handed over.

    Raises:
        TypeError: If it is not a number or a tensor with one element.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    if isinstance(loss, Real) and not isinstance(loss, bool):
        return float(loss)
    if hasattr(loss, "item") and getattr(loss, "size", None) == 1:  # a number of NumPy's
        return float(loss.item())  # pyright: ignore[reportAttributeAccessIssue]
    what = type(loss).__name__
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}"
    raise TypeError(
        f"loss must be a number or a floating-point tensor with one element, got {what}: pass the "
        "mean training loss since the last call"
    )
