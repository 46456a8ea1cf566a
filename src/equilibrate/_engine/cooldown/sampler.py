"""Samples (θ − m)·g at some steps of an optimizer, and keeps the means m, by hooks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate._engine.cooldown.exchange import exchanged
from equilibrate._engine.cooldown.horizons import WINDOW
from equilibrate._engine.cooldown.regime import Rates
from equilibrate._engine.cooldown.tracker import Tracker
from equilibrate._engine.optimizer.closures import watch_closures
from equilibrate._engine.optimizer.hooks import attach, is_idle
from equilibrate._engine.optimizer.parameters import Places, all_parameters, buckets
from equilibrate._engine.sharding import Layout, distribute_like, local
from equilibrate.solvable.cooldown import Match

_ROWS = 4096
"""Samples that are kept at most."""
_NO_GRAD = torch.no_grad()


class Sampler:
    """Watches the steps of an optimizer for a `Forecaster`.

    The hooks hold a weak reference to it.

    Args:
        optimizer: The optimizer.
        every: Take a sample every k-th step.
        matches: The mean that belongs to each horizon.
        given: The mean of each parameter by its identity, if somebody else keeps them.
        process_group: The group over which FSDP1 shards the parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int,
        matches: Mapping[int, Match],
        given: Mapping[int, Tensor] | None,
        process_group: Any | None,
    ) -> None:
        self._optimizer, self._every, self._matches = optimizer, every, matches
        self._given, self._process_group = given, process_group
        self._trackers: list[Tracker] = []
        self.step = 0
        """Steps seen, whether sampled or not."""
        self._deferred = False
        """Whether the gradient of the next step is only known after it."""
        self._explicit = False
        self._measured = False
        self._pending = False
        """Whether the step has still to be sampled, after it."""
        self._idle = False
        self._exchanged = False
        """Whether the parameters have their averaged values."""
        self._lay_out()
        self._watch = watch_closures(self, optimizer, Sampler._note_closure)
        self._detach = attach(self, optimizer, Sampler._on_before, Sampler._on_after)

    @property
    def constant_since(self) -> int:
        """The step since which the means and the learning rates are those of the present."""
        return max(self._start, self._rates.constant_since())

    def restart(self) -> None:
        """Forget everything sampled so far, means included."""
        self._start = self.step
        self._count = 0

    def detach(self) -> None:
        """Remove the hooks."""
        self._watch()
        self._detach()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Watch one step that hooks cannot see."""
        self._explicit = self._deferred = True
        try:
            self._before()
            yield
            self._after()
        finally:
            self._explicit = self._deferred = False

    @contextmanager
    def averaged(self, horizon: int) -> Iterator[None]:
        """Give the parameters the values of a mean for a block, in which no step may be made.

        After a restart the means keep their values until the next sample.

        Raises:
            ValueError: If there is none yet.
        """
        if not self.has_means():
            raise ValueError("no step has been sampled: train before you average")
        outer = self._exchanged
        params = all_parameters(self._optimizer)
        if self._given is not None:
            means = [self._given[id(p)] for p in params]
        else:
            means = self._means()[list(self._matches).index(horizon)]
        with exchanged(params, means):
            self._exchanged = True
            try:
                yield
            finally:
                self._exchanged = outer

    def has_means(self) -> bool:
        """Return whether there is a mean of each parameter."""
        self._follow_parameters()
        return self._given is not None or self._taken > 0

    def samples(self) -> tuple[list[int], Tensor]:
        """Return at which steps samples were taken, and their totals, on the host, in order."""
        self._follow_parameters()
        kept = min(self._taken, len(self._steps))
        total: Tensor | None = None
        for part in self._layout.total([tracker.samples[:kept] for tracker in self._trackers]):
            total = part if total is None else total + part
        assert total is not None
        first = self._taken % kept if kept else 0
        steps = self._steps[:kept].tolist()
        return steps[first:] + steps[:first], total.roll(-first, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors."""
        steps, samples = self.samples()
        return {
            "step": self.step,
            "start": self._start,
            "count": self._count,
            # Lists: tensors must have the same shape at any time to be loaded.
            "steps": steps,
            "samples": samples.tolist(),
            "rates": self._rates.state_dict(),
            "means": self._means(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: If it is one of another model.
        """
        self._lay_out()
        present = self._means()
        if _shapes(present) != _shapes(state["means"]):
            raise ValueError(
                "state_dict belongs to another model: its means have other shapes than the "
                "parameters; load it with the model and parameter groups it was saved with"
            )
        with _NO_GRAD:
            for mean, saved in zip(present, state["means"], strict=True):
                for m, s in zip(mean, saved, strict=True):
                    local(m).copy_(local(s))
        self.step, self._start = state["step"], state["start"]
        self._count = state["count"]
        self._rates.load_state_dict(state["rates"])
        taken = state["steps"]
        self._taken = len(taken)
        self._steps[: len(taken)] = array("q", taken)
        # All of them in one place: only their total is ever used.
        first = self._trackers[0].samples
        samples = first.new_tensor(state["samples"]).view(-1, first.shape[1])
        first[: len(taken)] = samples / self._layout.processes

    # Hooks ------------------------------------------------------------------------------------

    def _on_before(self) -> None:
        """Run as a hook, which counts nothing inside a capture or an explicit block."""
        if not self._explicit and not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            self._before()

    def _on_after(self) -> None:
        if not self._explicit and not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            self._after()

    def _note_closure(self, given: bool) -> None:
        self._deferred = given or self._explicit

    def _before(self) -> None:
        if self._exchanged:
            raise RuntimeError(
                "the optimizer made a step inside forecaster.averaged(), where the parameters "
                "have other values: leave the block to train"
            )
        lr = self._optimizer.param_groups[0].get("lr")
        # A tensor on a device must not be compared here.
        self._idle = (type(lr) is not float or lr == 0) and is_idle(self._optimizer)
        self._measured = not self._idle and (self.step - self._start) % self._every == 0
        if not self._measured:
            return
        with _NO_GRAD:
            if not self._places.are_unchanged():
                self._lay_out()
            self._rates.note(self._optimizer, self.step)
            self._pending = self._deferred
            if self._deferred:
                for tracker in self._trackers:
                    tracker.save()
            else:
                self._sample()

    def _after(self) -> None:
        if self._idle:
            return
        if self._measured and self._pending:
            with _NO_GRAD:
                self._sample()
        self.step += 1

    def _sample(self) -> None:
        self._count += 1
        row = self._taken % len(self._steps)
        for tracker in self._trackers:
            tracker.measure(row, self._count)
        self._steps[row] = self.step
        self._taken += 1

    # Layout -----------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Create a tracker for each group, device and dtype; the means restart."""
        found = buckets(self._optimizer)
        self._layout = Layout(all_parameters(self._optimizer), self._process_group)
        longest = WINDOW * max(self._matches)
        rows = min(_ROWS, -(-longest // self._every))
        decays = [2 ** (-self._every / match.half_life) for match in self._matches.values()]
        self._trackers = [
            Tracker(
                self._optimizer,
                group,
                params,
                self._layout,
                decays,
                rows,
                share=1 / (self._layout.processes * len(found)),
                given=None if self._given is None else [self._given[id(p)] for p in params],
            )
            for group, params in found
        ]
        self._steps = array("q", [0] * rows)
        self._taken = 0
        """Samples taken, of which the last ones are kept."""
        self._rates = Rates(span=longest)
        self._start = self.step
        """Step at which the means were started."""
        self._count = 0
        """How often they have been moved since."""
        self._places = Places(self._optimizer, found)
        self._on_gpu = any(tracker.device.type == "cuda" for tracker in self._trackers)

    def _follow_parameters(self) -> None:
        # Parameters that were only moved, as some trainers do at the end, can still be averaged.
        if not self._places.have_same_parameters():
            self._lay_out()

    def _means(self) -> list[list[Tensor]]:
        """Return the means in the order of the parameters, distributed as these are."""
        found: list[dict[int, Tensor]] = [{} for _ in self._matches]
        for tracker in self._trackers:
            for mean, parts in zip(found, tracker.means(), strict=False):
                mean.update(
                    {
                        id(p): distribute_like(p, m)
                        for p, m in zip(tracker.params, parts, strict=True)
                    }
                )
        params = all_parameters(self._optimizer)
        return [[mean[id(p)] for p in params] for mean in found if mean]


def _shapes(means: Sequence[Sequence[Tensor]]) -> list[list[list[int]]]:
    return [[list(m.shape) for m in mean] for mean in means]
