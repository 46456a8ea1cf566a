"""The callbacks of `equilibrate.integrations.lightning` for trainers of `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning import Callback

from equilibrate.integrations._binding import CooldownSettings, FDRSettings, MonitorSettings
from equilibrate.integrations._lightning import LightningHooks


class CooldownCallback(CooldownSettings, LightningHooks, Callback):
    """As `equilibrate.integrations.lightning.CooldownCallback`."""


class FDRCallback(FDRSettings, LightningHooks, Callback):
    """As `equilibrate.integrations.lightning.FDRCallback`."""


class MonitorCallback(MonitorSettings, LightningHooks, Callback):
    """As `equilibrate.integrations.lightning.MonitorCallback`."""
