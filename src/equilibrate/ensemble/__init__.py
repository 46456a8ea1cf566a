"""Many replicas of one model trained at once, each measured as a run of its own."""

from equilibrate.ensemble.ensemble import Algorithm, Averages, Ensemble, Epoch, Evaluation
from equilibrate.ensemble.sampling import Sampling

__all__ = ["Algorithm", "Averages", "Ensemble", "Epoch", "Evaluation", "Sampling"]
