"""Replicas of an ensemble against the same runs done alone, in plain torch."""

import copy
import io
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import NaiveSGDSides, half_running_mean
from torch import nn

import equilibrate as eq
from equilibrate.ensemble import Averages, Ensemble
from equilibrate.ensemble import ensemble as implementation
from equilibrate.ensemble.network import Network
from equilibrate.ensemble.sampling import draw

EXAMPLES, BATCH, STEPS = 125, 5, 25
SEEDS = (3, 1, 4)
ONE_HOT = torch.eye(3)
LRS = (0.1, 0.03, 0.2)


def data(*shape, examples=EXAMPLES, classes=3):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(examples, *shape, generator=generator)
    return images, torch.randint(classes, (examples,), generator=generator)


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)
    )


def ensemble_of(models=None, *, shape=(2, 3), lr=LRS, seeds=SEEDS, **options):
    models = [perceptron(s) for s in seeds] if models is None else models
    return Ensemble(models, *data(*shape), seeds=seeds, lr=lr, **{"batch_size": BATCH, **options})


def batches(seed, epochs, sampling="shuffled"):
    return itertools.chain(*(draw(seed, e, EXAMPLES, BATCH, sampling) for e in range(epochs)))


def plain_loop(model, seed, optimizer, epochs, shape=(2, 3), sampling="shuffled", naive=None):
    """What a user would write; returns the losses."""
    images, labels = data(*shape)
    losses = []
    for batch in batches(seed, epochs, sampling):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        if naive:
            naive.before()
        optimizer.step()
        if naive:
            naive.after()
        losses.append(float(loss.detach()))
    return losses


