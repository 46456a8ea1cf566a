"""What a run would be worth after a cooldown, from a training loop at a constant learning rate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equilibrate._arguments import check_steps, lies_between
from equilibrate.estimates import Estimate
from equilibrate.forecast.losses import Losses, are_mismatched, check_loss
from equilibrate.forecast.outcome import FEWEST, KEPT, History, Outcomes, outcomes
from equilibrate.forecast.running_mean import RunningMean, SampleLog
from equilibrate.forecast.values import Forecast
from equilibrate.watching.edits import kept_buffers, kept_generators
from equilibrate.watching.rates import Scalar, constant_since, learning_rate
from equilibrate.watching.sharding import are_alike, mean_over_processes, regathered, share_mean
from equilibrate.watching.watcher import Watcher

_COMPARISONS = 256
"""Comparisons that are kept."""
_BETWEEN = 50
"""Steps between two comparisons. A forward pass is a third of a step, so they take 0.7 % of the
time."""
_CHANGES = 1024
"""Changes of the learning rate that are kept."""
_OF_HORIZON = 0.24
"""Half-life of a mean that is made for a cooldown, in units of its length."""
_HALF_LIFE = 0.05
"""Half-life of the mean in units of the steps so far. It is then 7 % of these steps old, which fits
a cooldown over a fifth of them."""
_IN_HALF_LIFE = 8
"""Samples in a half-life of the mean, at least, as long as steps allow: a mean of fewer keeps a
share of the noise, which made the gain 1.2 to 1.4 times too small at step 1,000 of networks."""
_FIRST_SAMPLES, _FIRST_STEPS = 8, 128
"""Forecasts begin after `_FIRST_SAMPLES * every` steps, and after `_FIRST_STEPS` at the latest: the
first steps are sampled more densely."""

_INSIDE = (
    "inside forecaster.averaged(), where the parameters have other values: leave the block first"
)


class Forecaster(Watcher):
    r"""Forecasts where a run would end after a cooldown, while its learning rate is constant.

    Call `update(loss)` after every optimizer step. The forecaster keeps one running mean m of the
    parameters. At one in `every` steps, and at more of the first some thousand, so that the mean is
    one of many, it samples (θ − m)·g with the parameters θ and the gradient g of the mini-batch,
    which measures the noise of the loss that a cooldown would remove. If
    `update` is also given a closure that evaluates the loss of the mini-batch, it compares the
    losses at the parameters and at their mean every 50 steps, which is a better measure. The losses
    so far are extrapolated. `forecast.outcome` has the formulas.

    A forecaster only adds hooks to the optimizer: training is bit-identical with and without it,
    and no step waits for the device. It keeps one copy of the parameters, in single precision if
    theirs is lower. The hooks hold no reference to the forecaster: keep it in a variable. If
    parameters are sharded, `forecast` and `state_dict` are collective: call them on every process.
    Otherwise each process forecasts from its own losses.

    The gradient is the one in `p.grad`: clipped if you clip it, averaged over the processes of
    DDP, accumulated over micro-batches, divided by the scale of a `GradScaler`.

    Args:
        optimizer: Any `torch.optim.Optimizer`, or one that accelerate has wrapped.
        model: The model, whose buffers, such as the statistics of BatchNorm, get their values back
            after a comparison. With a closure, sharded parameters need it.
        horizon: Length of the cooldown that the mean is made for, in steps. By default it grows
            with the training, to a fifth of the steps so far. Forecasts can be asked for any
            length; those near this one are the most certain. Below 533 steps more than one in 16
            are sampled at any time, and below 67 each of them.
        every: Take a sample at one in this many steps, at least. There are eight in a half-life of
            the mean, if it is so long: with the default one in 16 after step 2,560.

    Raises:
        TypeError: If `optimizer` is not an optimizer, or `model` is not a module.
        ValueError: If a number is out of range, or `model` has none of the parameters.

    Example:
        >>> import torch
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> forecaster = Forecaster(optimizer)
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> forecaster.update(loss=0.5)
        >>> print(forecaster.forecast(400).undefined)
        it needs 128 steps at this learning rate, and has seen 1
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        horizon: int | None = None,
        every: int = 16,
    ) -> None:
        self._horizon = None if horizon is None else check_steps("horizon", horizon)
        self._model = model
        self._pending = False
        """Whether a sample waits for the gradient of the step that is being made."""
        self._is_exchanged = False
        """Whether the parameters have their averaged values."""
        self._losses = Losses()
        self._first_loss = 0
        """Steps before the first loss."""
        super().__init__(optimizer, every)
        self._check_model(model)

    @property
    def model(self) -> nn.Module | None:
        """The model whose buffers are restored after a comparison."""
        return self._model

    @property
    def horizon(self) -> int:
        """Length of the cooldown that the mean is made for, in steps."""
        return self._horizon or max(1, self.since_reset // 5)

    def update(self, loss: float | Tensor | None, closure: Callable[[], Any] | None = None) -> None:
        """Note the loss of a step, after it, and compare it with that of the mean now and then.

        Args:
            loss: The training loss of the step: a number, or a tensor, which is not waited for.
            closure: Returns the loss of the same mini-batch, as it was computed for `loss` but
                without `backward`. It is called every 50 steps, or after the next one that is
                sampled, without gradients, while the parameters have their averaged values. Buffers
                of the `model` and the state of random generators are restored. Under distributed
                training every process must pass it.
        """
        if not self._losses.calls:
            self._first_loss = self._step - 1
        self._losses.add(loss)
        is_due = self._step >= self._due and self._mean.last == self._step - 1
        if is_due and closure is not None and loss is not None:
            self.follow_parameters()
            if self._mean.taken:
                self._compare(check_loss(loss), closure)

    def forecast(self, horizon: float | None = None) -> Forecast:
        """Return where the run would end after a cooldown.

        It waits for the device, so ask once in a while, not at every step. If parameters are
        sharded, every process must call it.

        Args:
            horizon: Length of the cooldown, in steps, or below 1 as a share of the steps so far; by
                default the one that the mean is made for.
        """
        steps = self._length(horizon)
        found = self.outcomes(steps)
        if isinstance(found, str):
            return Forecast(steps, self._step, found)
        return Forecast(
            steps,
            self._step,
            now=found.loss(0, 0),
            after=found.loss(KEPT, 1),
            staying=found.loss(1, 0),
            gain=found.gain(KEPT, 1),
            over_staying=found.gain(KEPT, 1, than=(1, 0)),
            noise=found.noise,
        )

    def what_if(self, steps: int, *, lr: float = 1.0, batch: float = 1.0) -> Estimate:
        """Return the loss after some more steps with another learning rate and batch size.

        The noise is proportional to the learning rate, to the loss, and inversely to the batch
        size. Progress slows down with the rate, and grows with the batch.

        Args:
            steps: Number of steps.
            lr: By what the learning rate is multiplied, at most 1.
            batch: By what the batch size is multiplied.

        Returns:
            The loss; nan, with the reason as its `method`, if there is no forecast.

        Raises:
            ValueError: If a number is out of range.
        """
        if not lies_between(lr, 0, 1 + 1e-9):
            raise ValueError(f"lr must lie between 0 and 1, got {lr!r}: a higher one is not known")
        if not lies_between(batch, 0, math.inf):
            raise ValueError(f"batch must be a positive number, got {batch!r}")
        found = self.outcomes(check_steps("steps", steps))
        if isinstance(found, str):
            return Estimate(math.nan, math.nan, method=found)
        return found.loss(*found.changed(lr, batch))

    @contextmanager
    def averaged(self, model: nn.Module | None = None) -> Iterator[None]:
        """Give the parameters their averaged values for a block, to evaluate or to save a model.

        Averaging removes the noise that a cooldown would remove, at any time of a training and
        without lowering the learning rate. Before the first step, and in the decay of a `Cooldown`,
        the parameters keep their own values, and so they do after they were not finite. A step of
        the optimizer inside the block raises a `RuntimeError`.

        The running statistics of BatchNorm do not fit the averaged parameters: pass the model, and
        compute them again inside the block, with `torch.optim.swa_utils.update_bn`.

        Args:
            model: A model whose buffers, such as the statistics of BatchNorm, get their values back
                after the block; by default that of the forecaster. Sharded parameters need it.

        Yields:
            None.

        Example:
            >>> import torch
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([theta], lr=0.5)
            >>> forecaster = Forecaster(optimizer, every=1)
            >>> for _ in range(3):
            ...     theta.grad = torch.ones(2)
            ...     optimizer.step()
            >>> with forecaster.averaged():
            ...     print(f"{theta[0]:.2f}")
            0.29
            >>> print(f"{theta[0]:.2f}")
            -0.50
        """
        self._check_model(model)
        self.follow_parameters()
        if not self._mean.is_finite():
            self._forget_mean()
        with self._with_mean(self._model if model is None else model):
            yield

    def share_losses(self) -> None:
        """Give all processes the same losses, so that the state of one is right for all.

        A checkpoint that one process writes otherwise holds its own losses and comparisons since
        the last forecast. Every process must call it.
        """
        self._agree()
        self._losses.share()
        share_mean(self._compared.parts[0])

    def reset(self) -> None:
        """Forget everything measured so far, the mean included. The step counter keeps running."""
        super().reset()
        self._forget_mean()
        self._losses.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors that `torch.load` reads by default.

        It holds the mean, which is as large as the parameters and distributed as these are. As in
        the state of an optimizer it is not copied: to return to a state later without saving it,
        keep a `copy.deepcopy` of it. If parameters are sharded, every process must call it.
        """
        self.follow_parameters(converted=True)  # a state has one dtype
        return {
            **self._counters(),
            "horizon": self._horizon,
            "due": self._due,
            **self._mean.state_dict(),
            "comparisons": self._compared.state_dict(self._compared.parts[0]),
            "losses": self._losses.state_dict(),
            "first_loss": self._first_loss,
            "rates": self._changes(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            RuntimeError: If the parameters have their averaged values.
        """
        if self._is_exchanged:
            raise RuntimeError(f"a state was loaded {_INSIDE}")
        self._load_counters(state_dict)
        self._horizon, self._due = state_dict["horizon"], state_dict["due"]
        rates = [(int(step), list(lrs)) for step, *lrs in state_dict["rates"]]
        self._rates = deque(rates, maxlen=_CHANGES)
        self._mean.load_state_dict(state_dict)
        self._compared.load_state_dict(state_dict["comparisons"])
        self._losses.load_state_dict(state_dict["losses"])
        self._first_loss = state_dict["first_loss"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "model": self._model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._model = state["model"]  # not checked: if it holds the forecaster, it is half copied

    # Steps ------------------------------------------------------------------------------------

    def before_step(self, *, deferred: bool) -> None:
        """Prepare for a step; called by the hooks.

        Args:
            deferred: Whether the gradients are only known after the step.

        Raises:
            RuntimeError: If the parameters have their averaged values.
        """
        if self._is_exchanged:
            raise RuntimeError(f"the optimizer made a step {_INSIDE}")
        super().before_step(deferred=deferred)

    def _lay_out(self) -> None:
        super()._lay_out()
        self._rates: deque[tuple[int, list[Scalar]]] = deque(maxlen=_CHANGES)
        """The learning rates at the steps where they changed."""

    def _settings_changed(self) -> None:
        lrs = [learning_rate(group) for group in self._optimizer.param_groups]
        self._rates.append((self._step, lrs))

    def _changes(self) -> list[list[float]]:
        return [[step, *map(float, lrs)] for step, lrs in self._rates]

    def _before(self, deferred: bool) -> None:
        self._pending = self._measured
        if self._measured and deferred:
            self._mean.save()
        elif self._measured:
            self._sample(self._step)

    def _finish_step(self) -> None:
        if self._pending:
            self._sample(self._step - 1, saved=True)
        self._calm = True

    def _sample(self, step: int, *, saved: bool = False) -> None:
        """Take a sample at a step, counted from 0, of parameters that may have been saved."""
        self._pending = False
        self._mean.sample(step, self._half_life(step), saved=saved)

    def _half_life(self, step: int) -> float:
        """Return the half-life of the mean at a step."""
        fixed = _OF_HORIZON * self._horizon if self._horizon else None
        return max(1.0, fixed or _HALF_LIFE * (step - self._start))

    def _spacing(self) -> int:
        """Return the steps between two samples: a power of two, and `every` in the end."""
        largest = max(1, int(self._half_life(self._step) / _IN_HALF_LIFE))
        return min(self._every, 1 << largest.bit_length() - 1)

    def _forget_mean(self) -> None:
        self._mean = RunningMean(self._parameters, self._optimizer, self._step)
        self._compared = SampleLog(_COMPARISONS, [self._mean.device])
        """The loss of a mini-batch at the parameters and at their mean."""
        self._due = self._step + _BETWEEN
        """Step of the next comparison."""

    @torch.no_grad()
    def _compare(self, loss: float | Tensor, closure: Callable[[], Any]) -> None:
        """Compare the loss at the parameters with that at their mean."""
        self._due = self._step + max(_BETWEEN, self.since_reset // _COMPARISONS)
        with kept_generators(self._parameters.params), self._with_mean(self._model):
            value = check_loss(closure(), "what the closure returns")
        row = self._compared.add(self._mean.last, self._mean.age(self._mean.last))
        for number, out in zip((loss, value), self._compared.parts[0][row], strict=True):
            if isinstance(number, Tensor):
                out.copy_(number.detach().reshape(()), non_blocking=True)
            else:
                out.fill_(number)

    @contextmanager
    def _with_mean(self, model: nn.Module | None) -> Iterator[None]:
        """Give the parameters their averaged values for a block, and buffers their own after it.

        Raises:
            ValueError: If parameters are DTensors, and there is no model.
        """
        if model is None and any(bucket.distributed for bucket in self._parameters.buckets):
            raise ValueError(
                "parameters are DTensors, of which FSDP2 may hold a copy with other values: pass "
                "the model to Forecaster, Cooldown or averaged()"
            )
        outer = self._is_exchanged
        with regathered(model), kept_buffers(model), self._mean.exchange():
            self._is_exchanged |= self._mean.taken > 0
            try:
                yield
            finally:
                self._is_exchanged = outer

    # Forecasts --------------------------------------------------------------------------------

    def constant_since(self) -> int:
        """Return the step since which the learning rates are those of the present, or nearly so.

        It waits for rates that are tensors on a device.
        """
        return max(self._start, constant_since(self._changes()))

    def outcomes(self, horizon: int, *, shared: bool = False) -> Outcomes | str:
        """Return what is known of the next steps, or why nothing is; see `forecast`.

        Args:
            horizon: Number of steps.
            shared: Whether all processes call it and must find the same. They must call it anyway
                if parameters are sharded.
        """
        self.follow_parameters()
        shared |= self._parameters.layout.processes > 1
        agree = not shared or self._agree()
        ago, losses, counts = self._losses.blocks(shared=shared)
        totals = self._mean.totals()
        if shared:
            share_mean(self._compared.parts[0])
            totals = mean_over_processes(totals)
        if not (agree and self._mean.was_finite(totals)):
            self._forget_mean()
            why = "parameters or gradients were not finite"
            why = why if agree else "the processes have not sampled the same steps"
            return f"{why}, so the averages begin again"
        if not self.is_attached and not self._mean.taken:
            return "nothing is measured any more"
        since = self.constant_since()
        needed = min(_FIRST_SAMPLES * self._every, _FIRST_STEPS)
        if (seen := self._step - since) < needed:
            return f"it needs {needed} steps at this learning rate, and has seen {seen}"
        advice = "call forecaster.update(loss) after every optimizer step"
        if not counts.any():
            return f"no finite loss was handed over: {advice}"
        if are_mismatched(calls := self._losses.calls, steps := self._step - self._first_loss):
            return f"losses were handed over {calls:,} times in {steps:,} optimizer steps: {advice}"
        samples = self._mean.samples(totals, since)
        own, averaged = self._compared.parts[0].cpu().numpy().T
        if since > self._start and len(samples.steps) < FEWEST:
            return "the mean of the parameters still holds those of another learning rate"
        inside = ago < seen
        history = History(
            self._step,
            self._step - ago[inside],
            losses[inside],
            counts[inside],
            samples,
            self._compared.samples(own - averaged, since),
        )
        return outcomes(history, horizon)

    def _length(self, horizon: float | None) -> int:
        """Return a number of steps, given as such or as a share of the steps so far."""
        if horizon is None:
            return self.horizon
        if lies_between(horizon, 0, 1):
            return max(1, round(horizon * self.since_reset))
        return check_steps("horizon, if it is not a share below 1,", horizon)

    def _agree(self) -> bool:
        """Return whether all processes, each of which must call it, have sampled the same steps.

        Raises:
            RuntimeError: On all of them, if what was handed over does not fit together.
        """
        samples = self._step, self.constant_since(), self._mean.taken, self._mean.last
        handed = self._losses.calls, self._compared.taken
        same_calls, same_closures, *others = are_alike([*handed, *samples])
        agree = all(others)
        if not same_calls or (agree and not same_closures):
            raise RuntimeError(
                "losses or closures were not handed over at the same calls on all processes: call "
                "step() or update() on each of them after every optimizer step, without a loss "
                "where there is none, and pass a closure on all of them or on none"
            )
        return agree

    def _check_model(self, model: Any) -> None:
        if not isinstance(model, nn.Module | None):
            raise TypeError(
                f"model must be the torch.nn.Module whose buffers to restore, got {model!r}"
            )
        own = {id(p) for p in self._parameters.params}
        with regathered(model):
            unknown = model is not None and not any(id(p) in own for p in model.parameters())
        if unknown:
            raise ValueError(
                "model has none of the optimizer's parameters, so its values would not be "
                "averaged: pass the model that is trained"
            )
