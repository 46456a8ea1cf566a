"""Observables against formulas written in components, one replica at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibrate import observables as o
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
def test_observables_equal_formulas_in_components(seed, setting, i, j, k):
    lr, mu, nu = setting
    s = one_step(seed, lr, mu, nu)
    th, g, w = s.parameters.tolist(), s.gradient.tolist(), s.velocity_after.tolist()
    assert s.velocity_before is not None
    v = s.velocity_before.tolist()
    after = [a + lr * b for a, b in zip(th, w, strict=True)]
    expected = {
        o.matrix_left: (1 - nu) * (th[i] * g[j] + g[i] * th[j])
        - mu * (th[i] * v[j] + v[i] * th[j]),
        o.matrix_right: lr * w[i] * w[j],
        o.velocity_square_left: w[i] * w[j],
        o.velocity_square_right: mu**2 * v[i] * v[j]
        + (1 - nu) ** 2 * g[i] * g[j]
        - (1 - nu) * mu * (v[i] * g[j] + g[i] * v[j]),
        o.velocity_position_left: w[i] * after[j] - lr * w[i] * w[j],
        o.velocity_position_right: mu * v[i] * th[j] - (1 - nu) * g[i] * th[j],
    }
    for function, value in expected.items():
        assert float(function(s, i, j)) == pytest.approx(value, rel=1e-9, abs=1e-9), function
        assert float(function(s, basis(i), basis(j))) == pytest.approx(value, rel=1e-9, abs=1e-9)
    left = th[i] * th[j] * w[k] + th[i] * w[j] * th[k] + w[i] * th[j] * th[k]
    right = th[i] * w[j] * w[k] + th[j] * w[k] * w[i] + th[k] * w[i] * w[j]
    assert float(o.cubic_left(s, i, j, k)) == pytest.approx(-left, rel=1e-9, abs=1e-9)
    assert float(o.cubic_right(s, i, j, k)) == pytest.approx(
        lr * right + lr**2 * w[i] * w[j] * w[k], rel=1e-9, abs=1e-9
    )
    assert float(o.gradient_along(s, i)) == g[i]
    assert float(o.velocity_along(s, i)) == w[i]
    assert float(o.velocity_update_right(s, i)) == pytest.approx(w[i], rel=1e-9, abs=1e-9)


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
    trace = sum(o.matrix_left(s, i, i) - o.matrix_right(s, i, i) for i in range(P))
    step = 2 * (o.step_left(s) - o.step_right(s))
    torch.testing.assert_close(trace, step)


def test_replicas_with_different_settings_equal_single_runs():
    lr, mu, nu = (torch.tensor(x).double() for x in ([0.1, 0.5], [0.0, 0.9], [0.3, 0.0]))
    singles = [one_step(k, lr[k].item(), mu[k].item(), nu[k].item()) for k in range(2)]
    both = Snapshot(
        *(
            torch.stack([getattr(s, name) for s in singles])
            for name in ("parameters", "gradient", "velocity")
        ),
        lr,
        mu,
        nu,
        velocity_before=torch.stack([s.velocity_before for s in singles]),
    )
    full, directions = torch.ones(2, P).double(), (0, basis(2))
    for name, arguments in {
        "fdr1_left": (),
        "fdr1_right": (),
        "step_left": (),
        "step_right": (),
        "norm_square": (),
        "overlap": (),
        "matrix_left": directions,
        "matrix_right": directions,
        "velocity_square_right": directions,
        "velocity_position_left": directions,
        "velocity_position_right": directions,
        "cubic_left": (*directions, 1),
        "cubic_right": (*directions, 1),
    }.items():
        function = getattr(o, name)
        alone = torch.stack([function(s, *arguments) for s in singles])
        torch.testing.assert_close(function(both, *arguments), alone, msg=name)
    alone = torch.stack([o.fdr2_left(s, full[0]) for s in singles])
    torch.testing.assert_close(o.fdr2_left(both, full), alone)


def test_default_velocity_is_that_of_sgd_without_momentum():
    s = Snapshot(torch.ones(2), torch.tensor([1.0, 2.0]), lr=0.5, dampening=0.5)
    assert s.velocity_after.tolist() == [-0.5, -1.0]
    assert s.parameters_after.tolist() == [0.75, 0.5]
    assert s.momentum_term.tolist() == [0.0, 0.0]


def test_observables_of_single_precision_are_double():
    s = Snapshot(torch.ones(2), torch.ones(2), lr=0.5)
    for value in (o.fdr1_left(s), o.matrix_left(s, 0, 1), o.along(s.gradient, torch.ones(2))):
        assert value.dtype == torch.float64


def test_self_checks_require_the_velocity_before_the_step():
    s = Snapshot(torch.ones(2), torch.ones(2), torch.ones(2), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"velocity_before is None, .*: set velocity_before"):
        o.velocity_square_right(s, 0, 1)
