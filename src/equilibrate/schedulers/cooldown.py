"""A constant learning rate, and a linear decay that begins when it pays."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equilibrate._arguments import check_steps
from equilibrate.estimates import Estimate
from equilibrate.forecast.forecaster import Forecaster
from equilibrate.forecast.outcome import GROWTH, KEPT, Outcomes
from equilibrate.schedulers.decision import Decision
from equilibrate.schedulers.misuse import FirstSteps, OwnRates, mismatch
from equilibrate.watching.hooks import unwrap
from equilibrate.watching.rates import check_min_lr, lower_bounds, read_lrs, write_lrs

_SHARE = 0.2
"""Share of the steps that the decay has if the forecast cannot tell that another one is better."""
_LONGEST = 0.5
"""Share of the steps that the decay has at most: a longer one gains little, if anything."""
_SHORTEST = 0.1
"""Share of the steps that the decay has at least."""
_BETWEEN = 100
"""Steps between two checks: each waits for the device."""
_EXTRA = 10
"""Calls after the end without a warning: a trainer may step once more than it trains."""
_COMPARED = 64
"""Steps of the decay at which the optimizer must have the learning rate that was set."""


class Cooldown(LRScheduler):
    """Keeps the learning rate constant, and decays it linearly to zero when that pays.

    It is a warm-up, stable, decay (WSD) schedule without a share to choose. The decay ends with the
    training. It begins when a `Forecaster` tells that the run then ends lower than if it began at
    any later step, when between half and a tenth of the steps is left. If the forecast cannot tell,
    it begins when a fifth is left.

    Call `step(loss)` after every optimizer step. Once it decays nothing is measured any more. If
    there are several processes, all of them must call it, and all decide alike.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        total_steps: Number of optimizer steps of the training, which are as many calls of `step`.
        warmup_steps: How many of them warm the learning rate up, linearly.
        min_lr: Learning rate at the end, one number or one for each parameter group.
        model: The model, needed if it has BatchNorm and `step` is given a closure; see
            `Forecaster`.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scheduler = Cooldown(optimizer, total_steps=1000, warmup_steps=10)
        >>> print(f"{optimizer.param_groups[0]['lr']:.2f}: {scheduler.last_decision.reason}")
        0.01: nothing was decided yet
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        *,
        model: nn.Module | None = None,
    ) -> None:
        optimizer = unwrap(optimizer)
        self.total_steps = check_steps("total_steps", total_steps, least=2)
        self.warmup_steps = check_steps("warmup_steps", warmup_steps, least=0)
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps is {warmup_steps}, but the training has total_steps={total_steps}: "
                "pass fewer"
            )
        self.min_lr = check_min_lr(optimizer, min_lr)
        self.forecaster = Forecaster(optimizer, model)
        """What forecasts the end of a cooldown, until the decay begins."""
        self._has_loss = False
        """Whether a loss was handed over since the warm-up."""
        self._start: int | None = None
        self._top: tuple[float, ...] = ()
        """Steps when the decay began, and the learning rates then."""
        self._due = self._next_check(self.warmup_steps)
        self._begun = 0, 0
        """Calls, and steps that the forecaster had seen, when this process began."""
        self._warned: set[str] = set()
        self._first_steps: FirstSteps | None = FirstSteps(optimizer, self.total_steps)
        self._own_rates: OwnRates | None = None
        self.last_decision: Decision
        """What was decided the last time that it was asked whether to begin the decay."""
        self.decisions: deque[Decision] = deque(maxlen=256)
        """The decisions of this process, the newest last. Not saved with the state."""
        super().__init__(optimizer)

    @property
    def is_decaying(self) -> bool:
        """Whether the decay has begun."""
        return self._start is not None

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # as ReduceLROnPlateau's
        self,
        loss: float | Tensor | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> None:
        """Note an optimizer step and its loss, decide if it is time to, and set learning rates.

        Args:
            loss: The training loss of the step: a number, or a tensor, which is not waited for.
            closure: Returns the same loss again, without `backward`. With it the noise is
                measured directly; see `Forecaster.update`.
        """
        self._step_count += 1
        self.last_epoch += 1
        step = self.last_epoch
        if step == 0:
            lrs = tuple(read_lrs(self.optimizer))
            self.last_decision = Decision(0, False, "nothing was decided yet", lrs)
        elif self._start is None:
            calls = step - self._begun[0]
            if calls & (calls - 1) == 0:  # 1, 2, 4 and so on
                self._check_calls(calls, loss)
            if step > self.warmup_steps:
                self.forecaster.update(loss, closure)
                self._has_loss |= loss is not None
                if step >= self._due:
                    self._decide(step)
        if step <= self.warmup_steps or self._start is not None:
            write_lrs(self.optimizer, self.get_lr())
            if step == self.total_steps + _EXTRA:
                self._warn_of_overrun()
        self._last_lr: list[Any] = [group["lr"] for group in self.optimizer.param_groups]
        if self._start is not None and self._start < step <= self._start + _COMPARED:
            self._compare_rates(step - self._start)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group at this step. Nothing is changed."""
        step, current = self.last_epoch, [group["lr"] for group in self.optimizer.param_groups]
        lrs: list[Any] = []
        if self._start is not None:
            share = max(0.0, (self.total_steps - step) / (self.total_steps - self._start))
            bounds = zip(self._top, lower_bounds(self.optimizer, self.min_lr), strict=False)
            lrs = [share * top + (1 - share) * min(low, top) for top, low in bounds]
        elif step <= self.warmup_steps and self.warmup_steps:
            share = min(1.0, (step + 1) / self.warmup_steps)
            lrs = [share * lr for lr in self.base_lrs]
        return lrs + current[len(lrs) :]  # groups that were added since keep theirs

    def share_losses(self) -> None:
        """Give all processes the same losses, so that the state of one is right for all.

        A checkpoint that one process writes otherwise holds its own losses since the last check.
        Every process must call it.
        """
        self.forecaster.share_losses()

    def detach(self) -> None:
        """Remove the hooks of the forecaster."""
        self.forecaster.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which `torch.load` reads by default.

        Under sharded training every process must call it. The means of the forecaster are not
        copied; see `Forecaster.state_dict`.
        """
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "last_lr": [float(lr) for lr in self._last_lr],
            "base_lrs": [float(lr) for lr in self.base_lrs],
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "min_lr": self.min_lr,
            "start": self._start,
            "top": list(self._top),
            "due": self._due,
            "decision": self.last_decision.state_dict(),
            "has_loss": self._has_loss,
            "forecaster": None if self.is_decaying else self.forecaster.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        If it was saved with another `total_steps`, the present one is kept, with a warning, and a
        decay that has begun continues from its learning rate.

        Raises:
            ValueError: If it is not the state of a Cooldown, or another `total_steps` is over.
        """
        if "total_steps" not in state_dict:
            raise ValueError(
                "state_dict is not the state of a Cooldown: it holds "
                f"{', '.join(state_dict) or 'nothing'}; pass what scheduler.state_dict() returned"
            )
        saved, made = state_dict["total_steps"], state_dict["last_epoch"]
        if made >= self.total_steps and saved != self.total_steps:
            raise ValueError(
                f"state_dict was saved after {made} steps, so that none are left of "
                f"total_steps={self.total_steps}: pass more than {made}"
            )
        if (forecasts := state_dict["forecaster"]) is None:
            self._stop_measuring()
        else:
            if not self.forecaster.is_attached:  # its decay had begun
                self.forecaster = Forecaster(self.optimizer, self.forecaster.model)
            self.forecaster.load_state_dict(forecasts)  # first, because it may not fit
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self._last_lr, self.base_lrs = list(state_dict["last_lr"]), list(state_dict["base_lrs"])
        self.warmup_steps, self.min_lr = state_dict["warmup_steps"], state_dict["min_lr"]
        self._start, self._top = state_dict["start"], tuple(state_dict["top"])
        self._due = state_dict["due"]
        self.last_decision = Decision.from_state_dict(state_dict["decision"])
        self.decisions.clear()
        self._has_loss = state_dict["has_loss"]
        self._first_steps = self._own_rates = None
        self._begun = self.last_epoch, self.forecaster.step
        if saved != self.total_steps:
            self._move_end(saved)

    def __repr__(self) -> str:
        steps = f"{self.last_epoch} of {self.total_steps} steps"
        return f"Cooldown({steps}, {self.last_decision.reason!r})"

    def _next_check(self, step: int) -> int:
        """Return the step of the next check; the decay may have to begin at some of them."""
        total = self.total_steps
        ends = [total - max(1, int(share * total)) for share in (_SHARE, _SHORTEST)]
        later = [end for end in ends if end > step]
        return min([step + _BETWEEN, *later]) if later else step + 1

    def _decide(self, step: int) -> None:
        """Compare beginning the decay now with beginning it later, and begin it if that is best."""
        self._due = self._next_check(step)
        left = self.total_steps - step
        if not self._has_loss:
            self._warn(
                "loss",
                "no loss was handed over, without which the decay begins when "
                f"{_SHARE:.0%} of the steps are left: call scheduler.step(loss)",
            )
        found = self.forecaster.outcomes(left, shared=True)
        act, reason = judge(found, left, left / self.total_steps)
        lrs = tuple(read_lrs(self.optimizer))
        self._warn("falls", _falling([made.lrs for made in self.decisions], lrs))
        if act:
            self._start, self._top = step, lrs
            reason += f"; the learning rate decays linearly until step {self.total_steps}"
            self._stop_measuring()
        self.last_decision = Decision(step, act, reason, lrs)
        self.decisions.append(self.last_decision)

    def _stop_measuring(self) -> None:
        self.forecaster.detach()
        self.forecaster.reset()  # frees the mean of the parameters

    def _move_end(self, saved: int) -> None:
        words = f"total_steps={self.total_steps} of this scheduler is kept"
        if self._start is None:
            self._due = min(self._due, self._next_check(self.last_epoch))
        else:
            self._start, self._top = self.last_epoch, tuple(map(float, self._last_lr))
            old, new = (f"until step {n}" for n in (saved, self.total_steps))
            reason = self.last_decision.reason.replace(old, new)
            self.last_decision = replace(self.last_decision, reason=reason)
            words += f", and the decay continues from lr={', '.join(f'{lr:g}' for lr in self._top)}"
            words += "" if any(self._top) else ", where nothing is learned"
            words += ": to train at the constant rate, load a checkpoint from before the decay"
        warnings.warn(f"the state was saved with total_steps={saved}; {words}", stacklevel=3)

    def _check_calls(self, calls: int, loss: Any) -> None:
        """Warn if calls of `step` and steps of the optimizer do not match in this process.

        Raises:
            TypeError: If `step` was given an epoch.
        """
        if isinstance(loss, int) and not isinstance(loss, bool):
            raise TypeError(
                f"step() takes the training loss of a step, not an epoch, got {loss}: call "
                "scheduler.step(loss) after every optimizer step"
            )
        if self._first_steps is not None:
            self._warned |= {"calls"} if self._first_steps.has_warned else set()
            self._first_steps = None
        seen = self.forecaster.step - self._begun[1]
        self._warn("calls", mismatch(calls, seen, self.total_steps))

    def _compare_rates(self, made: int) -> None:
        """Let the first steps of the decay be compared with what was set, given those made."""
        if made == 1:
            self._own_rates = OwnRates(self.optimizer)
        if self._own_rates is not None:  # it is in a copy, and after loading
            self._own_rates.lrs = self._last_lr
        if made == _COMPARED:
            self._own_rates = None

    def _warn_of_overrun(self) -> None:
        if not any(read_lrs(self.optimizer)):
            self._warn(
                "overrun",
                f"the training continues after total_steps={self.total_steps}, where the learning "
                "rate is 0: pass the number of optimizer steps of the training, not of epochs, or "
                "a min_lr",
            )

    def _warn(self, kind: str, message: str | None) -> None:
        """Warn once of each kind, if there is a message, at the line of the user's call."""
        if message is not None and kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=4)


