"""The check for a loss that is deterministic and a mean over independent examples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from equilibrate.landscape.mean_loss import require_mean_loss

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(400, 5, generator=generator)
MEAN = "the loss must be a mean over independent examples"


def check(loss, labels, model=None):
    require_mean_loss(
        model or nn.Linear(5, 4), loss, (INPUTS[: len(labels)], torch.as_tensor(labels))
    )


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


def before(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), layer, nn.Linear(4, 4))


RANDOM = r"the model must be deterministic; call model\.eval"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Dropping(5, 4), RANDOM),  # with 1 % of the inputs dropped, the loss changes by less
        (before(nn.Dropout(0.1)), RANDOM + r".*see '1' \(Dropout\)"),
        (before(nn.RReLU()), RANDOM),
        (before(nn.BatchNorm1d(4)), MEAN + r".*model\.eval\(\).*see '1' \(BatchNorm1d\)"),
        (before(nn.BatchNorm1d(4, track_running_stats=False)).eval(), MEAN + r".*nn\.GroupNorm"),
    ],
)
def test_models_that_are_random_or_mix_examples_are_found(model, message):
    state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(ValueError, match=message):
        check(cross_entropy, LABELS["sorted"], model)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, buffers, model.buffers()))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.5), nn.RReLU()])
def test_the_same_models_are_accepted_in_evaluation_mode(layer):
    check(cross_entropy, LABELS["sorted"], before(layer).eval())


def test_loss_that_is_not_finite_or_has_no_gradient_is_not_checked():
    check(lambda outputs, targets: outputs.mean() * math.nan, LABELS["sorted"])
    check(lambda outputs, targets: torch.zeros(()), LABELS["sorted"])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_as_many_classes_as_possible_are_checked(labels):
    seen = []

    def loss(outputs, targets):
        seen.extend(targets.tolist())
        return outputs.mean()

    check(loss, labels)
    assert len(set(seen)) == min(16, len(set(labels)))
