"""Forecasts under torch.distributed equal those of a single process, on every process."""

import pytest
import torch
from support import sharded_forecasts as sharded
from support.sharded import TORCH

STEPS = 60


@pytest.fixture(scope="module")
def expected():
    return sharded.single_forecasts(STEPS)


@pytest.mark.parametrize("strategy", ["FSDP2", "HSDP", "TP, sequence", "FSDP2 in parts"])
def test_sharded_forecasts_equal_those_of_a_single_process(processes, expected, strategy):
    if strategy == "TP, sequence" and TORCH < (2, 9):
        pytest.skip("torch 2.8 does not add up partial gradients for SGD with momentum")
    single, means = expected
    for found, loaded, whole in processes.run(sharded.forecasts, strategy, STEPS):
        assert found.undefined is None
        assert found.gain.value == pytest.approx(single.gain.value, rel=1e-8)
        assert found.gain.stderr == pytest.approx(single.gain.stderr, rel=1e-8)
        assert loaded.gain.value == pytest.approx(found.gain.value, rel=1e-12)
        for m, e in zip(whole, means, strict=True):
            torch.testing.assert_close(m, e)


def test_data_parallel_forecasts_need_no_communication(processes, expected):
    single, _ = expected
    for found in processes.run(sharded.data_parallel, STEPS):
        assert found.gain.value == pytest.approx(single.gain.value, rel=1e-8)


@pytest.mark.parametrize("strategy", ["FSDP2", "TP"])
def test_averaged_parameters_do_not_end_an_interval(processes, strategy):
    """Each call of `to_local()` returns another tensor."""
    for found, expected in processes.run(sharded.averaged_in_mid_interval, strategy, 20):
        assert repr(found) == repr(expected)


def test_a_state_that_one_process_saves_has_the_losses_of_all(processes):
    steps = 70
    window = slice(steps // 2, None)
    for found in processes.run(sharded.shared_losses, steps):
        assert found[window] == pytest.approx([1.5 * step for step in range(steps)][window])


@pytest.mark.parametrize("decided", [sharded.decided_on_one_rank, sharded.decided_in_turns])
def test_all_decide_alike_whoever_hands_a_loss_over(processes, decided):
    """With a forecast: it needs the losses that the other processes hand over."""
    (rates, reason), *others = processes.run(decided, 1000)
    assert "would end at" in reason
    assert rates[-1] < 0.01
    for found, why in others:
        assert found == rates
        assert why == reason


@pytest.mark.parametrize("what", ["losses", "closures"])
def test_all_are_told_if_only_one_calls(processes, what):
    for error in processes.run(sharded.told_on_one_rank, what, STEPS):
        assert "not handed over at the same calls on all processes" in error


@pytest.mark.parametrize("strategy", ["FSDP2", "FSDP2 and TP", "FSDP2 in parts"])
def test_evaluations_use_the_parameters_of_the_moment(processes, strategy):
    """FSDP2 keeps those of the root module gathered after an evaluation."""
    losses, params = sharded.evaluated(lambda model: model, STEPS)
    assert len(set(losses)) > STEPS  # the averaged ones, too
    for found, whole in processes.run(sharded.evaluated_while_sharded, strategy, STEPS):
        assert found == pytest.approx(losses, rel=1e-9)
        for p, e in zip(whole, params, strict=True):
            torch.testing.assert_close(p, e, rtol=1e-9, atol=1e-12)


def test_a_loss_may_be_a_dtensor(processes):
    assert processes.run(sharded.of_a_dtensor) == [[1.0 + 2 + 3 + 4]] * 4


def test_sharded_parameters_need_their_model(processes):
    for error in processes.run(sharded.without_the_model, STEPS):
        assert "pass the model" in error
