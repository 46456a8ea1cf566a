"""The remaining time of runs is estimated from the speed so far."""

from dataclasses import replace

import pytest

from equilibrate_paper.protocol import profiles
from equilibrate_paper.runs.eta import RemainingTime
from equilibrate_paper.runs.timings import Timing


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


def timing(run, seconds):
    return Timing(run.name, len(run.replicas), run.epochs, 600, seconds, "GPU", "2.11", "fp32")


def test_runs_of_earlier_calls_count_by_precision_and_replicas():
    """The most similar one: the same precision first, then the number of replicas."""
    plan = profiles.profile("paper")
    few, many, tf32 = (plan.runs[name] for name in ("mlp-initial", "mlp-grid", "mlp-tf32"))
    finished = [
        (few, timing(few, 4 * 100 * 3.0)),
        (many, timing(many, 16 * 400 * 2.0)),
        (tf32, timing(tf32, 16 * 60 * 1.0)),
    ]
    sequence, grid = plan.runs["mlp-sequence"], replace(many, name="other")
    remaining = RemainingTime([sequence, grid, replace(tf32, name="third")], {}, finished)
    assert remaining.seconds("mlp-sequence") == pytest.approx(4 * 3500 * 3.0)
    assert remaining.seconds("other") == pytest.approx(16 * 400 * 2.0)
    assert remaining.seconds("third") == pytest.approx(16 * 60 * 1.0)
    assert RemainingTime([plan.runs["cnn-grid"]], {}, finished).seconds() is None


def test_recorded_epochs_do_not_remain():
    run = profiles.profile("paper").runs["mlp-sequence"]
    remaining = RemainingTime([run], {run.name: 3000}, [(run, timing(run, 4 * 3500 * 1.0))])
    assert (remaining.epochs, remaining.seconds()) == (500, pytest.approx(4 * 500))
