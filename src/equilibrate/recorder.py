"""Record a training run: readings, losses, learning rates and each decision with its reason."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from equilibrate._arguments import check_steps
from equilibrate._engine.cooldown.loss_record import check_loss
from equilibrate.layers import Layer
from equilibrate.monitor import Monitor
from equilibrate.observation import Observation, Observer, is_first_process
from equilibrate.readings import Reading
from equilibrate.runlog import records
from equilibrate.runlog.lock import lock_record
from equilibrate.runlog.runs import dropped_path, record_path
from equilibrate.scheduler import FDRScheduler

_OWN = {
    *("step", "time", "loss", "left", "right", "residual", "stderr", "margin", "count"),
    *("lr", "lrs", "lowered", "reason", "judgements", "forecasts", "layers"),
}
"""Names in a row that the recorder writes itself."""
_SIDES = ("left", "right", "residual")
_SYNC_SECONDS = 10.0


class Recorder:
    """Writes a record of your own training run, for `equilibrate report` and `equilibrate watch`.

    Call `record` after `scheduler.step()`, at the end of each epoch or, with `every`, at each step.
    Once it returns, killing the process does not lose the row.

    | key | value |
    | --- | --- |
    | `step`, `time` | optimizer steps so far; seconds since 1970 |
    | `loss` | the mean of the losses that were given since the last row |
    | `left`, `right`, `residual` | both sides of FDR1, and left/right − 1 |
    | `stderr`, `margin` | its standard error, and half its 95 % interval, if known |
    | `count`, `lr` | steps in the window; the learning rate in use |
    | `lrs` | the learning rate of each group from now on |
    | `lowered`, `reason` | schedulers: the decision |
    | `judgements` | all decisions since the last row, if there were several |
    | `forecasts` | the gain of a cooldown for each horizon, if there is a forecaster |
    | `layers` | on request: sides, residual, errors and state of each parameter, with six digits, |
    | | and of scale-invariant ones the angular step, now and in equilibrium, and the relaxation |
    | others | what else you pass |

    Numbers that are undefined are null.

    With several processes create it on all of them and call `record` on all of them, since readings
    of sharded parameters are collective. Only rank 0 writes.

    Args:
        path: A folder, in which `train.jsonl` is written, or a file that ends in `.jsonl`.
        source: The scheduler or the monitor to read.
        config: Settings to store in the header, such as `vars(arguments)`.
        mode: `"new"` raises an error if the record exists, `"overwrite"` replaces it, and
            `"resume"` continues it, or creates it if it is missing. Resuming removes the rows after
            the step at which the training resumes, and keeps them in `train.dropped.jsonl`.
        every: Write a row when the number of optimizer steps has passed a multiple of this. Other
            calls of `record` do not wait for the device and write nothing.
        layers: Whether to record the state of each parameter. The monitor must know their names.
        forecaster: An `eq.Forecaster` whose forecasts to record; by default the scheduler's.

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If `every` is below 1.

    Example:
        >>> import tempfile
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> scheduler = FDRScheduler(optimizer)
        >>> with Recorder(tempfile.mkdtemp(), scheduler) as recorder:
        ...     for epoch in range(3):
        ...         theta.grad = torch.randn(2)
        ...         optimizer.step()
        ...         scheduler.step()
        ...         recorder.record(epoch=epoch, loss=0.1)
        >>> [row["step"] for row in records.read(recorder.path).rows]
        [1, 2, 3]
    """

    def __init__(
        self,
        path: Path | str,
        source: FDRScheduler | Monitor,
        *,
        config: Mapping[str, Any] | None = None,
        mode: Literal["new", "resume", "overwrite"] = "new",
        every: int = 1,
        layers: bool = False,
        forecaster: Any | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"path must be a folder or a file that ends in .jsonl, got {type(path).__name__}: "
                "pass Recorder(path, scheduler)"
            )
        self.path = record_path(path)
        """The record."""
        self.every = check_steps("every", every)
        self._observer = Observer(source, layers=layers, forecaster=forecaster)
        self._observer.check()
        self._losses = _Mean()
        self._closed = False
        self._called_at = self._observer.monitor.step
        # A checkpoint may be loaded after this. Then only `record` sees where the training resumes.
        self._resumes = mode == "resume" and self._called_at == 0
        header = _header(self._observer, config)
        self._log = _Log(self.path, header, mode) if is_first_process() else None
        if self._log is not None and not self._resumes:
            try:
                self._log.drop_rows_after(self._called_at)
            except BaseException:
                self._log.abandon()
                raise

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
        if taken := _OWN & extra.keys():
            raise ValueError(f"{', '.join(sorted(taken))} is written by the recorder: rename it")
        if loss is not None:
            self._losses.add(loss)
        step = self._observer.monitor.step
        if self._resumes:
            self._resume_before(step)
        passed = step // self.every > self._called_at // self.every
        self._called_at = step
        if self.every > 1 and not passed:
            return
        row = _row(self._observer.observe(), self._losses.take())
        if self._log is not None:
            self._log.write(row | {name: _plain(value) for name, value in extra.items()})

    def close(self, status: str = "finished") -> None:
        """Write how the run ended, and close the record. Use a `with` block to have it called.

        Args:
            status: How it ended.
        """
        if self._log is not None and not self._closed:
            self._log.close(status)
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
        return f"Recorder({str(self.path)!r}, step={self._called_at})"

    def _resume_before(self, step: int) -> None:
        self._resumes, self._called_at = False, step - 1
        if self._log is not None:
            self._log.drop_rows_after(step - 1)


class _Log:
    """The file of a record, on the process that writes it."""

    def __init__(
        self, path: Path, config: dict[str, Any], mode: Literal["new", "resume", "overwrite"]
    ) -> None:
        self._lock = lock_record(path)
        try:
            if mode == "resume" and path.exists():
                mode, config = _as_written(path, config)
            self._config = config
            self._writer = records.Writer(path, config=config, mode=mode)
        except BaseException:
            self._lock.release()
            raise
        self._synced = time.monotonic()

    def write(self, row: records.Row) -> None:
        self._writer.write(row)
        if time.monotonic() - self._synced > _SYNC_SECONDS:  # for a failure of the power
            self._writer.sync()
            self._synced = time.monotonic()

    def drop_rows_after(self, step: int) -> None:
        """Move the rows after a step to another file: the training makes these steps again."""
        path = self._writer.path
        rows = records.read(path).rows
        kept = next((i for i, row in enumerate(rows) if row.get("step", 0) > step), len(rows))
        if kept == len(rows):
            return
        lines = path.read_bytes().splitlines(keepends=True)[1:]  # without the header
        _append(dropped_path(path), b"".join(lines[kept : len(rows)]))
        self._writer.close()
        self._writer = records.Writer(path, config=self._config, mode="resume", keep=kept)

    def close(self, status: str) -> None:
        self._writer.end(status)
        self._writer.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the file without a word on how the run ended."""
        self._writer.close()
        self._lock.release()


