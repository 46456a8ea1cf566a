"""Send readings, forecasts, learning rates and decisions to TensorBoard, W&B or trackio.

Each of them is imported only when it is used. A function will do, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from equilibrate._arguments import check_steps
from equilibrate.decisions import Judgement
from equilibrate.integrations.scalars import (
    INTERVAL_PREFIX,
    LAYERS_PREFIX,
    PREFIX,
    named_numbers,
)
from equilibrate.monitor import Monitor
from equilibrate.observation import Observer, is_first_process
from equilibrate.scheduler import FDRScheduler

_INTERVAL = tuple(f"{INTERVAL_PREFIX}/{name}" for name in ("residual", "low", "high"))
_MOST_DECISIONS = 200


@runtime_checkable
class Sink(Protocol):
    """Where a `Logger` sends what it reads. Write your own with this one method."""

    def write(self, step: int, numbers: dict[str, float], judgements: Sequence[Judgement]) -> None:
        """Store numbers and decisions.

        Args:
            step: Optimizer steps so far.
            numbers: The numbers by name; see `Logger`.
            judgements: The decisions since the last call, with their reasons.
        """
        ...


class NumberFunction(Protocol):
    """A function that takes numbers, such as `mlflow.log_metrics`."""

    def __call__(self, numbers: dict[str, float], /, *, step: int) -> Any:
        """Store numbers."""
        ...


class Logger:
    """Sends what a monitor or a scheduler says to a logger, in one line of a loop.

    Call `log` after `scheduler.step()`. The names of the numbers are those of
    `integrations.scalars`. Decisions are sent with their reasons.

    With several processes create it on all of them and call `log` on all of them, since readings of
    sharded parameters are collective. Only rank 0 writes, and only rank 0 needs a sink that works.

    Args:
        sink: A `TensorBoard`, `WandB` or `Trackio`, an object with a method `write` like theirs, or
            a function that is called as `function(numbers, step=step)`.
        source: The scheduler or the monitor to read.
        layers: Whether to log the reading of each parameter. The monitor must know their names.
        every: Log when the number of optimizer steps has passed a multiple of this. Other calls do
            not wait for the device.
        forecaster: An `eq.Forecaster` whose forecasts to log; by default the scheduler's.

    Raises:
        TypeError: If `sink` is neither a sink nor a function.
        ValueError: If `every` is below 1.

    Example:
        >>> import torch
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> monitor = Monitor(optimizer)
        >>> logger = Logger(lambda numbers, step: print(step, numbers), monitor)
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> logger.log()  # doctest: +ELLIPSIS
        1 {'equilibrate/left': 1.0, 'equilibrate/right': 0.25, 'equilibrate/residual': 3.0, ...}
    """

    def __init__(
        self,
        sink: Sink | NumberFunction,
        source: FDRScheduler | Monitor,
        *,
        layers: bool = False,
        every: int = 1,
        forecaster: Any | None = None,
    ) -> None:
        if not isinstance(sink, Sink):
            if not callable(sink):
                raise TypeError(
                    f"sink must have a method write or be a function, got {type(sink).__name__}: "
                    "pass TensorBoard(…), WandB(…), Trackio(…) or a function"
                )
            sink = _Function(sink)
        self._sink = sink
        self._observer = Observer(source, layers=layers, forecaster=forecaster)
        self._observer.check()
        self.every = check_steps("every", every)
        self._called_at = self._observer.monitor.step

    def log(self) -> None:
        """Send what there is to say now, if the number of steps has passed a multiple of `every`.

        It waits for the device. If parameters are sharded, every process must call it.
        """
        step = self._observer.monitor.step
        passed = step // self.every > self._called_at // self.every
        self._called_at = step
        if self.every > 1 and not passed:
            return
        seen = self._observer.observe()
        if is_first_process():
            self._sink.write(step, named_numbers(seen, seen.lowered), seen.judgements)


class TensorBoard:
    """Writes scalars, decisions as text, and a chart of the residual with its 95 % interval.

    The chart is on the tab "Custom scalars"; its three curves are `equilibrate_interval/…`. Texts
    are on the tab "Text": all decisions under `equilibrate/decision`, and those that lowered the
    learning rate under `equilibrate/lowered`.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or a folder to write to.
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, str | Path):
            kind = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            writer = kind(str(writer))
        self.writer = writer
        self._has_chart = False

    def write(self, step: int, numbers: dict[str, float], judgements: Sequence[Judgement]) -> None:
        """Write scalars and texts.

        Args:
            step: Optimizer steps so far.
            numbers: The numbers by name.
            judgements: The decisions since the last call.
        """
        numbers = dict(numbers)
        ends = [numbers.pop(f"{PREFIX}/residual_{end}", None) for end in ("low", "high")]
        if None not in ends:
            # The chart needs curves with the same steps; the first residuals have no interval.
            values = [numbers[f"{PREFIX}/residual"], *ends]
            numbers |= dict(zip(_INTERVAL, values, strict=True))
            if not self._has_chart:
                chart = {"residual and its interval": ["Margin", list(_INTERVAL)]}
                self.writer.add_custom_scalars({PREFIX: chart})
                self._has_chart = True
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        for judgement in judgements:
            self.writer.add_text(f"{PREFIX}/decision", judgement.reason, judgement.step)
            if judgement.lowered:
                text = f"lowered to {_rates(judgement)}: {judgement.reason}"
                self.writer.add_text(f"{PREFIX}/lowered", text, judgement.step)
        self.writer.flush()


