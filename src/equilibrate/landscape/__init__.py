"""What costs a pass over the data or a Hessian-vector product: the shape of the loss landscape."""

from equilibrate.landscape.fdr2 import Readings, SecondRelation, read_second_relation
from equilibrate.landscape.fits import Departure, Fit, fit
from equilibrate.landscape.surface import Landscape, Noise, NoiseCurvature, connected_scaling
from equilibrate.landscape.sweeps import RateReading, Sweep, sweep

__all__ = [
    "Departure",
    "Fit",
    "Landscape",
    "Noise",
    "NoiseCurvature",
    "RateReading",
    "Readings",
    "SecondRelation",
    "Sweep",
    "connected_scaling",
    "fit",
    "read_second_relation",
    "sweep",
]
