"""Tell when SGD has equilibrated, act on it, and read the landscape off the fluctuations."""

from equilibrate import estimates, landscape, observables, relations, solvable
from equilibrate.averages import HalfRunningMean
from equilibrate.ensemble import Ensemble
from equilibrate.monitor import Monitor
from equilibrate.observables import Snapshot
from equilibrate.relations import Reading, Relation
from equilibrate.scheduler import Decision, FDRScheduler, Verdict, judge

__version__ = "0.1.0"

__all__ = [
    "Decision",
    "Ensemble",
    "FDRScheduler",
    "HalfRunningMean",
    "Monitor",
    "Reading",
    "Relation",
    "Snapshot",
    "Verdict",
    "estimates",
    "judge",
    "landscape",
    "observables",
    "relations",
    "solvable",
]
