"""What a cooldown of the learning rate would gain now, from gradients and averaged parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from equilibrate._engine.cooldown.exchange import kept_buffers
from equilibrate._engine.cooldown.horizons import Pairs, forecast, given_mean, own_means, pair_up
from equilibrate._engine.cooldown.sampler import Sampler
from equilibrate._engine.optimizer.hooks import unwrap
from equilibrate._engine.optimizer.parameters import all_parameters, check_arguments
from equilibrate.gains import Forecast


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
        >>> import torch
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
        self.every = every = check_arguments(self._optimizer, every)
        self._process_group = process_group
        self._averaged = averaged
        self._half_life = half_life
        self._matches = (
            own_means(horizons, every) if averaged is None else given_mean(horizons, half_life)
        )
        if averaged is None and half_life is not None:
            raise ValueError("half_life is that of averaged: leave it out without one")
        self._given = None if averaged is None else pair_up(averaged, self._optimizer)
        self._sampler = Sampler(self._optimizer, every, self._matches, self._given, process_group)

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
        return self._sampler.step

    @property
    def has_averages(self) -> bool:
        """Whether there are averaged parameters, which begin with the first step."""
        return self._sampler.has_means()

    def forecasts(self) -> tuple[Forecast, ...]:
        """Return a forecast for each horizon.

        It waits for the device, so ask once in a while, not at every step.
        """
        steps, samples = self._sampler.samples()
        now, start = self._sampler.step, self._sampler.constant_since
        return tuple(
            forecast(horizon, match, now, start, self.every, steps, samples[:, [i, -1]])
            for i, (horizon, match) in enumerate(self._matches.items())
        )

    @contextmanager
    def averaged(
        self, horizon: int | None = None, *, model: nn.Module | None = None
    ) -> Iterator[None]:
        """Give the parameters their averaged values for a block, to evaluate or to save a model.

        Averaging removes the noise that a cooldown would remove, at any time of a training and
        without lowering the learning rate. The averages are the means m that the forecasts are made
        with. After a reset, which a scheduler that reads the forecasts makes at each lowering, they
        begin again with the next sample. A step of the optimizer inside the block raises a
        `RuntimeError`.

        The running statistics of BatchNorm do not fit the averaged parameters: pass the model, and
        compute them again inside the block, with `torch.optim.swa_utils.update_bn`.

        Args:
            horizon: Which average to use, one of `horizons`, by default the longest. A longer one
                has less noise and lags further behind the progress of the training, which the
                forecasts do not count: they are about cooldowns.
            model: A model whose buffers, such as the statistics of BatchNorm, get their values back
                after the block.

        Yields:
            None.

        Raises:
            TypeError: If `model` is not a module.
            ValueError: If `horizon` is not one of `horizons`, no step has been sampled yet, or
                `model` has none of the optimizer's parameters.

        Example:
            >>> import torch
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
            what = "a model: pass model=model" if isinstance(horizon, nn.Module) else horizon
            raise ValueError(f"horizon must be one of {self.horizons}, got {what}")
        if not isinstance(model, nn.Module | None):
            raise TypeError(
                f"model must be the torch.nn.Module whose buffers to restore, got {model!r}"
            )
        own = {id(p) for p in all_parameters(self._optimizer)}
        if model is not None and not any(id(p) in own for p in model.parameters()):
            raise ValueError(
                "model has none of the optimizer's parameters, so its values would not be "
                "averaged: pass the model that is trained"
            )
        with self._sampler.averaged(horizon), kept_buffers(model):
            yield

    def reset(self) -> None:
        """Forget everything measured so far, means included. The step counter keeps running."""
        self._sampler.restart()

    def detach(self) -> None:
        """Remove the hooks. What was measured stays available."""
        self._sampler.detach()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Watch one step that hooks cannot see, such as a compiled or captured one.

        Put exactly one step into the block, and everything that computes its gradient, if that is
        captured with it.

        Yields:
            None.

        Example:
            >>> import torch
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> forecaster = Forecaster(torch.optim.SGD([theta], lr=0.5))
            >>> with forecaster.measure():  # a compiled step, a replay
            ...     theta.grad = torch.tensor([1.0, 0.0])
            ...     _ = theta.data.sub_(0.5 * theta.grad)
            >>> forecaster.step
            1
        """
        with self._sampler.measure():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors that `torch.load` reads by default.

        It holds the means, which are as large as the parameters for each horizon and distributed as
        these are. As in the state of an optimizer they are not copied: to return to a state later
        without saving it, keep a `copy.deepcopy` of it. If parameters are sharded, every process
        must call it.
        """
        own = {"every": self.every, "horizons": list(self._matches)}
        return self._sampler.state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ValueError: If it is not the state of a forecaster, or one of another model or with
                other settings.
        """
        if "means" not in state_dict:
            raise ValueError(
                f"state_dict is not the state of a Forecaster: it holds "
                f"{', '.join(state_dict) or 'nothing'}; pass what forecaster.state_dict() returned"
            )
        saved = tuple(state_dict["horizons"]), state_dict["every"]
        if saved != (self.horizons, self.every):
            raise ValueError(
                f"state_dict was saved with horizons {saved[0]} and every={saved[1]}, this "
                f"forecaster has {self.horizons} and every={self.every}: create it with the same"
            )
        self._sampler.load_state_dict(state_dict)

    def __repr__(self) -> str:
        kind = type(self._optimizer).__name__
        return f"Forecaster({kind}, horizons={self.horizons}, every={self.every}, step={self.step})"

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
