"""Scale-invariant weights: recognised from gradients, and turned by the angle FDR1 predicts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from support import networks
from support.naive import Twin
from torch import nn

import equilibrate as eq
from equilibrate import scale_invariance
from equilibrate.monitor.alignment import SAMPLES, alignments
from equilibrate.scale_invariance import FEWEST, THRESHOLD, is_scale_invariant

OPTIMIZERS = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.04, momentum=0.9, weight_decay=0.01),
    "dampening": lambda p: torch.optim.SGD(
        p, lr=0.08, momentum=0.9, dampening=0.5, weight_decay=0.01
    ),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.04, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=1.0),
    "decoupled Adam": lambda p: torch.optim.Adam(
        p, lr=0.01, betas=(0.5, 0.95), weight_decay=1.0, decoupled_weight_decay=True
    ),
}


def rotations(monitor):
    return {layer.name: layer.rotation for layer in monitor.layers().layers}


def turn_at_random(make, steps):
    """Steps along uncorrelated gradients that are orthogonal to the weight, of size 22/|θ|."""
    generator = torch.Generator().manual_seed(1)

    def normal():
        return torch.randn(500, generator=generator, dtype=torch.float64)

    model = nn.ParameterDict({"weight": normal()})
    weight = model["weight"]
    optimizer = make([weight])
    monitor = eq.Monitor(optimizer, model, every=1)
    for _ in range(steps):
        theta, z = weight.detach(), normal()
        norm = theta @ theta
        weight.grad = (z - (z @ theta) / norm * theta) / norm.sqrt()
        optimizer.step()
    return monitor


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_angular_step_is_the_predicted_one_for_uncorrelated_gradients(kind):
    """Within 1 %. Its standard error is about 0.2 %: 500 independent components at 500 steps."""
    monitor = turn_at_random(OPTIMIZERS[kind], 1000)
    rotation = rotations(monitor)["weight"]
    assert rotation.scale_invariant
    assert rotation.alignment < 1e-12
    assert rotation.angular_step == pytest.approx(rotation.equilibrium, rel=0.01)
    (layer,) = monitor.layers(threshold=0.05).layers
    assert layer.equilibrated


def test_the_predictions_are_unknown_where_there_is_no_formula():
    def predictions(optimizer_class, **settings):
        monitor = turn_at_random(lambda p: optimizer_class(p, **settings), 8)
        found = rotations(monitor)["weight"]
        return [found.equilibrium, found.decay, found.relaxation]

    coupled = predictions(torch.optim.Adam, lr=0.01, weight_decay=0.1)
    assert all(map(math.isnan, coupled))
    *unknown, relaxation = predictions(torch.optim.Rprop, lr=0.01)
    assert all(map(math.isnan, unknown))
    assert relaxation == math.inf  # it has no weight decay
    assert predictions(torch.optim.SGD, lr=0.01) == [0.0, 0.0, math.inf]
    assert predictions(torch.optim.AdamW, lr=0.01, weight_decay=0.0) == [0.0, 0.0, math.inf]


# Networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "tolerance"), [("momentum", 0.06), ("AdamW", 0.12)])
def test_a_convolutional_network_turns_as_predicted(kind, tolerance):
    """On digits, behind BatchNorm. AdamW's prediction is approximate: it divides by √v̂."""
    model = networks.convolutional()
    optimizer = OPTIMIZERS[kind](model.parameters())
    monitor = eq.Monitor(optimizer, model, every=4)
    networks.train(model, optimizer, 400)
    table = monitor.layers()
    assert table.scale_invariant == ("0.weight", "3.weight")
    for name in table.scale_invariant:
        rotation = rotations(monitor)[name]
        assert rotation.angular_step == pytest.approx(rotation.equilibrium, rel=tolerance), name


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm's own
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("norm", networks.INVARIANT)
def test_scale_invariant_weights_are_recognised_in_every_precision(norm, precision):
    make, names = networks.INVARIANT[norm]
    model = make().to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    monitor = eq.Monitor(optimizer, model, every=5)
    networks.train(model, optimizer, 40, autocast=precision == "autocast")
    found = rotations(monitor)
    # A bias that begins at zero has no sample at the first step.
    assert all(rotation.samples >= SAMPLES - 1 for rotation in found.values())
    assert {name for name in found if found[name].scale_invariant} >= names
    last = list(found)[-2:]  # weight and bias of the last layer
    assert not any(found[name].scale_invariant for name in last)


def test_weights_that_are_invariant_only_with_a_bias_are_not_recognised():
    model = networks.linear(nn.LayerNorm, bias=True)
    nn.init.normal_(model[1].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = eq.Monitor(optimizer, model, every=1)
    networks.train(model, optimizer, 8)
    found = rotations(monitor)
    assert not found["1.weight"].scale_invariant
    assert not found["1.bias"].scale_invariant


def test_frozen_and_tied_weights():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    monitor = eq.Monitor(optimizer, model, every=1)
    networks.train(nn.Sequential(nn.Flatten(), model), optimizer, 8)
    found = rotations(monitor)
    assert set(found) == {"0.weight", "1.weight", "1.bias", "2.bias"}
    assert not found["0.weight"].scale_invariant  # its second place depends on its norm
    assert found["1.weight"].samples == 0
    assert found["1.weight"].scale_invariant is None
    assert found["1.weight"].angular_step == 0.0
    assert "undefined" in str(monitor.layers())


def test_the_gradient_of_a_closure_is_the_one_that_counts():
    model = networks.linear(nn.LayerNorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = eq.Monitor(optimizer, model, every=1)
    images, labels = networks.digits()

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[:50]), labels[:50])
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)
    rotation = rotations(monitor)["1.weight"]
    assert rotation.alignment < 1e-3 < 0.1 < rotation.angular_step  # of the step before it


