"""Records sketches of the parameters at a bounded number of moments, for `equilibrate.Trace`.

A sketch multiplies each parameter with a random sign and adds them up in `WIDTH` buckets. It is
linear, and its squared norm is |θ|² on average, with the variance 2|θ|⁴/WIDTH. Signs come from
generators with fixed seeds, one for each tensor and shard, so they need not be stored.

Each group is scaled by 1/√(2η′), η′ = η(1−ν)/(1−μ), so that the change of the squared norm between
two steps is −Σ(L − R), and the displacement without a restoring force is ΣR. The term μθ·b of FDR1
with momentum is left out: it is correlated over 1/(1−μ) steps only, and a trace is much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibrate._engine.optimizer.updates import Group, learning_rate
from equilibrate._engine.relation.probe import Probe
from equilibrate._engine.sharding import Layout, local, shard_index
from equilibrate.stationarity import Trace

WIDTH = 64
"""Numbers in a sketch."""
CAPACITY = 128
"""Sketches stored at most; then every other one is dropped."""
_CHUNK = 1 << 20
"""Elements whose signs are drawn at once."""


class TraceRecorder:
    """Sketches of the parameters of some probes since the last restart.

    Args:
        probes: The probes, which also measure the right side.
        layout: How the parameters are distributed over processes.
    """

    def __init__(self, probes: Sequence[Probe], layout: Layout) -> None:
        self._probes = list(probes)
        self._layout = layout
        self._device = self._probes[0].device
        self._rows = torch.zeros(CAPACITY, WIDTH + 1, dtype=torch.float64, device=self._device)
        self._sketch = Sketch([p for probe in self._probes for p in probe.params], layout)
        self._forget_tallies()
        self.restart()

    def restart(self) -> None:
        """Drop all records; the next one is the first."""
        self._steps: list[int] = []
        """Step of each record, since the last reset of the monitor."""
        self._marks = 0
        """Moments so far, of which every `_stride`-th is recorded."""
        self._stride = 1
        self._last = -1
        """Step of the last of them."""
        self._settings: list[tuple[float, ...]] = []
        self._offset: Tensor | None = None

    def mark(self, step: int) -> None:
        """Record where the parameters are, or begin again if learning rates have changed.

        Args:
            step: Steps since the last reset of the monitor.
        """
        if any(p.is_meta for probe in self._probes for p in probe.params):
            return  # there is no place yet
        if self._steps and self._has_changed():
            self.restart()
        if step == self._last:
            return
        if not self._steps:
            self._settings = [_settings(probe.optimizer_group) for probe in self._probes]
            self._offset = self._free()
        if self._marks % self._stride == 0:
            self._append(step)
        self._marks += 1
        self._last = step

    def parts(self) -> list[Tensor]:
        """Return this process's records, for `Layout.total`."""
        return [self._rows[: len(self._steps)]]

    def read(self, rows: Tensor) -> Trace:
        """Return the trace.

        Args:
            rows: What `parts` returns, added up over all processes.
        """
        found = rows.cpu().numpy()
        steps = np.array(self._steps, dtype=np.int64) - (self._steps[0] if self._steps else 0)
        return Trace(steps, found[:, :-1].copy(), found[:, -1].copy())

    def state_sums(self) -> list[Tensor]:
        """Return this process's part of the state, for `Layout.total`."""
        rows = self._rows.clone()
        rows[len(self._steps) :] = 0
        return [rows, self._free() if self._steps else self._rows.new_zeros(())]

    def state_dict(self, rows: Tensor, free: Tensor) -> dict[str, Any]:
        """Return the state.

        Args:
            rows: First item of `state_sums`, added up over all processes.
            free: Second item of `state_sums`, added up over all processes.
        """
        return {
            "rows": rows,
            "free": free,
            "steps": list(self._steps),
            "marks": self._marks,
            "stride": self._stride,
            "last": self._last,
            "settings": [list(values) for values in self._settings],
            "layout": self._sketch.layout(),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a state, or restart if its sketches were made with other signs."""
        self.restart()
        self._forget_tallies()
        if not state or state["layout"] != self._sketch.layout() or not state["steps"]:
            return
        processes = self._layout.processes
        self._rows.copy_(state["rows"] / processes)
        self._offset = -state["free"].to(self._device) / processes
        self._steps, self._marks = list(state["steps"]), state["marks"]
        self._stride, self._last = state["stride"], state["last"]
        self._settings = [tuple(values) for values in state["settings"]]

    def _forget_tallies(self) -> None:
        for probe in self._probes:
            probe.ring.tally = torch.zeros((), dtype=torch.float64, device=probe.device)

    def _append(self, step: int) -> None:
        if len(self._steps) == CAPACITY:
            self._steps = self._steps[::2]
            self._rows[: len(self._steps)] = self._rows[::2].clone()
            self._stride *= 2
        with torch.no_grad():
            row = self._rows[len(self._steps)]
            row[:-1] = self._sketch(self._scales(), self._device)
            row[-1] = self._free()
        self._steps.append(step)

    def _free(self) -> Tensor:
        """Return ΣR since the trace began, in units of free diffusion."""
        total = self._rows.new_zeros(())
        for probe, settings in zip(self._probes, self._settings, strict=True):
            probe.ring.settle()
            assert probe.ring.tally is not None
            factor = 1.0 if probe.has_momentum() else settings[2]
            total = total + factor * probe.ring.tally.to(self._device, non_blocking=True)
        return total if self._offset is None else total - self._offset

    def _scales(self) -> list[float | Tensor]:
        scales: list[float | Tensor] = []
        for probe, (_, effective, _, _) in zip(self._probes, self._settings, strict=True):
            lr = learning_rate(probe.optimizer_group)
            if isinstance(lr, Tensor) and lr.is_cuda:  # `effective` is then in units of η
                scale: float | Tensor = torch.where(lr == 0, 0.0, (2 * lr * effective).rsqrt())
            else:
                scale = (2 * float(lr) * effective) ** -0.5 if float(lr) else 0.0
            scales += [scale] * len(probe.params)
        return scales

    def _has_changed(self) -> bool:
        """Return whether learning rates or momenta differ by more than 1 % from the start's."""
        for probe, old in zip(self._probes, self._settings, strict=True):
            new = _settings(probe.optimizer_group)
            pairs = zip(new[:3], old[:3], strict=True)
            if new[3] != old[3] or any(abs(a - b) > 0.01 * abs(b) for a, b in pairs):
                return True
        return False


class Sketch:
    """A random projection of a list of tensors to `WIDTH` numbers.

    Args:
        params: The tensors.
        layout: How they are distributed over processes.
    """

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self._params = list(params)
        self._layout = layout
        self._shards = [layout.shards(p) for p in self._params]

    def layout(self) -> list[Any]:
        """Return what the signs depend on."""
        devices = [local(p).device.type for p in self._params]
        return [self._layout.processes, self._shards, devices]

    def __call__(self, scales: Sequence[float | Tensor], device: torch.device) -> Tensor:
        """Return this process's part of the sketch, in float64 on a device."""
        total = torch.zeros(WIDTH, dtype=torch.float64, device=device)
        offset = 0
        for i, (p, scale) in enumerate(zip(self._params, scales, strict=True)):
            part = local(p).detach()
            shard = shard_index(p, self._layout)
            share = self._shards[i] / self._layout.processes
            # Small tensors and shards begin at different buckets, so that they share none.
            place = (offset + shard * part.numel()) % WIDTH
            found = _project(part, i * 65_537 + shard).roll(place) * (scale * share)
            total += found.to(device, non_blocking=True)
            offset += part.numel() * self._shards[i]
        return total


def _project(tensor: Tensor, seed: int) -> Tensor:
    """Return the sums of the elements with random signs, element i in bucket i mod WIDTH."""
    generator = torch.Generator(device=tensor.device).manual_seed(seed)
    flat = tensor.reshape(-1)
    total = torch.zeros(WIDTH, dtype=torch.float64, device=tensor.device)
    for piece in flat.split(_CHUNK):
        signs = torch.empty(len(piece), dtype=torch.int8, device=tensor.device)
        signs.random_(0, 2, generator=generator)
        signed = piece.double() * signs.mul_(2).sub_(1)  # a new tensor, whatever the dtype
        whole = len(signed) - len(signed) % WIDTH
        total += signed[:whole].view(-1, WIDTH).sum(0)
        total[: len(signed) - whole] += signed[whole:]
    return total


def _settings(group: Group) -> tuple[float, float, float, float]:
    """Return η, η′/η, free diffusion in units of R, and the version of a learning rate tensor.

    Successive steps are correlated by momentum, so n free steps displace the parameters by more
    than √n of them. A learning rate on a GPU is not compared, since that would wait for it: any
    change of the tensor counts.
    """
    lr = group.get("lr")
    if isinstance(lr, Tensor) and lr.is_cuda:
        known, version = 1.0, float(lr._version)
    else:
        known, version = float(learning_rate(group)), 0.0
    return known, *_correlation(group), version


def _correlation(group: Group) -> tuple[float, float]:
    """Return η′/η, and the factor from R of the step form to free diffusion in units of 1/(2η′).

    It is the sum of the correlations between a step and all others: with heavy-ball momentum, and
    for Adam's first moment, (1+μ)/(1−μ) times the square of a step.
    """
    betas = group.get("betas")
    if isinstance(betas, tuple | list) and betas and not isinstance(betas[0], Tensor):
        return 1.0, (1 + betas[0]) / (1 - betas[0])
    momentum, dampening = group.get("momentum", 0.0), group.get("dampening", 0.0)
    if not isinstance(momentum, float | int) or not 0 < momentum < 1:
        return 1.0, 1.0
    keep = 1 - dampening if isinstance(dampening, float | int) and dampening < 1 else 1.0
    growth = (1 + momentum) / (1 - momentum)
    if group.get("nesterov"):
        squares = (1 + momentum) ** 2 + momentum**4 / (1 - momentum**2)
        growth = 1 / ((1 - momentum) ** 2 * squares)
    effective = keep / (1 - momentum)
    return effective, growth / effective
