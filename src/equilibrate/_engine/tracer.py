"""Records sketches of the parameters, at ever longer distances, in bounded memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibrate._engine.probe import Probe
from equilibrate._engine.sharding import Layout
from equilibrate._engine.sketch import SIZE, Sketch, placements
from equilibrate.traces import Trace

CAPACITY = 129
"""Records at most: the position at the reset and 128 later ones."""


class Tracer:
    """Records where the parameters are, at the reset and at every s-th step after it.

    The spacing s begins with the interval of measurements and doubles whenever `CAPACITY` records
    are stored, of which every other one is kept. So the number of records, and with it the cost,
    grows with the logarithm of the number of steps.

    Args:
        probes: The probes of the monitor, which know how far the parameters have travelled.
        layout: How the parameters are distributed over processes.
        every: Steps between two measurements.
        process_group: The group over which FSDP1 shards the parameters, if it does.
    """

    def __init__(
        self, probes: Sequence[Probe], layout: Layout, every: int, process_group: Any | None
    ) -> None:
        self._probes = list(probes)
        self._layout = layout
        self._every = every
        self._placements = placements([p for probe in probes for p in probe.params], layout)
        self._sketches: list[Sketch] = []
        first = 0
        for probe in probes:
            self._sketches.append(Sketch(probe.params, first, layout, process_group))
            first += len(probe.params)
            probe.trace_steps()
        # A row for each record: the sketch, and what was travelled.
        self._records = [
            torch.zeros(CAPACITY, SIZE + 1, dtype=torch.float64, device=probe.device)
            for probe in probes
        ]
        self._steps = array("q")
        self._spacing = every
        self._origin = 0
        """Steps since the reset at the first record; not 0 only where a trace was not restored."""

    def restart(self) -> None:
        """Forget all records. The first one is made before the next step."""
        self._steps = array("q")
        self._spacing = self._every

    def before(self, step: int) -> None:
        """Record the first position, before a step, given the steps since the reset."""
        if not self._steps:
            self._origin = step
            for probe in self._probes:
                probe.restart_travelled()
            self._record(0)

    def after(self, step: int) -> None:
        """Record the position after a measured step, given its number since the reset, if due."""
        if self._steps and step - self._origin >= self._steps[-1] + self._spacing:
            if len(self._steps) == CAPACITY:
                self._thin()
            else:
                self._record(step - self._origin)

    def trace(self) -> Trace:
        """Return the trace over all processes, which all must call it."""
        count = len(self._steps)
        parts = [records[:count] for records in self._records]
        total = sum(self._layout.total(parts), torch.zeros(count, SIZE + 1, dtype=torch.float64))
        assert isinstance(total, Tensor)
        numbers = total.numpy()
        steps = torch.tensor(self._steps.tolist(), dtype=torch.int64).numpy()
        return Trace(steps, numbers[:, :-1], numbers[:, -1])

    def sums(self) -> list[Tensor]:
        """Return this process's part of the state, for `Layout.total`."""
        rows = self._records[0].clone()
        rows[len(self._steps) :] = 0
        for records in self._records[1:]:
            rows[: len(self._steps)] += records[: len(self._steps)].to(rows.device)
        travelled = torch.stack([probe.travelled().to(rows.device) for probe in self._probes])
        return [rows, travelled.sum()[None]]

    def state_dict(self, totals: Sequence[Tensor]) -> dict[str, Any]:
        """Return the state, given what `sums` returns, added up over all processes."""
        steps = torch.full((CAPACITY,), -1, dtype=torch.int64)
        steps[: len(self._steps)] = torch.tensor(self._steps.tolist(), dtype=torch.int64)
        rows, travelled = totals
        return {
            "steps": steps,
            "rows": rows,
            "travelled": travelled,
            "spacing": self._spacing,
            "origin": self._origin,
            "placements": list(self._placements),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; nothing if parameters were distributed in another way."""
        self.restart()
        if list(state["placements"]) != self._placements:
            return
        self._steps = array("q", (step for step in state["steps"].tolist() if step >= 0))
        self._spacing, self._origin = int(state["spacing"]), int(state["origin"])
        # All of it in one place: only totals are ever used.
        for records in self._records:
            records.zero_()
        self._records[0].copy_(state["rows"] / self._layout.processes)
        for probe in self._probes:
            probe.restart_travelled()
        self._probes[0].continue_travelled(state["travelled"] / self._layout.processes)

    def _record(self, step: int) -> None:
        place = len(self._steps)
        for probe, sketch, records in zip(self._probes, self._sketches, self._records, strict=True):
            records[place, :-1] = sketch()
            records[place, -1] = probe.travelled()
        self._steps.append(step)

    def _thin(self) -> None:
        """Keep every other record, and double the spacing."""
        kept = len(range(0, len(self._steps), 2))
        for records in self._records:
            records[:kept] = records[::2].clone()
        self._steps = self._steps[::2]
        self._spacing *= 2
