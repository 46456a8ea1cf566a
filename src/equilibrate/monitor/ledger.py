"""Measures the parameters of one bucket at some steps, and turns that into both sides of FDR1.

A step is θ′ = θ − d, with d = ηb′ for SGD whose buffer is b = −v. Where the learning rate changes,
steps count with the weight η, because the difference of the sides then telescopes whatever η does.
Between two measurements, after the steps s and T,

    Σ η(L − R) = [−(1−μ)(N_T − N_s)/2 + μ(Q_T − Q_s)] / (1−ν),        N = |θ|², Q = ηθ·b

with a term μ(η_old − η_new)θ·b for each change of η in between. After a measured step Q is θ′·d.
For a single step N_T − N_s = −2θ′·d − d², so that no norm is needed. ηR = (1+μ)/(2(1−ν)) d² is
sampled at the measured steps. The step form of any other optimizer is the case μ = ν = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate.monitor.updates import Update, update_of
from equilibrate.watching.edits import EditWatch
from equilibrate.watching.parameters import Bucket
from equilibrate.watching.rates import Scalar
from equilibrate.watching.sums import ALONG, NORM, SQUARE, choose, norms, on_device, send
from equilibrate.watching.window import Window

POTENTIAL = 3
"""Column of a measurement after those of `sums`: Q."""
_BLOCK = 64
"""Measurements whose rows are worked out together, in a few operations."""
_ROWS = 1024
"""Rows of a window; its start is then rounded by less than 0.4 % of its length."""
_NORM_PERIOD = 16
"""Measurements after which N is read again if every step is measured: it follows from the steps."""


class Entry(NamedTuple):
    """What a measurement ends, and how to turn it into a row."""

    steps: Scalar
    """Steps since the measurement before it, without skipped ones; 0 if it begins an interval."""
    length: int
    """The same with skipped ones."""
    weight: Scalar
    """Ση over these steps."""
    sampled: Scalar | None
    """η of the step if it was measured, 0 if it was skipped; None if it was not measured."""
    update: Update
    correction: Tensor | None
    """What changes of η add to Σ η(L − R) of each tensor."""


class Ledger:
    """Both sides of FDR1 for the parameters of a bucket.

    Args:
        bucket: The parameters.
        optimizer: The optimizer that moves them.
        thinned: Whether some steps are not measured.
    """

    def __init__(self, bucket: Bucket, optimizer: Optimizer, *, thinned: bool) -> None:
        self.bucket = bucket
        self._optimizer = optimizer
        self._thinned = thinned
        self.series = len(bucket.params)
        """Number of tensors."""
        self._sums = choose(bucket.local())
        self.window = Window(3 * self.series + 3, bucket.device, _ROWS)
        """Rows of Σ η(L − R), ηR and ηN of each tensor, the steps, Ση, and η of the sample."""
        shape = _BLOCK + 1, self.series, 4
        self._points = torch.zeros(shape, dtype=torch.float64, device=bucket.device)
        # Views of each place, since indexing at each measurement would take longer.
        self._slots = self._points.unbind(0)
        self._sum_slots = self._points[..., :POTENTIAL].unbind(0)
        self._columns = [slot.unbind(1) for slot in self._slots]
        self._shares = send(bucket.shares(), torch.float64, bucket.device)
        self._edits = EditWatch(distributed=bucket.distributed)
        self._update: Update | None = None
        self._states: list[dict[str, Any]] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a new window at the next measured step."""
        self._entries: list[Entry] = []
        self.window.reset()
        self._begun: int | None = None
        """Steps so far when the open interval began; None if there is none."""
        self._unproven, self.hidden_edit = True, None
        self._measured = 0
        self._missing = 0
        """Tensors without a momentum buffer before this step, if that matters."""

    # Steps ------------------------------------------------------------------------------------

    def change(self, step: int, made: Scalar) -> None:
        """Take new settings of the group, before a step.

        Args:
            step: Number of steps so far.
            made: The same without those that gradient scaling has skipped.
        """
        old, group = self._update, self._optimizer.param_groups[self.bucket.group]
        new = update_of(self._optimizer, group, self.bucket.dtype)
        if old is not None and old[1:] == new[1:] and _is_same(new.lr, old.lr):
            self._update = old._replace(lr=new.lr)
            return
        self._update = new
        if old is not None and (old.momentum > 0) != (new.momentum > 0):
            self._edits.forget()  # momentum buffers are watched, too, or no more
        if old is None or self._begun is None:
            return
        if old[1:] != new[1:]:  # other coefficients: the steps so far make up an interval
            self._write_point(old, norm=True)
            self._note(step, made, old, sampled=None)
            self._begin(step, made)
            return
        self._paid, self._since = self._paid + old.lr * (made - self._since), made
        if new.momentum:
            self._write_point(new._replace(lr=1.0), norm=False)
            change = new.momentum / (1 - new.dampening) * (old.lr - new.lr)
            term = change * self._slots[len(self._entries) + 1][:, POTENTIAL]
            self._correction = term if self._correction is None else self._correction + term

    def before(self, step: int, made: Scalar, *, measured: bool) -> None:
        """Prepare for a step: notice edited parameters, and copy them if it is measured."""
        assert self._update is not None
        self._checked = measured or not self.is_calm()
        if not self._checked:
            return
        if self._edits.check_edits(self._tensors(), step):
            self._begun = None
        self._missing = self._count_missing()
        if self._unproven and self._measured and self._begun == step:
            self._check_hidden_edit()
        if measured:
            if self._begun is None:
                self._begin(step, made)
            self._sums.save(self.bucket.local())

    def after(self, step: int, made: Scalar, *, measured: bool) -> None:
        """Note a step, which `step` counts, and measure it if asked to."""
        if self._missing > self._count_missing():
            # A tensor's first step is undampened, which no coefficient expresses.
            self._missing = 0
            self._sums.free()
            self._begin(step, made)
        elif measured:
            self._measure(step, made)
        if self._checked:
            self._edits.note_step(self._tensors(), step)

    def is_calm(self) -> bool:
        """Return whether an unmeasured step only needs to be counted if the settings stay equal."""
        assert self._update is not None
        return not (
            self._edits.every_step
            or self._edits.is_lost
            or (self._unproven and self._measured > 0)
            or self._count_missing()
        )

    def squared_step(self) -> float:
        """Return Δ² in units of R, for the settings of the last step; nan if there was none."""
        if self._update is None:
            return math.nan
        u = self._update
        return 2 * float(u.lr) * (1 - u.dampening) / (1 + u.momentum)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return |θ|² of this process's part, wherever it is now."""
        found = norms(self.bucket.local())
        return (found * self._shares.to(found.device)).sum()

    def _begin(self, step: int, made: Scalar) -> None:
        """Begin an interval where the parameters are now."""
        assert self._update is not None
        self._slots[len(self._entries) + 1].copy_(self._slots[len(self._entries)])
        if self._thinned or self._update.momentum:
            self._write_point(self._update, norm=self._thinned)
        self._begun = step
        self._note(step, made, self._update, sampled=None)

    def _measure(self, step: int, made: Scalar) -> None:
        """Measure the step that has just been made."""
        update, slot = self._update, self._slots[len(self._entries) + 1]
        assert update is not None
        norm = self._thinned or self._measured % _NORM_PERIOD == 0
        place = len(self._entries) + 1
        self._sums.measure(self.bucket.local(), self._sum_slots[place], norm=norm)
        if not norm:  # a single step, whose change of N is known
            now, before = self._columns[place], self._columns[place - 1]
            torch.sub(before[NORM], 2 * now[ALONG] + now[SQUARE], out=now[NORM])
        if self._thinned:
            self._sums.free()
        found = getattr(self._optimizer, "found_inf", None)
        if update.momentum:
            if found is None and all(p.grad is not None for p in self.bucket.params):
                self._columns[place][POTENTIAL].copy_(self._columns[place][ALONG])
            else:  # a tensor that the step has not moved keeps its velocity
                self._write_point(update, norm=False)
        sampled: Scalar = update.lr
        if found is not None:
            sampled = sampled * (on_device(found, slot) == 0).double()
        self._measured += 1
        self._note(step, made, update, sampled)

    def _write_point(self, update: Update, *, norm: bool) -> None:
        """Write Q, and N if `norm`, where the next measurement goes."""
        slot = self._slots[len(self._entries) + 1]
        scratch = torch.zeros_like(slot)[:, :3]
        buffers = self._buffers() if update.momentum else [None] * self.series
        self._sums.inner(self.bucket.local(), self.bucket.local_like(buffers), scratch)
        slot[:, POTENTIAL] = scratch[:, ALONG] * update.lr
        if norm:
            slot[:, NORM] = scratch[:, NORM]

    def _note(self, step: int, made: Scalar, update: Update, sampled: Scalar | None) -> None:
        """Take what was written as the end of the open interval, and as the start of another."""
        assert self._begun is not None
        length = step - self._begun
        if length:
            weight = self._paid + update.lr * (made - self._since)
            steps, correction = made - self._made, self._correction
        else:
            steps, weight, correction = 0.0, 0.0, None
        self._entries.append(Entry(steps, length, weight, sampled, update, correction))
        self._begun = step
        self._made = self._since = made
        """Steps made when the interval began, and when the learning rate last changed in it."""
        self._paid: Scalar = 0.0
        """Ση of the interval before that change."""
        self._correction: Tensor | None = None
        if len(self._entries) == _BLOCK:
            self.settle()

    def _check_hidden_edit(self) -> None:
        """Check, once in a window, that nothing has changed since the step before this one.

        Edits through `.data` do not increase a version counter. A loop that makes one after each
        step is noticed in this way. Steps that are all measured by themselves do not mind.
        """
        self._unproven = False
        if not (self._thinned or (self._update and self._update.momentum)):
            return
        now, before = self.norm(), self._slots[len(self._entries)][:, NORM] * self._shares
        self.hidden_edit = (now - before.sum()).abs() > 1e-9 * now

    def _tensors(self) -> list[Tensor]:
        """Return what nothing but a step may change: parameters and momentum buffers."""
        assert self._update is not None
        buffers = self._buffers() if self._update.momentum else ()
        return [*self.bucket.params, *(b for b in buffers if b is not None)]

    def _buffers(self) -> list[Tensor | None]:
        state = self._optimizer.state
        if self._states is None or state.get(self.bucket.params[0]) is not self._states[0]:
            if any(p not in state for p in self.bucket.params):
                return [state.get(p, {}).get("momentum_buffer") for p in self.bucket.params]
            self._states = [state[p] for p in self.bucket.params]  # looking them up takes long
        return [entry.get("momentum_buffer") for entry in self._states]

    def _count_missing(self) -> int:
        """Return how many tensors have no momentum buffer yet; 0 without dampening."""
        assert self._update is not None
        return sum(b is None for b in self._buffers()) if self._update.dampening else 0

    # Rows -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Work out the rows of all measurements so far."""
        entries = self._entries
        if not entries:
            return
        rows = self._rows()
        first = 0
        for i, entry in enumerate([*entries, None]):
            if entry is None or not entry.length:  # a measurement that only begins an interval
                self.window.extend(rows[first:i], [e.length for e in entries[first:i]])
                first = i + 1
        self._points[0] = self._points[len(entries)]
        self._entries = []

    def _rows(self) -> Tensor:
        """Return a row for each of the latest measurements."""
        entries, points = self._entries, self._points[: len(self._entries) + 1]
        now, before = points[1:], points[:-1]
        numbers = [
            (
                (1 - e.update.momentum) / (1 - e.update.dampening) / 2,
                e.update.momentum / (1 - e.update.dampening),
                (1 + e.update.momentum) / (1 - e.update.dampening) / 2,
                float(e.length == 1 and e.sampled is not None),
                e.steps,
                e.weight,
                0.0 if e.sampled is None else e.sampled,
            )
            for e in entries
        ]
        drift, along, right, single, *counts = _stack(points, numbers).unbind(1)
        turned = 2 * now[..., ALONG] + now[..., SQUARE]
        grown = now[..., NORM] - before[..., NORM]
        difference = drift[:, None] * torch.where(single[:, None] > 0, turned, -grown)
        change = now[..., POTENTIAL] - before[..., POTENTIAL]
        difference = difference + _times(along[:, None], change)
        if any(e.correction is not None for e in entries):
            zero = torch.zeros_like(difference[0])
            difference = difference + torch.stack(
                [zero if e.correction is None else e.correction for e in entries]
            )
        sampled = counts[-1][:, None]
        rows = torch.stack(
            [
                difference,
                _times((sampled > 0) * right[:, None], now[..., SQUARE]),
                _times(sampled, now[..., NORM]),
            ],
            dim=1,
        )
        rows = rows * self._shares
        return torch.cat([rows.flatten(1), torch.stack(counts, dim=1)], dim=1)

    def rows(self) -> Tensor:
        """Return the rows of this process over the window."""
        self.settle()
        return self.window.rows(counted=-3, sampled=-1)

    # State ------------------------------------------------------------------------------------

    def state_sums(self) -> list[Tensor]:
        """Return this process's part of the state, for `Layout.total`."""
        self.settle()
        correction = self._points[0, :, 0] * 0.0
        if self._begun is not None and self._correction is not None:
            correction = self._correction
        begun = torch.cat([self._points[0], correction[:, None]], dim=1)
        return [self.window.state_dict()["rows"], begun * self._shares[:, None]]

    def state_dict(self, rows: Tensor, begun: Tensor, step: int, made: Scalar) -> dict[str, Any]:
        """Return the state, which does not depend on how parameters are distributed.

        Args:
            rows: First item of `state_sums`, added up over all processes.
            begun: Second item of `state_sums`, added up over all processes.
            step: Number of steps so far.
            made: The same without skipped ones.
        """
        rows[:, -3:] /= self.bucket.layout.processes
        interval = [-1.0] * 4
        if self._begun is not None and not self._edits.check_edits(self._tensors(), step):
            numbers = self._begun, made - self._made, made - self._since, self._paid
            interval = [float(number) for number in numbers]
        return {
            "window": {**self.window.state_dict(), "rows": rows},
            "begun": begun,
            "interval": interval,
            "settings": [float(number) for number in self._update or Update(math.nan)],
            "measured": self._measured,
            "edited": self._edits.every_step,
        }

    def load_state_dict(self, state: dict[str, Any], made: Scalar) -> None:
        """Restore a state, which may come from another number of processes."""
        self.restart()
        processes = self.bucket.layout.processes
        rows = state["window"]["rows"].clone()
        rows[:, :-3] /= processes
        self.window.load_state_dict({**state["window"], "rows": rows})
        point = state["begun"].to(self._points.device) / (self._shares[:, None] * processes)
        self._points[0] = point[:, :4]
        begun, since_begun, since_change, paid = state["interval"]
        if begun >= 0:
            self._begun, self._paid = int(begun), paid
            self._made, self._since = made - since_begun, made - since_change
            self._correction = point[:, 4].clone() if point[:, 4].any() else None
        # Compared with the settings at the next step: a scheduler may have changed them before the
        # state was saved, and the optimizer may not have been restored yet.
        self._update = Update(*state["settings"])
        self._measured = state["measured"]
        self._edits.forget()
        self._edits.every_step = state["edited"]
        self._unproven = False  # sums of another number of processes cannot be compared


def _is_same(new: Scalar, old: Scalar) -> bool:
    """Return whether two rates are equal; two tensors differ, as comparing them would wait.

    A number and a tensor are compared once, after a state was loaded.
    """
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        return False
    return float(new) == float(old)


def _times(coefficient: Tensor, value: Tensor) -> Tensor:
    """Return the product, zero where the coefficient is: a NaN that is not used has no effect."""
    return torch.where(coefficient == 0, 0.0, coefficient * value)


def _stack(like: Tensor, rows: Sequence[Sequence[Scalar]]) -> Tensor:
    """Return the numbers as a float64 tensor, of which some may be tensors on the device.

    All others are sent there together, since sending one by one would wait for it.
    """
    on = {
        (i, j): value
        for i, row in enumerate(rows)
        for j, value in enumerate(row)
        if isinstance(value, Tensor) and value.device == like.device
    }
    numbers = [
        [0.0 if (i, j) in on else float(value) for j, value in enumerate(row)]
        for i, row in enumerate(rows)
    ]
    sent = send(numbers, torch.float64, like.device)
    for place, value in on.items():
        sent[place] = value
    return sent
