"""Schedulers in loops that accelerate and Fabric have prepared."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.fabric import Fabric
from support.naive import ThinnedTwin
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import equilibrate as eq

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.05)
    inputs = torch.randn(320, 5)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(320, 1))
    return model, optimizer, DataLoader(data, batch_size=16)


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """The state of accelerate is shared by all its objects."""
    yield
    Accelerator().state._reset_state(reset_partial_state=True)


def accelerated(epochs, folder, *, resume=False, prepared=False, **options):
    """A loop as in accelerate's guide, with the scheduler among what it checkpoints."""
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer, loader = accelerator.prepare(*parts())
    assert isinstance(optimizer, AcceleratedOptimizer)
    scheduler = eq.FDRScheduler(optimizer, threshold=5.0, min_steps=5, factor=0.7, every=2)
    stepped = accelerator.prepare(scheduler) if prepared else scheduler
    if not prepared:
        accelerator.register_for_checkpointing(scheduler)
    twin = ThinnedTwin(optimizer.optimizer, 2)
    if resume:
        accelerator.load_state(folder)
    decisions = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    twin.before()
                optimizer.step()
                if accelerator.sync_gradients:
                    twin.after()
                optimizer.zero_grad()
        stepped.step()
        decisions.append(scheduler.last_decision)
    accelerator.save_state(folder)
    weights = [p.detach().clone() for p in model.parameters()]
    return decisions, weights, scheduler, twin


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}],
    ids=["plain", "bf16, accumulation"],
)
def test_a_prepared_optimizer_is_taken_as_it_is(options, prepared, tmp_path):
    decisions, _, scheduler, _ = accelerated(8, tmp_path, prepared=prepared, **options)
    steps = 8 * 20 // options.get("gradient_accumulation_steps", 1)
    assert scheduler.monitor.step == steps
    assert any(decision.lowered for decision in decisions)
    assert decisions[-1].lr < 0.05
    assert scheduler.optimizer.param_groups[0]["lr"] == decisions[-1].lr


def test_the_readings_are_of_the_steps_that_were_made(tmp_path):
    """As the naive code has them, with clipping and accumulation."""
    [decision], _, _, twin = accelerated(1, tmp_path, gradient_accumulation_steps=2)
    reading, (count, difference, right) = decision.reading, twin.read()
    assert reading.count == count
    assert reading.right == pytest.approx(right, rel=1e-4)
    assert reading.difference == pytest.approx(difference, abs=1e-4 * right)


@pytest.mark.parametrize("prepared", [False, True])
def test_save_state_and_load_state(prepared, tmp_path):
    straight, weights, *_ = accelerated(10, tmp_path / "straight", prepared=prepared)
    accelerated(4, tmp_path / "stopped", prepared=prepared)
    resumed, again, *_ = accelerated(6, tmp_path / "stopped", resume=True, prepared=prepared)
    assert resumed == straight[4:]
    assert any(decision.lowered for decision in resumed)
    assert all(map(torch.equal, weights, again))


def with_fabric(epochs, file, *, resume=False, precision="32-true"):
    """A loop as in Fabric's guide: save and load take the scheduler as it is."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer, loader = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    scheduler = eq.FDRScheduler(optimizer, threshold=5.0, min_steps=5, factor=0.7, every=2)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if resume:
        fabric.load(file, state)
    decisions = []
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(mse_loss(model(inputs), targets))
            optimizer.step()
        scheduler.step()
        decisions.append(scheduler.last_decision)
    fabric.save(file, state)
    return decisions, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_resumes(precision, tmp_path):
    straight, weights = with_fabric(10, tmp_path / "straight.ckpt", precision=precision)
    file = tmp_path / "stopped.ckpt"
    with_fabric(4, file, precision=precision)
    resumed, again = with_fabric(6, file, resume=True, precision=precision)
    assert resumed == straight[4:]
    assert any(decision.lowered for decision in resumed)
    assert all(map(torch.equal, weights, again))
