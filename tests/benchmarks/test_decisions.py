"""The benchmark of rules: its truth is exact, it runs the library's own rule, and tables fit it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from equilibrate.rules import Stationary

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_of(load, name, repetitions, *, keep=False, **changes):
    module = load("decision_processes")
    (process,) = (p for p in module.processes() if p.name == name)
    process = replace(process, **changes)
    return module.simulate(process, repetitions, np.random.default_rng(0), keep=keep)


def test_the_truth_is_the_mean_of_many_runs(load):
    """The mean loss of 2,000 runs of 20 directions has a relative error of 0.7 %."""
    run = run_of(load, "after a halving, 20 dimensions", 2000, keep=True, horizon=4.0)
    h = run.process.curvatures
    loss = (h * run.states[0] ** 2).sum(2).mean(1)
    floor = (h * run.process.variances).sum()
    assert loss / floor - 1 == pytest.approx(run.excess, abs=0.05)


def test_the_rule_is_that_of_the_library(load):
    run = run_of(load, "well conditioned, 20 dimensions", 20, horizon=20.0)
    rule = Stationary()
    fired = load("decision_rules").stationary(run, rule)
    assert (fired >= 0).any()
    stride = load("decision_processes").stride
    for i in range(3):
        for epoch in range(2, len(run.epochs)):
            x, _ = run.trace(epoch, np.array([i]))
            if epoch // stride(epoch) > rule.shortest and rule.satisfied(x).item():
                assert fired[i] == epoch
                break
        else:
            assert fired[i] == -1


def test_the_oracle_uses_the_exact_likelihood(load):
    """Weights of rates, and the centre, against the density of each step, summed over the shift."""
    oracle = load("decision_oracle")
    run = run_of(load, "1 dimension", 2, horizon=10.0)
    x, _ = run.trace(len(run.epochs) - 1, np.arange(2))
    stride = load("decision_processes").stride(len(run.epochs) - 1)
    n, apart = x.shape[1] - 1, int(run.epochs[stride])
    y = x[:, :, 0] - x[:, :1, 0]
    some = slice(60, None, 8)
    weights, centre, _, _ = (each[..., some] for each in oracle._posterior(y, n, apart))
    for i in range(2):
        logarithms, means = [], []
        for relaxations in oracle._RELAXATIONS[some]:
            keep = math.exp(-relaxations / n)
            noise = sum(0.5 * keep ** (2 * j / apart) for j in range(apart))
            found = y[i, 1:] - keep * y[i, :-1]
            spread = math.sqrt(noise / n)
            shift = found.mean() + spread * np.linspace(-8, 8, 201)
            logarithm = -((found[:, None] - shift) ** 2).sum(0) / (2 * noise)
            logarithm -= n / 2 * math.log(noise)
            top = logarithm.max()
            density = np.exp(logarithm - top)
            logarithms.append(top + math.log(density.sum() * (shift[1] - shift[0])))
            means.append((density * shift).sum() / density.sum() / (1 - keep))
        exact = np.exp(np.array(logarithms) - max(logarithms))
        found = weights[i] / weights[i].sum()
        assert found == pytest.approx(exact / exact.sum(), rel=1e-6, abs=1e-12)
        assert centre[i] == pytest.approx(np.array(means), rel=1e-6, abs=1e-9)


def test_the_oracle_acts_on_time_from_a_distant_start(load):
    """From 100 σ away the rate is known to about 1 %, less than the half t_r between two looks."""
    oracle = load("decision_oracle")
    run = run_of(load, "1 dimension, far", 20, horizon=16.0)
    fired = oracle.oracle(run, 0)[oracle.BOUNDS.index(0.01)]
    delays = (run.epochs[fired] - run.relaxed) / run.process.relaxation
    assert (fired >= 0).all()
    assert np.abs(delays).max() <= 1.5


def test_published_tables_fit_the_results(load):
    tables, decision_tables = load("tables"), load("decision_tables")
    results = json.loads((BENCHMARKS / "results" / "decisions.json").read_text())["results"]
    text = tables.DECISIONS.read_text()
    for name, make in decision_tables.TABLES.items():
        assert tables.markdown(*make(results)) in text, name
    limits = json.loads((BENCHMARKS / "results" / "decision_limits.json").read_text())["results"]
    for name, make in decision_tables.LIMITS.items():
        assert tables.markdown(*make(limits)) in text, name
    assert results["worst"]["Stationary"]["early"] <= 0.01
