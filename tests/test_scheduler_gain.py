"""A scheduler with the rule `Gain`: it hands over losses and forecasts, and can be resumed."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, SequentialLR

import equilibrate as eq
from equilibrate.rules import Gain


def make(lr=0.15, **kwargs):
    """A linear model with noisy targets, whose loss is soon at its noise floor."""
    torch.manual_seed(5)
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    forecaster = eq.Forecaster(optimizer, (16, 32), every=4)
    settings = {"rule": Gain(), "factor": 0.5, "min_steps": 20, "forecaster": forecaster}
    return model, optimizer, eq.FDRScheduler(optimizer, **{**settings, **kwargs})


def epoch(model, optimizer, number, steps=20):
    generator = torch.Generator().manual_seed(number)
    total = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(8, 20, generator=generator)
        y = x.sum(1, keepdim=True) / 4 + torch.randn(8, 1, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.detach() / steps
    return total


def run(epochs, start=None, kind=float):
    model, optimizer, scheduler = make()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first, found = 0, []
    if start is not None:
        for key, part in parts.items():
            part.load_state_dict(start[key])
        first = start["epochs"]
    for number in range(first, epochs):
        scheduler.step(kind(epoch(model, optimizer, number)))
        found.append((scheduler.last_decision, optimizer.param_groups[0]["lr"]))
    return found, {key: part.state_dict() for key, part in parts.items()} | {"epochs": epochs}


@pytest.mark.parametrize("kind", [float, lambda loss: loss])
def test_it_lowers_at_the_noise_floor_and_resumes_bit_by_bit(tmp_path, kind):
    whole, _ = run(25, kind=kind)
    torch.save(run(17, kind=kind)[1], tmp_path / "checkpoint.pt")
    rest, _ = run(25, torch.load(tmp_path / "checkpoint.pt"), kind)
    assert rest == whole[17:]
    lowered = [decision for decision, _ in whole if decision.lowered]
    assert lowered
    assert lowered[0].reason.startswith("lowering would gain 0.")
    assert whole[-1][1] == 0.15 * 0.5 ** len(lowered)
    assert whole[0][0].reason.startswith("too few steps")
    # After a lowering everything begins anew.
    after = whole[whole.index((lowered[0], 0.075)) + 5][0]
    assert after.reading.losses.start == lowered[0].reading.step
    assert after.reading.losses.elapsed == 5 * 20


def test_without_losses_it_waits_and_says_so():
    model, optimizer, scheduler = make()
    for number in range(2):
        epoch(model, optimizer, number)
        scheduler.step()
        assert scheduler.last_decision.reason.startswith("too few steps")
    epoch(model, optimizer, 2)
    with pytest.warns(UserWarning, match="Gain needs the training loss") as caught:
        scheduler.step()
    assert caught[0].filename == __file__
    for number in range(3, 6):  # one warning is enough
        epoch(model, optimizer, number)
        scheduler.step()
    assert scheduler.last_decision.reason.startswith("no loss was handed over: call scheduler.step")


def test_forecasts_and_losses_are_attached_and_not_saved():
    model, optimizer, scheduler = make()
    for number in range(6):
        scheduler.step(epoch(model, optimizer, number))
    reading = scheduler.last_decision.reading
    assert [f.horizon for f in reading.forecasts] == [16, 32]
    assert reading.losses.steps == tuple(range(20, 140, 20))
    saved = scheduler.state_dict()["decision"]["reading"]
    assert saved["forecasts"] is saved["losses"] is None
    assert reading == eq.Reading(**saved)


def test_a_forecaster_is_created_and_detached_with_the_scheduler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, rule=Gain(), every=8)
    assert (scheduler.forecaster.horizons, scheduler.forecaster.every) == ((150, 400), 8)
    assert eq.FDRScheduler(optimizer, rule=Gain()).forecaster.every == 16
    assert eq.FDRScheduler(optimizer).forecaster is None
    scheduler.detach()
    optimizer.step()
    assert scheduler.forecaster.step == 0


def test_wrong_forecasters_are_named():
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    with pytest.raises(ValueError, match=r"forecaster watches another optimizer: pass eq"):
        eq.FDRScheduler(one, rule=Gain(), forecaster=eq.Forecaster(other))
    with pytest.raises(TypeError, match=r"forecaster must be an eq.Forecaster, got SGD: pass"):
        eq.FDRScheduler(one, rule=Gain(), forecaster=one)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="forecaster is of no use: the rule needs no forecasts"):
        eq.FDRScheduler(one, forecaster=eq.Forecaster(one))


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of SequentialLR in torch 2.8
@pytest.mark.filterwarnings("ignore:the rule Gain needs the training loss")
def test_it_works_inside_torchs_own_schedulers():
    """They call step() without a loss, so that the rule waits; the loss can be given directly."""
    model, optimizer, scheduler = make()
    warm_up = LinearLR(optimizer, start_factor=0.25, total_iters=3)
    sequence = SequentialLR(optimizer, [warm_up, scheduler], milestones=[3])
    for number in range(6):
        epoch(model, optimizer, number)
        sequence.step()
    assert optimizer.param_groups[0]["lr"] == 0.15
    assert scheduler.last_decision.reason.startswith("no loss was handed over")
    model, optimizer, scheduler = make()
    chain = ChainedScheduler([scheduler], optimizer)
    epoch(model, optimizer, 0)
    chain.step()
    assert chain.get_last_lr() == [0.15]
