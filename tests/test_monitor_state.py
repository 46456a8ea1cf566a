"""The state of a monitor: resumed bit by bit, copied, refused; names; wrong arguments."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from support.monitored import Loop, fused_step, small_model
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import equilibrate as eq

FORMS = {
    "plain": lambda p: SGD(p, lr=0.1, weight_decay=0.05),
    "dampening": lambda p: SGD(p, lr=0.1, momentum=0.8, dampening=0.4),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "tensor": lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
}


def saved(*parts):
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file)


def numbers(monitor):
    """All that a monitor reads; nan equals nan."""
    read = monitor.read()
    return repr((read.whole, read.groups, read.layers().row()))


@pytest.mark.parametrize("first", [21, 64])
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("form", FORMS)
def test_stopped_and_resumed_readings_are_bit_identical(form, every, first):
    """Saved in mid-interval, after the scheduler has changed the rate; loaded in any order."""
    loop = Loop(FORMS[form], every, torch.float32)
    schedule = CosineAnnealingLR(loop.optimizer, 200)
    loop.run(first, schedule.step)
    states = saved(loop.monitor, loop.model, loop.optimizer, schedule)
    noise = loop.generator.get_state()
    loop.run(30, schedule.step)

    other = Loop(FORMS[form], 1, torch.float32)
    schedule = CosineAnnealingLR(other.optimizer, 200)
    parts = other.monitor, other.model, other.optimizer, schedule
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    other.generator.set_state(noise)
    other.run(30, schedule.step)
    assert other.monitor.every == every
    assert numbers(other.monitor) == numbers(loop.monitor)


@pytest.mark.parametrize("saved_after", range(1, 8))
def test_steps_skipped_before_a_save_are_not_counted_after_it(saved_after):
    loop = Loop(lambda p: SGD(p, lr=0.1, fused=True), 4)
    loaded = loop.monitor
    for t in range(1, 9):
        loop.backward()
        fused_step(loop.optimizer, skip=t in (2, 3, 6))
        if t == saved_after:
            loaded = eq.Monitor(loop.optimizer, loop.model)
            loaded.load_state_dict(loop.monitor.state_dict())
    assert numbers(loaded) == numbers(loop.monitor)
    assert loaded.reading().step == 5


@pytest.mark.parametrize("every", [1, 3])
def test_asking_for_a_reading_changes_no_bit_of_a_later_one(every):
    """Over several blocks of measurements."""
    loop = Loop(FORMS["dampening"], every, torch.float32)
    asked = eq.Monitor(loop.optimizer, loop.model, every=every)
    for t in range(150 * every):
        loop.backward()
        loop.optimizer.step()
        if t % 7 == 3:
            asked.reading()
            asked.state_dict()
    assert numbers(asked) == numbers(loop.monitor)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("form", ["plain", "dampening", "AdamW"])
def test_a_copy_continues_as_the_original_does(form, how):
    loop = Loop(FORMS[form], 4, scale_invariant=False)
    loop.run(21)
    copied = how(loop)
    monitor = copied.monitor
    assert monitor.optimizer is copied.optimizer is not loop.optimizer
    assert (monitor.every, monitor.scale_invariant) == (4, False)
    before = numbers(loop.monitor)
    assert numbers(monitor) == before
    copied.run(30)
    assert numbers(loop.monitor) == before  # the original has not moved
    loop.run(30)
    assert numbers(monitor) == numbers(loop.monitor)


def cooldown(optimizer):
    return eq.Cooldown(optimizer, total_steps=100)


@pytest.mark.parametrize("kind", [eq.Monitor, eq.FDRScheduler, eq.Forecaster, cooldown])
def test_a_spawned_process_shares_no_tensor_that_is_gone_when_it_starts(kind):
    """Torch hands tensors over as open files, which are closed with the tensors."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    watching, tensors = kind(optimizer), []
    loss = model(torch.ones(2, 6)).sum()
    loss.backward()
    optimizer.step()
    if isinstance(watching, eq.Forecaster):
        watching.update(loss)
    elif isinstance(watching, eq.Cooldown):
        watching.step(loss)

    class Pickler(pickle.Pickler):
        def persistent_id(self, part):
            if not isinstance(part, torch.Tensor):
                return None
            tensors.append(weakref.ref(part))
            return len(tensors)

    Pickler(io.BytesIO()).dump(watching)
    assert tensors
    assert all(tensor() is not None for tensor in tensors)


