"""Operations of an ensemble, in plain PyTorch and in Triton, behind one interface.

`choose_ops` is the only place that decides between the two. The Triton modules are imported only
if they are chosen, since Triton may be missing.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from equilibrate_paper.ensemble._ops.plain import PlainOps
from equilibrate_paper.ensemble._ops.protocol import Ops
from equilibrate_paper.ensemble.precision import Precision

__all__ = ["Ops", "choose_ops"]


def choose_ops(device: torch.device, precision: Precision) -> Ops:
    """Choose the operations for a device.

    Args:
        device: The device on which the ensemble is trained.
        precision: The precision of products on a GPU.

    Returns:
        Triton kernels on a CUDA device where Triton is installed, else plain PyTorch operations.

    Example:
        >>> type(choose_ops(torch.device("cpu"), "fp32")).__name__
        'PlainOps'
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return PlainOps()
    from equilibrate_paper.ensemble._ops.triton import TritonOps

    return TritonOps(precision)
