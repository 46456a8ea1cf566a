"""|θ|² is recorded without any effect on training, and its average is that of the steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from paper_support.runs import ADAPTIVE, INITIAL, MLP, SEQUENCE
from torch.nn.functional import cross_entropy

from equilibrate.record import jsonl
from equilibrate_paper.data import datasets
from equilibrate_paper.protocol import models
from equilibrate_paper.protocol.profiles import PROFILES
from equilibrate_paper.protocol.run import PaperRun
from equilibrate_paper.protocol.schedules import PiecewiseConstant
from equilibrate_paper.runs import execute as execution
from equilibrate_paper.runs.folder import checkpoint_path, load_checkpoint, record_path

ROOT = Path(__file__).parents[3]
NORMS = ("norm_square", "step_norm_square")
PLAIN = PaperRun("plain", MLP, {"initial": PiecewiseConstant(((0.1, 3),))}, (0, 1), "landscape")


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


def execute(run, folder, digits):
    execution.execute(run, folder, digits, profile="test")
    state = load_checkpoint(checkpoint_path(folder, run.name))
    assert state is not None
    return jsonl.read(record_path(folder, run.name)).rows, state["first"]


def naive_norms(run, digits):
    """|θ|² before each step of the first replica, in a loop of its own with torch.optim.SGD."""
    from equilibrate_paper.ensemble import sampling

    model, norms = models.build(run.task.model, run.seeds[0]), []
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=run.momentum, weight_decay=run.task.weight_decay
    )
    for epoch in range(run.epochs):
        for batch in sampling.draw(run.seeds[0], epoch, 1500, 100, "shuffled"):
            norms.append(sum(float(p.detach().double().square().sum()) for p in model.parameters()))
            optimizer.zero_grad()
            outputs = model(digits.train_images[batch])
            cross_entropy(outputs, digits.train_labels[batch]).backward()
            optimizer.step()
    return norms


@pytest.mark.parametrize("run", [PLAIN, INITIAL], ids=["momentum 0", "momentum 0.9"])
def test_recorded_norms_are_those_of_a_plain_loop(run, tmp_path, digits):
    rows, _ = execute(run, tmp_path, digits)
    norms = naive_norms(run, digits)
    assert [row["step_norm_square"][0] for row in rows] == pytest.approx(
        [norms[row["step"] - 1] for row in rows], rel=1e-5
    )
    assert [row["norm_square"][0] for row in rows] == pytest.approx(
        [np.mean(norms[row["step"] // 2 : row["step"]]) for row in rows], rel=1e-5
    )


def test_training_and_all_other_columns_do_not_depend_on_it(tmp_path, digits, monkeypatch):
    with_norms, weights = execute(INITIAL, tmp_path / "with", digits)
    with monkeypatch.context() as patch:
        patch.setattr(PaperRun, "records_norm", False)
        without, same = execute(INITIAL, tmp_path / "without", digits)
    assert all(set(NORMS) <= row.keys() for row in with_norms)
    assert [{k: v for k, v in row.items() if k not in NORMS} for row in with_norms] == without
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_only_runs_from_new_weights_record_it():
    assert [run.records_norm for run in (INITIAL, SEQUENCE, ADAPTIVE)] == [True, False, False]
    names = [run.name for run in PROFILES["paper"].runs.values() if run.records_norm]
    assert names == ["mlp-initial", "cnn-initial"]
