r"""How the loss falls at a constant learning rate, from its past alone.

Losses of mini-batches are noisy, and a training slows down. Let time run as

    z(u) = (1 − (u/t)^−p)/p            (p = 0: the logarithm)

so that a straight line in z is a fall as the power −p of the number of steps u. The loss is taken
as a curve whose slope in z wanders at random (an integrated Wiener process, whose best curve is a
smoothing spline), observed with noise. Its posterior is Gaussian: it continues with the present
slope, and its error grows with how much the slope has changed in the past. How much that is, and
the power p, are hardly known from one run: curves for several of both are averaged, each with the
weight that the losses give it (the restricted likelihood).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_POWERS = (-0.5, 0.0, 0.5, 1.0, 2.0)
_WANDERING = (0.0, 1.0, 1e1, 1e2)
"""By how much the variance of the slope grows with z, in units of the variance of a group. Slopes
that wander more made the errors of trainings twice too large."""
_GROUPS = 40
"""Into how many groups the losses are cut at most."""
_FEWEST = 8
"""Groups that a curve needs: two for itself, and some for its error."""
_NEGLIGIBLE = 1e-3
"""Weight below which a curve is left out."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The loss as a function of the steps, at a constant learning rate: a mixture of curves."""

    step: float
    """The present, in steps."""
    weights: np.ndarray
    """Weight of each curve; they add up to one."""
    powers: np.ndarray
    """Its power p."""
    means: np.ndarray
    """Loss, and its derivative with respect to z, at present."""
    covariances: np.ndarray
    """Their covariance."""
    wandering: np.ndarray
    """By how much the variance of the slope grows with z."""
    lines: np.ndarray
    """z, loss and slope at the first group, k = 0."""
    groups: np.ndarray
    """k of each group."""
    deviations: np.ndarray
    """By how much each group draws the curve away from its line."""

    @property
    def now(self) -> float:
        """The loss at present."""
        return float(self.weights @ self.means[:, 0])

    def loss(self, step: float) -> tuple[float, float]:
        """Return the loss at a step, now or later, and its standard error."""
        z = _bend(np.array([step]) / self.step, self.powers)[:, 0]
        at = np.stack([np.ones_like(z), z], axis=1)
        known = (at[:, None] @ self.covariances @ at[..., None])[:, 0, 0]
        return self._mixed((at * self.means).sum(1), known + self.wandering * z**3 / 3)

    def fall_over(self, steps: float) -> float:
        """Return by how much the loss falls over the next steps."""
        return self.fall(self.step, self.step + steps)[0]

    def past(self, steps: np.ndarray) -> np.ndarray:
        """Return the loss at some steps of the past."""
        x = np.maximum(np.asarray(steps) / self.step, 0.05)
        begin, loss, slope = self.lines.T[..., None]
        k = _bend(x, self.powers) - begin
        drawn = _covariance(k[:, :, None], self.groups[:, None, :]) @ self.deviations[..., None]
        return self.weights @ (loss + slope * k + drawn[..., 0])

    def fall(self, begin: float, end: float) -> tuple[float, float]:
        """Return by how much the loss falls, and its standard error.

        Args:
            begin: One step, now or later.
            end: Another one. If it comes before `begin` the fall is negative.
        """
        if begin > end:
            value, error = self.fall(end, begin)
            return -value, error
        first, last = _bend(np.array([begin, end]) / self.step, self.powers).T
        span = last - first
        # Of ∫B from `first` to `last`, where B is a Wiener process that is zero at present.
        wandered = span**2 * (first + span / 3)
        variances = span**2 * self.covariances[:, 1, 1] + self.wandering * wandered
        return self._mixed(-self.means[:, 1] * span, variances)

    def _mixed(self, values: np.ndarray, variances: np.ndarray) -> tuple[float, float]:
        """Return mean and standard error of the mixture, given those of each curve."""
        value = float(self.weights @ values)
        variance = float(self.weights @ (variances + (values - value) ** 2))
        return value, math.sqrt(max(0.0, variance))