@pytest.mark.parametrize("named", [True, False])
def test_a_running_project_can_turn_layers_on_and_off(named):
    def watched(named):
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        return model, eq.Monitor(optimizer, model if named else None, every=1)

    def train(model, monitor):
        for _ in range(20):
            monitor.optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            monitor.optimizer.step()

    model, before = watched(named)
    train(model, before)
    (state,) = saved(before)
    model, after = watched(not named)
    after.load_state_dict(state)
    assert after.reading() == before.reading()
    train(model, after)
    assert after.step == 40
    assert named or len(after.layers().layers) == 4


def test_wrong_states_are_refused():
    def monitor_of(model):
        return eq.Monitor(SGD(model.parameters(), lr=0.1))

    monitor = monitor_of(small_model())
    state = monitor.state_dict()
    with pytest.raises(ValueError, match=r"another model or optimizer.*4 tensors in 1 group"):
        monitor_of(nn.Linear(2, 2)).load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of a Monitor: it holds step, monitor;"):
        monitor.load_state_dict({"step": 1, "monitor": state})
    state["ledgers"] *= 2  # as from a group with parameters on two devices
    with pytest.raises(ValueError, match=r"on other devices: .* \[4, 4\] .* has \[4\]"):
        monitor.load_state_dict(state)


def test_names_are_the_models_the_optimizers_or_places():
    model, extra = small_model(), nn.Linear(2, 2)
    names = [name for name, _ in model.named_parameters()]

    def named(monitor):
        return [layer.name for layer in monitor.layers().layers]

    assert named(eq.Monitor(SGD(model.named_parameters(), lr=0.1))) == names
    optimizer = SGD(model.parameters(), lr=0.1)
    assert named(eq.Monitor(optimizer, model)) == names
    with pytest.raises(ValueError, match=r"no name for any parameter: pass the model, eq.Monitor"):
        eq.Monitor(optimizer).layers()
    optimizer.add_param_group({"params": list(extra.parameters())})
    optimizer.param_groups[1]["param_names"] = ["head.weight"]
    added = ["head.weight", "group 1, parameter 1"]
    assert named(eq.Monitor(optimizer))[-2:] == added


def test_parameters_added_later_have_names_too():
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, model, every=1)
    optimizer.add_param_group({"params": [extra]})
    names = [layer.name for layer in monitor.layers().layers]
    assert names == [*(name for name, _ in model.named_parameters()), "group 1, parameter 0"]


def test_wrong_arguments_are_named():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    complex_ = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Sequent"):
        eq.Monitor(model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"model lacks 4 parameter\(s\) of the optimizer"):
        eq.Monitor(optimizer, nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be the torch.nn.Module .* got generator"):
        eq.Monitor(optimizer, model.named_parameters())  # pyright: ignore[reportArgumentType]
    for every in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"every must be a whole number .* got"):
            eq.Monitor(optimizer, every=every)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="parameter group 0 has complex parameters"):
        eq.Monitor(SGD([complex_], lr=0.1))
    monitor = eq.Monitor(optimizer)
    optimizer.add_param_group({"params": [complex_]})
    with pytest.raises(TypeError, match="parameter group 1 has complex parameters"):
        optimizer.step()
    assert monitor.step == 0
    optimizer.param_groups[:] = [{**optimizer.param_groups[0], "params": []}]
    with pytest.raises(ValueError, match="optimizer has no parameters"):
        eq.Monitor(optimizer)


def test_shards_of_fsdp1_are_refused():
    shard = nn.Parameter(torch.ones(2))
    shard._fsdp_flattened = True  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel \(FSDP1\), .*fully_shard"):
        eq.Monitor(SGD([shard], lr=0.1))
