"""Readings under torch.distributed equal those of a single process, on every process."""

import math

import pytest
import torch
from support import sharded

RELATIVE = 1e-8
STEPS = 10


def assert_equal(found, expected, relative=RELATIVE):
    """Compare all readings by name; numbers near zero are compared with the whole model's."""
    assert list(found) == list(expected)
    scale = max(abs(x) for x in expected["model"][2:4])
    for name, (step, count, left, right, lr, *errors) in expected.items():
        got = found[name]
        assert got[:2] == (step, count), name
        assert got[2] == pytest.approx(left, rel=relative, abs=relative * scale * 1e-2), name
        assert got[3] == pytest.approx(right, rel=relative, abs=relative * scale * 1e-2), name
        assert got[4] == lr or (math.isnan(got[4]) and math.isnan(lr)), name
        assert got[5:] == pytest.approx(tuple(errors), rel=10 * relative, nan_ok=True), name


def same(a, b):
    return repr(a) == repr(b)  # nan equals nan


@pytest.fixture(scope="module")
def expected():
    """Readings of a single process."""
    found = {}
    for kind in sharded.OPTIMIZERS:
        found |= sharded.single(kind, STEPS)
    return found


QUICK = ("FSDP2", "TP", "FSDP2, offloaded")
"""Strategies that are not left to the slow tests."""


@pytest.mark.parametrize(
    "strategy",
    [
        strategy if strategy in QUICK else pytest.param(strategy, marks=pytest.mark.slow)
        for strategy in sharded.STRATEGIES
    ],
)
def test_sharded_readings_equal_those_of_a_single_process(processes, expected, strategy):
    kinds = ["momentum", "adamw"] if "offloaded" in strategy else list(sharded.OPTIMIZERS)
    if strategy == "TP, sequence" and sharded.TORCH < (2, 9):
        kinds = ["sgd", "adamw"]
    results = processes.run(sharded.readings, strategy, STEPS, kinds)
    for found in results:
        assert same(found, results[0])
    for setting, numbers in results[0].items():
        assert_equal(numbers, expected[setting])


@pytest.mark.parametrize(
    ("strategy", "kind", "every"), [("FSDP2 and TP", "momentum", 1), ("FSDP2 in parts", "adamw", 2)]
)
def test_errors_of_sharded_readings_equal_those_of_a_single_process(
    processes, strategy, kind, every
):
    """Potentials are added up over all processes before anything is squared."""
    steps = 17 * every
    expected = sharded.single(kind, steps, intervals=(every,))[kind, every]
    assert all(math.isfinite(x) for numbers in expected.values() for x in numbers[5:])
    results = processes.run(sharded.readings, strategy, steps, [kind], torch.float64, (every,))
    for found in results:
        assert same(found, results[0])
    assert_equal(results[0][kind, every], expected)


@pytest.mark.parametrize(("strategy", "kind"), [("FSDP2", "momentum"), ("FSDP2 and TP", "adamw")])
def test_sharded_rotations_equal_those_of_a_single_process(processes, strategy, kind):
    for (found, readings), (expected, alone) in processes.run(sharded.rotations, strategy, kind, 9):
        for turned, single in zip(found, expected, strict=True):
            assert list(turned) == list(single)
            for name, numbers in single.items():
                assert turned[name] == pytest.approx(numbers, rel=RELATIVE, abs=1e-12), name
            assert turned["down.weight"][0] < 1e-3  # recognised, up to the norm's ε
        for reading, single in zip(readings, alone, strict=True):
            assert reading == pytest.approx(single, rel=RELATIVE, nan_ok=True)
            assert reading[2:4] == pytest.approx(readings[0][2:4])


@pytest.mark.parametrize(("kind", "every"), [("momentum", 1), ("adamw", 4)])
def test_data_parallel_readings_need_no_communication(processes, expected, kind, every):
    results = processes.run(sharded.data_parallel, kind, every, STEPS)
    for numbers, step in results:
        assert same(numbers, results[0][0])
        assert step == STEPS
    assert_equal(results[0][0], expected[kind, every])


