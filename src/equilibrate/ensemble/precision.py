"""How products of float32 numbers are formed on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from equilibrate.ensemble import _ops as kernels

Precision = Literal["fp32", "tf32", "fp16"]

_CONVOLUTIONS: dict[Precision, kernels.Precision] = {
    "fp32": "tf32x3",
    "tf32": "tf32",
    "fp16": "fp16",
}


@contextmanager
def matrix_products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Torch's own matrix products in this precision, on a GPU; its setting is put back after.

    "fp16" is TF32 here: it has the same significand, and operands need not be converted.

    >>> with matrix_products("tf32", torch.device("cuda")):
    ...     torch.get_float32_matmul_precision()
    'high'
    >>> torch.get_float32_matmul_precision()
    'highest'
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def of_torch() -> Precision:
    """What torch's own setting comes to."""
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def of_convolutions(precision: Precision) -> kernels.Precision:
    """What `kernels.conv_relu_pool` calls it."""
    return _CONVOLUTIONS[precision]
