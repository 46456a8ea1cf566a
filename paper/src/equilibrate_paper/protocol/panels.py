"""The panels of the figures: the runs that each is drawn from, and its caption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class Panel:
    """One panel of a figure."""

    id: str
    """Number and letter. Panels that begin with B are not in the paper."""
    task: Literal["mlp", "cnn"]
    """The task that it shows."""
    runs: tuple[str, ...]
    """The runs that it is drawn from."""
    caption: str
    """The caption, with the fields `title`, `seed` and `loss`."""
    optional: tuple[str, ...] = ()
    """Runs that are drawn too if they are available."""
    gpu: bool = False
    """Whether its runs need a GPU."""

    @property
    def ours(self) -> bool:
        """Whether the panel is an addition to the paper."""
        return self.id.startswith("B")


_INITIAL = (
    "{title}: the approach to stationarity at η = 0.1. Above, the loss of mini-batches with the L2 "
    "term ½λ|θ|² (light), its half-running average (dark), and that of the cross-entropy alone "
    "(dashed); below, the two sides of FDR1, which meet once the norm of the weights no longer "
    "drifts."
)
_SEQUENCE = (
    "{title}: the two sides of FDR1 after each decrease of the learning rate, left solid and right "
    "dotted. The averages restart at each decrease. The smaller η, the later the two sides meet."
)
_LANDSCAPE = (
    "{title}: the full-batch observable O_FB against the learning rate, mean and 95 % interval "
    "over seeds. The red line runs from the origin through the smallest η: in a harmonic landscape "
    "with constant noise all points would lie on it. Open markers and their dashed line, if any, "
    "are an addition to the paper: batches drawn independently, without the bias of reshuffling. "
    "An inset, if any, enlarges small η."
)
_SCHEDULES = (
    "{title}, SGD without momentum: preset schedule, adaptive schedule (X = 0.01, Y = 0.1) and "
    "AMSGrad. From top to bottom: learning rate, full-batch training loss, and accuracy on the "
    "training (solid) and test images (dashed)."
)
_ADAMS = (
    "{title}: AMSGrad and Adam with their default settings. Above, the full-batch training loss; "
    "below, accuracy on the training (solid) and test images (dashed)."
)
_EAGER = (
    "{title}, initial seed {seed}: as in Figure 4, but with X = 0.1 and Y = 0.3, which lowers the "
    "learning rate earlier and by more."
)
_GRID = (
    "{title}, beyond the paper: the adaptive schedule for a grid of thresholds X and decreases Y, "
    "one seed each. Above, the final test accuracy; below, the epoch from which the accuracy stays "
    "within two sampling errors of it. Frames mark the paper's two settings."
)
_PRECISION = (
    "{title}, beyond the paper: one learning rate, η = 0.02, with products computed in each "
    "precision, mean and 95 % interval over the same seeds. Above, the residual of FDR1; below, "
    "the full-batch observable O_FB."
)
_COMPARISON = (
    "{title}, beyond the paper: reshuffled (filled) and independent batches (open), in runs of "
    "equal length, mean and 95 % interval over seeds. Above, O_FB/η, which would be constant in a "
    "harmonic landscape with constant noise; below, the ratio of the two, minus one. The line, if "
    "any, is the ratio for a single curvature h, fitted to the points after the runs."
)
_TIMES = (
    "{title}, beyond the paper: epochs after which the sides of FDR1 stay within 10 % of each "
    "other, against the learning rate, geometric mean and 95 % interval over seeds. The line is a "
    "power law, fitted to each seed; its exponent is given as mean and 95 % interval over seeds. "
    "Triangles, if any, mark learning rates at which the sides did not meet for some seed."
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
            Panel("B4a", "mlp", ("mlp-reshuffled", "mlp-independent"), _COMPARISON),
            Panel("B4b", "cnn", ("cnn-sequence", "cnn-independent"), _COMPARISON),
        )
    }
)
