"""Whole data sets: how they are kept on the device and cut into chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equilibrate.ensemble.batches import DataSets
from equilibrate.ensemble.chunks import activations, even_chunk, most_at_once
from equilibrate.paper.protocol.models import ARCHITECTURES, build

GPU = torch.device("cuda")


class Counted:
    """Prepares a data set and notes that it did."""

    def __init__(self):
        self.calls = 0

    def __call__(self, images):
        self.calls += 1
        return images.clone()


def test_a_data_set_is_prepared_once():
    prepare = Counted()
    sets = DataSets(prepare, torch.device("cpu"))
    train, test = torch.zeros(3), torch.ones(2)
    for _ in range(4):
        assert torch.equal(sets.of(train), train)
        assert torch.equal(sets.of(test), test)
    assert prepare.calls == 2


def test_one_that_was_written_to_is_prepared_again():
    sets = DataSets(Counted(), torch.device("cpu"))
    images = torch.zeros(3)
    sets.of(images)
    images[1] = 5.0
    assert torch.equal(sets.of(images), images)


def test_equal_numbers_in_another_tensor_are_another_data_set():
    sets = DataSets(Counted(), torch.device("cpu"))
    images = torch.zeros(3)
    assert sets.of(images) is not sets.of(images.clone())


def test_only_the_last_few_are_kept():
    prepare = Counted()
    sets = DataSets(prepare, torch.device("cpu"))
    many = [torch.full((2,), float(k)) for k in range(4)]
    for images in many:
        sets.of(images)
    sets.of(many[-1])
    assert prepare.calls == 4
    assert torch.equal(sets.of(many[0]), many[0])
    assert prepare.calls == 5


def test_what_needs_no_preparing_is_not_held():
    sets = DataSets(lambda images: images, torch.device("cpu"))
    images = torch.zeros(3)
    assert sets.of(images) is images
    assert not sets._kept


@torch.inference_mode()
def test_inference_tensors_do_not_tell_what_was_written_to_them():
    sets = DataSets(Counted(), torch.device("cpu"))
    images = torch.zeros(3)
    sets.of(images)
    images[1] = 5.0
    assert torch.equal(sets.of(images), images)
    assert not sets._kept


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
def test_chunks_of_the_papers_data(name, examples, replicas, expected):
    model, image = build(name, 0), torch.zeros(1, *ARCHITECTURES[name].input_shape)
    assert even_chunk(examples, most_at_once(model, image, replicas, GPU)) == expected
    assert most_at_once(model, image, replicas, torch.device("cpu")) == 1000


def test_memory_bounds_how_many_are_taken_at_once():
    """Two numbers each, what goes in and what comes out, and 2³¹ in all."""
    sizes = [most_at_once(nn.Identity(), torch.zeros(1, 1), 1 << k, GPU) for k in (0, 22, 40)]
    assert sizes == [10_000, 256, 1]


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_chunks_are_even_where_a_few_more_make_them_so(examples, most):
    size = even_chunk(examples, most)
    assert 1 <= size <= most
    chunks = -(-examples // most)
    assert -(-examples // size) < max(2, 2 * chunks)
    if any(examples % n == 0 for n in range(chunks, 2 * chunks)):
        assert examples % size == 0


def test_activations_are_those_of_the_layers():
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2))
    assert activations(model, torch.zeros(1, 2, 2)) == 4 + 4 + 3 + 3 + 2
    assert not model[0]._forward_hooks  # a copy was asked
