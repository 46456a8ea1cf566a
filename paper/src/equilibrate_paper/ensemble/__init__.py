"""Many replicas of a network at once, as CUDA graphs and Triton kernels on a GPU."""

from equilibrate_paper.ensemble.ensemble import Ensemble, Method
from equilibrate_paper.ensemble.precision import Precision
from equilibrate_paper.ensemble.results import Averages, Epoch, Evaluation
from equilibrate_paper.ensemble.sampling import Sampling
from equilibrate_paper.ensemble.updates import Algorithm

__all__ = [
    "Algorithm",
    "Averages",
    "Ensemble",
    "Epoch",
    "Evaluation",
    "Method",
    "Precision",
    "Sampling",
]
