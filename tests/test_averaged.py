"""Averaged parameters that a forecaster gives to a model for a while."""

import copy
import math
import pickle

import pytest
import torch
from support.monitored import small_model
from test_forecast import train
from torch import nn
from torch.optim.swa_utils import update_bn

import equilibrate as eq


def trained(steps=120):
    torch.manual_seed(0)
    model = small_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forecaster = eq.Forecaster(optimizer, every=4)
    train(model, optimizer, steps, forecaster=forecaster)
    return model, optimizer, forecaster


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_training_continues_as_if_nothing_had_happened():
    model, optimizer, forecaster = trained()
    with forecaster.averaged(), torch.no_grad():
        for p in model.parameters():
            p.zero_()  # whatever happens to the averaged values is forgotten
    with pytest.raises(KeyError, match="an evaluation that fails"), forecaster.averaged():
        raise KeyError("an evaluation that fails")
    train(model, optimizer, 30, first=120, forecaster=forecaster)
    other, optimizer, unused = trained()
    train(other, optimizer, 30, first=120, forecaster=unused)
    assert torch.equal(flat(model), flat(other))
    assert forecaster.forecast() == unused.forecast()


@pytest.mark.parametrize("every", [1, 16])
def test_a_monitor_measures_on_as_if_nothing_had_happened(every):
    """Readings are those of a run without evaluations."""
    readings = []
    for evaluates in (False, True):
        model, optimizer, forecaster = trained(1)
        monitor = eq.Monitor(optimizer, every=every)
        for first in range(1, 100, 11):
            train(model, optimizer, 11, first=first)
            if evaluates:
                monitor.reading()
                with forecaster.averaged(), forecaster.averaged():
                    monitor.reading()  # does not warn
                    state = monitor.state_dict()  # as of trainers that save after an evaluation
                monitor.reading()
                monitor.load_state_dict(state)
        readings.append(monitor.reading())
    assert readings[0] == readings[1]
    assert readings[0].count > 40


def test_a_graph_from_inside_of_a_block_is_not_used_after_it():
    model, _, forecaster = trained()
    with forecaster.averaged():
        loss = model(torch.ones(1, 6, dtype=torch.float64)).square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("drift", "best"), [(0.0, 400), (3e-3, 40)])
