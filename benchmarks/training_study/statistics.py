"""Means over seeds with intervals, paired differences, areas and times, from records."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equilibrate.estimates import Estimate, student_quantile
from training_study.records import RunRecord


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with the 95 % interval of Student's distribution."""
    count = len(values)
    deviation = float(np.std(values, ddof=1)) if count > 1 else math.nan
    return Estimate(
        float(np.mean(values)), deviation / math.sqrt(count), dof=max(1, count - 1), count=count
    )


@dataclass(frozen=True)
class Difference:
    """Mean difference of two arms over equal seeds, positive if the first one is better."""

    estimate: Estimate

    @property
    def verdict(self) -> str:
        """Whether the 95 % interval excludes zero."""
        low, high = self.estimate.interval
        return "better" if low > 0 else "worse" if high < 0 else "undecided"


def p_value(estimate: Estimate) -> float:
    """Return the probability of a mean as far from zero by chance, by Student's distribution."""
    distance = abs(estimate.value) / estimate.stderr if estimate.stderr else math.inf
    low, high = 0.0, 1.0  # of the probability of being closer
    for _ in range(40):
        middle = (low + high) / 2
        if student_quantile(middle, estimate.dof) < distance:
            low = middle
        else:
            high = middle
    return 1 - low


def discoveries(p_values: Sequence[float], rate: float = 0.05) -> set[int]:
    """Return which of many tests remain significant if a share `rate` of them may be wrong.

    This is the procedure of Benjamini and Hochberg.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    ranks = [k for k, i in enumerate(order, 1) if p_values[i] <= rate * k / len(order)]
    return set(order[: max(ranks, default=0)])


def paired(
    ours: dict[int, float], theirs: dict[int, float], *, lower_is_better: bool
) -> Difference | None:
    """Return the difference over the seeds that both have; None if they are fewer than three.

    Accuracies are multiples of one example, so two differences can be equal by chance.

    Args:
        ours: Metric by seed.
        theirs: Metric of the other arm by seed.
        lower_is_better: Whether the metric is a loss.
    """
    seeds = sorted(set(ours) & set(theirs))
    if len(seeds) < 3:
        return None
    sign = -1 if lower_is_better else 1
    return Difference(mean([sign * (ours[seed] - theirs[seed]) for seed in seeds]))


def area(steps: Sequence[int], metrics: Sequence[float], until: int) -> float:
    """Return the mean metric from the first evaluation to a step, by the trapezoidal rule."""
    inside = [(s, m) for s, m in zip(steps, metrics, strict=True) if s <= until]
    if len(inside) < 2:
        return math.nan
    x, y = np.array(inside).T
    return float(np.sum((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2) / (x[-1] - x[0]))


def first_reaching(
    steps: Sequence[int], metrics: Sequence[float], goal: float, *, lower_is_better: bool
) -> int | None:
    """Return the first evaluated step at which a metric has reached a goal, or None."""
    for step, metric in zip(steps, metrics, strict=True):
        if metric <= goal if lower_is_better else metric >= goal:
            return step
    return None


def goal(best: float, *, lower_is_better: bool, share: float = 0.99) -> float:
    """Return 99 % of the best metric: a loss may be larger by as much."""
    return best / share if lower_is_better else share * best


@dataclass(frozen=True)
class Moments:
    """When a rule acts, over seeds, in budgets."""

    count: float
    """Mean number of times within two budgets."""
    first: float
    """Mean moment of the first one, over the runs in which it acts; nan if it never does."""
    first_spread: float
    """Standard deviation of that over seeds; nan for fewer than two runs."""
    spread: float
    """Standard deviation over seeds of the k-th moment, its root mean square over all k that occur
    in at least two runs; nan if there are none."""
    silent: int
    """Runs in which the rule never acts."""


def moments(runs: Sequence[RunRecord]) -> Moments:
    """Return when a rule acts."""
    times = [[step / run.budget for step, _ in run.acted] for run in runs]
    deepest = max(map(len, times))
    kth = [[row[k] for row in times if len(row) > k] for k in range(deepest)]
    variances = [float(np.var(values, ddof=1)) for values in kth if len(values) > 1]
    firsts = kth[0] if kth else []
    return Moments(
        sum(map(len, times)) / len(runs),
        float(np.mean(firsts)) if firsts else math.nan,
        math.sqrt(variances[0]) if variances else math.nan,
        math.sqrt(float(np.mean(variances))) if variances else math.nan,
        sum(not row for row in times),
    )


def interpolated(run: RunRecord, step: float) -> float:
    """Return the metric of a run at any step, on straight lines between evaluations."""
    return float(np.interp(step, run.steps, run.metrics))
