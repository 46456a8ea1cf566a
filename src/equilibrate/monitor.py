"""Watch any optimizer by its step hooks and read FDR1 at any moment."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate.averages import HalfRunningMean
from equilibrate.probes import Group, Probe, probe_type
from equilibrate.relations import Reading, combine

Names = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Monitor:
    """Reads both sides of FDR1 off a training loop, over the paper's half-running window.

    Attach it once and train as before: it only adds hooks, waits for nothing, and leaves training
    bit-identical. For `torch.optim.SGD` the sides are ⟨θ·∇f⟩ and (1+μ)/(2(1−ν)) η⟨v²⟩, weight
    decay counted in ∇f; with Nesterov momentum and for every other optimizer they are those of the
    step form, −⟨θ·Δ⟩/η and ⟨Δ²⟩/(2η), which for plain SGD is the same.

    With `names=model.named_parameters()` there is a reading for each parameter too.

    >>> theta = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([theta], lr=0.5)
    >>> monitor = Monitor(optimizer)
    >>> theta.grad = torch.tensor([1.0, 0.0])
    >>> optimizer.step()
    >>> monitor.reading()
    Reading(step=1, count=1, left=1, right=0.25, lr=0.5, residual=3)
    """

    def __init__(self, optimizer: Optimizer, *, names: Names | None = None) -> None:
        _check(optimizer)
        self._optimizer = optimizer
        self._names = None if names is None else _names_of(names)
        _check_parameters(optimizer, self._names)
        self._lanes: list[_Lane] = []
        self._layout: list[tuple[list[int], torch.device]] = []
        self._lrs: list[float | Tensor] = []
        self._step = 0
        self._nests = _may_call_its_parents_step(type(optimizer))
        # Adding a hook is all that ties the two together.
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that is watched."""
        return self._optimizer

    def reading(self) -> Reading:
        """FDR1 for the whole model. Waits for the device, so ask once an epoch, not each step."""
        return self._read(self._lanes)

    def readings(self) -> dict[str, Reading]:
        """FDR1 for each parameter where `names` was given, for each parameter group otherwise.

        FDR1 holds for every part by itself, each with its own learning rate, momentum and
        dampening.
        """
        if self._names is None:
            return self.group_readings()
        found = {
            self._names[id(p)]: self._reading(lane.average.window, [pair], self._lrs[lane.group])
            for lane in self._lanes
            for p, pair in zip(lane.params, lane.average.value.unbind(1), strict=True)
        }
        return {name: found[name] for name in self._names.values() if name in found}

    def group_readings(self) -> dict[str, Reading]:
        """FDR1 for each parameter group: "group 0", "group 1", …"""
        groups = range(len(self._optimizer.param_groups))
        return {f"group {i}": self._read([x for x in self._lanes if x.group == i]) for i in groups}

    def reset(self) -> None:
        """Start the averages again: t = 0. The count of steps goes on."""
        for lane in self._lanes:
            lane.average.reset()

    def detach(self) -> None:
        """Take the hooks off. What was read can still be asked for."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and tensors: `torch.load` reads it back with its defaults."""
        return {
            "step": self._step,
            "lrs": [float(lr) for lr in self._lrs],
            "fingerprint": self._fingerprint(),
            "lanes": [lane.state_dict() for lane in self._lanes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, refusing that of another model."""
        if "fingerprint" not in state:
            raise ValueError(
                f"state is not that of a Monitor: it holds {', '.join(state)}; load what "
                "monitor.state_dict() gave"
            )
        fingerprint = self._fingerprint()
        if state["fingerprint"] != fingerprint:
            raise ValueError(
                "the monitor's state belongs to another model or optimizer: it was made with "
                f"{_describe(state['fingerprint'])}, here is {_describe(fingerprint)}; "
                "load it into the model, parameter groups and names= it was saved with"
            )
        self._step = state["step"]
        self._lrs = list(state["lrs"])
        self._lay_out()
        if state["lanes"]:
            for lane, lane_state in zip(self._lanes, state["lanes"], strict=True):
                lane.load_state_dict(self._optimizer, lane_state)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._nests and _is_inside_another(optimizer):
            return
        if self._layout != _layout(optimizer):
            self._lay_out()
        for lane in self._lanes:
            lane.before(optimizer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._nests and _is_inside_another(optimizer):
            return
        with torch.no_grad():
            for lane in self._lanes:
                lane.after(optimizer)
        self._lrs = [_frozen(group.get("lr", math.nan)) for group in optimizer.param_groups]
        self._step += 1

    def _lay_out(self) -> None:
        """One lane for each group, device and dtype; averages begin anew."""
        _check_parameters(self._optimizer, self._names)
        lanes: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for i, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                lanes.setdefault((i, p.device, p.dtype), []).append(p)
        self._lanes = [
            _Lane(group, params, each=self._names is not None)
            for (group, _, _), params in lanes.items()
        ]
        self._layout = _layout(self._optimizer)

    def _read(self, lanes: list[_Lane]) -> Reading:
        lrs = {float(self._lrs[lane.group]) for lane in lanes} if self._lrs else set()
        window = lanes[0].average.window if lanes else 0
        lr = lrs.pop() if len(lrs) == 1 else math.nan
        return self._reading(window, [lane.average.value for lane in lanes], lr)

    def _reading(self, window: int, means: list[Tensor], lr: float | Tensor) -> Reading:
        left, right = combine(means) if means else (math.nan, math.nan)
        return Reading(self._step, window, left, right, float(lr))

    def _fingerprint(self) -> list[list[Any]]:
        names = self._names or {}
        return [
            [[names.get(id(p), ""), list(p.shape), str(p.dtype)] for p in group["params"]]
            for group in self._optimizer.param_groups
        ]


class _Lane:
    """The parameters of one group on one device and of one dtype, with their average."""

    def __init__(self, group: int, params: list[Tensor], *, each: bool) -> None:
        self.group = group
        self.params = params
        self._average = HalfRunningMean((2, len(params)) if each else (2,), device=params[0].device)
        self._each = each
        self._probe: Probe | None = None

    @property
    def average(self) -> HalfRunningMean:
        """Up to and with the last step."""
        self._settle()
        return self._average

    def before(self, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[self.group]
        self._probe_now(optimizer, group).before(group)

    def after(self, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[self.group]
        probe = self._probe_now(optimizer, group)
        probe.after(group)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:  # a fused step that gradient scaling may have skipped
            probe.skip_last_if(found_inf.to(self.params[0].device) > 0)
        if probe.noted >= probe.block:
            self._settle()

    def _settle(self) -> None:
        """Take into the average what the probe has noted so far."""
        if self._probe is not None and self._probe.noted:
            sides = self._probe.take()
            self._average.extend(sides if self._each else sides.sum(-1))

    def _probe_now(self, optimizer: Optimizer, group: Group) -> Probe:
        kind = probe_type(optimizer, group)
        if type(self._probe) is not kind:
            self._settle()
            self._probe = kind(optimizer, self.params)
        return self._probe  # pyright: ignore[reportReturnType]

    def state_dict(self) -> dict[str, Any]:
        return {
            "average": self.average.state_dict(),
            "probe": self._probe.state_dict() if self._probe is not None else None,
        }

    def load_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state["average"])
        if state["probe"] is not None:
            probe = self._probe_now(optimizer, optimizer.param_groups[self.group])
            probe.load_state_dict(state["probe"])


def _check(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("optimizer has no parameters: pass model.parameters() to it first")
    for i, group in enumerate(optimizer.param_groups):
        lr = float(group.get("initial_lr", group.get("lr", 1.0)))
        if not lr > 0:
            raise ValueError(
                f"lr of parameter group {i} must be positive, got {lr}: set it, or leave the group "
                "out of the optimizer"
            )
        if group.get("dampening", 0) == 1:
            raise ValueError(
                f"dampening of parameter group {i} must be below 1, got 1: no gradient would ever "
                "reach the velocity"
            )


def _check_parameters(optimizer: Optimizer, names: dict[int, str] | None) -> None:
    """What the parameters have to be, whether they were there at first or came later."""
    for i, group in enumerate(optimizer.param_groups):
        if any(p.is_complex() for p in group["params"]):
            raise TypeError(
                f"parameter group {i} has complex parameters, which have no FDR1 reading here; "
                "optimize torch.view_as_real of them instead"
            )
    if names is None:
        return
    missing = [
        f"group {i}, parameter {j} of shape {tuple(p.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if id(p) not in names
    ]
    if missing:
        raise ValueError(
            f"names lacks {len(missing)} parameter(s) of the optimizer ({missing[0]}): "
            "pass model.named_parameters() of the model that is optimized"
        )


def _names_of(names: Names) -> dict[int, str]:
    try:
        return {id(p): name for name, p in dict(names).items()}
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"names must be pairs of a name and a parameter, got {type(names).__name__}: pass "
            "model.named_parameters()"
        ) from error


def _may_call_its_parents_step(kind: type[Optimizer]) -> bool:
    own = [parent for parent in kind.__mro__ if "step" in vars(parent)]
    return len(own) > 2  # its own and `Optimizer`'s, which does nothing


def _is_inside_another(optimizer: Optimizer) -> bool:
    """Whether a hook is called around the `step` of a parent, which the optimizer's own calls.

    Torch wraps the `step` of each class of which there has been an instance, and each wrapper calls
    the hooks. It alone knows which `step` it is around; a count of calls would be off for ever once
    a step has raised an error.
    """
    own = getattr(type(optimizer).step, "__wrapped__", None)
    return sys._getframe(2).f_locals.get("func", own) is not own


def _layout(optimizer: Optimizer) -> list[tuple[list[int], torch.device]]:
    """Which parameters, and where: a training loop may add, replace or move them."""
    groups = [group["params"] for group in optimizer.param_groups]
    return [([*map(id, params)], params[0].device) for params in groups if params]


def _frozen(lr: float | Tensor) -> float | Tensor:
    """A learning rate tensor is changed in place, so keep what it was."""
    return lr.detach().clone() if isinstance(lr, Tensor) else lr


def _describe(fingerprint: list[list[Any]]) -> str:
    tensors = sum(len(group) for group in fingerprint)
    numbers = sum(math.prod(shape) for group in fingerprint for _, shape, _ in group)
    named = any(name for group in fingerprint for name, _, _ in group)
    return (
        f"{tensors} tensors of {numbers} parameters in {len(fingerprint)} group(s), "
        f"{'with' if named else 'without'} names"
    )
