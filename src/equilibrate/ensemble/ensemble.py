"""Many replicas of one model trained at once, each with its own seed and learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibrate.averages import HalfRunningBlocks
from equilibrate.ensemble._ops import HAS_TRITON
from equilibrate.ensemble.batches import Batches, DataSets, Examples, Orders
from equilibrate.ensemble.checks import (
    PerReplica,
    check_data,
    check_models,
    check_precision,
    check_seeds,
    check_state,
    per_replica,
    rule_per_replica,
)
from equilibrate.ensemble.chunks import even_chunk, in_chunks, most_at_once
from equilibrate.ensemble.graphs import captured
from equilibrate.ensemble.network import Loss, Network
from equilibrate.ensemble.parameters import stacked, views
from equilibrate.ensemble.precision import Precision, matrix_products, of_torch
from equilibrate.ensemble.sampling import Sampling
from equilibrate.ensemble.updates import Algorithm, Flat, aligned, rule_of, update, zeros
from equilibrate.ensemble.values import Averages, Epoch, Evaluation
from equilibrate.observables import inner
from equilibrate.relations import Reading
from equilibrate.rules import Threshold
from equilibrate.scheduler import Decision

# On a CPU the vectors of replicas with more parameters than this are updated one replica at a time:
# what one operation leaves in the cache, the next one finds there.
_TOGETHER = 1 << 14
# Steps in one CUDA graph, at most: between two graphs a GPU waits a few microseconds.
_AT_ONCE = 25


class Ensemble:
    """R replicas of a model on a leading axis, trained and measured as R runs of their own.

    Replica r starts at `models[r]`, has its learning rate `lr[r]` (`lr` may be one number), and
    sees the data in an order of its own, from (`seeds[r]`, epoch) alone: so it equals the same run
    done alone, whatever the others do. Each epoch cuts a fresh permutation of the data into
    mini-batches, as in the paper (`sampling="shuffled"`; where `batch_size` does not divide the
    data, the examples left over at its end are not used in that epoch), or draws each mini-batch,
    a random subset, by itself (`"independent"`).

    `algorithm="sgd"` is the paper's, v′ = μv − (1−ν)g, θ′ = θ + ηv′ with v = 0 at first (torch's
    `SGD` leaves the dampening ν out of its first step); `"adam"` and `"amsgrad"` have the usual
    defaults β = (0.9, 0.999), ε = 1e-8. The L2 term λθ is counted in g, over all parameters.

    `loss(outputs, labels)` is the mean over a mini-batch. Parameters that do not require a
    gradient, and buffers, are constants. A replica that diverges goes on by itself: its readings
    are undefined, so it never decides anything, and the others do not notice.

    `precision` says how products are formed on a GPU: "fp32" keeps single precision; "tf32" rounds
    operands to 11 bits, which is several times faster; "fp16" has convolutions do that in half
    precision, of as many bits but with a smaller range. By default it is torch's own setting at
    this moment. Convolutions that `kernels.conv_relu_pool` cannot take are left to cuDNN, and to
    torch's setting for it (`torch.backends.cudnn.allow_tf32`, which is true at first). On a CPU all
    is single precision. A saved state may go on in another one.

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
        precision: Precision | None = None,
    ) -> None:
        check_models(models)
        check_data(images, labels, batch_size, sampling)
        check_seeds(seeds, len(models))
        check_precision(precision)
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f'device must be "cpu" or "cuda", got {str(device)!r}')
        self.seeds = tuple(int(seed) for seed in seeds)
        self.batch_size = batch_size
        self.momentum = momentum
        self.dampening = dampening
        self.weight_decay = weight_decay
        self.algorithm: Algorithm = algorithm
        self.sampling: Sampling = sampling
        self.precision: Precision = precision or of_torch()
        self._rule = rule_of(algorithm, momentum, dampening)
        self._fused = fuses(self.device)
        self._images = images.to(self.device)
        self._labels = self._to_labels(labels)
        self._template = copy.deepcopy(models[0])

        self._shapes, parameters, constants = stacked(models)
        self._constants = {name: tensor.to(self.device) for name, tensor in constants.items()}
        parameters = parameters.to(self.device)
        if self._fused:
            parameters = aligned(parameters)
        self._flat = Flat(
            parameters,
            zeros(parameters),
            torch.empty(self.replicas, dtype=torch.float64, device=self.device),
            self._rule.memory(parameters),
        )
        self.lr = lr
        self._network = Network(
            self._template,
            loss,
            {**views(parameters, self._shapes), **self._constants},
            views(self._flat.gradient, self._shapes),
            fused=self._fused,
            precision=self.precision,
        )
        self._data_sets = DataSets(self._network.prepare, self.device)
        self._most_at_once = most_at_once(self._template, images[:1], self.replicas, self.device)
        together = self.device.type != "cpu" or parameters.shape[1] <= _TOGETHER
        parts = [slice(None)] if together else range(self.replicas)
        self._parts = [(part, self._flat.rows(part)) for part in parts]

        # What a step reads and writes: static, for CUDA graphs.
        columns = len(Averages._fields)
        steps, replicas = self.steps_per_epoch, self.replicas
        self._batches = Batches(
            self._data_sets.of(self._images),
            self._labels,
            (steps, replicas, batch_size),
            gathers=self._network.gathers,
            fused=self._fused,
        )
        self._orders = Orders(
            self.seeds, len(images), batch_size, sampling, staged=self._batches.staged
        )
        self._rows = self._flat.lr.new_zeros((steps, replicas, columns))
        self._at_once = max(n for n in range(1, _AT_ONCE + 1) if steps % n == 0)
        self._advance: Callable[[], None] | None = None
        self._averages = [HalfRunningBlocks((columns,), size=steps) for _ in models]
        self._last_lrs = [math.nan] * replicas
        self._epoch = 0

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
        return list(self._lrs)

    @lr.setter
    def lr(self, values: PerReplica) -> None:
        lrs = [float(x) for x in per_replica("lr", values, self.replicas)]
        if not all(lr > 0 and math.isfinite(lr) for lr in lrs):
            raise ValueError(f"lr must be positive and finite, got {values}")
        self._lrs = lrs
        self._flat.lr.copy_(torch.tensor(lrs, dtype=torch.float64))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by name, each with the replicas on its first axis: live views."""
        return views(self._flat.parameters, self._shapes)

    def module(self, replica: int) -> nn.Module:
        """A replica as an ordinary module, a copy, on the device of `models[0]`."""
        model = copy.deepcopy(self._template)
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, tensor in {**self.parameters, **self._constants}.items():
                own[name].copy_(tensor[replica])
        return model

    def run_epoch(self) -> Epoch:
        """Train every replica for one epoch; the host waits for the device once, at its end."""
        self._batches.start(self._orders.of(self._epoch))
        if self.device.type == "cpu":
            for _ in range(self.steps_per_epoch):
                self._step()
        else:
            self._replay()
            self._orders.of(self._epoch + 1)  # while the device is at work
        rows = self._rows.to("cpu", copy=True)
        for average, values in zip(self._averages, rows.unbind(1), strict=True):
            average.extend(values)
        self._epoch += 1
        self._last_lrs = self.lr
        return Epoch(self._epoch, self.step, tuple(self.lr), *rows.unbind(-1))

    def _replay(self) -> None:
        """An epoch of `_step`, as a CUDA graph of several that is replayed."""
        if self._advance is None:
            written = [self._flat.parameters, *self._flat.memory.values(), self._batches.counts]
            with matrix_products(self.precision, self.device):
                self._advance = captured(self._step, written, times=self._at_once)
        for _ in range(self.steps_per_epoch // self._at_once):
            self._advance()

    @torch.no_grad()
    def _step(self) -> None:
        """One step of every replica on static tensors; no number leaves the device."""
        losses = self._network.differentiate(*self._batches.take()).double()
        counts = self._batches.counts
        if self._fused:
            from equilibrate.ensemble._ops import step as fused

            fused.update(self._flat, self._rule, self.weight_decay, losses, self._rows, counts)
            return
        row = torch.empty_like(self._rows[0])
        for part, flat in self._parts:
            update(flat, self._rule, self.weight_decay, losses[part], row[part])
        self._rows.index_copy_(0, counts[:1], row[None])
        counts.add_(1)

    def readings(self) -> list[Reading]:
        """FDR1 for each replica over its half-running window (for Adam the step form)."""
        return [
            Reading(self.step, mean.window, average.left, average.right, lr)
            for mean, average, lr in zip(
                self._averages, self.averages(), self._last_lrs, strict=True
            )
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
        rules = rule_per_replica(tolerance, decrease, self.replicas)
        readings, lrs = self.readings(), self.lr
        decisions = []
        for r in range(self.replicas) if replicas is None else replicas:
            x, y = rules[r]
            verdict = Threshold(x).judge(readings[r])
            if verdict.act:
                lrs[r] *= 1 - y
                self._averages[r].reset()
            decision = Decision(verdict.act, verdict.reason, readings[r], (lrs[r],))
            decisions.append(decision)
        self.lr = lrs
        return decisions

    def zero_velocity(self) -> None:
        """Set v = 0 in every replica, as the paper does where the learning rate changes."""
        if self.algorithm != "sgd":
            raise ValueError(f"algorithm={self.algorithm!r} has no velocity to set to zero")
        for pull in self._flat.memory.values():
            pull.zero_()

    def evaluate(
        self, images: Tensor, labels: Tensor, *, chunk: int | None = None, regularized: bool = False
    ) -> Evaluation:
        """Loss and accuracy over a whole data set; `regularized` adds the L2 term ½λ|θ|².

        The accuracy is nan where labels are no classes.
        """
        loss = self._flat.lr.new_zeros(self.replicas)
        correct = torch.full_like(loss, math.nan if labels.is_floating_point() else 0.0)
        with torch.no_grad(), matrix_products(self.precision, self.device):
            for x, y in self._chunks(images, self._to_labels(labels), chunk):
                outputs = self._network.outputs(x)
                loss += y.shape[1] * self._network.losses(outputs, y)
                if not y.is_floating_point():
                    correct += (outputs.argmax(-1) == y).sum(1)
            loss /= len(images)
            if regularized:
                loss += self.weight_decay / 2 * inner(self._flat.parameters, self._flat.parameters)
        return Evaluation(tuple(loss.tolist()), tuple((correct / len(images)).tolist()))

    def full_gradient(self, *, chunk: int | None = None) -> Tensor:
        """∇f over all training data, (R, P) on the device, with the L2 term."""
        total = self._flat.parameters * self.weight_decay
        with torch.no_grad(), matrix_products(self.precision, self.device):
            for x, y in self._chunks(self._images, self._labels, chunk):
                self._network.differentiate(x, y)
                total.add_(self._flat.gradient, alpha=y.shape[1] / len(self._images))
        return total

    def full_gradient_square(self, *, chunk: int | None = None) -> list[float]:
        """|∇f|² of each replica, the full-batch term of FDR2."""
        gradient = self.full_gradient(chunk=chunk)
        return inner(gradient, gradient).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and plain values: training goes on from it bit by bit."""
        return {
            "settings": self._settings(),
            "epoch": self._epoch,
            "lr": self.lr,
            "last_lr": list(self._last_lrs),
            "parameters": self._flat.parameters.to("cpu", copy=True),
            "constants": {n: t.to("cpu", copy=True) for n, t in self._constants.items()},
            "memory": {n: t.to("cpu", copy=True) for n, t in self._flat.memory.items()},
            "averages": [mean.state_dict() for mean in self._averages],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, refusing that of an ensemble with other settings."""
        check_state(state["settings"], self._settings())
        self._epoch = state["epoch"]
        self.lr = state["lr"]
        self._last_lrs = list(state["last_lr"])
        self._flat.parameters.copy_(state["parameters"])
        for mine, saved in ((self._constants, "constants"), (self._flat.memory, "memory")):
            for name, tensor in mine.items():
                tensor.copy_(state[saved][name])
        for mean, saved in zip(self._averages, state["averages"], strict=True):
            mean.load_state_dict(saved)

    def _settings(self) -> dict[str, Any]:
        return {
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
            "seeds": list(self.seeds),
            "examples": len(self._images),
            "batch_size": self.batch_size,
            "sampling": self.sampling,
            "algorithm": self.algorithm,
            "momentum": self.momentum,
            "dampening": self.dampening,
            "weight_decay": self.weight_decay,
        }

    def _to_labels(self, labels: Tensor) -> Tensor:
        return labels.to(self.device, None if labels.is_floating_point() else torch.int64)

    def _chunks(
        self, images: Tensor, labels: Tensor, size: int | None
    ) -> Iterator[tuple[Tensor | Examples, Tensor]]:
        """The whole data in chunks, the same for all replicas."""
        if size is None:
            on_cpu = self.device.type == "cpu"
            size = self._most_at_once if on_cpu else even_chunk(len(images), self._most_at_once)
        if size < 1:
            raise ValueError(f"chunk must be at least 1, got {size}")
        gathers = self._network.gathers
        return in_chunks(self._data_sets.of(images), labels, size, self.replicas, gathers)


def fuses(device: torch.device) -> bool:
    """Whether steps go through Triton kernels."""
    return device.type == "cuda" and HAS_TRITON
