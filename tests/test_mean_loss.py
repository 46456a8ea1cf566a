"""The check for a loss that is deterministic and a mean over independent examples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from equilibrate.mean_loss import representative_examples, require_mean_loss

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(400, 5, generator=generator)
MEAN = "the loss must be a mean over independent examples"


def check(loss, labels, model=None):
    model = model or nn.Linear(5, 4)
    examples = representative_examples((INPUTS[: len(labels)], torch.as_tensor(labels)))
    require_mean_loss(lambda b: loss(model(b[0]), b[1]), list(model.parameters()), examples)


def model_of(scale):
    """With a scale of zero, the loss of every example is log 4, whatever its class."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    with torch.no_grad():
        for p in model.parameters():
            p *= scale
    return model


LABELS = {
    "balanced in pairs": [0, 1] * 200,
    "sorted": [k // 100 for k in range(400)],
    "one rare class": [0] * 399 + [3],
    "balanced in halves": [0, 0, 1, 1, 2, 2, 3, 3] * 50,
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("weights", [(1, 5, 1, 5), (1, 1, 1, 1.1), (2, 1, 1, 2), (1, 1.1, 1.2, 2)])
def test_class_weights_are_found_whatever_the_order_of_the_labels(labels, scale, weights):
    model = model_of(scale)
    loss = nn.CrossEntropyLoss(weight=torch.tensor(weights, dtype=torch.float32))
    if len({weights[k] for k in labels}) == 1:
        check(loss, labels, model)  # all classes that occur have the same weight
    else:
        with pytest.raises(ValueError, match=MEAN):
            check(loss, labels, model)


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize(
    "loss",
    [
        cross_entropy,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda outputs, targets: mse_loss(outputs[:, 0], targets.float()),
        lambda outputs, targets: outputs.mean(),
        # A sum of weighted terms over the number of examples is a mean over examples.
        lambda outputs, targets: (
            nn.CrossEntropyLoss(weight=torch.arange(1.0, 5), reduction="sum")(outputs, targets)
            / len(targets)
        ),
    ],
)
def test_means_are_accepted(labels, loss):
    model = nn.Linear(5, 4)
    before = torch.get_rng_state()
    check(loss, labels, model)
    check(loss, labels[:1], model)
    assert torch.equal(before, torch.get_rng_state())


@given(st.integers(1, 40))
def test_sums_are_found_for_any_number_of_examples(count):
    with pytest.raises(ValueError, match=f"{MEAN}; use reduction='mean' without class weights"):
        check(nn.CrossEntropyLoss(reduction="sum"), list(LABELS["sorted"])[:count])


def test_loss_that_is_not_a_scalar_is_rejected():
    with pytest.raises(ValueError, match=r"scalar tensor, .*, got shape \(32,\): use reduction="):
        check(nn.CrossEntropyLoss(reduction="none"), LABELS["sorted"])
    with pytest.raises(ValueError, match="got float"):
        check(lambda outputs, targets: 0.5, LABELS["sorted"])


class Dropping(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.01))


def test_functional_dropout_is_found():
    """With 1 % of the inputs dropped, the loss itself changes by less than 1 %."""
    model = Dropping(5, 4)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"the model must be deterministic; call model\.eval"):
        check(cross_entropy, LABELS["sorted"], model)
    assert torch.equal(before, torch.get_rng_state())


def test_layers_that_mix_examples_are_found():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.0))
    with pytest.raises(ValueError, match=MEAN):
        check(cross_entropy, LABELS["sorted"], model)
    check(cross_entropy, LABELS["sorted"], model.eval())


def test_loss_that_is_not_finite_or_has_no_gradient_is_not_checked():
    check(lambda outputs, targets: outputs.mean() * math.nan, LABELS["sorted"])
    check(lambda outputs, targets: torch.zeros(()), LABELS["sorted"])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 20))
def test_representative_examples_have_as_many_classes_as_possible(labels, count):
    targets = torch.tensor(labels)
    inputs, chosen = representative_examples((torch.arange(len(labels)), targets), count)
    assert len(chosen) == min(count, len(labels))
    assert len(chosen.unique()) == min(count, len(targets.unique()))
    assert len(inputs.unique()) == len(inputs)
    assert torch.equal(targets[inputs], chosen)
