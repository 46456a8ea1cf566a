"""The benchmark of rules: its truth is exact, and it runs the library's own rule."""

import json
from dataclasses import replace

import numpy as np
import pytest

from equilibrate.stationarity import Stationary


def run_of(load, name, repetitions, **changes):
    module = load("decision_processes")
    (process,) = (p for p in module.processes() if p.name == name)
    process = replace(process, **changes)
    return module.simulate(process, repetitions, np.random.default_rng(0))


def test_the_truth_is_the_mean_of_many_runs(load):
    """The mean loss of 2,000 runs of 20 directions has a relative error of 0.7 %."""
    run = run_of(load, "after a halving, 20 dimensions", 2000, horizon=4.0)
    floor = (run.process.curvatures * run.process.variances).sum()
    assert run.level / floor - 1 == pytest.approx(run.excess, abs=0.05)


def test_the_rule_is_that_of_the_library(load):
    run = run_of(load, "well conditioned, 20 dimensions", 20, horizon=20.0)
    rule, stride = Stationary(), load("decision_processes").stride
    fired = load("decisions").stationary(run, rule)
    assert (fired >= 0).any()
    for i in range(3):
        epochs = [
            epoch
            for epoch in range(2, len(run.epochs))
            if epoch // stride(epoch) > rule.shortest
            and rule.satisfied(run.trace(epoch, np.array([i]))).item()
        ]
        assert fired[i] == (epochs[0] if epochs else -1)


def test_published_tables_fit_the_results(load):
    decisions = load("decisions")
    results = json.loads(decisions.OUT.read_text())["results"]["processes"]
    text = decisions.PAGE.read_text()
    for name, table in decisions.tables(results).items():
        assert table in text, name
    assert max(case["Stationary"].get("early", 0) for case in results.values()) <= 0.01
