"""Compare networks of many replicas with plain autograd, on the CPU and on a GPU."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paper_support.replicas import (
    BATCH,
    LRS,
    ONE_HOT,
    SEEDS,
    assert_same_parameters,
    batches,
    data,
    ensemble_of,
    perceptron,
    plain_loop,
)
from torch import nn

from equilibrate_paper.ensemble import Ensemble
from equilibrate_paper.ensemble._ops.plain import PlainOps
from equilibrate_paper.ensemble.network import Network


class Residual(nn.Module):
    """A module that is not a Sequential, with a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.outer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(0.3))

    def forward(self, x):
        return self.outer(x.flatten(1) + self.scale * torch.tanh(self.inner(x.flatten(1))))


class PartlyUnused(nn.Module):
    """A parameter that the outputs do not depend on."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x.flatten(1))


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
    "partly unused": (PartlyUnused, (2, 3)),
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
        for p in model.parameters():  # distinct, even if a builder sets the seed
            p.data.copy_(torch.randn_like(p) / 2)
    x, y = torch.randn(3, 7, *shape), torch.randint(3, (3, 7))
    named = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    tensors = {n: torch.stack([one[n].detach() for one in named]) for n in named[0]}
    trained = [n for n, p in models[0].named_parameters() if p.requires_grad]
    found = []
    for explicit in (True, False):
        gradients = {n: torch.full_like(tensors[n], torch.nan) for n in trained}
        network = Network(
            models[0], criterion, tensors, gradients, ops=PlainOps(), explicit=explicit
        )
        with torch.no_grad():
            losses = network.differentiate(x, y)
            torch.testing.assert_close(network.losses(network.outputs(x), y), losses)
        found.append((losses, gradients))
    for r, model in enumerate(models):
        expected = criterion(model(x[r]), y[r])
        parameters = dict(model.named_parameters())
        exact = torch.autograd.grad(
            expected, [parameters[n] for n in trained], materialize_grads=True
        )
        for losses, gradients in found:
            torch.testing.assert_close(losses[r], expected.detach())
            for n, g in zip(trained, exact, strict=True):
                torch.testing.assert_close(gradients[n][r], g, rtol=1e-4, atol=1e-6)


def test_a_convolutional_replica_equals_a_torch_loop():
    """The tolerance is above rounding: a rounding error may change a ReLU or a maximum."""
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


def test_training_with_another_loss_and_constants_equals_a_torch_loop():
    torch.manual_seed(2)
    models = [Residual() for _ in SEEDS]
    for r, model in enumerate(models):
        model.scale.fill_(0.1 * r)
        model.outer.bias.requires_grad_(False)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    ensemble = ensemble_of(models, criterion)
    ensemble.run_epoch()
    inputs, targets = data(2, 3)
    for r, (seed, lr) in enumerate(zip(SEEDS, LRS, strict=True)):
        optimizer = torch.optim.SGD([p for p in models[r].parameters() if p.requires_grad], lr=lr)
        for batch in batches(seed, 1):
            optimizer.zero_grad()
            criterion(models[r](inputs[batch]), targets[batch]).backward()
            optimizer.step()
        assert_same_parameters(ensemble.module(r), models[r])
        assert float(ensemble.module(r).scale) == pytest.approx(0.1 * r)


def test_the_accuracy_of_a_regression_is_nan():
    torch.manual_seed(3)
    models = [nn.Sequential(nn.Flatten(), nn.Linear(6, 1)) for _ in SEEDS]
    inputs, _ = data(2, 3)
    targets = inputs.flatten(1).sum(1, keepdim=True)
    ensemble = Ensemble(
        models, F.mse_loss, (inputs, targets), seeds=SEEDS, lr=0.1, batch_size=BATCH
    )
    for _ in range(10):
        ensemble.run_epoch()
    found = ensemble.evaluate(inputs, targets)
    assert max(found.loss) < 1e-3  # the task is linear
    assert all(np.isnan(found.accuracy))


def test_classes_may_be_bytes():
    inputs, targets = data(2, 3)
    byte_data = inputs, targets.byte()
    ensemble = Ensemble(
        [perceptron()], F.cross_entropy, byte_data, seeds=[0], lr=0.1, batch_size=BATCH
    )
    ensemble.run_epoch()
    assert ensemble.evaluate(*byte_data) == ensemble.evaluate(inputs, targets)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{}, {"momentum": 0.9}, {"algorithm": "amsgrad", "lr": 0.001}])
@pytest.mark.parametrize("name", ["perceptron", "convolutional", "residual"])
def test_training_with_cuda_graphs_equals_training_on_the_cpu(name, form):
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


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_gradients_in_each_precision_equal_those_of_the_cpu(precision):
    """Over a packed data set in uneven chunks; 11 bits are a relative error of 5e-4."""
    torch.manual_seed(0)
    models = [convolutional() for _ in SEEDS]
    cpu = ensemble_of(models, shape=(2, 4, 4))
    cuda = ensemble_of(models, shape=(2, 4, 4), device="cuda", precision=precision)
    expected, found = cpu.full_gradient(), cuda.full_gradient(chunk_size=40).cpu()
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < (1e-4 if precision == "fp32" else 2e-2)
    inputs, targets = data(2, 4, 4)
    assert cuda.evaluate(inputs, targets).loss == pytest.approx(
        cpu.evaluate(inputs, targets).loss, rel=2e-3
    )
