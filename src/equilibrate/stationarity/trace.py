"""Records sketches of the parameters at a bounded number of moments.

A sketch multiplies each parameter with a random sign and adds them up in `WIDTH` buckets. It is
linear, and its squared norm is |θ|² on average, with the variance 2|θ|⁴/WIDTH. Signs come from
generators with fixed seeds, one for each tensor and shard, so they need not be stored.

Each group is scaled by 1/√(2η′), η′ = η(1−ν)/(1−μ), so that the change of the squared norm between
two steps is −Σ(L − R) of FDR1. The term μθ·b with momentum is left out: it is correlated over
1/(1−μ) steps only, and a trace is much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibrate.monitor.monitor import Monitor
from equilibrate.watching.edits import are_exchanged
from equilibrate.watching.rates import Group, learning_rate
from equilibrate.watching.sharding import Layout, local

WIDTH = 64
"""Numbers in a sketch."""
CAPACITY = 128
"""Sketches stored at most; then every other one is dropped."""
_CHUNK = 1 << 20
"""Elements whose signs are drawn at once."""


class TraceRecorder:
    """Sketches of the parameters that a monitor watches, since its last reset.

    Args:
        monitor: The monitor.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._parameters = monitor.parameters
        self._device = self._parameters.buckets[0].device
        self._rows = torch.zeros(CAPACITY, WIDTH, dtype=torch.float64, device=self._device)
        self._sketch = Sketch(self._parameters.params, self._parameters.layout)
        self._restart()

    def _restart(self) -> None:
        self._steps: list[int] = []
        """Step of each record, since the last reset of the monitor."""
        self._marks = 0
        """Moments so far, of which every `_stride`-th is recorded."""
        self._stride = 1
        self._last = -1
        """Step of the last of them."""
        self._settings: list[tuple[float, float, float]] = []

    def fits(self, monitor: Monitor) -> bool:
        """Return whether it records the parameters that a monitor watches now."""
        return monitor is self._monitor and monitor.parameters is self._parameters

    def mark(self) -> None:
        """Record where the parameters are, or begin again if learning rates have changed.

        At most 128 positions are stored: then every other one is dropped, and only every second
        call is recorded. Nothing waits for the device.
        """
        params = self._parameters.params
        if any(p.is_meta for p in params) or are_exchanged(params):
            return  # there is no place yet, or another one for the duration of a block
        groups = self._monitor.optimizer.param_groups
        if self._monitor.since_reset == 0 or (self._steps and self._has_changed()):
            self._restart()
        step = self._monitor.since_reset
        if step == self._last:
            return
        if not self._steps:
            self._settings = [_settings(group) for group in groups]
        if self._marks % self._stride == 0:
            self._append(step)
        self._marks += 1
        self._last = step

    def read(self) -> NDArray[np.float64]:
        """Return the positions over all processes, each of which must call it."""
        (rows,) = self._parameters.layout.total([self._rows[: len(self._steps)]])
        return rows.numpy()

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Every process must call it."""
        rows = self._rows.clone()
        rows[len(self._steps) :] = 0
        (total,) = self._parameters.layout.total([rows])
        return {
            "rows": total,
            "steps": list(self._steps),
            "marks": self._marks,
            "stride": self._stride,
            "last": self._last,
            "settings": [list(values) for values in self._settings],
            "layout": self._sketch.layout(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, or restart if its sketches were made with other signs."""
        self._restart()
        if not state or state["layout"] != self._sketch.layout():
            return
        self._rows.copy_(state["rows"] / self._parameters.layout.processes)
        self._steps, self._marks = list(state["steps"]), state["marks"]
        self._stride, self._last = state["stride"], state["last"]
        self._settings = [tuple(values) for values in state["settings"]]

    def _append(self, step: int) -> None:
        if len(self._steps) == CAPACITY:
            self._steps = self._steps[::2]
            self._rows[: len(self._steps)] = self._rows[::2].clone()
            self._stride *= 2
        with torch.no_grad():
            self._rows[len(self._steps)] = self._sketch(self._scales(), self._device)
        self._steps.append(step)

    def _scales(self) -> list[float | Tensor]:
        scales: list[float | Tensor] = []
        groups = self._monitor.optimizer.param_groups
        for group, (_, effective, _) in zip(groups, self._settings, strict=True):
            lr = learning_rate(group)
            if isinstance(lr, Tensor) and lr.is_cuda:
                scale: float | Tensor = torch.where(lr == 0, 0.0, (2 * lr * effective).rsqrt())
            else:
                scale = (2 * float(lr) * effective) ** -0.5 if float(lr) else 0.0
            scales += [scale] * len(group["params"])
        return scales

    def _has_changed(self) -> bool:
        """Return whether learning rates or momenta differ by more than 1 % from the start's."""
        groups = self._monitor.optimizer.param_groups
        for group, old in zip(groups, self._settings, strict=True):
            new = _settings(group)
            pairs = zip(new[:2], old[:2], strict=True)
            if new[2] != old[2] or any(abs(a - b) > 0.01 * abs(b) for a, b in pairs):
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
            shard = self._layout.shard_index(p)
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


def _settings(group: Group) -> tuple[float, float, float]:
    """Return η, η′/η = (1−ν)/(1−μ), and the version of a learning rate tensor.

    A learning rate on a GPU is not compared, since that would wait for it: any change of the
    tensor counts.
    """
    lr, version = group.get("lr"), 0.0
    if isinstance(lr, Tensor) and lr.is_cuda:
        known, version = 1.0, float(lr._version)
    else:
        known = float(learning_rate(group))
    momentum, dampening = group.get("momentum", 0.0), group.get("dampening", 0.0)
    if not isinstance(momentum, float | int) or not 0 < momentum < 1:
        return known, 1.0, version
    keep = 1 - dampening if isinstance(dampening, float | int) and dampening < 1 else 1.0
    return known, keep / (1 - momentum), version
