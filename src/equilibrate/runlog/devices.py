"""Which device a command runs on."""

from __future__ import annotations

import torch


def find(name: str) -> torch.device:
    """cpu, or a CUDA device that is there; auto takes the first of these, or else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown: give auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported: give auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={name!r} is not there: {count} CUDA devices found; give cpu")
    return device
