"""What a record of `forecast.py` holds: its past at some step, and what branches gained."""

import math
from typing import Any

import numpy as np

from equilibrate.forecast.outcome import History, Samples
from equilibrate.forecast.progress import fit

TITLES = {
    "gpt2": "GPT-2 124M, AdamW",
    "transformer": "small transformer, AdamW",
    "text": "smallest transformer, AdamW",
    "vit": "vision transformer, AdamW",
    "mlp": "MLP, SGD",
    "clipped": "MLP, SGD, clipped",
    "muon": "MLP, Muon",
    "batchnorm": "ResNet, BatchNorm, SGD",
    "groupnorm": "ResNet, GroupNorm, SGD",
}
FAMILIES = {
    "text": ("gpt2", "transformer", "text"),
    "MLPs": ("mlp", "clipped", "muon"),
    "images": ("vit", "batchnorm", "groupnorm"),
}
NOTHING = Samples(np.zeros(0), np.zeros(0), np.zeros(0))
"""No samples."""


def setting(record: dict[str, Any]) -> tuple[float, int]:
    """Return the learning rate and the batch size of a run."""
    return record["settings"]["lr"], record["batch_size"]


def history(record: dict[str, Any], step: int) -> History:
    """Return what a forecaster would know at a step."""
    first = step // 2
    losses = np.array(record["losses"][first:step])
    pairs = np.array([row for row in record["comparisons"] if row[0] < step])
    products = np.array([row[:3] for row in record["products"] if row[0] < step])
    return History(
        step,
        np.arange(first, step) + 0.5,
        losses,
        np.ones(len(losses)),
        Samples(products[:, 0], products[:, 2], products[:, 1]) if len(products) else NOTHING,
        Samples(pairs[:, 0], pairs[:, 2] - pairs[:, 3], pairs[:, 1]),
    )


def realised(record: dict[str, Any], made: dict[str, Any]) -> tuple[float, float]:
    """Return by how much the loss fell in a branch, and by how much more than in the trunk.

    nan if a loss was not recorded. Images are seen several times, and examples that were seen a
    short while ago have a lower loss. So the branch is compared with the trunk on the batches that
    come next, which both have seen equally long ago. After a cooldown the trunk alone learns from
    these, which is taken out. The fall of the trunk is that of a curve through its losses. Older
    records have losses on batches of examples that are seen once.
    """
    step, end = made["step"], made["step"] + made["horizon"]
    losses, coming = np.array(record["losses"]), np.array(made["coming"])
    if not len(coming):
        before, staying = (made[f"held_out_{name}"] for name in ("before", "staying"))
        found = (math.nan if x is None else x - made["held_out"] for x in (before, staying))
        return next(found), next(found)
    if len(losses) < end + len(coming):
        return math.nan, math.nan
    steps = np.arange(step // 2, min(len(losses), end + step // 4))
    curve = fit(steps + 0.5, losses[steps], np.ones(len(steps)), len(losses))
    assert curve is not None
    before, staying, *later = curve.past(np.array([step, end, *range(end, end + len(coming))]))
    learned = staying - np.mean(later) if made["kind"] == "cooldown" else 0.0
    over = float((losses[end : end + len(coming)] - coming).mean() + learned)
    return float(before - staying) + over, over
