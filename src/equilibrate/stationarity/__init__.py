"""A rule for `FDRScheduler`: act when the parameters have lost the memory of where they started."""

from equilibrate.stationarity.rule import Stationary
from equilibrate.stationarity.statistics import Assessment, assess, squared_path

__all__ = ["Assessment", "Stationary", "assess", "squared_path"]
