"""What a cooldown of the learning rate would gain now, and averaged parameters."""

from equilibrate.forecast.forecaster import Forecaster
from equilibrate.forecast.values import Forecast

__all__ = ["Forecast", "Forecaster"]
