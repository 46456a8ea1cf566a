"""What a cooldown of the learning rate would gain now, from gradients and averaged parameters."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equilibrate import estimates
from equilibrate._arguments import check_steps
from equilibrate.estimates import Estimate
from equilibrate.forecast.match import exponential_match
from equilibrate.forecast.tracker import Tracker
from equilibrate.forecast.values import Forecast
from equilibrate.watching.edits import exchanged
from equilibrate.watching.rates import Scalar, learning_rate
from equilibrate.watching.sharding import distribute_like, local
from equilibrate.watching.watcher import Watcher

_WINDOW = 8
"""Horizons that are averaged over at most."""
_FEWEST = 8
"""Samples without which there is no error bar."""
_TOLERANCE = 0.2
"""By which share learning rates may differ and still count as the same."""


class Forecaster(Watcher):
    r"""Forecasts what a cooldown would gain, from a training loop, without a forward pass.

    At one in `every` steps, before it is made, it samples

        E = c/2 · (θ_t − m_t)·g_t

    with the parameters θ, the mini-batch gradient g and an exponential mean m of the parameters at
    earlier samples. The mean's half-life and the factor c are chosen such that on a quadratic ⟨E⟩
    is what a linear cooldown of the learning rate to zero over a horizon of steps gains (see
    `forecast.match`). No assumption is made on the optimizer: θ_t does not depend on
    the batch of g_t. Samples are averaged over the later half of the steps since the last reset or
    change of a learning rate by more than 20 %, but over no more than eight horizons, and not over
    the first one.

    A forecaster only adds hooks to the optimizer: training is bit-identical with and without it,
    and no step waits for the device. It keeps one copy of the parameters for each horizon, in
    single precision if theirs is lower. The hooks hold no reference to the forecaster: keep it in a
    variable. If parameters are sharded, `forecasts` and `state_dict` are collective: call them on
    every process.

    The gradient is the one in `p.grad`: clipped if you clip it, averaged over the processes of
    DDP, accumulated over micro-batches, divided by the scale of a `GradScaler`. Weight decay that
    the optimizer adds is not part of it, so the gain is one of the loss that you compute, without
    an L2 term.

    Args:
        optimizer: Any `torch.optim.Optimizer`, or one that accelerate has wrapped.
        horizons: Lengths of the cooldowns to forecast, in steps, each at least 4·`every`.
        every: Take a sample at one in this many steps.

    Raises:
        TypeError: If `optimizer` is not an optimizer.
        ValueError: If a number is out of range.

    Example:
        >>> import torch
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> forecaster = Forecaster(optimizer)
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> print(forecaster.forecast(400))
        no forecast for a cooldown over 400 steps: 1 of 528 steps seen at this learning rate
    """

    def __init__(
        self, optimizer: Optimizer, horizons: Sequence[int] = (150, 400), every: int = 16
    ) -> None:
        every = check_steps("every", every)
        if isinstance(horizons, str) or not isinstance(horizons, Iterable):
            raise ValueError(f"horizons must be a sequence, got {horizons!r}: pass ({horizons},)")
        name = f"each of horizons (4 × every = {4 * every} steps or more)"
        chosen = [check_steps(name, horizon, least=4 * every) for horizon in horizons]
        if not chosen:
            raise ValueError("horizons is empty: pass lengths of cooldowns, such as (150, 400)")
        self._matches = {horizon: exponential_match(horizon, every) for horizon in chosen}
        self._exchanged = False
        """Whether the parameters have their averaged values."""
        self._trackers: list[Tracker] = []
        self._pending = False
        """Whether a sample waits for the gradient of the step that is being made."""
        super().__init__(optimizer, every)

    @property
    def horizons(self) -> tuple[int, ...]:
        """Lengths of the cooldowns that are forecast, in steps."""
        return tuple(self._matches)

    def forecast(self, horizon: int | None = None) -> Forecast:
        """Return what a cooldown over a number of steps would gain.

        Like `forecasts` it waits for the device, and is collective.

        Args:
            horizon: One of `horizons`, by default the longest.
        """
        return dict(zip(self.horizons, self.forecasts(), strict=True))[self._known_one(horizon)]

    def forecasts(self) -> tuple[Forecast, ...]:
        """Return a forecast for each horizon.

        It waits for the device, so ask once in a while, not at every step.
        """
        steps, samples = self._samples()
        return tuple(
            self._forecast(horizon, steps, samples[:, [i, -1]])
            for i, horizon in enumerate(self._matches)
        )

    @contextmanager
    def averaged(
        self, model: nn.Module | None = None, horizon: int | None = None
    ) -> Iterator[None]:
        """Give the parameters their averaged values for a block, to evaluate or to save a model.

        Averaging removes the noise that a cooldown would remove, at any time of a training and
        without lowering the learning rate. The averages are the means m that the forecasts are made
        with. Before the first sample, and in the decay of a `Cooldown`, the parameters keep their
        own values. A step of the optimizer inside the block raises a `RuntimeError`.

        The running statistics of BatchNorm do not fit the averaged parameters: pass the model, and
        compute them again inside the block, with `torch.optim.swa_utils.update_bn`.

        Args:
            model: A model whose buffers, such as the statistics of BatchNorm, get their values back
                after the block.
            horizon: Which average to use, one of `horizons`, by default the longest. A longer one
                has less noise and lags further behind the progress of the training.

        Yields:
            None.

        Example:
            >>> import torch
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([theta], lr=0.5)
            >>> forecaster = Forecaster(optimizer, horizons=[4], every=1)
            >>> for _ in range(3):
            ...     theta.grad = torch.ones(2)
            ...     optimizer.step()
            >>> with forecaster.averaged():
            ...     print(f"{theta[0]:.2f}")
            0.21
            >>> print(f"{theta[0]:.2f}")
            -0.50
        """
        place = list(self._matches).index(self._known_one(horizon))
        self._check_model(model)
        self.follow_parameters()
        with _kept_buffers(model):
            if not self._taken:
                yield
                return
            outer, self._exchanged = self._exchanged, True
            try:
                with exchanged(self._parameters.params, self._means()[place]):
                    yield
            finally:
                self._exchanged = outer

    def reset(self) -> None:
        """Forget everything measured so far, means included. The step counter keeps running."""
        super().reset()
        self._taken = 0
        """Samples taken since the reset, of which the last ones are kept."""
        self._products = [1.0] * len(self._matches)
        """Weight that each mean has not given to any sample yet."""
        self._last_sample = self._step - self._every
        for tracker in self._trackers:
            tracker.free()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors that `torch.load` reads by default.

        It holds the means, which are as large as the parameters for each horizon and distributed as
        these are. As in the state of an optimizer they are not copied: to return to a state later
        without saving it, keep a `copy.deepcopy` of it. If parameters are sharded, every process
        must call it.
        """
        steps, samples = self._samples()
        return {
            **self._counters(),
            "horizons": list(self._matches),
            "taken": self._taken,
            "products": list(self._products),
            "last_sample": self._last_sample,
            # Lists: tensors must have the same shape at any time to be loaded.
            "steps": steps,
            "samples": samples.tolist(),
            "rates": [[step, *map(float, lrs)] for step, lrs in self._rates],
            "means": self._means(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ValueError: If it is not the state of a forecaster, or one of another model or with
                other settings.
        """
        saved = tuple(state_dict.get("horizons", ())), state_dict.get("every")
        if "horizons" in state_dict and saved != (self.horizons, self._every):
            raise ValueError(
                f"state_dict was saved with horizons {saved[0]} and every={saved[1]}, this "
                f"forecaster has {self.horizons} and every={self._every}: create it with the same"
            )
        self._load_counters(state_dict)
        self._taken, self._products = state_dict["taken"], list(state_dict["products"])
        self._last_sample = state_dict["last_sample"]
        self._rates = deque((int(step), list(lrs)) for step, *lrs in state_dict["rates"])
        with torch.no_grad():
            for mean, saved_mean in zip(self._means(), state_dict["means"], strict=True):
                for m, s in zip(mean, saved_mean, strict=True):
                    local(m).copy_(local(s))
        steps, rows = state_dict["steps"], len(self._steps)
        places = [(self._taken - len(steps) + i) % rows for i in range(len(steps))]
        # All of them in one place: only their total is ever used.
        first = self._trackers[0].samples
        processes = self._parameters.layout.processes
        for place, step, sample in zip(places, steps, state_dict["samples"], strict=True):
            self._steps[place] = step
            first[place] = first.new_tensor(sample) / processes

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; hooks are not copied with an optimizer."""
        return {
            "optimizer": self._optimizer,
            "horizons": self.horizons,
            "every": self._every,
            "state_dict": self.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach the copy to its own optimizer."""
        self.__init__(state["optimizer"], state["horizons"], state["every"])
        self.load_state_dict(state["state_dict"])

    # Steps ------------------------------------------------------------------------------------

    def before_step(self, *, deferred: bool) -> None:
        """Prepare for a step; called by the hooks.

        Args:
            deferred: Whether the gradients are only known after the step.

        Raises:
            RuntimeError: If the parameters have their averaged values.
        """
        if self._exchanged:
            raise RuntimeError(
                "the optimizer made a step inside forecaster.averaged(), where the parameters "
                "have other values: leave the block to train"
            )
        super().before_step(deferred=deferred)

    def _lay_out(self) -> None:
        super()._lay_out()
        longest = _WINDOW * max(self._matches)
        rows = -(-longest // self._every) + 2  # one in each block, the first step of a window
        buckets = self._parameters.buckets
        self._trackers = [
            Tracker(bucket, self._optimizer, len(self._matches), rows, 1 / len(buckets))
            for bucket in buckets
        ]
        self._steps = array("q", [0] * rows)
        self._rates: deque[tuple[int, list[Scalar]]] = deque()
        """The learning rates at the steps where they changed."""

    def _settings_changed(self) -> None:
        lrs = [learning_rate(group) for group in self._optimizer.param_groups]
        self._rates.append((self._step, lrs))
        span = self._step - _WINDOW * max(self._matches)
        while len(self._rates) > 1 and self._rates[1][0] <= span:
            self._rates.popleft()

    def _before(self, deferred: bool) -> None:
        self._pending = self._measured
        if self._measured and deferred:
            for tracker in self._trackers:
                tracker.save()
        elif self._measured:
            self._sample(self._step)

    def _finish_step(self) -> None:
        if self._measured and self._pending:
            self._sample(self._step - 1)
        self._calm = True

    def _sample(self, step: int) -> None:
        """Sample all buckets at a step, counted from 0."""
        self._pending = False
        gap, self._last_sample = step - self._last_sample, step
        shares = []
        for i, match in enumerate(self._matches.values()):
            # Unbiased from the first sample on, which has the whole weight.
            decay = 2 ** (-(gap if self._taken else self._every) / match.half_life)
            self._products[i] *= decay
            shares.append((1 - decay) / (1 - self._products[i]))
        row = self._taken % len(self._steps)
        for tracker in self._trackers:
            tracker.measure(row, shares)
        self._steps[row] = step
        self._taken += 1

    # Forecasts --------------------------------------------------------------------------------

    def constant_since(self) -> int:
        """Return the step since which means and learning rates are those of the present.

        Learning rates may have differed by up to 20 % from what they are now. It waits for rates
        that are tensors on a device.
        """
        if not self._rates:
            return self._start
        table = [(step, [float(lr) for lr in lrs]) for step, lrs in self._rates]
        since, now = table[-1]
        for step, lrs in reversed(table):
            if len(lrs) != len(now) or not all(map(_is_close, lrs, now)):
                break
            since = step
        return max(self._start, since)

    def _samples(self) -> tuple[list[int], Tensor]:
        """Return at which steps samples were taken, and their totals, on the host, in order."""
        self.follow_parameters()
        kept = min(self._taken, len(self._steps))
        parts = [tracker.samples[:kept] for tracker in self._trackers]
        total = sum(self._parameters.layout.total(parts), torch.zeros(()))
        first = self._taken % kept if kept else 0
        steps = self._steps[:kept].tolist()
        return steps[first:] + steps[:first], total.roll(-first, 0)

    def _forecast(self, horizon: int, steps: Sequence[int], samples: Tensor) -> Forecast:
        """Return the forecast of one horizon.

        Args:
            horizon: Length of the cooldown.
            steps: At which step each sample was taken.
            samples: (θ − m)·g of each, and whether the step was made.
        """

        def none(reason: str) -> Forecast:
            return Forecast(horizon, Estimate(math.nan, math.nan), self._step, reason)

        every, start = self._every, self.constant_since()
        seen = self._step - start
        if seen < (needed := max(horizon + _FEWEST * every, 2 * _FEWEST * every)):
            return none(f"{seen} of {needed} steps seen at this learning rate")
        first = start + max(horizon, seen // 2, seen - _WINDOW * horizon)
        chosen = samples[[i for i, step in enumerate(steps) if step >= first]]
        values = self._matches[horizon].factor / 2 * chosen[chosen[:, 1] > 0.5, 0]
        if len(values) < _FEWEST - 1:  # of random positions one may lie outside
            return none("gradient scaling has skipped almost every step")
        if not values.isfinite().all():
            return none("gradients were not finite")
        if not values.any():
            return none("no parameter had a gradient other than zero")
        return Forecast(horizon, estimates.mean(values), self._step)

    def _means(self) -> list[list[Tensor]]:
        """Return the means in the order of the parameters, distributed as these are."""
        found: list[dict[int, Tensor]] = [{} for _ in self._matches]
        for tracker in self._trackers:
            for mean, parts in zip(found, tracker.means.tensors(), strict=True):
                pairs = zip(tracker.bucket.params, parts, strict=True)
                mean.update({id(p): distribute_like(p, m) for p, m in pairs})
        return [[mean[id(p)] for p in self._parameters.params] for mean in found]

    def _known_one(self, horizon: int | None) -> int:
        if horizon is not None and horizon not in self._matches:
            raise ValueError(
                f"horizon must be one of {self.horizons}, got {horizon!r}: create "
                f"eq.Forecaster(optimizer, horizons=({horizon},))"
            )
        return max(self._matches) if horizon is None else horizon

    def _check_model(self, model: Any) -> None:
        if not isinstance(model, nn.Module | None):
            raise TypeError(
                f"model must be the torch.nn.Module whose buffers to restore, got {model!r}"
            )
        own = {id(p) for p in self._parameters.params}
        if model is not None and not any(id(p) in own for p in model.parameters()):
            raise ValueError(
                "model has none of the optimizer's parameters, so its values would not be "
                "averaged: pass the model that is trained"
            )


@contextmanager
def _kept_buffers(model: nn.Module | None) -> Iterator[None]:
    """Give the buffers of a model their values back after a block, whatever happens to them in it.

    Args:
        model: The model; None if there is nothing to do.

    Yields:
        None.
    """
    modules = [] if model is None else list(model.modules())
    before = [
        (module._buffers, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, value in before:
            buffers[name] = buffer
            if not torch.equal(buffer, value):  # one that is an expanded view cannot be written to
                buffer.copy_(value)


def _is_close(lr: float, now: float) -> bool:
    return abs(lr - now) <= _TOLERANCE * abs(now)
