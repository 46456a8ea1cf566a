"""Compare replicas of an ensemble with the same runs trained alone in plain torch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_support.replicas import (
    BATCH,
    EXAMPLES,
    LRS,
    SEEDS,
    STEPS,
    assert_same_parameters,
    batches,
    data,
    ensemble_of,
    perceptron,
    plain_loop,
)
from support.naive import NaiveSGDSides, half_running_mean
from torch import nn

import equilibrate as eq
from equilibrate_paper.ensemble import Averages, Ensemble
from equilibrate_paper.ensemble._ops.plain import PlainOps
from equilibrate_paper.ensemble.sampling import draw

TORCH_FORMS = {
    "plain": ({}, torch.optim.SGD, {}),
    "momentum": ({"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "adam": ({"algorithm": "adam"}, torch.optim.Adam, {}),
    "amsgrad": ({"algorithm": "amsgrad"}, torch.optim.Adam, {"amsgrad": True}),
}


@pytest.mark.parametrize("sampling", ["shuffled", "independent"])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("form", TORCH_FORMS)
def test_a_replica_equals_a_torch_loop_with_a_monitor(form, joint, sampling):
    """Over the first hundred steps: parameters, losses, readings."""
    options, optimizer_type, torch_options = TORCH_FORMS[form]
    lrs = LRS if optimizer_type is torch.optim.SGD else (0.001, 0.003, 0.002)
    ops = PlainOps(joint_update_size=10**9 if joint else 0)
    ensemble = ensemble_of(lr=lrs, weight_decay=0.01, sampling=sampling, _ops=ops, **options)
    epochs = [ensemble.run_epoch() for _ in range(4)]
    assert ensemble.step == 100
    for r, (seed, lr) in enumerate(zip(SEEDS, lrs, strict=True)):
        model = perceptron(seed)
        optimizer = optimizer_type(model.parameters(), lr=lr, weight_decay=0.01, **torch_options)
        monitor = eq.Monitor(optimizer, every=1)
        losses = plain_loop(model, seed, optimizer, 4, sampling=sampling)
        assert_same_parameters(ensemble.module(r), model)
        assert torch.cat([e.loss[:, r] for e in epochs]).tolist() == pytest.approx(losses, rel=1e-5)
        mine, theirs = ensemble.readings()[r], monitor.reading()
        assert (mine.step, mine.count, mine.lr) == (theirs.step, theirs.count, theirs.lr)
        assert mine.left == pytest.approx(theirs.left, rel=2e-4)  # θ·Δ of Adam cancels
        assert mine.right == pytest.approx(theirs.right, rel=2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_dampening_applies_at_the_first_step_as_in_the_paper(momentum):
    """v′ = μv − (1−ν)g and every column at each step, written out in float64."""
    mu, nu, decay = momentum, 0.4, 0.05
    ensemble = ensemble_of(momentum=mu, dampening=nu, weight_decay=decay)
    epoch = ensemble.run_epoch()
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        model = perceptron(seed).double()
        inputs, targets = data(2, 3)
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        for t, batch in enumerate(batches(seed, 1)):
            loss = F.cross_entropy(model(inputs[batch].double()), targets[batch])
            gradient = torch.autograd.grad(loss, list(model.parameters()))
            left = right = work = 0.0
            with torch.no_grad():
                for p, g, v in zip(model.parameters(), gradient, velocity, strict=True):
                    g = g + decay * p
                    left += float((p * g).sum())
                    work += float((v * g).sum()) if mu else 0.0
                    v.mul_(mu).sub_((1 - nu) * g)
                    right += float((1 + mu) / (2 * (1 - nu)) * lr * (v * v).sum())
                    p.add_(lr * v)
            row = [c[t, r] for c in (epoch.left, epoch.right, epoch.loss, epoch.velocity_gradient)]
            expected = [left, right, loss.detach(), work]
            assert [float(x) for x in row] == pytest.approx(
                [float(x) for x in expected], 1e-4, 1e-6
            )
        assert_same_parameters(ensemble.module(r).double(), model)


def test_observables_equal_naive_copies_at_every_step():
    ensemble = ensemble_of(momentum=0.9, weight_decay=0.02)
    epoch = ensemble.run_epoch()
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        model = perceptron(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.02)
        naive = NaiveSGDSides(optimizer)
        plain_loop(model, seed, optimizer, 1, naive=naive)
        assert epoch.left[:, r].tolist() == pytest.approx(naive.left, rel=1e-4, abs=1e-5)
        assert epoch.right[:, r].tolist() == pytest.approx(naive.right, rel=1e-4)


@pytest.mark.parametrize("algorithm", ["sgd", "adam"])
def test_a_replica_does_not_depend_on_the_others(algorithm):
    """Up to rounding, even if another replica diverges."""
    lrs = (0.05, 1e30, 0.02)
    ensemble = ensemble_of(lr=lrs, algorithm=algorithm)
    alone = [
        ensemble_of([perceptron(s)], seeds=[s], lr=lr, algorithm=algorithm)
        for s, lr in zip(SEEDS, lrs, strict=True)
    ]
    for _ in range(4):
        together = ensemble.run_epoch()
        for r, single in enumerate(alone):
            one = single.run_epoch()
            if r != 1:
                torch.testing.assert_close(
                    together.left[:, r], one.left[:, 0], rtol=1e-4, atol=1e-5
                )
    for r in (0, 2):
        assert_same_parameters(ensemble.module(r), alone[r].module(0))


def test_the_learning_rate_of_a_diverged_replica_is_not_lowered():
    ensemble = ensemble_of(lr=(0.05, 1e30, 0.02))
    ensemble.run_epoch()
    ensemble.run_epoch()
    first, diverged, last = ensemble.readings()
    assert first.undefined is None
    assert last.undefined is None
    assert "non-finite" in str(diverged.undefined)
    decisions = ensemble.schedule(threshold=1e9, factor=0.5)
    assert [d.lowered for d in decisions] == [True, False, True]
    assert ensemble.lr == [0.025, 1e30, 0.01]


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(3)))
def test_permuting_replicas_permutes_results(order):
    straight = ensemble_of(momentum=0.5)
    permuted = ensemble_of(
        seeds=[SEEDS[i] for i in order], lr=[LRS[i] for i in order], momentum=0.5
    )
    expected = straight.run_epoch().left[:, list(order)]
    torch.testing.assert_close(permuted.run_epoch().left, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_residual_telescopes_for_each_replica(momentum):
    """The sum of O_L − O_R depends only on |θ|² and θ·v at the start and at the end."""
    ensemble = ensemble_of(momentum=momentum, weight_decay=0.01)
    ensemble.run_epoch()

    def ends():
        flat = ensemble.state_dict()
        theta = flat["parameters"].double()
        buffer = flat["rule_state"].get("momentum_buffer", torch.zeros_like(theta))  # −v
        return (theta * theta).sum(1), -(theta * buffer).sum(1)

    norm, overlap = ends()
    epoch = ensemble.run_epoch()
    later_norm, later_overlap = ends()
    for r, lr in enumerate(LRS):
        expected = eq.relations.telescoped_residual(
            (norm[r], later_norm[r]),
            (overlap[r], later_overlap[r]),
            STEPS,
            lr=lr,
            momentum=momentum,
        )
        assert float((epoch.left - epoch.right).mean(0)[r]) == pytest.approx(float(expected), 1e-3)


def test_averages_are_half_running_and_reset_separately():
    ensemble = ensemble_of(momentum=0.9)
    columns = [[[] for _ in Averages._fields] for _ in SEEDS]
    for n in range(5):
        epoch = ensemble.run_epoch()
        for r, history in enumerate(columns):
            for values, name in zip(history, Averages._fields, strict=True):
                values += getattr(epoch, name)[:, r].tolist()
        for r, average in enumerate(ensemble.averages()):
            assert list(average) == pytest.approx([half_running_mean(v) for v in columns[r]])
        if n == 2:
            ensemble.reset_averages([1])
            columns[1] = [[] for _ in Averages._fields]
    assert [reading.count for reading in ensemble.readings()] == [63, 25, 63]
    ensemble.reset_averages()
    assert all(reading.undefined for reading in ensemble.readings())


def test_schedule_decides_as_the_scheduler_of_a_loop():
    """With a threshold and a factor for each replica."""
    thresholds, factors = (0.05, 0.3, 0.015), (0.9, 0.5, 0.8)
    ensemble = ensemble_of(weight_decay=1.0)
    history = []
    for _ in range(12):
        ensemble.run_epoch()
        history.append(ensemble.schedule(threshold=thresholds, factor=factors))
    lowered = 0
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        model = perceptron(seed)
        inputs, targets = data(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=1.0)
        scheduler = eq.FDRScheduler(
            optimizer, threshold=thresholds[r], factor=factors[r], every=1, min_steps=1
        )
        for n in range(12):
            for batch in draw(seed, n, EXAMPLES, BATCH, "shuffled"):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()
            scheduler.step()
            mine = history[n][r]
            assert mine.lowered == scheduler.last_decision.lowered
            assert mine.lr == pytest.approx(scheduler.last_decision.lr, rel=1e-12)
            lowered += mine.lowered
    assert lowered > 2  # otherwise nothing was tested


def test_schedule_considers_only_the_given_replicas():
    ensemble = ensemble_of()
    ensemble.run_epoch()
    (decision,) = ensemble.schedule(threshold=1e9, factor=0.5, replicas=[2])
    assert decision.lowered
    assert ensemble.lr == [0.1, 0.03, 0.1]
    assert [reading.count for reading in ensemble.readings()] == [13, 13, 0]


@pytest.mark.parametrize("chunk_size", [1, 40, 1000])
def test_full_gradient_and_evaluation_equal_one_large_batch(chunk_size):
    ensemble = ensemble_of(weight_decay=0.1, momentum=0.9)
    ensemble.run_epoch()
    inputs, targets = data(2, 3)
    gradient = ensemble.full_gradient(chunk_size=chunk_size)
    plain, whole = (
        ensemble.evaluate(inputs, targets, chunk_size=chunk_size, regularized=x) for x in (0, 1)
    )
    for r in range(3):
        model = ensemble.module(r)
        loss = F.cross_entropy(model(inputs), targets)
        flat = torch.cat([p.reshape(-1) for p in model.parameters()])
        regularized = loss + 0.1 / 2 * flat @ flat
        expected = torch.autograd.grad(regularized, list(model.parameters()))
        torch.testing.assert_close(
            gradient[r], torch.cat([g.reshape(-1) for g in expected]), rtol=1e-4, atol=1e-6
        )
        assert plain.loss[r] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert whole.loss[r] == pytest.approx(float(regularized.detach()), rel=1e-5)
        accuracy = float((model(inputs).argmax(1) == targets).double().mean())
        assert plain.accuracy[r] == whole.accuracy[r] == pytest.approx(accuracy)
    squares = gradient.double().square().sum(1)
    assert ensemble.full_gradient_square(chunk_size=chunk_size) == pytest.approx(
        squares.tolist(), rel=1e-5
    )


def test_a_full_gradient_does_not_change_training():
    one, other = ensemble_of(momentum=0.9), ensemble_of(momentum=0.9)
    for _ in range(2):
        one.run_epoch()
        other.run_epoch()
        other.full_gradient_square()
        other.evaluate(*data(2, 3))
    assert torch.equal(one.state_dict()["parameters"], other.state_dict()["parameters"])


@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.8, 0.3)])
def test_fdr2_holds_on_a_quadratic(momentum, dampening):
    """(1−ν)⟨(∇f)²⟩ − μ⟨v·∇f^B⟩ = (η/2)⟨v′ᵀHv′⟩ over 64 replicas; false alarms 1 in 15,000 (4σ).

    Inputs are whitened, so that H = 2·1 and the right side is 2(1−ν)/(1+μ) ⟨O_R⟩. Batches are
    independent: shuffled ones bias both terms on the left.
    """
    replicas, lr = 64, 0.05
    generator = torch.Generator().manual_seed(0)
    inputs = torch.linalg.qr(torch.randn(40, 3, generator=generator)).Q * 40**0.5
    targets = torch.randn(40, 1, generator=generator)
    ensemble = Ensemble(
        [nn.Linear(3, 1, bias=False) for _ in range(replicas)],
        F.mse_loss,
        (inputs, targets),
        seeds=range(replicas),
        lr=lr,
        batch_size=4,
        momentum=momentum,
        dampening=dampening,
        sampling="independent",
    )
    for _ in range(20):
        ensemble.run_epoch()
    gap = torch.zeros(replicas, dtype=torch.float64)
    size = 0.0
    for _ in range(100):
        epoch = ensemble.run_epoch()
        square = torch.tensor(ensemble.full_gradient_square(), dtype=torch.float64)
        work, right = epoch.velocity_gradient.mean(0), epoch.right.mean(0)
        gap += (1 - dampening) * square - momentum * work
        gap -= 2 * (1 - dampening) / (1 + momentum) * right
        size += float(2 * (1 - dampening) / (1 + momentum) * right.mean())
    error = float(gap.std()) / replicas**0.5
    assert abs(float(gap.mean())) < 4 * error
    assert error < 0.05 * size  # small enough to detect a violation
