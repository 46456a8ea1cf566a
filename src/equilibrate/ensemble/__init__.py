"""Many replicas of one model trained at once, each measured as a run of its own."""

from equilibrate.ensemble.ensemble import Algorithm, Ensemble
from equilibrate.ensemble.sampling import Sampling
from equilibrate.ensemble.values import Averages, Epoch, Evaluation

__all__ = ["Algorithm", "Averages", "Ensemble", "Epoch", "Evaluation", "Sampling"]
