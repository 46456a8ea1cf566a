"""Lower the learning rate when the parameters have lost the memory of where they started."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibrate.monitor.monitor import Monitor
from equilibrate.readings import Reading
from equilibrate.stationarity.statistics import LEAST, Assessment, assess
from equilibrate.stationarity.trace import TraceRecorder


@dataclass(slots=True)
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
        >>> scheduler.rule.positions.shape
        (1, 64)
    """

    relaxations: float = 6.2
    significance: float = 3.2
    diffusing: float = 0.12
    persistence: float = 1.16
    _recorder: TraceRecorder | None = field(default=None, init=False, repr=False, compare=False)

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

    @property
    def positions(self) -> NDArray[np.float64]:
        """Sketches of the parameters since the last restart, of shape (n, 64).

        It waits for the device. If parameters are sharded, every process must ask for it.
        """
        return np.zeros((0, 0)) if self._recorder is None else self._recorder.read()

    def follow(self, monitor: Monitor) -> None:
        """Record where the parameters are; the scheduler calls it.

        Args:
            monitor: The monitor of the scheduler.
        """
        monitor.follow_parameters()
        if self._recorder is None or not self._recorder.fits(monitor):
            self._recorder = TraceRecorder(monitor)
        self._recorder.mark()

    def judge(self, reading: Reading) -> tuple[bool, str]:
        """Return whether the parameters have been stationary, and the numbers that decided.

        Args:
            reading: A reading of the monitor that the rule follows.
        """
        positions = self.positions
        if len(positions) <= self.shortest:
            return False, f"not yet: {len(positions)} of {self.shortest + 1} positions are recorded"
        if reading.undefined is not None:
            return False, f"undefined: {reading.undefined}"
        moved = np.ptp(positions, axis=0).max()
        if not (moved > 0 and math.isfinite(moved)):
            return False, "undefined: the parameters do not move, or are not finite"
        now = assess(positions)
        if not self.satisfied(positions).item():
            return False, self._reason(now)
        return True, (
            f"stationary for {now.relaxations:.3g} relaxation times: "
            f"{now.diffusing:.2g} ± {now.error:.1g} of the noise still diffuses"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded positions, for the state of the scheduler."""
        return {} if self._recorder is None else self._recorder.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], monitor: Monitor) -> None:
        """Restore what `state_dict` returned.

        Args:
            state_dict: The state.
            monitor: The monitor of the scheduler.
        """
        self._recorder = TraceRecorder(monitor)
        self._recorder.load_state_dict(state_dict)

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
            return f"not yet: it drifts {now.diffusing:.2g} times as far as by noise alone"
        if self.is_diffusing(now):
            return (
                f"diffusing: {now.diffusing:.2g} ± {now.error:.1g} of the noise moves the "
                f"parameters away, more than {self.diffusing:g}, after {times}"
            )
        if now.relaxations < self.relaxations:
            return f"not yet: {times} have passed"
        if now.significance < self.significance:
            return (
                f"not yet: the restoring force is {now.significance:.2g} of "
                f"{self.significance:g} standard errors"
            )
        return f"not yet: it is stationary for less than {self.persistence - 1:.0%} of the steps"
