"""Ways to watch a training loop: the monitor at several intervals, and what people use today.

A watcher is built from a model and its optimizer. `before_step` runs between the backward pass and
`optimizer.step()`, and `after_step` after it, with the loss.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import equilibrate as eq


class Bare:
    """Watches nothing; the base class of all watchers."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.params = list(model.parameters())

    def before_step(self) -> None:
        """Run between the backward pass and the optimizer's step."""

    def after_step(self, loss: Tensor) -> None:
        """Run after the optimizer's step."""

    def close(self) -> None:
        """Stop watching."""


class Monitored(Bare):
    """An `equilibrate.Monitor`, which needs no call inside the loop."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, every: int, names: bool = False
    ) -> None:
        super().__init__(model, optimizer)
        self.monitor = eq.Monitor(optimizer, model if names else None, every)

    def close(self) -> None:
        self.monitor.detach()


class Forecasted(Bare):
    """An `equilibrate.Forecaster` with its defaults, and without closures."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, every: int) -> None:
        super().__init__(model, optimizer)
        self.forecaster = eq.Forecaster(optimizer, every=every)

    def after_step(self, loss: Tensor) -> None:
        self.forecaster.update(loss)

    def close(self) -> None:
        self.forecaster.detach()


class CoolingDown(Bare):
    """An `equilibrate.Cooldown` in its constant phase."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self.scheduler = eq.Cooldown(optimizer, total_steps=10**6)

    def after_step(self, loss: Tensor) -> None:
        self.scheduler.step(loss)

    def close(self) -> None:
        self.scheduler.detach()


class NaiveLoop(Bare):
    """θ·g and g² of each parameter, read as Python numbers at each step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self.left = self.right = 0.0

    @torch.no_grad()
    def before_step(self) -> None:
        for p in self.params:
            if p.grad is not None:
                self.left += (p * p.grad).sum().item()
                self.right += p.grad.pow(2).sum().item()


class TotalNorm(Bare):
    """The norm of the whole gradient, read as a Python number at each step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self.total = 0.0

    @torch.no_grad()
    def before_step(self) -> None:
        gradients = [p.grad for p in self.params if p.grad is not None]
        self.total += torch.nn.utils.get_total_norm(gradients).item()


class Histograms(Bare):
    """A histogram of each gradient at every k-th step, from a hook, as `wandb.watch` makes them."""

    BINS = 64

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, every: int) -> None:
        super().__init__(model, optimizer)
        self.every = every
        self.counts = [0] * len(self.params)
        self.histograms: dict[int, Tensor] = {}
        self.hooks = [p.register_hook(partial(self._record, i)) for i, p in enumerate(self.params)]

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _record(self, index: int, gradient: Tensor) -> None:
        self.counts[index] += 1
        if self.counts[index] % self.every:
            return
        flat = gradient.detach().reshape(-1).float()
        finite = torch.isfinite(flat)
        if not finite.all().item():
            flat = flat[finite]
        if flat.numel():
            low, high = flat.min().item(), flat.max().item()
            self.histograms[index] = torch.histc(flat, self.BINS, low, high).cpu()


WATCHERS: dict[str, Callable[[nn.Module, Optimizer], Bare]] = {
    "bare": Bare,
    "bare again": Bare,
    "every=1": partial(Monitored, every=1),
    "every=4": partial(Monitored, every=4),
    "every=16": partial(Monitored, every=16),
    "every=1, per parameter": partial(Monitored, every=1, names=True),
    "forecaster, every=16": partial(Forecasted, every=16),
    "Cooldown": CoolingDown,
    "naive .item() loop": NaiveLoop,
    "get_total_norm().item()": TotalNorm,
    "histograms, every 16": partial(Histograms, every=16),
}
"""All watchers by name. `wandb.watch` makes histograms at every 1000th step by default; 16 is used
so that a block of steps contains some, and compares with a monitor that measures as often."""
