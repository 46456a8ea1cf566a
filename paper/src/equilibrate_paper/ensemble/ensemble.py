"""Train many replicas of one model at once, each with its own seed and learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibrate.averages import HalfRunningBlocks
from equilibrate.decisions import Decision
from equilibrate.observables import inner
from equilibrate.readings import Reading
from equilibrate_paper.ensemble._ops import Ops, choose_ops
from equilibrate_paper.ensemble.checks import (
    PerReplica,
    check_data,
    check_loss,
    check_loss_of_model,
    check_models,
    check_precision,
    check_seeds,
    check_state,
    per_replica,
)
from equilibrate_paper.ensemble.data.batches import Batches, BatchOrders
from equilibrate_paper.ensemble.data.chunks import max_chunk_size
from equilibrate_paper.ensemble.data.examples import PreparedInputsCache
from equilibrate_paper.ensemble.data.sampling import Sampling
from equilibrate_paper.ensemble.epochs import EpochRunner
from equilibrate_paper.ensemble.evaluation import Evaluator
from equilibrate_paper.ensemble.network import Loss, Network
from equilibrate_paper.ensemble.parameters import stack_models, tensor_views
from equilibrate_paper.ensemble.precision import Precision, torch_precision
from equilibrate_paper.ensemble.results import Averages, Epoch, Evaluation
from equilibrate_paper.ensemble.schedule import ReplicaSchedule
from equilibrate_paper.ensemble.updates import Algorithm, FlatTensors, make_update_rule, zeros


class Ensemble:
    """R replicas of a model, trained and measured at once as R independent runs.

    Replica r starts at `models[r]`, has the learning rate `lr[r]`, and sees the data in an order
    that depends on (`seeds[r]`, epoch) alone. So it equals the same run trained alone, whatever the
    other replicas do. A replica that diverges does not affect the others: its readings are
    undefined, and `schedule` leaves its learning rate as it is.

    Args:
        models: One module for each replica, all with the same structure, in float32. Parameters
            that do not require a gradient, and buffers, are constants.
        loss: A function of (outputs, targets), the mean over a mini-batch.
        data: The training data, (inputs, targets), with the examples on the first axis.
        seeds: One seed for each replica.
        lr: The learning rate, one number or one for each replica.
        batch_size: Examples in a mini-batch.
        momentum: μ of SGD.
        dampening: ν of SGD.
        weight_decay: λ of the L2 term ½λ|θ|² over all parameters; λθ is counted in the gradient g.
        algorithm: "sgd" is the paper's, v′ = μv − (1−ν)g, θ′ = θ + ηv′ with v = 0 at first.
            (`torch.optim.SGD` does not apply the dampening at the first step.) "adam" and "amsgrad"
            have the usual defaults β = (0.9, 0.999), ε = 1e-8.
        sampling: "shuffled" cuts a new permutation of the data into mini-batches in each epoch, as
            in the paper; if `batch_size` does not divide the number of examples, those left over
            are not used in that epoch. "independent" draws each mini-batch as a random subset.
        device: "cpu" or "cuda".
        precision: Precision of products on a GPU. "fp32" is single precision. "tf32" rounds
            operands to 11 significant bits, which is several times faster. "fp16" also uses half
            precision in convolutions: as many bits, but a smaller range. The default is torch's own
            setting when the ensemble is created. Convolutions without a kernel of their own use
            cuDNN with torch's setting for it (`torch.backends.cudnn.allow_tf32`, true by default).
            A CPU always uses single precision.

    Raises:
        TypeError: If an argument has the wrong type, or models or inputs are not float32.
        ValueError: If an argument is out of range, the models are not replicas, the loss is random
            or not a mean over examples, or `torch.func.vmap` does not support model or loss.

    Example:
        >>> import torch.nn.functional as F
        >>> data = torch.randn(60, 4), torch.arange(60) % 3
        >>> models = [nn.Linear(4, 3) for _ in range(2)]
        >>> ensemble = Ensemble(
        ...     models, F.cross_entropy, data, seeds=[0, 1], lr=[0.1, 0.2], batch_size=20
        ... )
        >>> ensemble.run_epoch().loss.shape  # steps, replicas
        torch.Size([3, 2])
        >>> [reading.step for reading in ensemble.readings()]
        [3, 3]
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: Loss,
        data: tuple[Tensor, Tensor],
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
        precision: Precision | None = None,
        _ops: Ops | None = None,
    ) -> None:
        check_models(models)
        check_loss(loss)
        inputs, targets = check_data(data, batch_size, sampling)
        check_loss_of_model(models[0], loss, (inputs, targets))
        check_seeds(seeds, len(models))
        check_precision(precision)
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {weight_decay}")
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
        self.precision: Precision = precision or torch_precision()
        rule = make_update_rule(algorithm, momentum, dampening)
        ops = choose_ops(self.device, self.precision) if _ops is None else _ops
        self._inputs = inputs.to(self.device)
        self._targets = self._to_targets(targets)
        self._template = copy.deepcopy(models[0])

        self._shapes, parameters, constants = stack_models(models)
        self._constants = {name: tensor.to(self.device) for name, tensor in constants.items()}
        parameters = ops.align(parameters.to(self.device))
        self._flat = FlatTensors(
            parameters,
            zeros(parameters),
            torch.empty(self.replicas, dtype=torch.float64, device=self.device),
            rule.init_state(parameters),
        )
        self.lr = lr
        network = Network(
            self._template,
            loss,
            {**tensor_views(parameters, self._shapes), **self._constants},
            tensor_views(self._flat.gradient, self._shapes),
            ops=ops,
        )
        prepared = PreparedInputsCache(network.prepare, self.device)
        largest = max_chunk_size(self._template, inputs[:1], self.replicas, self.device)
        self._evaluator = Evaluator(
            network, self._flat, prepared, max_chunk_size=largest, precision=self.precision
        )
        batches = Batches(
            prepared.get(self._inputs),
            self._targets,
            (self.steps_per_epoch, self.replicas, batch_size),
            ops=ops,
            as_indices=network.reads_indices,
        )
        self._runner = EpochRunner(
            network,
            batches,
            BatchOrders(self.seeds, len(inputs), batch_size, sampling, batches.prepare_order),
            self._flat,
            ops.updater(self._flat, rule, weight_decay),
            steps=self.steps_per_epoch,
            precision=self.precision,
        )
        columns, block = len(Averages._fields), self.steps_per_epoch
        self._averages = [HalfRunningBlocks((columns,), size=block) for _ in models]
        self._last_lrs = [math.nan] * self.replicas
        self._epoch = 0

    @property
    def replicas(self) -> int:
        """Number of replicas, R."""
        return len(self.seeds)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch, ⌊examples / batch_size⌋ for either sampling."""
        return len(self._inputs) // self.batch_size

    @property
    def epoch(self) -> int:
        """Number of epochs completed."""
        return self._epoch

    @property
    def step(self) -> int:
        """Number of steps completed."""
        return self._epoch * self.steps_per_epoch

    @property
    def lr(self) -> list[float]:
        """Learning rate of each replica. Set it to one number, or to one for each replica."""
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
        """Views of the trained parameters by name, with the replicas on the first axis."""
        return tensor_views(self._flat.parameters, self._shapes)

    def module(self, replica: int) -> nn.Module:
        """Copy a replica into an ordinary module.

        Args:
            replica: The index of the replica.

        Returns:
            A copy, on the device of `models[0]`.
        """
        model = copy.deepcopy(self._template)
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, tensor in {**self.parameters, **self._constants}.items():
                own[name].copy_(tensor[replica])
        return model

    def run_epoch(self) -> Epoch:
        """Train every replica for one epoch. The host waits for the device once, at its end.

        Returns:
            The measurements of each step.
        """
        rows = self._runner.run(self._epoch)
        for average, values in zip(self._averages, rows.unbind(1), strict=True):
            average.extend(values)
        self._epoch += 1
        self._last_lrs = self.lr
        return Epoch(self._epoch, self.step, tuple(self.lr), *rows.unbind(-1))

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

    def reset_averages(self, replicas: Iterable[int] | None = None) -> None:
        """Restart the averaging window.

        Args:
            replicas: The replicas whose window is restarted; all of them by default.
        """
        for r in range(self.replicas) if replicas is None else replicas:
            self._averages[r].reset()

    def schedule(
        self,
        *,
        threshold: PerReplica = 0.01,
        factor: PerReplica = 0.9,
        replicas: Iterable[int] | None = None,
    ) -> list[Decision]:
        """Apply the paper's adaptive schedule; call it at the end of an epoch.

        Where |L̄/R̄ − 1| is below the threshold, the learning rate of the replica is multiplied by
        the factor and its averaging window is restarted.

        Args:
            threshold: The paper's X, one number or one for each replica.
            factor: The paper's 1 − Y, one number or one for each replica.
            replicas: The replicas to consider; all of them by default.

        Returns:
            One decision for each replica considered.
        """
        rule = ReplicaSchedule(threshold, factor, self.replicas)
        readings, lrs = self.readings(), self.lr
        decisions = []
        for r in range(self.replicas) if replicas is None else replicas:
            decision = rule.decide(r, readings[r], lrs[r])
            if decision.lowered:
                lrs[r] = decision.lr
                self._averages[r].reset()
            decisions.append(decision)
        self.lr = lrs
        return decisions

    def zero_velocity(self) -> None:
        """Set v = 0 in every replica, as the paper does when the learning rate changes.

        Raises:
            ValueError: If the algorithm has no velocity.
        """
        if self.algorithm != "sgd":
            raise ValueError(f'algorithm={self.algorithm!r} has no velocity: use algorithm="sgd"')
        for buffer in self._flat.state.values():
            buffer.zero_()

    def evaluate(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        chunk_size: int | None = None,
        regularized: bool = False,
    ) -> Evaluation:
        """Compute loss and accuracy over a whole data set.

        Args:
            inputs: The inputs, (N, …).
            targets: The targets, (N, …).
            chunk_size: Examples to process at once; chosen to fit into memory by default.
            regularized: Whether to add the L2 term ½λ|θ|² to the loss.

        Returns:
            Loss and accuracy of each replica; the accuracy is nan if the targets are not classes.
        """
        weight_decay = self.weight_decay if regularized else None
        return self._evaluator.evaluate(inputs, self._to_targets(targets), chunk_size, weight_decay)

    def full_gradient(self, *, chunk_size: int | None = None) -> Tensor:
        """Compute ∇f over all training data, with the L2 term.

        Args:
            chunk_size: Examples to process at once; chosen to fit into memory by default.

        Returns:
            The gradient of each replica, (R, P), on the device.
        """
        return self._evaluator.full_gradient(
            self._inputs, self._targets, chunk_size, self.weight_decay
        )

    def full_gradient_square(self, *, chunk_size: int | None = None) -> list[float]:
        """Compute |∇f|², the full-batch term of FDR2.

        Args:
            chunk_size: Examples to process at once; chosen to fit into memory by default.

        Returns:
            |∇f|² of each replica.
        """
        gradient = self.full_gradient(chunk_size=chunk_size)
        return inner(gradient, gradient).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Copy everything that training needs to continue bit for bit.

        Returns:
            Tensors on the CPU and plain values.
        """
        return {
            "settings": self._settings(),
            "epoch": self._epoch,
            "lr": self.lr,
            "last_lr": list(self._last_lrs),
            "parameters": self._flat.parameters.to("cpu", copy=True),
            "constants": {n: t.to("cpu", copy=True) for n, t in self._constants.items()},
            "rule_state": {n: t.to("cpu", copy=True) for n, t in self._flat.state.items()},
            "averages": [mean.state_dict() for mean in self._averages],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state. Training may continue on another device and in another precision.

        Args:
            state_dict: The state of an ensemble with the same settings. If they differ, a
                ValueError is raised.
        """
        check_state(state_dict["settings"], self._settings())
        self._epoch = state_dict["epoch"]
        self.lr = state_dict["lr"]
        self._last_lrs = list(state_dict["last_lr"])
        self._flat.parameters.copy_(state_dict["parameters"])
        for own, saved in ((self._constants, "constants"), (self._flat.state, "rule_state")):
            for name, tensor in own.items():
                tensor.copy_(state_dict[saved][name])
        for mean, saved in zip(self._averages, state_dict["averages"], strict=True):
            mean.load_state_dict(saved)

    def _settings(self) -> dict[str, Any]:
        return {
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
            "seeds": list(self.seeds),
            "examples": len(self._inputs),
            "batch_size": self.batch_size,
            "sampling": self.sampling,
            "algorithm": self.algorithm,
            "momentum": self.momentum,
            "dampening": self.dampening,
            "weight_decay": self.weight_decay,
        }

    def _to_targets(self, targets: Tensor) -> Tensor:
        return targets.to(self.device, None if targets.is_floating_point() else torch.int64)
