"""Many replicas of one model trained at once, each with its own seed and learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from equilibrate import _batched, _batches, _rules
from equilibrate._batches import Sampling
from equilibrate.averages import HalfRunningMean
from equilibrate.observables import inner
from equilibrate.relations import Reading
from equilibrate.scheduler import Decision, judge

Algorithm = Literal["sgd", "adam", "amsgrad"]
Loss = Callable[[Tensor, Tensor], Tensor]
PerReplica = float | Sequence[float]


@dataclass(frozen=True, eq=False, repr=False)
class Epoch:
    """What one epoch measured at each step of each replica: tensors (steps, R) on the host."""

    epoch: int
    """Epochs done in all, this one included."""
    step: int
    """Steps done in all."""
    lr: tuple[float, ...]
    left: Tensor = field()
    """θ·∇f^B (for Adam −θ·Δ/η)."""
    right: Tensor = field()
    """(1+μ)/(2(1−ν)) η v′² (for Adam Δ²/(2η))."""
    loss: Tensor = field()
    """Loss of the mini-batch before the step, without the L2 term."""
    velocity_gradient: Tensor = field()
    """v·∇f^B with the velocity *before* the step; zero where there is no momentum."""

    @property
    def mean_loss(self) -> list[float]:
        """Mini-batch loss of each replica, averaged over the epoch."""
        return self.loss.mean(0).tolist()

    @property
    def last_loss(self) -> list[float]:
        """Loss of each replica's last mini-batch."""
        return self.loss[-1].tolist()

    def __repr__(self) -> str:
        return f"Epoch(epoch={self.epoch}, step={self.step}, mean_loss={self.mean_loss})"


