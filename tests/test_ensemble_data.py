"""Whole data sets: how they are kept on the device and cut into chunks."""

import pytest
import torch
from torch import nn

from equilibrate.ensemble.batches import DataSets
from equilibrate.ensemble.chunks import activations, chunk_size
from equilibrate.experiments.models import ARCHITECTURES, build

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
def test_inference_tensors_have_no_versions_and_are_taken_all_the_same():
    sets = DataSets(Counted(), torch.device("cpu"))
    images = torch.zeros(3)
    assert sets.of(images) is sets.of(images)


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
    images = torch.empty(1, *ARCHITECTURES[name].input_shape).expand(examples, -1, -1, -1)
    model = build(name, 0)
    assert chunk_size(model, images, replicas, GPU) == expected
    assert chunk_size(model, images, replicas, torch.device("cpu")) == 1000


def test_chunks_of_any_data_hold_and_stay_within_memory():
    """10,007 is prime: its chunks cannot be of one size."""
    images = torch.zeros(1, 1).expand(10_007, -1)
    assert chunk_size(nn.Identity(), images, 1, GPU) == 5_004
    assert chunk_size(nn.Identity(), images, 1 << 22, GPU) == 251  # of 256 with 2 numbers each
    assert chunk_size(nn.Identity(), images, 1 << 40, GPU) == 1


def test_activations_are_those_of_the_layers():
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2))
    assert activations(model, torch.zeros(1, 2, 2)) == 4 + 4 + 3 + 3 + 2
    assert not model[0]._forward_hooks  # a copy was asked
