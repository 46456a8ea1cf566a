"""A second stream beside the main one, for what nothing on it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Launch on a second stream, after what is queued so far; `join` waits for it.

    What is read and written there must be kept until then.
    """
    if device.type != "cuda":
        yield
        return
    stream = _second_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def join(device: torch.device) -> None:
    """Wait for the second stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_second_stream(device))
