"""One table that every observable, average and relation must pass."""

import inspect
from functools import partial

import pytest
import torch

from equilibrate import averages, observables, relations
from equilibrate.observables import Snapshot

P, R = 5, 3
VECTORS = {"recorded_momentum_term"}  # what is no number for each replica
DIRECTIONS = {"direction": 0, "first": 1, "second": 2, "third": 3}


def stepped(dtype=torch.float64, replicas=(R,)) -> Snapshot:
    generator = torch.Generator().manual_seed(0)
    theta, v, g = torch.randn(3, *replicas, P, generator=generator, dtype=torch.float64).to(dtype)
    return Snapshot(theta, g, 0.9 * v - 0.8 * g, 0.1, 0.9, 0.2, velocity_before=v)


def table():
    """Every public function of a snapshot, with its further arguments filled in."""
    for name, function in inspect.getmembers(observables, inspect.isfunction):
        parameters = inspect.signature(function).parameters.values()
        arguments = [p.name for p in parameters if p.default is inspect.Parameter.empty]
        if function.__module__ != observables.__name__ or arguments[:1] != ["s"]:
            continue
        if name.startswith("_") or name in VECTORS:
            continue
        yield name, function, arguments[1:]


OBSERVABLES = {name: (function, more) for name, function, more in table()}


def measure(name, s: Snapshot):
    function, more = OBSERVABLES[name]
    vectors = {"full_gradient": 2 * s.gradient, "hessian_velocity": 3 * s.velocity_after}
    return function(s, *[DIRECTIONS[a] if a in DIRECTIONS else vectors[a] for a in more])


def replica(s: Snapshot, r: int) -> Snapshot:
    parts = {
        f: value[r] if isinstance(value := getattr(s, f), torch.Tensor) else value
        for f in ("parameters", "gradient", "velocity", "velocity_before")
    }
    return Snapshot(**parts, lr=s.lr, momentum=s.momentum, dampening=s.dampening)


def test_the_table_is_whole():
    assert {"fdr1_left", "fdr1_right", "norm_square", "overlap", "step_left"} <= OBSERVABLES.keys()
    assert len(OBSERVABLES) >= 15


@pytest.mark.parametrize("name", OBSERVABLES)
def test_observables_keep_replicas_apart_and_answer_in_double(name):
    s = stepped()
    together = measure(name, s)
    assert together.shape == (R,)
    assert together.dtype == torch.float64
    alone = torch.stack([measure(name, replica(s, r)) for r in range(R)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    single = measure(name, stepped(torch.float32))
    assert single.dtype == torch.float64
    torch.testing.assert_close(single, together, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OBSERVABLES)
def test_observables_vmap_as_they_loop(name):
    s = stepped()
    assert s.velocity is not None
    assert s.velocity_before is not None

    def one(theta, g, v, before):
        return measure(name, Snapshot(theta, g, v, 0.1, 0.9, 0.2, velocity_before=before))

    mapped = torch.func.vmap(one)(s.parameters, s.gradient, s.velocity, s.velocity_before)
    torch.testing.assert_close(mapped, measure(name, s), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OBSERVABLES)
def test_observables_change_nothing(name):
    s, untouched = stepped(), stepped()
    measure(name, s)
    for field in ("parameters", "gradient", "velocity", "velocity_before"):
        assert torch.equal(getattr(s, field), getattr(untouched, field))


BLOCK = 4
AVERAGES = {
    averages.HalfRunningMean: averages.HalfRunningMean,
    averages.HalfRunningBlocks: partial(averages.HalfRunningBlocks, size=BLOCK),
}


def test_every_average_is_in_the_table():
    found = [
        value
        for _, value in inspect.getmembers(averages, inspect.isclass)
        if value.__module__ == averages.__name__
    ]
    assert set(found) == set(AVERAGES)


@pytest.mark.parametrize("kind", AVERAGES.values(), ids=[kind.__name__ for kind in AVERAGES])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averages(kind, shape, dtype):
    xs = torch.randn(20, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    average, other = kind(shape), kind(shape)
    for block in xs.split(BLOCK):
        average.extend(block)
    assert average.value.shape == shape
    assert average.value.dtype == torch.float64
    saved = average.state_dict()
    assert all(isinstance(v, int | float | str | torch.Tensor) for v in saved.values())
    other.load_state_dict(saved)
    assert torch.equal(other.value, average.value)
    each = [kind() for _ in range(xs[0].numel())]
    for block in xs.reshape(20, -1).split(BLOCK):
        for part, values in zip(each, block.unbind(1), strict=True):
            part.extend(values)
    alone = torch.stack([part.value for part in each])
    torch.testing.assert_close(average.value.flatten(), alone, rtol=1e-14, atol=1e-14)
    average.reset()
    assert average.count == 0


def hessian(v):
    return 3 * v


RELATIONS = {
    "fdr1": relations.fdr1,
    "step_form": relations.step_form,
    "master": lambda: relations.master(lambda theta: (theta**4).sum(-1).double()),
    "mean_gradient": lambda: relations.mean_gradient(0),
    "mean_velocity": lambda: relations.mean_velocity(0),
    "matrix": lambda: relations.matrix(0, 1),
    "velocity_update": lambda: relations.velocity_update(0),
    "velocity_square": lambda: relations.velocity_square(0, 1),
    "velocity_position": lambda: relations.velocity_position(0, 1),
    "cubic": lambda: relations.cubic(0, 1, 2),
    "fdr2": lambda: relations.fdr2(hessian, lambda theta, v: hessian(v)),
}


def test_every_relation_is_in_the_table():
    made = {
        name
        for name, function in inspect.getmembers(relations, inspect.isfunction)
        if inspect.signature(function).return_annotation == "Relation"
    }
    assert made == RELATIONS.keys()


@pytest.mark.parametrize("name", RELATIONS)
def test_relations_average_their_two_sides_over_the_half_window(name):
    relation = RELATIONS[name]()
    assert relation.reading().undefined == "no step has been seen yet"
    sides = []
    for seed in range(7):
        s = stepped(replicas=())
        scaled = 1 + seed / 10
        s = Snapshot(
            scaled * s.parameters, s.gradient, s.velocity, 0.1, 0.9, 0.2, s.velocity_before
        )
        relation.update(s)
        sides.append((float(relation.left(s)), float(relation.right(s))))
    reading = relation.reading()
    assert (reading.step, reading.count, reading.lr) == (7, 4, 0.1)
    assert reading.left == pytest.approx(sum(left for left, _ in sides[3:]) / 4)
    assert reading.right == pytest.approx(sum(right for _, right in sides[3:]) / 4)
