"""The part that several runs have in common: one training that all of their controls look at."""

from collections.abc import Callable

from torch.optim import Optimizer

from training_study.controls import Control


class Shared(Control):
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
        self._constant = self.rates
        self._lowered: dict[str, list[float]] = {}

    def factor(self, step: int) -> float:
        """Let those leave whose learning rate of this step differs."""
        for name, control in list(self._controls.items()):
            rates = self._lowered.pop(name, None)
            if rates is not None or control.factor(step) != 1:
                self.rates = rates or self._constant
                self._leave(name)
                self.rates = self._constant
        return 1.0

    def check(self, step: int, loss: float) -> None:
        """Let all others look."""
        for name, control in self._controls.items():
            control.check(step, loss)
            if self.rates != self._constant:
                self._lowered[name] = self.rates
                self.rates = self._constant
