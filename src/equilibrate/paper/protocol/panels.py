"""What is drawn: each panel, the runs it needs, and its caption in our words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class Panel:
    """One panel of a figure: the runs it is drawn from and its caption in our words.

    It is drawn without the runs in `beside` too, and with them where they are there. Panels whose
    id begins with B go beyond the paper.
    """

    id: str
    task: Literal["mlp", "cnn"]
    runs: tuple[str, ...]
    caption: str
    beside: tuple[str, ...] = ()
    gpu: bool = False
    """Whether it compares what only a GPU has."""

    @property
    def ours(self) -> bool:
        """Whether it goes beyond the paper."""
        return self.id.startswith("B")


_INITIAL = (
    "{title}: the approach to stationarity at η = 0.1. Above, the loss of mini-batches (light) "
    "and its half-running average (dark); below, the two sides of FDR1, which meet once the norm "
    "of the weights has stopped drifting."
)
_SEQUENCE = (
    "{title}: the two sides of FDR1 after each lowering of the learning rate, left solid and right "
    "dotted, their averages started afresh each time. The smaller η, the later they meet."
)
_LANDSCAPE = (
    "{title}: the full-batch observable O_FB against the learning rate, mean and 95 % interval "
    "over seeds. The red line runs from the origin through the smallest η: in a harmonic landscape "
    "with constant noise all points would lie on it. Open markers and their dashed line, if any, "
    "are ours: batches drawn independently, which have no bias from reshuffling. An inset, if any, "
    "enlarges small η."
)
_SCHEDULES = (
    "{title}, SGD without momentum: preset schedule, adaptive schedule (X = 0.01, Y = 0.1) and "
    "AMSGrad. From above: learning rate, full-batch training loss, and accuracy on the training "
    "(solid) and test images (dashed)."
)
_ADAMS = (
    "{title}: AMSGrad beside Adam with their defaults. Above, the full-batch training loss; below, "
    "accuracy on the training (solid) and test images (dashed)."
)
_EAGER = (
    "{title}, initial seed {seed}: as in Figure 4, but with the eager rule X = 0.1, Y = 0.3, which "
    "lowers the learning rate sooner and by more."
)
_GRID = (
    "{title}, beyond the paper: the adaptive schedule for a grid of thresholds X and decreases Y, "
    "one seed each. Above, the final test accuracy; below, the epoch from which the accuracy stays "
    "within two sampling errors of it. Frames mark the paper's two settings."
)
_PRECISION = (
    "{title}, beyond the paper: one learning rate, η = 0.02, with products formed in each "
    "precision, mean and 95 % interval over the same seeds. Above, the residual of FDR1; below, "
    "the full-batch observable O_FB."
)
_TIMES = (
    "{title}, beyond the paper: epochs after which the sides of FDR1 stay within 10 % of each "
    "other, against the learning rate, geometric mean and 95 % interval over seeds. The line is a "
    "power law fitted to each seed, its exponent the mean and 95 % interval of theirs. Triangles, "
    "if any, are learning rates at which the sides of some seed had not met."
)

PANELS: Mapping[str, Panel] = MappingProxyType(
    {
        panel.id: panel
        for panel in (
            Panel("1a", "mlp", ("mlp-initial",), _INITIAL),
            Panel("1b", "cnn", ("cnn-initial",), _INITIAL),
            Panel("2a", "mlp", ("mlp-sequence",), _SEQUENCE),
            Panel("2b", "cnn", ("cnn-sequence",), _SEQUENCE),
            Panel("3a", "mlp", ("mlp-sequence",), _LANDSCAPE, ("mlp-unbiased",)),
            Panel("3b", "cnn", ("cnn-sequence",), _LANDSCAPE, ("cnn-unbiased",)),
            Panel("4a", "mlp", ("mlp-schedules", "mlp-amsgrad"), _SCHEDULES),
            Panel("4b", "cnn", ("cnn-schedules", "cnn-amsgrad"), _SCHEDULES),
            Panel("S1a", "mlp", ("mlp-amsgrad", "mlp-adam"), _ADAMS),
            Panel("S1b", "cnn", ("cnn-amsgrad", "cnn-adam"), _ADAMS),
            *(
                Panel(f"S2{letter}", "cnn", ("cnn-schedules", "cnn-amsgrad"), _EAGER)
                for letter in "abcd"
            ),
            Panel("B1a", "mlp", ("mlp-grid",), _GRID),
            Panel("B1b", "cnn", ("cnn-grid",), _GRID),
            Panel("B2a", "mlp", ("mlp-fp32", "mlp-tf32"), _PRECISION, gpu=True),
            Panel("B2b", "cnn", ("cnn-fp32", "cnn-tf32", "cnn-fp16"), _PRECISION, gpu=True),
            Panel("B3a", "mlp", ("mlp-sequence",), _TIMES),
            Panel("B3b", "cnn", ("cnn-sequence",), _TIMES),
        )
    }
)


def runs_of_the_paper() -> tuple[str, ...]:
    """The runs that its own figures show, without ours beside them.

    >>> runs_of_the_paper()[:3]
    ('mlp-initial', 'cnn-initial', 'mlp-sequence')
    """
    theirs = [panel for panel in PANELS.values() if not panel.ours]
    return tuple(dict.fromkeys(run for panel in theirs for run in panel.runs))
