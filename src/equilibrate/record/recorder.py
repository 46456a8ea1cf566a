"""Record a training run: readings, losses, learning rates and each decision with its reason."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from equilibrate._arguments import check_steps
from equilibrate.forecast.losses import check_loss
from equilibrate.record import jsonl
from equilibrate.record.observe import KEYS, Sources, observe

NAME = "train.jsonl"
"""Name of the record in the folder of a run."""
_SETTINGS = ("rule", "threshold", "factor", "total_steps", "warmup_steps", "min_lr", "every")
_SYNC_SECONDS = 10.0


class Recorder:
    """Writes a record of your own training run, for `equilibrate report` and `equilibrate watch`.

    Call `record` after `scheduler.step()`, at the end of each epoch or, with `every`, at each step.
    Once it returns, killing the process does not lose the row. A row has what the sources offer:

    | key | value |
    | --- | --- |
    | `step`, `time` | optimizer steps so far; seconds since 1970 |
    | `loss` | the mean of the losses that were given since the last row |
    | `lrs` | the learning rate of each group from now on |
    | `forecast` | what a cooldown from now on would end at; not while the rate decays |
    | `decisions` | those since the last row: `step`, `lowered`, `reason` and `lrs` of each |
    | `left`, `right`, `residual` | both sides of FDR1, and left/right − 1 |
    | `stderr`, `margin` | its standard error, and half its 95 % interval |
    | `count` | steps in the window |
    | `layers` | on request: sides, residual, errors and state of each parameter, with six digits, |
    | | and of scale-invariant ones the angular step, now and in equilibrium, and the relaxation |
    | others | what else you pass |

    A forecast has the `horizon` of the cooldown, in steps, and either the reason why it is
    `undefined`, or the training loss `now`, `after` the cooldown and after `staying` for as many
    steps; its `gain` (now less after), and what it gains `over_staying` (staying less after).
    `after_margin`, `gain_margin` and `over_staying_margin` are half the 95 % intervals.

    Numbers that are undefined are null.

    A record never stops a training: a value that cannot be recorded is left out with a warning, and
    so is a row that cannot be written, as on a full disk.

    With several processes create it on all of them and call `record` on all of them, since readings
    of sharded parameters are collective. Only rank 0 writes.

    Args:
        path: A folder, in which `train.jsonl` is written, or a file that ends in `.jsonl`.
        sources: A scheduler, a monitor or a forecaster, or several on the same optimizer.
        config: Settings to store in the header, such as `vars(arguments)`.
        mode: `"new"` raises an error if the record exists, `"overwrite"` replaces it, and
            `"resume"` continues it, or creates it if it is missing. Rows after the step at which
            the training resumes are removed: it makes these steps again.
        every: Write a row when the number of optimizer steps has passed a multiple of this. Other
            calls of `record` do not wait for the device and write nothing.
        layers: Whether to record the state of each parameter. The monitor must know their names.

    Raises:
        TypeError: If `path` is not a path, or a source is none of ours.
        ValueError: If `every` is below 1.

    Example:
        >>> import tempfile
        >>> import equilibrate as eq
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> scheduler = eq.FDRScheduler(optimizer)
        >>> with eq.Recorder(tempfile.mkdtemp(), scheduler) as recorder:
        ...     for epoch in range(3):
        ...         theta.grad = torch.randn(2)
        ...         optimizer.step()
        ...         scheduler.step()
        ...         recorder.record(epoch=epoch, loss=0.1)
        >>> [row["step"] for row in jsonl.read(recorder.path).rows]
        [1, 2, 3]
    """

    def __init__(
        self,
        path: Path | str,
        *sources: Any,
        config: Mapping[str, Any] | None = None,
        mode: Literal["new", "resume", "overwrite"] = "new",
        every: int = 1,
        layers: bool = False,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"path must be a folder or a file that ends in .jsonl, got {type(path).__name__}: "
                "pass Recorder(path, scheduler)"
            )
        self.path = record_path(path)
        """The record."""
        self.every = check_steps("every", every)
        self._sources = Sources.of(*sources)
        self._layers = layers
        if layers:
            observe(self._sources, layers=True)  # it raises now, not after the first epoch
        self._last_decision = (self._sources.decisions or [None])[-1]
        self._loss: float | Tensor = 0.0
        self._losses = 0
        step = self._sources.step
        # A checkpoint may be loaded after this: only `record` sees where the training resumes.
        self._called_at = None if mode == "resume" and step == 0 else step
        self._writer = None
        if _is_first_process():
            settings = _storable({**(config or {}), "recorder": self._settings()}, other=str)
            self._writer = _open(self.path, settings, mode)
            if step and mode == "resume":
                self._drop_rows_after(step)
        self._synced = time.monotonic()
        self._closed = False

    def record(self, *, loss: float | Tensor | None = None, **extra: Any) -> None:
        """Write a row, if the number of steps has passed a multiple of `every`.

        Writing a row waits for the device. If parameters are sharded, every process must call it.

        Args:
            loss: The loss, a number or a tensor. The row has the mean of all losses that were given
                since the last row on this process. Tensors are added up on their device.
            extra: Further numbers, strings, lists or dicts to store, such as `epoch=3`. Tensors are
                converted to numbers and lists.

        Raises:
            ValueError: If a name in `extra` is one of the record's own, or the recorder is closed.
        """
        if self._closed:
            raise ValueError(f"{self} is closed: create another with mode='resume' to continue")
        if taken := KEYS & extra.keys():
            raise ValueError(f"{', '.join(sorted(taken))} is written by the recorder: rename it")
        if loss is not None:
            with _warning_instead("the loss is not recorded", of=(Exception,)):
                self._add(loss)
        step, last = self._sources.step, self._called_at
        if last is None or step < last:  # the training has resumed, or gone back to a checkpoint
            last = step - 1
            with _warning_instead("rows of steps that are made again stay in the record"):
                self._drop_rows_after(last)
        self._called_at = step
        if self.every > 1 and step // self.every <= last // self.every:
            return
        row = observe(self._sources, layers=self._layers)
        row["time"] = round(time.time(), 3)
        if made := self._new_decisions():
            row["decisions"] = made
        if self._losses:
            row["loss"] = float(self._loss) / self._losses
            self._loss, self._losses = 0.0, 0
        if self._writer is not None:
            row |= _storable(extra)
            with _warning_instead(f"the row of step {step} is not recorded"):
                self._writer.write(row)
                if time.monotonic() - self._synced > _SYNC_SECONDS:  # for a failure of the power
                    self._writer.sync()
                    self._synced = time.monotonic()

    def close(self, status: str = "finished") -> None:
        """Write how the run ended, and close the record. Use a `with` block to have it called.

        Args:
            status: How it ended.
        """
        if self._writer is not None and not self._closed:
            with _warning_instead("the end of the run is not recorded"):
                self._writer.end(status)
                self._writer.sync()
            self._writer.close()
        self._closed = True

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, KeyboardInterrupt):
            self.close("interrupted")
        else:
            text = str(error).strip().partition("\n")[0]
            self.close(f"failed: {kind.__name__}: {text}" if text else f"failed: {kind.__name__}")

    def __repr__(self) -> str:
        return f"Recorder({str(self.path)!r}, step={self._sources.step})"

    def _add(self, loss: float | Tensor) -> None:
        """Add a loss to those since the last row, without waiting for a device."""
        loss = check_loss(loss)
        if isinstance(loss, Tensor):
            exact = torch.float32 if loss.device.type == "mps" else torch.float64
            loss = loss.detach().reshape(()).to(exact, copy=True)
        self._loss = loss + self._loss
        self._losses += 1

    def _drop_rows_after(self, step: int) -> None:
        """Remove the rows after a step: the training makes these steps again."""
        if self._writer is None:
            return
        lines = jsonl.read_lines(self.path)
        next(lines)  # the header
        for kept, row in enumerate(lines):
            if row.get("step", 0) > step:
                self._writer.truncate(kept)
                return

    def _new_decisions(self) -> list[dict[str, Any]]:
        made = self._sources.decisions
        if self._last_decision in made:
            made = made[made.index(self._last_decision) + 1 :]
        self._last_decision = made[-1] if made else self._last_decision
        names = ("step", "lowered", "reason", "lrs")
        return [{name: getattr(decision, name) for name in names} for decision in made]

    def _settings(self) -> dict[str, Any]:
        """Return the settings of what is recorded, for the header."""
        optimizer = self._sources.optimizer
        sizes = [p.numel() for group in optimizer.param_groups for p in group["params"]]
        settings: dict[str, Any] = {
            "optimizer": type(optimizer).__name__,
            "parameters": sum(sizes),
        }
        parts = self._sources
        rule = getattr(parts.scheduler, "rule", None)
        for holder in (parts.forecaster, parts.monitor, rule, parts.scheduler):
            settings |= {name: getattr(holder, name) for name in _SETTINGS if hasattr(holder, name)}
        return settings


def record_path(run: Path | str) -> Path:
    """Return the file that a run is recorded in.

    >>> record_path("runs/mine").as_posix(), record_path("mine.jsonl").as_posix()
    ('runs/mine/train.jsonl', 'mine.jsonl')

    Args:
        run: A file that ends in `.jsonl`, or a folder.

    Returns:
        The file itself, or `train.jsonl` in the folder.
    """
    run = Path(run)
    return run if run.suffix == ".jsonl" else run / NAME


def _open(path: Path, config: dict[str, Any], mode: Any) -> jsonl.Writer:
    """Return the writer of a record. One that is resumed keeps its header."""
    lines = jsonl.read_lines(path) if mode == "resume" and path.exists() else iter(())
    if (header := next(lines, None)) is not None:
        written = header["config"]
        own = {"recorder": written.get("recorder")}
        if changed := jsonl.differences(written, {**config, **own}):
            warnings.warn(
                f"{path} was begun with other settings ({changed}): its header keeps them",
                stacklevel=3,
            )
        config = written
    return jsonl.Writer(path, config=config, mode=mode)


def _is_first_process() -> bool:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def _warning_instead(
    lost: str, of: tuple[type[Exception], ...] = (jsonl.RecordError, OSError)
) -> Iterator[None]:
    """Warn of an error, at the line of the user's call: a record must not stop a training."""
    try:
        yield
    except of as error:
        warnings.warn(f"{lost}: {error}", stacklevel=4)


def _storable(values: Mapping[str, Any], other: Any = lambda value: value) -> dict[str, Any]:
    """Return what can be written of values, and warn of the rest."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        try:
            part = {name: _plain(value, other)}
            jsonl.encode(part)
            found |= part
        except Exception as error:  # any object of the user's
            warnings.warn(
                f"{name!r}, a value of type {type(value).__name__}, is not recorded "
                f"({type(error).__name__}: {error}): pass numbers, strings, lists or dicts",
                stacklevel=3,
            )
    return found


def _plain(value: Any, other: Any = lambda value: value) -> Any:
    """Return Python's own numbers, lists and dicts for tensors, arrays and mappings."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part, other) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, other) for part in value]
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return value.tolist()
    return value if isinstance(value, str | int | float | None) else other(value)
