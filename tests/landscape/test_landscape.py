"""`Landscape` against dense derivatives and enumeration of all mini-batches."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from equilibrate.landscape import Landscape, connected_scaling
from equilibrate.landscape.data import TrainingData

EXAMPLES, BATCH, DECAY = 7, 2, 0.05


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def examples(count: int = EXAMPLES, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (count,), generator=generator)


def flat_loss(model: nn.Module, data, decay: float = DECAY):
    """f as a function of one flat vector, and the current parameters."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def f(theta: torch.Tensor) -> torch.Tensor:
        parts = theta.split([math.prod(s) for s in shapes])
        weights = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        out = torch.func.functional_call(model, weights, data[0])
        return cross_entropy(out, data[1]) + decay / 2 * theta @ theta

    return f, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def dense_gradient(model: nn.Module, data) -> torch.Tensor:
    return torch.autograd.functional.jacobian(*flat_loss(model, data))


def dense_hessian(model: nn.Module, data) -> torch.Tensor:
    return torch.autograd.functional.hessian(*flat_loss(model, data))


def every_batch(data, size: int = BATCH):
    for chosen in itertools.combinations(range(len(data[0])), size):
        index = torch.tensor(chosen)
        yield data[0][index], data[1][index]


@given(st.integers(1, 12), st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_value_gradient_and_hessian_product_are_exact_for_any_chunk_size(chunk_size, seed):
    model, data = small(seed), examples()
    land = Landscape(model, cross_entropy, data, weight_decay=DECAY, chunk_size=chunk_size)
    f, theta = flat_loss(model, data)
    gradient, hessian = dense_gradient(model, data), dense_hessian(model, data)
    vector = torch.randn(len(gradient), generator=torch.Generator().manual_seed(seed)).double()
    assert land.value() == pytest.approx(f(theta).item(), rel=1e-12)
    torch.testing.assert_close(land.gradient(), gradient)
    torch.testing.assert_close(land.hessian_product(vector), hessian @ vector)
    batch = next(every_batch(data))
    torch.testing.assert_close(land.batch_gradient(batch), dense_gradient(model, batch))
    torch.testing.assert_close(
        land.batch_hessian_product(batch, vector), dense_hessian(model, batch) @ vector
    )


def test_tensors_lists_and_loaders_give_the_same_gradient():
    model, data = small(), examples()
    loader = DataLoader(TensorDataset(*data), batch_size=4, shuffle=True)
    lists = [(data[0][:5], data[1][:5]), (data[0][5:], data[1][5:])]
    before = torch.get_rng_state()
    gradients = [Landscape(model, cross_entropy, d).gradient() for d in (data, loader, lists)]
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])
    assert torch.equal(before, torch.get_rng_state())


def test_shuffling_loader_has_a_new_order_in_each_pass():
    """Repeated draws are not independent, and their error bar would be too small."""
    data = torch.arange(12.0)[:, None], torch.zeros(12)
    loader = DataLoader(TensorDataset(*data), batch_size=2, shuffle=True)
    before = torch.get_rng_state()

    def epochs(seed):
        generator = torch.Generator().manual_seed(seed)
        batches = TrainingData(loader).mini_batches(None, 24, generator)
        drawn = [tuple(inputs.flatten().tolist()) for inputs, _ in batches]
        return [drawn[k : k + 6] for k in range(0, 24, 6)]

    found = epochs(seed=0)
    assert all(sorted(x for pair in epoch for x in pair) == list(range(12)) for epoch in found)
    assert len({tuple(epoch) for epoch in found}) == 4
    assert found == epochs(seed=0)
    assert torch.equal(before, torch.get_rng_state())


def exact_noise(model, data) -> tuple[float, float, float]:
    """Tr C̃, Tr C and Tr(HC̃) by enumeration of all mini-batches, with the dense Hessian."""
    full, hessian = dense_gradient(model, data), dense_hessian(model, data)
    gradients = torch.stack([dense_gradient(model, batch) for batch in every_batch(data)])
    noise = gradients.T @ gradients / len(gradients)
    return (
        noise.trace().item(),
        (noise.trace() - full @ full).item(),
        (hessian @ noise).trace().item(),
    )


def test_noise_over_every_batch_is_exact():
    """With all mini-batches as data, each is drawn exactly once."""
    model, data = small(), examples()
    batches = list(every_batch(data))
    total, connected, curvature = exact_noise(model, data)
    land = Landscape(model, cross_entropy, batches, weight_decay=DECAY)
    noise = land.noise(None, draws=len(batches))
    assert noise.total.value == pytest.approx(total, rel=1e-10)
    assert noise.connected.value == pytest.approx(connected, rel=1e-10)
    found = land.noise_curvature(None, draws=len(batches))
    assert found.hessian_noise.value == pytest.approx(curvature, rel=1e-10)
    assert found.sharpness.value == pytest.approx(curvature / total, rel=1e-10)


def test_connected_noise_depends_on_the_batch_size_as_in_the_paper():
    model, data = small(), examples(6)
    full = dense_gradient(model, data)
    single = torch.stack([dense_gradient(model, batch) for batch in every_batch(data, 1)])
    spread = (single - full).square().sum().item() / (len(single) - 1)
    for size in range(1, 7):
        gradients = [dense_gradient(model, batch) for batch in every_batch(data, size)]
        connected = torch.stack([(g - full) @ (g - full) for g in gradients]).mean().item()
        assert connected == pytest.approx(spread * connected_scaling(size, 6), rel=1e-9, abs=1e-15)


