r"""Weights whose norm the loss does not depend on, and the angle by which a step turns them.

The loss does not change if a weight before a normalisation layer is multiplied by a number:
f(aθ) = f(θ) apart from weight decay. Its derivative with respect to a is zero, θ·∇f = 0 for every
mini-batch, so the gradient only turns the weight. Weight decay alone shortens it and each step,
being orthogonal to it, makes it longer. FDR1 of such a weight reads λ⟨N⟩ = (1+μ)/(2(1−ν)) η⟨v²⟩
with N = |θ|² and weight decay λ. With the step Δ = ηv′ this is

    ⟨Δ²⟩/⟨N⟩ = 2ηλ(1−ν)/(1+μ),

whatever the loss is: the norm is in equilibrium when a step turns the weight by the angle
√(2ηλ(1−ν)/(1+μ)) (root mean square, in radians). It says nothing about a plateau of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

THRESHOLD = 0.05
"""The alignment of a scale-invariant weight is below it; see `Rotation`."""
FEWEST = 4
"""Samples below which it is not decided whether a weight is scale-invariant."""


@dataclass(frozen=True, slots=True)
class Rotation:
    r"""How far a step turns one weight, and whether the loss depends on the norm of the weight.

    A scale-invariant weight is recognised from its gradient, without weight decay, at a few
    mini-batches. The statistic is

        z = Σ θ_i g_i / √(Σ θ_i² g_i²),

    which is zero for a scale-invariant weight, up to rounding and to the ε of the normalisation. If
    the signs of the products θ_i g_i were random, z would have mean 0 and variance 1 whatever the
    sizes of θ and g are, and a loss that depends on the norm makes it larger. `alignment` is the
    root mean square of z over k samples. With random signs it is below the threshold of 0.05 by
    chance with probability P(χ²_k < k·0.05²) if many components count, and less often if few do:
    1.2e-5 for k = 4 and 4e-10 for k = 8.

    Weights that are scale-invariant only together with others, such as weight and bias of a linear
    layer before LayerNorm, are not scale-invariant by themselves.
    """

    alignment: float
    """Root mean square of z; nan if there is no sample."""
    samples: int
    """Number of mini-batches over which it was taken."""
    angular_step: float
    """√(⟨Δ²⟩/⟨N⟩) over the averaging window: the angle in radians by which a step turns the weight,
    or for a weight that is not scale-invariant the relative length of a step."""
    equilibrium: float
    """The angular step at which the norm of a scale-invariant weight is in equilibrium. Zero
    without weight decay; nan for optimizers for which it is not known."""
    decay: float
    """λ⟨N⟩, what weight decay adds to the left side of FDR1; nan for optimizers for which it is not
    known."""
    relaxation: float
    """Steps in which weight decay relaxes the norm. For a weight that is not scale-invariant this
    is the longest time; its loss may be faster. Infinite without weight decay; nan if not known."""

    @property
    def scale_invariant(self) -> bool | None:
        """Whether the weight is scale-invariant; None if there are fewer than four samples."""
        return is_scale_invariant(self.alignment, self.samples)


def is_scale_invariant(alignment: float, samples: int) -> bool | None:
    """Return whether a weight with such samples is scale-invariant; see `Rotation`.

    Args:
        alignment: Root mean square of z over the samples.
        samples: Number of samples.

    Returns:
        Whether it is; None if there are too few samples.

    Example:
        >>> is_scale_invariant(0.001, 8), is_scale_invariant(1.0, 8), is_scale_invariant(0.001, 3)
        (True, False, None)
    """
    return None if samples < FEWEST else alignment < THRESHOLD


def sgd_angular_step(
    lr: float,
    weight_decay: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    *,
    nesterov: bool = False,
) -> float:
    r"""Return the equilibrium angular step of a scale-invariant weight under SGD.

    It is √(2ηλ(1−ν)/(1+μ)), exactly as FDR1 is (see the module). With Nesterov momentum there is no
    such identity. If successive gradients are uncorrelated, with mean square G, then
    b′ = μb + g and Δ = −η(g + μb′) have ⟨b²⟩ = G/(1−μ²) and ⟨Δ²⟩ = η²G(1 + 2μ + μ²/(1−μ²)), and the
    norm is constant for 2λ⟨N⟩ = ηG/(1−μ)², so that the angular step is √(2ηλ(1+2μ−2μ³)/(1+μ)).
    Both hold to first order in ηλ.

    Args:
        lr: Learning rate η.
        weight_decay: Weight decay λ.
        momentum: Momentum μ.
        dampening: Dampening ν.
        nesterov: Whether the momentum is Nesterov's.

    Returns:
        The root mean square of the angle, in radians.

    Example:
        >>> print(f"{sgd_angular_step(0.1, 5e-4, momentum=0.9):.5f}")
        0.00725
    """
    shape = (1 + 2 * momentum - 2 * momentum**3) if nesterov else 1 - dampening
    return math.sqrt(2 * lr * weight_decay * shape / (1 + momentum))


def adamw_angular_step(lr: float, weight_decay: float, beta1: float = 0.9) -> float:
    r"""Return the equilibrium angular step of a scale-invariant weight under AdamW.

    The step is −η(λθ + u), where u is the mean of normalised gradients with weights (1−β₁)β₁^k. If
    each is orthogonal to θ at its own time, on average, and they are uncorrelated with mean square
    G, then ⟨u²⟩ = G(1−β₁)/(1+β₁) and ⟨θ·u⟩ = −ηGβ₁/(1+β₁), because θ has moved since. The norm is
    constant for 2λ⟨N⟩ = ηG, so that the angular step is √(2ηλ(1−β₁)/(1+β₁)). It is approximate:
    dividing by √v̂ does not keep the gradient orthogonal to θ.

    Args:
        lr: Learning rate η.
        weight_decay: Weight decay λ.
        beta1: The decay rate β₁ of the first moment.

    Returns:
        The root mean square of the angle, in radians.

    Example:
        >>> print(f"{adamw_angular_step(1e-3, 0.1):.5f}")
        0.00324
    """
    return math.sqrt(2 * lr * weight_decay * (1 - beta1) / (1 + beta1))


def sgd_relaxation(
    lr: float,
    weight_decay: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    *,
    scale_invariant: bool = True,
) -> float:
    r"""Return in how many steps of SGD the norm of a weight relaxes to its equilibrium.

    Without momentum the norm of a scale-invariant weight changes by −2ηλN + η²g² a step, and g² is
    proportional to 1/N. A deviation from equilibrium therefore decays at the rate 4ηλ. Where
    nothing but weight decay acts, N decays at the rate 2ηλ. With momentum η(1−ν)/(1−μ) takes the
    place of η.

    Args:
        lr: Learning rate η.
        weight_decay: Weight decay λ.
        momentum: Momentum μ.
        dampening: Dampening ν.
        scale_invariant: Whether the weight is scale-invariant.

    Returns:
        The relaxation time; infinite without weight decay.

    Example:
        >>> round(sgd_relaxation(0.1, 5e-4))
        5000
    """
    rate = (4 if scale_invariant else 2) * lr * weight_decay * (1 - dampening)
    return (1 - momentum) / rate if rate else math.inf


def adamw_relaxation(lr: float, weight_decay: float) -> float:
    """Return in how many steps of AdamW the norm of a weight relaxes to its equilibrium.

    The length of a step does not depend on the norm, so that a deviation decays at the rate 2ηλ. If
    v̂ follows the gradients more slowly than the norm relaxes (1/(1−β₂) steps), it is up to twice
    as fast, as for SGD.

    Args:
        lr: Learning rate η.
        weight_decay: Weight decay λ.

    Returns:
        The relaxation time; infinite without weight decay.

    Example:
        >>> round(adamw_relaxation(1e-3, 0.1))
        5000
    """
    rate = 2 * lr * weight_decay
    return 1 / rate if rate else math.inf