class Averages(NamedTuple):
    """Half-running averages of one replica; nan before its first step."""

    left: float
    right: float
    loss: float
    velocity_gradient: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss and accuracy of each replica on a whole data set."""

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]


class Ensemble:
    """R replicas of a model on a leading axis, trained and measured as R runs of their own.

    Replica r starts at `models[r]`, has its learning rate `lr[r]` (`lr` may be one number), and
    sees the data in an order of its own, from (`seeds[r]`, epoch) alone: so it equals the same run
    done alone, whatever the others do. Each epoch cuts a fresh permutation of the data into
    mini-batches, as in the paper (`sampling="shuffled"`; where `batch_size` does not divide the
    data, the examples left over at its end are not used in that epoch), or draws each mini-batch
    by itself (`"independent"`).

    `algorithm="sgd"` is the paper's, v′ = μv − (1−ν)g, θ′ = θ + ηv′ with v = 0 at first (torch's
    `SGD` leaves the dampening ν out of its first step); `"adam"` and `"amsgrad"` have the usual
    defaults β = (0.9, 0.999), ε = 1e-8. The L2 term λθ is counted in g, over all parameters.

    `loss(outputs, labels)` is the mean over a mini-batch. Parameters that do not require a
    gradient, and buffers, are constants.

    >>> images, labels = torch.randn(60, 4), torch.arange(60) % 3
    >>> models = [nn.Linear(4, 3) for _ in range(2)]
    >>> ensemble = Ensemble(models, images, labels, seeds=[0, 1], lr=[0.1, 0.2], batch_size=20)
    >>> ensemble.run_epoch().loss.shape  # steps, replicas
    torch.Size([3, 2])
    >>> [reading.step for reading in ensemble.readings()]
    [3, 3]
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        images: Tensor,
        labels: Tensor,
        *,
        seeds: Sequence[int],
        lr: PerReplica,
        batch_size: int = 100,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        algorithm: Algorithm = "sgd",
        sampling: Sampling = "shuffled",
        device: torch.device | str = "cpu",
        loss: Loss = F.cross_entropy,
    ) -> None:
        _check_models(models)
        _check_data(images, labels, batch_size, sampling)
        if len(seeds) != len(models) or not all(seed >= 0 for seed in seeds):
            raise ValueError(
                f"seeds must be one number ≥ 0 for each of the {len(models)} models, got {seeds}"
            )
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
        self.device = torch.device(device)
        self.seeds = tuple(int(seed) for seed in seeds)
        self.batch_size = batch_size
        self.weight_decay = weight_decay
        self.sampling: Sampling = sampling
        self.algorithm: Algorithm = algorithm
        self._rule = _rule(algorithm, momentum, dampening)
        self._images = images.to(self.device)
        self._labels = labels.to(self.device)
        self._loss = loss
        self._template = copy.deepcopy(models[0]).to("cpu")
        self._forward = _batched.explicit(self._template) or _batched.vmapped(self._template)
        self._lay_out(models)
        self._state = self._rule.state(self._flat)
        self._lr = torch.empty(self.replicas, dtype=torch.float64, device=self.device)
        self.lr = lr
        columns = len(Averages._fields)
        self._averages = [HalfRunningMean((columns,)) for _ in models]
        self._rows = torch.zeros(
            (self.steps_per_epoch, self.replicas, columns), dtype=torch.float64, device=self.device
        )
        self._epoch = 0

    def _lay_out(self, models: Sequence[nn.Module]) -> None:
        """One flat tensor (R, P) of all trained parameters, with views of each."""
        trained = [n for n, p in models[0].named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError("models have no parameter that requires a gradient: nothing to train")
        parameters = [dict(model.named_parameters()) for model in models]
        self._shapes = {name: parameters[0][name].shape for name in trained}
        self._flat = torch.stack(
            [torch.cat([p[name].detach().reshape(-1) for name in trained]) for p in parameters]
        ).to(self.device)
        self._gradient = torch.zeros_like(self._flat)
        states = [model.state_dict() for model in models]
        self._constants = {
            name: torch.stack([state[name].detach() for state in states]).to(self.device)
            for name in states[0]
            if name not in self._shapes
        }
        self._leaves = {
            name: view.detach().requires_grad_() for name, view in self._views(self._flat).items()
        }

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([shape.numel() for shape in self._shapes.values()], dim=-1)
        return {
            name: piece.unflatten(-1, shape) if shape else piece.squeeze(-1)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    @property
    def replicas(self) -> int:
        """R."""
        return len(self.seeds)

    @property
    def steps_per_epoch(self) -> int:
        """⌊examples / batch_size⌋, whichever the sampling."""
        return len(self._images) // self.batch_size

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self._epoch

    @property
    def step(self) -> int:
        """Steps done."""
        return self._epoch * self.steps_per_epoch

    @property
    def lr(self) -> list[float]:
        """Learning rate of each replica; set it to one number or one for each."""
        return self._lr.tolist()

    @lr.setter
    def lr(self, values: PerReplica) -> None:
        lrs = [float(x) for x in _per_replica("lr", values, self.replicas)]
        if not all(lr > 0 and math.isfinite(lr) for lr in lrs):
            raise ValueError(f"lr must be positive and finite, got {values}")
        self._lr.copy_(torch.tensor(lrs, dtype=torch.float64))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by name, each with the replicas on its first axis: live views."""
        return self._views(self._flat)

    def module(self, replica: int) -> nn.Module:
        """A replica as an ordinary module on the CPU, a copy."""
        model = copy.deepcopy(self._template)
        tensors = {**self.parameters, **self._constants}
        model.load_state_dict({name: t[replica].cpu() for name, t in tensors.items()})
        return model

    def run_epoch(self) -> Epoch:
        """Train every replica for one epoch; the host waits for the device once, at its end."""
        self._order = self._draw()
        self._t = torch.zeros(1, dtype=torch.int64, device=self.device)
        for _ in range(self.steps_per_epoch):
            self._step()
        rows = self._rows.cpu()
        for average, values in zip(self._averages, rows.unbind(1), strict=True):
            average.extend(values)
        self._epoch += 1
        left, right, loss, velocity_gradient = rows.clone().unbind(-1)
        return Epoch(self._epoch, self.step, tuple(self.lr), left, right, loss, velocity_gradient)

    def readings(self) -> list[Reading]:
        """FDR1 for each replica over its half-running window (for Adam the step form)."""
        return [
            Reading(self.step, mean.window, average.left, average.right, lr)
            for mean, average, lr in zip(self._averages, self.averages(), self.lr, strict=True)
        ]

    def averages(self) -> list[Averages]:
        """All half-running averages of each replica."""
        return [Averages(*mean.value.tolist()) for mean in self._averages]

    def reset_averages(self, replicas: Iterable[int] | None = None) -> None:
        """Start the averages of these replicas again (of all of them where none are named)."""
        for r in range(self.replicas) if replicas is None else replicas:
            self._averages[r].reset()

    def schedule(
        self,
        *,
        tolerance: PerReplica = 0.01,
        decrease: PerReplica = 0.1,
        replicas: Iterable[int] | None = None,
    ) -> list[Decision]:
        """The paper's rule for each replica: where |L̄/R̄ − 1| < X, η → (1 − Y)η, averages anew.

        Call it at an epoch's end. `tolerance` X and `decrease` Y may differ between replicas;
        only those named in `replicas` are judged, all of them by default. One decision each.
        """
        tolerances = _per_replica("tolerance", tolerance, self.replicas)
        decreases = _per_replica("decrease", decrease, self.replicas)
        readings, lrs = self.readings(), self.lr
        decisions = []
        for r in range(self.replicas) if replicas is None else replicas:
            verdict = judge(readings[r], tolerances[r])
            if verdict.equilibrated:
                lrs[r] *= 1 - decreases[r]
                self._averages[r].reset()
            decisions.append(Decision(verdict.equilibrated, verdict.reason, readings[r], (lrs[r],)))
        self.lr = lrs
        return decisions

    def zero_velocity(self) -> None:
        """Set v = 0 in every replica, as the paper does where the learning rate changes."""
        if self.algorithm != "sgd":
            raise ValueError(f"algorithm={self.algorithm!r} has no velocity to set to zero")
        for velocity in self._state.values():
            velocity.zero_()

    def evaluate(
        self, images: Tensor, labels: Tensor, *, chunk: int = 1000, regularized: bool = False
    ) -> Evaluation:
        """Loss and accuracy over a whole data set; `regularized` adds the L2 term ½λ|θ|²."""
        loss = torch.zeros(self.replicas, dtype=torch.float64, device=self.device)
        correct = torch.zeros_like(loss)
        with torch.no_grad():
            for x, y in self._chunks(images.to(self.device), labels.to(self.device), chunk):
                outputs = self._forward({**self._leaves, **self._constants}, x)
                loss += len(y[0]) * self._losses(outputs, y).double()
                correct += (outputs.argmax(-1) == y).sum(1)
            loss /= len(images)
            if regularized:
                loss += self.weight_decay / 2 * inner(self._flat, self._flat)
        return Evaluation(tuple(loss.tolist()), tuple((correct / len(images)).tolist()))

    def full_gradient(self, *, chunk: int = 1000) -> Tensor:
        """∇f over all training data, (R, P) on the device, with the L2 term."""
        total = torch.zeros_like(self._flat)
        for x, y in self._chunks(self._images, self._labels, chunk):
            total.add_(self._gradients(x, y)[1], alpha=len(y[0]) / len(self._images))
        return total.add_(self._flat, alpha=self.weight_decay)

    def full_gradient_square(self, *, chunk: int = 1000) -> list[float]:
        """|∇f|² of each replica, the full-batch term of FDR2."""
        gradient = self.full_gradient(chunk=chunk)
        return inner(gradient, gradient).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and plain values: training goes on from it bit by bit."""
        return {
            "settings": self._settings(),
            "epoch": self._epoch,
            "lr": self.lr,
            "parameters": self._flat.cpu().clone(),
            "constants": {name: t.cpu().clone() for name, t in self._constants.items()},
            "rule": {name: t.cpu().clone() for name, t in self._state.items()},
            "averages": [mean.state_dict() for mean in self._averages],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, refusing that of an ensemble with other settings."""
        settings = self._settings()
        for name, value in settings.items():
            if state["settings"].get(name) != value:
                raise ValueError(
                    f"the state belongs to another ensemble: its {name} is "
                    f"{state['settings'].get(name)}, here it is {value}"
                )
        self._epoch = state["epoch"]
        self.lr = state["lr"]
        self._flat.copy_(state["parameters"])
        for mine, saved in ((self._constants, "constants"), (self._state, "rule")):
            for name, tensor in mine.items():
                tensor.copy_(state[saved][name])
        for mean, saved in zip(self._averages, state["averages"], strict=True):
            mean.load_state_dict(saved)

    def _settings(self) -> dict[str, Any]:
        rule = self._rule
        return {
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
            "seeds": list(self.seeds),
            "examples": len(self._images),
            "batch_size": self.batch_size,
            "sampling": self.sampling,
            "algorithm": self.algorithm,
            "momentum": getattr(rule, "momentum", 0.0),
            "dampening": getattr(rule, "dampening", 0.0),
            "weight_decay": self.weight_decay,
        }

    def _draw(self) -> Tensor:
        """The examples of each step of this epoch, (steps, R, B)."""
        orders = [
            _batches.draw(seed, self._epoch, len(self._images), self.batch_size, self.sampling)
            for seed in self.seeds
        ]
        return torch.from_numpy(np.stack(orders, axis=1)).to(self.device)

    def _step(self) -> None:
        """One step of every replica, with no number leaving the device."""
        batch = self._order.index_select(0, self._t)[0]
        loss, gradient = self._gradients(self._images[batch], self._labels[batch])
        with torch.no_grad():
            gradient.add_(self._flat, alpha=self.weight_decay)
            before = self._state.get("velocity")
            work = torch.zeros_like(self._lr) if before is None else inner(before, gradient)
            velocity = self._rule.direction(gradient, self._state)
            snapshot = self._rule.snapshot(self._flat, gradient, velocity, self._lr)
            left, right = (side(snapshot) for side in self._rule.sides)
            row = torch.stack([left, right, loss.double(), work], dim=-1)
            self._rows.index_copy_(0, self._t, row[None])
            self._flat.addcmul_(velocity, self._lr.to(self._flat.dtype)[:, None])
            self._t.add_(1)

    def _gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (R,) and the flat gradient (R, P) of a batch for each replica, without L2 term."""
        losses = self._losses(self._forward({**self._leaves, **self._constants}, x), y)
        # the sum over replicas has the gradient of each replica in its own row
        gradients = torch.autograd.grad(losses.sum(), list(self._leaves.values()))
        for view, found in zip(self._views(self._gradient).values(), gradients, strict=True):
            view.copy_(found)
        return losses.detach(), self._gradient

    def _losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self._loss is F.cross_entropy and outputs.dim() == 3 and labels.dim() == 2:
            each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
            return each.unflatten(0, labels.shape).mean(1)
        return vmap(self._loss)(outputs, labels)

    def _chunks(self, images: Tensor, labels: Tensor, size: int) -> Iterable[tuple[Tensor, Tensor]]:
        if size < 1:
            raise ValueError(f"chunk must be at least 1, got {size}")
        for x, y in zip(images.split(size), labels.split(size), strict=True):
            yield x.expand(self.replicas, *x.shape), y.expand(self.replicas, *y.shape)


def _rule(algorithm: str, momentum: float, dampening: float) -> _rules.Rule:
    if algorithm == "sgd":
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        if not dampening < 1:
            raise ValueError(
                f"dampening must be below 1, got {dampening}: no gradient would reach the velocity"
            )
        return _rules.SGD(momentum, dampening)
    if algorithm not in ("adam", "amsgrad"):
        raise ValueError(f'algorithm must be "sgd", "adam" or "amsgrad", got {algorithm!r}')
    if momentum or dampening:
        raise ValueError(
            f"algorithm={algorithm!r} takes no momentum or dampening, got {momentum}, {dampening}"
        )
    return _rules.Adam(amsgrad=algorithm == "amsgrad")


def _per_replica(name: str, values: PerReplica, replicas: int) -> list[float]:
    if isinstance(values, int | float):
        return [values] * replicas
    if len(values) != replicas:
        raise ValueError(
            f"{name} must be one number, or one for each of the {replicas} replicas, got {values}"
        )
    return list(values)


def _check_data(images: Tensor, labels: Tensor, batch_size: int, sampling: str) -> None:
    if len(images) != len(labels):
        raise ValueError(f"images and labels differ in number: {len(images)} and {len(labels)}")
    if not 1 <= batch_size <= len(images):
        raise ValueError(
            f"batch_size must lie between 1 and the {len(images)} examples, got {batch_size}"
        )
    if sampling not in ("shuffled", "independent"):
        raise ValueError(f'sampling must be "shuffled" or "independent", got {sampling!r}')


def _check_models(models: Sequence[nn.Module]) -> None:
    if not models:
        raise ValueError("models is empty: pass one module for each replica")
    structure = _structure(models[0])
    for r, model in enumerate(models):
        if _structure(model) != structure:
            raise ValueError(
                f"models[{r}] has another structure than models[0]: replicas are one architecture "
                "with parameters of their own"
            )
    for name, p in models[0].named_parameters():
        if p.dtype != torch.float32:
            raise TypeError(f"parameter {name!r} is {p.dtype}, not float32: call model.float()")
    for name, layer in models[0].named_modules():
        _check_layer(name, layer)


def _structure(model: nn.Module) -> tuple[Any, ...]:
    parameters = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
    buffers = [(n, b.shape, b.dtype) for n, b in model.named_buffers()]
    return repr(model), model.training, parameters, buffers


def _check_layer(name: str, layer: nn.Module) -> None:
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (
        layer.training or not layer.track_running_stats
    ):
        raise ValueError(
            f"layer {name!r} ({type(layer).__name__}) makes an output depend on the rest of its "
            "mini-batch, so that there is no full-batch gradient to speak of: call model.eval() "
            "to fix its statistics, or use nn.GroupNorm"
        )
    if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training and layer.p > 0:
        raise ValueError(
            f"layer {name!r} ({type(layer).__name__}) is random, and its gradient is not that of "
            "one loss: call model.eval() or take it out"
        )