# The statistic --------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "stated"), [(4, 1.2e-5), (8, 4e-10)])
def test_the_stated_rates_of_false_alarms(samples, stated):
    rate = chi2.cdf(samples * THRESHOLD**2, samples)
    assert rate == pytest.approx(stated, rel=0.1)
    assert FEWEST == 4
    assert SAMPLES == 8


@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_random_signs_are_mistaken_no_more_often_than_stated(spread):
    """30,000 weights, 4 samples: P(χ²₄ < 0.16) = 0.3 %, ± 4 σ; fewer if a few products dominate."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(30_000, 60, generator=generator).mul_(spread).exp_()
    products = torch.randn(4, 30_000, 60, generator=generator).mul_(sizes)
    total = torch.stack([products.sum(-1), products.square().sum(-1)], -1)
    found = sum(alignment < 0.2 for alignment, _ in alignments(total))
    expected = 30_000 * chi2.cdf(4 * 0.2**2, 4)
    assert found < expected + 4 * math.sqrt(expected)
    assert spread or found > expected - 4 * math.sqrt(expected)


@settings(max_examples=25)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_the_statistic_does_not_depend_on_the_scales(length, loss_scale, dimension, seed):
    generator = torch.Generator().manual_seed(seed)
    theta, gradient = torch.randn(2, dimension, generator=generator, dtype=torch.float64) + 0.1
    found = [sampled([a * theta], [b * gradient]) for a, b in [(1, 1), (length, loss_scale)]]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    product = theta * gradient
    assert found[0][0] == pytest.approx(abs(product.sum().item()) / product.norm().item())


def sampled(thetas, gradients):
    """The alignment of one parameter after steps at these parameters with these gradients."""
    model = nn.ParameterDict({"w": thetas[0].clone()})
    weight = model["w"]
    optimizer = torch.optim.SGD([weight], lr=0.0)
    optimizer.state[weight]["used"] = True  # a step at lr = 0 of a new optimizer counts as none
    monitor = eq.Monitor(optimizer, model, every=1)
    for theta, gradient in zip(thetas, gradients, strict=True):
        with torch.no_grad():
            weight.copy_(theta)
        weight.grad = gradient
        optimizer.step()
    rotation = rotations(monitor)["w"]
    return rotation.alignment, rotation.samples


def test_samples_that_are_zero_or_not_finite_are_left_out():
    theta = torch.tensor([1.0, 2.0])
    good, bad = torch.tensor([1.0, 1.0]), torch.tensor([math.inf, 1.0])
    alignment, samples = sampled([theta] * 3, [good, bad, torch.zeros(2)])
    assert samples == 1
    assert alignment == pytest.approx(3 / math.sqrt(5))
    assert math.isnan(alignments(torch.zeros(4, 1, 2))[0][0])


def test_the_newest_samples_count():
    theta = torch.tensor([1.0, 1.0])
    along, across = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])
    alignment, samples = sampled([theta] * 7, [along] * 3 + [across] * 4)
    assert samples == 7
    assert alignment > 0.5
    steps = 32  # samples at steps 1 to 8, 16 and 32
    alignment, samples = sampled([theta] * steps, [along] * 2 + [across] * (steps - 2))
    assert (alignment, samples) == (0.0, SAMPLES)


def test_a_decision_needs_four_samples():
    assert is_scale_invariant(0.0, 3) is None
    assert is_scale_invariant(0.0, 4) is True
    assert is_scale_invariant(THRESHOLD, 8) is False
    assert is_scale_invariant(math.nan, 0) is None


# What is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["dampening", "nesterov", "AdamW"])
def test_the_angular_step_and_the_norm_equal_a_naive_loop(kind, every):
    """With every=1 the norm is read at one in 16 steps, and follows from the steps in between."""
    model = networks.linear(nn.LayerNorm)
    optimizer = OPTIMIZERS[kind](model.parameters())
    monitor, twin = eq.Monitor(optimizer, model, every=every), Twin(optimizer, every)
    weight, change, norm = model[1].weight, [], []
    for step in range(60):
        before = weight.detach().double().clone()
        networks.train(model, optimizer, 1, seed=step)
        after = weight.detach().double()
        twin.rows.append({})
        change.append((after - before).square().sum().item())
        norm.append(after.square().sum().item())
    found = rotations(monitor)["1.weight"]
    window = [t for t in twin.counted()[-monitor.reading().count :] if twin.is_measured(t)]
    lengths, norms = sum(change[t] for t in window), sum(norm[t] for t in window)
    assert found.angular_step == pytest.approx(math.sqrt(lengths / norms), rel=1e-4)
    decay = optimizer.param_groups[0]["weight_decay"]
    assert found.decay == pytest.approx(decay * norms / len(window), rel=1e-4)


def test_formulas_agree_where_they_must():
    sgd, adamw = scale_invariance.sgd_angular_step, scale_invariance.adamw_angular_step
    assert sgd(0.1, 0.01, nesterov=True) == sgd(0.1, 0.01)
    assert adamw(0.1, 0.01, beta1=0.0) == sgd(0.1, 0.01)
    near = 1 - 1e-6  # both kinds of momentum are the same once it is long
    assert sgd(0.1, 0.01, near) == pytest.approx(sgd(0.1, 0.01, near, nesterov=True), rel=1e-5)
    assert scale_invariance.sgd_relaxation(0.1, 0.01, scale_invariant=False) == pytest.approx(500)
