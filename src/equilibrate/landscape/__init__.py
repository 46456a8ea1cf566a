"""The loss landscape: full gradients, Hessian products, FDR2, and sweeps over learning rates.

Everything here costs a pass over the data, a Hessian-vector product, or several training runs.
`equilibrate.landscape.plot`, which needs matplotlib, is not imported here.
"""

from equilibrate.landscape.data import Batch, Data
from equilibrate.landscape.fdr2 import FDR2Accumulator, FDR2Estimates, estimate_fdr2
from equilibrate.landscape.fits import Departure, Fit, NotEquilibratedError, fit
from equilibrate.landscape.landscape import (
    Landscape,
    Loss,
    Noise,
    NoiseCurvature,
    connected_scaling,
)
from equilibrate.landscape.points import Sweep, SweepPoint
from equilibrate.landscape.sweeps import SweepRun, sweep

__all__ = [
    "Batch",
    "Data",
    "Departure",
    "FDR2Accumulator",
    "FDR2Estimates",
    "Fit",
    "Landscape",
    "Loss",
    "Noise",
    "NoiseCurvature",
    "NotEquilibratedError",
    "Sweep",
    "SweepPoint",
    "SweepRun",
    "connected_scaling",
    "estimate_fdr2",
    "fit",
    "sweep",
]