def _append(path: Path, data: bytes) -> None:
    """Append to a file, or leave it as it was.

    Raises:
        RecordError: If it cannot be written.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "ab", buffering=0) as file:
            while data:  # a disk that is almost full accepts a part and fails at the next call
                data = data[file.write(data) :]
            os.fsync(file.fileno())
    except OSError as error:
        if path.exists():
            os.truncate(path, size)
        raise records.RecordError(
            f"cannot write to {path} ({error.strerror}), which keeps the rows that resuming "
            "removes: free some space and resume"
        ) from error


class _Mean:
    """The mean of losses that are added one by one, without waiting for a device."""

    def __init__(self) -> None:
        self._sum: float | Tensor = 0.0
        self._count = 0

    def add(self, loss: float | Tensor) -> None:
        """Add a loss."""
        loss = check_loss(loss)
        if isinstance(loss, Tensor):
            exact = torch.float32 if loss.device.type == "mps" else torch.float64
            loss = loss.detach().reshape(()).to(exact, copy=True)
        self._sum = loss + self._sum
        self._count += 1

    def take(self) -> float | None:
        """Return the mean and start again; None if there was no loss."""
        mean = float(self._sum) / self._count if self._count else None
        self._sum, self._count = 0.0, 0
        return mean


def _header(observer: Observer, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings for the header, those of the user first."""
    groups = observer.monitor.optimizer.param_groups
    own: dict[str, Any] = {
        "optimizer": type(observer.monitor.optimizer).__name__,
        "groups": len(groups),
        "parameters": sum(p.numel() for group in groups for p in group["params"]),
        "every": observer.monitor.every,
    }
    if (scheduler := observer.scheduler) is not None:
        rule = scheduler.rule
        fields = vars(rule) if hasattr(rule, "__dict__") else {}
        if dataclasses.is_dataclass(rule):
            fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
        own |= {"rule": {"name": type(rule).__name__, **fields}, "factor": scheduler.factor}
    return _plain({**(config or {}), "recorder": own}, other=str)


