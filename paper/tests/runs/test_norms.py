"""|θ|² is recorded without any effect on training, and its average is that of the steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from paper_support.runs import ADAPTIVE, INITIAL, MLP, SEQUENCE
from torch.nn.functional import cross_entropy

from equilibrate.record import jsonl
from equilibrate_paper.data import datasets
from equilibrate_paper.ensemble import Ensemble, Method
from equilibrate_paper.protocol import models
from equilibrate_paper.protocol.profiles import PROFILES
from equilibrate_paper.protocol.run import PaperRun
from equilibrate_paper.protocol.schedules import PiecewiseConstant
from equilibrate_paper.runs import execute as execution
from equilibrate_paper.runs.folder import checkpoint_path, load_checkpoint, record_path
from equilibrate_paper.runs.norms import norms_before_steps, squared_norm
from equilibrate_paper.runs.trainer import Trainer

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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_norms_of_an_epoch_end_where_the_next_epoch_begins(momentum, digits):
    """The recursion over an epoch agrees with the parameters to the rounding of their updates."""
    ensemble = Ensemble(
        [models.build("digits-mlp", seed) for seed in (0, 1)],
        digits.train,
        seeds=[0, 1],
        lr=[0.1, 0.05],
        method=Method(momentum=momentum, weight_decay=0.01),
    )
    product = torch.zeros(2, dtype=torch.float64)
    for _ in range(3):
        start = squared_norm(ensemble.parameters)
        epoch = ensemble.run_epoch()
        norms, after = norms_before_steps(epoch, start, product, momentum)
        assert torch.equal(norms[0], start)
        change = (
            2
            * torch.tensor(epoch.lr)
            * (
                momentum * _before_last(epoch, product, momentum)
                - epoch.left[-1]
                + epoch.right[-1] / (1 + momentum)
            )
        )
        assert torch.allclose(norms[-1] + change, squared_norm(ensemble.parameters), rtol=1e-6)
        product = after


def _before_last(epoch, product, momentum):
    for left, right in zip(epoch.left[:-1], epoch.right[:-1], strict=True):
        product = momentum * product - left + 2 / (1 + momentum) * right
    return product


def test_training_and_all_other_columns_do_not_depend_on_it(tmp_path, digits, monkeypatch):
    with_norms, weights = execute(INITIAL, tmp_path / "with", digits)
    with monkeypatch.context() as patch:
        patch.setattr(PaperRun, "records_norm", False)
        without, same = execute(INITIAL, tmp_path / "without", digits)
    assert all(set(NORMS) <= row.keys() for row in with_norms)
    assert [{k: v for k, v in row.items() if k not in NORMS} for row in with_norms] == without
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_headers_do_not_depend_on_it():
    """Published records of the initial runs, which have no norms, belong to the same runs."""
    for name in ("mlp-initial", "cnn-initial"):
        run = PROFILES["paper"].runs[name]
        assert run.records_norm
        header = jsonl.read_header(ROOT / "paper" / "results" / "records" / f"{name}.jsonl")
        assert PaperRun.from_config(header.config) == run
        assert run.to_config().items() <= PaperRun.from_config(header.config).to_config().items()


def test_only_runs_from_new_weights_record_it():
    assert [run.records_norm for run in (INITIAL, SEQUENCE, ADAPTIVE)] == [True, False, False]
    names = [run.name for run in PROFILES["paper"].runs.values() if run.records_norm]
    assert names == ["mlp-initial", "cnn-initial"]


def new_trainer(digits):
    return Trainer(INITIAL, [models.build("digits-mlp", seed) for seed in (0, 1)], digits, "cpu")


def test_it_continues_bit_for_bit(digits):
    first, resumed = new_trainer(digits), new_trainer(digits)
    first.run_epoch()
    resumed.load_state_dict(first.state_dict())
    assert resumed.run_epoch() == first.run_epoch()
