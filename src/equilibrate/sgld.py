r"""Stochastic gradient Langevin dynamics: its stationary relation, and the bias of its step size.

The step is θ′ = θ − (ε/2)g + √ε ξ, where g is a gradient of the potential U, on a mini-batch or
not, and ξ is standard normal in d dimensions, independent of θ and g. It samples from exp(−U) up to
an error that is due to the step size ε.

The mean of |θ − c|² is constant in the stationary state, for any fixed point c. The mean of
|θ′ − c|² − |θ − c|² is −ε(θ−c)·g + (ε²/4)g² + εd, so that

    ⟨(θ−c)·g⟩ = d + (ε/4)⟨g²⟩.

This is FDR1 of SGD with learning rate ε/2 and gradient g − (2/√ε)ξ, averaged over ξ. It is exact
for any U, any ε and any noise of g. Where U is quadratic, with its minimum U₀ at c, the left side
is 2⟨U − U₀⟩. The mean potential is then d/2, as exp(−U) has it, plus the bias (ε/8)⟨g²⟩. Estimates
from the mean potential have this bias too, among them the local learning coefficient.
"""

from __future__ import annotations

from torch import Tensor

from equilibrate.observables import Scalar, Snapshot, inner
from equilibrate.relations import Relation

_NOT_POSITIVE = "step_size must be positive, such as 1e-4, got {}"


def relation(step_size: float, centre: Tensor | None = None) -> Relation:
    """Return ⟨(θ−c)·g⟩ = d + (ε/4)⟨g²⟩, the stationary relation of SGLD.

    The snapshots hold θ before the step and g without the injected noise ξ. Half of the right side
    is the mean of U above its minimum where U is quadratic (`Reading.excess_loss`).

    Args:
        step_size: ε, the variance of the noise that a step adds to each component.
        centre: The point c, of shape (d,); the origin if not given. A point near the minimum gives
            the smallest error.

    Raises:
        ValueError: If `step_size` is not positive.

    Example:
        >>> import torch
        >>> step = Snapshot(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.5]), lr=0.05)
        >>> relation(step_size=0.1).right(step).item()
        2.0625
    """
    if not step_size > 0:
        raise ValueError(_NOT_POSITIVE.format(step_size))

    def left(s: Snapshot) -> Tensor:
        return inner(s.parameters if centre is None else s.parameters - centre, s.gradient)

    def right(s: Snapshot) -> Tensor:
        dimension = s.parameters.shape[-1]
        return dimension + step_size / 4 * inner(s.gradient, s.gradient)

    return Relation(left, right)


def step_size_bias(gradient_square: Scalar, step_size: float) -> Scalar:
    """Return (ε/8)⟨g²⟩, by which the step size raises the mean of a quadratic potential.

    With gradients of mini-batches the noise of g counts too. A local learning coefficient that is
    estimated as nβ(⟨L⟩ − L₀) has this bias if U is little more than nβL: a localising term takes
    its share of it.

    Args:
        gradient_square: ⟨g²⟩ in the stationary state.
        step_size: ε.

    Raises:
        ValueError: If `step_size` is not positive.

    Example:
        >>> step_size_bias(40.0, step_size=1e-3)
        0.005
    """
    if not step_size > 0:
        raise ValueError(_NOT_POSITIVE.format(step_size))
    return step_size / 8 * gradient_square
