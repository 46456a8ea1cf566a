"""Averages of values that come in epochs are the paper's equation at the end of each epoch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.naive import half_running_mean

from equilibrate_paper.ensemble.averages import HalfRunningBlocks


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
