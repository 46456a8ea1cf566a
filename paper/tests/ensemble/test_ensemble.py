"""Compare replicas of an ensemble with the same runs trained alone in plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from paper_support.replicas import (
    BATCH,
    EXAMPLES,
    LRS,
    SEEDS,
    STEPS,
    NaiveSides,
    assert_same_parameters,
    convolutional,
    data,
    ensemble_of,
    perceptron,
    plain_loop,
)
from support.naive import half_running_mean
from torch import nn
from torch.nn.utils import parameters_to_vector

import equilibrate as eq
from equilibrate_paper.ensemble import Averages
from equilibrate_paper.ensemble import batches as batches_module
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
    ensemble = ensemble_of(lr=lrs, weight_decay=0.01, sampling=sampling, ops=ops, **options)
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


def test_observables_equal_naive_copies_at_every_step():
    ensemble = ensemble_of(momentum=0.9, weight_decay=0.02)
    epoch = ensemble.run_epoch()
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        model = perceptron(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.02)
        naive = NaiveSides(optimizer)
        plain_loop(model, seed, optimizer, 1, naive=naive)
        assert epoch.left[:, r].tolist() == pytest.approx(naive.left, rel=1e-4, abs=1e-5)
        assert epoch.right[:, r].tolist() == pytest.approx(naive.right, rel=1e-4)


@pytest.mark.parametrize("algorithm", ["sgd", "adam"])
def test_a_replica_does_not_depend_on_the_others(algorithm):
    """Up to rounding, even if another replica diverges."""
    lrs = (0.05, 1e30, 0.02)
    ensemble = ensemble_of(lr=lrs, algorithm=algorithm)
    alone = [
        ensemble_of([perceptron(s)], seeds=[s], lr=[lr], algorithm=algorithm)
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
    ensemble.schedule(1e9, 0.5, range(3))
    assert ensemble.lr == [0.025, 1e30, 0.01]


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
        drift = (1 - momentum) * (later_norm - norm)[r] / (2 * lr)
        expected = -(drift + momentum * (later_overlap - overlap)[r]) / STEPS
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
    ensemble.reset_averages(range(3))
    assert all(reading.undefined for reading in ensemble.readings())


def test_schedule_lowers_where_a_naive_loop_does():
    """The rule of section 3.3, written out for each replica."""
    ensemble, threshold, factor = ensemble_of(weight_decay=1.0), 0.05, 0.8
    history = []
    for _ in range(12):
        ensemble.run_epoch()
        ensemble.schedule(threshold, factor, range(3))
        history.append(ensemble.lr)
    lowered = 0
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        model = perceptron(seed)
        inputs, targets = data(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=1.0)
        naive = NaiveSides(optimizer)
        for n in range(12):
            for batch in draw(seed, n, EXAMPLES, BATCH, "shuffled"):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[batch]), targets[batch]).backward()
                naive.before()
                optimizer.step()
                naive.after()
            left, right = half_running_mean(naive.left), half_running_mean(naive.right)
            if abs(left / right - 1) < threshold:
                lr *= factor
                optimizer.param_groups[0]["lr"] = lr
                naive = NaiveSides(optimizer)
                lowered += 1
            assert history[n][r] == pytest.approx(lr, rel=1e-12)
    assert lowered > 2  # otherwise nothing was tested


def test_schedule_considers_only_the_given_replicas():
    ensemble = ensemble_of()
    ensemble.run_epoch()
    ensemble.schedule(1e9, 0.5, [2])
    assert ensemble.lr == [0.1, 0.03, 0.1]
    assert [reading.count for reading in ensemble.readings()] == [13, 13, 0]


@pytest.mark.parametrize("chunk", [1, 40, 1000])
@pytest.mark.parametrize(("build", "shape"), [(perceptron, (2, 3)), (convolutional, (2, 4, 4))])
def test_full_gradient_and_evaluation_equal_one_large_batch(build, shape, chunk, monkeypatch):
    monkeypatch.setattr(batches_module, "_CHUNK_ON_CPU", chunk)
    models = [build(seed) for seed in SEEDS]
    ensemble = ensemble_of(models, shape=shape, weight_decay=0.1, momentum=0.9)
    ensemble.run_epoch()
    inputs, targets = data(*shape)
    gradient = ensemble.full_gradient()
    train = ensemble.evaluate()
    test = ensemble.evaluate(ensemble.prepare(inputs[:50]), targets[:50])
    for r in range(3):
        model = ensemble.module(r)
        for found, some in ((train, slice(None)), (test, slice(50))):
            outputs = model(inputs[some])
            loss = F.cross_entropy(outputs, targets[some])
            assert found.loss[r] == pytest.approx(float(loss.detach()), rel=1e-5)
            accuracy = float((outputs.argmax(1) == targets[some]).double().mean())
            assert found.accuracy[r] == pytest.approx(accuracy)
        loss = F.cross_entropy(model(inputs), targets)
        flat = parameters_to_vector(model.parameters())
        expected = torch.autograd.grad(loss + 0.1 / 2 * flat @ flat, list(model.parameters()))
        torch.testing.assert_close(
            gradient[r], torch.cat([g.reshape(-1) for g in expected]), rtol=1e-4, atol=1e-6
        )
        norm = float((flat @ flat).detach())
        assert float(ensemble.norm_square()[r]) == pytest.approx(norm, rel=1e-5)
    squares = gradient.double().square().sum(1)
    assert ensemble.full_gradient_square() == pytest.approx(squares.tolist(), rel=1e-5)


def test_a_convolutional_replica_equals_a_torch_loop():
    """The tolerance is above rounding: a rounding error may change a ReLU or a maximum."""
    models = [convolutional(seed) for seed in SEEDS]
    lrs = [0.02] * 3
    ensemble = ensemble_of(models, shape=(2, 4, 4), momentum=0.9, lr=lrs, weight_decay=0.01)
    for _ in range(4):
        ensemble.run_epoch()
    for r, (seed, model) in enumerate(zip(SEEDS, models, strict=True)):
        before = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
        plain_loop(model, seed, optimizer, 4, shape=(2, 4, 4))
        moved = max(
            float((p - q).detach().abs().max())
            for p, q in zip(model.parameters(), before.parameters(), strict=True)
        )
        assert moved > 0.1
        assert_same_parameters(ensemble.module(r), model, atol=1e-3)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Flatten(), nn.Linear(6, 3), nn.ReLU()],
        [nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)],
        [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)],
    ],
    ids=["ends in ReLU", "tanh", "without padding"],
)
def test_other_networks_raise(layers):
    with pytest.raises(ValueError, match="an ensemble trains convolutions of stride 1"):
        ensemble_of([nn.Sequential(*layers)] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{}, {"momentum": 0.9}, {"algorithm": "amsgrad"}])
@pytest.mark.parametrize(("build", "shape"), [(perceptron, (2, 3)), (convolutional, (2, 4, 4))])
def test_training_with_cuda_graphs_equals_training_on_the_cpu(build, shape, form):
    models = [build(seed) for seed in SEEDS]
    lrs = [0.001] * 3 if "algorithm" in form else LRS
    cpu, cuda = (
        ensemble_of(models, shape=shape, lr=lrs, device=device, weight_decay=0.01, **form)
        for device in ("cpu", "cuda")
    )
    for _ in range(2):
        expected, found = cpu.run_epoch(), cuda.run_epoch()
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.right, expected.right, rtol=1e-2, atol=1e-5)
    cuda.load_state_dict(cpu.state_dict())
    torch.testing.assert_close(
        cuda.full_gradient().cpu(), cpu.full_gradient(), rtol=1e-3, atol=1e-5
    )
    for r in range(3):
        assert_same_parameters(cuda.module(r), cpu.module(r), atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_gradients_in_each_precision_equal_those_of_the_cpu(precision, monkeypatch):
    """Over a packed data set in uneven chunks; 11 bits are a relative error of 5e-4."""
    monkeypatch.setattr(batches_module, "_CHUNK_ON_GPU", 40)
    models = [convolutional(seed) for seed in SEEDS]
    cpu = ensemble_of(models, shape=(2, 4, 4))
    cuda = ensemble_of(models, shape=(2, 4, 4), device="cuda", precision=precision)
    expected, found = cpu.full_gradient(), cuda.full_gradient().cpu()
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < (1e-4 if precision == "fp32" else 2e-2)
    assert cuda.evaluate().loss == pytest.approx(cpu.evaluate().loss, rel=2e-3)
    before = torch.get_float32_matmul_precision()
    cuda.run_epoch()
    assert torch.get_float32_matmul_precision() == before
