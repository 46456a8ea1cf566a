"""A run saved by four processes continues on any number of them as if it had not stopped."""

import math
import warnings

import pytest
from support import checkpointed, sharded

RELATIVE = 1e-9


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, numbers in expected.items():
        for got, number in zip(found[name], numbers, strict=True):
            assert got == pytest.approx(number, rel=RELATIVE, abs=1e-13) or (
                math.isnan(got) and math.isnan(number)
            ), name


def assert_continues(result, expected):
    (loaded, later), (saved, after) = result, expected
    assert_same(loaded, saved)
    assert [epoch[:2] for epoch in later] == [epoch[:2] for epoch in after]
    assert any(lowered for lowered, _, _ in later)
    for (_, _, found), (_, _, numbers) in zip(later, after, strict=True):
        assert_same(found, numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"), [("FSDP2", "sgd"), ("FSDP2", "adamw"), ("FSDP2 and TP", "momentum")]
)
def test_a_run_continues_on_another_number_of_processes(processes, strategy, kind, tmp_path):
    if "TP" in strategy and sharded.TORCH < (2, 13):
        pytest.skip("torch 2.9 and older continue such a run differently without a monitor, too")
    folder = str(tmp_path)
    results = processes.run(checkpointed.interrupted, strategy, kind, folder)
    assert all(repr(result) == repr(results[0]) for result in results)
    for size, form in [(2, "dict"), (2, "object"), (1, "dict"), (4, "object")]:
        for result in processes.run(checkpointed.resumed, kind, folder, form, size=size):
            assert_continues(result, results[0])
    for form in ("dict", "object"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is no process group
            result = checkpointed.resumed(kind, folder, form, plain=True)
        assert_continues(result, results[0])


def test_the_example_of_the_documentation_runs_on_several_processes(processes, tmp_path):
    one, other = processes.run(checkpointed.example, str(tmp_path), size=2)
    assert one == other
    assert "scheduler.monitor.ledgers.0.window.rows" in one
