"""The bounded window against a list that keeps everything."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibrate.watching.window import Window


def row(value, length):
    return torch.tensor([[value, length]], dtype=torch.float64)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60))
def test_rows_of_one_step_give_the_exact_half_running_window(values):
    window = Window(2, capacity=64)
    for t, value in enumerate(values, start=1):
        window.extend(row(value, 1), [1])
        total, steps = window.rows().sum(0).tolist()
        assert steps == t - t // 2
        assert total == pytest.approx(sum(values[t // 2 : t]), abs=1e-12)


@pytest.mark.parametrize("length", [1, 16])
def test_the_window_start_is_rounded_by_less_than_a_thousandth(length):
    window, steps, worst = Window(2), 0, 0.0
    for k in range(20_000):
        window.extend(row(1.0, length), [length])
        steps += length
        if k % 97 == 0 and k > 1000:
            half = steps - steps // 2
            worst = max(worst, abs(window.rows().sum(0)[1].item() / half - 1))
    assert worst < 1e-3


def test_merging_keeps_the_sums():
    values = torch.randn(10_000, dtype=torch.float64)
    window = Window(2, capacity=64)
    for value in values.tolist():
        window.extend(row(value, 1), [1])
    total, steps = window.rows().sum(0).tolist()
    assert total == pytest.approx(values[-int(steps) :].sum().item(), abs=1e-9)


def test_rows_that_come_at_once_are_those_that_come_one_by_one():
    values, lengths = torch.randn(500, 2, dtype=torch.float64), [1 + k % 3 for k in range(500)]
    one, many = Window(2, capacity=64), Window(2, capacity=64)
    many.extend(values, lengths)
    for k in range(500):
        one.extend(values[k : k + 1], lengths[k : k + 1])
    assert torch.equal(one.rows(), many.rows())


def test_the_shapes_of_a_state_do_not_depend_on_the_number_of_steps():
    window, other = Window(2, capacity=64), Window(2, capacity=64)
    empty = {key: value.shape for key, value in window.state_dict().items()}
    for k in range(200):
        window.extend(row(float(k), 2), [2])
    state = window.state_dict()
    assert {key: value.shape for key, value in state.items()} == empty
    other.load_state_dict(state)
    assert torch.equal(other.rows(), window.rows())
    assert other.lengths().tolist() == window.lengths().tolist()


def test_reset():
    window = Window(2, capacity=8)
    window.extend(torch.ones(20, 2, dtype=torch.float64), [1] * 20)
    window.reset()
    assert len(window.rows()) == 0
