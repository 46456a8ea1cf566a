"""Whole data sets: preparation for the first layer, and chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equilibrate_paper.ensemble.chunks import (
    count_activations,
    even_chunk_size,
    max_chunk_size,
)
from equilibrate_paper.ensemble.examples import PreparedInputsCache
from equilibrate_paper.protocol.models import ARCHITECTURES, build

GPU = torch.device("cuda")


class Counted:
    """Prepares a data set and counts the calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, inputs):
        self.calls += 1
        return inputs.clone()


def test_a_data_set_is_prepared_once():
    prepare = Counted()
    cache = PreparedInputsCache(prepare, torch.device("cpu"))
    train, test = torch.zeros(3), torch.ones(2)
    for _ in range(4):
        assert torch.equal(cache.get(train), train)
        assert torch.equal(cache.get(test), test)
    assert prepare.calls == 2


def test_a_data_set_modified_in_place_is_prepared_again():
    cache = PreparedInputsCache(Counted(), torch.device("cpu"))
    inputs = torch.zeros(3)
    cache.get(inputs)
    inputs[1] = 5.0
    assert torch.equal(cache.get(inputs), inputs)


def test_an_equal_copy_is_a_different_data_set():
    cache = PreparedInputsCache(Counted(), torch.device("cpu"))
    inputs = torch.zeros(3)
    assert cache.get(inputs) is not cache.get(inputs.clone())


def test_only_the_last_three_data_sets_are_kept():
    prepare = Counted()
    cache = PreparedInputsCache(prepare, torch.device("cpu"))
    many = [torch.full((2,), float(k)) for k in range(4)]
    for inputs in many:
        cache.get(inputs)
    cache.get(many[-1])
    assert prepare.calls == 4
    assert torch.equal(cache.get(many[0]), many[0])
    assert prepare.calls == 5


def test_inputs_that_need_no_preparation_are_not_kept():
    cache = PreparedInputsCache(lambda inputs: inputs, torch.device("cpu"))
    inputs = torch.zeros(3)
    assert cache.get(inputs) is inputs
    assert not cache._kept


@torch.inference_mode()
def test_inference_tensors_are_prepared_each_time():
    cache = PreparedInputsCache(Counted(), torch.device("cpu"))
    inputs = torch.zeros(3)
    cache.get(inputs)
    inputs[1] = 5.0
    assert torch.equal(cache.get(inputs), inputs)
    assert not cache._kept


@pytest.mark.parametrize(
    ("name", "examples", "replicas", "expected"),
    [
        ("mlp", 60_000, 16, 10_000),
        ("mlp", 10_000, 4, 10_000),
        ("mlp", 100, 4, 100),
        ("cnn", 50_000, 16, 2_000),
        ("cnn", 10_000, 16, 2_000),
        ("cnn", 50_000, 4, 6_250),
    ],
)
def test_chunk_sizes_of_the_papers_data_sets(name, examples, replicas, expected):
    model, example = build(name, 0), torch.zeros(1, *ARCHITECTURES[name].input_shape)
    assert even_chunk_size(examples, max_chunk_size(model, example, replicas, GPU)) == expected
    assert max_chunk_size(model, example, replicas, torch.device("cpu")) == 1000


def test_memory_limits_the_chunk_size():
    """Two numbers for each example, its input and its output, and at most 2³¹ in total."""
    sizes = [max_chunk_size(nn.Identity(), torch.zeros(1, 1), 1 << k, GPU) for k in (0, 22, 40)]
    assert sizes == [10_000, 256, 1]


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_chunks_are_even_if_a_few_more_make_this_possible(examples, largest):
    size = even_chunk_size(examples, largest)
    assert 1 <= size <= largest
    chunks = -(-examples // largest)
    assert -(-examples // size) < max(2, 2 * chunks)
    if any(examples % n == 0 for n in range(chunks, 2 * chunks)):
        assert examples % size == 0


def test_activations_are_inputs_and_outputs_of_all_layers():
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2))
    assert count_activations(model, torch.zeros(1, 2, 2)) == 4 + 4 + 3 + 3 + 2
    assert not model[0]._forward_hooks  # a copy of the model was used
