"""Which layers have equilibrated: a reading and its rotation for each parameter.

A *layer* is one named parameter. FDR1 holds for each of them by itself, with its own learning rate,
momentum and dampening. Weights whose norm the loss does not depend on are recognised
(`scale_invariance`); their line speaks of the norm alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from equilibrate.estimates import Estimate
from equilibrate.readings import Reading
from equilibrate.scale_invariance import Rotation

_COLUMNS = ("layer", "residual", "state", "scale-invariant", "angular step", "relaxation")


@dataclass(frozen=True, slots=True)
class Layer:
    """What is known of one parameter."""

    OF_ROTATION: ClassVar = ("scale_invariant", "angular_step", "equilibrium", "relaxation")
    """Names in its row that matter for scale-invariant weights."""

    name: str
    """Its name."""
    reading: Reading
    """FDR1 of the parameter, or for a scale-invariant weight the balance of its norm; see
    `norm_balance`."""
    rotation: Rotation
    """By how much a step turns it, and whether it is scale-invariant."""
    threshold: float = 0.01
    """It has equilibrated if |L/R − 1| and its standard error are below it."""

    @property
    def equilibrated(self) -> bool:
        """Whether the layer has equilibrated; if it is scale-invariant, whether its norm has.

        It has not if the residual is below the threshold, but its standard error is above it: by
        chance alone it will be below now and then.
        """
        is_noise = self.reading.stderr > self.threshold
        return abs(self.reading.residual) < self.threshold and not is_noise

    @property
    def state(self) -> str:
        """What is known in a word or two, for people to read.

        A norm falls if L > R and grows if L < R, because L − R is the decrease of |θ|² in a step,
        up to a factor. Which of them is not known yet while the 95 % interval of the residual
        contains zero, and neither is it whether the layer has equilibrated.
        """
        if self.reading.undefined is not None:
            return "undefined"
        if self.equilibrated:
            return "equilibrated"
        residual = self.reading.residual
        if abs(residual) <= self.reading.margin:
            return "not known yet"
        return "norm falls" if residual * math.copysign(1, self.reading.right) > 0 else "norm grows"

    def row(self) -> dict[str, Any]:
        """Return the numbers of the layer, for a record."""
        reading = self.reading
        return {
            "left": reading.left,
            "right": reading.right,
            "residual": reading.residual,
            "stderr": reading.stderr,
            "margin": reading.margin,
            "state": self.state,
            **{name: getattr(self.rotation, name) for name in self.OF_ROTATION},
        }


@dataclass(frozen=True, slots=True)
class LayerTable:
    """All layers of a model at one moment. Print it to read it."""

    layers: tuple[Layer, ...]
    """The layers, in the order of the names of the model."""
    step: int
    """Number of steps so far."""
    budget: float = math.inf
    """Steps within which a norm should relax."""

    @property
    def equilibrated(self) -> tuple[str, ...]:
        """Names of the layers that have equilibrated."""
        return tuple(layer.name for layer in self.layers if layer.equilibrated)

    @property
    def scale_invariant(self) -> tuple[str, ...]:
        """Names of the scale-invariant layers."""
        return tuple(layer.name for layer in self.layers if layer.rotation.scale_invariant)

    @property
    def too_slow(self) -> tuple[Layer, ...]:
        """The layers whose norm takes longer than the budget to relax.

        For a layer that is not scale-invariant, weight decay alone would take that long.
        """
        return tuple(layer for layer in self.layers if layer.rotation.relaxation > self.budget)

    def row(self) -> dict[str, Any]:
        """Return the numbers of all layers, for a record."""
        return {"step": self.step, "layers": {layer.name: layer.row() for layer in self.layers}}

    def __str__(self) -> str:
        count = max((layer.reading.count for layer in self.layers), default=0)
        lines = [
            f"step {self.step:,}, averages over {count:,} steps: "
            f"{len(self.equilibrated)} of {len(self.layers)} layers equilibrated"
        ]
        lines += _aligned([_COLUMNS, *map(_cells, self.layers)])
        if self.too_slow:
            slowest = max(self.too_slow, key=lambda layer: layer.rotation.relaxation)
            lines.append(
                f"{len(self.too_slow)} of them may take longer than the budget of "
                f"{self.budget:,.0f} steps to equilibrate: {slowest.name} relaxes in "
                f"{_steps(slowest.rotation.relaxation)}"
            )
        return "\n".join(lines)


def norm_balance(reading: Reading, rotation: Rotation) -> Reading:
    """Return the balance of the norm of a scale-invariant weight; other readings as they are.

    The left side is λ⟨N⟩, what weight decay takes from the norm, and the right side what the
    gradient adds to it: R − (L − λ⟨N⟩). For SGD this is FDR1 itself, since L = λ⟨N⟩. For AdamW and
    Nesterov momentum, where R has Δ² alone, the right side also has the correlation of successive
    steps, which for AdamW with β₁ = 0.9 adds 19 times as much to the norm. In units of R the same
    drift would be a residual 19 times as large.

    Args:
        reading: The reading of a parameter.
        rotation: Its rotation.

    Returns:
        The reading to judge.

    Example:
        >>> reading = Reading(step=100, count=50, left=2.0, right=1.0, lr=0.01)
        >>> turned = Rotation(1e-3, 8, 0.02, equilibrium=0.02, decay=20.0, relaxation=100)
        >>> norm_balance(reading, turned)
        Reading(step=100, count=50, left=20, right=19, lr=0.01, residual=0.05263)
    """
    if not rotation.scale_invariant or not math.isfinite(rotation.decay):
        return reading
    right = rotation.decay - reading.difference
    units = abs(reading.right / right) if right else math.nan
    return replace(
        reading,
        left=rotation.decay,
        right=right,
        stderr=units * reading.stderr,
        margin=units * reading.margin,
    )


def _cells(layer: Layer) -> tuple[str, ...]:
    rotation = layer.rotation
    invariant = {True: "yes", False: "no", None: "?"}[rotation.scale_invariant]
    turn = "–"
    if rotation.scale_invariant and math.isfinite(rotation.angular_step):
        turn = f"{rotation.angular_step:.3g}"
        if math.isfinite(rotation.equilibrium):
            turn += f" of {rotation.equilibrium:.3g}"
    reading = layer.reading
    number = "–" if math.isnan(reading.residual) else f"{reading.residual:+.3g}"
    # Of a drift the margin is no error: the steadiest one has a margin of 0.95 times itself.
    if math.isfinite(reading.margin) and not layer.state.startswith("norm"):
        number = str(Estimate(reading.residual, reading.stderr, margin=reading.margin))
    return layer.name, number, layer.state, invariant, turn, _steps(rotation.relaxation)


def _steps(relaxation: float) -> str:
    if math.isnan(relaxation):
        return "–"
    return f"{relaxation:,.0f} steps" if math.isfinite(relaxation) else "never: no weight decay"


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows of text with the columns aligned.

    >>> _aligned([("a", "bc"), ("long", "d")])
    ['a     bc', 'long  d']
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]
