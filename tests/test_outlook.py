"""Whether a threshold can be reached: relaxation times, numbers and sentences."""

import math
from dataclasses import replace

import pytest
import torch

import equilibrate as eq
from equilibrate.monitor.outlook import outlook as look_ahead
from equilibrate.monitor.outlook import relaxing_steps
from equilibrate.monitor.weight_decay import WeightDecay, weight_decay_of

DRIFTING = eq.Reading(8000, 4000, left=0.3, right=1.0, lr=1e-3, stderr=0.02, margin=0.04)
NOISY = replace(DRIFTING, left=0.97)
QUIET = replace(DRIFTING, left=0.995, stderr=0.004, margin=0.008)
SLOW, NONE, UNKNOWN = (
    WeightDecay(1e-5, 50_000),
    WeightDecay(0.0, math.inf),
    WeightDecay(math.nan, math.nan),
)


def groups(kind, *settings):
    """An optimizer with a parameter in each group."""
    params = [torch.nn.Parameter(torch.ones(3, 3)) for _ in settings]
    return kind([{"params": [p], **own} for p, own in zip(params, settings, strict=True)], lr=0.1)


def outlook(reading=DRIFTING, decays=(SLOW,), threshold=0.01, since=8000, remaining=None):
    return look_ahead(reading, decays, threshold, since, remaining)


# -- relaxation times --------------------------------------------------------------------------

SCALE_INVARIANT = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.02}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "weight_decay": 0.02, "momentum": 0.8}),
    "dampening": (
        torch.optim.SGD,
        {"lr": 0.04, "weight_decay": 0.02, "momentum": 0.8, "dampening": 0.5},
    ),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.02, "weight_decay": 0.02, "momentum": 0.8, "nesterov": True},
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.25, "betas": (0.9, 0.95)}),
    "RAdam": (
        torch.optim.RAdam,
        {"lr": 0.01, "weight_decay": 0.25, "betas": (0.9, 0.95), "decoupled_weight_decay": True},
    ),
}


@pytest.mark.parametrize("name", SCALE_INVARIANT)
def test_the_norm_of_a_scale_invariant_layer_relaxes_in_the_time_given(name):
    """One weight of 4,000 numbers, with gradients orthogonal to it that shrink as 1/|θ|.

    The norm is disturbed in equilibrium, and measured before and after two relaxation times. For
    SGD N² relaxes exponentially, for others N.
    """
    kind, settings = SCALE_INVARIANT[name]
    start = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    theta = torch.nn.Parameter(start / 6)
    optimizer = kind([theta], **settings)
    relaxation = weight_decay_of(optimizer, optimizer.param_groups[0]).relaxation
    generator = torch.Generator().manual_seed(1)
    power = 2 if kind is torch.optim.SGD else 1

    def run(steps):
        for _ in range(steps):
            g = torch.randn(len(theta), generator=generator)
            with torch.no_grad():
                g -= theta * (theta @ g) / (theta @ theta)
                theta.grad = g / theta.norm()
            optimizer.step()
        return (theta.detach().double() @ theta.detach().double()).item() ** power

    settled = run(round(6 * relaxation))
    with torch.no_grad():
        theta.mul_(1.4)
    before = run(round(relaxation / 4)) - settled  # after which buffers have adapted
    after = run(round(2 * relaxation)) - settled
    assert math.log(before / after) == pytest.approx(2, rel=0.15)


def test_what_weight_decay_does_in_each_optimizer():
    def decay(kind, **settings):
        optimizer = groups(kind, settings)
        return weight_decay_of(optimizer, optimizer.param_groups[0])

    assert decay(torch.optim.SGD, weight_decay=5e-4) == WeightDecay(5e-5, 5000.0)
    heavy = decay(torch.optim.SGD, weight_decay=5e-4, momentum=0.9)
    assert (heavy.rate, heavy.relaxation) == pytest.approx((5e-4, 500.0))
    assert heavy.formula == "lr × weight_decay / (1 − momentum)"
    damped = decay(torch.optim.SGD, weight_decay=5e-4, momentum=0.9, dampening=0.5)
    assert damped.relaxation == pytest.approx(1000.0)
    assert "(1 − dampening)" in damped.formula
    stuck = decay(torch.optim.SGD, weight_decay=5e-4, momentum=0.9, dampening=1.0)
    assert stuck.relaxation == math.inf
    for kind in (torch.optim.AdamW, torch.optim.Muon):
        assert decay(kind, weight_decay=0.01).relaxation == pytest.approx(500.0)
    tensor = decay(torch.optim.AdamW, weight_decay=0.01, lr=torch.tensor(0.01))
    assert tensor.relaxation == pytest.approx(5000.0)
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam):
        assert decay(kind, weight_decay=0.0) == NONE
    for kind in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adafactor):
        assert math.isnan(decay(kind, weight_decay=0.01).relaxation)
    odd = groups(torch.optim.AdamW, {})
    odd.param_groups[0]["weight_decay"] = torch.tensor(0.01)
    assert math.isnan(weight_decay_of(odd, odd.param_groups[0]).relaxation)


