"""Watch any optimizer through its step hooks and read FDR1 at any moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from equilibrate._engine.optimizer.decay import decay_of
from equilibrate._engine.optimizer.hooks import unwrap
from equilibrate._engine.optimizer.names import NO_NAMES, NamedParameters, Names, describe
from equilibrate._engine.optimizer.parameters import check_arguments
from equilibrate._engine.relation import totals
from equilibrate._engine.relation.rotations import rotations
from equilibrate._engine.relation.rounding import rounding_floor
from equilibrate._engine.relation.totals import Sides, Totals
from equilibrate._engine.relation.unseen import UnseenChanges
from equilibrate._engine.relation.watch import Watch
from equilibrate.outlook import Outlook, look_ahead
from equilibrate.readings import Reading
from equilibrate.scale_invariance import Rotation


class Monitor:
    r"""Reads both sides of FDR1 from a training loop, averaged over the paper's window.

    A monitor only adds hooks to the optimizer: training is bit-identical with and without it, and
    no step waits for the device. For `torch.optim.SGD` the sides are ⟨θ·∇f⟩ and
    (1+μ)/(2(1−ν)) η⟨v²⟩, with L2 weight decay counted in ∇f. With Nesterov momentum, with
    parameters of half precision and for every other optimizer they are those of the step form,
    −⟨θ·Δ⟩/η and ⟨Δ²⟩/(2η), which for SGD without momentum is the same.

    Averages are taken over the later half of the steps since the last `reset`. The difference of
    the two sides is exact whatever `every` is, because it telescopes; only the right side is
    sampled, at the measured steps.

    The hooks hold no reference to the monitor: keep it in a variable for as long as it is needed.
    If parameters are sharded (FSDP, tensor parallelism) `reading`, `group_readings`,
    `parameter_readings`, `outlook` and `state_dict` are collective: call them on every process. A
    process that calls one alone waits for the others.

    Args:
        optimizer: Any `torch.optim.Optimizer`, or one that accelerate has wrapped.
        named_parameters: `model.named_parameters()`, to have a reading for each parameter. An
            optimizer that was itself created from named parameters needs none.
        every: Measure the first step of a window and then every k-th. The difference of the sides
            is exact for any k; with 1 the right side is exact, too, at a higher cost.
        process_group: The group over which FSDP1 (`FullyShardedDataParallel`) shards the
            parameters. The constructor and `load_state_dict` are then collective too. Everything
            else needs none.
        scale_invariant: Whether `reading` counts scale-invariant weights, those whose norm the loss
            does not depend on, as before a normalisation layer. FDR1 of such a weight describes the
            balance of its norm and weight decay, not the loss. They are recognised from their
            gradients at the first measured steps (`scale_invariance.Rotation`).
        trace: Record the positions of the parameters whenever `mark` is called, for
            `reading().trace` and for rules that need it, such as `rules.Stationary`.

    Raises:
        TypeError: If `optimizer` is not an optimizer, `named_parameters` are not pairs, or a
            parameter is complex.
        ValueError: If the optimizer has no parameters, `named_parameters` lacks one, `every` is
            below 1, or parameters are shards of FSDP1 and there is no `process_group`, or the
            other way round.

    Example:
        >>> import torch
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> monitor = Monitor(optimizer)
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> monitor.reading()
        Reading(step=1, count=1, left=1, right=0.25, lr=0.5, residual=3)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        named_parameters: NamedParameters | None = None,
        every: int = 16,
        process_group: Any | None = None,
        scale_invariant: bool = True,
        trace: bool = False,
    ) -> None:
        self._optimizer = unwrap(optimizer)
        every = check_arguments(self._optimizer, every)
        self._names = Names(self._optimizer, named_parameters)
        self._process_group = process_group
        self._traces = trace
        self._watch = Watch(
            self._optimizer,
            every=every,
            names=self._names,
            scale_invariant=scale_invariant,
            process_group=process_group,
            traces=trace,
        )
        self._unseen = UnseenChanges(self._watch)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that is watched."""
        return self._optimizer

    @property
    def every(self) -> int:
        """Steps from one measured step to the next."""
        return self._watch.every

    @property
    def scale_invariant(self) -> bool:
        """Whether `reading` counts scale-invariant weights."""
        return self._watch.scale_invariant

    @property
    def traces(self) -> bool:
        """Whether positions of the parameters are recorded."""
        return self._traces

    @property
    def step(self) -> int:
        """Optimizer steps seen, whether measured or not."""
        return self._watch.clock.steps

    @property
    def since_reset(self) -> int:
        """Optimizer steps since the last `reset`, of which the window is the later half."""
        return self._watch.since_reset

    def reading(self) -> Reading:
        """Return FDR1 for the whole model.

        It waits for the device, so ask once in a while, not at every step.
        """
        self._unseen.warn()
        watch = self._watch
        watch.update_layout()
        reading = self._combined(range(len(watch.probes)), self._counted())
        if watch.trace is not None:
            (rows,) = watch.layout.total(watch.trace.parts())
            reading = replace(reading, trace=watch.trace.read(rows))
        if reading.count and reading.right <= self._rounding():
            # Full batches, or interpolation: the difference of two rounding errors tells nothing.
            return replace(reading, left=0.0, right=0.0, stderr=math.nan, margin=math.nan)
        return reading

    def group_readings(self) -> dict[str, Reading]:
        """Return FDR1 for each parameter group, by the names "group 0", "group 1" and so on.

        FDR1 holds for every group by itself, with its own learning rate, momentum and dampening.
        """
        self._watch.update_layout()
        found, parts = {}, self._totals()
        for i in range(len(self._optimizer.param_groups)):
            chosen = [j for j, probe in enumerate(self._watch.probes) if probe.group == i]
            found[f"group {i}"] = self._combined(chosen, parts)
        return found

    def parameter_readings(self) -> dict[str, Reading]:
        """Return FDR1 for each parameter, by name, in the order of the names given.

        Raises:
            ValueError: If neither the monitor nor the optimizer was given named parameters.
        """
        if not self._names:
            raise ValueError(NO_NAMES)
        self._watch.update_layout()
        found: dict[int, Reading] = {}
        for probe, part in zip(self._watch.probes, self._totals(), strict=True):
            lr = self._watch.lr(probe.group)
            for p, sides in zip(probe.params, totals.apart(part), strict=True):
                found[id(p)] = self._reading(sides, lr)
        return self._names.label(found)

    def parameter_rotations(self) -> dict[str, Rotation]:
        """Return for each parameter by how much a step turns it, and whether it is scale-invariant.

        `layers.read` shows them together with `parameter_readings`.

        Raises:
            ValueError: If neither the monitor nor the optimizer was given named parameters.
        """
        if not self._names:
            raise ValueError(NO_NAMES)
        self._watch.update_layout()
        found: dict[int, Rotation] = {}
        for probe, part in zip(self._watch.probes, self._totals(), strict=True):
            group, lr = self._optimizer.param_groups[probe.group], self._watch.lr(probe.group)
            turned = rotations(part, self._optimizer, group, lr)
            found |= {id(p): each for p, each in zip(probe.params, turned, strict=True)}
        return self._names.label(found)

    def outlook(self, threshold: float = 0.01, remaining: int | None = None) -> Outlook:
        """Tell whether |L/R − 1| can fall below a threshold, and how long that would take.

        The error of a reading falls as 1/n with the steps n in the window. A drift of the norm of
        layers before a normalisation ends at the rate that learning rate and weight decay set.
        Other layers may be faster. Like `reading` it waits for the device, and is collective.

        Args:
            threshold: The threshold, the paper's X.
            remaining: Steps left in this run.

        Returns:
            Numbers, and a sentence (`str(outlook)`).

        Example:
            >>> import torch
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.AdamW([theta], lr=1e-3, weight_decay=1e-4)
            >>> monitor = Monitor(optimizer)
            >>> theta.grad = torch.tensor([1.0, 0.0])
            >>> optimizer.step()
            >>> print(monitor.outlook(remaining=10_000))
            |L/R − 1| = 2e+03 ≥ 0.01; at lr × weight_decay = 1e-07 the norm relaxes in 5,000,000 \