@pytest.mark.skipif(sharded.TORCH < (2, 9), reason="FSDP2 of torch 2.8 sums gradients here")
def test_single_precision_readings_equal_those_of_a_single_process(processes):
    kinds = ["sgd", "momentum"]
    results = processes.run(sharded.readings, "FSDP2", STEPS, kinds, torch.float32)
    expected = {}
    for kind in kinds:
        expected |= sharded.single(kind, STEPS, dtype=torch.float32)
    for setting, numbers in results[0].items():
        assert_equal(numbers, expected[setting], relative=1e-5)


@pytest.mark.parametrize("strategy", ["FSDP2", "HSDP", "FSDP2 and TP"])
def test_learning_rates_are_the_same_on_every_process_after_every_decision(processes, strategy):
    results = processes.run(sharded.decisions, strategy, 4)
    assert all(same(found, results[0]) for found in results)
    assert [decision.lowered for _, decision in results[0]][1] is True
    assert results[0][-1][0] == [0.05 / 4, 0.025 / 4]


@pytest.mark.parametrize(("strategy", "groups"), [("FSDP2", 1), ("HSDP", 1), ("FSDP2 and TP", 2)])
def test_a_reading_takes_one_small_reduction_for_each_group(processes, strategy, groups):
    for training, *readings in processes.run(sharded.collectives, strategy, 5):
        assert training == []
        assert [len(sizes) for sizes in readings] == [groups] * 3
        # Both sides and the norm of eight parameters, and three counts of steps for each parameter
        # group; for the error bar 64 changes of each parameter, and as many counts for each group;
        # and eight pairs of sums of each parameter, which tell scale-invariant ones.
        size = 3 * 8 + 3 * 2 + 64 * (8 + 2) + 8 * 8 * 2
        assert {found for sizes in readings for found in sizes} == {size}


@pytest.mark.parametrize("first_whole", [False, True], ids=["always", "later"])
@pytest.mark.parametrize("every", [1, 4])
def test_partial_gradients_are_added_up(processes, every, first_whole):
    kinds = ["sgd", "adamw"] if sharded.TORCH < (2, 9) else sharded.OPTIMIZERS
    for kind in kinds:
        results = processes.run(sharded.partial_gradients, kind, every, STEPS, first_whole)
        for found, expected in results:
            assert_equal(found, expected, relative=1e-5)


@pytest.mark.parametrize("how", ["whole", "local"])
def test_edits_of_sharded_parameters_are_noticed(processes, how):
    for found, expected in processes.run(sharded.edited, how):
        assert_equal(found, expected)


def test_zero_redundancy_readings_are_those_of_the_step_form(processes):
    # Without momentum, and for AdamW, that is what a single process reads too.
    for kind, every in [("sgd", 1), ("adamw", 4)]:
        results = processes.run(sharded.zero_redundancy, kind, every, STEPS)
        assert all(same(found, results[0]) for found in results)
        assert_equal(results[0], sharded.single_group(kind, every, STEPS))


@pytest.mark.parametrize(("strategy", "kind"), [("FSDP2", "momentum"), ("TP", "adamw")])
def test_states_of_one_process_and_of_four_are_the_same(processes, strategy, kind):
    for expected, *others in processes.run(sharded.exchanged_states, strategy, kind, 10):
        for found in others:
            assert_equal(found, expected)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused(processes, use_orig_params):
    for error in processes.run(sharded.fsdp1, use_orig_params):
        assert error.startswith(
            "ValueError: the optimizer holds shards of FullyShardedDataParallel"
        )


def test_traces_agree_and_equal_that_of_a_single_process(processes):
    results = processes.run(sharded.traced, 40)
    for positions, expected in results:
        assert (positions == results[0][0]).all()
        # Fewer numbers than buckets: sketches keep all distances.
        distances = [((x[:, None] - x) ** 2).sum(-1) for x in (positions, expected)]
        assert distances[0] == pytest.approx(distances[1], rel=1e-9, abs=1e-12)


def test_partial_parameters_raise(processes):
    for error in processes.run(sharded.partial_parameter):
        assert "shape (3,) has the placement P" in error
        assert "redistribute it to Shard or Replicate first" in error
