"""A table of layers, its rows and figure, and readings without scale-invariant weights."""

import math

import numpy as np
import pytest
import torch
from support import networks
from torch import nn

import equilibrate as eq
from equilibrate.monitor.layers import Layer, LayerTable, norm_balance
from equilibrate.readings import Reading
from equilibrate.scale_invariance import Rotation
from equilibrate.telescoped import spread

STILL = Rotation(1.0, 8, 0.1, 0.2, 0.3, relaxation=50.0)


def start(kind=torch.optim.SGD, *, every=4, **settings):
    torch.manual_seed(0)
    model = networks.convolutional()
    optimizer = kind(model.parameters(), lr=0.04, weight_decay=0.01)
    monitor = eq.Monitor(optimizer, model, every=every, **settings)
    return model, optimizer, monitor


@pytest.fixture(scope="module")
def trained():
    model, optimizer, monitor = start()
    networks.train(model, optimizer, 60)
    return model, optimizer, monitor


def layer(left, right, *, rotation=STILL, margin=math.nan):
    reading = Reading(10, 5, left, right, lr=0.1, stderr=margin / 2, margin=margin)
    return Layer("w", reading, rotation)


def by_name(monitor):
    return {each.name: each for each in monitor.layers().layers}


# The table ------------------------------------------------------------------------------------


def test_a_table_has_every_parameter_with_its_reading(trained):
    model, _, monitor = trained
    table = monitor.layers(threshold=1e9)
    names = [name for name, _ in model.named_parameters()]
    assert [each.name for each in table.layers] == names
    assert table.equilibrated == tuple(names)
    assert table.scale_invariant == ("0.weight", "3.weight")
    assert table.step == 60
    assert set(table.row()["layers"]) == set(names)


def test_for_sgd_the_balance_of_a_norm_is_fdr1(trained):
    """L = λ⟨N⟩ holds at every step; here N is sampled at one in four."""
    *_, monitor = trained
    layers = by_name(monitor).values()
    whole, sides = monitor.reading(), [each.reading for each in layers]
    assert sum(each.difference for each in sides) == pytest.approx(whole.difference, rel=1e-9)
    assert sum(each.left for each in sides) == pytest.approx(whole.left, rel=0.05)
    assert sum(each.right for each in sides) == pytest.approx(whole.right, rel=0.15)


def test_the_balance_of_a_norm_has_the_same_error_in_other_units():
    reading = Reading(10, 5, left=1.0, right=2.0, lr=0.1, stderr=0.1, margin=0.2)
    balance = norm_balance(reading, Rotation(1e-3, 8, 0.1, 0.1, decay=4.0, relaxation=10.0))
    assert (balance.left, balance.right) == (4.0, 5.0)
    assert balance.stderr * balance.right == pytest.approx(reading.stderr * reading.right)
    assert balance.margin * balance.right == pytest.approx(reading.margin * reading.right)


def test_other_readings_are_judged_as_they_are():
    reading = Reading(step=10, count=5, left=1.0, right=2.0, lr=0.1)
    assert norm_balance(reading, STILL) is reading
    unknown = Rotation(1e-3, 8, 0.1, math.nan, math.nan, math.nan)
    assert norm_balance(reading, unknown) is reading


@pytest.mark.parametrize(
    ("each", "state"),
    [
        (layer(1.0, 1.0), "equilibrated"),
        (layer(1.0, 1.0, margin=0.019), "equilibrated"),
        (layer(1.0, 1.0, margin=10.0), "not known yet"),
        (layer(2.0, 1.0), "norm falls"),
        (layer(0.5, 1.0), "norm grows"),
        (layer(-0.5, 1.0), "norm grows"),
        (layer(0.5, -1.0), "norm falls"),
        (layer(2.0, 1.0, margin=0.9), "norm falls"),
        (layer(2.0, 1.0, margin=1.1), "not known yet"),
        (layer(0.0, 0.0), "undefined"),
    ],
)
def test_the_state_of_a_layer(each, state):
    assert each.state == state
    assert each.row()["state"] == state


def test_a_norm_that_falls_is_said_to_fall():
    model = nn.ParameterDict({"w": torch.ones(3)})
    weight = model["w"]
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.1)
    monitor = eq.Monitor(optimizer, model, every=1)
    states = []
    for sign in (0.1, -1.0):
        monitor.reset()
        before = weight.norm()
        for _ in range(4):
            weight.grad = sign * weight.detach()
            optimizer.step()
        states.append((bool(weight.norm() < before), monitor.layers().layers[0].state))
    assert states == [(True, "norm falls"), (False, "norm grows")]


