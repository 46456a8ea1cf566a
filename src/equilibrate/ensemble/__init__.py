"""Train many replicas of one model at once, each measured as an independent run."""

from equilibrate.ensemble.data.sampling import Sampling
from equilibrate.ensemble.ensemble import Ensemble
from equilibrate.ensemble.precision import Precision
from equilibrate.ensemble.results import Averages, Epoch, Evaluation
from equilibrate.ensemble.updates import Algorithm

__all__ = ["Algorithm", "Averages", "Ensemble", "Epoch", "Evaluation", "Precision", "Sampling"]
