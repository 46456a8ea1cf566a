"""Check that a model's loss depends only on its parameters and the mini-batch."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd


def require_deterministic(model: nn.Module) -> None:
    """Check that no layer is random or mixes the examples of a mini-batch.

    The relations need a loss that is a mean over examples, so that ⟦∇f^B⟧ = ∇f. Dropout and
    batch normalization in training mode break this; in evaluation mode they are accepted.

    Args:
        model: The model to check, in the mode in which it will run.

    Raises:
        ValueError: If a layer is random, or if its output for one example depends on the other
            examples of the mini-batch.

    Example:
        >>> require_deterministic(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval())
    """
    for name, layer in model.named_modules():
        what = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, _NormBase) and _mixes_examples(layer):
            remedy = (
                "call model.eval() to fix its statistics, or use nn.GroupNorm"
                if layer.track_running_stats
                else "it has no running statistics to fix, so use nn.GroupNorm"
            )
            raise ValueError(
                f"{what} uses or updates statistics of the mini-batch, so the loss is not a mean "
                f"over examples: {remedy}"
            )
        if layer.training and (_drop_probability(layer) or isinstance(layer, nn.RReLU)):
            raise ValueError(
                f"{what} is random, so the gradient of the loss is not well defined: call "
                "model.eval() or remove the layer"
            )


def _mixes_examples(layer: _NormBase) -> bool:
    return layer.training if layer.track_running_stats else isinstance(layer, _BatchNorm)


def _drop_probability(layer: nn.Module) -> float:
    if isinstance(layer, _DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) else 0.0
