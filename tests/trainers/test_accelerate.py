"""Schedulers in loops that accelerate and Fabric have prepared."""

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
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

STEPS = 320
"""Steps of 16 epochs without accumulation."""


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.05)
    inputs = torch.randn(320, 5)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(320, 1))
    return model, optimizer, DataLoader(data, batch_size=16)


def scheduler_for(optimizer, kind):
    if kind == "cooldown":
        return eq.Cooldown(optimizer, total_steps=STEPS)
    return eq.FDRScheduler(optimizer, threshold=5.0, min_steps=20, factor=0.7)


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """The state of accelerate is shared by all its objects."""
    yield
    Accelerator().state._reset_state(reset_partial_state=True)


def accelerated(epochs, folder, kind, *, resume=False, **options):
    """A loop as in accelerate's guide, with the scheduler among what it checkpoints."""
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer, loader = accelerator.prepare(*parts())
    scheduler = scheduler_for(optimizer, kind)
    accelerator.register_for_checkpointing(scheduler)
    if resume:
        accelerator.load_state(folder)
    found = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                if kind == "cooldown" and accelerator.sync_gradients:
                    scheduler.step(loss)
        if kind != "cooldown":
            scheduler.step()
        found.append((scheduler.last_decision, scheduler.get_last_lr()))
    accelerator.save_state(folder)
    return found, [p.detach().clone() for p in model.parameters()], scheduler


@pytest.mark.parametrize("kind", ["cooldown", "threshold"])
def test_a_prepared_optimizer_is_taken_as_it_is(kind, tmp_path):
    options = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
    _, _, scheduler = accelerated(32, tmp_path, kind, **options)
    steps = scheduler.last_epoch if kind == "cooldown" else scheduler.monitor.step
    assert steps == STEPS
    assert scheduler.last_decision.lowered or scheduler.get_last_lr()[0] < 0.05
    assert scheduler.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


@pytest.mark.parametrize("kind", ["cooldown", "threshold"])
def test_save_state_and_load_state(kind, tmp_path):
    straight, weights, _ = accelerated(16, tmp_path / "straight", kind)
    accelerated(10, tmp_path / "stopped", kind)
    resumed, again, _ = accelerated(6, tmp_path / "stopped", kind, resume=True)
    assert resumed == straight[10:]
    assert resumed[-1][1] < resumed[0][1]
    assert all(map(torch.equal, weights, again))


def with_fabric(epochs, file, *, resume=False):
    """A loop as in Fabric's guide: save and load take the scheduler as it is."""
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, optimizer, loader = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    scheduler = scheduler_for(optimizer, "cooldown")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if resume:
        fabric.load(file, state)
    found = []
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step(loss)
        found.append((scheduler.last_decision, scheduler.get_last_lr()))
    fabric.save(file, state)
    return found, [p.detach().clone() for p in model.parameters()]


def test_fabric_resumes(tmp_path):
    straight, weights = with_fabric(16, tmp_path / "straight.ckpt")
    with_fabric(10, tmp_path / "stopped.ckpt")
    resumed, again = with_fabric(6, tmp_path / "stopped.ckpt", resume=True)
    assert resumed == straight[10:]
    assert resumed[-1][1] == [0.0]
    assert all(map(torch.equal, weights, again))
