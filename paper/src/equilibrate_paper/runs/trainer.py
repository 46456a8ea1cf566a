"""Train and measure the ensemble of a run, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibrate.averages import HalfRunningMean
from equilibrate_paper.data.datasets import Dataset
from equilibrate_paper.ensemble import Averages, Ensemble, Epoch, Method
from equilibrate_paper.protocol.run import PaperRun
from equilibrate_paper.protocol.schedules import Adaptive, PiecewiseConstant
from equilibrate_paper.runs.errors import Diverged
from equilibrate_paper.runs.norms import NormAverages, squared_norm

# Rows within an epoch are needed only while whole epochs are too coarse for a logarithmic axis.
_ROWS_PER_DECADE = 20
_RESOLVED_EPOCHS = 10


class Trainer:
    """Trains the ensemble of a run with its schedules and returns the rows to record.

    Args:
        run: The run to train.
        models: The initial model of each replica.
        data: The data set of the run.
        device: The device to train on.
    """

    def __init__(
        self,
        run: PaperRun,
        models: Sequence[nn.Sequential],
        data: Dataset,
        device: torch.device | str,
    ) -> None:
        self.run = run
        schedules = [run.arms[arm] for arm, _ in run.replicas]
        self.ensemble = Ensemble(
            models,
            data.train,
            seeds=[seed for _, seed in run.replicas],
            lr=[s.lr_at(0) if isinstance(s, PiecewiseConstant) else s.lr for s in schedules],
            method=Method(
                run.task.batch_size,
                run.algorithm,
                run.momentum,
                run.task.weight_decay,
                run.sampling,
                run.precision,
            ),
            device=device,
        )
        self._test = self.ensemble.prepare(data.test_images), data.test_labels.to(device)
        replicas = len(run.replicas)
        self._early = HalfRunningMean((replicas, len(Averages._fields)))
        self._gradient_square = HalfRunningMean((replicas,))
        self._norms = (
            NormAverages(replicas, self.ensemble.steps_per_epoch, run.momentum)
            if run.records_norm
            else None
        )

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.ensemble.epoch

    def run_epoch(self) -> list[dict[str, Any]]:
        """Train for one epoch and then update the learning rates.

        Returns:
            The rows to record. A loss that is not finite raises `Diverged`.
        """
        norm = squared_norm(self.ensemble.parameters) if self._norms else None
        epoch = self.ensemble.run_epoch()
        self._require_finite(epoch)
        if self._norms is not None and norm is not None:
            self._norms.add(epoch, norm)
        if self.run.measures == "landscape":
            rows, last = self._rows_within(epoch), self._landscape_row(epoch)
            if self.run.row_due(epoch.epoch):
                rows.append(last)
        else:
            rows = [self._performance_row(epoch)]
        self._update_lrs()
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the state; on the CPU, training from it continues bit for bit."""
        return {
            "ensemble": self.ensemble.state_dict(),
            "early": self._early.state_dict(),
            "gradient_square": self._gradient_square.state_dict(),
            "norms": self._norms and self._norms.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Args:
            state_dict: The result of `state_dict`.
        """
        self.ensemble.load_state_dict(state_dict["ensemble"])
        self._early.load_state_dict(state_dict["early"])
        self._gradient_square.load_state_dict(state_dict["gradient_square"])
        if self._norms is not None:
            self._norms.load_state_dict(state_dict["norms"])

    def _require_finite(self, epoch: Epoch) -> None:
        lost = ~torch.isfinite(epoch.loss).all(0)
        if lost.any():
            names = [
                f"{arm}, seed {seed}, at η = {lr:g}"
                for (arm, seed), lr, bad in zip(self.run.replicas, epoch.lr, lost, strict=True)
                if bad
            ]
            raise Diverged(
                f"{self.run.name}: the loss became NaN in epoch {epoch.epoch} ({'; '.join(names)});"
                " the rows recorded before are safe. The learning rate is too high for this model"
            )

    def _rows_within(self, epoch: Epoch) -> list[dict[str, Any]]:
        """Return rows at steps that are evenly spaced on a logarithmic axis."""
        values = torch.stack([epoch.left, epoch.right, epoch.loss, epoch.velocity_gradient], dim=-1)
        done, steps = self._early.count, len(values)
        if done >= _RESOLVED_EPOCHS * steps:
            return []
        rows, used = [], 0
        for step in _log_spaced(done + 1, done + steps - 1):
            self._early.extend(values[used : step - done])
            before, used = used, step - done
            averages = [Averages(*replica) for replica in self._early.value.tolist()]
            total = epoch.step - steps + used
            row = self._sides(epoch, total, averages, epoch.loss[used - 1])
            rows.append(row | self._norm_columns(before, used))
        self._early.extend(values[used:])
        if self._norms is not None:
            self._norms.extend(used)
        return rows

    def _landscape_row(self, epoch: Epoch) -> dict[str, Any]:
        """Return the sides of FDR1 and O_FB = (1−ν)(∇f)² − μ v·∇f^B, as half-running averages."""
        averages = self.ensemble.averages()
        row = self._sides(epoch, epoch.step, averages, epoch.loss[-1]) | self._norm_columns()
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
        return row | {"landscape": _rounded(landscape)}

    def _sides(
        self, epoch: Epoch, step: int, averages: list[Averages], batch_loss: Tensor
    ) -> dict[str, Any]:
        return {
            "epoch": _round(step / self.ensemble.steps_per_epoch),
            "step": step,
            "lr": _rounded(epoch.lr),
            "left": _rounded(average.left for average in averages),
            "right": _rounded(average.right for average in averages),
            "loss": _rounded(average.loss for average in averages),
            "batch_loss": _rounded(batch_loss.tolist()),
        }

    def _norm_columns(self, used: int = 0, step: int | None = None) -> dict[str, list[float]]:
        """Return the columns of |θ|², at the end of the epoch or after one of its steps."""
        if self._norms is None:
            return {}
        columns = self._norms.at_end() if step is None else self._norms.within(used, step)
        return {name: _rounded(values) for name, values in columns.items()}

    def _performance_row(self, epoch: Epoch) -> dict[str, Any]:
        train, test = self.ensemble.evaluate(), self.ensemble.evaluate(*self._test)
        norms, decay = self.ensemble.norm_square().tolist(), self.run.task.weight_decay
        losses = [loss + decay / 2 * norm for loss, norm in zip(train.loss, norms, strict=True)]
        averages = self.ensemble.averages()
        return {
            "epoch": epoch.epoch,
            "step": epoch.step,
            "lr": _rounded(epoch.lr),
            "left": _rounded(average.left for average in averages),
            "right": _rounded(average.right for average in averages),
            "train_loss": _rounded(losses),
            "train_accuracy": _rounded(train.accuracy),
            "test_accuracy": _rounded(test.accuracy),
        }

    def _update_lrs(self) -> None:
        for arm, schedule in self.run.arms.items():
            replicas = [r for r, (name, _) in enumerate(self.run.replicas) if name == arm]
            if isinstance(schedule, Adaptive):
                self.ensemble.schedule(schedule.threshold, schedule.factor, replicas)
            elif self.epoch in schedule.milestones:
                self._start_phase(replicas, schedule.lr_at(self.epoch))

    def _start_phase(self, replicas: list[int], lr: float) -> None:
        lrs = self.ensemble.lr
        for r in replicas:
            lrs[r] = lr
        self.ensemble.lr = lrs
        self.ensemble.reset_averages(replicas)
        self._early.reset()
        self._gradient_square.reset()
        if self._norms is not None:
            self._norms.restart(zero_velocity=self.run.zero_velocity)
        if self.run.zero_velocity:
            self.ensemble.zero_velocity()


def _log_spaced(first: int, last: int) -> list[int]:
    """Return integers from `first` to `last` that are evenly spaced on a logarithmic axis.

    >>> _log_spaced(90, 200)
    [100, 112, 126, 141, 158, 178, 200]
    """
    steps, k = [], 0
    while (step := round(10 ** (k / _ROWS_PER_DECADE))) <= last:
        if step >= first and (not steps or step > steps[-1]):
            steps.append(step)
        k += 1
    return steps


def _rounded(values: Iterable[float]) -> list[float]:
    return [_round(value) for value in values]


def _round(value: float) -> float:
    # Seven digits are all of single precision, and make the file a third of its size.
    return float(f"{value:.7g}")
