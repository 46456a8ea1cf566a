"""Both sides of the relations against formulas written in components, and their replicas."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibrate import observables as o
from equilibrate import relations
from equilibrate.observables import Snapshot

P = 4
settings = st.tuples(st.floats(0.01, 2), st.floats(0, 0.95), st.floats(0, 0.9))
indices = st.integers(0, P - 1)


def one_step(seed: int, lr: float, momentum: float, dampening: float, replicas=()) -> Snapshot:
    """A step of SGD with random θ, v, g."""
    generator = torch.Generator().manual_seed(seed)
    theta, before, g = torch.randn(3, *replicas, P, generator=generator, dtype=torch.float64)
    after = momentum * before - (1 - dampening) * g
    return Snapshot(theta, g, after, lr, momentum, dampening, velocity_before=before)


def basis(i: int) -> torch.Tensor:
    return torch.eye(P, dtype=torch.float64)[i]


@given(st.integers(0, 1000), settings, indices, indices, indices)
def test_relations_equal_formulas_in_components(seed, setting, i, j, k):
    lr, mu, nu = setting
    s = one_step(seed, lr, mu, nu)
    th, g, w = s.parameters.tolist(), s.gradient.tolist(), s.velocity_after.tolist()
    assert s.velocity_before is not None
    v = s.velocity_before.tolist()
    after = [a + lr * b for a, b in zip(th, w, strict=True)]
    expected = {
        relations.matrix: (
            (1 - nu) * (th[i] * g[j] + g[i] * th[j]) - mu * (th[i] * v[j] + v[i] * th[j]),
            lr * w[i] * w[j],
        ),
        relations.velocity_square: (
            w[i] * w[j],
            mu**2 * v[i] * v[j]
            + (1 - nu) ** 2 * g[i] * g[j]
            - (1 - nu) * mu * (v[i] * g[j] + g[i] * v[j]),
        ),
        relations.velocity_position: (
            w[i] * after[j] - lr * w[i] * w[j],
            mu * v[i] * th[j] - (1 - nu) * g[i] * th[j],
        ),
    }
    for make, sides in expected.items():
        for relation in (make(i, j), make(basis(i), basis(j))):
            found = float(relation.left(s)), float(relation.right(s))
            assert found == pytest.approx(sides, rel=1e-9, abs=1e-9), make
    left = th[i] * th[j] * w[k] + th[i] * w[j] * th[k] + w[i] * th[j] * th[k]
    right = th[i] * w[j] * w[k] + th[j] * w[k] * w[i] + th[k] * w[i] * w[j]
    cubic = relations.cubic(i, j, k)
    assert (float(cubic.left(s)), float(cubic.right(s))) == pytest.approx(
        (-left, lr * right + lr**2 * w[i] * w[j] * w[k]), rel=1e-9, abs=1e-9
    )
    assert float(relations.mean_gradient(i).left(s)) == g[i]
    assert float(relations.mean_velocity(i).left(s)) == w[i]
    assert float(relations.velocity_update(i).right(s)) == pytest.approx(w[i], rel=1e-9, abs=1e-9)


@given(st.integers(0, 1000), settings)
def test_fdr2_equals_the_formula(seed, setting):
    lr, mu, nu = setting
    s = one_step(seed, lr, mu, nu)
    hessian = torch.diag(torch.arange(1.0, P + 1)).double()
    full = s.parameters @ hessian
    assert s.velocity_before is not None
    left = (1 - nu) * full @ full - mu * s.velocity_before @ full
    w = s.velocity_after
    torch.testing.assert_close(o.fdr2_left(s, full), left)
    torch.testing.assert_close(o.fdr2_right(s, hessian @ w), lr / 2 * w @ hessian @ w)


@given(st.integers(0, 1000), settings)
def test_trace_of_the_matrix_relation_is_the_step_form(seed, setting):
    """Σ_i(left − right) = 2(1−ν)θ·g − 2μθ·v − ηv′²."""
    s = one_step(seed, *setting)
    diagonal = [relations.matrix(i, i) for i in range(P)]
    trace = sum(relation.left(s) - relation.right(s) for relation in diagonal)
    torch.testing.assert_close(trace, 2 * (o.step_left(s) - o.step_right(s)))


RELATIONS = {
    "fdr1": relations.fdr1(),
    "step_form": relations.step_form(),
    "master": relations.master(lambda theta: (theta**4).sum(-1)),
    "mean_gradient": relations.mean_gradient(0),
    "mean_velocity": relations.mean_velocity(0),
    "matrix": relations.matrix(0, basis(2)),
    "velocity_update": relations.velocity_update(0),
    "velocity_square": relations.velocity_square(0, 1),
    "velocity_position": relations.velocity_position(0, 1),
    "cubic": relations.cubic(0, 1, 2),
    "fdr2": relations.fdr2(lambda theta: 3 * theta, lambda theta, v: 3 * v),
    "sgld": relations.sgld(0.1),
}


def test_every_relation_is_in_the_table():
    functions = inspect.getmembers(relations, inspect.isfunction)
    made = {n for n, f in functions if inspect.signature(f).return_annotation == "Relation"}
    assert made == RELATIONS.keys()


@pytest.mark.parametrize("name", RELATIONS)
def test_both_sides_keep_replicas_with_different_settings_apart_in_double_precision(name):
    lr, mu, nu = (torch.tensor(x).double() for x in ([0.1, 0.5], [0.0, 0.9], [0.3, 0.0]))
    singles = [one_step(k, lr[k].item(), mu[k].item(), nu[k].item()) for k in range(2)]
    fields = "parameters", "gradient", "velocity", "velocity_before"
    stacked = {f: torch.stack([getattr(s, f) for s in singles]) for f in fields}
    both = Snapshot(**stacked, lr=lr, momentum=mu, dampening=nu)
    settings = {"lr": lr.float(), "momentum": mu.float(), "dampening": nu.float()}
    single = Snapshot(**{f: t.float() for f, t in stacked.items()}, **settings)
    for side in (RELATIONS[name].left, RELATIONS[name].right):
        together = side(both)
        torch.testing.assert_close(together, torch.stack([side(s) for s in singles]))
        torch.testing.assert_close(side(single), together, rtol=1e-4, atol=1e-4)


def test_default_velocity_is_that_of_sgd_without_momentum():
    s = Snapshot(torch.ones(2), torch.tensor([1.0, 2.0]), lr=0.5, dampening=0.5)
    assert s.velocity_after.tolist() == [-0.5, -1.0]
    assert s.parameters_after.tolist() == [0.75, 0.5]
    assert s.momentum_term.tolist() == [0.0, 0.0]


def test_self_checks_require_the_velocity_before_the_step():
    s = Snapshot(torch.ones(2), torch.ones(2), torch.ones(2), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"velocity_before is None, .*: set velocity_before"):
        relations.velocity_square(0, 1).right(s)