def assert_same_parameters(model, other, atol=2e-5):
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        torch.testing.assert_close(p, q, atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


TORCH_FORMS = {
    "plain": ({}, torch.optim.SGD, {}),
    "momentum": ({"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "adam": ({"algorithm": "adam"}, torch.optim.Adam, {}),
    "amsgrad": ({"algorithm": "amsgrad"}, torch.optim.Adam, {"amsgrad": True}),
}


@pytest.mark.parametrize("sampling", ["shuffled", "independent"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("form", TORCH_FORMS)
def test_replica_equals_a_torch_loop_with_a_monitor(form, together, sampling, monkeypatch):
    """Over the first hundred steps: parameters, losses, readings."""
    options, optimizer_type, torch_options = TORCH_FORMS[form]
    lrs = LRS if optimizer_type is torch.optim.SGD else (0.001, 0.003, 0.002)
    monkeypatch.setattr(implementation, "_TOGETHER", 10**9 if together else 0)
    ensemble = ensemble_of(lr=lrs, weight_decay=0.01, sampling=sampling, **options)
    epochs = [ensemble.run_epoch() for _ in range(4)]
    assert ensemble.step == 100
    for r, (seed, lr) in enumerate(zip(SEEDS, lrs, strict=True)):
        model = perceptron(seed)
        optimizer = optimizer_type(model.parameters(), lr=lr, weight_decay=0.01, **torch_options)
        monitor = eq.Monitor(optimizer)
        losses = plain_loop(model, seed, optimizer, 4, sampling=sampling)
        assert_same_parameters(ensemble.module(r), model)
        assert torch.cat([e.loss[:, r] for e in epochs]).tolist() == pytest.approx(losses, rel=1e-5)
        mine, theirs = ensemble.readings()[r], monitor.reading()
        assert (mine.step, mine.count, mine.lr) == (theirs.step, theirs.count, theirs.lr)
        assert mine.left == pytest.approx(theirs.left, rel=2e-4)  # θ·Δ of Adam cancels
        assert mine.right == pytest.approx(theirs.right, rel=2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_dampening_is_the_papers_also_at_the_first_step(momentum):
    """v′ = μv − (1−ν)g and every column at each step, in literal float64."""
    mu, nu, decay = momentum, 0.4, 0.05
    ensemble = ensemble_of(momentum=mu, dampening=nu, weight_decay=decay)
    epoch = ensemble.run_epoch()
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        model = perceptron(seed).double()
        images, labels = data(2, 3)
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        for t, batch in enumerate(batches(seed, 1)):
            loss = F.cross_entropy(model(images[batch].double()), labels[batch])
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
def test_a_replica_alone_and_among_others_is_the_same(algorithm):
    """Bit for bit or to rounding, also where a neighbour diverges."""
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


def test_a_diverged_replica_is_undefined_and_never_decides():
    ensemble = ensemble_of(lr=(0.05, 1e30, 0.02))
    ensemble.run_epoch()
    ensemble.run_epoch()
    first, lost, last = ensemble.readings()
    assert first.undefined is None
    assert last.undefined is None
    assert "non-finite" in str(lost.undefined)
    decisions = ensemble.schedule(tolerance=1e9, decrease=0.5)
    assert [d.lowered for d in decisions] == [True, False, True]
    assert ensemble.lr == [0.025, 1e30, 0.01]


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(3)))
def test_replicas_permuted_are_results_permuted(order):
    straight = ensemble_of(momentum=0.5)
    permuted = ensemble_of(
        seeds=[SEEDS[i] for i in order], lr=[LRS[i] for i in order], momentum=0.5
    )
    expected = straight.run_epoch().left[:, list(order)]
    torch.testing.assert_close(permuted.run_epoch().left, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_residual_telescopes_for_each_replica(momentum):
    """THEORY: the sum of O_L − O_R is fixed by |θ|² and θ·v at the two ends."""
    ensemble = ensemble_of(momentum=momentum, weight_decay=0.01)
    ensemble.run_epoch()

    def ends():
        flat = ensemble.state_dict()
        theta = flat["parameters"].double()
        pull = flat["memory"].get("pull", torch.zeros_like(theta))  # −v
        return (theta * theta).sum(1), -(theta * pull).sum(1)

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


def test_averages_are_half_running_and_reset_one_by_one():
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
    """With its own tolerance and decrease for each replica."""
    tolerances, decreases = (0.05, 0.3, 0.015), (0.1, 0.5, 0.2)
    ensemble = ensemble_of(weight_decay=1.0)
    history = []
    for _ in range(12):
        ensemble.run_epoch()
        history.append(ensemble.schedule(tolerance=tolerances, decrease=decreases))
    lowered = 0
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        model = perceptron(seed)
        images, labels = data(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=1.0)
        scheduler = eq.FDRScheduler(optimizer, tolerance=tolerances[r], decrease=decreases[r])
        for n in range(12):
            for batch in draw(seed, n, EXAMPLES, BATCH, "shuffled"):
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
            scheduler.step()
            mine = history[n][r]
            assert mine.lowered == scheduler.last_decision.lowered
            assert mine.lr == pytest.approx(scheduler.last_decision.lr, rel=1e-12)
            lowered += mine.lowered
    assert lowered > 2  # else nothing was tested


def test_schedule_judges_only_the_replicas_it_is_told():
    ensemble = ensemble_of()
    ensemble.run_epoch()
    (decision,) = ensemble.schedule(tolerance=1e9, decrease=0.5, replicas=[2])
    assert decision.lowered
    assert ensemble.lr == [0.1, 0.03, 0.1]
    assert [reading.count for reading in ensemble.readings()] == [13, 13, 0]


# Networks: explicit stages against torch.func, and both against plain autograd.


class Residual(nn.Module):
    """No Sequential, and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.outer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(0.3))

    def forward(self, x):
        return self.outer(x.flatten(1) + self.scale * torch.tanh(self.inner(x.flatten(1))))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


def strided():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), nn.AvgPool2d(2, 1), nn.Flatten(), nn.Linear(4, 3)
    )


def nested():
    return nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5)),
        nn.Sequential(nn.Sequential(nn.Linear(5, 4, bias=False)), nn.Linear(4, 3)),
    )


def repeated():
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(6, 3))


def tied():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    model[3].weight = model[1].weight
    return model


def frozen():
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model[1].requires_grad_(False)
    return model


def hooked():
    model = perceptron()
    model[1].register_forward_hook(lambda _, inputs, output: output.sin())
    return model


def over_sequences():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Flatten(), nn.Linear(4, 3))


ARCHITECTURES = {
    "perceptron": (perceptron, (2, 3)),
    "lone layer": (lambda: nn.Linear(6, 3), (6,)),
    "residual": (Residual, (2, 3)),
    "convolutional": (convolutional, (2, 4, 4)),
    "strided": (strided, (2, 5, 5)),
    "nested": (nested, (2, 3)),
    "repeated": (repeated, (2, 3)),
    "tied": (tied, (2, 3)),
    "frozen": (frozen, (2, 3)),
    "hooked": (hooked, (2, 3)),
    "sequences": (over_sequences, (2, 3)),
}


@pytest.mark.parametrize("loss", ["cross_entropy", "another"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_explicit_and_vmapped_gradients_equal_autograd(name, loss):
    build, shape = ARCHITECTURES[name]
    criterion = (
        F.cross_entropy if loss == "cross_entropy" else lambda o, y: F.mse_loss(o, ONE_HOT[y])
    )
    torch.manual_seed(1)
    models = [build() for _ in range(3)]
    for model in models:
        for p in model.parameters():  # distinct, also where a builder seeds itself
            p.data.copy_(torch.randn_like(p) / 2)
    x, y = torch.randn(3, 7, *shape), torch.randint(3, (3, 7))
    named = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    tensors = {n: torch.stack([one[n].detach() for one in named]) for n in named[0]}
    trained = [n for n, p in models[0].named_parameters() if p.requires_grad]
    found = []
    for explicit in (True, False):
        gradients = {n: torch.full_like(tensors[n], torch.nan) for n in trained}
        network = Network(models[0], criterion, tensors, gradients, explicit=explicit)
        with torch.no_grad():
            losses = network.differentiate(x, y)
            torch.testing.assert_close(network.losses(network.outputs(x), y), losses)
        found.append((losses, gradients))
    for r, model in enumerate(models):
        expected = criterion(model(x[r]), y[r])
        parameters = dict(model.named_parameters())
        exact = torch.autograd.grad(expected, [parameters[n] for n in trained])
        for losses, gradients in found:
            torch.testing.assert_close(losses[r], expected.detach())
            for n, g in zip(trained, exact, strict=True):
                torch.testing.assert_close(gradients[n][r], g, rtol=1e-4, atol=1e-6)


def test_a_convolutional_replica_equals_a_torch_loop():
    """A rounding error may flip a ReLU or a maximum, so that more than rounding is allowed."""
    torch.manual_seed(0)
    models = [convolutional() for _ in SEEDS]
    ensemble = ensemble_of(models, shape=(2, 4, 4), momentum=0.9, lr=0.02, weight_decay=0.01)
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


def test_other_losses_and_constants_train_as_in_a_loop():
    torch.manual_seed(2)
    models = [Residual() for _ in SEEDS]
    for r, model in enumerate(models):
        model.scale.fill_(0.1 * r)
        model.outer.bias.requires_grad_(False)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    ensemble = ensemble_of(models, loss=criterion)
    ensemble.run_epoch()
    images, labels = data(2, 3)
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        optimizer = torch.optim.SGD([p for p in models[r].parameters() if p.requires_grad], lr=lr)
        for batch in batches(seed, 1):
            optimizer.zero_grad()
            criterion(models[r](images[batch]), labels[batch]).backward()
            optimizer.step()
        assert_same_parameters(ensemble.module(r), models[r])
        assert float(ensemble.module(r).scale) == pytest.approx(0.1 * r)


def test_a_regression_has_no_accuracy():
    torch.manual_seed(3)
    models = [nn.Sequential(nn.Flatten(), nn.Linear(6, 1)) for _ in SEEDS]
    images, _ = data(2, 3)
    targets = images.flatten(1).sum(1, keepdim=True)
    ensemble = Ensemble(
        models, images, targets, seeds=SEEDS, lr=0.1, batch_size=BATCH, loss=F.mse_loss
    )
    for _ in range(10):
        ensemble.run_epoch()
    found = ensemble.evaluate(images, targets)
    assert max(found.loss) < 1e-3  # a linear task is learnt
    assert all(np.isnan(found.accuracy))


def test_bytes_are_taken_as_classes():
    images, labels = data(2, 3)
    models = [perceptron()]
    ensemble = Ensemble(models, images, labels.byte(), seeds=[0], lr=0.1, batch_size=BATCH)
    ensemble.run_epoch()
    assert ensemble.evaluate(images, labels.byte()) == ensemble.evaluate(images, labels)


# Full-batch quantities.


@pytest.mark.parametrize("chunk", [1, 40, 1000])
def test_full_gradient_and_evaluation_equal_one_big_batch(chunk):
    ensemble = ensemble_of(weight_decay=0.1, momentum=0.9)
    ensemble.run_epoch()
    images, labels = data(2, 3)
    gradient = ensemble.full_gradient(chunk=chunk)
    plain, whole = (ensemble.evaluate(images, labels, chunk=chunk, regularized=x) for x in (0, 1))
    for r in range(3):
        model = ensemble.module(r)
        loss = F.cross_entropy(model(images), labels)
        flat = torch.cat([p.reshape(-1) for p in model.parameters()])
        regularized = loss + 0.1 / 2 * flat @ flat
        expected = torch.autograd.grad(regularized, list(model.parameters()))
        torch.testing.assert_close(
            gradient[r], torch.cat([g.reshape(-1) for g in expected]), rtol=1e-4, atol=1e-6
        )
        assert plain.loss[r] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert whole.loss[r] == pytest.approx(float(regularized.detach()), rel=1e-5)
        accuracy = float((model(images).argmax(1) == labels).double().mean())
        assert plain.accuracy[r] == whole.accuracy[r] == pytest.approx(accuracy)
    squares = gradient.double().square().sum(1)
    assert ensemble.full_gradient_square(chunk=chunk) == pytest.approx(squares.tolist(), rel=1e-5)


def test_a_full_batch_does_not_disturb_training():
    one, other = ensemble_of(momentum=0.9), ensemble_of(momentum=0.9)
    for _ in range(2):
        one.run_epoch()
        other.run_epoch()
        other.full_gradient_square()
        other.evaluate(*data(2, 3))
    assert torch.equal(one.state_dict()["parameters"], other.state_dict()["parameters"])


# State.


FORMS = [
    {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    {"algorithm": "amsgrad", "lr": 0.001},
    {"sampling": "independent"},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_run_goes_on_bit_for_bit(form):
    whole = ensemble_of(**form)
    for n in range(4):
        whole.run_epoch()
        if n == 0:
            whole.reset_averages([2])
            whole.lr = [0.02, 0.01, 0.03]
    part = ensemble_of(**form)
    part.run_epoch()
    part.reset_averages([2])
    part.lr = [0.02, 0.01, 0.03]
    part.run_epoch()
    state = part.state_dict()
    part.run_epoch()  # the state is a copy
    file = io.BytesIO()
    torch.save(state, file)
    resumed = ensemble_of([perceptron(9)] * 3, **form)
    resumed.run_epoch()
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    resumed.run_epoch()
    resumed.run_epoch()
    assert resumed.epoch == 4
    assert repr(resumed.readings()) == repr(whole.readings())
    assert resumed.averages() == whole.averages()
    assert_equal_states(resumed.state_dict(), whole.state_dict())


def assert_equal_states(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal_states(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seeds": (3, 1, 5)}, "seeds"),
        ({"batch_size": 25}, "batch_size"),
        ({"sampling": "independent"}, "sampling"),
        ({"momentum": 0.5}, "momentum"),
        ({"weight_decay": 0.5}, "weight_decay"),
        ({"algorithm": "adam"}, "algorithm"),
    ],
)
def test_the_state_of_another_ensemble_is_refused(change, name):
    with pytest.raises(ValueError, match=f"belongs to another ensemble: its {name} is"):
        ensemble_of(**change).load_state_dict(ensemble_of().state_dict())


def test_modules_and_parameters_are_those_of_the_replicas():
    models = [perceptron(s) for s in SEEDS]
    ensemble = ensemble_of(models)
    for r, model in enumerate(models):
        assert_same_parameters(ensemble.module(r), model, atol=0)
    copied = ensemble.module(0)
    ensemble.parameters["1.weight"][0] = 7.0
    assert (ensemble.module(0)[1].weight == 7).all()
    assert_same_parameters(copied, models[0], atol=0)


def test_learning_rates_and_velocity_can_be_set():
    ensemble = ensemble_of(momentum=0.9)
    ensemble.run_epoch()
    ensemble.lr = 0.5
    ensemble.lr[0] = 0.7  # a copy: what is not set is not changed
    assert [reading.lr for reading in ensemble.readings()] == list(LRS)  # of the last step
    assert ensemble.lr == [0.5] * 3
    ensemble.zero_velocity()
    assert ensemble.run_epoch().velocity_gradient[0].tolist() == [0.0] * 3
    assert ensemble.run_epoch().velocity_gradient[0].abs().min() > 0


def test_the_global_random_state_is_left_alone():
    ensemble = ensemble_of()
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    ensemble.run_epoch()
    ensemble.full_gradient()
    drawn = torch.rand(2), np.random.rand(2)  # noqa: NPY002
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert torch.equal(drawn[0], torch.rand(2))
    assert (drawn[1] == np.random.rand(2)).all()  # noqa: NPY002


def test_epoch_says_what_it_holds():
    epoch = ensemble_of().run_epoch()
    assert epoch.lr == LRS
    assert epoch.last_loss == epoch.loss[-1].tolist()
    assert epoch.mean_loss == pytest.approx(epoch.loss.mean(0).tolist())
    assert repr(epoch).startswith("Epoch(epoch=1, step=25, mean_loss=[")


# Sampling.


@given(st.integers(1, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_every_batch_holds_different_examples(examples, picked):
    size = picked.draw(st.integers(1, examples))
    for sampling in ("shuffled", "independent"):
        drawn = draw(7, 0, examples, size, sampling)
        assert drawn.shape == (examples // size, size)
        assert drawn.min() >= 0
        assert drawn.max() < examples
        assert all(len(set(batch)) == size for batch in drawn.tolist())
        if sampling == "shuffled":
            assert len(set(drawn.ravel().tolist())) == drawn.size


def test_orders_depend_on_seed_and_epoch_alone():
    orders = [
        draw(s, e, 50, 5, kind)
        for s in (0, 1)
        for e in (0, 1)
        for kind in ("shuffled", "independent")
    ]
    assert len({order.tobytes() for order in orders}) == len(orders)
    np.testing.assert_array_equal(draw(1, 1, 50, 5, "shuffled"), orders[-2])


def test_independent_batches_are_uniform_subsets():
    """χ² of all 10 subsets of 2 in 5 over 2000 draws: 9 degrees, false alarms 1 in 1000."""
    drawn = np.concatenate([draw(0, e, 5, 2, "independent") for e in range(1000)])
    counts = np.zeros((5, 5))
    np.add.at(counts, (drawn.min(1), drawn.max(1)), 1)
    counts = counts[np.triu_indices(5, 1)]
    assert ((counts - 200) ** 2 / 200).sum() < 27.88
    second = np.concatenate([draw(0, e, 5, 2, "independent")[1] for e in range(1000)])
    first = np.concatenate([draw(0, e, 5, 2, "independent")[0] for e in range(1000)])
    assert np.mean(
        [a in b for a, b in zip(first, second.reshape(-1, 2).repeat(2, 0), strict=True)]
    ) == pytest.approx(0.4, abs=0.05)


# Refusals.


def batch_normalised():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 3))


def attending():
    return nn.Sequential(nn.Flatten(), nn.MultiheadAttention(6, 2, dropout=0.1))


def normalising_instances():
    return nn.Sequential(
        nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 3)
    )


def other_activation():
    model = perceptron()
    model[2] = nn.Tanh()
    return model


REFUSED = {
    "empty": ({"models": []}, ValueError, "models is empty"),
    "structure": (
        {"models": [perceptron(), perceptron(), nn.Sequential(nn.Flatten(), nn.Linear(6, 3))]},
        ValueError,
        r"models\[2\] has another structure than models\[0\]",
    ),
    "activation": (
        {"models": [perceptron(), other_activation(), perceptron()]},
        ValueError,
        r"models\[1\] has another structure",
    ),
    "mode": (
        {"models": [dropping().eval(), dropping().eval(), dropping()]},
        ValueError,
        r"models\[2\] has another structure",
    ),
    "dtype": ({"models": [perceptron().double()] * 3}, TypeError, "call model.float"),
    "all frozen": (
        {"models": [perceptron().requires_grad_(False)] * 3},
        ValueError,
        "no parameter that requires a gradient",
    ),
    "batch norm": ({"models": [batch_normalised()] * 3}, ValueError, "'2' .BatchNorm1d. makes"),
    "instance norm": (
        {"models": [normalising_instances()] * 3},
        ValueError,
        "'0' .InstanceNorm1d. makes",
    ),
    "dropout": ({"models": [dropping()] * 3}, ValueError, "'1' .Dropout. is random"),
    "attention": ({"models": [attending()] * 3}, ValueError, "MultiheadAttention. is random"),
    "lr": ({"lr": 0.0}, ValueError, "lr must be positive and finite, got 0.0"),
    "nan lr": ({"lr": [0.1, float("nan"), 0.1]}, ValueError, "lr must be positive"),
    "lrs": ({"lr": [0.1, 0.2]}, ValueError, "lr must be one number, or one for each of the 3"),
    "seeds": ({"seeds": [1, 2]}, ValueError, "one number ≥ 0 for each of the 3 models"),
    "negative seed": ({"seeds": [1, 2, -3]}, ValueError, "one number ≥ 0 for each of the 3 models"),
    "batch": ({"batch_size": 126}, ValueError, "between 1 and the 125 examples, got 126"),
    "double images": ({"images": torch.zeros(125, 6).double()}, TypeError, "call images.float"),
    "ignored": ({"labels": torch.full((125,), -100)}, ValueError, "classes from 0 on, got -100"),
    "fewer labels": (
        {"labels": torch.zeros(124, dtype=torch.int64)},
        ValueError,
        "images and labels differ in number: 125 and 124",
    ),
    "sampling": ({"sampling": "random"}, ValueError, 'sampling must be "shuffled" or "independ'),
    "algorithm": ({"algorithm": "lion"}, ValueError, 'algorithm must be "sgd", "adam" or "ams'),
    "momentum": ({"momentum": 1.0}, ValueError, r"momentum must lie in \[0, 1\), got 1"),
    "dampening": ({"dampening": 1.0}, ValueError, "dampening must be below 1, got 1"),
    "adam": ({"algorithm": "adam", "momentum": 0.9}, ValueError, "takes no momentum"),
    "decay": ({"weight_decay": -0.1}, ValueError, "weight_decay must be at least 0, got -0.1"),
    "device": ({"device": "meta"}, ValueError, 'device must be "cpu" or "cuda", got .meta'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, error, message = REFUSED[case]
    given = {"models": [perceptron()] * 3, "seeds": SEEDS, "lr": 0.1, "batch_size": BATCH}
    given.update(options)
    images, labels = data(2, 3)
    with pytest.raises(error, match=message):
        Ensemble(**{"images": images, "labels": labels, **given})


def test_refused_later():
    with pytest.raises(ValueError, match="algorithm='adam' has no velocity"):
        ensemble_of(algorithm="adam").zero_velocity()
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        ensemble_of().full_gradient(chunk=0)
    with pytest.raises(ValueError, match="decrease must lie between 0 and 1"):
        ensemble_of().schedule(decrease=1.0)
    with pytest.raises(ValueError, match="tolerance must be one number, or one for each of the 3"):
        ensemble_of().schedule(tolerance=[0.1])


@pytest.mark.parametrize("build", [batch_normalised, dropping])
def test_fixed_by_eval_they_are_taken(build):
    models = [build().eval() for _ in SEEDS]
    ensemble = ensemble_of(models)
    ensemble.run_epoch()
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        plain_loop(models[r], seed, torch.optim.SGD(models[r].parameters(), lr=lr), 1)
        assert_same_parameters(ensemble.module(r), models[r])


def test_leftover_examples_are_left_out_of_an_epoch():
    ensemble = ensemble_of(batch_size=60)
    assert ensemble.steps_per_epoch == 2
    assert ensemble.run_epoch().loss.shape == (2, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", [{}, {"momentum": 0.9}, {"algorithm": "amsgrad", "lr": 0.001}])
@pytest.mark.parametrize("name", ["perceptron", "convolutional", "residual"])
def test_cuda_graphs_train_as_the_cpu_does(name, form):
    build, shape = ARCHITECTURES[name]
    torch.manual_seed(0)
    models = [build() for _ in SEEDS]
    cpu, cuda = (
        ensemble_of(models, shape=shape, device=device, weight_decay=0.01, **form)
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
