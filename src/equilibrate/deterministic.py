"""Layers with which a loss is no function of the parameters and a batch alone."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd


def refuse_chance(model: nn.Module) -> None:
    """Refuse layers whose output depends on the other examples of a batch, or on chance.

    f is then no mean over examples, and ⟦∇f^B⟧ is not ∇f.

    >>> refuse_chance(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval())
    """
    for name, layer in model.named_modules():
        what = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, _NormBase) and _mixes(layer):
            remedy = (
                "call model.eval() to fix its statistics, or use nn.GroupNorm"
                if layer.track_running_stats
                else "it keeps no statistics that could be fixed, so use nn.GroupNorm"
            )
            raise ValueError(
                f"{what} makes an output depend on the rest of its mini-batch, or remembers it, so "
                f"that the loss is no mean over examples: {remedy}"
            )
        if layer.training and (_chance(layer) or isinstance(layer, nn.RReLU)):
            raise ValueError(
                f"{what} is random, so that its loss has no gradient of its own: call "
                "model.eval() or take it out"
            )


def _mixes(layer: _NormBase) -> bool:
    return layer.training if layer.track_running_stats else isinstance(layer, _BatchNorm)


def _chance(layer: nn.Module) -> float:
    """With what probability it drops something."""
    if isinstance(layer, _DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) else 0.0
