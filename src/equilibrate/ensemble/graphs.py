"""A step recorded once as a CUDA graph and replayed, so that the host only says "again"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UPS = 2


def captured(
    step: Callable[[], None], written: Sequence[Tensor], times: int = 1
) -> Callable[[], None]:
    """So many of `step` as the replay of a CUDA graph; it must read and write static tensors alone.

    Before a capture the step has to run a few times, for compilers and libraries to set themselves
    up; what it has `written` and would read is put back each time.
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
