"""What an ensemble refuses, and which examples it takes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.replicas import (
    BATCH,
    LRS,
    SEEDS,
    assert_same_parameters,
    data,
    ensemble_of,
    perceptron,
    plain_loop,
)
from torch import nn

from equilibrate.ensemble import Ensemble
from equilibrate.ensemble.sampling import draw


def batch_normalised():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 3))


def attending():
    return nn.Sequential(nn.Flatten(), nn.MultiheadAttention(6, 2, dropout=0.1))


def normalising_instances():
    return nn.Sequential(
        nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 3)
    )


def other_activation():
    model = perceptron()
    model[2] = nn.Tanh()
    return model


REFUSED = {
    "empty": ({"models": []}, ValueError, "models is empty"),
    "one model": ({"models": perceptron()}, TypeError, "models is one Sequential: pass a list"),
    "arrays": (
        {"images": np.zeros((9, 2, 3), np.float32)},
        TypeError,
        r"images must be a tensor, got ndarray: pass torch.as_tensor\(images\)",
    ),
    "one seed": ({"seeds": 3}, ValueError, "seeds must be one number ≥ 0 for each of the 3 models"),
    "structure": (
        {"models": [perceptron(), perceptron(), nn.Sequential(nn.Flatten(), nn.Linear(6, 3))]},
        ValueError,
        r"models\[2\] has another structure than models\[0\]",
    ),
    "activation": (
        {"models": [perceptron(), other_activation(), perceptron()]},
        ValueError,
        r"models\[1\] has another structure",
    ),
    "mode": (
        {"models": [dropping().eval(), dropping().eval(), dropping()]},
        ValueError,
        r"models\[2\] has another structure",
    ),
    "dtype": ({"models": [perceptron().double()] * 3}, TypeError, "call model.float"),
    "all frozen": (
        {"models": [perceptron().requires_grad_(False)] * 3},
        ValueError,
        "no parameter that requires a gradient",
    ),
    "batch norm": ({"models": [batch_normalised()] * 3}, ValueError, "'2' .BatchNorm1d. makes"),
    "instance norm": (
        {"models": [normalising_instances()] * 3},
        ValueError,
        "'0' .InstanceNorm1d. makes",
    ),
    "dropout": ({"models": [dropping()] * 3}, ValueError, "'1' .Dropout. is random"),
    "attention": ({"models": [attending()] * 3}, ValueError, "MultiheadAttention. is random"),
    "lr": ({"lr": 0.0}, ValueError, "lr must be positive and finite, got 0.0"),
    "nan lr": ({"lr": [0.1, float("nan"), 0.1]}, ValueError, "lr must be positive"),
    "lrs": ({"lr": [0.1, 0.2]}, ValueError, "lr must be one number, or one for each of the 3"),
    "seeds": ({"seeds": [1, 2]}, ValueError, "one number ≥ 0 for each of the 3 models"),
    "negative seed": ({"seeds": [1, 2, -3]}, ValueError, "one number ≥ 0 for each of the 3 models"),
    "batch": ({"batch_size": 126}, ValueError, "between 1 and the 125 examples, got 126"),
    "double images": ({"images": torch.zeros(125, 6).double()}, TypeError, "call images.float"),
    "ignored": ({"labels": torch.full((125,), -100)}, ValueError, "classes from 0 on, got -100"),
    "fewer labels": (
        {"labels": torch.zeros(124, dtype=torch.int64)},
        ValueError,
        "images and labels differ in number: 125 and 124",
    ),
    "sampling": ({"sampling": "random"}, ValueError, 'sampling must be "shuffled" or "independ'),
    "algorithm": ({"algorithm": "lion"}, ValueError, 'algorithm must be "sgd", "adam" or "ams'),
    "momentum": ({"momentum": 1.0}, ValueError, r"momentum must lie in \[0, 1\), got 1"),
    "dampening": ({"dampening": 1.0}, ValueError, "dampening must be below 1, got 1"),
    "adam": ({"algorithm": "adam", "momentum": 0.9}, ValueError, "takes no momentum"),
    "decay": ({"weight_decay": -0.1}, ValueError, "weight_decay must be at least 0, got -0.1"),
    "precision": (
        {"precision": "bf16"},
        ValueError,
        'precision must be "fp32", "tf32" or "fp16", or None .* got .bf16',
    ),
    "device": ({"device": "meta"}, ValueError, 'device must be "cpu" or "cuda", got .meta'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, error, message = REFUSED[case]
    given = {"models": [perceptron()] * 3, "seeds": SEEDS, "lr": 0.1, "batch_size": BATCH}
    given.update(options)
    images, labels = data(2, 3)
    with pytest.raises(error, match=message):
        Ensemble(**{"images": images, "labels": labels, **given})


def test_refused_later():
    with pytest.raises(ValueError, match="algorithm='adam' has no velocity"):
        ensemble_of(algorithm="adam").zero_velocity()
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        ensemble_of().full_gradient(chunk=0)
    with pytest.raises(ValueError, match="decrease must lie between 0 and 1"):
        ensemble_of().schedule(decrease=1.0)
    with pytest.raises(ValueError, match="tolerance must be a positive number"):
        ensemble_of().schedule(tolerance=0.0)
    with pytest.raises(ValueError, match="tolerance must be one number, or one for each of the 3"):
        ensemble_of().schedule(tolerance=[0.1])


@pytest.mark.parametrize("build", [batch_normalised, dropping])
def test_fixed_by_eval_they_are_taken(build):
    models = [build().eval() for _ in SEEDS]
    ensemble = ensemble_of(models)
    ensemble.run_epoch()
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        plain_loop(models[r], seed, torch.optim.SGD(models[r].parameters(), lr=lr), 1)
        assert_same_parameters(ensemble.module(r), models[r])


def test_leftover_examples_are_left_out_of_an_epoch():
    ensemble = ensemble_of(batch_size=60)
    assert ensemble.steps_per_epoch == 2
    assert ensemble.run_epoch().loss.shape == (2, 3)


@given(st.integers(1, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_every_batch_holds_different_examples(examples, picked):
    size = picked.draw(st.integers(1, examples))
    for sampling in ("shuffled", "independent"):
        drawn = draw(7, 0, examples, size, sampling)
        assert drawn.shape == (examples // size, size)
        assert drawn.min() >= 0
        assert drawn.max() < examples
        assert all(len(set(batch)) == size for batch in drawn.tolist())
        if sampling == "shuffled":
            assert len(set(drawn.ravel().tolist())) == drawn.size


def test_orders_depend_on_seed_and_epoch_alone():
    orders = [
        draw(s, e, 50, 5, kind)
        for s in (0, 1)
        for e in (0, 1)
        for kind in ("shuffled", "independent")
    ]
    assert len({order.tobytes() for order in orders}) == len(orders)
    np.testing.assert_array_equal(draw(1, 1, 50, 5, "shuffled"), orders[-2])


def test_independent_batches_are_uniform_subsets():
    """χ² of all 10 subsets of 2 in 5 over 2000 draws: 9 degrees, false alarms 1 in 1000."""
    drawn = np.concatenate([draw(0, e, 5, 2, "independent") for e in range(1000)])
    counts = np.zeros((5, 5))
    np.add.at(counts, (drawn.min(1), drawn.max(1)), 1)
    counts = counts[np.triu_indices(5, 1)]
    assert ((counts - 200) ** 2 / 200).sum() < 27.88
    second = np.concatenate([draw(0, e, 5, 2, "independent")[1] for e in range(1000)])
    first = np.concatenate([draw(0, e, 5, 2, "independent")[0] for e in range(1000)])
    assert np.mean(
        [a in b for a, b in zip(first, second.reshape(-1, 2).repeat(2, 0), strict=True)]
    ) == pytest.approx(0.4, abs=0.05)
