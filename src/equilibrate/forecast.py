"""What a cooldown of the learning rate would gain now, from gradients and averaged parameters."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from equilibrate._engine.cooldown.exchange import exchanged
from equilibrate._engine.cooldown.horizons import (
    WINDOW,
    Pairs,
    forecast,
    given_mean,
    own_means,
    pair_up,
)
from equilibrate._engine.cooldown.regime import Rates
from equilibrate._engine.cooldown.tracker import Tracker
from equilibrate._engine.optimizer.closures import watch_closures
from equilibrate._engine.optimizer.hooks import attach, is_idle, unwrap
from equilibrate._engine.optimizer.parameters import (
    Places,
    all_parameters,
    buckets,
    check_arguments,
)
from equilibrate._engine.sharding import Layout, distribute_like, local
from equilibrate.gains import Forecast

_ROWS = 4096
"""Samples that are kept at most."""
_NO_GRAD = torch.no_grad()


class Forecaster:
    r"""Forecasts what a cooldown would gain, from a training loop, without a forward pass.

    At every k-th step, before it is made, it samples

        E = c/2 · (θ_t − m_t)·g_t

    with the parameters θ, the mini-batch gradient g and an exponential mean m of the parameters at
    earlier samples. The mean's half-life and the factor c are chosen such that on a quadratic ⟨E⟩
    is what a linear cooldown of the learning rate to zero over `horizon` steps gains (see
    `solvable.exponential_match`). No assumption is made on the optimizer: θ_t does not depend on
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
        horizons: Lengths of the cooldowns to forecast, in steps, each at least 4·`every`. Default:
            150 and 400 steps, or the one that fits `half_life`.
        every: Take a sample every k-th step.
        averaged: An exponential average of the parameters that you keep anyway and update at every
            step, instead of copies: a `torch.optim.swa_utils.AveragedModel`, or pairs of a
            parameter and its average, such as `zip(model.parameters(), ema.parameters())`.
        half_life: The half-life of `averaged`, in steps: log(2)/(1 − decay) for a decay close to 1.
        process_group: The group over which FSDP1 (`FullyShardedDataParallel`) shards the
            parameters. Everything else needs none.

    Raises:
        TypeError: If `optimizer` is not an optimizer, or `averaged` is not what it should be.
        ValueError: If a number is out of range, `averaged` does not fit the parameters, or
            arguments exclude each other.

    Example:
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> forecaster = Forecaster(optimizer)
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> print(forecaster.forecasts()[0])
        no forecast for a cooldown over 150 steps: 1 of 278 steps seen at this learning rate
    """

    def __init__(
        self,
        optimizer: Optimizer,
        horizons: Sequence[int] | None = None,
        every: int = 16,
        *,
        averaged: AveragedModel | Pairs | None = None,
        half_life: float | None = None,
        process_group: Any | None = None,
    ) -> None:
        self._optimizer = unwrap(optimizer)
        check_arguments(self._optimizer, every)
        self.every = every
        self._process_group = process_group
        self._averaged = averaged
        self._half_life = half_life
        self._matches = (
            own_means(horizons, every) if averaged is None else given_mean(horizons, half_life)
        )
        if averaged is None and half_life is not None:
            raise ValueError("half_life is that of averaged: leave it out without one")
        self._given = None if averaged is None else pair_up(averaged, self._optimizer)
        self._trackers: list[Tracker] = []
        self._step = 0
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
        self._watch = watch_closures(self, self._optimizer, Forecaster._note_closure)
        self._detach = attach(self, self._optimizer, Forecaster._on_before, Forecaster._on_after)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that is watched."""
        return self._optimizer

    @property
    def horizons(self) -> tuple[int, ...]:
        """Lengths of the cooldowns that are forecast, in steps."""
        return tuple(self._matches)

    @property
    def step(self) -> int:
        """Optimizer steps seen, whether sampled or not."""
        return self._step

    def forecasts(self) -> tuple[Forecast, ...]:
        """Return a forecast for each horizon.

        It waits for the device, so ask once in a while, not at every step.
        """
        self._update_layout()
        steps, samples = self._samples()
        start = max(self._start, self._rates.constant_since())
        return tuple(
            forecast(horizon, match, self._step, start, self.every, steps, samples[:, [i, -1]])
            for i, (horizon, match) in enumerate(self._matches.items())
        )

    @contextmanager
    def averaged(self, horizon: int | None = None) -> Iterator[None]:
        """Give the parameters their averaged values for a block, to evaluate or to save a model.

        Averaging removes the noise that a cooldown would remove, at any time of a training and
        without lowering the learning rate. The averages are the means m that the forecasts are made
        with. A step of the optimizer inside of the block raises a `RuntimeError`.

        The running statistics of BatchNorm do not fit the averaged parameters: compute them again,
        with `torch.optim.swa_utils.update_bn`, and restore them after the block if the training
        continues.

        Args:
            horizon: Which average to use, one of `horizons`, by default the longest. A longer one
                has less noise and lags further behind the progress of the training, which the
                forecasts do not count: they are about cooldowns.

        Yields:
            None.

        Raises:
            ValueError: If there is no such horizon, or no step has been sampled.

        Example:
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([theta], lr=0.5)
            >>> forecaster = Forecaster(optimizer, horizons=[4], every=1)
            >>> for _ in range(3):
            ...     theta.grad = torch.ones(2)
            ...     optimizer.step()
            >>> with forecaster.averaged(4):
            ...     print(f"{theta[0]:.2f}")
            0.21
            >>> print(f"{theta[0]:.2f}")
            -0.50
        """
        if horizon is None:
            horizon = max(self._matches)
        if horizon not in self._matches:
            raise ValueError(f"horizon must be one of {self.horizons}, got {horizon}")
        if not self._count and self._given is None:
            raise ValueError("no step has been sampled since the start or the last reset")
        params = all_parameters(self._optimizer)
        if self._given is not None:
            means = [self._given[id(p)] for p in params]
        else:
            means = self._means()[self.horizons.index(horizon)]
        with exchanged(params, means):
            self._exchanged = True
            try:
                yield
            finally:
                self._exchanged = False

    def reset(self) -> None:
        """Forget everything measured so far, means included. The step counter keeps running."""
        self._start = self._step
        self._count = 0

    def detach(self) -> None:
        """Remove the hooks. What was measured stays available."""
        self._watch()
        self._detach()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Watch one step that hooks cannot see, such as a compiled or captured one.

        Put exactly one step into the block, and everything that computes its gradient, if that is
        captured with it.

        Yields:
            None.

        Example:
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> forecaster = Forecaster(torch.optim.SGD([theta], lr=0.5))
            >>> with forecaster.measure():  # a compiled step, a replay
            ...     theta.grad = torch.tensor([1.0, 0.0])
            ...     _ = theta.data.sub_(0.5 * theta.grad)
            >>> forecaster.step
            1
        """
        self._explicit = self._deferred = True
        try:
            self._before()
            yield
            self._after()
        finally:
            self._explicit = self._deferred = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors that `torch.load` reads by default.

        It holds the means, one copy of the parameters for each horizon. They are distributed as the
        parameters are. If parameters are sharded, every process must call it.
        """
        self._update_layout()
        steps, samples = self._samples()
        return {
            "step": self._step,
            "start": self._start,
            "count": self._count,
            "every": self.every,
            "horizons": list(self._matches),
            # Lists: tensors must have the same shape at any time to be loaded.
            "steps": steps,
            "samples": samples.tolist(),
            "rates": self._rates.state_dict(),
            "means": self._means(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ValueError: If it is not the state of a forecaster, or one of another model or with
                other settings.
        """
        if "means" not in state_dict:
            raise ValueError(
                f"state_dict is not the state of a Forecaster: it holds {', '.join(state_dict)}; "
                "pass what forecaster.state_dict() returned"
            )
        saved = tuple(state_dict["horizons"]), state_dict["every"]
        if saved != (self.horizons, self.every):
            raise ValueError(
                f"state_dict was saved with horizons {saved[0]} and every={saved[1]}, this "
                f"forecaster has {self.horizons} and every={self.every}: create it with the same"
            )
        self._lay_out()
        present = self._means()
        shapes = [[list(m.shape) for m in mean] for mean in present]
        if shapes != [[list(m.shape) for m in mean] for mean in state_dict["means"]]:
            raise ValueError(
                "state_dict belongs to another model: its means have other shapes than the "
                "parameters; load it with the model and parameter groups it was saved with"
            )
        with _NO_GRAD:
            for mean, saved_mean in zip(present, state_dict["means"], strict=True):
                for m, s in zip(mean, saved_mean, strict=True):
                    local(m).copy_(local(s))
        self._step, self._start = state_dict["step"], state_dict["start"]
        self._count = state_dict["count"]
        self._rates.load_state_dict(state_dict["rates"])
        taken = state_dict["steps"]
        self._taken = len(taken)
        self._steps[: len(taken)] = array("q", taken)
        # All of them in one place: only their total is ever used.
        first = self._trackers[0].samples
        samples = torch.tensor(state_dict["samples"], dtype=first.dtype).view(len(taken), -1)
        first[: len(taken)] = samples.to(first.device) / self._layout.processes

    def __repr__(self) -> str:
        kind = type(self._optimizer).__name__
        return (
            f"Forecaster({kind}, horizons={self.horizons}, every={self.every}, step={self._step})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; hooks are not copied with an optimizer.

        Raises:
            TypeError: If the forecaster has a process group or averages of somebody else, neither
                of which can be copied.
        """
        if self._process_group is not None or self._given is not None:
            raise TypeError(
                "a forecaster with a process_group or averaged parameters cannot be copied or "
                "pickled: create a new one and load forecaster.state_dict() into it"
            )
        return {
            "optimizer": self._optimizer,
            "horizons": self.horizons,
            "every": self.every,
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
                "the optimizer made a step inside of forecaster.averaged(), where the parameters "
                "have other values: leave the block to train"
            )
        lr = self._optimizer.param_groups[0].get("lr")
        # A tensor on a device must not be compared here.
        self._idle = (type(lr) is not float or lr == 0) and is_idle(self._optimizer)
        self._measured = not self._idle and (self._step - self._start) % self.every == 0
        if not self._measured:
            return
        with _NO_GRAD:
            self._update_layout()
            self._rates.note(self._optimizer, self._step)
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
        self._step += 1

    def _sample(self) -> None:
        self._count += 1
        row = self._taken % len(self._steps)
        for tracker in self._trackers:
            tracker.measure(row, self._count)
        self._steps[row] = self._step
        self._taken += 1

    # Layout -----------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Create a tracker for each group, device and dtype; the means restart."""
        found = buckets(self._optimizer)
        self._layout = Layout(all_parameters(self._optimizer), self._process_group)
        longest = WINDOW * max(self._matches)
        rows = min(_ROWS, -(-longest // self.every))
        decays = [2 ** (-self.every / match.half_life) for match in self._matches.values()]
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
        self._start = self._step
        """Step at which the means were started."""
        self._count = 0
        """How often they have been moved since."""
        self._places = Places(self._optimizer, found)
        self._on_gpu = any(tracker.device.type == "cuda" for tracker in self._trackers)

    def _update_layout(self) -> None:
        if not self._places.are_kept():
            self._lay_out()

    # Readings ---------------------------------------------------------------------------------

    def _samples(self) -> tuple[list[int], Tensor]:
        """Return at which steps samples were taken, and their totals, on the host, in order."""
        kept = min(self._taken, len(self._steps))
        total: Tensor | None = None
        for part in self._layout.total([tracker.samples[:kept] for tracker in self._trackers]):
            total = part if total is None else total + part
        assert total is not None
        first = self._taken % kept if kept else 0
        steps = self._steps[:kept].tolist()
        return steps[first:] + steps[:first], total.roll(-first, 0)

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
