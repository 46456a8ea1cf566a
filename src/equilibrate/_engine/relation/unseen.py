"""Warns of changes of the parameters that no hook has seen."""

from __future__ import annotations

import math
import warnings

from equilibrate._engine.optimizer.edits import are_borrowed
from equilibrate._engine.relation.watch import Watch


class UnseenChanges:
    """Compares the norm of the parameters from one reading to the next.

    Args:
        watch: What sees the steps.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.remember()

    def remember(self) -> None:
        """Take the parameters as they are now as seen."""
        self._steps = self._watch.clock.steps
        self._devices = [p.device for probe in self._watch.probes for p in probe.params]
        self.norm = self._watch.norm()
        """|θ|² of this process's parameters at the last check; nan if they had no storage."""

    def warn(self) -> None:
        """Warn if parameters have changed although no step was seen, or between two steps."""
        if any(are_borrowed(probe.params) for probe in self._watch.probes):
            return  # they get the values back that were seen
        steps, devices, norm = self._steps, self._devices, self.norm
        self.remember()
        # Another device adds the squares up in another order: its norm is not comparable.
        stayed = devices == self._devices
        idle = self._watch.is_attached and steps == self._steps and stayed
        if idle and math.isfinite(norm) and self.norm != norm:
            warnings.warn(
                "the parameters have changed since the last reading, but no optimizer step was "
                "seen. Hooks do not run when a step is replayed from a CUDA graph or compiled: "
                "wrap such a step in `with monitor.measure():`. If you loaded other parameters, "
                "call monitor.reset()",
                stacklevel=3,
            )
        edited = [probe.had_hidden_edit() for probe in self._watch.probes]  # each forgets it
        if any(edited):
            warnings.warn(
                "the parameters were changed between two optimizer steps without PyTorch noticing, "
                "through `.data` or a shared memory, so that readings count these changes as "
                "steps. Change them inside `with torch.no_grad():` instead, as in "
                "`p.clamp_(-1, 1)`",
                stacklevel=3,
            )
