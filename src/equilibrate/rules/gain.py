"""Lower the learning rate when lowering gains more than staying."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from equilibrate._arguments import check_steps, lies_between
from equilibrate.estimates import Estimate, student_quantile
from equilibrate.gains import Forecast, Losses
from equilibrate.readings import Reading
from equilibrate.rules.base import Verdict

_LAG = 1 / 6
"""By how much a loss that falls by s in a step lowers a forecast, in units of s times the horizon:
the mean of the parameters lags a third of the horizon behind, and ½(θ − m)·g is −½s times that."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Lower when what lowering would gain outweighs what staying gains.

    Lowering the learning rate η to yη removes the share 1 − y of the noise of the loss, N, once,
    within about the horizon of the forecast. It also slows all further progress down by the factor
    y. Staying gains s a step for as long as the loss falls at this rate, say for T steps. So
    lowering is better if (1−y)N + ysT > sT, which is

        N > sT

    whatever y is. N is the forecast of a `Forecaster`, corrected for the progress within its lag. s
    is the slope of the losses handed to `scheduler.step(loss)`, over the later half of the steps
    since the last lowering. T is the rest of the training if its length is known. If it is not, the
    training is taken to be half done: T is the number of steps so far. At a noise floor s vanishes
    and the rule acts. A loss that falls as a power of time keeps sT at a fixed share of what is
    left to gain, and the rule waits.

    The rule acts if N − sT is positive beyond its error bar. Where both are equal it acts at a
    check with a probability of 1 − `confidence`.

    Args:
        ahead: T, in units of the steps so far.
        total_steps: Number of optimizer steps of the whole training, counted from the creation of
            the scheduler or its monitor. T is then what is left of it. A scheduler with a
            `cooldown_end` sets it.
        confidence: Probability with which N must exceed sT.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> rule = Gain()
        >>> forecast = Forecast(400, Estimate(0.076, 0.002), step=4000)
        >>> steps = tuple(range(100, 4100, 100))
        >>> flat = Losses(0, steps, tuple(0.3 + 0.001 * (-1) ** k for k in range(40)))
        >>> reading = Reading(4000, 2000, 1.0, 1.0, 0.1, forecasts=(forecast,), losses=flat)
        >>> print(rule.judge(reading).reason)
        lowering would gain 0.0760 ± 0.0039 once, staying for 4,000 more steps 0.0006 ± 0.0034
    """

    ahead: float = 1.0
    total_steps: int | None = None
    confidence: float = 0.975
    needs: ClassVar[frozenset[str]] = frozenset({"forecasts", "losses"})

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: If one is out of range.
        """
        if not lies_between(self.ahead, 0, math.inf):
            raise ValueError(f"ahead must be a positive number such as 1, got {self.ahead!r}")
        if self.total_steps is not None:
            object.__setattr__(self, "total_steps", check_steps("total_steps", self.total_steps))
        if not lies_between(self.confidence, 0.5, 1):
            raise ValueError(
                f"confidence must lie between 0.5 and 1, such as 0.975, got {self.confidence!r}"
            )

    def judge(self, reading: Reading) -> Verdict:
        """Return whether lowering gains more than staying.

        Args:
            reading: A reading with forecasts and losses.

        Returns:
            The verdict. Without a forecast, or without losses, it is to wait.
        """
        losses = reading.losses
        if losses is None or not losses.steps:
            return Verdict(
                False,
                "no loss was handed over: call scheduler.step(loss) with the mean training loss "
                "since the last call",
            )
        defined = [f for f in reading.forecasts or () if f.undefined is None]
        if not defined:
            first = min(reading.forecasts or (), key=lambda f: f.horizon, default="no forecast")
            return Verdict(False, f"not yet: {first}")
        return self._compare(max(defined, key=lambda f: f.horizon), losses)

    def _compare(self, forecast: Forecast, losses: Losses) -> Verdict:
        fall = losses.fall(losses.window(forecast.horizon))
        if math.isnan(fall.value):
            return Verdict(False, f"not yet: {fall.method}")
        left = self._left(losses)
        staying = fall.scaled(left)
        noise = forecast.gain.shifted(_LAG * forecast.horizon * max(0.0, fall.value))
        what = f"lowering would gain {noise} once, staying for {left:,.0f} more steps {staying}"
        lead = noise.value - staying.value
        needed = math.hypot(self._margin(noise), self._margin(staying))
        if lead > needed:
            return Verdict(True, what)
        return Verdict(False, f"not yet: {what}")

    def _left(self, losses: Losses) -> float:
        """Return T, the number of steps for which staying is extrapolated."""
        if self.total_steps is None:
            return self.ahead * losses.steps[-1]
        return max(0, self.total_steps - losses.steps[-1])

    def _margin(self, estimate: Estimate) -> float:
        """Return the one-sided error bar of an estimate."""
        return student_quantile(2 * self.confidence - 1, estimate.dof) * estimate.stderr
