"""One run of the protocol: an ensemble trained, measured, recorded, and taken up after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibrate.runlog import checkpoints
from equilibrate.runlog import provenance
from equilibrate.runlog import records
from equilibrate.averages import HalfRunningMean
from equilibrate.ensemble import Averages, Ensemble, Epoch
from equilibrate.paper.protocol import models
from equilibrate.paper.runs import timings
from equilibrate.paper.data.datasets import Dataset
from equilibrate.paper.protocol.run import Adaptive, Run, Stairs

# Rows inside an epoch are wanted only while epochs are too coarse for a logarithmic time axis.
_ROWS_PER_DECADE = 20
_RESOLVED_EPOCHS = 10


class RunError(records.RecordError):
    """A run that cannot go on, what is safe, and what to do."""


class Diverged(RunError):
    """A loss that is no longer a number."""


def execute(
    run: Run,
    folder: Path | str,
    data: Dataset,
    *,
    profile: str,
    device: torch.device | str = "cpu",
    overwrite: bool = False,
    checkpoint_seconds: float = 10.0,
    progress: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Do what `run` still lacks, into folder/records/NAME.jsonl, and call `progress` each epoch.

    A run that was stopped at any moment goes on from its last checkpoint. What it had recorded
    since is made again, so that on the CPU the file ends the same, bit for bit, as if it had
    never been stopped.
    """
    record, checkpoint = record_path(folder, run.name), checkpoint_path(folder, run.name)
    begun = record.exists() and record.stat().st_size > 0 and not overwrite
    state = checkpoints.load(checkpoint) if begun else None
    config = run.to_config() | {
        "profile": profile,
        "fingerprint": data.fingerprint,
        "device": torch.device(device).type,
        "steps_per_epoch": len(data.train_images) // run.task.batch_size,
    }
    keep = _rows_to_keep(run, record, state) if begun else 0
    if not begun:  # what an earlier record left would be taken for this one's after a kill
        checkpoints.remove(checkpoint)
    mode = "overwrite" if overwrite else "resume"
    with records.Writer(record, config=config, mode=mode, keep=keep) as writer:
        if keep is None:
            progress(run.epochs)
            return
        trainer = _Trainer(run, _start(run, folder), data, device)
        before = 0.0
        if state is not None:
            trainer.load_state_dict(state["trainer"])
            before = state["seconds"]
        progress(trainer.epoch)
        since = saved = time.monotonic()
        while trainer.epoch < run.epochs:
            for row in trainer.run_epoch():
                writer.write(row)
            now = time.monotonic()
            seconds = before + now - since
            if trainer.epoch == run.epochs:
                timings.note(folder, _timing(run, trainer.ensemble, seconds))
            if trainer.epoch == run.epochs or now - saved >= checkpoint_seconds:
                writer.sync()
                _save(checkpoint, trainer, writer.count, seconds)
                saved = now
            progress(trainer.epoch)


def _timing(run: Run, ensemble: Ensemble, seconds: float) -> timings.Timing:
    on_gpu = ensemble.device.type == "cuda"
    return timings.Timing(
        run=run.name,
        replicas=ensemble.replicas,
        epochs=run.epochs,
        steps_per_epoch=ensemble.steps_per_epoch,
        seconds=round(seconds, 3),
        device=torch.cuda.get_device_name(ensemble.device) if on_gpu else "CPU",
        torch=torch.__version__,
        precision=run.precision if on_gpu else "fp32",
        commit=provenance.commit(),
    )


def _rows_to_keep(run: Run, record: Path, state: dict[str, Any] | None) -> int | None:
    """Those that the checkpoint counts; None where all are there, even if it is lost by now."""
    if state is not None:
        return None if state["epoch"] == run.epochs else state["rows"]
    rows = records.read(record).rows
    return None if rows and rows[-1]["epoch"] >= run.epochs else 0


def record_path(folder: Path | str, name: str) -> Path:
    """Where the rows of the run `name` stand."""
    return Path(folder) / "records" / f"{name}.jsonl"


