"""Both sides of FDR1 over the half-running window: the whole model, its groups, its layers."""

from equilibrate.monitor.layers import Layer, LayerTable
from equilibrate.monitor.monitor import Monitor
from equilibrate.monitor.views import Readings

__all__ = ["Layer", "LayerTable", "Monitor", "Readings"]
