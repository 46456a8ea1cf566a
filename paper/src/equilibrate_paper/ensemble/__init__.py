"""Train many replicas of one model at once, each measured as an independent run."""

from equilibrate_paper.ensemble.data.sampling import Sampling
from equilibrate_paper.ensemble.ensemble import Ensemble
from equilibrate_paper.ensemble.precision import Precision
from equilibrate_paper.ensemble.results import Averages, Epoch, Evaluation
from equilibrate_paper.ensemble.updates import Algorithm

__all__ = ["Algorithm", "Averages", "Ensemble", "Epoch", "Evaluation", "Precision", "Sampling"]
