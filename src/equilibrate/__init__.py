"""Tell when SGD has equilibrated, act on it, and read the loss landscape off the fluctuations."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equilibrate.decisions import Decision
from equilibrate.monitor import Monitor
from equilibrate.readings import Reading
from equilibrate.scheduler import FDRScheduler

if TYPE_CHECKING:
    from equilibrate import (
        estimates,
        landscape,
        layers,
        observables,
        relations,
        rules,
        scale_invariance,
        sgld,
        solvable,
        stationarity,
    )
    from equilibrate.averages import HalfRunningMean
    from equilibrate.forecast import Forecaster
    from equilibrate.gains import Forecast
    from equilibrate.observables import Snapshot
    from equilibrate.recorder import Recorder
    from equilibrate.relations import Relation

__version__ = "0.1.0"

__all__ = [
    "Decision",
    "FDRScheduler",
    "Forecast",
    "Forecaster",
    "HalfRunningMean",
    "Monitor",
    "Reading",
    "Recorder",
    "Relation",
    "Snapshot",
    "estimates",
    "landscape",
    "layers",
    "observables",
    "relations",
    "rules",
    "scale_invariance",
    "sgld",
    "solvable",
    "stationarity",
]

_LAZY = {
    "Forecast": "gains",
    "Forecaster": "forecast",
    "HalfRunningMean": "averages",
    "Recorder": "recorder",
    "Relation": "relations",
    "Snapshot": "observables",
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
