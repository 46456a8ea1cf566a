"""Watch any optimizer through its step hooks and read FDR1 at any moment."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate._engine import totals
from equilibrate._engine.alignment import Alignments
from equilibrate._engine.clock import Clock
from equilibrate._engine.decay import decay_of
from equilibrate._engine.hooks import attach, is_idle, unwrap
from equilibrate._engine.parameters import (
    NamedParameters,
    check_names,
    check_parameters,
    describe,
    names_of,
)
from equilibrate._engine.probe import Probe
from equilibrate._engine.rotations import rotations
from equilibrate._engine.sharding import Layout, local
from equilibrate._engine.skips import Skips
from equilibrate._engine.totals import Sides, Totals
from equilibrate._engine.trace import TraceRecorder
from equilibrate._engine.updates import learning_rate
from equilibrate.outlook import Outlook, look_ahead
from equilibrate.readings import Reading
from equilibrate.scale_invariance import Rotation

T = TypeVar("T")
_NO_NAMES = (
    "there is no name for any parameter: pass named_parameters=model.named_parameters() to the "
    "monitor"
)


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
        trace: Record the positions of the parameters at a bounded number of steps since the last
            reset, for `reading().trace` and for rules that need it, such as `rules.Stationary`.

    Raises:
        TypeError: If `optimizer` is not an optimizer, `named_parameters` are not pairs, or a
            parameter is complex.
        ValueError: If the optimizer has no parameters, `named_parameters` lacks one, `every` is
            below 1, or parameters are shards of FSDP1 and there is no `process_group`, or the
            other way round.

    Example:
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
        if not any(group["params"] for group in self._optimizer.param_groups):
            raise ValueError("optimizer has no parameters: pass model.parameters() to it first")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {every}")
        self.every = every
        self.scale_invariant = scale_invariant
        self._names = None if named_parameters is None else names_of(named_parameters)
        self._process_group = process_group
        self._traces = trace
        self._trace: TraceRecorder | None = None
        self._layout: Layout
        self._probes: list[Probe] = []
        self._alignments: Alignments
        self._sizes: list[int] = []
        self._lrs: list[float | Tensor] = []
        self._clock = Clock()
        self._start = 0
        """The clock at the last reset."""
        self._explicit = self._hooked = False
        self._idle = self._measured = self._calm = False
        self._watched: list[tuple[int, Callable[[Any], Hashable], Hashable]] = []
        """For each group how many parameters it has, and what a function of it must be."""
        if self._names is not None:
            check_names(self._optimizer, self._names)
        self._lay_out()
        self._checked = 0, self._norm()
        self._detach = attach(self, self._optimizer, Monitor._on_before, Monitor._on_after)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that is watched."""
        return self._optimizer

    @property
    def traces(self) -> bool:
        """Whether positions of the parameters are recorded."""
        return self._traces

    @property
    def step(self) -> int:
        """Optimizer steps seen, whether measured or not."""
        return self._clock.steps

    def reading(self) -> Reading:
        """Return FDR1 for the whole model.

        It waits for the device, so ask once in a while, not at every step.
        """
        self._warn_if_blind()
        self._update_layout()
        reading = self._combined(range(len(self._probes)), self._counted())
        if self._trace is not None:
            (rows,) = self._layout.total(self._trace.parts())
            reading = replace(reading, trace=self._trace.read(rows))
        if reading.count and reading.right <= self._rounding():
            # Full batches, or interpolation: the difference of two rounding errors tells nothing.
            return replace(reading, left=0.0, right=0.0, stderr=math.nan, margin=math.nan)
        return reading

    def group_readings(self) -> dict[str, Reading]:
        """Return FDR1 for each parameter group, by the names "group 0", "group 1" and so on.

        FDR1 holds for every group by itself, with its own learning rate, momentum and dampening.
        """
        self._update_layout()
        found, parts = {}, self._totals()
        for i in range(len(self._optimizer.param_groups)):
            chosen = [j for j, probe in enumerate(self._probes) if probe.group == i]
            found[f"group {i}"] = self._combined(chosen, parts)
        return found

    def parameter_readings(self) -> dict[str, Reading]:
        """Return FDR1 for each parameter, by name, in the order of the names given.

        Raises:
            ValueError: If neither the monitor nor the optimizer was given named parameters.
        """
        if not self._has_names():
            raise ValueError(_NO_NAMES)
        self._update_layout()
        names = self._all_names()
        found: dict[str, Reading] = {}
        for probe, part in zip(self._probes, self._totals(), strict=True):
            lr = self._lr(probe.group)
            for p, sides in zip(probe.params, totals.apart(part), strict=True):
                found[names[id(p)]] = self._reading(sides, lr)
        return self._in_order(found)

    def parameter_rotations(self) -> dict[str, Rotation]:
        """Return for each parameter by how much a step turns it, and whether it is scale-invariant.

        `layers.read` shows them together with `parameter_readings`.

        Raises:
            ValueError: If neither the monitor nor the optimizer was given named parameters.
        """
        if not self._has_names():
            raise ValueError(_NO_NAMES)
        self._update_layout()
        names = self._all_names()
        found: dict[str, Rotation] = {}
        for probe, part in zip(self._probes, self._totals(), strict=True):
            group, lr = self._optimizer.param_groups[probe.group], self._lr(probe.group)
            turned = rotations(part, self._optimizer, group, lr)
            found |= {names[id(p)]: each for p, each in zip(probe.params, turned, strict=True)}
        return self._in_order(found)

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
        since = self.step - self._start
        return look_ahead(reading, decays, threshold=threshold, since=since, remaining=remaining)

    def reset(self) -> None:
        """Restart the averaging window. The step counter keeps running."""
        self._start = self._clock.steps
        self._calm = False
        for probe in self._probes:
            probe.restart()
        if self._trace is not None:
            self._trace.restart()

    def detach(self) -> None:
        """Remove the hooks. Past readings stay available."""
        self._detach()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Watch one step that hooks cannot see, such as a compiled or captured one.

        Hooks do not run when a CUDA graph is replayed and do nothing inside a compiled
        `optimizer.step`. Put exactly one step into the block. With `every` above 1 most blocks cost
        nothing.

        Yields:
            None.

        Example:
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([theta], lr=0.5)
            >>> monitor = Monitor(optimizer)
            >>> theta.grad = torch.tensor([1.0, 0.0])
            >>> with monitor.measure():  # instead of optimizer.step(): a compiled step, a replay
            ...     _ = theta.data.sub_(0.5 * theta.grad)
            >>> monitor.reading().right
            0.25
        """
        self._explicit = True
        try:
            self._before()
            yield
            self._after()
        finally:
            self._explicit = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, strings and tensors that `torch.load` reads by default.

        If parameters are sharded, every process must call it. The state is the same on all of them
        and may be loaded by any number of processes, or into a model that is not sharded.
        """
        self._update_layout()
        traced = [] if self._trace is None else self._trace.state_sums()
        sums = [*(probe.state_sums() for probe in self._probes), traced, self._alignments.sums()]
        totals = iter(self._layout.total([part for parts in sums for part in parts]))
        return {
            "step": self.step,
            "since_reset": self.step - self._start,
            "every": self.every,
            "scale_invariant": self.scale_invariant,
            "lrs": [float(lr) for lr in self._lrs],
            "fingerprint": self._fingerprint(),
            "probes": [probe.state_dict(next(totals), next(totals)) for probe in self._probes],
            "trace": self._trace and self._trace.state_dict(next(totals), next(totals)),
            "alignments": self._alignments.state_dict(list(totals)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, `every` and `scale_invariant` included.

        Raises:
            ValueError: If it is not the state of a monitor, that of another model, or one whose
                parameters were spread over devices in another way.
        """
        if "fingerprint" not in state_dict:
            raise ValueError(
                f"state_dict is not the state of a Monitor: it holds {', '.join(state_dict)}; "
                "pass what monitor.state_dict() returned"
            )
        fingerprint = self._fingerprint()
        if state_dict["fingerprint"] != fingerprint:
            raise ValueError(
                "state_dict belongs to another model or optimizer: it was saved with "
                f"{describe(state_dict['fingerprint'])}, this monitor has "
                f"{describe(fingerprint)}; load it with the model, parameter groups and "
                "named_parameters it was saved with"
            )
        self.every = state_dict["every"]
        self.scale_invariant = state_dict["scale_invariant"]
        self._lay_out()
        saved = [len(state["begun"]) for state in state_dict["probes"]]
        if saved != (present := [len(probe.params) for probe in self._probes]):
            raise ValueError(
                "state_dict was saved with the parameters on other devices: it holds sums for "
                f"{saved} tensors on each, this monitor has {present}; move the model first"
            )
        self._clock.set(state_dict["step"])
        self._start = self.step - state_dict["since_reset"]
        self._lrs = list(state_dict["lrs"])
        for probe, state in zip(self._probes, state_dict["probes"], strict=True):
            probe.load_state_dict(state)
        self._alignments.load_state_dict(state_dict["alignments"])
        if self._trace is not None:
            self._trace.load_state_dict(state_dict.get("trace"))
        self._checked = self.step, self._norm()

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
            "named_parameters": self._named_parameters(),
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

    # Hooks ------------------------------------------------------------------------------------

    def _on_before(self) -> None:
        """Run as a hook, which counts nothing inside a capture or an explicit block."""
        self._hooked = not (
            self._explicit or (self._on_gpu and torch.cuda.is_current_stream_capturing())
        )
        if self._hooked:
            self._before()

    def _on_after(self) -> None:
        if self._hooked:
            self._after()

    def _before(self) -> None:
        upcoming = self._clock.steps + 1 - self._start
        self._measured = upcoming == 1 or upcoming % self.every == 0
        if self._measured or not self._calm or self._has_changed():
            self._prepare()

    def _has_changed(self) -> bool:
        """Return whether a setting has changed, or a parameter was added: cheap, for each step."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._watched):
            return True
        for group, (size, settings, key) in zip(groups, self._watched, strict=True):
            if len(group["params"]) != size or settings(group) != key:
                return True
        return False

    def _prepare(self) -> None:
        """Do what a step asks for that is measured, or before which something may have changed."""
        self._calm = False
        if self._sizes != [len(group["params"]) for group in self._optimizer.param_groups]:
            self._lay_out()
            self._measured = True
        self._idle = is_idle(self._optimizer)
        if self._idle:
            return
        if self._measured and not self._up_to_date():
            self._lay_out()  # the window begins at this step, which is measured anyway
        if self._measured:
            self._alignments.before(self._clock.steps + 1 - self._start, self.every)
        for probe in self._probes:
            probe.before(measured=self._measured)
        if self._trace is not None and self._measured:
            self._trace.before(self._clock.steps - self._start)

    def _after(self) -> None:
        if self._idle:
            self._clock.calls += 1
            return
        self._clock.tick()
        if self._calm and not hasattr(self._optimizer, "found_inf"):
            return
        for probe in self._probes:
            probe.after(measured=self._measured)
        if self._measured:
            self._alignments.after()
            self._lrs = [learning_rate(group) for group in self._optimizer.param_groups]
            if self._trace is not None:
                self._trace.after(self._clock.steps - self._start)
        if not self._calm:
            self._calm = all(probe.is_calm() for probe in self._probes)
            for probe in self._probes:
                self._watched[probe.group] = probe.watched()

    # Layout -----------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Create a probe for each group, device and dtype; windows restart."""
        check_parameters(self._optimizer)
        skipped = self._probes[0].skips.total if self._probes else None
        groups = self._optimizer.param_groups
        self._layout = Layout([p for group in groups for p in group["params"]], self._process_group)
        each = self._has_names() or not self.scale_invariant
        buckets: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for i, group in enumerate(groups):
            for p in group["params"]:
                buckets.setdefault((i, local(p).device, p.dtype), []).append(p)
        self._probes = [
            Probe(
                self._optimizer,
                group,
                params,
                self._layout,
                self._clock,
                each=each,
                thinned=self.every > 1,
            )
            for (group, _, _), params in buckets.items()
        ]
        self._alignments = Alignments([p.params for p in self._probes if each], self._layout)
        if skipped is not None:
            for probe in self._probes:
                probe.skips = Skips(probe.device, skipped)
        if self._traces:
            self._trace = TraceRecorder(self._probes, self._layout, self.every)
        self._start = self._clock.steps
        self._calm = False
        self._sizes = [len(group["params"]) for group in groups]
        self._watched = [(size, lambda group: None, None) for size in self._sizes]
        self._held = [p for group in groups for p in group["params"]]
        self._on_gpu = any(probe.device.type == "cuda" for probe in self._probes)

    def _up_to_date(self) -> bool:
        """Return whether the optimizer holds the same parameters, and they are where they were."""
        now = [p for group in self._optimizer.param_groups for p in group["params"]]
        return (
            len(now) == len(self._held)
            and all(map(is_, now, self._held))
            and all(local(probe.params[0]).device == probe.device for probe in self._probes)
        )

    def _update_layout(self) -> None:
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != self._sizes or not self._up_to_date():
            self._lay_out()

    # Names ------------------------------------------------------------------------------------

    def _has_names(self) -> bool:
        groups = self._optimizer.param_groups
        return self._names is not None or any("param_names" in group for group in groups)

    def _all_names(self) -> dict[int, str]:
        """Return the name of every parameter: as given, the optimizer's own, or its place."""
        names: dict[int, str] = {}
        for i, group in enumerate(self._optimizer.param_groups):
            own = group.get("param_names", [])
            for j, p in enumerate(group["params"]):
                fallback = own[j] if j < len(own) else f"group {i}, parameter {j}"
                names[id(p)] = (self._names or {}).get(id(p), fallback)
        return names

    def _in_order(self, found: dict[str, T]) -> dict[str, T]:
        """Return what was found by name, in the order of the names given."""
        order = [name for name in (self._names or {}).values() if name in found]
        return {name: found[name] for name in dict.fromkeys([*order, *found])}

    def _named_parameters(self) -> dict[str, Tensor] | None:
        if self._names is None:
            return None
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        return {self._names[id(p)]: p for p in params if id(p) in self._names}

    # Readings ---------------------------------------------------------------------------------

    def _totals(self) -> list[Totals]:
        """Return the averages of each probe, over all processes."""
        return totals.take(self._probes, self._layout, self._alignments.sums())

    def _counted(self) -> list[Totals]:
        """Return the averages of each probe as `reading` adds them up."""
        parts = self._totals()
        return parts if self.scale_invariant else totals.others_alone(parts)

    def _combined(self, chosen: Iterable[int], parts: Sequence[Totals]) -> Reading:
        """Return the reading of some of the probes together."""
        chosen = list(chosen)
        lrs = {float(self._lr(self._probes[j].group)) for j in chosen}
        lr = lrs.pop() if len(lrs) == 1 else math.nan
        return self._reading(totals.together([parts[j] for j in chosen]), lr)

    def _reading(self, sides: Sides, lr: float) -> Reading:
        left, right = (sides.left, sides.right) if sides.steps else (math.nan, math.nan)
        skipped = int(self._probes[0].skips) if self._probes else 0
        step, count = self.step - skipped, round(sides.steps)
        return Reading(step, count, left, right, lr, sides.stderr, sides.margin)

    def _lr(self, group: int) -> float:
        if self._optimizer.param_groups[group].get("lr") is None or group >= len(self._lrs):
            return math.nan
        return float(self._lrs[group])

    def _norm(self) -> float:
        """Return |θ|² of this process's parameters; nan if they have no storage yet."""
        if any(p.is_meta for probe in self._probes for p in probe.params):
            return math.nan
        return sum(probe.norm() for probe in self._probes)

    def _warn_if_blind(self) -> None:
        """Warn if parameters have changed although no step was seen, or between two steps."""
        seen, norm = self._checked
        now = self._norm()
        self._checked = self.step, now
        watching = self._detach.alive
        if watching and seen == self.step and math.isfinite(norm) and now != norm:
            warnings.warn(
                "the parameters have changed since the last reading, but no optimizer step was "
                "seen. Hooks do not run when a step is replayed from a CUDA graph or compiled: "
                "wrap such a step in `with monitor.measure():`. If you loaded other parameters, "
                "call monitor.reset()",
                stacklevel=3,
            )
        edited = [probe.had_hidden_edit() for probe in self._probes]  # each forgets it thereby
        if any(edited):
            warnings.warn(
                "the parameters were changed between two optimizer steps without PyTorch noticing, "
                "through `.data` or a shared memory, so that readings count these changes as "
                "steps. Change them inside `with torch.no_grad():` instead, as in "
                "`p.clamp_(-1, 1)`",
                stacklevel=3,
            )

    def _rounding(self) -> float:
        """Return the right side below which steps are lost in the rounding of the parameters.

        That is the case for |Δ| < 2ε|θ|, and where gradient and weight decay cancel to within ε.
        """
        norm, epsilon = self._checked[1], torch.finfo(torch.float32).eps
        if not math.isfinite(norm) or self._layout.processes > 1:  # a norm of this process alone
            return 0.0
        floor = 0.0
        for i, group in enumerate(self._optimizer.param_groups):
            single = any(p.dtype is torch.float32 for p in group["params"])
            lr, decay = self._lr(i), group.get("weight_decay", 0.0)
            if single and lr > 0 and isinstance(decay, float | int):
                floor += 2 * epsilon**2 * norm / lr + 4 * epsilon * lr * decay**2 * norm
        return floor

    def _fingerprint(self) -> list[list[Any]]:
        names = self._all_names() if self._has_names() else {}
        return [
            [[names.get(id(p), ""), self._layout.shape(p), str(p.dtype)] for p in group["params"]]
            for group in self._optimizer.param_groups
        ]