def checkpoint_path(folder: Path | str, name: str) -> Path:
    """Where the run `name` keeps what it needs to go on."""
    return Path(folder) / "checkpoints" / f"{name}.pt"


def _save(path: Path, trainer: _Trainer, rows: int, seconds: float) -> None:
    state = {
        "epoch": trainer.epoch,
        "rows": rows,
        "seconds": seconds,
        "first": trainer.ensemble.module(0).state_dict(),
    }
    if trainer.epoch < trainer.run.epochs:  # a finished run is only started from
        state["trainer"] = trainer.state_dict()
    try:
        checkpoints.save(path, state)
    except (OSError, RuntimeError) as error:
        # Torch reports a full disk as a RuntimeError about a position in its archive.
        reason = getattr(error, "strerror", None) or "it could not be finished; is the disk full?"
        raise RunError(
            f"cannot write the checkpoint {path} ({reason}); the {rows} rows recorded so far are "
            "safe: make room and start the same command again"
        ) from error


def _start(run: Run, folder: Path | str) -> list[nn.Sequential]:
    """A model for each replica: fresh from its seed, or the common one that `start` ended with."""
    if run.start is None:
        return [models.build(run.task.model, seed) for _, seed in run.replicas]
    path = checkpoint_path(folder, run.start)
    state = checkpoints.load(path)
    if state is None:
        raise RunError(
            f"{run.name} starts where {run.start} ended, but there is no {path}: remove "
            f"{record_path(folder, run.start)} so that it is run again"
        )
    common = models.build(run.task.model, seed=0)
    common.load_state_dict(state["first"])
    return [common for _ in run.replicas]


