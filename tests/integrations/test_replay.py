"""Blocks that leave no trace."""

from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from equilibrate.integrations._replay import Bystanders, without_trace


def test_attributes_get_their_values_back():
    loop = []
    loop.append(loop)
    it = SimpleNamespace(
        count=1,
        total=torch.ones(2),
        rows=[torch.ones(2), {"deep": [1]}],
        named=defaultdict(list, {"a": [1]}),
        counts=Counter("aab"),
        last=deque([1, 2], maxlen=2),
        loop=loop,
    )
    parts = dict(vars(it))
    with without_trace([it]):
        it.count += 1
        it.new = it.run = print
        it.total += 1
        it.rows[0].mul_(3)
        it.rows[1]["deep"].append(2)
        it.rows.append(3)
        it.named["a"].append(2)
        it.named["b"].append(2)
        it.counts.update("bc")
        it.last.append(3)
        it.loop = None
    assert list(vars(it)) == list(parts)
    assert all(value is parts[name] for name, value in vars(it).items())
    assert it.count == 1
    assert it.total.tolist() == it.rows[0].tolist() == [1, 1]
    assert it.rows[1:] == [{"deep": [1]}]
    assert it.named == {"a": [1]}
    assert it.counts == Counter("aab")
    assert list(it.last) == [1, 2]


def test_random_generators_get_their_states_back():
    it = SimpleNamespace(torch=torch.Generator(), numpy=np.random.default_rng(0))

    def draw():
        return it.numpy.random(), float(torch.rand((), generator=it.torch))

    with without_trace([it]):
        first = draw()
    assert draw() == first


def test_an_exception_leaves_no_trace():
    it = SimpleNamespace(rows=[])

    def fail():
        it.rows.append(1)
        raise KeyError

    with pytest.raises(KeyError), without_trace([it]):
        fail()
    assert it.rows == []


def test_modules():
    """Parameters and buffers are not copied: they may be large, and a forecaster restores them."""
    model = nn.BatchNorm1d(2)
    model.seen = 0
    with without_trace(model.modules()):
        model(torch.randn(8, 2))
        model.seen += 1
        with torch.no_grad():
            model.weight.fill_(3)
    assert model.seen == 0
    assert model.weight.tolist() == [3, 3]
    assert int(model.num_batches_tracked) == 1


def test_inference_tensors_are_left_alone():
    with torch.inference_mode():
        it = SimpleNamespace(last=torch.ones(2))
    with without_trace([it]):
        it.last = None
    assert it.last.tolist() == [1, 1]


@pytest.mark.parametrize("how", ["data", "in place"])
def test_parameters_that_the_training_step_moves(how):
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    bystanders = Bystanders(model.parameters(), model[0].parameters())
    weight = model[1].weight

    def move():
        if how == "data":
            weight.data = 0.9 * weight.data + 1
        else:
            with torch.no_grad():
                weight.mul_(0.9).add_(1)

    assert bystanders.moving() == []
    move()
    [moving] = bystanders.moving()
    assert moving is weight
    before = weight.detach().clone()
    with without_trace([], [moving]):
        move()
    assert torch.equal(weight, before)