def fit(steps: np.ndarray, losses: np.ndarray, counts: np.ndarray, step: int) -> Progress | None:
    """Return the curve through the losses so far.

    Args:
        steps: The middle of the steps of each mean loss.
        losses: Mean losses.
        counts: Number of losses in each mean.
        step: Number of steps so far.

    Returns:
        The curve; None if there are too few losses.
    """
    x, y, counts = _grouped(steps / step, losses, counts)
    n = len(x)
    if n < _FEWEST:
        return None
    powers, wandering = (grid.ravel() for grid in np.meshgrid(_POWERS, _WANDERING))
    z = _bend(x, powers)
    k = z - z[:, :1]
    # Generalized least squares of level and slope at k = 0, for all curves at once.
    covariance = wandering[:, None, None] * _covariance(k[:, :, None], k[:, None, :])
    covariance[:, range(n), range(n)] += counts.mean() / counts
    inverse = np.linalg.inv(covariance)
    design = np.stack([np.ones_like(k), k], axis=2)
    projected = _transposed(design) @ inverse
    information = projected @ design
    unknown = np.linalg.inv(information)
    lines = unknown @ (projected @ y)[..., None]
    residuals = y[:, None] - design @ lines
    solved = inverse @ residuals
    variance = np.maximum((_transposed(residuals) @ solved)[:, 0, 0] / (n - 2), 1e-300)
    # Level and slope at present, k = −z₀.
    now = -z[:, 0]
    zeros, ones = np.zeros_like(now), np.ones_like(now)
    to_now = _matrices([[ones, now], [zeros, ones]])
    shared = np.stack([_covariance(now[:, None], k), k**2 / 2], axis=1) * wandering[:, None, None]
    own = _matrices([[now**3 / 3, now**2 / 2], [now**2 / 2, now]]) * wandering[:, None, None]
    means = (to_now @ lines + shared @ solved)[..., 0]
    rest = to_now - shared @ inverse @ design
    known = own - shared @ inverse @ _transposed(shared) + rest @ unknown @ _transposed(rest)
    log_determinants = np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(information)[1]
    chances = -(n - 2) / 2 * np.log(variance) - log_determinants / 2
    weights = np.exp(chances - chances.max())
    kept = weights > _NEGLIGIBLE * weights.sum()
    if not kept.any():  # numbers that overflow
        return None
    return Progress(
        step=float(step),
        weights=weights[kept] / weights[kept].sum(),
        powers=powers[kept],
        means=means[kept],
        covariances=(variance[:, None, None] * known)[kept],
        wandering=(variance * wandering)[kept],
        lines=np.concatenate([z[:, :1], lines[..., 0]], axis=1)[kept],
        groups=k[kept],
        deviations=(wandering[:, None] * solved[..., 0])[kept],
    )


def _grouped(
    x: np.ndarray, y: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return means over groups with about as many losses each, and their numbers."""
    if not counts.any():
        return x[:0], y[:0], counts[:0]
    place = np.cumsum(counts) - counts / 2
    group = (place * min(_GROUPS, len(x)) / counts.sum()).astype(int)
    total = np.bincount(group, weights=counts)
    used = total > 0
    means = [np.bincount(group, weights=counts * values)[used] / total[used] for values in (x, y)]
    return means[0], means[1], total[used]


def _matrices(rows: list[list[np.ndarray]]) -> np.ndarray:
    """Return matrices from their elements, each of which has one number for each matrix."""
    return np.moveaxis(np.array(rows), -1, 0)


def _transposed(matrices: np.ndarray) -> np.ndarray:
    return matrices.swapaxes(1, 2)


def _covariance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the covariance of an integrated Wiener process that begins at zero.

    Before zero the curve is its line, so there the covariance is zero.
    """
    low, high = np.maximum(np.minimum(a, b), 0), np.maximum(a, b)
    return low**2 * (high - low) / 2 + low**3 / 3


def _bend(x: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Return (1 − x^−p)/p, which is log x for p = 0, of all x in a row for each power."""
    p = np.where(powers == 0, 1.0, powers)[:, None]
    return np.where(powers[:, None] == 0, np.log(x), (1 - x**-p) / p)
