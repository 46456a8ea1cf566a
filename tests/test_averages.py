"""Half-running averages are the paper's equation, at every t, however the values come."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.naive import half_running_mean

from equilibrate import HalfRunningMean

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(values)
def test_equals_the_equation_at_every_step(xs):
    mean = HalfRunningMean()
    for t, x in enumerate(xs, start=1):
        mean.update(torch.tensor(x, dtype=torch.float64))
        assert float(mean.value) == pytest.approx(half_running_mean(xs[:t]), rel=1e-12, abs=1e-9)
        assert (mean.count, mean.window) == (t, t - t // 2)


@given(values, st.data())
def test_chunks_of_time_do_not_matter(xs, data):
    one_by_one, chunked = HalfRunningMean(), HalfRunningMean()
    rest = torch.tensor(xs, dtype=torch.float64)
    for x in rest:
        one_by_one.update(x)
    while len(rest):
        size = data.draw(st.integers(1, len(rest)))
        chunked.extend(rest[:size])
        rest = rest[size:]
    assert torch.equal(one_by_one.value, chunked.value)
    assert one_by_one.count == chunked.count


@given(values, values)
def test_a_state_goes_on_bit_by_bit(first, second):
    straight, saved = HalfRunningMean((2,)), HalfRunningMean((2,))
    for x in first:
        for mean in (straight, saved):
            mean.update(torch.tensor([x, 2 * x]))
    loaded = HalfRunningMean((2,))
    loaded.load_state_dict(saved.state_dict())
    for x in second:
        for mean in (straight, loaded):
            mean.update(torch.tensor([x, -x]))
        assert torch.equal(straight.value, loaded.value)


def test_long_runs_are_exact_across_every_growth_of_the_buffer():
    torch.manual_seed(3)
    xs = torch.randn(10_000, 2, dtype=torch.float64)
    mean = HalfRunningMean((2,))
    for t, x in enumerate(xs, start=1):
        mean.update(x)
        if t % 97 == 0 or 1000 < t < 1100:
            assert torch.allclose(mean.value, xs[t // 2 : t].mean(0), rtol=0, atol=1e-13)


def test_sixteen_bytes_a_step_for_two_sides():
    mean = HalfRunningMean((2,))
    steps = 100_000
    for chunk in torch.zeros(steps, 2).split(100):
        mean.extend(chunk)
    assert mean._rows.nbytes <= 16 * steps
    assert mean.state_dict()["rows"].nbytes == 16 * steps // 2


def test_one_bad_value_leaves_with_the_window():
    mean = HalfRunningMean()
    mean.extend(torch.tensor([1.0, float("nan"), 3.0]))
    assert mean.value.isnan()
    mean.update(torch.tensor(5.0))
    assert float(mean.value) == 4.0


def test_empty_is_nan_and_reset_empties():
    mean = HalfRunningMean((3,))
    assert mean.value.isnan().all()
    mean.update(torch.ones(3))
    mean.reset()
    assert mean.value.isnan().all()
    assert mean.count == mean.window == 0
    mean.update(torch.full((3,), 2.0))
    assert mean.value.tolist() == [2.0] * 3


def test_a_state_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"state holds values of shape \(2,\), this average has"):
        HalfRunningMean((3,)).load_state_dict(HalfRunningMean((2,)).state_dict())
