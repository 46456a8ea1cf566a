"""The part that several runs have in common: one training that all of their controls look at."""

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from training_study.controls import Control


class Trunk(Control):
    """Keeps the learning rate constant, and tells which other controls would change it.

    All of them look at one training, until the first step that one of them would make with another
    learning rate. From there on that one needs a training of its own.

    Args:
        optimizer: The optimizer.
        controls: The other controls, of the same optimizer, by name.
        leave: Called before that step, with the learning rate of the control set.
    """

    def __init__(
        self, optimizer: Optimizer, controls: dict[str, Control], leave: Callable[[str], None]
    ) -> None:
        super().__init__(optimizer)
        self._controls, self._leave = controls, leave
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._lowered: dict[str, list[float]] = {}

    def factor(self, step: int) -> float:
        """Let those leave whose learning rate of this step differs."""
        for name, control in list(self._controls.items()):
            rates = self._lowered.pop(name, None)
            if rates is not None or control.factor(step) != 1:
                self._set(rates or self._rates)
                self._leave(name)
                self._set(self._rates)
        return 1.0

    def check(self, step: int, loss: float) -> None:
        """Let all others look."""
        for name, control in self._controls.items():
            control.check(step, loss)
            rates = [group["lr"] for group in self.optimizer.param_groups]
            if rates != self._rates:
                self._lowered[name] = rates
                self._set(self._rates)

    def _set(self, rates: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
