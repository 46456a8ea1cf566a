"""Learning rate schedules that act on what is measured: `Cooldown`, and the paper's."""

from equilibrate.schedulers.cooldown import Cooldown
from equilibrate.schedulers.decision import Decision
from equilibrate.schedulers.fdr import FDRScheduler, Rule, Threshold

__all__ = ["Cooldown", "Decision", "FDRScheduler", "Rule", "Threshold"]