def test_the_table_as_text(trained):
    *_, monitor = trained
    lines = str(monitor.layers(budget=300)).splitlines()
    assert lines[0].startswith("step 60, averages over 29 steps: ")
    assert lines[1].split() == [
        "layer", "residual", "state", "scale-invariant", "angular", "step", "relaxation",
    ]  # fmt: skip
    convolution, last = lines[2].split(), lines[-2].split()
    assert convolution[0] == "0.weight"
    assert "yes" in convolution
    assert convolution[-4:] == ["of", "0.0283", "625", "steps"]
    assert last[0] == "7.bias"
    assert last[-4:] == ["no", "–", "1,250", "steps"]
    assert lines[-1] == (
        "8 of them may take longer than the budget of 300 steps to equilibrate: 1.weight relaxes "
        "in 1,250 steps"
    )
    assert len({line.find("steps") for line in lines[2:-1]}) <= 2  # columns are aligned


def test_a_residual_is_shown_with_its_margin():
    table = LayerTable((layer(1.02, 1.0, margin=0.071),), step=10)
    assert "  0.020 ± 0.071  not known yet  " in str(table)


def test_a_drift_is_shown_without_the_margin_that_it_makes_itself():
    """The change of a norm that grows steadily, without any noise, has a margin of 0.95 of it."""
    steady = np.linspace(0.0, 1.0, 65)
    assert spread(steady, steady)[1] > 0.85
    table = LayerTable((layer(-28.0, 1.0, margin=26.0),), step=10)
    cells = str(table).splitlines()[-1].split()
    assert cells[:4] == ["w", "-29", "norm", "grows"]


def test_cells_that_are_not_known_are_dashes():
    unknown = Rotation(math.nan, 0, math.nan, math.nan, math.nan, math.nan)
    table = LayerTable((layer(0.0, 0.0, rotation=unknown),), step=10)
    assert str(table).splitlines()[-1].split() == ["w", "–", "undefined", "?", "–", "–"]
    never = Rotation(1e-3, 8, 0.1, 0.0, 0.0, math.inf)
    table = LayerTable((layer(0.0, 1.0, rotation=never),), step=10, budget=100)
    assert [each.name for each in table.too_slow] == ["w"]
    assert "never: no weight decay" in str(table)


# Readings without scale-invariant weights -----------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_reading_leaves_scale_invariant_weights_out(kind):
    model, optimizer, monitor = start(kind, scale_invariant=False)
    whole = eq.Monitor(optimizer, model, every=4)
    networks.train(model, optimizer, 60)
    layers = by_name(whole)
    kept = [each.reading for each in layers.values() if not each.rotation.scale_invariant]
    assert len(kept) == len(layers) - 2
    reading, counted = monitor.reading(), whole.reading()
    assert reading.left == pytest.approx(sum(each.left for each in kept))
    assert reading.right == pytest.approx(sum(each.right for each in kept))
    assert (reading.step, reading.count) == (counted.step, counted.count)
    assert reading.left != pytest.approx(counted.left, rel=1e-3)


def test_until_weights_are_recognised_they_are_counted():
    model, optimizer, monitor = start(every=1, scale_invariant=False)
    whole = eq.Monitor(optimizer, every=1)
    networks.train(model, optimizer, 3)
    assert monitor.reading() == whole.reading()
    networks.train(model, optimizer, 1)  # the fourth sample
    assert monitor.reading() != whole.reading()


def test_nothing_is_left_to_read():
    theta = nn.Parameter(torch.tensor([1.0, 0.0]))
    optimizer = torch.optim.SGD([theta], lr=0.1, weight_decay=0.1)
    monitor = eq.Monitor(optimizer, every=1, scale_invariant=False)
    for _ in range(5):
        across = torch.stack([-theta.detach()[1], theta.detach()[0]])
        theta.grad = across
        optimizer.step()
    with pytest.warns(UserWarning, match="every parameter was found to be scale-invariant"):
        reading = monitor.reading()
    assert reading.undefined is not None


def test_samples_survive_a_checkpoint():
    model, optimizer, monitor = start(scale_invariant=False)
    networks.train(model, optimizer, 41)
    other = eq.Monitor(optimizer, model)
    other.load_state_dict(monitor.state_dict())
    assert other.scale_invariant is False
    for steps in (0, 30):
        networks.train(model, optimizer, steps)
        assert other.reading() == monitor.reading()
        assert other.layers() == monitor.layers()


def test_a_reset_keeps_what_is_known_of_a_weight():
    model, optimizer, monitor = start()
    networks.train(model, optimizer, 40)
    monitor.reset()
    rotation = by_name(monitor)["0.weight"].rotation
    assert rotation.scale_invariant
    assert math.isnan(rotation.angular_step)
