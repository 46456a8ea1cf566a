r"""Whether a threshold on FDR1 can be reached, and how long that would take.

Two things keep |L/R − 1| above a threshold. One is noise: the error of a reading falls as 1/n with
the number n of steps in the window. The other is a drift of the norm N = |θ|². Where the loss does
not hold the norm, as in layers before a normalisation, only weight decay λ does, and the norm
relaxes in τ steps (`scale_invariance`). The residual is then proportional to e^(−t/τ), and its mean
over the later half of t steps to (2τ/t)(e^(−t/2τ) − e^(−t/τ)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from equilibrate.monitor.weight_decay import WeightDecay
from equilibrate.readings import Reading, check_threshold, in_words


def outlook(
    reading: Reading,
    decays: Sequence[WeightDecay],
    threshold: float,
    since: int,
    remaining: int | None = None,
) -> str:
    """Tell whether a threshold can be reached; see `Monitor.outlook`.

    Args:
        reading: A reading of FDR1 over the later half of the steps.
        decays: How weight decay acts on each parameter group.
        threshold: The bound on |L/R − 1|.
        since: Steps since the averaging window was restarted.
        remaining: Steps left in this run.

    Returns:
        A sentence.

    Raises:
        ValueError: If `threshold` is not a positive number, or `remaining` is negative.

    Example:
        >>> reading = Reading(8000, 4000, left=0.3, right=1.0, lr=1e-3, stderr=0.02, margin=0.04)
        >>> decay = WeightDecay(rate=1e-5, relaxation=50_000)
        >>> print(outlook(reading, [decay], threshold=0.01, since=8000, remaining=20_000))
        |L/R − 1| = 0.7 ≥ 0.01; at lr × weight_decay = 1e-05 the norm relaxes in 50,000 steps: it \
will not equilibrate in this run
    """
    check_threshold(threshold)
    if remaining is not None and not remaining >= 0:
        raise ValueError(f"remaining must be a number of steps ≥ 0, got {remaining}")
    if reading.undefined is not None:
        return f"undefined: {reading.undefined}"
    size = abs(reading.residual)
    if size >= threshold and not size <= reading.margin:
        first, ratio = f"|L/R − 1| = {size:.3g} ≥ {threshold:g}", size / threshold
    else:
        first, ratio = _about_noise(reading, threshold), 1.0
    return f"{first}; {_about_norm(decays, ratio, since, remaining)}"


def relaxing_steps(ratio: float, since: int, relaxation: float) -> float:
    """Return after how many further steps the mean of a relaxing residual has fallen by a ratio.

    The logarithm of the mean over the window falls by at least half a step's time, t/(2τ), so the
    solution lies below t + 2τ log(ratio).

    Args:
        ratio: By which factor.
        since: Steps since the window was restarted.
        relaxation: The relaxation time τ, finite.

    Example:
        >>> relaxing_steps(10.0, since=1000, relaxation=1000.0)
        3305
    """
    begin = max(since, 1) / relaxation
    low, high = begin, begin + 2 * math.log(ratio)
    goal = _log_mean(begin) - math.log(ratio)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_mean(middle) > goal else (low, middle)
    return math.ceil((high - begin) * relaxation)


def _log_mean(x: float) -> float:
    """Return log[(2/x)(e^(−x/2) − e^(−x))]."""
    return -x / 2 + math.log(-math.expm1(-x / 2) / (x / 2))


def _about_noise(reading: Reading, threshold: float) -> str:
    size, noise = abs(reading.residual), reading.further_steps(threshold)
    if not noise:
        return f"|L/R − 1| = {size:.3g}, with a standard error below {threshold:g}"
    if math.isnan(noise):
        return f"|L/R − 1| = {size:.3g} < {threshold:g}, with too few measurements for an error bar"
    return (
        f"the standard error, {reading.stderr:.2g}, falls to {threshold:g} after about "
        f"{in_words(noise)} more steps"
    )


def _about_norm(
    decays: Sequence[WeightDecay], ratio: float, since: int, remaining: int | None
) -> str:
    if any(math.isnan(decay.relaxation) for decay in decays):
        return "the time in which the norm relaxes is not known for this optimizer"
    finite = [decay for decay in decays if math.isfinite(decay.relaxation)]
    if not finite:
        return "no weight decay: the norm of a scale-invariant layer never stops growing"
    slowest = max(finite, key=lambda decay: decay.relaxation)
    where = f"group {decays.index(slowest)}: " if len(set(decays)) > 1 else ""
    text = (
        f"{where}at {slowest.formula} = {slowest.rate:.2g} the norm relaxes in "
        f"{in_words(slowest.relaxation)} steps"
    )
    too_long = remaining is not None and slowest.relaxation > since + remaining
    if ratio == 1:
        return f"{text}, more than this run has" if too_long else text
    if too_long:
        return f"{text}: it will not equilibrate in this run"
    more = relaxing_steps(ratio, since, slowest.relaxation)
    return f"{text}: about {in_words(more)} more are needed"
