"""The state of a monitor: layout changes, reset, saving and loading, wrong arguments."""

import pytest
import torch
from support.monitored import SGD_FORMS, assert_agrees, small_model, train
from support.naive import NaiveSGDSides
from torch import nn

import equilibrate as eq


def test_a_group_added_later_starts_the_averages_again():
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, every=1)
    train(model, optimizer, steps=10)
    optimizer.add_param_group({"params": [extra], "lr": 0.2})
    naive = NaiveSGDSides(optimizer)
    train(model, optimizer, naive, steps=7)
    assert (monitor.reading().step, monitor.reading().count) == (17, 4)
    assert_agrees(monitor.reading(), naive.left, naive.right)


@pytest.mark.parametrize("how", ["a new list", "a new entry"])
def test_parameters_that_take_the_place_of_others_are_those_watched(how):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    monitor = eq.Monitor(optimizer, every=1)
    train(model, optimizer, steps=10)
    model[-1].bias = nn.Parameter(2 * model[-1].bias.detach() + 1)
    if how == "a new list":
        optimizer.param_groups[0]["params"] = list(model.parameters())
    else:
        optimizer.param_groups[0]["params"][-1] = model[-1].bias
    naive = NaiveSGDSides(optimizer)
    train(model, optimizer, naive, steps=7)
    assert (monitor.reading().step, monitor.reading().count) == (17, 4)  # averages begin anew
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_parameters_added_later_have_names_of_the_optimizer_or_their_place():
    model, extra, last = small_model(), nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, every=1, named_parameters=model.named_parameters())
    optimizer.add_param_group({"params": list(extra.parameters())})
    optimizer.add_param_group({"params": [last]})
    optimizer.param_groups[1]["param_names"] = ["head.weight", "head.bias"]
    names = [name for name, _ in model.named_parameters()]
    expected = [*names, "head.weight", "head.bias", "group 2, parameter 0"]
    assert list(monitor.parameter_readings()) == expected


def test_names_are_taken_from_an_optimizer_that_has_its_own():
    model = small_model()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
    assert list(monitor.parameter_readings()) == [name for name, _ in model.named_parameters()]


def test_parameter_readings_need_names():
    optimizer = torch.optim.SGD(small_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"no name for any parameter: pass named_parameters="):
        eq.Monitor(optimizer).parameter_readings()


def test_a_state_saved_after_a_group_was_added_can_be_loaded():
    def start():
        torch.manual_seed(0)
        model, extra = small_model(), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = eq.Monitor(optimizer, every=1)
        train(model, optimizer, steps=3)
        optimizer.add_param_group({"params": [extra]})
        return model, optimizer, monitor

    _, _, monitor = start()
    state = monitor.state_dict()
    model, optimizer, other = start()
    other.load_state_dict(state)
    train(model, optimizer, steps=4)
    assert (other.reading().step, other.reading().count) == (7, 2)


def test_complex_parameters_added_later_raise_too():
    optimizer = torch.optim.SGD(small_model().parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    with pytest.raises(TypeError, match="parameter group 1 has complex parameters"):
        optimizer.step()
    assert monitor.step == 0


@pytest.mark.parametrize("every", [1, 4])
def test_parameters_that_were_moved_at_the_end_of_a_training_can_still_be_read(every):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.05)
    options = {"named_parameters": model.named_parameters(), "trace": True}
    monitor = eq.Monitor(optimizer, every=every, **options)
    train(model, optimizer, steps=40)
    monitor.mark()
    before = monitor.reading(), monitor.parameter_readings(), monitor.group_readings()
    places = monitor._watch._places
    places._firsts = [(p, torch.device("cuda")) for p, _ in places._firsts]  # as if from there
    after = monitor.reading(), monitor.parameter_readings(), monitor.group_readings()
    assert before == after
    assert before[0].count > 0
    train(model, optimizer, steps=2 * every)  # on the other device the window begins again
    assert monitor.reading().count <= 2 * every


def test_reset_and_detach():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, every=1)
    assert monitor.reading().undefined == "no step has been seen yet"
    train(model, optimizer, steps=10)
    monitor.reset()
    assert (monitor.reading().step, monitor.reading().count) == (10, 0)
    train(model, optimizer, steps=4)
    before = monitor.reading()
    monitor.detach()
    train(model, optimizer, steps=4)
    assert monitor.reading() == before
    assert (before.step, before.count) == (14, 2)