def test_noise_agrees_with_enumeration_of_all_mini_batches():
    """Four estimates within z = 4: false alarms for 2 of 10^4 seeds."""
    model, data = small(), examples()
    total, connected, curvature = exact_noise(model, data)
    land = Landscape(model, cross_entropy, data, weight_decay=DECAY)
    noise = land.noise(BATCH, draws=2000)
    for found, exact in (
        (noise.total, total),
        (noise.connected, connected),
        (land.noise_curvature(BATCH, 300).hessian_noise, curvature),
        (land.noise_curvature(BATCH, 1500, full_hessian=False).hessian_noise, curvature),
    ):
        assert abs(found.value - exact) < 4 * found.stderr
        assert found.stderr < 0.1 * exact


def test_only_trainable_parameters_are_used_and_the_model_is_not_changed():
    model, data = small(), examples()
    model[0].weight.requires_grad_(False)
    land = Landscape(model, cross_entropy, data)
    state = {name: p.clone() for name, p in model.state_dict().items()}
    assert len(land.gradient()) == len(land.parameters()) == 5 + 15 + 3
    with torch.no_grad():
        land.noise_curvature(BATCH, draws=2)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())


def test_draws_depend_on_the_seed_and_not_on_the_global_random_state():
    model, data = small(), examples()
    before = torch.get_rng_state()
    found = [Landscape(model, cross_entropy, data, seed=s).noise(BATCH, 5).total for s in (3, 3, 4)]
    assert found[0] == found[1] != found[2]
    assert torch.equal(before, torch.get_rng_state())


def test_loss_linear_in_the_parameters_has_no_curvature():
    model = nn.Linear(4, 1).double()
    land = Landscape(model, lambda out, y: out.mean(), examples(), weight_decay=0.5)
    vector = torch.arange(5.0).double()
    torch.testing.assert_close(land.hessian_product(vector), vector / 2)


# -- checks ------------------------------------------------------------------------------------


def test_invalid_arguments_are_rejected():
    model, data = small(), examples()
    with pytest.raises(TypeError, match="got tuple: the order of the arguments is"):
        Landscape(model, data, cross_entropy)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        Landscape(model, cross_entropy, data, chunk_size=0)
    with pytest.raises(ValueError, match=r"weight_decay must be at least 0 and finite, got -1\.0"):
        Landscape(model, cross_entropy, data, weight_decay=-1.0)
    with pytest.raises(ValueError, match="7 inputs and 6 targets"):
        Landscape(model, cross_entropy, (data[0], data[1][:6]))
    with pytest.raises(ValueError, match=r"yields no batch: pass a list .* iterated repeatedly"):
        Landscape(model, cross_entropy, [])
    with pytest.raises(ValueError, match="no trainable parameter"):
        Landscape(small().requires_grad_(False), cross_entropy, data)
    with pytest.raises(ValueError, match="must be a mean over independent examples"):
        Landscape(model, nn.CrossEntropyLoss(reduction="sum"), data)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        Landscape(small, cross_entropy, data)  # pyright: ignore[reportArgumentType]
    land = Landscape(model, cross_entropy, data)
    with pytest.raises(ValueError, match="draws must be at least 2 to compute an error bar, got 1"):
        land.noise(BATCH, draws=1)
    with pytest.raises(ValueError, match="batch_size must be between 1 and 7, got 8"):
        land.noise(8)
    with pytest.raises(ValueError, match="batch_size must be None for data that is"):
        Landscape(model, cross_entropy, [data]).noise(3)
    with pytest.raises(ValueError, match="batch_size must be between 1 and 5, got 6"):
        connected_scaling(6, num_examples=5)


X, Y = examples()
DATA = r"data must be a tuple \(inputs, targets\) of tensors, .* iterated repeatedly, got "
PAIR = r"a batch must be a pair \(inputs, targets\) of tensors with the examples .*, got "


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, DATA + "Tensor"),
        (None, DATA + "NoneType"),
        (TensorDataset(X, Y), DATA + "TensorDataset"),
        (iter([(X, Y)]), DATA + "list_iterator"),
        ((X,), PAIR + "tuple"),
        ((X, Y.tolist()), PAIR + "tuple"),
        ([X, Y], PAIR + "Tensor"),
        ({"x": X, "y": Y}, PAIR + "str"),
        (DataLoader(X), PAIR + "Tensor"),  # pyright: ignore
    ],
)
def test_data_of_another_type_are_rejected(data, message):
    with pytest.raises(TypeError, match=message):
        Landscape(small(), cross_entropy, data)


def test_data_that_can_be_iterated_only_once_are_rejected():
    class Once:
        def __init__(self):
            self.batches = iter([(X, Y)])

        def __iter__(self):
            return self.batches

    land = Landscape(small(), cross_entropy, Once())
    with pytest.raises(ValueError, match=r"yields no batch: .* can be iterated repeatedly"):
        land.value()


@pytest.mark.parametrize("vector", [torch.ones(42), torch.ones(43, 1), [1.0] * 43])
def test_vectors_of_another_shape_are_rejected(vector):
    with pytest.raises(ValueError, match=r"vector must be a tensor of shape \(43,\), with one"):
        Landscape(small(), cross_entropy, (X, Y)).hessian_product(vector)
