"""Capture a training step in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UPS = 2


def capture(
    step: Callable[[], None], written: Sequence[Tensor], times: int = 1
) -> Callable[[], None]:
    """Capture several calls of a function in one CUDA graph.

    Compilers and libraries set themselves up in the first calls, so the function is called a few
    times before the capture. The tensors in `written` are restored after each of these calls.

    Args:
        step: The function. It may only read and write static tensors.
        written: The tensors that `step` both reads and modifies.
        times: Number of calls in the graph.

    Returns:
        A function that replays the graph.
    """
    with torch.cuda.device(written[0].device):
        saved = [tensor.clone() for tensor in written]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
                for tensor, value in zip(written, saved, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                step()
    return graph.replay