# -- how long it takes -------------------------------------------------------------------------


def mean_residual(t, relaxation):
    """e^(−s/τ), averaged over the later half of t steps, one by one."""
    window = range(t // 2, t)
    return sum(math.exp(-s / relaxation) for s in window) / len(window)


@pytest.mark.parametrize("since", [400, 4000, 40_000])
def test_the_drift_ends_when_the_mean_of_a_relaxing_residual_has_fallen_by_the_ratio(since):
    later = since + int(relaxing_steps(35.0, since, relaxation=5000.0))
    assert mean_residual(since, 5000) / mean_residual(later, 5000) == pytest.approx(35, rel=2e-3)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"remaining": 20_000},
            "|L/R − 1| = 0.7 ≥ 0.01; at lr × weight_decay = 1e-05 the norm relaxes in 50,000 "
            "steps: it will not equilibrate in this run",
        ),
        (
            {"decays": [WeightDecay(1e-4, 5000.0)]},
            "|L/R − 1| = 0.7 ≥ 0.01; at lr × weight_decay = 0.0001 the norm relaxes in 5,000 "
            "steps: about 32,000 more are needed",
        ),
        (
            {"decays": [NONE, SLOW]},
            "|L/R − 1| = 0.7 ≥ 0.01; group 1: at lr × weight_decay = 1e-05 the norm relaxes in "
            "50,000 steps: about 310,000 more are needed",
        ),
        (
            {"decays": [NONE, NONE]},
            "|L/R − 1| = 0.7 ≥ 0.01; no weight decay: the norm of a scale-invariant layer never "
            "stops growing",
        ),
        (
            {"decays": [SLOW, UNKNOWN]},
            "|L/R − 1| = 0.7 ≥ 0.01; the time in which the norm relaxes is not known for this "
            "optimizer",
        ),
        (
            {"reading": NOISY, "remaining": 100},
            "the standard error, 0.02, falls to 0.01 after about 8,000 more steps; at lr × "
            "weight_decay = 1e-05 the norm relaxes in 50,000 steps, more than this run has",
        ),
        (
            {"reading": QUIET},
            "|L/R − 1| = 0.005, with a standard error below 0.01; at lr × weight_decay = 1e-05 the "
            "norm relaxes in 50,000 steps",
        ),
        (
            {"reading": replace(QUIET, stderr=math.nan, margin=math.nan), "decays": [NONE]},
            "|L/R − 1| = 0.005 < 0.01, with too few measurements for an error bar; no weight "
            "decay: the norm of a scale-invariant layer never stops growing",
        ),
        (
            {"reading": replace(QUIET, count=0)},
            "undefined: no step has been seen yet",
        ),
    ],
)
def test_sentences(given, text):
    assert outlook(**given) == text


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"threshold must be a positive number .* got 0"):
        outlook(threshold=0)
    with pytest.raises(ValueError, match=r"remaining must be a number of steps ≥ 0, got -1"):
        outlook(remaining=-1)


# -- of a monitor ------------------------------------------------------------------------------


def test_a_monitor_looks_ahead_from_its_own_reading_and_settings():
    optimizer = groups(torch.optim.SGD, {"weight_decay": 1e-3}, {"weight_decay": 1e-4})
    monitor = eq.Monitor(optimizer, every=4)
    assert monitor.outlook() == "undefined: no step has been seen yet"
    generator = torch.Generator().manual_seed(0)
    params = [group["params"][0] for group in optimizer.param_groups]
    for t in range(400):
        if t == 80:
            monitor.reset()
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    decays = [weight_decay_of(optimizer, group) for group in optimizer.param_groups]
    expected = look_ahead(monitor.reading(), decays, 0.02, since=320, remaining=100)
    assert monitor.outlook(threshold=0.02, remaining=100) == expected
    assert "group 1: at lr × weight_decay = 1e-05 the norm relaxes in 25,000 steps" in expected
