"""Precision of matrix products and convolutions on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "fp16"]
"""Precision of an ensemble's products on a GPU; a CPU always uses float32."""

ConvPrecision = Literal["fp16", "tf32", "tf32x3", "ieee"]
"""How the Triton convolution multiplies float32 numbers. Sums and results are always float32.

`"tf32"` rounds the factors to 11 significant bits. `"fp16"` rounds them to IEEE half precision:
also 11 bits, with half the memory traffic and twice the speed of TF32, but with a smaller range.
`"tf32x3"` reaches float32 accuracy with three TF32 products. `"ieee"` uses plain float32 FMA.

Range of `"fp16"`: images and weights between 6e-5 and 65504 keep 11 bits. Smaller ones have an
absolute error of at most 3e-8. Larger ones become infinite, and so do the results of that replica.
The incoming gradient is multiplied by s = 256·2^⌊log₂ B⌋, which is exact, and the products are
divided by s again. The gradient of a mean over B images therefore keeps 11 bits where the gradient
of a single image lies between 5e-7 and 255. Entries of 65520/s and above (4 for B = 100) become
infinite, and so do the gradients of images and weights, which makes the overflow visible. The bias
gradient is always computed in float32. Divide a loss that is a sum over the batch by B first.
"""

CONV_PRECISION: dict[Precision, ConvPrecision] = {
    "fp32": "tf32x3",
    "tf32": "tf32",
    "fp16": "fp16",
}
"""The precision of the Triton convolutions of an ensemble."""


@contextmanager
def matrix_products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set the precision of torch's float32 matrix products, and restore it on exit.

    "fp16" selects TF32 here: it has as many significant bits, and operands need no conversion.
    Nothing changes unless `device` is a CUDA device.

    Args:
        precision: The precision inside the context.
        device: The device on which the products run.

    Yields:
        Nothing.

    Example:
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
