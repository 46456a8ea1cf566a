"""What an ensemble refuses, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from equilibrate.deterministic import refuse_chance
from equilibrate.ensemble.precision import Precision
from equilibrate.rules import Threshold, check_factor

PerReplica = float | Sequence[float]


def check_data(images: Tensor, labels: Tensor, batch_size: int, sampling: str) -> None:
    """Refuse data that do not fit together."""
    for name, given in (("images", images), ("labels", labels)):
        if not isinstance(given, Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(given).__name__}: pass torch.as_tensor({name})"
            )
    if len(images) != len(labels):
        raise ValueError(f"images and labels differ in number: {len(images)} and {len(labels)}")
    if not 1 <= batch_size <= len(images):
        raise ValueError(
            f"batch_size must lie between 1 and the {len(images)} examples, got {batch_size}"
        )
    if images.is_floating_point() and images.dtype != torch.float32:
        raise TypeError(f"images are {images.dtype}, not float32: call images.float()")
    if not labels.is_floating_point() and int(labels.min()) < 0:
        raise ValueError(
            f"labels must be classes from 0 on, got {int(labels.min())}: leave examples out that "
            "are to be ignored"
        )
    if sampling not in ("shuffled", "independent"):
        raise ValueError(f'sampling must be "shuffled" or "independent", got {sampling!r}')


def check_seeds(seeds: Sequence[int], replicas: int) -> None:
    """Refuse seeds that are not one for each replica."""
    if isinstance(seeds, int) or len(seeds) != replicas or not all(seed >= 0 for seed in seeds):
        raise ValueError(
            f"seeds must be one number ≥ 0 for each of the {replicas} models, got {seeds}"
        )


def check_precision(precision: str | None) -> None:
    """Refuse what is no precision."""
    if precision not in (None, *get_args(Precision)):
        raise ValueError(
            f'precision must be "fp32", "tf32" or "fp16", or None for torch\'s own setting, '
            f"got {precision!r}"
        )


def check_models(models: Sequence[nn.Module]) -> None:
    """Refuse models that are not replicas, or whose loss is not a function of θ and B alone."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise TypeError(
            f"models is one {type(models).__name__}: pass a list with one module for each replica"
        )
    if not models:
        raise ValueError("models is empty: pass one module for each replica")
    structure = _structure(models[0])
    for r, model in enumerate(models):
        if _structure(model) != structure:
            raise ValueError(
                f"models[{r}] has another structure than models[0]: replicas are one architecture "
                "with parameters of their own"
            )
    parameters = dict(models[0].named_parameters())
    if not any(p.requires_grad for p in parameters.values()):
        raise ValueError("models have no parameter that requires a gradient: nothing to train")
    for name, p in parameters.items():
        if p.dtype != torch.float32:
            raise TypeError(f"parameter {name!r} is {p.dtype}, not float32: call model.float()")
    refuse_chance(models[0])


def check_state(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse the state of an ensemble with other settings."""
    for name, value in mine.items():
        if saved[name] != value:
            raise ValueError(
                f"the state belongs to another ensemble: its {name} is {saved[name]}, here it is "
                f"{value}"
            )


def _structure(model: nn.Module) -> tuple[Any, ...]:
    parameters = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
    buffers = [(n, b.shape, b.dtype) for n, b in model.named_buffers()]
    return repr(model), [m.training for m in model.modules()], parameters, buffers


def per_replica(name: str, values: PerReplica, replicas: int) -> list[float]:
    """One number for each replica, from one for all or one for each."""
    if isinstance(values, int | float):
        return [values] * replicas
    if len(values) != replicas:
        raise ValueError(
            f"{name} must be one number, or one for each of the {replicas} replicas, got {values}"
        )
    return list(values)


def rule_per_replica(
    tolerance: PerReplica, decrease: PerReplica, replicas: int
) -> list[tuple[float, float]]:
    """(X, Y) of each replica.

    >>> rule_per_replica(0.01, [0.1, 0.3], 2)
    [(0.01, 0.1), (0.01, 0.3)]
    """
    tolerances = per_replica("tolerance", tolerance, replicas)
    decreases = per_replica("decrease", decrease, replicas)
    rules = list(zip(tolerances, decreases, strict=True))
    for x, y in rules:
        Threshold(x)
        check_factor(1 - y)
    return rules
