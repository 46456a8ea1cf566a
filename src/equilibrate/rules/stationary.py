"""Lower the learning rate when the parameters have lost the memory of where they started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibrate.readings import Reading
from equilibrate.rules.base import Verdict
from equilibrate.stationarity import LEAST, Assessment, assess


@dataclass(frozen=True, slots=True)
class Stationary:
    """Act when the parameters have lost the memory of where they started, and do not drift.

    The rule looks at the positions of the parameters since the last restart, not at their norm, so
    a weight norm that turns around does not mislead it. They are recorded at the ends of epochs:
    call `scheduler.step()` there, or set `min_steps` to the length of an epoch. All of this must
    hold, now and at two earlier moments back to 1/`persistence` of the steps, worked out from the
    same trace:

    - the steps since the restart are at least `relaxations` relaxation times;
    - the restoring force is `significance` standard errors strong, a test for a unit root that
      protects runs with few directions;
    - the share of the noise that still moves the parameters away is below `diffusing`, allowing
      one standard error. Parameters that diffuse freely, or follow a minimum that drifts, are
      not stationary.

    The defaults act too early (mean loss more than 5 % of the noise floor above its stationary
    value) in less than 1 % of runs on the solvable processes of `benchmarks/decisions.py`.

    Args:
        relaxations: Relaxation times that must have passed.
        significance: Standard errors by which the restoring force must differ from zero.
        diffusing: Share of the noise that may still be moving the parameters away.
        persistence: Factor of the steps over which the conditions must have held.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        >>> import torch, equilibrate as eq
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scheduler = eq.FDRScheduler(optimizer, rule=Stationary(), factor=0.5)
        >>> scheduler.monitor.traces
        True
    """

    needs: ClassVar[frozenset[str]] = frozenset({"trace"})

    relaxations: float = 6.2
    significance: float = 3.2
    diffusing: float = 0.12
    persistence: float = 1.16

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: If one is out of range.
        """
        for name in ("relaxations", "significance", "diffusing"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        if not 1 <= self.persistence <= 2:
            raise ValueError(f"persistence must lie between 1 and 2, got {self.persistence}")

    def judge(self, reading: Reading) -> Verdict:
        """Return whether the trace of a reading is stationary.

        Args:
            reading: A reading of a monitor that records a trace.

        Returns:
            The verdict, with the numbers that decided.
        """
        trace = reading.trace
        if trace is None:
            return Verdict(False, "undefined: no trace; create the monitor with trace=True")
        if len(trace) <= self.shortest:
            return Verdict(False, f"not yet: {len(trace)} of {self.shortest + 1} positions")
        if reading.undefined is not None:
            return Verdict(False, f"undefined: {reading.undefined}")
        moved = np.ptp(trace.positions, axis=0).max()
        if not (moved > 0 and math.isfinite(moved)):
            return Verdict(False, "undefined: the parameters do not move, or are not finite")
        now = assess(trace.positions)
        if self.satisfied(trace.positions).item():
            return Verdict(
                True,
                f"stationary for {now.relaxations:.3g} relaxation times: "
                f"{now.diffusing:.2g} ± {now.error:.1g} of the noise still diffuses",
            )
        return Verdict(False, self._reason(now))

    @property
    def shortest(self) -> int:
        """Intervals that a trace must have to be judged."""
        return math.ceil(LEAST * self.persistence)

    def moments(self, intervals: int) -> list[int]:
        """Return the moments at which the conditions must hold, the latest one first.

        Args:
            intervals: Intervals of a trace.

        Returns:
            Intervals up to each moment.
        """
        ends = {round(intervals / self.persistence**power) for power in (0, 0.5, 1)}
        return sorted(ends, reverse=True)

    def satisfied(self, positions: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return whether the conditions hold at the end of each trace and at earlier moments.

        Args:
            positions: Positions of shape (…, n, m).

        Returns:
            An array of the shape of the leading axes.
        """
        lead, intervals = positions.shape[:-2], positions.shape[-2] - 1
        x = positions.reshape(-1, *positions.shape[-2:])
        left = np.arange(len(x))
        for end in self.moments(intervals):  # earlier moments only where later ones hold
            left = left[self.holds(assess(x[left, : end + 1]))]
        return np.isin(np.arange(len(x)), left).reshape(lead)

    def holds(self, found: Assessment) -> NDArray[np.bool_]:
        """Return whether the conditions hold at one moment.

        Args:
            found: Assessments of any number of traces.

        Returns:
            An array of the shape of the assessments.
        """
        return (
            (found.relaxations >= self.relaxations)
            & (found.significance >= self.significance)
            & ~self.is_diffusing(found)
        )

    def is_diffusing(self, found: Assessment) -> NDArray[np.bool_]:
        """Return whether a part of the parameters diffuses or drifts.

        Args:
            found: Assessments of any number of traces.

        Returns:
            An array of the shape of the assessments.
        """
        return ~(found.diffusing - found.error < self.diffusing)

    def _reason(self, now: Assessment) -> str:
        times = f"{now.relaxations:.3g} of {self.relaxations:g} relaxation times"
        if now.diffusing - now.error > 1:
            return f"not yet: drifting {now.diffusing:.2g} times as far as by noise alone"
        if self.is_diffusing(now):
            return (
                f"diffusing: {now.diffusing:.2g} ± {now.error:.1g} of the noise moves the "
                f"parameters away, more than {self.diffusing:g}, after {times}"
            )
        if now.relaxations < self.relaxations:
            return f"not yet: {times}"
        if now.significance < self.significance:
            return (
                f"not yet: the restoring force is {now.significance:.2g} of "
                f"{self.significance:g} standard errors"
            )
        return f"not yet: stationary for less than {self.persistence - 1:.0%} of the steps"
