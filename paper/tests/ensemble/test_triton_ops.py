"""Compare the Triton operations with the plain ones: on a GPU, or in Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from paper_support.replicas import SEEDS, convolutional, data, perceptron
from support.device import DEVICE, ON_GPU
from torch import nn

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from equilibrate_paper.ensemble import Ensemble, Method, _ops
from equilibrate_paper.ensemble._ops import choose_ops, plain, triton
from equilibrate_paper.ensemble._ops.plain import PlainOps
from equilibrate_paper.ensemble._ops.triton import TritonOps
from equilibrate_paper.ensemble.batches import Batches
from equilibrate_paper.ensemble.updates import SGD, Adam, FlatTensors, zeros


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def padded(*shape):
    """A tensor with padded rows, as flat tensors have them."""
    return torch.full((shape[0], 16 + shape[1]), torch.nan, device=DEVICE)[:, : shape[1]]


@pytest.mark.parametrize("as_indices", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2, 4, 5)], ids=["row", "image"])
def test_batches_are_equal(shape, as_indices):
    inputs, targets = normal(10, *shape), torch.arange(10, device=DEVICE)
    order = torch.stack([torch.randperm(10)[:6].reshape(3, 2) for _ in range(4)], 1)
    expected, found = (
        Batches(inputs, targets, (3, 4, 2), ops=ops, as_indices=as_indices)
        for ops in (PlainOps(), TritonOps("fp32"))
    )
    for _ in range(2):
        for batches in (expected, found):
            batches.start(batches.prepare_order(order))
        for step in range(3):
            (x, y), (expected_x, expected_y) = found.take(), expected.take()
            if as_indices:
                x, expected_x = x.gather(), expected_x.gather()
            batch = order[step].to(DEVICE)
            assert torch.equal(x, expected_x)
            assert torch.equal(x, inputs[batch])
            assert torch.equal(y, expected_y)
            assert torch.equal(y, targets[batch])
            expected.counts.add_(1)
            found.counts.add_(1)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 130, 33)])
def test_bias_and_relu_and_their_gradients(shape, relu):
    y, grad = normal(*shape), normal(*shape)
    bias = padded(shape[0], shape[2]).copy_(normal(shape[0], shape[2]))
    expected = y + bias[:, None]
    expected = F.relu(expected) if relu else expected
    triton.add_bias(y, bias, relu=relu)
    assert torch.equal(y, expected)
    masked = torch.where(y > 0, grad, 0) if relu else grad.clone()
    out = padded(shape[0], shape[2])
    triton.bias_gradient(grad, y if relu else None, out)
    assert torch.equal(grad, masked)
    torch.testing.assert_close(out, masked.double().sum(1).float(), rtol=1e-5, atol=1e-5)


def test_the_relu_of_a_nan_is_a_nan():
    y = torch.tensor([[[1.0, torch.nan, -1.0]]], device=DEVICE)
    triton.add_bias(y, torch.zeros(1, 3, device=DEVICE), relu=True)
    assert y[0, 0, 0] == 1
    assert y[0, 0, 1].isnan()
    grad = torch.ones_like(y)
    triton.bias_gradient(grad, y, torch.empty(1, 3, device=DEVICE))
    assert grad[0, 0].tolist() == [1, 1, 0]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 130, 10), (1, 2, 3000), (2, 4, 1)])
def test_cross_entropy_and_its_gradients_are_exact(shape, biased):
    replicas, rows, classes = shape
    outputs = 10 * normal(*shape)
    targets = torch.randint(classes, (replicas, rows), device=DEVICE)
    bias = padded(replicas, classes).copy_(normal(replicas, classes)) if biased else None
    out = padded(replicas, classes) if biased else None
    losses, grad = triton.cross_entropy(outputs, targets, bias, out)
    exact = outputs.double() + (bias.double()[:, None] if biased else 0)
    exact.requires_grad_()
    expected = F.cross_entropy(exact.movedim(-1, 1), targets, reduction="none").mean(1)
    (exact_grad,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-4, atol=1e-7)
    if biased:
        torch.testing.assert_close(out.double(), exact_grad.sum(1), rtol=1e-4, atol=1e-6)


def test_the_cross_entropy_of_a_diverged_replica_is_nan():
    outputs = normal(2, 3, 4)
    outputs[1, 0, 2] = torch.nan
    targets = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    losses, grad = triton.cross_entropy(outputs, targets)
    assert losses.isnan().tolist() == [False, True]
    assert grad.isnan().any(-1).tolist() == [[False] * 3, [True, False, False]]


RULES = {
    "plain": SGD(),
    "momentum": SGD(0.9),
    "adam": Adam(),
    "amsgrad": Adam(amsgrad=True),
}


@pytest.mark.parametrize("size", [1, 3000])
@pytest.mark.parametrize("name", RULES)
def test_updates_agree(name, size):
    """Five steps, up to single precision, with padded and contiguous rows."""
    rule = RULES[name]
    start, lr = normal(3, size), torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64, device=DEVICE)
    found, expected = zeros(padded(3, size)).copy_(start), start.clone()
    flats = [FlatTensors(p, zeros(p), lr, rule.init_state(p)) for p in (found, expected)]
    rows = torch.full((5, 3, 4), torch.nan, dtype=torch.float64, device=DEVICE)
    counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    row = torch.empty_like(rows[0])
    for t in range(5):
        gradient, losses = normal(3, size), normal(3).double()
        for flat in flats:
            flat.gradient.copy_(gradient)
        triton.update(flats[0], rule, 0.01, losses, rows, counts)
        plain.update(flats[1], rule, 0.01, losses, row)
        assert counts.tolist() == [t + 1] * 3
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(rows[t], row, rtol=1e-5, atol=1e-3)  # θ·g cancels
        for key, value in flats[1].state.items():
            torch.testing.assert_close(flats[0].state[key], value, rtol=1e-5, atol=1e-6)


def test_observables_are_summed_in_double_precision_over_blocks():
    """A float32 sum of 300,000 equal terms would have a far larger error."""
    size = 300_000
    parameters = torch.full((1, size), 0.1, device=DEVICE)
    lr = torch.ones(1, dtype=torch.float64, device=DEVICE)
    flat = FlatTensors(parameters, torch.full_like(parameters, 0.3), lr, {})
    rows, counts = lr.new_empty(1, 1, 4), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    expected = size * parameters[0, 0].double() * flat.gradient[0, 0].double()
    square = size * flat.gradient[0, 0].double() ** 2 / 2
    triton.update(flat, SGD(), 0.0, lr, rows, counts)
    assert float(rows[0, 0, 0]) == pytest.approx(float(expected), rel=2e-7)
    assert float(rows[0, 0, 1]) == pytest.approx(float(square), rel=2e-7)


def assert_same_training(build, shape, form, precision, rtol):
    """Compare plain operations on the CPU with Triton: two epochs of two steps, and whole data."""
    models = [build(seed) for seed in SEEDS]
    inputs, targets = data(*shape, examples=12)
    form = {"lr": [0.05] * 3, **form}
    lrs = form.pop("lr")
    method = Method(batch_size=6, weight_decay=0.01, precision=precision, **form)
    expected, found = (
        Ensemble(models, (inputs, targets), seeds=SEEDS, lr=lrs, method=method, **where)
        for where in ({"ops": PlainOps()}, {"ops": TritonOps(precision), "device": DEVICE})
    )
    for _ in range(2):
        expected_epoch, epoch = expected.run_epoch(), found.run_epoch()
        for column in ("left", "right", "loss", "velocity_gradient"):
            torch.testing.assert_close(
                getattr(epoch, column), getattr(expected_epoch, column), rtol=rtol, atol=rtol / 10
            )
    found.load_state_dict(expected.state_dict())
    torch.testing.assert_close(
        found.full_gradient().cpu(), expected.full_gradient(), rtol=rtol, atol=rtol / 10
    )
    assert torch.equal(found.state_dict()["parameters"], expected.state_dict()["parameters"])
    for some in (slice(None), slice(7)):
        evaluations = [
            ensemble.evaluate(ensemble.prepare(inputs[some]), targets[some].to(ensemble.device))
            for ensemble in (expected, found)
        ]
        assert evaluations[1].loss == pytest.approx(evaluations[0].loss, rel=rtol)
        assert evaluations[1].accuracy == evaluations[0].accuracy


@pytest.mark.parametrize(
    "form",
    [{}, {"momentum": 0.9}, {"algorithm": "amsgrad", "lr": [0.001] * 3}],
    ids=["plain", "momentum", "amsgrad"],
)
def test_training_agrees(form):
    assert_same_training(perceptron, (2, 3), form, "fp32", rtol=1e-3)


def one_convolution(seed):
    return nn.Sequential(*convolutional(seed)[:3], nn.Flatten(), nn.Linear(16, 3))


# The interpreter takes seconds, so one precision is enough there.
PRECISIONS = {"fp16": 2e-2, **({"fp32": 1e-3, "tf32": 2e-2} if ON_GPU else {})}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "rtol"), PRECISIONS.items())
def test_training_of_a_convolutional_network_agrees(precision, rtol):
    """Half precision rounds by 2⁻¹² in each of four steps."""
    build = convolutional if ON_GPU else one_convolution
    assert_same_training(build, (2, 4, 4), {"momentum": 0.9}, precision, rtol)


def test_a_gpu_uses_triton_if_it_is_installed(monkeypatch):
    gpu = torch.device("cuda")
    assert isinstance(choose_ops(gpu, "tf32"), TritonOps)
    assert isinstance(choose_ops(torch.device("cpu"), "fp32"), PlainOps)
    monkeypatch.setattr(_ops, "find_spec", lambda name: None)
    assert isinstance(choose_ops(gpu, "fp32"), PlainOps)
