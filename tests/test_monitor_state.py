"""What a monitor keeps, hands out and takes back, and what it refuses."""

import pytest
import torch
from support.monitored import SGD_FORMS, assert_agrees, small_model, train
from support.naive import NaiveSGDSides
from torch import nn

import equilibrate as eq


def test_a_group_added_later_starts_the_averages_again():
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
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
    monitor = eq.Monitor(optimizer)
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


def test_parameters_added_later_are_checked_as_the_first_were():
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, names=model.named_parameters())
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ValueError, match=r"names lacks 1 .*\(group 1, parameter 0 of shape \(3,\)"):
        optimizer.step()
    monitor.detach()
    eq.Monitor(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    with pytest.raises(TypeError, match="parameter group 2 has complex parameters"):
        optimizer.step()


def test_reset_and_detach():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
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
    monitor = eq.Monitor(optimizer)
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
    monitor = eq.Monitor(optimizer)
    p.grad = torch.tensor([1.0, float("nan")])
    optimizer.step()
    assert "non-finite" in str(monitor.reading().undefined)


@pytest.mark.parametrize("form", SGD_FORMS)
@pytest.mark.parametrize("names", [False, True])
def test_stopped_and_resumed_readings_are_bit_identical(form, names, tmp_path):
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0

    def start():
        torch.manual_seed(0)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
        named = model.named_parameters() if names else None
        return model, optimizer, eq.Monitor(optimizer, names=named)

    model, optimizer, monitor = start()
    train(model, optimizer, steps=21, sign=sign)
    parts = {"model": model, "optimizer": optimizer, "monitor": monitor}
    torch.save({key: part.state_dict() for key, part in parts.items()}, tmp_path / "c.pt")
    train(model, optimizer, steps=30, sign=sign)
    expected = monitor.reading(), monitor.readings()

    model, optimizer, monitor = start()
    loaded = torch.load(tmp_path / "c.pt")
    monitor.load_state_dict(loaded["monitor"])  # in whatever order
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, steps=30, sign=sign)
    assert (monitor.reading(), monitor.readings()) == expected


@pytest.mark.parametrize("form", ["decay", "dampening"])
def test_a_state_goes_on_on_another_device(form):
    """As torch has it for an optimizer's state; "meta" stands for a GPU, without its numbers."""

    def start(device):
        p = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([p], lr=0.1, **SGD_FORMS[form])
        return p, optimizer, eq.Monitor(optimizer)

    def step(p, optimizer):
        p.grad = torch.ones_like(p)
        optimizer.step()

    p, optimizer, monitor = start("cpu")
    step(p, optimizer)
    there, other, resumed = start("meta")
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(monitor.state_dict())
    step(there, other)
    assert resumed.state_dict()["lanes"][0]["average"]["rows"].device.type == "meta"


def test_the_state_of_another_model_is_refused():
    def monitor_of(model, **kwargs):
        return eq.Monitor(torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)

    state = monitor_of(small_model()).state_dict()
    with pytest.raises(ValueError, match=r"another model or optimizer.*4 tensors of 83 parameters"):
        monitor_of(nn.Linear(2, 2)).load_state_dict(state)
    other = small_model()
    with pytest.raises(ValueError, match=r"without names, here is .* with names"):
        monitor_of(other, names=other.named_parameters()).load_state_dict(state)
    with pytest.raises(ValueError, match="state is not that of a Monitor: it holds step, monitor"):
        monitor_of(other).load_state_dict({"step": 1, "monitor": state})


def test_wrong_arguments_are_named():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Sequential"
    ):
        eq.Monitor(model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"names lacks 4 parameter\(s\)"):
        eq.Monitor(optimizer, names=nn.Linear(2, 2).named_parameters())
    for names in (model, ["0.weight"], True):
        with pytest.raises(TypeError, match=r"names must be pairs .* model.named_parameters\(\)"):
            eq.Monitor(optimizer, names=names)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"lr of parameter group 0 must be positive, got 0.0"):
        eq.Monitor(torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(ValueError, match="dampening of parameter group 0 must be below 1"):
        eq.Monitor(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=1))
    with pytest.raises(TypeError, match="parameter group 0 has complex parameters"):
        eq.Monitor(torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1))
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match="optimizer has no parameters"):
        eq.Monitor(optimizer)
    forgetful = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=10)
    eq.Monitor(forgetful)
    with pytest.raises(ValueError, match="lr × weight_decay is 1"):
        train(model, forgetful, steps=1)
