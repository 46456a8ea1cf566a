"""The fused step against its plain twin: on the CPU in Triton's interpreter, on the GPU as is."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from support.device import DEVICE, ON_GPU
from support.replicas import SEEDS, data, perceptron
from torch import nn

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from equilibrate.ensemble import Ensemble, stages
from equilibrate.ensemble import _ops as kernels
from equilibrate.ensemble import ensemble as implementation
from equilibrate.ensemble._ops import step as fused
from equilibrate.ensemble.batches import Batches
from equilibrate.ensemble.updates import SGD, Adam, Flat, update, zeros


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def padded(*shape):
    """Rows apart, as those of the flat tensors are."""
    return torch.full((shape[0], 16 + shape[1]), torch.nan, device=DEVICE)[:, : shape[1]]


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(
    ("shape", "label"), [((3,), ()), ((2, 4, 5), ()), ((1,), (3,))], ids=["row", "image", "targets"]
)
def test_batches_are_those_of_the_plain_way(shape, label, gathers):
    images, labels = normal(10, *shape), torch.arange(10, device=DEVICE)
    if label:
        labels = normal(10, *label)
    order = torch.stack([torch.randperm(10)[:6].reshape(3, 2) for _ in range(4)], 1)
    plain, kernel = (
        Batches(images, labels, (3, 4, 2), gathers=gathers, fused=x) for x in (False, True)
    )
    for _ in range(2):
        for batches in (plain, kernel):
            batches.start(batches.staged(order))
        for _ in range(3):
            (x, y), (fused_x, fused_y) = plain.take(), kernel.take()
            if gathers:
                x, fused_x = x.gathered(), fused_x.gathered()
            assert torch.equal(x, fused_x)
            assert torch.equal(y, fused_y)
            plain.counts.add_(1)
            kernel.counts.add_(1)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 130, 33)])
def test_bias_and_relu(shape, relu):
    y, grad = normal(*shape), normal(*shape)
    bias = padded(shape[0], shape[2]).copy_(normal(shape[0], shape[2]))
    expected = y + bias[:, None]
    expected = F.relu(expected) if relu else expected
    fused.add_bias(y, bias, relu=relu)
    assert torch.equal(y, expected)
    masked = torch.where(y > 0, grad, 0) if relu else grad.clone()
    into = padded(shape[0], shape[2])
    fused.bias_gradient(grad, y if relu else None, into)
    assert torch.equal(grad, masked)
    torch.testing.assert_close(into, masked.double().sum(1).float(), rtol=1e-5, atol=1e-5)


def test_relu_hands_a_nan_on_as_torch_does():
    y = torch.tensor([[[1.0, torch.nan, -1.0]]], device=DEVICE)
    fused.add_bias(y, torch.zeros(1, 3, device=DEVICE), relu=True)
    assert y[0, 0, 0] == 1
    assert y[0, 0, 1].isnan()
    grad = torch.ones_like(y)
    fused.bias_gradient(grad, y, torch.empty(1, 3, device=DEVICE))
    assert grad[0, 0].tolist() == [1, 1, 0]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 130, 10), (1, 2, 3000), (2, 4, 1)])
def test_cross_entropy_and_its_gradients(shape, biased):
    replicas, rows, classes = shape
    outputs = 10 * normal(*shape)
    labels = torch.randint(classes, (replicas, rows), device=DEVICE)
    bias = padded(replicas, classes).copy_(normal(replicas, classes)) if biased else None
    into = padded(replicas, classes) if biased else None
    losses, grad = fused.cross_entropy(outputs, labels, bias, into)
    exact = outputs.double() + (bias.double()[:, None] if biased else 0)
    exact.requires_grad_()
    expected = F.cross_entropy(exact.movedim(-1, 1), labels, reduction="none").mean(1)
    (exact_grad,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-4, atol=1e-7)
    if biased:
        torch.testing.assert_close(into.double(), exact_grad.sum(1), rtol=1e-4, atol=1e-6)


def test_cross_entropy_of_a_lost_replica_is_no_number():
    outputs = normal(2, 3, 4)
    outputs[1, 0, 2] = torch.nan
    labels = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    losses, grad = fused.cross_entropy(outputs, labels)
    assert losses.isnan().tolist() == [False, True]
    assert grad.isnan().any(-1).tolist() == [[False] * 3, [True, False, False]]


RULES = {
    "plain": SGD(),
    "dampened": SGD(dampening=0.3),
    "momentum": SGD(0.9, 0.1),
    "adam": Adam(),
    "amsgrad": Adam(amsgrad=True),
}


@pytest.mark.parametrize("size", [1, 3000])
@pytest.mark.parametrize("name", RULES)
def test_update_is_the_plain_one(name, size):
    """Five steps, each row to single precision, in rows that lie apart."""
    rule = RULES[name]
    start, lr = normal(3, size), torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64, device=DEVICE)
    mine, theirs = (zeros(padded(3, size)).copy_(start), start.clone())
    flats = [Flat(p, zeros(p), lr, rule.memory(p)) for p in (mine, theirs)]
    rows = torch.full((5, 3, 4), torch.nan, dtype=torch.float64, device=DEVICE)
    counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    row = torch.empty_like(rows[0])
    for t in range(5):
        gradient, losses = normal(3, size), normal(3).double()
        for flat in flats:
            flat.gradient.copy_(gradient)
        fused.update(flats[0], rule, 0.01, losses, rows, counts)
        update(flats[1], rule, 0.01, losses, row)
        assert counts.tolist() == [t + 1] * 3
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(rows[t], row, rtol=1e-5, atol=1e-3)  # θ·g cancels
        for memory, expected in flats[1].memory.items():
            torch.testing.assert_close(flats[0].memory[memory], expected, rtol=1e-5, atol=1e-6)


def test_sums_are_as_exact_as_double_precision_over_blocks():
    """A float32 sum of a million equal terms would be off by far more."""
    size = 300_000
    parameters = torch.full((1, size), 0.1, device=DEVICE)
    lr = torch.ones(1, dtype=torch.float64, device=DEVICE)
    flat = Flat(parameters, torch.full_like(parameters, 0.3), lr, {})
    rows, counts = lr.new_empty(1, 1, 4), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    expected = size * parameters[0, 0].double() * flat.gradient[0, 0].double()
    square = size * flat.gradient[0, 0].double() ** 2 / 2
    fused.update(flat, SGD(), 0.0, lr, rows, counts)
    assert float(rows[0, 0, 0]) == pytest.approx(float(expected), rel=2e-7)
    assert float(rows[0, 0, 1]) == pytest.approx(float(square), rel=2e-7)


def sequences():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Flatten(), nn.Linear(4, 3))


def ends_in_relu():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU())


def assert_same_training(build, shape, form, precision, rtol):
    """Two epochs of two steps and what a whole data set says, fused and plain on the CPU."""
    models = [build() for _ in SEEDS]
    images, labels = data(*shape, examples=12)
    options = {"lr": 0.05, "weight_decay": 0.01, "batch_size": 6, **form}
    plain = Ensemble(models, images, labels, seeds=SEEDS, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "fuses", lambda device: True)
        kernel = Ensemble(
            models,
            images.to(DEVICE),
            labels.to(DEVICE),
            seeds=SEEDS,
            device=DEVICE,
            precision=precision,
            **options,
        )
    for _ in range(2):
        expected, found = plain.run_epoch(), kernel.run_epoch()
        for column in ("left", "right", "loss", "velocity_gradient"):
            torch.testing.assert_close(
                getattr(found, column), getattr(expected, column), rtol=rtol, atol=rtol / 10
            )
    kernel.load_state_dict(plain.state_dict())
    torch.testing.assert_close(
        kernel.full_gradient(chunk=9).cpu(), plain.full_gradient(), rtol=rtol, atol=rtol / 10
    )
    assert torch.equal(kernel.state_dict()["parameters"], plain.state_dict()["parameters"])
    for some in (slice(None), slice(7)):
        evaluations = [
            ensemble.evaluate(images[some].to(device), labels[some].to(device), chunk=5)
            for ensemble, device in ((plain, "cpu"), (kernel, DEVICE))
        ]
        assert evaluations[1].loss == pytest.approx(evaluations[0].loss, rel=rtol)
        assert evaluations[1].accuracy == evaluations[0].accuracy


@pytest.mark.parametrize(
    ("build", "form"),
    [
        (perceptron, {}),
        (perceptron, {"momentum": 0.9}),
        (perceptron, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}),
        (sequences, {"algorithm": "amsgrad", "lr": 0.001}),
        (ends_in_relu, {"momentum": 0.9, "dampening": 0.1}),
    ],
    ids=["plain", "momentum", "loss", "amsgrad", "relu"],
)
def test_a_fused_ensemble_trains_as_a_plain_one(build, form):
    assert_same_training(build, (2, 3), form, "fp32", rtol=1e-3)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )


# In the interpreter, which takes seconds, one precision is enough.
PRECISIONS = {"fp16": 2e-2, "unpacked": 1e-3, **({"fp32": 1e-3, "tf32": 2e-2} if ON_GPU else {})}


@pytest.mark.parametrize(("precision", "rtol"), PRECISIONS.items())
def test_a_fused_convolutional_ensemble_trains_as_a_plain_one(precision, rtol, monkeypatch):
    """Half precision rounds by 2⁻¹², four steps deep; unpacked images go by their index alone."""
    if not ON_GPU and precision != "unpacked":
        for module in (kernels, stages):
            monkeypatch.setattr(module, "why_not_fused", lambda *_: None)
        monkeypatch.setattr(kernels, "_why_not", lambda *_: None)
    if precision == "unpacked":
        monkeypatch.setattr(stages, "why_not_fused", lambda *_: "as a test")
        precision = "fp32"
    torch.manual_seed(0)
    assert_same_training(convolutional, (2, 4, 4), {"momentum": 0.9}, precision, rtol)
