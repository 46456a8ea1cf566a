"""Processes with known truth for `decisions.py`: SGD on quadratics, many repetitions at once.

The mean loss of each is known: exactly from the recursion of second moments, or from the mean over
all repetitions where the batches of an epoch are not independent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from equilibrate.stationarity.trace import CAPACITY, WIDTH, Sketch
from equilibrate.watching.sharding import Layout

Array = NDArray[np.float64]
EARLY = 0.05
"""A rule acts too early if the mean loss exceeds its stationary value by more than this share."""


@dataclass(frozen=True, eq=False)
class Process:
    """SGD with g = h(θ − θ*) + ξ in each direction, η = 1."""

    name: str
    curvatures: Array
    """h; zero for a flat direction."""
    start: float | Array | None = 100.0
    """(θ₀ − θ*)²/σ² in each direction; None to start from the state at twice the rate."""
    momentum: float = 0.0
    noise: str = "gaussian"
    """"gaussian", "heavy" (Student's t, 3 degrees), "reshuffled" or "multiplicative"."""
    drift: float = 0.0
    """Speed of the minimum along the first direction, in σ for each loss-relaxation time."""
    minimum: float = 0.0
    """Distance of θ* from the origin in σ, along the last direction."""
    bounce: float = 0.0
    """Distance of the start from θ* along the first direction, through the origin, in σ."""
    acts: bool = True
    """Whether there is a stationary state to find."""
    horizon: float = 60.0
    """Loss-relaxation times to simulate."""
    epoch: float = 0.5
    """Loss-relaxation times in an epoch, at the end of which rules look."""

    @property
    def relaxation(self) -> float:
        """t_r = (1−μ)/(2ηh) of the slowest direction, in steps."""
        curved = self.curvatures[self.curvatures > 0]
        slowest = curved.min() if len(curved) else 0.02
        slower = 1 - _MULTIPLICATIVE if self.noise == "multiplicative" else 1.0
        return (1 - self.momentum) / (2 * slowest * slower)

    @property
    def variances(self) -> Array:
        """σ² in each direction at equilibrium; in flat directions that of the stiffest one."""
        h = np.where(self.curvatures > 0, self.curvatures, max(self.curvatures.max(), 0.02))
        found = 1 / (h * (1 - self.momentum) * (2 - h / (1 + self.momentum)))
        return found / (1 - _MULTIPLICATIVE) if self.noise == "multiplicative" else found


_MULTIPLICATIVE = 0.3
"""Share of the noise that is proportional to the loss, at equilibrium without it."""


def processes() -> list[Process]:
    """Return the processes of the benchmark."""
    bad20, bad200 = np.geomspace(0.005, 0.5, 20), np.geomspace(0.005, 0.5, 200)
    one = np.full(1, 0.02)
    scales = np.r_[np.full(32, 0.2), np.full(32, 0.01)]
    return [
        Process("well conditioned, 20 dimensions", np.full(20, 0.02)),
        Process("condition 100, 20 dimensions", bad20, 30.0),
        Process("condition 100, slow directions far", bad20, np.r_[[300.0] * 2, [1.0] * 18]),
        Process("1 dimension", one),
        Process("1 dimension, far", one, 1e4),
        Process("2 dimensions", np.array([0.02, 0.1])),
        Process("well conditioned, 200 dimensions", np.full(200, 0.02), 30.0),
        Process("condition 100, 200 dimensions", bad200, 30.0),
        Process("distant minimum", np.full(10, 0.02), 30.0, minimum=300.0),
        Process("norm that turns around", np.geomspace(0.02, 0.1, 5), 10.0, bounce=20.0),
        Process("heavy tails", np.full(5, 0.02), noise="heavy"),
        Process("reshuffled, long epochs", np.geomspace(0.02, 0.2, 5), noise="reshuffled", epoch=2),
        Process("reshuffled epochs", np.geomspace(0.002, 0.2, 5), noise="reshuffled", epoch=0.2),
        Process(
            "reshuffled epochs, slow direction far",
            np.geomspace(0.001, 0.2, 10),
            np.r_[1e4, np.full(9, 30.0)],
            noise="reshuffled",
            epoch=0.1,
        ),
        Process("short epochs", np.geomspace(0.005, 0.1, 10), epoch=0.1),
        Process("long epochs", np.geomspace(0.02, 0.1, 10), epoch=2),
        Process("momentum 0.9", np.geomspace(0.002, 0.02, 5), momentum=0.9),
        Process("multiplicative noise", np.full(10, 0.02), 30.0, noise="multiplicative"),
        Process("two time scales", scales, np.r_[np.full(32, 1000.0), np.full(32, 4.0)]),
        Process("after a halving, 20 dimensions", np.geomspace(0.01, 0.1, 20), None),
        Process("drifting minimum, 1 dimension", one, 10.0, drift=0.354, acts=False),
        Process("drifting minimum, 20 dimensions", np.full(20, 0.02), 10.0, drift=1.58, acts=False),
        Process(
            "half of the noise diffuses", np.r_[np.full(32, 0.02), np.zeros(32)], 30.0, acts=False
        ),
        Process("free diffusion, 20 dimensions", np.zeros(20), 0.0, acts=False),
    ]


@dataclass
class SimulatedRuns:
    """What is known of all repetitions of a process; index e is the end of an epoch, from 0."""

    process: Process
    epochs: NDArray[np.int64]
    """Steps at the ends of epochs, the first one 0."""
    excess: Array
    """τ at these steps; nan if there is no stationary state."""
    positions: NDArray[np.float32]
    """Sketches at the ends of epochs (repetitions, epochs, numbers that are not always zero)."""
    potential: Array
    """Φ with Σ(L − R) = Φ_s − Φ_T, at the ends of epochs (repetitions, epochs)."""
    right: Array
    """ΣR."""
    level: Array
    """Mean of 2(f − f*) over all repetitions, at the ends of epochs."""

    @property
    def relaxed(self) -> float:
        """The step at which τ has fallen to its bound."""
        return float(self.epochs[np.argmax(self.excess <= EARLY)])

    def trace(self, epoch: int, rows: NDArray[np.intp]) -> Array:
        """Return positions as a rule holds them that follows at the ends of epochs."""
        index = np.arange(0, epoch + 1, stride(epoch))
        return self.positions[rows][:, index].astype(np.float64)


def stride(epoch: int) -> int:
    """Return the epochs between two records of a trace: it doubles when the store is full."""
    found = 1
    while epoch // found >= CAPACITY:
        found *= 2
    return found


def sketch_matrix(dimensions: int) -> Array:
    """Return the matrix of the monitor's own sketch for one tensor, (dimensions, WIDTH)."""
    tensor = torch.zeros(dimensions, dtype=torch.float64)
    sketch = Sketch([tensor], Layout([tensor]))
    rows = []
    for i in range(dimensions):
        tensor.zero_()[i] = 1.0
        rows.append(sketch([1.0], torch.device("cpu")).numpy())
    matrix = np.array(rows).reshape(dimensions, WIDTH)
    return matrix[:, np.abs(matrix).sum(0) > 0]


def simulate(process: Process, repetitions: int, rng: np.random.Generator) -> SimulatedRuns:
    """Run all repetitions, at a learning rate of 1.

    Args:
        process: The process.
        repetitions: Their number.
        rng: Source of the noise.
    """
    h, mu = process.curvatures, process.momentum
    sigma, relaxation = np.sqrt(process.variances), process.relaxation
    x, second = _start(process, sigma, repetitions, rng)
    v = np.zeros_like(x)
    theta_star = np.zeros(len(h))
    theta_star[-1] = process.minimum * sigma[-1]
    theta_star[0] += process.bounce * sigma[0] / 2
    drift = np.zeros(len(h))
    drift[0] = process.drift * sigma[0] / relaxation
    length = max(1, round(process.epoch * relaxation))
    draw = _noise(process, repetitions, rng, length)
    total = int(process.horizon * relaxation) // length * length
    epochs = np.arange(0, total + 1, length)
    matrix = sketch_matrix(len(h)) / np.sqrt(2 / (1 - mu))
    positions = np.empty((repetitions, len(epochs), matrix.shape[1]), np.float32)
    potential, rights = np.zeros((2, repetitions, len(epochs)))
    right, level, within = np.zeros(repetitions), np.zeros(len(epochs)), np.zeros(len(epochs))
    origin, moments = x, _Moments(process, second)
    excess = np.full(len(epochs), np.nan)
    for step in range(total + 1):
        place = x + theta_star + drift * step
        e, position = divmod(step, length)
        if position == 0:
            positions[:, e] = (place - theta_star) @ matrix
            potential[:, e] = (1 - mu) * _square(place) / 2 + mu * (place * v).sum(1)
            rights[:, e], excess[e] = right, moments.excess
            level[e] = (h * x * x).sum(1).mean()
        if step == total:
            break
        within[e] += (h * x * x).sum(1).mean() / length
        v = mu * v - (h * x + draw(step, x))
        right += (1 + mu) / 2 * _square(v)
        x = x + v - drift
        moments.step()
    if not process.acts:
        excess[:] = np.nan
    elif process.noise == "reshuffled":
        # The noise of whole epochs cancels, so its mean effect varies within an epoch. The way of
        # the mean is exact, and the variance, which starts at zero, is left out: an upper bound.
        floor = within[len(epochs) // 2 : -1].mean()
        way = (origin**2).mean(0) * (1 - h) ** (2 * epochs[:, None])
        excess[:] = way @ h / floor
    return SimulatedRuns(process, epochs, excess, positions, potential, rights, level)


class _Moments:
    """Second moments of each direction, exactly, and the excess of the mean loss."""

    def __init__(self, process: Process, second: Array) -> None:
        self._h, self._mu = process.curvatures, process.momentum
        self._multiplicative = process.noise == "multiplicative"
        curved = self._h > 0
        self._floor = (1 / ((1 - self._mu) * (2 - self._h / (1 + self._mu))))[curved].sum()
        self._xx = second
        self._xv, self._vv = np.zeros((2, len(self._h)))

    @property
    def excess(self) -> float:
        level = (self._h * self._xx).sum()
        floor = self._floor / (1 - _MULTIPLICATIVE) if self._multiplicative else self._floor
        return level / floor - 1 if floor else np.nan

    def step(self) -> None:
        h, mu = self._h, self._mu
        noise = 1.0
        if self._multiplicative:
            noise = 1 + _MULTIPLICATIVE * (h * self._xx).sum() / self._floor
        vv = mu**2 * self._vv - 2 * mu * h * self._xv + h**2 * self._xx + noise
        along = mu * self._xv - h * self._xx
        self._xx = self._xx + 2 * along + vv
        self._xv, self._vv = along + vv, vv


def _start(
    process: Process, sigma: Array, repetitions: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Return θ − θ*, and the mean of (θ − θ*)²."""
    shape = (repetitions, len(sigma))
    if process.start is None:
        second = 2 * sigma**2
        x = rng.standard_normal(shape) * np.sqrt(second)
    else:
        second = np.broadcast_to(process.start, sigma.shape) * sigma**2
        x = np.sqrt(second) * rng.choice([-1.0, 1.0], shape)
        if process.bounce:
            x[:, 0] = -process.bounce * sigma[0]
            second = (x**2).mean(0)
    return x, second


def _noise(
    process: Process, repetitions: int, rng: np.random.Generator, length: int
) -> Callable[[int, Array], Array]:
    """Return a function of the step and θ − θ* that draws noise of unit variance."""
    h = process.curvatures
    shape = (repetitions, len(h))
    if process.noise == "heavy":
        return lambda step, x: rng.standard_t(3, shape) / np.sqrt(3)
    if process.noise == "multiplicative":
        floor = (1 / (2 - h)).sum()

        def scaled(step: int, x: Array) -> Array:
            level = (h * x * x).sum(1, keepdims=True) / floor
            return rng.standard_normal(shape) * np.sqrt(1 + _MULTIPLICATIVE * level)

        return scaled
    if process.noise == "reshuffled":
        vectors = rng.standard_normal((length, len(h)))
        basis = np.sqrt(length) * np.linalg.qr(vectors - vectors.mean(0))[0]
        order = np.zeros((repetitions, length), int)

        def reshuffled(step: int, x: Array) -> Array:
            if step % length == 0:
                order[:] = rng.permuted(np.tile(np.arange(length), (repetitions, 1)), axis=1)
            return basis[order[:, step % length]]

        return reshuffled
    return lambda step, x: rng.standard_normal(shape, dtype=np.float32).astype(np.float64)


def _square(x: Array) -> Array:
    return np.einsum("ri,ri->r", x, x)
