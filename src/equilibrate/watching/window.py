"""Sums over the half-running window of a series of any length, in bounded memory."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

CAPACITY = 4096
"""Rows kept at most; the start of a window is then rounded by less than 0.1 % of its length."""


class Window:
    """Rows of sums, each over a number of successive steps, and their total over the later half.

    The paper's window after t steps begins at t₀ = ⌊t/2⌋. A row holds the sums of one interval of
    steps, so the window begins at the boundary between two rows that is nearest to t₀: exactly at
    t₀ as long as each row is one step. When `capacity` rows are stored, those before t₀ are
    dropped and short neighbours are merged. Rows stay on their device and nothing waits for it.

    Args:
        columns: Numbers in a row.
        device: Device of the rows.
        capacity: Rows stored at most.
    """

    def __init__(
        self, columns: int, device: torch.device | str | None = None, capacity: int = CAPACITY
    ) -> None:
        self._rows = torch.zeros(capacity, columns, dtype=torch.float64, device=device)
        self._lengths = array("q")
        self._dropped = 0

    def extend(self, rows: Tensor, lengths: Sequence[int]) -> None:
        """Append rows of sums, given the number of steps in each."""
        while lengths:
            if len(self._lengths) == len(self._rows):
                self._make_room()
            stored = len(self._lengths)
            taken = min(len(lengths), len(self._rows) - stored)
            self._rows[stored : stored + taken] = rows[:taken]
            self._lengths.extend(lengths[:taken])
            rows, lengths = rows[taken:], lengths[taken:]

    def rows(self, *, counted: int | None = None, sampled: int | None = None) -> Tensor:
        """Return the rows of the half-running window.

        Args:
            counted: The column that holds the steps of each row, if they may differ from those
                given to `extend`.
            sampled: A column that must not be zero in all rows: the window begins at an earlier
                row if it is zero in all of the later half.
        """
        return self._rows[self._first(counted, sampled) : len(self._lengths)]

    def lengths(self) -> np.ndarray:
        """Return the number of steps in each of these rows."""
        return np.array(self._lengths[self._first(None, None) :], dtype=np.int64)

    def _first(self, counted: int | None, sampled: int | None) -> int:
        """Return the index of the first row of the window."""
        stored = self._rows[: len(self._lengths)]
        if not len(stored):
            return 0
        sizes = np.frombuffer(self._lengths, dtype=np.int64)
        if counted is not None:
            sizes = stored[:, counted].cpu().numpy()
        ends = self._dropped + np.cumsum(sizes)
        starts = ends - sizes
        first = int(np.abs(starts - ends[-1] // 2).argmin())
        if sampled is not None and not stored[first:, sampled].any():
            used = np.flatnonzero(stored[:, sampled].cpu().numpy())
            first = int(used[-1]) if len(used) else first
        return first

    def reset(self) -> None:
        """Remove all rows."""
        self._lengths, self._dropped = array("q"), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in tensors whose shapes do not depend on the number of steps."""
        lengths = torch.zeros(len(self._rows), dtype=torch.int64, device="cpu")
        known = torch.tensor(self._lengths.tolist(), dtype=torch.int64, device="cpu")
        lengths[: len(known)] = known
        rows = self._rows.clone()
        rows[len(self._lengths) :] = 0
        dropped = torch.tensor(self._dropped, device="cpu")
        return {"rows": rows, "lengths": lengths, "dropped": dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._rows.copy_(state["rows"])
        self._lengths = array("q", (length for length in state["lengths"].tolist() if length))
        self._dropped = int(state["dropped"])

    def _make_room(self) -> None:
        """Drop the rows that no later window can reach, and merge short neighbours."""
        ends = self._dropped + np.cumsum(self._lengths)
        half = int(ends[-1]) // 2
        first = int(np.searchsorted(ends, half, side="right"))
        rows, lengths = self._rows[first : len(self._lengths)], self._lengths[first:]
        self._dropped += sum(self._lengths[:first])
        members = _group(lengths, longest=half // (len(self._rows) // 4))
        sizes = torch.tensor(members, device="cpu")
        if rows.is_cuda:
            sizes = sizes.pin_memory().to(rows.device, non_blocking=True)
        rows = torch.segment_reduce(rows, "sum", lengths=sizes, axis=0, unsafe=True)
        self._rows[: len(members)] = rows
        grouped = iter(lengths)
        self._lengths = array("q", (sum(itertools.islice(grouped, size)) for size in members))


def _group(lengths: Sequence[int], longest: int) -> list[int]:
    """Return how many successive rows to merge into each, without exceeding `longest` steps.

    >>> _group([1, 1, 1, 3, 1, 1], longest=3)
    [3, 1, 2]
    """
    members: list[int] = []
    total = longest  # so that the first row begins a group
    for length in lengths:
        if total + length <= longest and members:
            members[-1] += 1
            total += length
        else:
            members.append(1)
            total = length
    return members
