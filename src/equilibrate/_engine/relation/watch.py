"""What a monitor does at each step: count it, and measure it if it is due."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate._engine.optimizer.clock import Clock
from equilibrate._engine.optimizer.edits import are_borrowed
from equilibrate._engine.optimizer.hooks import attach, is_idle
from equilibrate._engine.optimizer.names import Names
from equilibrate._engine.optimizer.parameters import Places, all_parameters, buckets
from equilibrate._engine.optimizer.updates import learning_rate
from equilibrate._engine.relation.alignment import Alignments
from equilibrate._engine.relation.probe import Probe
from equilibrate._engine.relation.trace import TraceRecorder
from equilibrate._engine.sharding import Layout


class Watch:
    """Hooks on an optimizer that drive the probes of its parameters.

    Args:
        optimizer: The optimizer.
        every: Measure the first step of a window and then every k-th.
        names: Names of the parameters. If there are any, the sums of each parameter are kept.
        scale_invariant: Whether readings count scale-invariant parameters. If not, the sums of
            each parameter are kept, too.
        process_group: The group over which FSDP1 shards the parameters.
        traces: Whether to record the positions of the parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int,
        names: Names,
        scale_invariant: bool,
        process_group: Any | None,
        traces: bool,
    ) -> None:
        self.optimizer = optimizer
        self.every = every
        self.names = names
        self.scale_invariant = scale_invariant
        self._process_group = process_group
        self._traces = traces
        self.clock = Clock()
        self.start = 0
        """The clock at the last reset."""
        self.layout: Layout
        self.probes: list[Probe] = []
        self.alignments: Alignments
        self.trace: TraceRecorder | None = None
        self.lrs: list[float | Tensor] = []
        """Learning rate of each group at the last measured step."""
        self._places: Places
        self._sizes: list[int] = []
        self._explicit = self._hooked = False
        self._idle = self._measured = self._calm = False
        self._watched: list[tuple[int, Callable[[Any], Hashable], Hashable]] = []
        """For each group how many parameters it has, and what a function of it must be."""
        self.lay_out()
        self.detach = attach(self, optimizer, Watch._on_before, Watch._on_after)
        """Removes the hooks."""

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in place."""
        return self.detach.alive

    @property
    def since_reset(self) -> int:
        """Steps since the last reset."""
        return self.clock.steps - self.start

    @property
    def skipped(self) -> int:
        """Steps that gradient scaling has skipped; it waits for the device."""
        return int(self.probes[0].ring.skips) if self.probes else 0

    def lr(self, group: int) -> float:
        """Return the learning rate of a group at the last measured step; nan if there is none."""
        if self.optimizer.param_groups[group].get("lr") is None or group >= len(self.lrs):
            return math.nan
        return float(self.lrs[group])

    def norm(self) -> float:
        """Return |θ|² of this process's parameters; nan if they have no storage yet."""
        if any(p.is_meta for probe in self.probes for p in probe.params):
            return math.nan
        return sum(probe.norm() for probe in self.probes)

    def reset(self) -> None:
        """Restart the averaging window."""
        self.start = self.clock.steps
        self._calm = False
        for probe in self.probes:
            probe.restart()
        if self.trace is not None:
            self.trace.restart()

    def mark(self) -> None:
        """Record where the parameters are, if a trace is recorded; not while others are in use."""
        if any(are_borrowed(probe.params) for probe in self.probes):
            return
        if self._traces:
            self.update_layout()
        if self.trace is not None:
            self.trace.mark(self.since_reset)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Watch one step that hooks cannot see.

        Yields:
            None.
        """
        self._explicit = True
        try:
            self.before()
            yield
            self.after()
        finally:
            self._explicit = False

    # Steps ------------------------------------------------------------------------------------

    def _on_before(self) -> None:
        """Run as a hook, which counts nothing inside a capture or an explicit block."""
        self._hooked = not (
            self._explicit or (self._on_gpu and torch.cuda.is_current_stream_capturing())
        )
        if self._hooked:
            self.before()

    def _on_after(self) -> None:
        if self._hooked:
            self.after()

    def before(self) -> None:
        """Prepare for a step."""
        upcoming = self.clock.steps + 1 - self.start
        self._measured = upcoming == 1 or upcoming % self.every == 0
        if self._measured or not self._calm or self._has_changed():
            self._prepare()

    def _has_changed(self) -> bool:
        """Return whether a setting has changed, or a parameter was added: cheap, for each step."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._watched):
            return True
        for group, (size, settings, key) in zip(groups, self._watched, strict=True):
            if len(group["params"]) != size or settings(group) != key:
                return True
        return False

    def _prepare(self) -> None:
        """Do what a step asks for that is measured, or before which something may have changed."""
        self._calm = False
        if self._sizes != self._current_sizes():
            self.lay_out()
            self._measured = True
        self._idle = is_idle(self.optimizer)
        if self._idle:
            return
        if self._measured and not self._places.are_unchanged():
            self.lay_out()  # the window begins at this step, which is measured anyway
        if self._measured:
            self.alignments.before(self.since_reset + 1, self.every)
        for probe in self.probes:
            probe.before(measured=self._measured)

    def after(self) -> None:
        """Count a step, and measure it if it is due."""
        if self._idle:
            self.clock.calls += 1
            return
        self.clock.tick()
        if self._calm and not hasattr(self.optimizer, "found_inf"):
            return
        for probe in self.probes:
            probe.after(measured=self._measured)
        if self._measured:
            self.alignments.after()
            self.lrs = [learning_rate(group) for group in self.optimizer.param_groups]
        if not self._calm:
            self._calm = all(probe.is_calm() for probe in self.probes)
            for probe in self.probes:
                self._watched[probe.group] = probe.watched()

    # Layout -----------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Create a probe for each group, device and dtype; windows restart."""
        skipped = self.probes[0].ring.skips.total if self.probes else None
        found = buckets(self.optimizer)
        self.layout = Layout(all_parameters(self.optimizer), self._process_group)
        each = bool(self.names) or not self.scale_invariant
        self.probes = [
            Probe(
                self.optimizer,
                group,
                params,
                self.layout,
                self.clock,
                each=each,
                thinned=self.every > 1,
                skipped=skipped,
            )
            for group, params in found
        ]
        self.alignments = Alignments([params for _, params in found if each], self.layout)
        if self._traces:
            self.trace = TraceRecorder(self.probes, self.layout)
        self.start = self.clock.steps
        self._calm = False
        self._sizes = self._current_sizes()
        self._watched = [(size, lambda group: None, None) for size in self._sizes]
        self._places = Places(self.optimizer, found)
        self._on_gpu = any(probe.device.type == "cuda" for probe in self.probes)

    def update_layout(self) -> None:
        """Create the probes again if parameters were added or exchanged.

        Parameters that were only moved to another device, as some trainers do at the end of a
        training, change nothing until the next step: what was measured can still be read.
        """
        if self._current_sizes() != self._sizes or not self._places.have_same_parameters():
            self.lay_out()

    def _current_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is the same on all processes; each of them must call it."""
        self.update_layout()
        traced = [] if self.trace is None else self.trace.state_sums()
        sums = [*(probe.ring.state_sums() for probe in self.probes), traced, self.alignments.sums()]
        totals = iter(self.layout.total([part for parts in sums for part in parts]))
        return {
            "step": self.clock.steps,
            "since_reset": self.since_reset,
            "every": self.every,
            "scale_invariant": self.scale_invariant,
            "lrs": [float(lr) for lr in self.lrs],
            "probes": [probe.state_dict(next(totals), next(totals)) for probe in self.probes],
            "trace": self.trace and self.trace.state_dict(next(totals), next(totals)),
            "alignments": self.alignments.state_dict(list(totals)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, which may come from another number of processes.

        Raises:
            ValueError: If the parameters were spread over devices in another way.
        """
        self.every = state["every"]
        self.scale_invariant = state["scale_invariant"]
        self.lay_out()
        saved = [len(probe["begun"]) for probe in state["probes"]]
        if saved != (present := [len(probe.params) for probe in self.probes]):
            raise ValueError(
                "state_dict was saved with the parameters on other devices: it holds sums for "
                f"{saved} tensors on each, this monitor has {present}; move the model first"
            )
        self.clock.set(state["step"])
        self.start = self.clock.steps - state["since_reset"]
        self.lrs = list(state["lrs"])
        for probe, saved_probe in zip(self.probes, state["probes"], strict=True):
            probe.load_state_dict(saved_probe)
        self.alignments.load_state_dict(state["alignments"])
        if self.trace is not None:
            self.trace.load_state_dict(state.get("trace"))
