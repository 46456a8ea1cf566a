"""Saving and restoring an ensemble, and access to its replicas."""

import io

import numpy as np
import pytest
import torch
from paper_support.replicas import (
    LRS,
    SEEDS,
    assert_same_parameters,
    ensemble_of,
    perceptron,
)

FORMS = [
    {"momentum": 0.9, "weight_decay": 0.01},
    {"algorithm": "amsgrad", "lr": [0.001] * 3},
    {"sampling": "independent"},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_restored_run_continues_bit_for_bit(form):
    whole = ensemble_of(**form)
    for n in range(4):
        whole.run_epoch()
        if n == 0:
            whole.reset_averages([2])
            whole.lr = [0.02, 0.01, 0.03]
    part = ensemble_of(**form)
    part.run_epoch()
    part.reset_averages([2])
    part.lr = [0.02, 0.01, 0.03]
    part.run_epoch()
    state, readings = part.state_dict(), part.readings()
    part.run_epoch()  # the state is a copy
    file = io.BytesIO()
    torch.save(state, file)
    resumed = ensemble_of([perceptron(9)] * 3, **form)
    resumed.run_epoch()
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert repr(resumed.readings()) == repr(readings)
    assert_equal_states(resumed.state_dict(), state)
    resumed.run_epoch()
    resumed.run_epoch()
    assert resumed.epoch == 4
    assert repr(resumed.readings()) == repr(whole.readings())
    assert resumed.averages() == whole.averages()
    assert_equal_states(resumed.state_dict(), whole.state_dict())


def assert_equal_states(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal_states(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_modules_are_copies_and_parameters_are_views():
    models = [perceptron(s) for s in SEEDS]
    ensemble = ensemble_of(models)
    for r, model in enumerate(models):
        assert_same_parameters(ensemble.module(r), model, atol=0)
    copied = ensemble.module(0)
    ensemble.parameters["1.weight"][0] = 7.0
    assert (ensemble.module(0)[1].weight == 7).all()
    assert_same_parameters(copied, models[0], atol=0)


def test_learning_rates_and_velocity_can_be_set():
    ensemble = ensemble_of(momentum=0.9)
    ensemble.run_epoch()
    ensemble.lr = [0.5] * 3
    ensemble.lr[0] = 0.7  # a copy, so nothing changes
    assert [reading.lr for reading in ensemble.readings()] == list(LRS)  # of the last step
    assert ensemble.lr == [0.5] * 3
    ensemble.zero_velocity()
    assert ensemble.run_epoch().velocity_gradient[0].tolist() == [0.0] * 3
    assert ensemble.run_epoch().velocity_gradient[0].abs().min() > 0


def test_the_global_random_state_is_not_changed():
    ensemble = ensemble_of()
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    ensemble.run_epoch()
    ensemble.full_gradient()
    drawn = torch.rand(2), np.random.rand(2)  # noqa: NPY002
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert torch.equal(drawn[0], torch.rand(2))
    assert (drawn[1] == np.random.rand(2)).all()  # noqa: NPY002
