"""The option `--device`."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from equilibrate_paper.runs.ranks import Ranks

DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]


def parse_device(name: str, ranks: Ranks | None = None) -> torch.device:
    """Return the device of a name, after checking that it is available.

    Args:
        name: "cpu", "cuda", "cuda:1" and so on, or "auto" for the first GPU or else the CPU.
        ranks: The place of this process among several, each of which uses a GPU of its own; None
            for a single process.

    Raises:
        ValueError: If the name is unknown, the device is not available, or several processes are
            given the same GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown: use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported: use auto, cpu or cuda")
    if device.type == "cuda" and ranks is not None and ranks.size > 1:
        if device.index is not None:
            raise ValueError(
                f"device={name!r} is one GPU for {ranks.size} processes: use cuda, which gives "
                "each process its own"
            )
        name = f"cuda:{ranks.local_rank}"
        device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device={name!r} is not available: found {count} CUDA devices; use cpu")
    return device
