"""Tells what a training run would be worth if it were cooled down now, and cools it down."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equilibrate.forecast import Forecast, Forecaster
from equilibrate.monitor import Monitor
from equilibrate.readings import Reading
from equilibrate.schedulers import Cooldown, Decision, FDRScheduler, Rule, Threshold
from equilibrate.watching.hooks import measure

if TYPE_CHECKING:
    from equilibrate import (
        estimates,
        landscape,
        observables,
        relations,
        scale_invariance,
        solvable,
        stationarity,
    )
    from equilibrate.averages import HalfRunningMean
    from equilibrate.observables import Snapshot
    from equilibrate.record.observe import scalars
    from equilibrate.record.recorder import Recorder
    from equilibrate.relations import Relation

__version__ = "0.1.0"

__all__ = [
    "Cooldown",
    "Decision",
    "FDRScheduler",
    "Forecast",
    "Forecaster",
    "HalfRunningMean",
    "Monitor",
    "Reading",
    "Recorder",
    "Relation",
    "Rule",
    "Snapshot",
    "Threshold",
    "estimates",
    "landscape",
    "measure",
    "observables",
    "relations",
    "scalars",
    "scale_invariance",
    "solvable",
    "stationarity",
]

_LAZY = {
    "HalfRunningMean": "averages",
    "Recorder": "record.recorder",
    "Relation": "relations",
    "Snapshot": "observables",
    "scalars": "record.observe",
}
"""Names that are imported from their module on first use."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"equilibrate.{_LAZY[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"equilibrate.{name}")
    raise AttributeError(f"module 'equilibrate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