def test_non_finite_gradients_are_reported_and_leave_with_the_window():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    (p,) = optimizer.param_groups[0]["params"]
    monitor = eq.Monitor(optimizer, every=1)
    for t in range(8):
        p.grad = torch.full((2,), float("nan") if t == 2 else 1.0)
        before = p.detach().clone()
        optimizer.step()
        p.data.copy_(before)
        if t == 3:
            assert "non-finite" in str(monitor.reading().undefined)
            assert monitor.reading().residual != monitor.reading().residual
    assert monitor.reading().undefined is None


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_step_to_nowhere_is_not_taken_for_rest(lr):
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p], lr=lr, foreach=False)
    monitor = eq.Monitor(optimizer, every=1)
    p.grad = torch.tensor([1.0, float("nan")])
    optimizer.step()
    assert "non-finite" in str(monitor.reading().undefined)


@pytest.mark.parametrize("form", SGD_FORMS)
@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("every", [1, 5])
def test_stopped_and_resumed_readings_are_bit_identical(form, names, every, tmp_path):
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0

    def start():
        torch.manual_seed(0)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
        named = model.named_parameters() if names else None
        return model, optimizer, eq.Monitor(optimizer, every=every, named_parameters=named)

    model, optimizer, monitor = start()
    train(model, optimizer, steps=21, sign=sign)
    parts = {"model": model, "optimizer": optimizer, "monitor": monitor}
    torch.save({key: part.state_dict() for key, part in parts.items()}, tmp_path / "c.pt")
    train(model, optimizer, steps=30, sign=sign)
    readings = monitor.parameter_readings if names else monitor.group_readings
    expected = monitor.reading(), readings()

    model, optimizer, monitor = start()
    loaded = torch.load(tmp_path / "c.pt")
    monitor.load_state_dict(loaded["monitor"])  # in whatever order
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, steps=30, sign=sign)
    readings = monitor.parameter_readings if names else monitor.group_readings
    assert (monitor.reading(), readings()) == expected


def test_loading_restores_every():
    optimizer = torch.optim.SGD(small_model().parameters(), lr=0.1)
    saved = eq.Monitor(optimizer, every=7).state_dict()
    monitor = eq.Monitor(optimizer)
    monitor.load_state_dict(saved)
    assert monitor.every == 7


def test_the_state_of_another_model_is_refused():
    def monitor_of(model, **kwargs):
        return eq.Monitor(torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)

    state = monitor_of(small_model()).state_dict()
    with pytest.raises(ValueError, match=r"another model or optimizer.*4 tensors of 83 parameters"):
        monitor_of(nn.Linear(2, 2)).load_state_dict(state)
    other = small_model()
    with pytest.raises(ValueError, match=r"without names, this monitor has .* with names"):
        monitor_of(other, named_parameters=other.named_parameters()).load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of a Monitor: it holds step, monitor"):
        monitor_of(other).load_state_dict({"step": 1, "monitor": state})


def test_the_state_of_parameters_on_other_devices_raises():
    model = small_model()
    monitor = eq.Monitor(torch.optim.SGD(model.parameters(), lr=0.1))
    state = monitor.state_dict()
    state["probes"] *= 2  # as from a group with parameters on two devices
    with pytest.raises(ValueError, match=r"on other devices: .* \[4, 4\] .* has \[4\]"):
        monitor.load_state_dict(state)


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_step_that_creates_the_state_to_be_saved_is_not_counted(every, zero):
    # As torch.distributed.checkpoint does with an optimizer that has no state yet.
    def run(with_idle_steps):
        torch.manual_seed(0)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        monitor = eq.Monitor(optimizer, every=every)

        def idle_step(_):
            optimizer.zero_grad(set_to_none=False)
            optimizer.param_groups[0]["lr"] = zero
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1

        train(model, optimizer, steps=15, on_step=idle_step if with_idle_steps else None)
        return monitor.reading()

    assert run(True) == run(False)


def test_wrong_arguments_are_named():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Sequential"
    ):
        eq.Monitor(model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"named_parameters lacks 4 parameter\(s\)"):
        eq.Monitor(optimizer, every=1, named_parameters=nn.Linear(2, 2).named_parameters())
    for names in (model, ["0.weight"], True):
        with pytest.raises(
            TypeError, match=r"named_parameters must be pairs .* model.named_parameters\(\)"
        ):
            eq.Monitor(optimizer, every=1, named_parameters=names)  # pyright: ignore[reportArgumentType]
    for every in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"every must be a whole number .* got"):
            eq.Monitor(optimizer, every=every)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="parameter group 0 has complex parameters"):
        eq.Monitor(torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1))
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match="optimizer has no parameters"):
        eq.Monitor(optimizer, every=1)
