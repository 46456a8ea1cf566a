"""The momentum buffers of SGD, which its state holds for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class MomentumBuffers:
    """Looks up the momentum buffers of some parameters.

    Looking a tensor up in the state takes long, so its entries are kept.

    Args:
        optimizer: The optimizer.
        params: The parameters.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._params = params
        self._kept: tuple[Any, list[dict[str, Any]]] | None = None

    def tensors(self) -> list[Tensor | None]:
        """Return the buffer of each parameter; None for one that has none yet."""
        state = self._optimizer.state
        if self._kept is None or not self._is_current(state, *self._kept):
            if any(p not in state for p in self._params):
                return [state.get(p, {}).get("momentum_buffer") for p in self._params]
            self._kept = state, [state[p] for p in self._params]
        return [entry.get("momentum_buffer") for entry in self._kept[1]]

    def count_missing(self) -> int:
        """Return how many parameters have no buffer yet."""
        return sum(buffer is None for buffer in self.tensors())

    def _is_current(self, state: Any, known: Any, entries: list[dict[str, Any]]) -> bool:
        """Return whether the kept entries are still those of the state."""
        ends = (self._params[0], entries[0]), (self._params[-1], entries[-1])
        return state is known and all(state.get(p) is entry for p, entry in ends)
