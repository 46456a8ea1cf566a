"""Watch any optimizer through its step hooks and read FDR1 at any moment."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equilibrate.monitor.alignment import Alignments, alignments
from equilibrate.monitor.layers import LayerTable
from equilibrate.monitor.ledger import Ledger
from equilibrate.monitor.outlook import outlook
from equilibrate.monitor.totals import total
from equilibrate.monitor.updates import steps_as_sgd
from equilibrate.monitor.views import Readings
from equilibrate.monitor.weight_decay import weight_decay_of
from equilibrate.readings import Reading
from equilibrate.watching.edits import are_exchanged
from equilibrate.watching.rates import Scalar, learning_rate
from equilibrate.watching.sums import on_device
from equilibrate.watching.watcher import Watcher


class Monitor(Watcher):
    r"""Reads both sides of FDR1 from a training loop, averaged over the paper's window.

    A monitor only adds hooks to the optimizer: training is bit-identical with and without it, and
    no step waits for the device. For `torch.optim.SGD` the sides are ⟨θ·∇f⟩ and
    (1+μ)/(2(1−ν)) η⟨v²⟩, with L2 weight decay counted in ∇f. With Nesterov momentum, with
    parameters of half precision and for every other optimizer they are those of the step form,
    −⟨θ·Δ⟩/η and ⟨Δ²⟩/(2η), which for SGD without momentum is the same.

    Averages are taken over the later half of the steps since the last `reset`. Where the learning
    rate changes, each step counts with its learning rate as weight. The difference of the two sides
    is exact whatever `every` is, because it telescopes; only the right side is sampled, at the
    measured steps: the first one of a window, and then one at random in each block of `every`.

    The hooks hold no reference to the monitor: keep it in a variable for as long as it is needed.
    If parameters are sharded (FSDP2, tensor parallelism) everything that reads, and `state_dict`,
    is collective: call it on every process. A process that calls it alone waits for the others.

    Args:
        optimizer: Any `torch.optim.Optimizer`, or one that accelerate has wrapped.
        model: The model, for the names of its parameters in `layers`. An optimizer that was itself
            created from named parameters needs none.
        every: Measure one in this many steps. With 1 the right side is exact, too, at a higher
            cost.
        scale_invariant: Whether `reading` counts scale-invariant weights, those whose norm the loss
            does not depend on, as before a normalisation layer. FDR1 of such a weight describes the
            balance of its norm and weight decay, not the loss. They are recognised from their
            gradients at the first measured steps (`scale_invariance.Rotation`).

    Raises:
        TypeError: If `optimizer` is not an optimizer, `model` is not a module, or a parameter is
            complex.
        ValueError: If the optimizer has no parameters, `model` lacks one, or `every` is below 1.

    Example:
        >>> import torch
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> monitor = Monitor(optimizer)
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> optimizer.step()
        >>> monitor.reading()
        Reading(step=1, count=1, left=1, right=0.25, lr=0.5, residual=3)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        every: int = 16,
        *,
        scale_invariant: bool = True,
    ) -> None:
        self._names = {} if model is None else _names(model)
        self._scale_invariant = scale_invariant
        self._skipped: Tensor | None = None
        """Steps that gradient scaling has skipped; None if it was never seen."""
        self._ledgers: list[Ledger] = []
        self._alignments: list[Alignments] = []
        super().__init__(optimizer, every)
        if model is not None:
            _check_names(self._optimizer, self._names)
        self._remember()

    @property
    def scale_invariant(self) -> bool:
        """Whether `reading` counts scale-invariant weights."""
        return self._scale_invariant

    def reading(self) -> Reading:
        """Return FDR1 for the whole model.

        It waits for the device, so ask once in a while, not at every step.
        """
        return self.read().whole

    def group_readings(self) -> dict[str, Reading]:
        """Return FDR1 for each parameter group, by the names "group 0", "group 1" and so on.

        FDR1 holds for every group by itself, with its own learning rate, momentum and dampening.
        """
        return self.read().groups

    def layers(self, threshold: float = 0.01, budget: float = math.inf) -> LayerTable:
        """Return which layers have equilibrated: a table to print, with a row for each parameter.

        Args:
            threshold: A layer has equilibrated if |L/R − 1| and its standard error are below it.
            budget: Steps of the training, or what remains of them. The table says how many layers
                relax more slowly.

        Returns:
            The table.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
            >>> monitor = Monitor(optimizer, model)
            >>> for _ in range(100):
            ...     optimizer.zero_grad()
            ...     model(torch.randn(8, 3)).square().mean().backward()
            ...     optimizer.step()
            >>> table = monitor.layers(budget=100)
            >>> [layer.name for layer in table.layers], table.scale_invariant
            (['weight', 'bias'], ())
            >>> [(layer.name, round(layer.rotation.relaxation)) for layer in table.too_slow]
            [('weight', 500), ('bias', 500)]
        """
        return self.read().layers(threshold, budget)

    def read(self) -> Readings:
        """Return all that can be read, from one sum over the processes."""
        self._warn_of_unseen_changes()
        self.follow_parameters()
        lrs = [float(lr) for lr in self._lrs] or [math.nan] * len(self._optimizer.param_groups)
        samples = [each.sums() for each in self._alignments]
        parts, samples = total(self._ledgers, self._parameters.layout, lrs, samples)
        aligned = [alignments(each) for each in samples]
        return Readings(self, self._step - self._skips(), tuple(parts), tuple(aligned))

    def outlook(self, threshold: float = 0.01, remaining: int | None = None) -> str:
        """Tell whether |L/R − 1| can fall below a threshold, and how long that would take.

        The error of a reading falls as 1/n with the steps n in the window. A drift of the norm of
        layers before a normalisation ends at the rate that learning rate and weight decay set.
        Other layers may be faster. Like `reading` it waits for the device, and is collective.

        Args:
            threshold: The threshold, the paper's X.
            remaining: Steps left in this run.

        Returns:
            A sentence.

        Example:
            >>> import torch
            >>> theta = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.AdamW([theta], lr=1e-3, weight_decay=1e-4)
            >>> monitor = Monitor(optimizer)
            >>> theta.grad = torch.tensor([1.0, 0.0])
            >>> optimizer.step()
            >>> print(monitor.outlook(remaining=10_000))
            |L/R − 1| = 2e+03 ≥ 0.01; at lr × weight_decay = 1e-07 the norm relaxes in 5,000,000 \
steps: it will not equilibrate in this run
        """
        groups = self._optimizer.param_groups
        decays = [weight_decay_of(self._optimizer, group) for group in groups]
        return outlook(self.reading(), decays, threshold, self.since_reset, remaining)

    def reset(self) -> None:
        """Restart the averaging window. The step counter keeps running."""
        super().reset()
        for ledger in self._ledgers:
            ledger.restart()
        for each in self._alignments:
            each.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, strings and tensors that `torch.load` reads by default.

        If parameters are sharded, every process must call it. The state is the same on all of them
        and may be loaded by any number of processes, or into a model that is not sharded.
        """
        self.follow_parameters(converted=True)  # a state has one dtype
        parts = [part for ledger in self._ledgers for part in ledger.state_sums()]
        samples = [each.sums() for each in self._alignments]
        sums = iter(self._parameters.layout.total([*parts, *samples]))
        made = self._made()
        return {
            **self._counters(),
            "scale_invariant": self._scale_invariant,
            "skipped": self._skips(),
            "lrs": [float(lr) for lr in self._lrs],
            "ledgers": [
                ledger.state_dict(next(sums), next(sums), self._step, made)
                for ledger in self._ledgers
            ],
            "alignments": [each.state_dict(next(sums)) for each in self._alignments],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, `every` and `scale_invariant` included.

        Raises:
            ValueError: If it is not the state of a monitor, that of another model, or one whose
                parameters were spread over devices in another way.
        """
        self._check_state(state_dict)
        self._scale_invariant = state_dict["scale_invariant"]
        self._load_counters(state_dict)
        saved = [len(ledger["begun"]) for ledger in state_dict["ledgers"]]
        if saved != (present := [ledger.series for ledger in self._ledgers]):
            raise ValueError(
                "state_dict was saved with the parameters on other devices: it holds sums for "
                f"{saved} tensors on each, this monitor has {present}; move the model first"
            )
        self._lrs = list(state_dict["lrs"])
        self._skipped = None
        if state_dict["skipped"]:
            self._skipped = self._zero() + state_dict["skipped"]
        for ledger, saved_ledger in zip(self._ledgers, state_dict["ledgers"], strict=True):
            ledger.load_state_dict(saved_ledger, self._made())
        for each, samples in zip(self._alignments, state_dict["alignments"], strict=False):
            each.load_state_dict(samples)
        self._remember()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        names = [(p, self._names.get(id(p), "")) for p in self._parameters.params]
        return {**super().__getstate__(), "names": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach the copy to its own optimizer."""
        super().__setstate__(state)
        self._names = {id(p): name for p, name in state["names"] if name}

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "scale_invariant": self._scale_invariant}

    # Steps ------------------------------------------------------------------------------------

    def _settings(self) -> tuple[str, ...]:
        is_sgd = steps_as_sgd(type(self._optimizer))
        return ("lr", "momentum", "dampening", "nesterov") if is_sgd else ("lr",)

    def _lay_out(self) -> None:
        super()._lay_out()
        buckets, thinned = self._parameters.buckets, self._every > 1
        self._ledgers = [Ledger(b, self._optimizer, thinned=thinned) for b in buckets]
        sampled = buckets if self._is_named() or not self._scale_invariant else []
        self._alignments = [Alignments(bucket) for bucket in sampled]
        self._lrs: list[Scalar] = []
        """Learning rate of each group at the last measured step."""

    def _settings_changed(self) -> None:
        for ledger in self._ledgers:
            ledger.change(self._step, self._made())

    def _before(self, deferred: bool) -> None:
        made = self._made()
        for ledger in self._ledgers:
            ledger.before(self._step, made, measured=self._measured)
        if self._measured:
            for each in self._alignments:
                each.before()

    def _finish_step(self) -> None:
        found = getattr(self._optimizer, "found_inf", None)
        if found is not None:  # a fused step that gradient scaling may have skipped
            skipped = self._zero() if self._skipped is None else self._skipped
            self._skipped = skipped + (on_device(found, skipped) > 0)
        if self._calm and not self._measured:
            return
        made = self._made()
        for ledger in self._ledgers:
            ledger.after(self._step, made, measured=self._measured)
        if self._measured:
            for each in self._alignments:
                each.after()
            self._lrs = [learning_rate(group) for group in self._optimizer.param_groups]
        self._calm = all(ledger.is_calm() for ledger in self._ledgers)

    def _made(self) -> Scalar:
        """Return the number of steps so far without skipped ones, which is not waited for."""
        return self._step if self._skipped is None else self._step - self._skipped

    def _skips(self) -> int:
        return 0 if self._skipped is None else int(self._skipped)

    def _zero(self) -> Tensor:
        device = self._parameters.buckets[0].device
        return torch.zeros((), dtype=torch.float64, device=device)

    def _labels(self) -> dict[int, str]:
        """Return the name of each parameter by its identity, in the order of the model.

        Raises:
            ValueError: If there are none.
        """
        if not self._is_named():
            raise ValueError(
                "there is no name for any parameter: pass the model, eq.Monitor(optimizer, model)"
            )
        own: dict[int, str] = {}
        for i, group in enumerate(self._optimizer.param_groups):
            given = group.get("param_names", [])
            for j, p in enumerate(group["params"]):
                own[id(p)] = given[j] if j < len(given) else f"group {i}, parameter {j}"
        named = {key: name for key, name in self._names.items() if key in own}
        return named | {key: name for key, name in own.items() if key not in named}

    def _is_named(self) -> bool:
        groups = self._optimizer.param_groups
        return bool(self._names) or any("param_names" in group for group in groups)

    # Warnings ---------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Take the parameters as they are now as seen."""
        params = self._parameters.params
        self._seen = self._step, [p.device for p in params]
        self._norm = math.nan
        if not any(p.is_meta for p in params):
            self._norm = sum(float(ledger.norm()) for ledger in self._ledgers)

    def _warn_of_unseen_changes(self) -> None:
        """Warn if parameters have changed although no step was seen, or between two steps."""
        if are_exchanged(self._parameters.params):
            return  # they get the values back that were seen
        seen, norm = self._seen, self._norm
        self._remember()
        # Another device adds the squares up in another order: its norm is not comparable.
        idle = self.is_attached and seen == self._seen
        if idle and math.isfinite(norm) and self._norm != norm:
            warnings.warn(
                "the parameters have changed since the last reading, but no optimizer step was "
                "seen. Hooks do not run when a step is replayed from a CUDA graph or compiled: "
                "wrap such a step in `with eq.measure(optimizer):`. If you loaded other "
                "parameters, call monitor.reset()",
                stacklevel=4,
            )
        edited = [ledger.hidden_edit for ledger in self._ledgers]
        for ledger in self._ledgers:
            ledger.hidden_edit = None
        if any(found is not None and bool(found) for found in edited):
            warnings.warn(
                "the parameters were changed between two optimizer steps without PyTorch noticing, "
                "through `.data` or a shared memory, so that readings count these changes as "
                "steps. Change them inside `with torch.no_grad():` instead, as in "
                "`p.clamp_(-1, 1)`",
                stacklevel=4,
            )


def _names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter of a model by its identity.

    Raises:
        TypeError: If it is not a model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be the torch.nn.Module that is optimized, got {type(model).__name__}"
        )
    return {id(p): name for name, p in model.named_parameters()}


def _check_names(optimizer: Optimizer, names: dict[int, str]) -> None:
    missing = [
        f"group {i}, parameter {j} of shape {tuple(p.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if id(p) not in names
    ]
    if missing:
        raise ValueError(
            f"model lacks {len(missing)} parameter(s) of the optimizer ({missing[0]}): pass the "
            "model that is optimized"
        )
