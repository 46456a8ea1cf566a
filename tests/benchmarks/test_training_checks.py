"""The checks of the training study train as the study does, apart from who sets the cooldown."""

import json

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("kind", ["recipe", "arm"])
def test_the_learning_rate_warms_up_stays_and_cools_down(load, kind):
    checks, tasks, data = (
        load(name) for name in ("training_checks", "training_study.tasks", "training_study.data")
    )
    task = tasks.TASKS["transformer"]
    network = tasks.Network(task, data.load(task.data, None), "cpu", tiny=True)
    loop = tasks.Loop(network, 0, lambda p: torch.optim.AdamW(p, lr=0.01))
    rates = []
    loop.optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    budget = 400
    acted = checks.KINDS[kind](loop, budget)
    np.testing.assert_allclose(rates[:100], 0.01 * np.arange(1, 101) / 100, rtol=1e-9)
    begin = acted[0][0] if acted else budget
    np.testing.assert_allclose(rates[100:begin], 0.01, rtol=1e-9)
    assert acted or kind == "arm"  # the recipe cools down without a decision, too
    assert (np.diff(rates[begin:]) < 0).all()
    if acted:
        assert rates[-1] < 0.1 * 0.01


def test_records_are_read_in_the_order_of_the_tasks(load, tmp_path):
    checks = load("training_study.checks")
    where = {"gpu": None, "torch": "2"}
    for task, acted in (("cnn", []), ("mlp", [[30, "a reason"], [60, "another"]])):
        line = {"task": task, "kind": "recipe", "lr": 0.1, "seed": 3, "budget": 120}
        line |= {"acted": acted, "metric": 0.9, "where": where}
        path = checks.path_of(tmp_path, task, "recipe", 0.1, "cpu")
        path.write_text(json.dumps(line) + "\n")
    mlp, cnn = checks.read(tmp_path)
    assert (mlp.task, mlp.runs) == ("mlp", (checks.Run(3, 0.9, 0.25),))
    assert (cnn.task, cnn.runs) == ("cnn", (checks.Run(3, 0.9, None),))
    assert checks.lines_of(tmp_path / "missing.jsonl") == []
