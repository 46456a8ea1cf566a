"""The loss landscape: full gradients, Hessian products, FDR2, and sweeps over learning rates.

Everything here costs a pass over the data, a Hessian-vector product, or several training runs.
"""

from equilibrate.landscape.data import Data
from equilibrate.landscape.fdr2 import FDR2Estimates, estimate_fdr2
from equilibrate.landscape.fits import Fit, fit
from equilibrate.landscape.landscape import Landscape, Noise, NoiseCurvature, connected_scaling
from equilibrate.landscape.mean_loss import Batch, Loss
from equilibrate.landscape.sweeps import Sweep, SweepPoint, sweep

__all__ = [
    "Batch",
    "Data",
    "FDR2Estimates",
    "Fit",
    "Landscape",
    "Loss",
    "Noise",
    "NoiseCurvature",
    "Sweep",
    "SweepPoint",
    "connected_scaling",
    "estimate_fdr2",
    "fit",
    "sweep",
]
