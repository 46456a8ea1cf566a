"""The paper's adaptive schedule for each replica of an ensemble."""

from __future__ import annotations

from equilibrate.decisions import Decision
from equilibrate.readings import Reading
from equilibrate.rules import Threshold, check_factor
from equilibrate_paper.ensemble.checks import PerReplica, per_replica


class ReplicaSchedule:
    """The paper's rule with a threshold X and a factor 1 − Y for each replica.

    Args:
        threshold: X, one number or one for each replica.
        factor: 1 − Y, one number or one for each replica.
        replicas: Number of replicas.

    Raises:
        ValueError: If a threshold is not positive, or a factor does not lie between 0 and 1.
    """

    def __init__(self, threshold: PerReplica, factor: PerReplica, replicas: int) -> None:
        self._rules = [Threshold(x) for x in per_replica("threshold", threshold, replicas)]
        self._factors = per_replica("factor", factor, replicas)
        for one in self._factors:
            check_factor(one)

    def decide(self, replica: int, reading: Reading, lr: float) -> Decision:
        """Decide whether to lower the learning rate of a replica.

        Args:
            replica: The replica.
            reading: Its reading of FDR1.
            lr: Its current learning rate.

        Returns:
            The decision, with the new learning rate.
        """
        verdict = self._rules[replica].judge(reading)
        if verdict.act:
            lr *= self._factors[replica]
        return Decision(verdict.act, verdict.reason, reading, (lr,))
