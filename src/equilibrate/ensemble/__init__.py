"""Many replicas of one model trained at once, each measured as a run of its own."""

from equilibrate.ensemble.ensemble import Ensemble
from equilibrate.ensemble.precision import Precision
from equilibrate.ensemble.sampling import Sampling
from equilibrate.ensemble.updates import Algorithm
from equilibrate.ensemble.values import Averages, Epoch, Evaluation

__all__ = ["Algorithm", "Averages", "Ensemble", "Epoch", "Evaluation", "Precision", "Sampling"]