steps: it will not equilibrate in this run
        """
        reading = self.reading()
        decays = [decay_of(self._optimizer, group) for group in self._optimizer.param_groups]
        return look_ahead(
            reading, decays, threshold=threshold, since=self.since_reset, remaining=remaining
        )

    def reset(self) -> None:
        """Restart the averaging window. The step counter keeps running."""
        self._watch.reset()

    def mark(self) -> None:
        """Record where the parameters are now, if the monitor was created with `trace=True`.

        Call it at the end of each epoch; an `FDRScheduler` does so in calls that are at least
        `min_steps` apart. If examples are reshuffled in each epoch, the noise of its steps almost
        cancels, so positions within an epoch say little about where training goes. At most 128
        positions are stored: then every other one is dropped, and only every second call is
        recorded. No step waits for the device.
        """
        self._watch.mark()

    def detach(self) -> None:
        """Remove the hooks. Past readings stay available."""
        self._watch.detach()

    def measure(self) -> AbstractContextManager[None]:
        """Watch one step that hooks cannot see, such as a compiled or captured one.

        Hooks do not run when a CUDA graph is replayed and do nothing inside a compiled
        `optimizer.step`. Put exactly one step into the block. With `every` above 1 most blocks cost
        nothing.

        Returns:
            A context manager.

        Example:
            >>> import torch
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([theta], lr=0.5)
            >>> monitor = Monitor(optimizer)
            >>> theta.grad = torch.tensor([1.0, 0.0])
            >>> with monitor.measure():  # instead of optimizer.step(): a compiled step, a replay
            ...     _ = theta.data.sub_(0.5 * theta.grad)
            >>> monitor.reading().right
            0.25
        """
        return self._watch.measure()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, strings and tensors that `torch.load` reads by default.

        If parameters are sharded, every process must call it. The state is the same on all of them
        and may be loaded by any number of processes, or into a model that is not sharded.
        """
        state = self._watch.state_dict()
        return {"fingerprint": self._names.fingerprint(self._watch.layout), **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, `every` and `scale_invariant` included.

        Raises:
            ValueError: If it is not the state of a monitor, that of another model, or one whose
                parameters were spread over devices in another way.
        """
        if "fingerprint" not in state_dict:
            raise ValueError(
                f"state_dict is not the state of a Monitor: it holds "
                f"{', '.join(state_dict) or 'nothing'}; pass what monitor.state_dict() returned"
            )
        fingerprint = self._names.fingerprint(self._watch.layout)
        if state_dict["fingerprint"] != fingerprint:
            raise ValueError(
                "state_dict belongs to another model or optimizer: it was saved with "
                f"{describe(state_dict['fingerprint'])}, this monitor has "
                f"{describe(fingerprint)}; load it with the model, parameter groups and "
                "named_parameters it was saved with"
            )
        self._watch.load_state_dict(state_dict)
        self._unseen.remember()

    def __repr__(self) -> str:
        kind = type(self._optimizer).__name__
        return f"Monitor({kind}, every={self.every}, step={self.step})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; hooks are not copied with an optimizer.

        Raises:
            TypeError: If the monitor has a process group, which cannot be copied.
        """
        if self._process_group is not None:
            raise TypeError(
                "a monitor with a process_group cannot be copied or pickled, as a process group "
                "cannot: create a new one and load monitor.state_dict() into it"
            )
        return {
            "optimizer": self._optimizer,
            "named_parameters": self._names.given(),
            "every": self.every,
            "scale_invariant": self.scale_invariant,
            "trace": self._traces,
            "state_dict": self.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach the copy to its own optimizer."""
        saved = state.pop("state_dict")
        self.__init__(state.pop("optimizer"), **state)
        self.load_state_dict(saved)

    # Readings ---------------------------------------------------------------------------------

    def _totals(self) -> list[Totals]:
        """Return the averages of each probe, over all processes."""
        watch = self._watch
        return totals.take(watch.probes, watch.layout, watch.alignments.sums())

    def _counted(self) -> list[Totals]:
        """Return the averages of each probe as `reading` adds them up."""
        parts = self._totals()
        return parts if self.scale_invariant else totals.others_alone(parts)

    def _combined(self, chosen: Iterable[int], parts: Sequence[Totals]) -> Reading:
        """Return the reading of some of the probes together."""
        chosen = list(chosen)
        lrs = {self._watch.lr(self._watch.probes[j].group) for j in chosen}
        lr = lrs.pop() if len(lrs) == 1 else math.nan
        return self._reading(totals.together([parts[j] for j in chosen]), lr)

    def _reading(self, sides: Sides, lr: float) -> Reading:
        left, right = (sides.left, sides.right) if sides.steps else (math.nan, math.nan)
        step, count = self.step - self._watch.skipped, round(sides.steps)
        return Reading(step, count, left, right, lr, sides.stderr, sides.margin)

    def _rounding(self) -> float:
        """Return the right side below which steps are lost in rounding; 0 if it is not known."""
        if self._watch.layout.processes > 1:  # the norm is that of this process alone
            return 0.0
        lrs = [self._watch.lr(i) for i in range(len(self._optimizer.param_groups))]
        return rounding_floor(self._optimizer, lrs, self._unseen.norm)