class _Tracked:
    """A run of W&B, or of trackio, which has the same interface."""

    def __init__(self, run: Any, table: type) -> None:
        self.run = run
        self._table = table
        self._decisions: list[list[Any]] = []

    def decisions(self, judgements: Sequence[Judgement]) -> dict[str, Any]:
        """Return a table of all lowerings so far, if there is a new one."""
        new = [judgement for judgement in judgements if judgement.lowered]
        self._decisions += [[j.step, _rates(j), j.reason] for j in new]
        self._decisions = self._decisions[-_MOST_DECISIONS:]
        if not new:
            return {}
        columns = ["step", "learning rate", "reason"]
        return {f"{PREFIX}/lowerings": self._table(columns=columns, data=self._decisions)}


class WandB(_Tracked):
    """Logs to a run of Weights & Biases, with `equilibrate/step` as the horizontal axis.

    The reason of the last decision is logged as `equilibrate/reason`, and a table of all lowerings
    as `equilibrate/lowerings`. The step counter of W&B is left to you.

    Args:
        run: The run, as returned by `wandb.init()`.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run, importlib.import_module("wandb").Table)
        axis = f"{PREFIX}/step"
        run.define_metric(axis, hidden=True)
        for prefix in (PREFIX, LAYERS_PREFIX):
            run.define_metric(f"{prefix}/*", step_metric=axis)

    def write(self, step: int, numbers: dict[str, float], judgements: Sequence[Judgement]) -> None:
        """Log numbers, the last reason and the table of lowerings.

        Args:
            step: Optimizer steps so far.
            numbers: The numbers by name.
            judgements: The decisions since the last call.
        """
        told: dict[str, Any] = {f"{PREFIX}/reason": j.reason for j in judgements[-1:]}
        self.run.log({f"{PREFIX}/step": step, **numbers, **told, **self.decisions(judgements)})


class Trackio(_Tracked):
    """Logs to a run of trackio, and all lowerings as the table `equilibrate/lowerings`.

    Args:
        run: The run, as returned by `trackio.init()`.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run, importlib.import_module("trackio").Table)

    def write(self, step: int, numbers: dict[str, float], judgements: Sequence[Judgement]) -> None:
        """Log numbers and the table of lowerings.

        Args:
            step: Optimizer steps so far.
            numbers: The numbers by name.
            judgements: The decisions since the last call.
        """
        self.run.log({**numbers, **self.decisions(judgements)}, step=step)


class _Function:
    def __init__(self, function: NumberFunction) -> None:
        self._function = function

    def write(self, step: int, numbers: dict[str, float], judgements: Sequence[Judgement]) -> None:
        self._function(numbers, step=step)


def _rates(judgement: Judgement) -> str:
    return ", ".join(f"{lr:.4g}" for lr in judgement.lrs)
