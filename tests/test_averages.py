"""Half-running averages are the paper's equation, at every t, however the values come."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.naive import half_running_mean

from equilibrate import HalfRunningMean
from equilibrate.averages import HalfRunningBlocks

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


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_blocks_equal_the_equation_at_their_ends(size, blocks, saved_after, seed):
    xs = torch.randn(blocks * size, 2, generator=torch.Generator().manual_seed(seed)).double()
    mean = HalfRunningBlocks((2,), size=size)
    for n, block in enumerate(xs.split(size), start=1):
        mean.extend(block)
        assert (mean.count, mean.window) == (n * size, n * size - n * size // 2)
        for column in range(2):
            expected = half_running_mean(xs[: n * size, column].tolist())
            assert float(mean.value[column]) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        if n == saved_after:  # a state goes on bit by bit
            before, mean = mean, HalfRunningBlocks((2,), size=size)
            mean.load_state_dict(before.state_dict())
            assert torch.equal(mean.value, before.value)


def test_blocks_need_two_sums_each_whatever_their_size():
    mean = HalfRunningBlocks((4,), size=500)
    for _ in range(100):
        mean.extend(torch.zeros(500, 4))
    assert mean.state_dict()["sums"].numel() == 50 * 2 * 4


def test_a_bad_block_leaves_with_the_window_and_reset_empties():
    mean = HalfRunningBlocks(size=2)
    for block in ([float("nan"), 1.0], [1.0, 3.0]):
        mean.extend(torch.tensor(block))
    assert float(mean.value) == 2.0
    mean.reset()
    assert mean.value.isnan()
    assert mean.count == mean.window == 0
    mean.extend(torch.tensor([float("nan"), 1.0]))
    assert float(mean.value) == 1.0


def test_blocks_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="size must be at least 1"):
        HalfRunningBlocks(size=0)
    mean = HalfRunningBlocks((2,), size=3)
    with pytest.raises(ValueError, match=r"one block of shape \(3, 2\), got \(2, 2\)"):
        mean.extend(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"blocks of shape \(4, 2\), this average has \(3, 2\)"):
        mean.load_state_dict(HalfRunningBlocks((2,), size=4).state_dict())
