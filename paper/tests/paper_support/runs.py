"""Short runs of a reproduction, and a process that executes them."""

from __future__ import annotations

from pathlib import Path

from equilibrate_paper.data import datasets
from equilibrate_paper.protocol.run import PaperRun, Task
from equilibrate_paper.protocol.schedules import Adaptive, PiecewiseConstant
from equilibrate_paper.runs import execute as execution

MLP = Task("mlp", "digits-mlp", "digits", "MLP on digits", batch_size=100)
INITIAL = PaperRun(
    "initial", MLP, {"initial": PiecewiseConstant(((0.1, 3),))}, (0, 1), "landscape", momentum=0.9
)
SEQUENCE = PaperRun(
    "sequence",
    MLP,
    {"sequence": PiecewiseConstant(((0.05, 3), (0.02, 9)))},
    (5, 6),
    "landscape",
    momentum=0.9,
    zero_velocity=True,
    start="initial",
)
ADAPTIVE = PaperRun(
    "adaptive",
    MLP,
    {"adaptive": Adaptive(0.1, 30, threshold=0.5, factor=0.9)},
    (0, 1, 2),
    "performance",
)


def execute_all(folder: Path) -> None:
    """Execute the three runs, with a checkpoint after each epoch."""
    digits = datasets.load("digits")
    execution.CHECKPOINT_SECONDS = 0
    for run in (INITIAL, SEQUENCE, ADAPTIVE):
        execution.execute(run, folder, digits, profile="test")
