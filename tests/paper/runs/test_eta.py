"""The remaining time of runs is estimated from the speed so far."""

import pytest

from equilibrate.paper.protocol import profiles
from equilibrate.paper.runs.eta import RemainingTime


def test_remaining_time_follows_from_the_speed():
    """With ten epochs per second of four replicas, 24 epochs of 8 replicas take 4.8 s."""
    plan = profiles.profile("quick", epochs_scale=0.1)
    todo = [plan.runs[name] for name in ("mlp-initial", "mlp-schedules", "cnn-initial")]
    remaining = RemainingTime(todo)
    assert remaining.seconds() is None
    for epoch in range(9):
        remaining.update("mlp-initial", epoch, 100 + epoch / 10)
    assert remaining.seconds("mlp-initial") == 0
    assert remaining.seconds("mlp-schedules") == pytest.approx(24 * 2 / 10)
    assert remaining.seconds() is None  # no CNN was timed yet
    remaining.update("cnn-initial", 0, 200)
    remaining.update("cnn-initial", 1, 201)
    assert remaining.seconds() == pytest.approx(4.8 + 3 * 1.0)


def test_resumed_run_is_timed_from_its_first_update():
    run = profiles.profile("quick", epochs_scale=0.5).runs["mlp-initial"]
    remaining = RemainingTime([run])
    remaining.update(run.name, 30, 0.0)
    remaining.update(run.name, 32, 1.0)
    assert remaining.seconds() == pytest.approx((run.epochs - 32) * 0.5)