def test_a_longer_average_has_less_noise_and_lags_further_behind(drift, best):
    """On forty modes of curvature 1 with noise, whose excess loss at rest is 40·η/(4 − 2η) = 1.05,
    and a minimum that moves along."""
    generator = torch.Generator().manual_seed(0)
    theta = nn.Parameter(torch.zeros(40, dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    forecasters = {n: eq.Forecaster(optimizer, horizon=n, every=2) for n in (40, 400)}
    minimum, losses = torch.zeros(40, dtype=torch.float64), {}
    for _ in range(4000):
        noise = torch.randn(40, generator=generator, dtype=torch.float64)
        theta.grad = theta.detach() - minimum + noise
        optimizer.step()
        minimum += drift
    for horizon, forecaster in forecasters.items():
        with forecaster.averaged():
            losses[horizon] = 0.5 * (theta.detach() - minimum).square().sum().item()
    assert min(losses, key=losses.__getitem__) == best
    # At rest the mean of half-life 96 keeps 7 % of it, with a relative deviation of √(2/40), so
    # that 20 % are eight deviations away; that of half-life 10 keeps 42 %.
    assert losses[best] < (0.2 if best == 400 else 0.9) * 1.05


def test_without_a_sample_the_model_keeps_its_own_values():
    """Before the first step, as nanoGPT evaluates, and after a reset."""
    model, optimizer, forecaster = trained(steps=0)
    own = flat(model)
    with forecaster.averaged(model):
        assert torch.equal(flat(model), own)
    train(model, optimizer, 40)
    forecaster.reset()
    own = flat(model)
    with forecaster.averaged():
        assert torch.equal(flat(model), own)
    train(model, optimizer, 1)
    with forecaster.averaged():
        assert torch.equal(flat(model), own)  # the only sample, before the step


@pytest.mark.parametrize("gradient", [None, 1.0])
def test_averages_are_finite_if_the_parameters_are(gradient):
    """Also if samples of a tensor without a gradient do not tell, and nothing is forecast."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1e-3)
    forecaster = eq.Forecaster(optimizer, every=1)
    for step in range(30):
        params[0].grad = torch.ones(3)
        params[1].grad = torch.full((3,), math.nan) if step == 10 else torch.ones(3)
        if step > 12 and gradient is None:
            params[1].grad = None
        optimizer.step()
        if step == 15:
            with torch.no_grad():
                params[1].fill_(1.0)
        if step > 15:
            with forecaster.averaged():
                assert all(p.isfinite().all() for p in params)
    own = params[0].detach().clone()
    with forecaster.averaged():
        assert not torch.equal(params[0], own)  # they have begun again


def test_parameters_of_a_step_that_failed_are_forgotten():
    theta = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([theta], lr=0.5)
    forecaster = eq.Forecaster(optimizer, every=1)

    def fail():
        raise KeyError("a closure that fails")

    with pytest.raises(KeyError, match="a closure that fails"):
        optimizer.step(fail)
    with torch.no_grad():
        theta.fill_(100.0)
    theta.grad = torch.ones(2)
    optimizer.step()
    with forecaster.averaged():
        assert theta.tolist() == [100.0, 100.0]


def test_no_state_is_loaded_inside_of_a_block():
    _, _, forecaster = trained()
    state = forecaster.state_dict()
    with (
        forecaster.averaged(),
        pytest.raises(RuntimeError, match=r"loaded inside forecaster\.averaged\(\)"),
    ):
        forecaster.load_state_dict(state)


def test_no_step_is_made_inside_of_a_block_even_after_a_reset():
    model, optimizer, forecaster = trained()
    own = flat(model)
    with forecaster.averaged():
        forecaster.reset()
        with pytest.raises(RuntimeError, match=r"made a step inside forecaster\.averaged\(\)"):
            train(model, optimizer, 1)
    assert torch.equal(flat(model), own)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_module_that_holds_its_forecaster_is_copied(copied):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forecaster = eq.Forecaster(optimizer, model)
    other = copied(model)
    assert other.forecaster.model is other
    assert other.forecaster.optimizer.param_groups[0]["params"][0] is other.weight


def test_autocast_sees_averaged_values():
    """It keeps copies of parameters in low precision until its outermost block ends."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forecaster = eq.Forecaster(optimizer, every=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(40):
        optimizer.step()
    autocast, x = torch.autocast("cpu", torch.bfloat16), torch.ones(2, 6)
    with autocast:
        own = model(x)
    with forecaster.averaged(), autocast:
        averaged = model(x)
    with autocast:
        assert torch.equal(model(x), own)
        with forecaster.averaged():
            assert torch.equal(model(x), averaged)
        assert torch.equal(model(x), own)
    assert not torch.equal(own, averaged)


def test_blocks_inside_of_one_another():
    model, optimizer, forecaster = trained()
    own = flat(model)
    other = eq.Forecaster(optimizer, horizon=400, every=4)
    train(model, optimizer, 60, first=120)
    own = flat(model)
    with forecaster.averaged():
        outer = flat(model)
        with other.averaged():
            assert not torch.equal(flat(model), outer)
        assert torch.equal(flat(model), outer)
        with pytest.raises(RuntimeError, match="made a step inside"):
            train(model, optimizer, 1)
    assert torch.equal(flat(model), own)


def test_parameters_added_since_begin_new_averages():
    _, optimizer, forecaster = trained()
    added = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [added]})
    with forecaster.averaged():
        assert added.tolist() == [1.0, 1.0]
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    with forecaster.averaged():
        assert added.tolist() == [1.0, 1.0]
    assert added.tolist() == [0.9, 0.9]


def test_a_model_of_low_precision_keeps_its_dtype():
    torch.manual_seed(0)
    model = small_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forecaster = eq.Forecaster(optimizer, every=4)
    train(model, optimizer, 40)
    before = flat(model)
    with forecaster.averaged():
        assert flat(model).dtype == torch.bfloat16
        assert not torch.equal(flat(model), before)
    assert torch.equal(flat(model), before)


