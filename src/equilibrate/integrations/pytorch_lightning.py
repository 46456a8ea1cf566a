"""A callback for the Trainer of `pytorch_lightning`, a package like `lightning`."""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.utilities import rank_zero_info

from equilibrate.integrations._lightning import LightningHooks


class FDRCallback(LightningHooks, Callback):
    """Lowers the learning rate whenever training has equilibrated, or only watches.

    Everything is as in `equilibrate.integrations.lightning.FDRCallback`, which is for trainers of
    the package `lightning`.
    """

    _inform = staticmethod(rank_zero_info)
