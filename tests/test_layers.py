"""A table of layers, its rows and figure, and readings without scale-invariant weights."""

import copy
import math
import pickle

import pytest
import torch
from support import networks
from torch import nn

import equilibrate as eq
from equilibrate import layers
from equilibrate.readings import Reading
from equilibrate.report.layer_map import layer_map
from equilibrate.rules import Threshold, Verdict
from equilibrate.runlog import records
from equilibrate.scale_invariance import Rotation

STILL = Rotation(1.0, 8, 0.1, 0.2, 0.3, relaxation=50.0)


def start(kind=torch.optim.SGD, *, every=4, **settings):
    torch.manual_seed(0)
    model = networks.convolutional()
    optimizer = kind(model.parameters(), lr=0.04, weight_decay=0.01)
    named = model.named_parameters()
    monitor = eq.Monitor(optimizer, named_parameters=named, every=every, **settings)
    return model, optimizer, monitor


@pytest.fixture(scope="module")
def trained():
    model, optimizer, monitor = start()
    networks.train(model, optimizer, 60)
    return model, optimizer, monitor


def layer(left, right, *, act=False, rotation=STILL, margin=math.nan):
    reading = Reading(10, 5, left, right, lr=0.1, stderr=margin / 2, margin=margin)
    return layers.Layer("w", reading, Verdict(act, ""), rotation)


# The table ------------------------------------------------------------------------------------


def test_a_table_has_every_parameter_with_its_reading(trained):
    model, _, monitor = trained
    table = layers.read(monitor, Threshold(1e9))
    assert [each.name for each in table.layers] == [name for name, _ in model.named_parameters()]
    readings, rotations = monitor.parameter_readings(), monitor.parameter_rotations()
    for each in table.layers:
        assert each.rotation == rotations[each.name]
        assert each.reading == layers.norm_balance(readings[each.name], each.rotation)
        assert each.equilibrated
    assert table.equilibrated == tuple(readings)
    assert table.scale_invariant == ("0.weight", "3.weight")
    assert table.step == 60


def test_for_sgd_the_balance_of_a_norm_is_fdr1(trained):
    *_, monitor = trained
    reading, rotation = (
        found["0.weight"] for found in (monitor.parameter_readings(), monitor.parameter_rotations())
    )
    balance = layers.norm_balance(reading, rotation)
    # L = λ⟨N⟩ holds at every step; here N is sampled at every fourth.
    assert balance.left == pytest.approx(reading.left, rel=0.05)
    assert balance.right == pytest.approx(reading.right, rel=0.15)
    assert balance.difference == pytest.approx(reading.difference, rel=1e-9)
    # The error of the difference is the same in other units.
    assert balance.stderr * balance.right == pytest.approx(reading.stderr * reading.right)
    assert balance.margin * balance.right == pytest.approx(reading.margin * reading.right)
    assert math.isfinite(balance.margin)


def test_other_readings_are_judged_as_they_are():
    reading = Reading(step=10, count=5, left=1.0, right=2.0, lr=0.1)
    assert layers.norm_balance(reading, STILL) is reading
    unknown = Rotation(1e-3, 8, 0.1, math.nan, math.nan, math.nan)
    assert layers.norm_balance(reading, unknown) is reading


@pytest.mark.parametrize(
    ("each", "state"),
    [
        (layer(1.0, 1.0, act=True), "equilibrated"),
        (layer(2.0, 1.0), "norm falls"),
        (layer(0.5, 1.0), "norm grows"),
        (layer(-0.5, 1.0), "norm grows"),
        (layer(0.5, -1.0), "norm falls"),
        (layer(2.0, 1.0, margin=0.9), "norm falls"),
        (layer(2.0, 1.0, margin=1.1), "not resolved"),
        (layer(0.0, 0.0), "undefined"),
    ],
)
def test_the_state_of_a_layer(each, state):
    assert each.state == state
    assert each.row()["state"] == state


def test_a_norm_that_falls_is_said_to_fall():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.1)
    monitor = eq.Monitor(optimizer, named_parameters={"w": weight}, every=1)
    states = []
    for sign in (0.1, -1.0):
        monitor.reset()
        before = weight.norm()
        for _ in range(4):
            weight.grad = sign * weight.detach()
            optimizer.step()
        states.append((bool(weight.norm() < before), layers.read(monitor).layers[0].state))
    assert states == [(True, "norm falls"), (False, "norm grows")]


def test_the_table_as_text(trained):
    *_, monitor = trained
    lines = str(layers.read(monitor, budget=300)).splitlines()
    assert lines[0].startswith("step 60, averages over 32 steps: ")
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
    table = layers.LayerTable((layer(1.02, 1.0, margin=0.071),), step=10)
    assert "  0.020 ± 0.071  not resolved  " in str(table)


def test_cells_that_are_not_known_are_dashes():
    unknown = Rotation(math.nan, 0, math.nan, math.nan, math.nan, math.nan)
    table = layers.LayerTable((layer(0.0, 0.0, rotation=unknown),), step=10)
    assert str(table).splitlines()[-1].split() == ["w", "–", "undefined", "?", "–", "–"]
    never = Rotation(1e-3, 8, 0.1, 0.0, 0.0, math.inf)
    table = layers.LayerTable((layer(0.0, 1.0, rotation=never),), step=10, budget=100)
    assert [each.name for each in table.too_slow] == ["w"]
    assert "never: no weight decay" in str(table)


