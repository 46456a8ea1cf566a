"""A running mean m of the parameters, and samples of (θ − m)·g."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate.forecast.outcome import Samples
from equilibrate.watching.edits import exchanged
from equilibrate.watching.means import Means, choose
from equilibrate.watching.parameters import Bucket, ParameterSet
from equilibrate.watching.sharding import distribute_like, local
from equilibrate.watching.sums import norms, on_device

_ROWS = 8192
"""Samples that are kept: those of the later half of 262,144 steps, if one in 16 is sampled."""


class SampleLog:
    """The last samples: steps, how old the mean of the parameters was, and two numbers of each.

    Args:
        rows: Number of samples to keep.
        devices: Where parts of the numbers are measured.
    """

    def __init__(self, rows: int, devices: Sequence[torch.device]) -> None:
        self._rows = rows
        self.parts = [torch.zeros(rows, 2, dtype=torch.float64, device=d) for d in devices]
        """The numbers, which are sums of these."""
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        for part in self.parts:
            part.zero_()
        self.taken = 0
        """Number of samples so far."""
        self._steps, self._ages = array("q", [0] * self._rows), array("d", [0.0] * self._rows)

    @property
    def last(self) -> int:
        """The row of the last sample."""
        return (self.taken - 1) % self._rows

    def add(self, step: int, age: float) -> int:
        """Note a sample.

        Returns:
            The row to write it into.
        """
        self.taken += 1
        self._steps[self.last], self._ages[self.last] = step, age
        return self.last

    def samples(self, values: np.ndarray, since: int) -> Samples:
        """Return the samples whose mean is nearly all of parameters after a step.

        Args:
            values: Values of all rows.
            since: The step.
        """
        steps, ages = np.array(self._steps), np.array(self._ages)
        chosen = (np.arange(self._rows) < self.taken) & (steps - 2 * ages >= since)
        return Samples(steps[chosen].astype(float), values[chosen], ages[chosen])

    def state_dict(self, values: Tensor) -> dict[str, Any]:
        """Return the state, with the values of all rows."""
        kept = min(self.taken, self._rows)
        return {
            "taken": self.taken,
            "steps": self._steps[:kept].tolist(),
            "ages": self._ages[:kept].tolist(),
            "values": values[:kept].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any], processes: int = 1) -> None:
        """Restore a state, with all values in the first part: only their sum is ever used.

        Args:
            state: What `state_dict` returned.
            processes: Number of processes whose parts are summed.
        """
        self.clear()
        self.taken = state["taken"]
        for i, (step, age) in enumerate(zip(state["steps"], state["ages"], strict=True)):
            self._steps[i], self._ages[i] = step, age
        if values := state["values"]:
            first = self.parts[0]
            first[: len(values)] = first.new_tensor(values) / processes


class RunningMean:
    """An exponential mean of the parameters at some steps, one after the other.

    Memory for the mean is allocated at the first sample.

    Args:
        parameters: The parameters.
        optimizer: The optimizer that moves them.
        step: Number of steps so far.
    """

    def __init__(self, parameters: ParameterSet, optimizer: Optimizer, step: int) -> None:
        self._parameters = parameters
        buckets = parameters.buckets
        self._parts = [_BucketMean(bucket, optimizer, 1 / len(buckets)) for bucket in buckets]
        self._log = SampleLog(_ROWS, [bucket.device for bucket in buckets])
        self._unseen = 1.0
        """Weight that the mean has not given to any sample yet."""
        self._age, self._last = 0.0, step - 1
        """Mean age of the parameters in the mean at the last sample, and the step of this one."""

    @property
    def taken(self) -> int:
        """Number of samples so far."""
        return self._log.taken

    @property
    def last(self) -> int:
        """The step of the last sample."""
        return self._last

    @property
    def device(self) -> torch.device:
        """The device of the first parameters."""
        return self._log.parts[0].device

    def age(self, step: int) -> float:
        """Return the mean age of the parameters in the mean, in steps."""
        return self._age + step - self._last

    def save(self) -> None:
        """Copy the parameters before a step whose gradient is not known yet."""
        for part in self._parts:
            part.save()

    def sample(self, step: int, half_life: float, *, saved: bool) -> None:
        """Take a sample at a step, counted from 0, and move the mean.

        Args:
            step: The step.
            half_life: Half-life of the mean, in steps.
            saved: Whether the parameters of this step are those of the last `save`.
        """
        decay = 2 ** (-(step - self._last) / half_life)
        self._unseen *= decay
        share = (1 - decay) / (1 - self._unseen)  # unbiased: the first sample has all the weight
        age = self.age(step)
        row = self._log.add(step, age if self.taken else math.inf)
        for part, rows in zip(self._parts, self._log.parts, strict=True):
            part.sample(rows[row], share, saved=saved)
        self._age, self._last = (1 - share) * age, step

    def totals(self) -> Tensor:
        """Return all rows on the host: (θ − m)·g, and whether the step was made.

        If parameters are sharded, every process must call it.
        """
        return torch.stack(self._parameters.layout.total(self._log.parts)).sum(0)

    def samples(self, totals: Tensor, since: int) -> Samples:
        """Return the samples of (θ − m)·g at steps that were made, given `totals`."""
        values, made = totals.unbind(1)
        return self._log.samples(torch.where(made > 0.5, values, math.nan).numpy(), since)

    def is_finite(self) -> bool:
        """Return whether the mean is finite. If parameters are sharded, every process must call it.

        The last sample does not tell if a tensor had no gradient, or the step was skipped.
        """
        sums = [part.norm() for part in self._parts]
        return all(map(torch.isfinite, self._parameters.layout.total(sums)))

    def was_finite(self, totals: Tensor) -> bool:
        """Return whether the last sample was finite, given `totals`."""
        return not self.taken or math.isfinite(totals[self._log.last, 0].item())

    def tensors(self) -> list[Tensor]:
        """Return the mean in the order of the parameters, distributed as these are."""
        found: dict[int, Tensor] = {}
        for part in self._parts:
            pairs = zip(part.bucket.params, part.means.tensors()[0], strict=True)
            found.update({id(p): distribute_like(p, m) for p, m in pairs})
        return [found[id(p)] for p in self._parameters.params]

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Give the parameters the values of the mean for a block, if there was a sample.

        Yields:
            None.
        """
        if not self.taken:
            yield
            return
        with exchanged(self._parameters.params, self.tensors()):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the mean is not copied. Collective if sharded."""
        return {
            "unseen": self._unseen,
            "age": self._age,
            "last_sample": self._last,
            "products": self._log.state_dict(self.totals()),
            "mean": self.tensors(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._unseen, self._age = state["unseen"], state["age"]
        self._last = state["last_sample"]
        with torch.no_grad():
            for mean, saved in zip(self.tensors(), state["mean"], strict=True):
                local(mean).copy_(local(saved))
        self._log.load_state_dict(state["products"], self._parameters.layout.processes)


class _BucketMean:
    """The mean of the parameters of one bucket.

    Args:
        bucket: The parameters.
        optimizer: The optimizer that moves them.
        share: The share of this bucket in the column for steps that were made.
    """

    def __init__(self, bucket: Bucket, optimizer: Optimizer, share: float) -> None:
        self.bucket = bucket
        self._optimizer = optimizer
        self._made = share / bucket.layout.processes
        self._saved: list[Tensor] | None = None
        self._kept: Means | None = None

    @property
    def means(self) -> Means:
        """The mean of this process's parts of the parameters."""
        if self._kept is None:
            self._kept = choose(self.bucket.local(), 1, self.bucket.shares())
        return self._kept

    def norm(self) -> Tensor:
        """Return |m|² of this process's part; 0 before the first sample."""
        if self._kept is None:
            return torch.zeros((), dtype=torch.float64, device=self.bucket.device)
        return norms(self._kept.tensors()[0]).sum()

    def save(self) -> None:
        """Copy the parameters before a step whose gradient is not known yet."""
        self._saved = [p.detach().clone() for p in self.bucket.local()]

    def sample(self, sample: Tensor, share: float, *, saved: bool) -> None:
        """Write a sample and move the mean.

        Args:
            sample: Where to write (θ − m)·g, and whether the step is made, or skipped by gradient
                scaling.
            share: By which share of θ − m the mean moves.
            saved: Whether the parameters are those of the last `save`.
        """
        params, self._saved = self._saved if saved else self.bucket.local(), None
        assert params is not None
        value, made = sample[:-1], sample[-1]
        gradients = self.bucket.local_like([p.grad for p in self.bucket.params])
        self.means.measure(params, gradients, value, [share])
        if self._optimizer.param_groups[self.bucket.group].get("maximize", False):
            value.neg_()
        made.fill_(self._made)
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:
            value.div_(on_device(scale, value))
        if (found := getattr(self._optimizer, "found_inf", None)) is not None:
            sample.masked_fill_(on_device(found, sample) > 0, 0.0)