def _as_written(path: Path, config: dict[str, Any]) -> tuple[Literal["resume", "new"], Any]:
    """Return the mode to open an existing record with, and the settings in its header."""
    with open(path, "rb") as file:
        complete = file.readline().endswith(b"\n")
    if not complete:  # killed while the header was written: there is no row yet
        path.unlink()
        return "new", config
    written = records.read_header(path).config
    changed = [
        f"{name}: {written.get(name)!r} in the record, {config.get(name)!r} now"
        for name in {**written, **config}
        if name != "recorder" and written.get(name) != config.get(name)
    ]
    if changed:
        warnings.warn(
            f"{path} was begun with other settings ({', '.join(changed)}): its header keeps them",
            stacklevel=4,
        )
    return "resume", written


def _row(seen: Observation, loss: float | None) -> records.Row:
    row: records.Row = {"step": seen.step, "time": round(time.time(), 3)}
    if loss is not None:
        row["loss"] = loss
    row |= _sides(seen.reading)
    row |= {"count": seen.reading.count, "lr": seen.reading.lr, "lrs": list(seen.lrs)}
    if seen.decision is not None:
        lowered = [judgement for judgement in seen.judgements if judgement.lowered]
        told = (lowered or seen.judgements or [seen.decision])[-1]
        row |= {"lowered": bool(lowered), "reason": told.reason}
    if len(seen.judgements) > 1:
        row["judgements"] = [dataclasses.asdict(judgement) for judgement in seen.judgements]
    if seen.forecasts:
        row["forecasts"] = [_forecast(forecast) for forecast in seen.forecasts]
    if any(layer.reading.count for layer in seen.layers.values()):
        row["layers"] = {name: _layer(layer) for name, layer in seen.layers.items()}
    return row


def _sides(reading: Reading) -> dict[str, float]:
    sides = {name: getattr(reading, name) for name in _SIDES}
    errors = {"stderr": reading.stderr, "margin": reading.margin}
    return sides | {name: value for name, value in errors.items() if math.isfinite(value)}


def _layer(layer: Layer) -> dict[str, Any]:
    """Return the row of a layer, short because there may be hundreds of them in each row.

    Numbers have six digits. Those that are not known are left out, except for the sides, and so are
    rotations of weights that are not scale-invariant.
    """
    row = layer.row()
    if not layer.rotation.scale_invariant:
        row = {name: value for name, value in row.items() if name not in Layer.OF_ROTATION}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
        if name in _SIDES or value == value  # nan is not known
    }


def _forecast(forecast: Any) -> dict[str, Any]:
    gain = forecast.gain
    found = {"horizon": forecast.horizon, "gain": gain.value}
    found |= {"stderr": gain.stderr, "margin": gain.margin}
    return found if forecast.undefined is None else {**found, "undefined": forecast.undefined}


def _plain(value: Any, other: Callable[[Any], Any] = lambda value: value) -> Any:
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