def test_rows_survive_a_record_and_are_drawn(trained, tmp_path):
    *_, monitor = trained
    row = layers.read(monitor).row()
    undefined = {"step": 40, "layers": {"0.weight": {"residual": math.nan}}}
    with records.Writer(tmp_path / "layers.jsonl", config={}) as writer:
        writer.write(undefined)
        writer.write(row)
    read = records.read(tmp_path / "layers.jsonl").rows
    assert read[1] == row
    figure = layer_map(read, tolerance=0.1, title="digits")
    axes, _ = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["0.weight ⊥", "1.weight", "1.bias", "3.weight ⊥", *list(row["layers"])[4:]]
    shown = axes.collections[0].get_array().reshape(8, 2)
    assert list(shown.mask[:, 0]) == [True] * 8
    expected = [numbers["residual"] for numbers in row["layers"].values()]
    assert list(shown.data[:, 1]) == pytest.approx(expected)
    assert axes.get_title() == "digits"
    figure.savefig(tmp_path / "layers.png")


def test_colours_tell_equilibrium_and_the_sign():
    values = {"in": 0.05, "falls": 0.2, "far": 50.0, "grows": -0.2}
    row = {"step": 5, "layers": {name: {"residual": r} for name, r in values.items()}}
    figure = layer_map([row], tolerance=0.1)
    mesh = figure.axes[0].collections[0]
    within, falls, far, grows = mesh.to_rgba(mesh.get_array().ravel())[:, :3]
    assert list(within) == [1, 1, 1]
    assert falls[0] > falls[2]  # red
    assert grows[2] > grows[0]  # blue
    assert far.sum() < falls.sum()  # darker


def test_dots_mark_what_is_not_resolved():
    rows = [
        {"step": step, "layers": {"a": {"residual": 0.2, "state": state}, "b": {"residual": 0.1}}}
        for step, state in [(10, "norm falls"), (20, "not resolved")]
    ]
    (line,) = layer_map(rows).axes[0].lines
    assert [list(line.get_xdata()), list(line.get_ydata())] == [[15.0], [0.5]]
    assert not layer_map(rows[:1]).axes[0].lines


def test_a_map_needs_rows_and_a_tolerance():
    with pytest.raises(ValueError, match="rows is empty: pass at least one row"):
        layer_map([])
    with pytest.raises(ValueError, match=r"tolerance must be positive, such as 0\.05, got 0"):
        layer_map([{"step": 1, "layers": {}}], tolerance=0)


# Readings without scale-invariant weights -----------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_reading_leaves_scale_invariant_weights_out(kind):
    model, optimizer, monitor = start(kind, scale_invariant=False)
    whole = eq.Monitor(optimizer, every=4)
    networks.train(model, optimizer, 60)
    readings, rotations = monitor.parameter_readings(), monitor.parameter_rotations()
    kept = [readings[name] for name in readings if not rotations[name].scale_invariant]
    assert len(kept) == len(readings) - 2
    reading = monitor.reading()
    assert reading.left == pytest.approx(sum(each.left for each in kept))
    assert reading.right == pytest.approx(sum(each.right for each in kept))
    assert (reading.step, reading.count) == (whole.reading().step, whole.reading().count)
    assert whole.reading().left == pytest.approx(sum(each.left for each in readings.values()))


def test_a_scheduler_decides_without_scale_invariant_weights():
    model, optimizer, monitor = start(scale_invariant=False)
    scheduler = eq.FDRScheduler(optimizer, every=4, min_steps=10, scale_invariant=False)
    networks.train(model, optimizer, 60)
    scheduler.step()
    assert scheduler.last_decision.reading == monitor.reading()
    assert scheduler.last_decision.reading != eq.FDRScheduler(optimizer).last_decision.reading
    state = scheduler.state_dict()
    assert state["monitor"]["scale_invariant"] is False
    with pytest.raises(ValueError, match=r"scale_invariant and monitor exclude each other: pass"):
        eq.FDRScheduler(optimizer, monitor=monitor, scale_invariant=False)


def test_until_weights_are_recognised_they_are_counted():
    model, optimizer, monitor = start(scale_invariant=False)
    networks.train(model, optimizer, 11)  # measured at steps 1, 4 and 8
    counted = sum(each.left for each in monitor.parameter_readings().values())
    assert monitor.reading().left == pytest.approx(counted)
    networks.train(model, optimizer, 1)
    counted = sum(each.left for each in monitor.parameter_readings().values())
    assert monitor.reading().left != pytest.approx(counted)


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
    assert reading.count == 3


@pytest.mark.parametrize("how", ["state", "deepcopy", "pickle"])
def test_samples_and_the_choice_survive(how):
    model, optimizer, monitor = start(scale_invariant=False)
    networks.train(model, optimizer, 41)
    expected = monitor.reading(), monitor.parameter_rotations()
    if how == "state":
        other = eq.Monitor(optimizer, named_parameters=model.named_parameters())
        other.load_state_dict(monitor.state_dict())
    else:
        _, _, other = (
            copy.deepcopy((model, optimizer, monitor))
            if how == "deepcopy"
            else pickle.loads(pickle.dumps((model, optimizer, monitor)))
        )
    assert other.scale_invariant is False
    assert (other.reading(), other.parameter_rotations()) == expected
    if how == "state":  # both watch the same optimizer
        networks.train(model, optimizer, 30)
        assert other.reading() == monitor.reading()
        assert other.parameter_rotations() == monitor.parameter_rotations()


def test_a_reset_keeps_what_is_known_of_a_weight():
    model, optimizer, monitor = start()
    networks.train(model, optimizer, 40)
    monitor.reset()
    rotation = monitor.parameter_rotations()["0.weight"]
    assert rotation.scale_invariant
    assert math.isnan(rotation.angular_step)
