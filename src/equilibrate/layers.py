"""Which layers have equilibrated: a reading, its verdict and its rotation for each parameter.

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
from equilibrate.monitor import Monitor
from equilibrate.readings import Reading
from equilibrate.rules import Rule, Threshold, Verdict
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
    verdict: Verdict
    """Whether it has equilibrated, and why."""
    rotation: Rotation
    """By how much a step turns it, and whether it is scale-invariant."""

    @property
    def equilibrated(self) -> bool:
        """Whether the layer has equilibrated; if it is scale-invariant, whether its norm has."""
        return self.verdict.act

    @property
    def state(self) -> str:
        """The verdict in a word or two, for people to read.

        A norm falls if L > R and grows if L < R, because L − R is the decrease of |θ|² in a step,
        up to a factor. It is not resolved if the 95 % interval of the residual contains zero.
        """
        if self.reading.undefined is not None:
            return "undefined"
        if self.equilibrated:
            return "equilibrated"
        residual = self.reading.residual
        if abs(residual) <= self.reading.margin:
            return "not resolved"
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
    """The layers, in the order of the names given to the monitor."""
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


def read(monitor: Monitor, rule: Rule | None = None, *, budget: float = math.inf) -> LayerTable:
    """Read every layer of a model.

    It waits for the device. If parameters are sharded over processes, every process must call it.

    Args:
        monitor: A monitor with named parameters.
        rule: What decides whether a layer has equilibrated. Default: `rules.Threshold()`.
        budget: Steps of the training, or what remains of them. The table says how many layers
            relax more slowly.

    Returns:
        The table.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
        >>> monitor = Monitor(optimizer, named_parameters=model.named_parameters())
        >>> for _ in range(100):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 3)).square().mean().backward()
        ...     optimizer.step()
        >>> table = read(monitor, budget=100)
        >>> [layer.name for layer in table.layers], table.scale_invariant
        (['weight', 'bias'], ())
        >>> [(layer.name, round(layer.rotation.relaxation)) for layer in table.too_slow]
        [('weight', 500), ('bias', 500)]
    """
    rule = rule if rule is not None else Threshold()
    rotations = monitor.parameter_rotations()
    layers: list[Layer] = []
    for name, reading in monitor.parameter_readings().items():
        balance = norm_balance(reading, rotations[name])
        layers.append(Layer(name, balance, rule.judge(balance), rotations[name]))
    return LayerTable(tuple(layers), monitor.step, budget)


def by_name(monitor: Monitor, rule: Rule) -> dict[str, Layer]:
    """Read every layer of a model whose scheduler has a rule.

    Args:
        monitor: A monitor with named parameters.
        rule: The rule of the scheduler. Layers are judged with its threshold if it is a
            `Threshold`; other rules judge a whole model, and layers get the default threshold.

    Returns:
        The layers by name.
    """
    table = read(monitor, rule if isinstance(rule, Threshold) else None)
    return {layer.name: layer for layer in table.layers}


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
    if math.isfinite(reading.margin):
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
