"""Check the arguments of an ensemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PerReplica = float | Sequence[float]
"""One number for all replicas, or one for each."""


def check_data(
    data: tuple[Tensor, Tensor], batch_size: int, sampling: str
) -> tuple[Tensor, Tensor]:
    """Check that inputs, targets and batch size fit together.

    Args:
        data: Inputs and targets, (N, …) each.
        batch_size: Examples in a mini-batch.
        sampling: How mini-batches are sampled.

    Returns:
        Inputs and targets.

    Raises:
        TypeError: If the inputs are floating-point numbers but not float32.
        ValueError: If the sizes do not fit, a class is negative, or `sampling` is not known.
    """
    inputs, targets = data
    if len(inputs) != len(targets):
        raise ValueError(
            f"inputs and targets must have the same length, got {len(inputs)} and {len(targets)}"
        )
    if not 1 <= batch_size <= len(inputs):
        raise ValueError(
            f"batch_size must lie between 1 and the {len(inputs)} examples, got {batch_size}"
        )
    if inputs.is_floating_point() and inputs.dtype != torch.float32:
        raise TypeError(f"inputs must be float32, got {inputs.dtype}: call inputs.float()")
    if not targets.is_floating_point() and int(targets.min()) < 0:
        raise ValueError(
            f"targets must be class indices of at least 0, got {int(targets.min())}: remove the "
            "examples that should be ignored"
        )
    if sampling not in ("shuffled", "independent"):
        raise ValueError(f'sampling must be "shuffled" or "independent", got {sampling!r}')
    return inputs, targets


def check_seeds(seeds: Sequence[int], replicas: int) -> None:
    """Check that there is one seed for each replica.

    Args:
        seeds: The seeds.
        replicas: Number of replicas.

    Raises:
        ValueError: If there is not one seed of at least 0 for each replica.
    """
    if isinstance(seeds, int) or len(seeds) != replicas or not all(seed >= 0 for seed in seeds):
        raise ValueError(
            f"seeds must be one number ≥ 0 for each of the {replicas} models, got {seeds}"
        )


def check_models(models: Sequence[nn.Module]) -> None:
    """Check that the models are replicas of one architecture in float32.

    Args:
        models: One model for each replica.

    Raises:
        TypeError: If parameters are not float32.
        ValueError: If there are no models, they differ in structure, or nothing is trained.
    """
    if not models:
        raise ValueError("models is empty: pass one module for each replica")
    structure = _structure(models[0])
    for r, model in enumerate(models):
        if _structure(model) != structure:
            raise ValueError(
                f"models[{r}] differs in structure from models[0]: all replicas must have the same "
                "architecture and mode"
            )
    parameters = dict(models[0].named_parameters())
    if not any(p.requires_grad for p in parameters.values()):
        raise ValueError(
            "models have no parameter that requires a gradient: call model.requires_grad_()"
        )
    for name, p in parameters.items():
        if p.dtype != torch.float32:
            raise TypeError(f"parameter {name!r} is {p.dtype}, not float32: call model.float()")


def check_state(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check that a saved state belongs to an ensemble with the same settings.

    Args:
        saved: The settings in the saved state.
        own: The settings of the ensemble that loads it.

    Raises:
        ValueError: If a setting differs.
    """
    for name, value in own.items():
        if saved[name] != value:
            raise ValueError(
                f"the state belongs to an ensemble with {name}={saved[name]}, but this one has "
                f"{name}={value}: create the ensemble with the same settings"
            )


def _structure(model: nn.Module) -> tuple[Any, ...]:
    parameters = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
    buffers = [(n, b.shape, b.dtype) for n, b in model.named_buffers()]
    return repr(model), [m.training for m in model.modules()], parameters, buffers


def per_replica(name: str, values: PerReplica, replicas: int) -> list[float]:
    """Expand one number for all replicas into one for each.

    Args:
        name: Name of the argument, for the error message.
        values: One number, or one for each replica.
        replicas: Number of replicas.

    Returns:
        One number for each replica.

    Raises:
        ValueError: If the number of values is wrong.
    """
    if isinstance(values, int | float):
        return [values] * replicas
    if len(values) != replicas:
        raise ValueError(
            f"{name} must be one number, or one for each of the {replicas} replicas, got {values}"
        )
    return list(values)
