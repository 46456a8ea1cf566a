"""The option `--device`."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]


def parse_device(name: str) -> torch.device:
    """Return the device of a name, after checking that it is available.

    Args:
        name: "cpu", "cuda", "cuda:1" and so on, or "auto" for the first GPU or else the CPU.

    Raises:
        ValueError: If the name is unknown or the device is not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown: use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported: use auto, cpu or cuda")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device={name!r} is not available: found {count} CUDA devices; use cpu")
    return device
