"""A step recorded once as a CUDA graph and replayed, so that the host only says "again"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UPS = 3


def captured(step: Callable[[], None], written: Sequence[Tensor]) -> Callable[[], None]:
    """`step` as the replay of a CUDA graph; it must read and write static tensors alone.

    Before a capture the step has to run a few times, for compilers and libraries to set themselves
    up; what it has `written` and would read is put back each time.
    """
    # Every ensemble compiles its step anew, and a process may make many of them.
    many = torch._dynamo.config.patch(recompile_limit=1000)
    with torch.cuda.device(written[0].device), many:
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
            step()
    return graph.replay