def normalised():
    """A model with BatchNorm after some steps, its forecaster, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forecaster = eq.Forecaster(optimizer, every=4)
    inputs = torch.randn(64, 3)
    for _ in range(40):
        optimizer.zero_grad()
        model(inputs + 0.1 * torch.randn_like(inputs)).square().mean().backward()
        optimizer.step()
    return model, forecaster, inputs


def test_statistics_computed_again_fit_averages_inside_of_the_block_and_are_restored_after_it():
    model, forecaster, inputs = normalised()
    before = [b.clone() for b in model.buffers()]
    model.eval()
    with forecaster.averaged(model=model):
        update_bn([inputs], model)
        hidden = model[0](inputs)
        torch.testing.assert_close(model[1].running_mean, hidden.mean(0))
        assert not torch.equal(model[1].running_mean, before[0])
        assert model[1].num_batches_tracked == 1
    assert all(map(torch.equal, model.buffers(), before))
    with pytest.raises(ValueError, match="Expected more than 1"), forecaster.averaged(model=model):
        update_bn([inputs[:1]], model)  # which has reset the statistics before it fails
    assert all(map(torch.equal, model.buffers(), before))
    with forecaster.averaged():
        update_bn([inputs], model)
    assert not torch.equal(model[1].running_mean, before[0])  # only of a model that was given


def test_buffers_that_cannot_be_written_to_or_are_replaced_come_back_too():
    model, forecaster, _ = normalised()
    model.register_buffer("expanded", torch.ones(1).expand(4))
    model.register_buffer("count", torch.zeros(1))
    model.register_buffer("nothing", None)
    before = model.count
    with forecaster.averaged(model=model):
        model.count = model.count + 1
    assert model.count is before
    assert (model.count.item(), model.expanded.tolist()) == (0.0, [1.0] * 4)


def move(watcher):
    """Let a watcher believe that its parameters have been moved from a GPU."""
    for bucket in watcher.parameters.buckets:
        bucket.device = torch.device("cuda")


def test_parameters_that_were_moved_at_the_end_of_a_training_can_be_averaged():
    model, optimizer, forecaster = trained()
    before, state = forecaster.forecast(), forecaster.state_dict()
    with forecaster.averaged():
        expected = flat(model)
    move(forecaster)
    with forecaster.averaged():
        assert torch.equal(flat(model), expected)
    assert forecaster.forecast() == before
    assert forecaster.state_dict()["products"] == state["products"]
    train(model, optimizer, 8, first=120)  # on the other device everything begins again
    assert forecaster.state_dict()["products"]["taken"] == 8


def test_a_state_without_samples_is_loaded():
    _, _, forecaster = trained(steps=0)
    state = forecaster.state_dict()
    model, optimizer, other = trained(steps=0)
    other.load_state_dict(state)
    train(model, optimizer, 120, forecaster=other)
    assert other.forecast() == trained()[2].forecast()


def test_wrong_uses_are_named():
    model, optimizer, forecaster = trained(steps=0)
    with pytest.raises(TypeError, match=r"model must be the torch\.nn\.Module .*, got 16"):
        forecaster.averaged(model=16).__enter__()
    with pytest.raises(ValueError, match="model has none of the optimizer's parameters"):
        forecaster.averaged(model=nn.Linear(2, 2)).__enter__()
    train(model, optimizer, 20)
    before = flat(model)
    with (
        pytest.raises(RuntimeError, match="made a step inside forecaster"),
        forecaster.averaged(),
    ):
        train(model, optimizer, 1)
    assert torch.equal(flat(model), before)
    train(model, optimizer, 1)


def test_a_model_without_a_truth_value_is_taken():
    """A compiled module asks the model for its length, which most have not."""

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def __len__(self):
            raise TypeError("no length")

    model = Compiled()
    forecaster = eq.Forecaster(torch.optim.SGD(model.parameters(), lr=0.1))
    with forecaster.averaged(model):
        pass
