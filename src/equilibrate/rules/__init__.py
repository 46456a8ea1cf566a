"""When to lower the learning rate: pure rules from a reading to a verdict with its reason.

A rule is a frozen dataclass with a method `judge`. `Threshold` is the paper's. `Stationary` tests
whether the parameters have forgotten where they started. `Gain` compares what lowering the learning
rate would gain with what staying gains.
"""

from equilibrate.rules.base import Rule, Verdict, check_factor, needs_of
from equilibrate.rules.gain import Gain
from equilibrate.rules.stationary import Stationary
from equilibrate.rules.threshold import Threshold

__all__ = ["Gain", "Rule", "Stationary", "Threshold", "Verdict", "check_factor", "needs_of"]