def _falling(checks: Sequence[tuple[float, ...]], lrs: tuple[float, ...]) -> str | None:
    """Return what is wrong if a rate that is kept constant fell at each of the last two checks.

    Args:
        checks: The learning rates at all checks before.
        lrs: Those of now.
    """
    for a, b, c in zip(*checks[-2:], lrs, strict=False) if len(checks) > 1 else ():
        if a > b > c:
            return (
                f"the learning rate falls ({a:g}, {b:g}, {c:g} at the last three checks) although "
                "the decay has not begun: remove the other scheduler"
            )
    return None


def judge(found: Outcomes | str, left: int, share: float) -> tuple[bool, str]:
    """Return whether to begin a linear decay now that ends with the training, and why.

    If it begins when the share u of the remaining steps is left, the run ends at
    f(t + (1 − (1−κ)u)n) − u^0.2 N (`forecast.outcome`): waiting keeps more of the progress, and
    leaves more of the noise. Before the last fifth of the training, and not in its first half, the
    decay begins if it gains something beyond its error bar and every later beginning is worse by
    more than half of a standard error; in the last fifth, if no later one is better. A loss that
    seems to rise is taken as one that stays.

    Args:
        found: What is known of the remaining steps, or the reason why nothing is.
        left: Their number.
        share: What share of the steps of the training they are.

    Returns:
        Whether to begin, and the numbers in a sentence.
    """
    in_last_fifth, at_the_last = share <= _SHARE + 1e-9, share <= _SHORTEST + 1e-9 or left <= 1
    if isinstance(found, str):
        if in_last_fifth or at_the_last:
            return True, f"{share:.0%} of the steps are left, and there is no forecast: {found}"
        return False, f"not yet: {found}"
    worth, waits = found.gain(KEPT, 1, than=(1, 0)), [_waiting(found, k / 10) for k in range(1, 10)]
    best = max(range(9), key=lambda k: waits[k].value)
    words = f"decaying over the last {left:,} steps would end at {found.loss(KEPT, 1)}, "
    if waits[best].value > 0:
        later = round((9 - best) / 10 * left)
        words += f"beginning {later:,} steps later would end {waits[best].value:.2g} lower"
    else:
        words += "beginning later would not end lower"
    if at_the_last:
        return True, f"{share:.0%} of the steps are left; {words}"
    if in_last_fifth:
        act = waits[best].value <= 0
    else:
        loses = all(wait.value + wait.stderr / 2 < 0 for wait in waits)
        act = share <= _LONGEST and worth.value > worth.margin and loses
    return act, words if act else f"not yet: {words}"


def _waiting(found: Outcomes, left: float) -> Estimate:
    """Return what is gained by waiting until a share of the remaining steps is left."""
    later = found.gain(1 - (1 - KEPT) * left, left**GROWTH, than=(KEPT, 1))
    lost = (left**GROWTH - 1) * found.noise.value
    return replace(later, value=max(later.value - lost, 0.0) + lost)
