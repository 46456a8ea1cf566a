"""What else foresees a cooldown: a power law, and annealing laws fitted to finished cooldowns."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np


def power_law(losses: np.ndarray, ahead: float) -> float:
    """Return by how much a + b·t^−p through all losses, but for the first tenth, falls."""
    t = np.arange(len(losses)) + 0.5
    kept = t > len(losses) / 10
    best = (math.inf, 0.0)
    for p in np.linspace(0.05, 2, 40):
        a = np.stack([np.ones(kept.sum()), t[kept] ** -p], axis=1)
        fitted, residual, *_ = np.linalg.lstsq(a, losses[kept], rcond=None)
        fall = fitted[1] * (len(losses) ** -p - (len(losses) + ahead) ** -p)
        best = min(best, (float(residual[0]), float(fall)))
    return best[1]


Lowered = Callable[[float, np.ndarray], np.ndarray]
"""What the loss falls by in a linear cooldown from a learning rate over some steps, up to a factor,
because the rate was lowered."""


@dataclass(frozen=True)
class AnnealingLaw:
    """L = L₀ + A S₁^−α − B D, with S₁ the sum of all learning rates, and D what lowering did."""

    weights: np.ndarray
    power: float
    lowered: Lowered

    def terms(self, lr: float, step: np.ndarray, horizon: np.ndarray) -> np.ndarray:
        """Return 1, S₁^−α and −D after some constant steps and a linear cooldown."""
        area = lr * (step + horizon / 2)
        lowered = self.lowered(lr, horizon) * (horizon > 0)
        return np.stack([np.ones(len(step)), area**-self.power, -lowered], axis=1)

    def gain(self, lr: float, step: int, horizon: int) -> float:
        """Return the fall of the loss in a cooldown."""
        now, end = (self.terms(lr, np.array([step]), np.array([n])) for n in (0, horizon))
        return ((now - end) @ self.weights).item()


def with_momentum() -> Iterator[Lowered]:
    """Yield the terms of arXiv 2408.11029: D sums what the rate was lowered by, with a momentum."""

    def lowered(momentum: float, lr: float, horizon: np.ndarray) -> np.ndarray:
        kept = 1 / (1 - momentum)
        after = kept * (1 - momentum**horizon) / np.maximum(horizon, 1)
        return lr * kept * (1 - momentum * after)

    for momentum in (0.9, 0.98, 0.99, 0.995, 0.998, 0.999):
        yield functools.partial(lowered, momentum)


def multi_power() -> Iterator[Lowered]:
    """Yield the terms of arXiv 2503.12811.

    Each lowering by dη of the rate η adds dη [1 − (1 + C η^−γ S)^−β], with S the sum of the rates
    that come after it. In a linear cooldown η = u η₀ and S = η₀ n u²/2.
    """
    u = (np.arange(64) + 0.5) / 64

    def lowered(c: float, beta: float, gamma: float, lr: float, horizon: np.ndarray) -> np.ndarray:
        x = c * lr ** (1 - gamma) * horizon[:, None] / 2 * u ** (2 - gamma)
        return lr * (1 - (1 + x) ** -beta).mean(1)

    grid = itertools.product(np.logspace(-1, 4, 11).tolist(), (0.2, 0.5, 1.0), (0.0, 0.5, 1.0))
    for c, beta, gamma in grid:
        yield functools.partial(lowered, c, beta, gamma)


def fit_law(
    losses: np.ndarray, lr: float, gains: dict[tuple[int, int], float], terms: Iterator[Lowered]
) -> AnnealingLaw:
    """Fit a law to a trunk and the ends of its cooldowns, which together weigh as much.

    Args:
        losses: The loss of each step of the trunk.
        lr: Its learning rate.
        gains: By how much the loss fell in cooldowns that began at a step and had a length.
        terms: What lowering the learning rate may do.
    """
    steps = np.arange(len(losses) // 12, len(losses), len(losses) // 50)
    width = len(losses) // 100
    smooth = np.array([losses[step - width : step + width].mean() for step in steps])
    begun, lengths = np.array(list(gains)).T
    step = np.concatenate([steps, begun])
    horizon = np.concatenate([0 * steps, lengths])
    target = np.concatenate([smooth, np.interp(begun, steps, smooth) - list(gains.values())])
    root = np.sqrt([1.0] * len(steps) + [len(steps) / len(gains)] * len(gains))
    best: AnnealingLaw | None = None
    least = math.inf
    for lowered, power in itertools.product(terms, [k / 10 for k in range(1, 21)]):
        law = AnnealingLaw(weights=np.zeros(3), power=power, lowered=lowered)
        a = law.terms(lr, step, horizon) * root[:, None]
        fitted, *_ = np.linalg.lstsq(a, target * root, rcond=None)
        square = float(((a @ fitted - target * root) ** 2).sum())
        if square < least:
            least, best = square, replace(law, weights=fitted)
    assert best is not None
    return best
