"""A callback for the Trainer of the package `pytorch_lightning`, which may be there alone."""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.utilities import rank_zero_info

from equilibrate.integrations._lightning import Hooks


class FDRCallback(Hooks, Callback):
    """Lowers the learning rate whenever training has equilibrated, or only watches.

    Everything is as in `equilibrate.integrations.lightning.FDRCallback`, which is for trainers of
    the package `lightning`.
    """

    _inform = staticmethod(rank_zero_info)
