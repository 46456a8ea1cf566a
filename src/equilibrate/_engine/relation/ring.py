"""The latest measurements of one bucket, which become rows of its window in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibrate._engine.optimizer.skips import Skips
from equilibrate._engine.relation.coefficients import host_to
from equilibrate._engine.relation.rows import Entry, make_rows
from equilibrate._engine.relation.window import Window
from equilibrate._engine.sharding import Layout

_BLOCK = 64
"""Measurements between which sums are worked out together, in a few operations."""


class Ring:
    """N, θ′·d and d² of each tensor at the latest measurements, and the sums of all earlier ones.

    Args:
        params: The parameters of the bucket.
        layout: How the parameters of the optimizer are distributed over processes.
        device: Device of the sums.
        each: Whether to keep the sums of each parameter instead of their total, and its norms.
        skipped: Steps that gradient scaling has skipped so far; None if it was never seen.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: Layout,
        device: torch.device,
        *,
        each: bool,
        skipped: Tensor | None,
    ) -> None:
        self._layout = layout
        self._each = each
        self.series = len(params) if each else 1
        """Number of series of sums that are kept."""
        self.window = Window((3 if each else 2) * self.series + 2, device)
        # The row before the first holds the measurement at which the open interval began.
        self._values = torch.zeros(_BLOCK + 1, len(params), 3, dtype=torch.float64, device=device)
        self._slots = self._values.unbind(0)  # indexing at each measurement would take longer
        self._shards = host_to(self._values, [float(layout.shards(p)) for p in params])
        self.entries: list[Entry] = []
        """How to turn each of the latest measurements into a row."""
        self.skips = Skips(device, 0 if skipped is None else skipped)
        """Counts the steps that gradient scaling has skipped."""
        self.tally: Tensor | None = None
        """ΣR over all steps so far, for a trace; None if nobody needs it."""

    @property
    def last(self) -> Tensor:
        """The last measurement, of shape (tensors, 3)."""
        return self._slots[len(self.entries)]

    @property
    def next(self) -> Tensor:
        """Where the next measurement is written."""
        return self._slots[len(self.entries) + 1]

    def send(self, values: Sequence[float]) -> Tensor:
        """Return numbers as a tensor on the device of the measurements, which is not waited for."""
        return host_to(self._values, list(values))

    def note(self, entry: Entry) -> None:
        """Take what was written to `next` as a measurement."""
        self.entries.append(entry)
        if len(self.entries) == _BLOCK:
            self.settle()

    def settle(self) -> None:
        """Work out the rows of all measurements so far."""
        if not self.entries:
            return
        entries = self.entries
        share = self._share().squeeze(1) if self._layout.processes > 1 else None
        values = self._values[: len(entries) + 1]
        rows = make_rows(values, entries, share, self.skips.settled, each=self._each)
        if entries[-1].skips is not None:
            self.skips.settled = entries[-1].skips[1]
        if self.tally is not None:
            self.tally += rows[:, self.series : 2 * self.series].sum()
        first = 0
        for i, entry in enumerate([*entries, None]):
            if entry is None or not entry.steps:  # a measurement that only begins an interval
                self.window.extend(rows[first:i], [e.steps for e in entries[first:i]])
                first = i + 1
        self._values[0] = self._values[len(entries)]
        self.entries = []

    def reset(self) -> None:
        """Forget all measurements."""
        self.entries = []
        self.window.reset()

    def rows(self) -> Tensor:
        """Return the rows of this process over the window."""
        self.settle()
        counted = -2 if self.skips.total is not None else None
        return self.window.rows(counted=counted, sampled=-1)

    def state_sums(self) -> list[Tensor]:
        """Return this process's part of the state, for `Layout.total`."""
        self.settle()
        return [self.window.state_dict()["rows"], self._values[0] * self._share()]

    def state_dict(self, rows: Tensor, begun: Tensor) -> dict[str, Any]:
        """Return the state, which does not depend on how parameters are distributed.

        Args:
            rows: First item of `state_sums`, added up over all processes.
            begun: Second item of `state_sums`, added up over all processes.
        """
        rows[:, -2:] /= self._layout.processes
        return {
            "window": {**self.window.state_dict(), "rows": rows},
            "begun": begun,
            "skipped": int(self.skips),
            "pending": self.skips.pending,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, which may come from another number of processes."""
        self.entries = []
        rows = state["window"]["rows"].clone()
        rows[:, :-2] /= self._layout.processes
        self.window.load_state_dict({**state["window"], "rows": rows})
        self._values[0] = state["begun"].to(self._values.device) / self._shards[:, None]
        self.skips = Skips(self._values.device, state["skipped"], state["pending"])

    def _share(self) -> Tensor:
        """Return a factor for each parameter, with which the total counts it once."""
        return self._shards[:, None] / self._layout.processes
