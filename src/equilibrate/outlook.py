r"""Whether a threshold on FDR1 can be reached, and how long that would take.

Two things keep |L/R − 1| above a threshold. One is noise: the error of a reading falls as 1/n with
the number n of steps in the window. The other is a drift of the norm N = |θ|². Where the loss does
not hold the norm, as in layers before a normalisation, only weight decay λ does. A step then
changes N by −2ηλN + ⟨Δ²⟩, and the residual is proportional to the distance from equilibrium:

- for SGD ⟨Δ²⟩ is proportional to 1/N. N² relaxes at the rate 4ηλ a step, with η(1−ν)/(1−μ) in place
  of η if there is momentum;
- for optimizers whose step does not depend on the scale of the gradient, such as AdamW, ⟨Δ²⟩ is
  constant and N relaxes at the rate 2ηλ.

With a relaxation time τ the residual is proportional to e^(−t/τ), and its mean over the later half
of t steps to (2τ/t)(e^(−t/2τ) − e^(−t/τ)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equilibrate.readings import Reading, check_threshold


@dataclass(frozen=True, slots=True)
class Decay:
    """How weight decay acts on one parameter group."""

    rate: float
    """lr × weight_decay, over 1 − momentum if there is momentum; nan if it is not known."""
    relaxation: float
    """Steps in which the norm of a scale-invariant layer relaxes; infinite without weight decay,
    nan if it is not known."""
    formula: str = "lr × weight_decay"
    """What `rate` is."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Whether |L/R − 1| can fall below a threshold, in numbers and in a sentence.

    Print it to read the sentence.
    """

    reading: Reading
    """The reading from which it was made."""
    threshold: float
    """The threshold."""
    remaining: int | None
    """Steps left in this run; None if not given."""
    relaxation: float
    """Steps in which the norm of a scale-invariant layer relaxes, in the slowest parameter group
    that has weight decay. Infinite if none has, nan if it is not known for this optimizer."""
    noise_steps: float
    """Further steps until the standard error is at the threshold; zero if it is below, nan if there
    is no standard error yet."""
    drift_steps: float
    """Further steps until the drift is below the threshold if the norm relaxes in `relaxation`
    steps. Zero if |L/R − 1| is below the threshold or within its error bar; nan if not known."""
    reason: str
    """What is to be expected, in one sentence with numbers."""

    @property
    def steps(self) -> float:
        """Further steps until noise and drift are both below the threshold; nan if not known."""
        both = (self.noise_steps, self.drift_steps)
        return math.nan if any(map(math.isnan, both)) else max(both)

    @property
    def reachable(self) -> bool | None:
        """Whether that is within `remaining` steps; None if it is not known."""
        if self.remaining is None or math.isnan(self.steps):
            return None
        return self.steps <= self.remaining

    def __str__(self) -> str:
        return self.reason


def look_ahead(
    reading: Reading,
    decays: Sequence[Decay],
    *,
    threshold: float,
    since: int,
    remaining: int | None = None,
) -> Outlook:
    """Tell whether a threshold can be reached, as `Monitor.outlook` does.

    Args:
        reading: A reading of FDR1 over the later half of the steps.
        decays: How weight decay acts on each parameter group.
        threshold: The bound on |L/R − 1|.
        since: Steps since the averaging window was restarted.
        remaining: Steps left in this run.

    Returns:
        The outlook.

    Raises:
        ValueError: If `threshold` is not a positive number, or `remaining` is negative.

    Example:
        >>> reading = Reading(8000, 4000, left=0.3, right=1.0, lr=1e-3, stderr=0.02, margin=0.04)
        >>> decay = Decay(rate=1e-5, relaxation=50_000)
        >>> print(look_ahead(reading, [decay], threshold=0.01, since=8000, remaining=20_000))
        |L/R − 1| = 0.7 ≥ 0.01; at lr × weight_decay = 1e-05 the norm relaxes in 50,000 steps: it \
