"""Execute one run: train, record, save checkpoints, and resume after an interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equilibrate.record import jsonl
from equilibrate_paper.data.datasets import Dataset
from equilibrate_paper.protocol import models
from equilibrate_paper.protocol.run import PaperRun
from equilibrate_paper.runs.errors import RunError
from equilibrate_paper.runs.folder import (
    checkpoint_path,
    load_checkpoint,
    record_path,
    save_checkpoint,
)
from equilibrate_paper.runs.trainer import Trainer

CHECKPOINT_SECONDS = 10.0
"""Minimum time between checkpoints."""


def execute(
    run: PaperRun,
    folder: Path | str,
    data: Dataset,
    *,
    profile: str,
    device: torch.device | str = "cpu",
    overwrite: bool = False,
    stop_at: float = math.inf,
    progress: Callable[[int], None] = lambda epoch: None,
) -> bool:
    """Execute a run, or the rest of it, and record it in folder/records/NAME.jsonl.

    An interrupted run continues from its last checkpoint. Rows recorded after the checkpoint are
    computed again, so that on the CPU the file is bit for bit that of an uninterrupted run.

    Args:
        run: The run to execute.
        folder: The folder of the reproduction.
        data: The data set of the run.
        profile: The name of the profile, for the header of the record.
        device: The device to train on.
        overwrite: Whether to start again and replace an existing record.
        stop_at: The time, as given by `time.monotonic()`, by which to save a checkpoint and stop.
            The run stops before an epoch that might end later. At least one epoch is executed.
        progress: Called with the number of completed epochs, at the start and after each epoch.

    Returns:
        Whether the run is complete. If it is not, it continues at the next call.
    """
    record, checkpoint = record_path(folder, run.name), checkpoint_path(folder, run.name)
    resuming = record.exists() and record.stat().st_size > 0 and not overwrite
    state = load_checkpoint(checkpoint) if resuming else None
    config = run.to_config() | {
        "profile": profile,
        "fingerprint": data.fingerprint,
        "device": torch.device(device).type,
        "steps_per_epoch": len(data.train_images) // run.task.batch_size,
    }
    keep = _rows_to_keep(run, record, state) if resuming else 0
    if not resuming:  # a checkpoint of an earlier record must not be used after a kill
        checkpoint.unlink(missing_ok=True)
    mode = "overwrite" if overwrite else "resume"
    with jsonl.Writer(record, config=config, mode=mode, keep=keep) as writer:
        if keep is None:
            progress(run.epochs)
            return True
        trainer = Trainer(run, _initial_models(run, folder), data, device)
        if state is not None:
            trainer.load_state_dict(state["trainer"])
        progress(trainer.epoch)
        saved = now = time.monotonic()
        longest = 0.0
        while trainer.epoch < run.epochs:
            for row in trainer.run_epoch():
                writer.write(row)
            before, now = now, time.monotonic()
            longest = max(longest, now - before)
            finished = trainer.epoch == run.epochs
            stopping = not finished and now + longest > stop_at
            if finished or stopping or now - saved >= CHECKPOINT_SECONDS:
                writer.sync()  # a checkpoint must not count rows that a power failure can lose
                save_checkpoint(checkpoint, _state(trainer, writer.count))
                saved = now
            progress(trainer.epoch)
            if stopping:
                return False
    return True


def _rows_to_keep(run: PaperRun, record: Path, state: dict[str, Any] | None) -> int | None:
    """Return the number of rows at the checkpoint, or None if the record is complete."""
    if state is not None:
        return None if state["epoch"] == run.epochs else state["rows"]
    rows = jsonl.read(record).rows
    return None if rows and rows[-1]["epoch"] >= run.epochs else 0


def _initial_models(run: PaperRun, folder: Path | str) -> list[nn.Sequential]:
    # One model per replica: initialized from its seed, or with the final weights of run.start.
    if run.start is None:
        return [models.build(run.task.model, seed) for _, seed in run.replicas]
    path = checkpoint_path(folder, run.start)
    state = load_checkpoint(path)
    if state is None:
        raise RunError(
            f"{run.name} starts from the end of {run.start}, but {path} does not exist: remove "
            f"{record_path(folder, run.start)} to run it again"
        )
    model = models.build(run.task.model, seed=0)
    model.load_state_dict(state["first"])
    return [model for _ in run.replicas]


def _state(trainer: Trainer, rows: int) -> dict[str, Any]:
    first = trainer.ensemble.module(0).state_dict()
    state = {"epoch": trainer.epoch, "rows": rows, "first": first}
    if trainer.epoch < trainer.run.epochs:  # of a finished run only the final weights are needed
        state["trainer"] = trainer.state_dict()
    return state
