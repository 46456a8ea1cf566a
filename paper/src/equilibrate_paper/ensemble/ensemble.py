"""Train many replicas of one network at once, each with its own seed and learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from equilibrate.observables import inner
from equilibrate.readings import Reading
from equilibrate_paper.ensemble._ops import Ops, choose_ops, plain
from equilibrate_paper.ensemble.averages import HalfRunningBlocks
from equilibrate_paper.ensemble.batches import Batches, BatchOrders, in_chunks
from equilibrate_paper.ensemble.epochs import EpochRunner
from equilibrate_paper.ensemble.examples import IndexedInputs, PreparedInputs
from equilibrate_paper.ensemble.network import Network
from equilibrate_paper.ensemble.precision import Precision, matrix_products
from equilibrate_paper.ensemble.results import Averages, Epoch, Evaluation
from equilibrate_paper.ensemble.sampling import Sampling
from equilibrate_paper.ensemble.updates import (
    SGD,
    Adam,
    Algorithm,
    FlatTensors,
    tensor_views,
    zeros,
)


@dataclass(frozen=True)
class Method:
    """How the replicas of an ensemble are trained."""

    batch_size: int = 100
    """Examples in a mini-batch."""
    algorithm: Algorithm = "sgd"
    """"sgd" is the paper's, v′ = μv − g, θ′ = θ + ηv′ with v = 0 at first. "adam" and "amsgrad"
    have the usual defaults β = (0.9, 0.999), ε = 1e-8."""
    momentum: float = 0.0
    """μ of SGD."""
    weight_decay: float = 0.0
    """λ of the L2 term ½λ|θ|² over all parameters; λθ is counted in the gradient g."""
    sampling: Sampling = "shuffled"
    """"shuffled" cuts a new permutation of the data into mini-batches in each epoch, as in the
    paper; examples left over are not used in that epoch. "independent" draws each mini-batch as a
    random subset."""
    precision: Precision = "fp32"
    """Precision of products on a GPU. "fp32" is single precision. "tf32" rounds operands to 11
    significant bits, which is several times faster. "fp16" also uses half precision in
    convolutions: as many bits, but a smaller range. A CPU always uses single precision."""


class Ensemble:
    """R replicas of a network, trained and measured at once as R independent runs.

    Replica r starts at `models[r]`, has the learning rate `lr[r]`, and sees the data in an order
    that depends on (`seeds[r]`, epoch) alone. So it equals the same run trained alone, whatever the
    other replicas do. A replica that diverges does not affect the others: its readings are
    undefined, and `schedule` leaves its learning rate as it is.

    Args:
        models: One network for each replica, all with the same layers; see `Network`.
        data: Training images and classes, with the examples on the first axis.
        seeds: One seed for each replica.
        lr: One learning rate for each replica.
        method: How they are trained.
        device: "cpu" or "cuda".
        ops: The operations to use; chosen for the device by default.

    Example:
        >>> data = torch.randn(60, 4), torch.arange(60) % 3
        >>> models = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
        >>> ensemble = Ensemble(models, data, seeds=[0, 1], lr=[0.1, 0.2], method=Method(20))
        >>> ensemble.run_epoch().loss.shape  # steps, replicas
        torch.Size([3, 2])
        >>> [reading.step for reading in ensemble.readings()]
        [3, 3]
    """

    def __init__(
        self,
        models: Sequence[nn.Sequential],
        data: tuple[Tensor, Tensor],
        *,
        seeds: Sequence[int],
        lr: Sequence[float],
        method: Method,
        device: torch.device | str = "cpu",
        ops: Ops | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.replicas = len(models)
        """Number of replicas, R."""
        self.method = method
        """How they are trained."""
        self.steps_per_epoch = len(data[0]) // method.batch_size
        """Steps in an epoch, ⌊examples / batch_size⌋ for either sampling."""
        self.epoch = 0
        """Number of epochs completed."""
        ops = choose_ops(self.device, method.precision) if ops is None else ops
        rule = SGD(method.momentum)
        if method.algorithm != "sgd":
            rule = Adam(amsgrad=method.algorithm == "amsgrad")
        self._template = copy.deepcopy(models[0])
        self._shapes = {name: p.shape for name, p in models[0].named_parameters()}
        flat = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])
        flat = ops.align(flat.to(self.device))
        self._flat = FlatTensors(
            flat,
            zeros(flat),
            torch.empty(self.replicas, dtype=torch.float64, device=self.device),
            rule.init_state(flat),
        )
        self.lr = lr
        self._network = Network(
            self._template,
            self.parameters,
            tensor_views(self._flat.gradient, self._shapes),
            ops=ops,
        )
        self._inputs, self._targets = self.prepare(data[0]), data[1].to(self.device)
        batches = Batches(
            self._inputs,
            self._targets,
            (self.steps_per_epoch, self.replicas, method.batch_size),
            ops=ops,
            as_indices=self._network.reads_indices,
        )
        order = len(data[0]), method.batch_size, method.sampling
        self._runner = EpochRunner(
            self._network,
            batches,
            BatchOrders(seeds, *order, batches.prepare_order),
            self._flat,
            ops.updater(self._flat, rule, method.weight_decay),
            steps=self.steps_per_epoch,
            precision=method.precision,
        )
        columns, block = len(Averages._fields), self.steps_per_epoch
        self._averages = [HalfRunningBlocks((columns,), size=block) for _ in models]
        self._last_lrs = [math.nan] * self.replicas

    @property
    def step(self) -> int:
        """Number of steps completed."""
        return self.epoch * self.steps_per_epoch

    @property
    def lr(self) -> list[float]:
        """Learning rate of each replica."""
        return list(self._lrs)

    @lr.setter
    def lr(self, values: Sequence[float]) -> None:
        self._lrs = list(values)
        self._flat.lr.copy_(torch.tensor(self._lrs, dtype=torch.float64))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Views of the parameters by name, with the replicas on the first axis."""
        return tensor_views(self._flat.parameters, self._shapes)

    def module(self, replica: int) -> nn.Sequential:
        """Copy a replica into an ordinary module.

        Args:
            replica: The index of the replica.

        Returns:
            A copy, on the device of `models[0]`.
        """
        model = copy.deepcopy(self._template)
        model.load_state_dict({name: p[replica] for name, p in self.parameters.items()})
        return model

    def run_epoch(self) -> Epoch:
        """Train every replica for one epoch. The host waits for the device once, at its end.

        Returns:
            The measurements of each step.
        """
        rows = self._runner.run(self.epoch)
        for average, values in zip(self._averages, rows.unbind(1), strict=True):
            average.extend(values)
        self.epoch += 1
        self._last_lrs = self.lr
        return Epoch(self.epoch, self.step, tuple(self.lr), *rows.unbind(-1))

    def readings(self) -> list[Reading]:
        """Compute FDR1 over the half-running window of each replica (for Adam the step form).

        Returns:
            One reading for each replica.
        """
        return [
            Reading(self.step, mean.window, average.left, average.right, lr)
            for mean, average, lr in zip(
                self._averages, self.averages(), self._last_lrs, strict=True
            )
        ]

    def averages(self) -> list[Averages]:
        """Compute the half-running averages of all measurements.

        Returns:
            The averages of each replica.
        """
        return [Averages(*mean.value.tolist()) for mean in self._averages]

    def reset_averages(self, replicas: Iterable[int]) -> None:
        """Restart the averaging window of some replicas.

        Args:
            replicas: The replicas.
        """
        for r in replicas:
            self._averages[r].reset()

    def schedule(self, threshold: float, factor: float, replicas: Iterable[int]) -> None:
        """Apply the paper's adaptive schedule; call it at the end of an epoch.

        Where |L̄/R̄ − 1| is below the threshold, the learning rate of the replica is multiplied by
        the factor and its averaging window is restarted.

        Args:
            threshold: The paper's X.
            factor: The paper's 1 − Y.
            replicas: The replicas to consider.
        """
        readings, lrs = self.readings(), self.lr
        for r in replicas:
            if abs(readings[r].residual) < threshold:  # nan, which is undefined, is not
                lrs[r] *= factor
                self._averages[r].reset()
        self.lr = lrs

    def zero_velocity(self) -> None:
        """Set v = 0 in every replica, as the paper does when the learning rate changes."""
        for buffer in self._flat.state.values():
            buffer.zero_()

    def prepare(self, inputs: Tensor) -> PreparedInputs:
        """Bring a data set to the device, in the form that the first layer reads.

        Args:
            inputs: The images, (N, …).

        Returns:
            The images for `evaluate`.
        """
        return self._network.prepare(inputs.to(self.device))

    @torch.no_grad()
    def evaluate(
        self, inputs: PreparedInputs | None = None, targets: Tensor | None = None
    ) -> Evaluation:
        """Compute cross-entropy and accuracy over a whole data set.

        Args:
            inputs: The result of `prepare`; the training data by default.
            targets: The classes, (N,), on the device.

        Returns:
            The cross-entropy without its L2 term and the accuracy of each replica.
        """
        loss, correct = torch.zeros_like(self._flat.lr), torch.zeros_like(self._flat.lr)
        examples = 0
        with matrix_products(self.method.precision, self.device):
            for x, y in self._chunks(inputs, targets):
                outputs = self._network.outputs(x)
                loss += y.shape[1] * plain.cross_entropy(outputs, y)
                correct += (outputs.argmax(-1) == y).sum(1)
                examples += y.shape[1]
        return Evaluation((loss / examples).tolist(), (correct / examples).tolist())

    @torch.no_grad()
    def full_gradient(self) -> Tensor:
        """Compute ∇f over all training data, with the L2 term.

        Returns:
            The gradient of each replica, (R, P), on the device.
        """
        total = self._flat.parameters * self.method.weight_decay
        with matrix_products(self.method.precision, self.device):
            for x, y in self._chunks():
                self._network.differentiate(x, y)
                total.add_(self._flat.gradient, alpha=y.shape[1] / len(self._targets))
        return total

    def full_gradient_square(self) -> list[float]:
        """Compute |∇f|², the full-batch term of FDR2.

        Returns:
            |∇f|² of each replica.
        """
        gradient = self.full_gradient()
        return inner(gradient, gradient).tolist()

    def norm_square(self) -> Tensor:
        """Compute |θ|².

        Returns:
            |θ|² of each replica, in float64 on the device.
        """
        return inner(self._flat.parameters, self._flat.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Copy everything that training needs to continue bit for bit.

        Returns:
            Tensors on the CPU and plain values.
        """
        return {
            "epoch": self.epoch,
            "lr": self.lr,
            "last_lr": list(self._last_lrs),
            "parameters": self._flat.parameters.to("cpu", copy=True),
            "rule_state": {n: t.to("cpu", copy=True) for n, t in self._flat.state.items()},
            "averages": [mean.state_dict() for mean in self._averages],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state. Training may continue on another device and in another precision.

        Args:
            state_dict: The state of an ensemble with the same settings.
        """
        self.epoch = state_dict["epoch"]
        self.lr = state_dict["lr"]
        self._last_lrs = list(state_dict["last_lr"])
        self._flat.parameters.copy_(state_dict["parameters"])
        for name, tensor in self._flat.state.items():
            tensor.copy_(state_dict["rule_state"][name])
        for mean, saved in zip(self._averages, state_dict["averages"], strict=True):
            mean.load_state_dict(saved)

    def _chunks(
        self, inputs: PreparedInputs | None = None, targets: Tensor | None = None
    ) -> Iterator[tuple[Tensor | IndexedInputs, Tensor]]:
        return in_chunks(
            self._inputs if inputs is None else inputs,
            self._targets if targets is None else targets,
            self.replicas,
            as_indices=self._network.reads_indices,
        )
