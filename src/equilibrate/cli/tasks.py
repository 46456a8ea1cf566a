"""The option `--task` of `equilibrate landscape`: a built-in task, or one of the user."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

from torch import nn
from torch.nn.functional import cross_entropy

from equilibrate.landscape import Batch, Loss
from equilibrate.paper.data import datasets
from equilibrate.paper.protocol import models
from equilibrate.paper.runs.training import TASKS

Task = tuple[Callable[[int], nn.Module], Loss, Batch]
"""A function from seed to model, the loss, and (inputs, targets)."""


def load_task(task: str, data_dir: Path | None = None) -> Task:
    """Return a task by its name, or by MODULE:FUNCTION.

    Args:
        task: One of `training.TASKS`, or the module and name of a function that returns a task.
        data_dir: The folder with MNIST and CIFAR-10.

    Returns:
        A function from seed to model, the loss, and (inputs, targets).

    Raises:
        ValueError: If the task is unknown, cannot be imported, or returns something else.
    """
    if task in TASKS:
        dataset = datasets.load(TASKS[task], data_dir, progress=True)
        return lambda seed: models.build(task, seed), cross_entropy, dataset.train
    module, colon, name = task.partition(":")
    if not colon:
        raise ValueError(
            f"task must be one of {', '.join(TASKS)}, or MODULE:FUNCTION, got {task!r}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # find modules in the current folder, like python -m
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task {task!r} cannot be imported: {error}") from error
    found = function() if callable(function) else function
    if not _is_task(found):
        raise ValueError(
            f"task {task!r} must return (a function from seed to model, the loss, (inputs, "
            f"targets)), got {_types(found)}"
        )
    return found


def _is_task(found: object) -> TypeGuard[Task]:
    match found:
        case (build, loss, (_, _)):
            # A model is callable too, but not with a seed.
            return callable(build) and callable(loss) and not isinstance(build, nn.Module)
    return False


def _types(found: object) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(map(_types, found))})"
    return type(found).__name__
