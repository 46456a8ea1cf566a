"""Argument checks of an ensemble, and the sampling of mini-batches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_support.replicas import (
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

from equilibrate_paper.ensemble import Ensemble
from equilibrate_paper.ensemble.sampling import draw


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


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.LSTM(3, 3, batch_first=True)])

    def forward(self, x):
        return self.inner[0](x)[0][:, -1]


class FunctionalDropout(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)

    def forward(self, x):
        return super().forward(F.dropout(x.flatten(1), 0.01))


def loss_with_item(outputs, targets):
    value = F.cross_entropy(outputs, targets)
    return value if value.item() > 0 else 2 * value


INPUTS, TARGETS = data(2, 3)
INVALID = {
    "empty": ({"models": []}, ValueError, "models is empty"),
    "one model": ({"models": perceptron()}, TypeError, "got one Sequential: pass a list"),
    "one tensor as data": (
        {"data": torch.zeros(125, 6)},
        TypeError,
        r"data must be a pair \(inputs, targets\), got Tensor",
    ),
    "arrays": (
        {"data": (np.zeros((9, 2, 3), np.float32), TARGETS)},
        TypeError,
        r"inputs must be a tensor, got ndarray: pass torch.as_tensor\(inputs\)",
    ),
    "loss": ({"loss": "mse"}, TypeError, r"loss must be a function of \(outputs, targets\)"),
    "one seed": ({"seeds": 3}, ValueError, "seeds must be one number ≥ 0 for each of the 3 models"),
    "structure": (
        {"models": [perceptron(), perceptron(), nn.Sequential(nn.Flatten(), nn.Linear(6, 3))]},
        ValueError,
        r"models\[2\] differs in structure from models\[0\]",
    ),
    "activation": (
        {"models": [perceptron(), other_activation(), perceptron()]},
        ValueError,
        r"models\[1\] differs in structure",
    ),
    "mode": (
        {"models": [dropping().eval(), dropping().eval(), dropping()]},
        ValueError,
        r"models\[2\] differs in structure",
    ),
    "dtype": ({"models": [perceptron().double()] * 3}, TypeError, "call model.float"),
    "all frozen": (
        {"models": [perceptron().requires_grad_(False)] * 3},
        ValueError,
        "no parameter that requires a gradient",
    ),
    "batch norm": (
        {"models": [batch_normalised()] * 3},
        ValueError,
        "'2' .BatchNorm1d. uses or updates statistics",
    ),
    "instance norm": (
        {"models": [normalising_instances()] * 3},
        ValueError,
        "'0' .InstanceNorm1d. uses or updates",
    ),
    "dropout": ({"models": [dropping()] * 3}, ValueError, "'1' .Dropout. is random"),
    "attention": ({"models": [attending()] * 3}, ValueError, "MultiheadAttention. is random"),
    "lr": ({"lr": 0.0}, ValueError, "lr must be positive and finite, got 0.0"),
    "nan lr": ({"lr": [0.1, float("nan"), 0.1]}, ValueError, "lr must be positive"),
    "lrs": ({"lr": [0.1, 0.2]}, ValueError, "lr must be one number, or one for each of the 3"),
    "seeds": ({"seeds": [1, 2]}, ValueError, "one number ≥ 0 for each of the 3 models"),
    "negative seed": ({"seeds": [1, 2, -3]}, ValueError, "one number ≥ 0 for each of the 3 models"),
    "batch": ({"batch_size": 126}, ValueError, "between 1 and the 125 examples, got 126"),
    "double inputs": (
        {"data": (torch.zeros(125, 6).double(), TARGETS)},
        TypeError,
        "inputs must be float32, got torch.float64: call inputs.float",
    ),
    "ignored": (
        {"data": (INPUTS, torch.full((125,), -100))},
        ValueError,
        "targets must be class indices of at least 0, got -100",
    ),
    "fewer targets": (
        {"data": (INPUTS, TARGETS[:124])},
        ValueError,
        "inputs and targets must have the same length, got 125 and 124",
    ),
    "sampling": ({"sampling": "random"}, ValueError, 'sampling must be "shuffled" or "independ'),
    "algorithm": ({"algorithm": "lion"}, ValueError, 'algorithm must be "sgd", "adam" or "ams'),
    "momentum": ({"momentum": 1.0}, ValueError, r"momentum must lie in \[0, 1\), got 1"),
    "dampening": ({"dampening": 1.0}, ValueError, "dampening must be below 1, got 1"),
    "adam": ({"algorithm": "adam", "momentum": 0.9}, ValueError, "takes no momentum"),
    "decay": ({"weight_decay": -0.1}, ValueError, r"weight_decay must be .* finite, got -0\.1"),
    "infinite decay": ({"weight_decay": float("inf")}, ValueError, "weight_decay must .* got inf"),
    "sum": (
        {"loss": nn.CrossEntropyLoss(reduction="sum")},
        ValueError,
        "must be a mean over independent examples; use reduction='mean' without class weights",
    ),
    "no reduction": (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        ValueError,
        r"loss must return a scalar tensor, .* got shape \(32,\)",
    ),
    "class weights": (
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 2.0]))},
        ValueError,
        "without class weights",
    ),
    "recurrent": (
        {"models": [Recurrent() for _ in range(3)]},
        ValueError,
        r"layer 'inner\.0' \(LSTM\) cannot be computed for several replicas at once: torch\.func",
    ),
    "functional dropout": (
        {"models": [FunctionalDropout() for _ in range(3)]},
        ValueError,
        "the model must be deterministic; call model.eval",
    ),
    "loss with item": (
        {"loss": loss_with_item},
        ValueError,
        r"loss cannot be computed for several replicas at once: .*use tensor operations without",
    ),
    "precision": (
        {"precision": "bf16"},
        ValueError,
        'precision must be "fp32", "tf32" or "fp16", or None .* got .bf16',
    ),
    "device": ({"device": "meta"}, ValueError, 'device must be "cpu" or "cuda", got .meta'),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_raise(case):
    options, error, message = INVALID[case]
    valid = {
        "models": [perceptron()] * 3,
        "loss": F.cross_entropy,
        "data": (INPUTS, TARGETS),
        "seeds": SEEDS,
        "lr": 0.1,
        "batch_size": BATCH,
    }
    Ensemble(**valid)
    with pytest.raises(error, match=message):
        Ensemble(**{**valid, **options})


def test_checks_change_neither_the_random_state_nor_the_model():
    model = perceptron()
    before = torch.get_rng_state()
    state = {name: p.clone() for name, p in model.state_dict().items()}
    ensemble_of([model] * 3)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_invalid_arguments_of_methods_raise():
    with pytest.raises(ValueError, match="algorithm='adam' has no velocity: use algorithm=\"sgd\""):
        ensemble_of(algorithm="adam").zero_velocity()
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        ensemble_of().full_gradient(chunk_size=0)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got -1"):
        ensemble_of().evaluate(INPUTS, TARGETS, chunk_size=-1)
    with pytest.raises(
        ValueError, match=r"factor must lie between 0 and 1, such as 0\.9, got 1\.0"
    ):
        ensemble_of().schedule(factor=1.0)
    with pytest.raises(ValueError, match=r"must be a positive number such as 0\.01, got 0\.0"):
        ensemble_of().schedule(threshold=0.0)
    with pytest.raises(ValueError, match="threshold must be one number, or one for each of the 3"):
        ensemble_of().schedule(threshold=[0.1])
    with pytest.raises(ValueError, match="factor must be one number, or one for each of the 3"):
        ensemble_of().schedule(factor=[0.9, 0.5])


@pytest.mark.parametrize("build", [batch_normalised, dropping])
def test_layers_in_evaluation_mode_are_accepted(build):
    models = [build().eval() for _ in SEEDS]
    ensemble = ensemble_of(models)
    ensemble.run_epoch()
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        plain_loop(models[r], seed, torch.optim.SGD(models[r].parameters(), lr=lr), 1)
        assert_same_parameters(ensemble.module(r), models[r])


def test_leftover_examples_are_not_used():
    ensemble = ensemble_of(batch_size=60)
    assert ensemble.steps_per_epoch == 2
    assert ensemble.run_epoch().loss.shape == (2, 3)


@given(st.integers(1, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_examples_of_a_batch_are_distinct(examples, picked):
    size = picked.draw(st.integers(1, examples))
    for sampling in ("shuffled", "independent"):
        drawn = draw(7, 0, examples, size, sampling)
        assert drawn.shape == (examples // size, size)
        assert drawn.min() >= 0
        assert drawn.max() < examples
        assert all(len(set(batch)) == size for batch in drawn.tolist())
        if sampling == "shuffled":
            assert len(set(drawn.ravel().tolist())) == drawn.size


def test_orders_depend_on_seed_and_epoch():
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
