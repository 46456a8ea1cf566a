"""Lower the learning rate when FDR1 says that training has equilibrated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equilibrate.monitor import Monitor
from equilibrate.relations import Reading


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a reading says that training has equilibrated, and why."""

    equilibrated: bool
    reason: str


def judge(reading: Reading, tolerance: float = 0.01, min_count: int = 1) -> Verdict:
    """The paper's rule, section 3.3: equilibrated where |L̄/R̄ − 1| < X.

    >>> judge(Reading(step=600, count=300, left=0.995, right=1.0, lr=0.1))
    Verdict(equilibrated=True, reason='equilibrated: |L/R − 1| = 0.005 < 0.01')
    >>> judge(Reading(step=600, count=300, left=0.0, right=0.0, lr=0.1)).equilibrated
    False
    """
    if 0 < reading.count < min_count:
        return Verdict(False, f"too few steps: {reading.count} averaged, {min_count} wanted")
    if reading.undefined is not None:
        return Verdict(False, f"undefined: {reading.undefined}")
    size = abs(reading.residual)
    if size < tolerance:
        return Verdict(True, f"equilibrated: |L/R − 1| = {size:.3g} < {tolerance:g}")
    return Verdict(False, f"not yet: |L/R − 1| = {size:.3g} ≥ {tolerance:g}")


def check_rule(tolerance: float, decrease: float) -> None:
    """Refuse an X that is no threshold, and a Y that is no fraction."""
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise ValueError(f"tolerance must be a positive number such as 0.01, got {tolerance}")
    if not 0 < decrease < 1:
        raise ValueError(f"decrease must lie between 0 and 1, such as 0.1, got {decrease}")


@dataclass(frozen=True, slots=True)
class Decision:
    """What the scheduler did at one call of `step()`, and why."""

    lowered: bool
    reason: str
    reading: Reading
    lrs: tuple[float, ...]
    """The learning rate of each parameter group from now on."""

    @property
    def lr(self) -> float:
        """The learning rate from now on; nan where parameter groups have different ones."""
        return self.lrs[0] if len(set(self.lrs)) == 1 else math.nan


class FDRScheduler(LRScheduler):
    """The paper's adaptive schedule: where |L̄/R̄ − 1| < X, η → (1 − Y)η and the averages restart.

    Call `step()` at the end of each epoch, as with any torch scheduler. `tolerance` is the paper's
    X and `decrease` its Y. The *current* learning rate of each group is multiplied, so it goes with
    warm-up; after one in `SequentialLR` it starts at the initial learning rate, with fresh
    averages. No learning rate is lowered below `min_lr`, one number or one for each group. With
    fewer than `min_count` steps in the window nothing is decided.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scheduler = FDRScheduler(optimizer, tolerance=0.01, decrease=0.1)
    >>> scheduler.last_decision.reason
    'started: averages begin here'
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        tolerance: float = 0.01,
        decrease: float = 0.1,
        min_lr: float | Sequence[float] = 0.0,
        min_count: int = 1,
        monitor: Monitor | None = None,
        last_epoch: int = -1,
    ) -> None:
        check_rule(tolerance, decrease)
        if min_count < 1:
            raise ValueError(f"min_count must be at least 1, got {min_count}")
        if not isinstance(monitor, Monitor | None):
            raise TypeError(
                f"monitor must be an eq.Monitor, got {type(monitor).__name__}: pass "
                "eq.Monitor(optimizer)"
            )
        if monitor is not None and monitor.optimizer is not optimizer:
            raise ValueError("monitor watches another optimizer: pass eq.Monitor(optimizer)")
        self.monitor = monitor if monitor is not None else Monitor(optimizer)
        self.tolerance = tolerance
        self.decrease = decrease
        self.min_count = min_count
        self.min_lr = min_lr
        self.last_decision: Decision
        _per_group(optimizer, min_lr)  # refuses now what would be wrong at the first lowering
        super().__init__(optimizer, last_epoch)

    @property
    def min_lrs(self) -> tuple[float, ...]:
        """Below which the learning rate of each group is not lowered."""
        return _per_group(self.optimizer, self.min_lr)

    def get_lr(self) -> list[float | Tensor]:
        """Decide, and return the learning rate of each group from now on."""
        return self._next([float(group["lr"]) for group in self.optimizer.param_groups])

    def _get_closed_form_lr(self) -> list[float | Tensor]:
        """What torch asks for where `SequentialLR` hands over: its own schedulers start afresh."""
        if self.last_epoch != 0:
            return self.get_lr()
        groups = self.optimizer.param_groups
        return self._next([float(group.get("initial_lr", group["lr"])) for group in groups])

    def _next(self, current: list[float]) -> list[float | Tensor]:
        reading = self.monitor.reading()
        if self.last_epoch == 0:
            self.monitor.reset()
            decision = Decision(False, "started: averages begin here", reading, tuple(current))
        else:
            decision = self._decide(reading, current)
        if decision.lowered:
            self.monitor.reset()
        self.last_decision = decision
        return list(decision.lrs)

    def _decide(self, reading: Reading, current: list[float]) -> Decision:
        verdict = judge(reading, self.tolerance, self.min_count)
        if not verdict.equilibrated:
            return Decision(False, verdict.reason, reading, tuple(current))
        lowered = [
            max((1 - self.decrease) * lr, min(low, lr))
            for lr, low in zip(current, self.min_lrs, strict=True)
        ]
        if lowered == current:
            reason = f"{verdict.reason}, but lr is at min_lr"
            return Decision(False, reason, reading, tuple(current))
        return Decision(True, verdict.reason, reading, tuple(lowered))

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state with its monitor's; `torch.load` reads it with its defaults."""
        decision = asdict(self.last_decision)
        decision["lrs"] = list(decision["lrs"])
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "last_lr": [float(lr) for lr in self._last_lr],
            "base_lrs": [float(lr) for lr in self.base_lrs],
            "settings": self._settings(),
            "decision": decision,
            "monitor": self.monitor.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`; settings other than those it was saved with are refused."""
        if "settings" not in state_dict:
            raise ValueError(
                f"state_dict is not that of an FDRScheduler: it holds {', '.join(state_dict)}; "
                "begin with a new one, or load what scheduler.state_dict() gave"
            )
        if state_dict["settings"] != self._settings():
            raise ValueError(
                f"the scheduler's state was saved with {state_dict['settings']}, this one has "
                f"{self._settings()}: make it with the same settings to go on"
            )
        self.monitor.load_state_dict(state_dict["monitor"])
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]
        self._last_lr = list(state_dict["last_lr"])
        self.base_lrs = list(state_dict["base_lrs"])
        decision = dict(state_dict["decision"])
        reading = Reading(**decision.pop("reading"))
        self.last_decision = Decision(reading=reading, lrs=tuple(decision.pop("lrs")), **decision)

    def _settings(self) -> dict[str, Any]:
        return {
            "tolerance": self.tolerance,
            "decrease": self.decrease,
            "min_count": self.min_count,
            "min_lrs": list(self.min_lrs),
        }


def _per_group(optimizer: Optimizer, min_lr: float | Sequence[float]) -> tuple[float, ...]:
    groups = len(optimizer.param_groups)
    values = (min_lr,) * groups if isinstance(min_lr, int | float) else tuple(min_lr)
    if len(values) != groups or not all(low >= 0 for low in values):
        raise ValueError(
            f"min_lr must be one number ≥ 0, or one for each of the {groups} parameter group(s), "
            f"got {min_lr}"
        )
    return values
