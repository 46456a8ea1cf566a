"""Tensors of several models on a leading axis, and flat vectors seen as tensors again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Shapes = Mapping[str, torch.Size]


def stacked(models: Sequence[nn.Module]) -> tuple[Shapes, Tensor, dict[str, Tensor]]:
    """Shapes of what is trained; it itself, flat (R, P); and all the rest, (R, …) by name.

    >>> shapes, flat, constants = stacked([nn.Linear(2, 1), nn.Linear(2, 1)])
    >>> flat.shape, constants
    (torch.Size([2, 3]), {})
    """
    shapes = {name: p.shape for name, p in models[0].named_parameters() if p.requires_grad}
    every = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    constants = {
        name: torch.stack([tensors[name].detach() for tensors in every])
        for name in every[0]
        if name not in shapes
    }
    flat = torch.stack(
        [torch.cat([tensors[name].detach().reshape(-1) for name in shapes]) for tensors in every]
    )
    return shapes, flat, constants


def views(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors (R, …) that flat vectors (R, P) are made of, by name; no copies."""
    pieces = flat.split([shape.numel() for shape in shapes.values()], dim=1)
    return {
        name: piece.view(len(flat), *shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
