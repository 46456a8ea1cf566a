"""Measures the parameters of one bucket at some steps, and turns that into both sides of FDR1.

Between two measurements, at steps s and T, the difference of the sides telescopes:

    Σ (L − R) = [−(1−μ)(N_T − N_s)/(2η) + μ(θ_T·b_T − θ_s·b_s)] / (1−ν),        N = |θ|², b = −v

so it is exact however many steps lie between them. R is sampled at the measured steps. For a
single step the same number follows from θ′·d and d² alone, without a difference of norms:

    L − R = [θ′·d − μ θ·b + (1−μ)/2 · ηd²] / (1−ν)                      (d = b′ with momentum)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate._engine.arithmetic.sums import ALONG, NORM, choose
from equilibrate._engine.optimizer.buffers import MomentumBuffers
from equilibrate._engine.optimizer.clock import Clock
from equilibrate._engine.optimizer.edits import EditWatch
from equilibrate._engine.optimizer.skips import on_device
from equilibrate._engine.optimizer.updates import (
    Group,
    Update,
    settings_from_tensor,
    settings_getter,
    settings_to_tensor,
    update_of,
)
from equilibrate._engine.relation.coefficients import over_an_interval, over_one_step
from equilibrate._engine.relation.ring import Ring
from equilibrate._engine.relation.rows import Entry
from equilibrate._engine.sharding import Layout, as_dtensor, local, local_like

_NO_GRAD = torch.no_grad()
_NORM_PERIOD = 16
"""Steps for which N of each tensor is taken as constant if every step is measured."""
_UNKNOWN = object()
"""Settings that are equal to none."""


class Probe:
    """Both sides of FDR1 for the parameters of one group, device and dtype.

    Args:
        optimizer: The optimizer that moves the parameters.
        group: Index of their parameter group.
        params: The parameters.
        layout: How the parameters of the optimizer are distributed over processes.
        clock: Counts the steps.
        each: Whether to keep the sums of each parameter instead of their total, and its norms.
        thinned: Whether some steps are not measured. Norms are always measured then.
        skipped: Steps that gradient scaling has skipped so far; None if it was never seen.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: int,
        params: Sequence[Tensor],
        layout: Layout,
        clock: Clock,
        *,
        each: bool,
        thinned: bool,
        skipped: Tensor | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.group = group
        self.params = list(params)
        self.layout = layout
        self._clock = clock
        self.each = each
        self._thinned = thinned
        self._distributed = any(as_dtensor(p) is not None for p in self.params)
        parts = self._local(self.params)
        self.device = device = parts[0].device
        self._dtype = parts[0].dtype
        self._sums = choose(parts)
        self.ring = Ring(self.params, layout, device, each=each, skipped=skipped)
        """What was measured."""
        self._norm_known = False
        """Whether the last measurement has N."""
        self._update: Update | None = None
        self._key: Any = _UNKNOWN
        self._opened: int | None = None
        """The clock when the open interval began; None if there is none."""
        self._begun: Update | None = None
        """The update with which the open interval began."""
        self._measured: Update | None = None
        """The update of the step that is being measured."""
        self._fresh = False
        """Whether that step creates the momentum buffers."""
        self._settings = settings_getter(optimizer, optimizer.param_groups[group])
        self._edits = EditWatch(clock, distributed=self._distributed)
        self._checked = False
        """Whether the parameters were checked for edits before the step."""
        self._buffers = MomentumBuffers(optimizer, self.params)
        self._addresses: list[int] | None = None
        """Where the parameters were at the last measurement; None if not known."""
        self._unstarted = len(self.params)
        """Tensors without a momentum buffer before the step; counted with dampening only."""
        self._unproven = True
        """Whether `_prove` has still to be called in this window."""
        self._hidden_edit: Tensor | None = None
        """Whether `_prove` has found that parameters were edited unnoticed."""

    @property
    def optimizer_group(self) -> Group:
        """The parameter group as it is now."""
        return self._optimizer.param_groups[self.group]

    def squared_step(self) -> float:
        """Return Δ² in units of R, for the settings of the last step; nan if there was none.

        R = (1+μ)/(2(1−ν)) η d², and Δ = ηd.
        """
        if self._update is None:
            return math.nan
        u = self._update
        return 2 * float(u.lr) * (1 - u.dampening) / (1 + u.momentum)

    def has_momentum(self) -> bool:
        """Return whether the relation is FDR1 with momentum, not the step form."""
        return self._update is not None and self._update.momentum > 0

    def is_calm(self) -> bool:
        """Return whether an unmeasured step only needs to be counted if the settings stay equal."""
        return not self._must_check()

    def watched(self) -> tuple[int, Callable[[Group], Hashable], Hashable]:
        """Return the size of the group, a function of it, and the value at which it stays calm."""
        size = len(self._optimizer.param_groups[self.group]["params"])
        return size, self._settings, self._key

    def before(self, *, measured: bool) -> None:
        """Prepare for a step: notice changed settings and parameters, and copy what is needed."""
        group = self._optimizer.param_groups[self.group]
        key = self._settings(group)
        self._checked = measured or key != self._key or self._must_check()
        if self._checked:
            with _NO_GRAD:
                self._prepare(group, key, measured=measured)

    def _prepare(self, group: Group, key: Hashable, *, measured: bool) -> None:
        """Do what a step asks for that is measured, or before which something has changed.

        Args:
            group: The parameter group as it is now.
            key: What its settings are now.
            measured: Whether the step is to be measured.
        """
        if self._is_edited(addresses=measured):
            self._open = None
        if key != self._key:
            self._settings = settings_getter(self._optimizer, group)
            self._key = self._settings(group)
            self._change(update_of(self._optimizer, group, self._dtype))
        assert self._update is not None
        if self._update.dampening and self._unstarted:
            self._unstarted = self._buffers.count_missing()
        if self._unproven and self._open == 0:
            self._prove()
        if measured:
            self._measured = self._update
            if self._open is None:
                self._begin(self._measured)
            if self._measured.source == "difference":
                self._sums.save(self._local(self.params))

    def after(self, *, measured: bool) -> None:
        """Note a step that the clock has counted, and measure it if asked to."""
        if self._checked or hasattr(self._optimizer, "found_inf"):
            with _NO_GRAD:
                self._finish(measured=measured)
            self._checked = False  # `before` is not called at steps that are only counted

    def _finish(self, *, measured: bool) -> None:
        """Do what `after` does for a step that is checked or may have been skipped."""
        found = getattr(self._optimizer, "found_inf", None)
        if found is not None:  # a fused step that gradient scaling may have skipped
            self.ring.skips.count(found)
        if self._open is not None and self._some_started(measured=measured):
            assert self._update is not None
            self._begin(self._update)
        elif measured:
            self._measure(found)
        if self._checked:
            self._edits.step(self.params)
        if measured:
            self._addresses = self._current_addresses()

    def restart(self) -> None:
        """Begin a new window at the next step."""
        self.ring.reset()
        self._open = None
        self._unproven = True

    def had_hidden_edit(self) -> bool:
        """Return whether parameters were edited unnoticed since the last call."""
        found, self._hidden_edit = self._hidden_edit, None
        return found is not None and bool(found)

    def norm(self) -> float:
        """Return |θ|² of this process's part, which waits for the device."""
        out = torch.zeros_like(self.ring.last)
        params = self._local(self.params)
        nothing = [None] * len(params)
        choose(params).measure(Update("difference", 0.0), params, nothing, nothing, out, norm=True)
        return out[:, NORM].sum().item()

    def state_dict(self, rows: Tensor, begun: Tensor) -> dict[str, Any]:
        """Return the state, which does not depend on how parameters are distributed.

        Args:
            rows: First item of `Ring.state_sums`, added up over all processes.
            begun: Second item of `Ring.state_sums`, added up over all processes.
        """
        is_open = self._open is not None and not self._is_edited(addresses=True)
        return {
            **self.ring.state_dict(rows, begun),
            "open": self._open if is_open else -1,
            "settings": settings_to_tensor([self._begun, self._update]),
            "edited": self._edits.every_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, which may come from another number of processes."""
        self.ring.load_state_dict(state)
        self._open = None if state["open"] < 0 else state["open"]
        # The settings at the next step are compared with these: a scheduler may have changed them
        # before the state was saved, and the optimizer may not have been restored yet.
        self._key = _UNKNOWN
        self._begun, self._update = settings_from_tensor(state["settings"])
        self._edits.forget()
        self._edits.every_step = state["edited"]
        self._addresses = None
        self._norm_known = True
        self._unproven = False  # sums of another number of processes cannot be compared

    @property
    def _open(self) -> int | None:
        """Steps since the open interval began; None if there is none."""
        return None if self._opened is None else self._clock.steps - self._opened

    @_open.setter
    def _open(self, steps: int | None) -> None:
        self._opened = None if steps is None else self._clock.steps - steps

    # Measuring --------------------------------------------------------------------------------

    def _change(self, update: Update) -> None:
        """Take new settings, ending the open interval if they differ too much from the old."""
        if self._open is not None:
            assert self._begun is not None
            if isinstance(update.lr, Tensor) and not isinstance(self._begun.lr, Tensor):
                self._restore_tensor(update.lr)
            if self._open and not update.continues(self._begun):
                self._end_before_change()
            if update.momentum > 0 and self._begun.momentum == 0:
                self._begin(update)  # θ·b was not measured
        self._update = update
        if self._open == 0:
            self._begun = update

    def _end_before_change(self) -> None:
        """Measure where the parameters are now, so that the steps so far make up an interval."""
        assert self._update is not None
        self._write(self._update)
        coefficients = over_an_interval(self._update, self._begun)
        self.ring.note(
            Entry(self._open or 0, False, coefficients, None, self.ring.skips.note(None))
        )
        self._open = 0

    def _restore_tensor(self, lr: Tensor) -> None:
        """Take a learning rate tensor for the number of a loaded state if they are equal.

        It waits for the device, once.
        """
        assert self._begun is not None
        if self._begun.lr == float(lr):
            self._begun = replace(self._begun, lr=lr)

    def _prove(self) -> None:
        """Check, once in a window, that nothing has changed since the step before this one.

        Edits through `.data` do not increase a version counter. A loop that makes one after each
        step is found out in this way.
        """
        self._unproven = False
        assert self._update is not None
        if self._thinned:
            column, tolerance = NORM, 1e-9
        elif self._update.momentum > 0:
            column, tolerance = ALONG, 1e-5
        else:
            return  # each step is measured by itself
        self._write(self._update)
        now, before = self.ring.next[:, column], self.ring.last[:, column]
        found = ((now - before).abs() > tolerance * before.abs()).any()
        self._hidden_edit = found if self._hidden_edit is None else self._hidden_edit | found

    def _begin(self, update: Update) -> None:
        """Begin an interval where the parameters are now."""
        self._norm_known = False
        if self._thinned or update.momentum > 0:
            self._write(update)
        else:
            self.ring.next.zero_()  # a step by itself needs nothing else
        self.ring.note(Entry(0, False, (0.0,) * 5, None, self.ring.skips.note(None)))
        self._open, self._begun = 0, update
        self._fresh = update.momentum > 0 and all(b is None for b in self._buffers.tensors())

    def _measure(self, found: Tensor | None) -> None:
        """Measure the step that has just been made."""
        update, begun = self._measured, self._begun
        assert update is not None
        assert begun is not None
        assert self._open is not None
        slot = self.ring.next
        moving = self._write(update, moved=True)
        if self._thinned:
            self._sums.free()
        if found is not None and update.source != "buffer":
            slot[:, ALONG:].masked_fill_(on_device(found, slot) > 0, 0.0)  # an infinite gradient
        if self._open == 1:
            coefficients = over_one_step(update, fresh=self._fresh)
            if found is not None:  # a step that was skipped counts nothing
                kept = (on_device(found, slot) == 0).double()
                coefficients = tuple(c * kept for c in coefficients)
        else:
            coefficients = over_an_interval(update, begun)
        self.ring.note(Entry(self._open, True, coefficients, moving, self.ring.skips.note(found)))
        self._open, self._begun, self._fresh = 0, update, False

    def _write(self, update: Update, *, moved: bool = False) -> Tensor | None:
        """Write N, θ′·d and d² into the next row of the ring.

        Before a step, when `moved` is false, only N and θ·b have a meaning.

        Returns:
            Which tensors the step has moved, 1 or 0 for each; None if it has moved all of them.
        """
        params = self._local(self.params)
        if not moved and update.source != "buffer":
            update = Update("difference", 0.0)  # N alone
        is_due = not self._norm_known or self._clock.steps % _NORM_PERIOD == 0
        norm = self._thinned or (self.each and is_due)
        moves = None
        gradients: Sequence[Tensor | None] = ()
        if update.source != "difference":
            gradients = [p.grad for p in self.params]
            if moved and any(g is None for g in gradients):  # SGD leaves such tensors alone
                moves = self.ring.send([float(g is not None) for g in gradients])
        self._sums.measure(
            update,
            params,
            self._local_like(gradients) if update.gradient else (),
            self._local_like(self._buffers.tensors()) if update.buffer else (),
            self.ring.next,
            norm=norm,
        )
        if self.each and not norm:
            self.ring.next[:, NORM] = self.ring.last[:, NORM]
        self._norm_known = self.each
        return moves

    def _some_started(self, *, measured: bool) -> bool:
        """Return whether the step created some of the buffers, but not all of them at once.

        That step is undampened for some tensors only, which no coefficient expresses.
        """
        assert self._update is not None
        if not (self._update.dampening and self._unstarted):
            return False
        alone = measured and self._open == 1 and self._fresh
        return not alone and self._buffers.count_missing() != self._unstarted

    def _must_check(self) -> bool:
        """Return whether to look at the parameters before a step that is not measured."""
        assert self._update is not None
        return (
            self._edits.every_step
            or self._edits.is_lost
            or (self._unproven and self._open == 0)
            or (self._unstarted > 0 and self._update.dampening != 0)
        )

    def _is_edited(self, *, addresses: bool) -> bool:
        """Return whether something other than a step has changed the parameters.

        Args:
            addresses: Whether to look for parameters that were moved in memory, too.
        """
        edited = self._edits.is_edited(self.params)
        moved = addresses and self._addresses not in (None, self._current_addresses())
        return edited or moved

    def _current_addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._local(self.params)))

    def _local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [local(t) for t in tensors] if self._distributed else tensors

    def _local_like(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the local parts of gradients or buffers; there are none where none are needed."""
        if not (self._distributed and tensors):
            return tensors
        return [local_like(p, t) for p, t in zip(self.params, tensors, strict=True)]
