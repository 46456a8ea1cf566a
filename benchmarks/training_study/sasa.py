"""SASA+ (Zhang et al. 2020, statistical adaptive stochastic approximation), for any optimizer.

SASA+ tests whether the mean of ⟨x_{k+1}, d_k⟩ + (α/2)|d_k|² is zero, where x_{k+1} = x_k − α d_k.
That is (|x_k|² − |x_{k+1}|²)/(2α) for any d_k, so the squared norm at each step is all it needs.
With torch's momentum, whose gradient is not damped, α d_k is the same step and the statistic
differs by the factor 1 − μ, which the test does not see.

What the package statopt does and its paper does not say is done here as well: at the first drop the
two half means must each be within the interval, later only their common mean; they must have equal
signs; the samples are taken for independent (its default, "mb", is not one of its modes and falls
back to that); the newest eighth of the samples is used; momentum starts at zero after a drop.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from equilibrate.estimates import student_quantile

LEAK = 8
"""The newest 1/LEAK of the samples since the last drop are tested."""
LEAST = 100
"""Samples without which nothing is tested: the smallest number that statopt accepts. Its default,
1000, would allow no test before step 8000."""
SIGNIFICANCE = 0.05


def is_stationary(samples: NDArray[np.float64], *, first: bool) -> bool:
    """Return what the test of SASA+ says of a series.

    Args:
        samples: The statistic at successive steps.
        first: Whether the learning rate was not dropped yet, which makes the test stricter.
    """
    count = len(samples)
    width = samples.std(ddof=1) * student_quantile(1 - SIGNIFICANCE, count - 1) / math.sqrt(count)
    one, two = samples[: count // 2].mean(), samples[count // 2 :].mean()
    if one * two <= 0:
        return False
    if first:
        return abs(one) < width and abs(two) < width
    return abs(samples.mean()) < width


class Recorder:
    """Records the statistic of SASA+ at each step of an optimizer, without waiting for the device.

    Args:
        optimizer: Any optimizer.
        steps: Steps that will be made at most.
    """

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        device = self._parameters[0].device
        self._norms = torch.zeros(steps + 1, dtype=torch.float64, device=device)
        self._rates: list[float] = []
        self._start = self._step = 0
        self._norms[0] = self._norm()
        self._hook = optimizer.register_step_post_hook(self._record)

    def samples(self) -> NDArray[np.float64]:
        """Return the newest eighth of the samples since the last reset."""
        # As statopt's bucket: the first is kept, then one is dropped for each but every eighth.
        kept = -(-(self._step - self._start) // LEAK)
        begin = self._step - kept
        norms = self._norms[begin : self._step + 1].cpu().numpy()
        return (norms[:-1] - norms[1:]) / (2 * np.array(self._rates[begin : self._step]))

    def reset(self) -> None:
        """Forget all samples."""
        self._start = self._step

    def detach(self) -> None:
        """Record nothing more."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the samples since the last reset."""
        return {
            "norms": self._norms[: self._step + 1].clone(),
            "rates": list(self._rates),
            "start": self._start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the samples of a state."""
        self._rates, self._start = list(state["rates"]), state["start"]
        self._step = len(self._rates)
        self._norms[: self._step + 1] = state["norms"]

    def _record(self, optimizer: Optimizer, *_: object) -> None:
        self._step += 1
        self._norms[self._step] = self._norm()
        self._rates.append(float(optimizer.param_groups[0]["lr"]))

    @torch.no_grad()
    def _norm(self) -> Tensor:
        norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            self._parameters, 2, dtype=torch.float64
        )
        return torch.stack(list(norms)).square().sum()


def zero_momentum(optimizer: Optimizer) -> None:
    """Set the momentum of SGD to zero. Optimizers without a momentum buffer are left alone."""
    for state in optimizer.state.values():
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            buffer.zero_()
