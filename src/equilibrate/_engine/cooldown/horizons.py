"""Which mean of the parameters forecasts which cooldown, and what its samples forecast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from equilibrate._arguments import check_steps, lies_between
from equilibrate._engine.optimizer.parameters import all_parameters
from equilibrate.estimates import Estimate
from equilibrate.gains import Forecast, average
from equilibrate.solvable.cooldown import Match, exponential_match

Pairs = Iterable[tuple[Tensor, Tensor]]
WINDOW = 8
"""Horizons that are averaged over at most."""
_FEWEST = 8
"""Samples without which there is no error bar."""
_DEFAULT = (150, 400)
"""Horizons, if none are given."""
_HALF_LIFE = 0.242
"""Half-life of the mean that fits a cooldown, relative to its length, if it moves every step."""


def own_means(horizons: Sequence[int] | None, every: int) -> dict[int, Match]:
    """Return how to read each horizon from a mean of its own.

    Raises:
        ValueError: If it is not a sequence, there is none, or one is too short.
    """
    if isinstance(horizons, str) or not isinstance(horizons, Iterable | None):
        raise ValueError(f"horizons must be a sequence, got {horizons!r}: pass ({horizons},)")
    if horizons is None and every > min(_DEFAULT) // 4:
        raise ValueError(
            f"every must be at most {min(_DEFAULT) // 4} with the default horizons {_DEFAULT}, got "
            f"{every}: pass a smaller one, or horizons of at least {4 * every} steps to the "
            "Forecaster"
        )
    given = _DEFAULT if horizons is None else horizons
    name = f"each of horizons (4 × every = {4 * every} steps or more)"
    chosen = [check_steps(name, horizon, least=4 * every) for horizon in given]
    if not chosen:
        raise ValueError("horizons is empty: pass lengths of cooldowns, such as (150, 400)")
    return {horizon: exponential_match(horizon, every) for horizon in chosen}


def given_mean(horizons: Sequence[int] | None, half_life: float | None) -> dict[int, Match]:
    """Return which cooldown a mean of somebody else forecasts, and how to read it.

    It moves at every step, and includes the parameters before the step that is sampled.

    Raises:
        ValueError: If horizons are given too, or the half-life is not.
    """
    if horizons is not None:
        raise ValueError("horizons and averaged exclude each other: half_life determines the one")
    if half_life is None or not lies_between(half_life, 0, math.inf) or half_life < 2:
        raise ValueError(
            "half_life must be given with averaged, at least 2 steps: log(2)/(1 − decay) for an "
            f"average with a decay close to 1, got {half_life!r}"
        )
    horizon = round(half_life / _HALF_LIFE)
    match = exponential_match(horizon)
    return {horizon: Match(half_life, match.factor * 2 ** (1 / half_life), match.error)}


def pair_up(averaged: AveragedModel | Pairs, optimizer: Optimizer) -> dict[int, Tensor]:
    """Return the average of each parameter of the optimizer by its identity.

    Raises:
        TypeError: If `averaged` is neither a model nor pairs.
        ValueError: If a parameter has no average, or one of another shape or on another device.
    """
    groups = optimizer.param_groups
    params = all_parameters(optimizer)
    if isinstance(averaged, AveragedModel):
        names = [name for group in groups for name in group.get("param_names", [])]
        if len(names) == len(params):
            own = dict(averaged.module.named_parameters())
            pairs = [(p, own[name]) for p, name in zip(params, names, strict=True) if name in own]
        elif len(groups) == 1 and len(own := list(averaged.module.parameters())) == len(params):
            pairs = list(zip(params, own, strict=True))
        else:
            raise ValueError(
                "the parameters of averaged cannot be told apart, since the optimizer has several "
                "groups or not all parameters, and no names: pass averaged=zip(model.parameters(), "
                "averaged.module.parameters())"
            )
    else:
        try:
            pairs = [(p, m) for p, m in averaged]
        except (TypeError, ValueError) as error:
            raise TypeError(
                "averaged must be an AveragedModel, or pairs of a parameter and its average, got "
                f"{type(averaged).__name__}: pass zip(model.parameters(), ema.parameters())"
            ) from error
    found = {id(p): m for p, m in pairs}
    for p in params:
        if id(p) not in found or found[id(p)].shape != p.shape:
            raise ValueError(
                f"averaged has no average for a parameter of shape {tuple(p.shape)}: pass "
                "averaged=zip(model.parameters(), averaged.module.parameters())"
            )
        if found[id(p)].device != p.device:
            raise ValueError(
                f"averaged is on {found[id(p)].device}, its parameters on {p.device}: keep both on "
                "one device"
            )
    return {id(p): found[id(p)] for p in params}


def forecast(
    horizon: int,
    match: Match,
    now: int,
    start: int,
    every: int,
    steps: Sequence[int],
    samples: Tensor,
) -> Forecast:
    """Return the forecast of one horizon.

    Args:
        horizon: Length of the cooldown.
        match: How the samples relate to its gain.
        now: Steps so far.
        start: Step since which the samples tell of the present.
        every: Steps from one sample to the next.
        steps: At which step each sample was taken.
        samples: (θ − m)·g of each, and whether the step was made.
    """

    def none(reason: str) -> Forecast:
        return Forecast(horizon, Estimate(math.nan, math.nan), now, reason)

    seen = now - start
    if seen < (needed := max(horizon + _FEWEST * every, 2 * _FEWEST * every)):
        return none(f"{seen} of {needed} steps seen at this learning rate")
    first = start + max(horizon, seen // 2, seen - WINDOW * horizon)
    chosen = samples[[i for i, step in enumerate(steps) if step >= first]]
    values = match.factor / 2 * chosen[chosen[:, 1] > 0.5, 0]
    if len(values) < _FEWEST:
        return none("gradient scaling has skipped almost every step")
    if not values.isfinite().all():
        return none("gradients were not finite")
    if not values.any():
        return none("no parameter had a gradient other than zero")
    return Forecast(horizon, average(values.tolist()), now)