will not equilibrate in this run
    """
    check_threshold(threshold)
    if remaining is not None and not remaining >= 0:
        raise ValueError(f"remaining must be a number of steps ≥ 0, got {remaining}")
    slowest = _slowest(decays)
    drifts = not (abs(reading.residual) < threshold or abs(reading.residual) <= reading.margin)
    noise = further_steps(reading, threshold)
    drift = _relaxing(abs(reading.residual) / threshold, since, slowest.relaxation) if drifts else 0
    sentence = [_about_reading(reading, threshold, noise, drifts=drifts)]
    if reading.undefined is None:
        sentence.append(_about_norm(slowest, decays, drift, since, remaining))
    return Outlook(
        reading,
        threshold,
        remaining,
        slowest.relaxation,
        noise,
        drift,
        "; ".join(part for part in sentence if part),
    )


def further_steps(reading: Reading, threshold: float) -> float:
    """Return how many steps later the standard error will have fallen to a threshold.

    The window is the later half of the steps, so it grows by one step in two.

    Args:
        reading: A reading of a half-running window.
        threshold: The bound on its standard error.

    Returns:
        A whole number of steps, zero if the error is below; nan if it is not known.

    Example:
        >>> reading = Reading(400, 200, left=1.02, right=1.0, lr=0.1, stderr=0.04)
        >>> further_steps(reading, 0.01)
        1200
    """
    steps = reading.steps_for(threshold)
    return steps if math.isnan(steps) else 2 * max(0, steps - reading.count)


def in_words(steps: float) -> str:
    """Return a number of steps to two digits, for people to read.

    Args:
        steps: A number of steps.

    Example:
        >>> in_words(8957), in_words(1_234_567), in_words(42)
        ('9,000', '1,200,000', '42')
    """
    digits = max(0, math.floor(math.log10(max(steps, 1))) - 1)
    return f"{round(steps, -digits):,.0f}"


def _slowest(decays: Sequence[Decay]) -> Decay:
    """Return the slowest group that has weight decay; one without, or unknown, if there is none."""
    if unknown := [decay for decay in decays if math.isnan(decay.relaxation)]:
        return unknown[0]
    finite = [decay for decay in decays if math.isfinite(decay.relaxation)]
    return max(finite or decays, key=lambda decay: decay.relaxation)


def _relaxing(ratio: float, since: int, relaxation: float) -> float:
    """Return after how many further steps a relaxing residual has fallen by a ratio.

    The logarithm of the mean over the window falls by at least half a step's time, t/(2τ), so the
    solution lies below t + 2τ log(ratio).
    """
    if not (math.isfinite(relaxation) and math.isfinite(ratio)):
        return math.nan
    begin = max(since, 1) / relaxation
    low, high = begin, begin + 2 * math.log(ratio)
    goal = _log_mean(begin) - math.log(ratio)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_mean(middle) > goal else (low, middle)
    return math.ceil((high - begin) * relaxation)


def _log_mean(x: float) -> float:
    """Return log[(2/x)(e^(−x/2) − e^(−x))]."""
    return -x / 2 + math.log(-math.expm1(-x / 2) / (x / 2))


def _about_reading(reading: Reading, threshold: float, noise: float, *, drifts: bool) -> str:
    if reading.undefined is not None:
        return f"undefined: {reading.undefined}"
    size = abs(reading.residual)
    if drifts:
        return f"|L/R − 1| = {size:.3g} ≥ {threshold:g}"
    if not noise:
        return f"|L/R − 1| = {size:.3g}, with a standard error below {threshold:g}"
    if math.isnan(noise):
        return f"|L/R − 1| = {size:.3g} < {threshold:g}, with too few measurements for an error bar"
    return (
        f"the standard error, {reading.stderr:.2g}, falls to {threshold:g} after about "
        f"{in_words(noise)} more steps"
    )


def _about_norm(
    slowest: Decay, decays: Sequence[Decay], drift: float, since: int, remaining: int | None
) -> str:
    relaxation = slowest.relaxation
    if math.isnan(relaxation):
        return "the time in which the norm relaxes is not known for this optimizer"
    if math.isinf(relaxation):
        return "no weight decay: the norm of a scale-invariant layer never stops growing"
    where = f"group {decays.index(slowest)}: " if len(set(decays)) > 1 else ""
    text = (
        f"{where}at {slowest.formula} = {slowest.rate:.2g} the norm relaxes in "
        f"{in_words(relaxation)} steps"
    )
    too_long = remaining is not None and relaxation > since + remaining
    if not drift:
        return f"{text}, more than this run has" if too_long else text
    if too_long:
        return f"{text}: it will not equilibrate in this run"
    return f"{text}: about {in_words(drift)} more are needed"
