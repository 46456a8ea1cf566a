"""Stack the tensors of several models on a leading axis, and view flat vectors as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Shapes = Mapping[str, torch.Size]
"""Shapes of the trained parameters of one model, by name."""


def stack_models(models: Sequence[nn.Module]) -> tuple[Shapes, Tensor, dict[str, Tensor]]:
    """Stack the parameters and buffers of models with the same structure.

    Args:
        models: One model for each of the R replicas.

    Returns:
        The shapes of the trained parameters; the trained parameters as flat vectors, (R, P); and
        all other parameters and buffers by name, (R, …).

    Example:
        >>> shapes, flat, constants = stack_models([nn.Linear(2, 1), nn.Linear(2, 1)])
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


def tensor_views(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """View flat vectors as the tensors they consist of.

    Args:
        flat: Flat vectors, (R, P).
        shapes: The shape of each tensor, in the order of the vectors.

    Returns:
        Views by name, (R, …).
    """
    pieces = flat.split([shape.numel() for shape in shapes.values()], dim=1)
    return {
        name: piece.view(len(flat), *shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
