"""A claim as a value: its text, what is measured, and the bound.

Bounds and texts that several claims share are here, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from equilibrate.report.numbers import format_number
from equilibrate_paper.analysis import findings
from equilibrate_paper.analysis.bounds import Bound, Interval
from equilibrate_paper.analysis.measures import TEST_IMAGES
from equilibrate_paper.protocol.run import Task


@dataclass(frozen=True)
class Short:
    """A claim in a few words, for a summary."""

    text: str
    """What is claimed."""
    measured: str
    """What was measured, with {} for the number."""
    scale: float = 100.0
    """Factor by which the measured number is multiplied: 100 for per cent."""

    def describe(self, measured: float, margin: float | None) -> str:
        """Describe a measured value in a few words.

        >>> Short("the sides meet", "{} % apart").describe(0.01, 0.002)
        '1.00 ± 0.20 % apart'

        Args:
            measured: The value.
            margin: Half the width of its confidence interval, or None.

        Returns:
            The text.
        """
        scaled = None if margin is None else self.scale * margin
        return self.measured.format(format_number(self.scale * measured, scaled))


@dataclass(frozen=True)
class Claim:
    """A claim about some runs, and how it is tested."""

    id: str
    """Unique name; it ends in the name of the task."""
    figure: str
    """Figure, or panel of a figure, that shows it."""
    statement: str
    """What is claimed, with {title} for the title of the task."""
    runs: tuple[str, ...]
    """Runs from which it is measured."""
    measure: findings.Finding
    """Maps the results of `runs` to estimates, all of which have to satisfy `bound`."""
    quantity: str
    """What is measured, in words."""
    bound: Bound
    """Bound on the measured values."""
    why: str
    """Reason for the bound, with {images} for the number of test images."""
    where: str = ""
    """Where `quantity` is measured, if the text of the bound has to say so."""
    short: Short | None = None
    """The claim in a few words; None if it is not part of the summary."""
    general: bool = False
    """Whether it is about any stationary SGD, so that any profile can test it.

    Other claims are about the paper's own models and data, trained for as long as in the paper.
    """
    ours: bool = False
    """Whether it is not made in the paper."""
    follow_up: bool = False
    """Whether its runs were added later, to decide what others left open. Such a claim is left out
    as long as its runs are not recorded."""

    def statement_for(self, task: Task) -> str:
        """Return the statement about a task."""
        return self.statement.format(title=task.title)

    def bound_for(self, task: Task) -> str:
        """Return the text of the bound for measurements on the data of a task."""
        return f"{self.bound.text(self.quantity, task.data)} {self.where}".rstrip()

    def why_for(self, task: Task) -> str:
        """Return the reason for the bound for measurements on the data of a task."""
        return self.why.format(images=TEST_IMAGES[task.data])


ABOVE, BELOW = Interval(low=0.0), Interval(high=0.0)
MEETING = Interval(-0.05, 0.05)
"""How far the sides of FDR1 may differ if they agree."""
STRAIGHT = Interval(-0.2, 0.2)
"""How far O_FB/η may depart from its value at the smallest η if O_FB is linear."""
RESIDUAL = "L̄/R̄ − 1"
DEPARTURE = "(O_FB/η) / (O_FB/η at the smallest η) − 1"
SHUFFLING = "O_FB/η, reshuffled / independent batches, mean of the three smallest η, − 1"
WORST = "at the end, at the η whose interval extends furthest"
UNBIASED = "The paper's claim without the bias from reshuffling, with the same bound."
