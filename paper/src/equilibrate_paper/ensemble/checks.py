"""Check the arguments of an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from equilibrate.deterministic import require_deterministic
from equilibrate.mean_loss import Batch, representative_examples, require_mean_loss
from equilibrate_paper.ensemble.precision import Precision

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
        TypeError: If `data` is not a pair of tensors, or the inputs are floating-point numbers but
            not float32.
        ValueError: If the sizes do not fit, a class is negative, or `sampling` is not known.
    """
    if isinstance(data, Tensor) or not isinstance(data, Sequence) or len(data) != 2:
        raise TypeError(f"data must be a pair (inputs, targets), got {type(data).__name__}")
    inputs, targets = data
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(tensor).__name__}: pass "
                f"torch.as_tensor({name})"
            )
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


def check_loss(loss: object) -> None:
    """Check that the loss is a function.

    Args:
        loss: The loss.

    Raises:
        TypeError: If `loss` cannot be called.
    """
    if not callable(loss):
        raise TypeError(
            f"loss must be a function of (outputs, targets) such as F.cross_entropy, got "
            f"{type(loss).__name__}"
        )


def check_loss_of_model(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], data: Batch
) -> None:
    """Check that the loss of a replica is a mean over examples, and that replicas can be batched.

    Args:
        model: One replica.
        loss: The loss.
        data: Inputs and targets, (N, …) each.

    Raises:
        ValueError: If the loss is random or not a mean over examples, or if `torch.func.vmap`
            does not support the model or the loss.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    inputs, targets = (t.to(trained[0].device) for t in representative_examples(data))
    targets = targets if targets.is_floating_point() else targets.long()

    def batch_loss(batch: Batch) -> Tensor:
        return loss(model(batch[0]), batch[1])

    require_mean_loss(batch_loss, trained, (inputs, targets))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    one = {name: tensor[None] for name, tensor in tensors.items()}  # one replica
    with torch.no_grad(), _last_layer_entered(model) as entered:
        try:
            outputs = vmap(lambda own, x: functional_call(model, own, (x,)))(one, inputs[None])
        except RuntimeError as error:
            name, layer = entered[-1] if entered else ("", model)
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) cannot be computed for several replicas "
                f"at once: torch.func.vmap does not support it ({_first_line(error)}); replace "
                "the layer, or train the replicas one by one, each with an eq.Monitor"
            ) from error
        try:
            vmap(loss)(outputs, targets[None])
        except RuntimeError as error:
            raise ValueError(
                "loss cannot be computed for several replicas at once: torch.func.vmap does not "
                f"support it ({_first_line(error)}); use tensor operations without .item() and "
                "without branches that depend on values"
            ) from error


@contextmanager
def _last_layer_entered(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield a list of the layers that are being computed, the innermost one last."""
    entered: list[tuple[str, nn.Module]] = []
    hooks = []
    for name, layer in model.named_modules():
        hooks += [
            layer.register_forward_pre_hook(lambda m, _, name=name: entered.append((name, m))),
            layer.register_forward_hook(lambda *_: entered.pop() and None),
        ]
    try:
        yield entered
    finally:
        for hook in hooks:
            hook.remove()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")


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


def check_precision(precision: str | None) -> None:
    """Check that the precision is known.

    Args:
        precision: The precision, or None.

    Raises:
        ValueError: If it is neither None nor a known precision.
    """
    if precision not in (None, *get_args(Precision)):
        raise ValueError(
            f'precision must be "fp32", "tf32" or "fp16", or None for torch\'s own setting, '
            f"got {precision!r}"
        )


def check_models(models: Sequence[nn.Module]) -> None:
    """Check that the models are replicas of one deterministic architecture in float32.

    Args:
        models: One model for each replica.

    Raises:
        TypeError: If `models` is a single model, or parameters are not float32.
        ValueError: If there are no models, they differ in structure, or nothing is trained.
    """
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise TypeError(
            f"models must be a list with one module for each replica, got one "
            f"{type(models).__name__}: pass a list of modules"
        )
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
    require_deterministic(models[0])


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