class _Trainer:
    """An ensemble that follows the schedules of a run and says what to record."""

    def __init__(
        self, run: Run, start: list[nn.Sequential], data: Dataset, device: torch.device | str
    ) -> None:
        self.run = run
        schedules = [run.arms[arm] for arm, _ in run.replicas]
        # The very same tensors are trained on and evaluated, so that they are laid out once.
        self._train = data.train_images.to(device), data.train_labels.to(device)
        self.ensemble = Ensemble(
            start,
            F.cross_entropy,
            self._train,
            seeds=[seed for _, seed in run.replicas],
            lr=[s.lr_at(0) if isinstance(s, Stairs) else s.lr for s in schedules],
            batch_size=run.task.batch_size,
            momentum=run.momentum,
            weight_decay=run.task.weight_decay,
            algorithm=run.algorithm,
            sampling=run.sampling,
            device=device,
            precision=run.precision,
        )
        self._test = data.test_images.to(device), data.test_labels.to(device)
        replicas = len(run.replicas)
        self._early = HalfRunningMean((replicas, len(Averages._fields)))
        self._gradient_square = HalfRunningMean((replicas,))

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self.ensemble.epoch

    def run_epoch(self) -> list[dict[str, Any]]:
        """Train for an epoch and change the learning rates where it is time; the rows to record."""
        epoch = self.ensemble.run_epoch()
        self._check(epoch)
        if self.run.measures == "landscape":
            rows = [*self._rows_inside(epoch), self._landscape_row(epoch)]
        else:
            rows = [self._performance_row(epoch)]
        self._turn()
        return rows

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on bit by bit."""
        return {
            "ensemble": self.ensemble.state_dict(),
            "early": self._early.state_dict(),
            "gradient_square": self._gradient_square.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.ensemble.load_state_dict(state["ensemble"])
        self._early.load_state_dict(state["early"])
        self._gradient_square.load_state_dict(state["gradient_square"])

    def _check(self, epoch: Epoch) -> None:
        lost = ~torch.isfinite(epoch.loss).all(0)
        if lost.any():
            names = [
                f"{arm}, seed {seed}, at η = {lr:g}"
                for (arm, seed), lr, bad in zip(self.run.replicas, epoch.lr, lost, strict=True)
                if bad
            ]
            raise Diverged(
                f"{self.run.name}: the loss became NaN in epoch {epoch.epoch} ({'; '.join(names)});"
                " what was recorded before is safe. The learning rate is too high for this model"
            )

    def _rows_inside(self, epoch: Epoch) -> list[dict[str, Any]]:
        """Rows at logarithmically spaced steps since the learning rate was set."""
        values = torch.stack([epoch.left, epoch.right, epoch.loss, epoch.velocity_gradient], dim=-1)
        done, steps = self._early.count, len(values)
        if done >= _RESOLVED_EPOCHS * steps:
            return []
        rows, taken = [], 0
        for step in _log_spaced(done + 1, done + steps - 1):
            self._early.extend(values[taken : step - done])
            taken = step - done
            averages = [Averages(*replica) for replica in self._early.value.tolist()]
            total = epoch.step - steps + taken
            rows.append(self._sides(epoch, total, averages, epoch.loss[taken - 1]))
        self._early.extend(values[taken:])
        return rows

    def _landscape_row(self, epoch: Epoch) -> dict[str, Any]:
        """Both sides of FDR1 and O_FB = (1−ν)(∇f)² − μ v·∇f^B, half-running averages all."""
        averages = self.ensemble.averages()
        row = self._sides(epoch, epoch.step, averages, epoch.loss[-1])
        if not self.run.gradient_due(epoch.epoch):
            return row
        square = self.ensemble.full_gradient_square()
        self._gradient_square.update(torch.tensor(square, dtype=torch.float64))
        landscape = [
            gradient_square - self.run.momentum * average.velocity_gradient
            for gradient_square, average in zip(
                self._gradient_square.value.tolist(), averages, strict=True
            )
        ]
        return row | {"landscape": _short(landscape)}

    def _sides(
        self, epoch: Epoch, step: int, averages: list[Averages], batch_loss: Tensor
    ) -> dict[str, Any]:
        return {
            "epoch": _digits(step / self.ensemble.steps_per_epoch),
            "step": step,
            "lr": _short(epoch.lr),
            "left": _short(average.left for average in averages),
            "right": _short(average.right for average in averages),
            "loss": _short(average.loss for average in averages),
            "batch_loss": _short(batch_loss.tolist()),
        }

    def _performance_row(self, epoch: Epoch) -> dict[str, Any]:
        train = self.ensemble.evaluate(*self._train, regularized=True)
        test = self.ensemble.evaluate(*self._test)
        averages = self.ensemble.averages()
        return {
            "epoch": epoch.epoch,
            "step": epoch.step,
            "lr": _short(epoch.lr),
            "left": _short(average.left for average in averages),
            "right": _short(average.right for average in averages),
            "train_loss": _short(train.loss),
            "train_accuracy": _short(train.accuracy),
            "test_accuracy": _short(test.accuracy),
        }

    def _turn(self) -> None:
        """Set the learning rates of the next epoch."""
        for arm, schedule in self.run.arms.items():
            replicas = [r for r, (name, _) in enumerate(self.run.replicas) if name == arm]
            if isinstance(schedule, Adaptive):
                self.ensemble.schedule(
                    threshold=schedule.tolerance, factor=1 - schedule.decrease, replicas=replicas
                )
            elif self.epoch in schedule.junctions:
                self._junction(replicas, schedule.lr_at(self.epoch))

    def _junction(self, replicas: list[int], lr: float) -> None:
        lrs = self.ensemble.lr
        for r in replicas:
            lrs[r] = lr
        self.ensemble.lr = lrs
        self.ensemble.reset_averages(replicas)
        self._early.reset()
        self._gradient_square.reset()
        if self.run.zero_velocity:
            self.ensemble.zero_velocity()


def _log_spaced(first: int, last: int) -> list[int]:
    """Whole numbers from `first` to `last` that stand evenly on a logarithmic axis.

    >>> _log_spaced(90, 200)
    [100, 112, 126, 141, 158, 178, 200]
    """
    steps, k = [], 0
    while (step := round(10 ** (k / _ROWS_PER_DECADE))) <= last:
        if step >= first and (not steps or step > steps[-1]):
            steps.append(step)
        k += 1
    return steps


def _short(values: Any) -> list[float]:
    return [_digits(value) for value in values]


def _digits(value: float) -> float:
    """Seven digits, as many as single precision has: a third of the file's size."""
    return float(f"{value:.7g}")
