"""Measures the parameters of one bucket at some steps, and turns that into both sides of FDR1.

Between two measurements, at steps s and T, the difference of the sides telescopes:

    Σ (L − R) = [−(1−μ)(N_T − N_s)/(2η) + μ(θ_T·b_T − θ_s·b_s)] / (1−ν),        N = |θ|², b = −v

so it is exact however many steps lie between them. R is sampled at the measured steps. For a
single step the same number follows from θ′·d and d² alone, without a difference of norms:

    L − R = [θ′·d − μ θ·b + (1−μ)/2 · ηd²] / (1−ν)                      (d = b′ with momentum)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate._engine.edits import EditWatch
from equilibrate._engine.sharding import Layout, as_dtensor, local, local_like
from equilibrate._engine.sums import ALONG, NORM, SQUARE, choose, send
from equilibrate._engine.updates import Scalar, Update, settings_getter, update_of
from equilibrate._engine.window import Window
from equilibrate.observables import fdr1_coefficient

_BLOCK = 64
"""Measurements between which sums are worked out together, in a few operations."""


class _Entry(NamedTuple):
    """One measurement: what it ends, and how to turn it into a row."""

    steps: int
    """Steps since the measurement before it; 0 if it only begins an interval."""
    sampled: bool
    """Whether d² is that of the last step."""
    coefficients: tuple[Scalar, ...]
    """Those of θ′·d, of θ·b before, of N′ − N and of d² in L − R, and of d² in R."""
    moving: Tensor | None
    """1 for each tensor that the step moved and 0 for the others; None if it moved all."""
    skips: tuple[Tensor, Tensor] | None
    """Whether gradient scaling skipped the step, and how many it has skipped so far."""


class Probe:
    """Both sides of FDR1 for the parameters of one group, device and dtype.

    Args:
        optimizer: The optimizer that moves the parameters.
        group: Index of their parameter group.
        params: The parameters.
        layout: How the parameters of the optimizer are distributed over processes.
        each: Whether to keep the sums of each parameter instead of their total.
        thinned: Whether some steps are not measured. Norms are measured only then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: int,
        params: Sequence[Tensor],
        layout: Layout,
        *,
        each: bool,
        thinned: bool,
    ) -> None:
        self._optimizer = optimizer
        self.group = group
        self.params = list(params)
        self.layout = layout
        self.each = each
        self._thinned = thinned
        self._distributed = any(as_dtensor(p) is not None for p in self.params)
        parts = self._local(self.params)
        self.device = device = parts[0].device
        self._dtype = parts[0].dtype
        self._sums = choose(parts)
        self._series = len(self.params) if each else 1
        self.window = Window(2 * self._series + 2, device)
        # The row before the first holds the measurement at which the open interval began.
        self._ring = torch.zeros(
            _BLOCK + 1, len(self.params), 3, dtype=torch.float64, device=device
        )
        self._shards = _host_to(self._ring, [float(layout.shards(p)) for p in self.params])
        self._entries: list[_Entry] = []
        self._update: Update | None = None
        self._key: Any = None
        self._open: int | None = None
        """Steps since the open interval began; None if there is none."""
        self._begun: Update | None = None
        """The update with which the open interval began."""
        self._measured: Update | None = None
        """The update of the step that is being measured."""
        self._fresh = False
        """Whether that step creates the momentum buffers."""
        self._settings = settings_getter(optimizer.param_groups[group])
        self._edits = EditWatch()
        self._checked = False
        """Whether the parameters were checked for edits before the step."""
        self._states: tuple[Any, list[dict[str, Any]]] | None = None
        self._skipped: Tensor | None = None
        self._skips_settled: Tensor | None = None

    def before(self, *, measured: bool) -> None:
        """Prepare for a step: notice changed settings and parameters, and copy what is needed."""
        group = self._optimizer.param_groups[self.group]
        key = self._settings(group)
        changed = key != self._key
        self._checked = measured or changed or self._edits.every_step
        if not self._checked:
            return
        if self._edits.is_edited(self._counted()):
            self._open = None
        if changed:
            self._key = key
            self._change(update_of(self._optimizer, group, self._dtype))
        if measured:
            assert self._update is not None
            self._measured = self._update
            if self._open is None:
                self._begin(self._measured)
            if self._measured.source == "difference":
                self._sums.save(self._local(self.params))

    def after(self, *, measured: bool) -> None:
        """Note a step, and measure it if asked to."""
        found = getattr(self._optimizer, "found_inf", None)
        if found is not None:  # a fused step that gradient scaling may have skipped
            self._count_skip(found)
        if self._open is not None:
            self._open += 1
        if measured:
            self._measure(found)
        if self._checked:
            self._edits.step(self._counted())
        else:
            self._edits.pass_over()

    def after_idle(self) -> None:
        """Note a step that has not changed anything but version counters."""
        self._edits.pass_over()

    def restart(self) -> None:
        """Begin a new window at the next step."""
        self._entries = []
        self._open = None
        self.window.reset()

    def settle(self) -> None:
        """Work out the rows of all measurements so far."""
        if not self._entries:
            return
        rows = self._rows()
        first = 0
        for i, entry in enumerate([*self._entries, None]):
            if entry is None or not entry.steps:  # a measurement that only begins an interval
                lengths = [e.steps for e in self._entries[first:i]]
                self.window.extend(rows[first:i], lengths)
                first = i + 1
        self._ring[0] = self._ring[len(self._entries)]
        self._entries = []

    def sums(self) -> Tensor:
        """Return this process's sums over the window, for `Layout.total`."""
        self.settle()
        lengths = None
        if self._skipped is not None:
            lengths = self.window.column(-2).tolist()
        return self.window.rows(lengths).sum(0)

    def means(self, total: Tensor) -> Tensor:
        """Return the means over the window: L of each series, R of each series, steps.

        Args:
            total: What `sums` returns, added up over all processes.
        """
        # Steps are counted by every process, and added up with the rest.
        steps, sampled = total[-2:] / self.layout.processes
        difference, right = total[:-2].unflatten(0, (2, self._series))
        right = right / sampled
        return torch.cat([right + difference / steps, right, steps[None]])

    def skipped(self) -> int:
        """Return how many steps gradient scaling has skipped."""
        return 0 if self._skipped is None else int(self._skipped)

    def norm(self) -> float:
        """Return |θ|² of this process's part, which waits for the device."""
        out = torch.zeros_like(self._ring[0])
        params = self._local(self.params)
        nothing = [None] * len(params)
        choose(params).measure(Update("difference", 0.0), params, nothing, nothing, out, norm=True)
        return out[:, NORM].sum().item()

    def state_sums(self) -> list[Tensor]:
        """Return this process's part of the state, for `Layout.total`."""
        self.settle()
        return [self.window.state_dict()["rows"], self._ring[0] * self._share()]

    def state_dict(self, rows: Tensor, begun: Tensor) -> dict[str, Any]:
        """Return the state, which does not depend on how parameters are distributed.

        Args:
            rows: First item of `state_sums`, added up over all processes.
            begun: Second item of `state_sums`, added up over all processes.
        """
        rows[:, -2:] /= self.layout.processes
        return {
            "window": {**self.window.state_dict(), "rows": rows},
            "begun": begun,
            "open": -1 if self._open is None else self._open,
            "skipped": self.skipped(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, which may come from another number of processes."""
        self._entries = []
        rows = state["window"]["rows"].clone()
        rows[:, :-2] /= self.layout.processes
        self.window.load_state_dict({**state["window"], "rows": rows})
        self._ring[0] = state["begun"].to(self._ring.device) / self._shards[:, None]
        self._open = None if state["open"] < 0 else state["open"]
        group = self._optimizer.param_groups[self.group]
        self._key = self._settings(group)
        self._update = self._begun = update_of(self._optimizer, group, self._dtype)
        self._edits.forget()
        if state["skipped"]:
            self._skipped = _host_to(self._ring, float(state["skipped"]))
            self._skips_settled = self._skipped.clone()

    # Measuring --------------------------------------------------------------------------------

    def _change(self, update: Update) -> None:
        """Take new settings, ending the open interval if they differ too much from the old."""
        if self._open is not None:
            assert self._begun is not None
            if self._open and not update.continues(self._begun):
                self._end_before_change()
            if update.momentum > 0 and self._begun.momentum == 0:
                self._open = None  # θ·b was not measured
        self._update = update
        if self._open == 0:
            self._begun = update

    def _end_before_change(self) -> None:
        """Measure where the parameters are now, so that the steps so far make up an interval."""
        assert self._begun is not None
        begun = self._begun
        self._write(begun)
        coefficients = _over_an_interval(begun)
        self._note(_Entry(self._open or 0, False, coefficients, None, self._skips(None)))
        self._open = 0

    def _begin(self, update: Update) -> None:
        """Begin an interval before a step; the step alone makes up an interval of its own."""
        # A single step needs θ·b before it and nothing else, unless it may be skipped.
        scaled = getattr(self._optimizer, "found_inf", None)
        if scaled is not None and self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.float64, device=self._ring.device)
        if update.momentum > 0 or scaled is not None:
            self._write(update)
        else:
            self._slot().zero_()
        self._note(_Entry(0, False, (0.0,) * 5, None, self._skips(None)))
        self._open, self._begun = 0, update
        self._fresh = update.momentum > 0 and all(b is None for b in self._buffers())

    def _measure(self, found: Tensor | None) -> None:
        """Measure the step that has just been made."""
        update, begun = self._measured, self._begun
        assert update is not None
        assert begun is not None
        assert self._open is not None
        moving = self._moving(update)
        self._write(update, moved=True)
        if self._thinned:
            self._sums.free()
        if found is not None and update.source != "buffer":
            slot = self._slot()
            slot[:, ALONG:].masked_fill_(_on(found, slot) > 0, 0.0)  # an infinite gradient
        # Where a step may have been skipped, d² is not that of a step, but norms are right.
        if self._open == 1 and found is None:
            coefficients = _over_one_step(update, fresh=self._fresh)
        else:
            coefficients = _over_an_interval(update, begun)
        self._note(_Entry(self._open, True, coefficients, moving, self._skips(found)))
        self._open, self._begun, self._fresh = 0, update, False

    def _write(self, update: Update, *, moved: bool = False) -> None:
        """Write N, θ′·d and d² into the next row of the ring.

        Before a step, when `moved` is false, only θ·b has a meaning beside N.
        """
        params = self._local(self.params)
        if not moved and update.source != "buffer":
            update = Update("difference", 0.0)  # N alone
        self._sums.measure(
            update,
            params,
            self._local_like([p.grad for p in self.params]) if update.gradient else (),
            self._local_like(self._buffers()) if update.buffer else (),
            self._slot(),
            norm=self._thinned or self._skipped is not None,
        )

    def _slot(self) -> Tensor:
        return self._ring[len(self._entries) + 1]

    def _note(self, entry: _Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) == _BLOCK:
            self.settle()

    def _moving(self, update: Update) -> Tensor | None:
        """Return which tensors the step has moved: SGD leaves those without a gradient alone."""
        if update.source == "difference":
            return None
        moving = [p.grad is not None for p in self.params]
        return None if all(moving) else _host_to(self._ring, [float(m) for m in moving])

    def _buffers(self) -> list[Tensor | None]:
        # Looking a tensor up in the state takes long, so its entries are kept; a state that was
        # loaded is a new object.
        state = self._optimizer.state
        if self._states is None or self._states[0] is not state:
            if any(p not in state for p in self.params):
                return [state.get(p, {}).get("momentum_buffer") for p in self.params]
            self._states = state, [state[p] for p in self.params]
        return [entry.get("momentum_buffer") for entry in self._states[1]]

    def _local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [local(t) for t in tensors] if self._distributed else tensors

    def _counted(self) -> Sequence[Tensor]:
        """Return the tensors whose versions count changes of the parameters.

        Operations on a DTensor increase its own version, those on its local part only that one's.
        """
        return [*self.params, *self._local(self.params)] if self._distributed else self.params

    def _local_like(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the local parts of gradients or buffers; there are none where none are needed."""
        if not (self._distributed and tensors):
            return tensors
        return [local_like(p, t) for p, t in zip(self.params, tensors, strict=True)]

    def _share(self) -> Tensor:
        """Return a factor for each parameter, with which the total counts it once."""
        return self._shards[:, None] / self.layout.processes

    # Gradient scaling -------------------------------------------------------------------------

    def _count_skip(self, found: Tensor) -> None:
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.float64, device=self._ring.device)
        self._skipped += _on(found, self._skipped) > 0

    def _skips(self, found: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if self._skipped is None:
            return None
        last = torch.zeros_like(self._skipped) if found is None else _on(found, self._skipped) > 0
        return last.double(), self._skipped.clone()

    # Working out ------------------------------------------------------------------------------

    def _rows(self) -> Tensor:
        """Return a row for each entry: Σ(L − R), ΣR, steps, and steps represented in ΣR."""
        entries = self._entries
        ring = self._ring[: len(entries) + 1]
        now, before = ring[1:], ring[:-1]
        c = _stack(ring, [entry.coefficients for entry in entries])
        along, earlier, drift, square, right = (column[:, None] for column in c.unbind(1))
        difference = (
            along * now[..., ALONG]
            + earlier * before[..., ALONG]
            + drift * (now[..., NORM] - before[..., NORM])
            + square * now[..., SQUARE]
        )
        sampled = right * now[..., SQUARE]
        if any(entry.moving is not None for entry in entries):
            ones = torch.ones_like(sampled[0])
            moving = torch.stack([ones if e.moving is None else e.moving for e in entries])
            sampled = sampled * moving
            alone = _host_to(ring, [float(e.steps == 1) for e in entries])[:, None]
            difference = difference * torch.where(alone > 0, moving, 1.0)
        if self.layout.processes > 1:
            share = self._share().squeeze(1)
            difference, sampled = difference * share, sampled * share
        steps = _host_to(ring, [float(entry.steps) for entry in entries])
        weights = _host_to(ring, [float(entry.steps * entry.sampled) for entry in entries])
        if any(entry.skips is not None for entry in entries):
            steps, weights = self._without_skips(steps, weights)
        if not self.each:
            difference, sampled = (x.sum(1, keepdim=True) for x in (difference, sampled))
        return torch.cat(
            [difference, weights[:, None] * sampled, steps[:, None], weights[:, None]], dim=1
        )

    def _without_skips(self, steps: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the counts, and the weights in the sample of R, without skipped steps."""
        zero = steps.new_zeros(())
        pairs = [(zero, zero) if e.skips is None else e.skips for e in self._entries]
        last, total = torch.stack([torch.stack(pair) for pair in pairs]).unbind(1)
        first = zero if self._skips_settled is None else self._skips_settled
        steps = steps - torch.diff(total, prepend=first[None])
        self._skips_settled = total[-1]
        return steps, torch.where(last > 0, 0.0, torch.where(weights > 0, steps, 0.0))


def _over_one_step(update: Update, *, fresh: bool) -> tuple[Scalar, ...]:
    """Return the coefficients for a single step, of θ′·d, of θ·b before it, and of d²."""
    lr, mu, scale = update.lr, update.momentum, _scale(update)
    keep = 1 - update.dampening
    right = fdr1_coefficient(lr, mu, update.dampening) * scale**2
    if fresh:  # the first step is undampened: L = θ·b′ = θ′·b′ + ηb′²
        return 1.0, 0.0, 0.0, lr - right, right
    return scale / keep, -mu / keep, 0.0, (1 - mu) / 2 * lr * scale**2 / keep, right


def _over_an_interval(update: Update, begun: Update | None = None) -> tuple[Scalar, ...]:
    """Return the coefficients for an interval, of θ·b at both ends and of N′ − N."""
    lr, mu, keep = update.lr, update.momentum, 1 - update.dampening
    if begun is not None and not isinstance(lr, Tensor) and not isinstance(begun.lr, Tensor):
        lr = (lr + begun.lr) / 2
    right = fdr1_coefficient(update.lr, mu, update.dampening) * _scale(update) ** 2
    along = mu / keep if mu else 0.0
    return along, -along, -(1 - mu) / (2 * keep) * _inverse(lr), 0.0, right


def _scale(update: Update) -> Scalar:
    """Return what turns the measured direction into d: a difference θ − θ′ is ηd."""
    return _inverse(update.lr) if update.source == "difference" else 1.0


def _inverse(lr: Scalar) -> Scalar:
    """Return 1/η; 0 for η = 0, at which nothing moves."""
    if isinstance(lr, Tensor):
        return torch.where(lr == 0, 0.0, 1 / lr)
    return 1 / lr if lr else 0.0


def _stack(like: Tensor, rows: Sequence[Sequence[Scalar]]) -> Tensor:
    """Return the numbers as a float64 tensor, of which some may be tensors on the device."""
    if any(isinstance(value, Tensor) for row in rows for value in row):
        made = [[torch.as_tensor(v, dtype=torch.float64) for v in row] for row in rows]
        device = like.device
        return torch.stack([torch.stack([v.to(device) for v in row]) for row in made])
    return _host_to(like, [list(row) for row in rows])


def _host_to(like: Tensor, values: Any) -> Tensor:
    """Return numbers on the device of `like`, without waiting for it."""
    return send(values, torch.float64, like.device)


def _on(found: Tensor, like: Tensor) -> Tensor:
    return found.detach().reshape(()).to(like.device, non_blocking=True)
