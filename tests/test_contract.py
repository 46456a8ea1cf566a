"""One table that every average must pass."""

import inspect
from functools import partial

import pytest
import torch

from equilibrate import averages

BLOCK = 4
AVERAGES = {
    averages.HalfRunningMean: averages.HalfRunningMean,
    averages.HalfRunningBlocks: partial(averages.HalfRunningBlocks, size=BLOCK),
}


def test_every_average_is_in_the_table():
    found = [
        value
        for _, value in inspect.getmembers(averages, inspect.isclass)
        if value.__module__ == averages.__name__
    ]
    assert set(found) == set(AVERAGES)


@pytest.mark.parametrize("kind", AVERAGES.values(), ids=[kind.__name__ for kind in AVERAGES])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averages(kind, shape, dtype):
    xs = torch.randn(20, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    average, other = kind(shape), kind(shape)
    for block in xs.split(BLOCK):
        average.extend(block)
    assert average.value.shape == shape
    assert average.value.dtype == torch.float64
    saved = average.state_dict()
    assert all(isinstance(v, int | float | str | torch.Tensor) for v in saved.values())
    other.load_state_dict(saved)
    assert torch.equal(other.value, average.value)
    each = [kind() for _ in range(xs[0].numel())]
    for block in xs.reshape(20, -1).split(BLOCK):
        for part, values in zip(each, block.unbind(1), strict=True):
            part.extend(values)
    alone = torch.stack([part.value for part in each])
    torch.testing.assert_close(average.value.flatten(), alone, rtol=1e-14, atol=1e-14)
    average.reset()
    assert average.count == 0
