"""Records in any state, complete or not, can be read, drawn, checked and listed."""

import random

import pytest
from paper_support.synthetic import write

from equilibrate_paper.analysis import results, verdicts
from equilibrate_paper.output import figures, tables
from equilibrate_paper.output.markdown import to_markdown
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.protocol.profiles import profile


def noisy(value):
    """Return a column with reproducible noise for each time, learning rate, arm and seed."""

    def column(time, lr, arm, seed):
        return value(time, lr) * (1 + random.Random(f"{time} {lr} {arm} {seed}").gauss(0, 0.05))

    return column


COLUMNS = {
    "landscape": {
        "left": noisy(lambda time, lr: lr * (1 + 2 / time)),
        "right": noisy(lambda time, lr: lr),
        "loss": noisy(lambda time, lr: 0.5),
        "batch_loss": noisy(lambda time, lr: 0.6),
        "norm_square": noisy(lambda time, lr: 20.0),
        "step_norm_square": noisy(lambda time, lr: 20.0),
        "landscape": noisy(lambda time, lr: lr),
    },
    "performance": {
        "lr": lambda time, lr, arm, seed: lr,
        "train_loss": noisy(lambda time, lr: 0.1 + 1 / time),
        "train_accuracy": noisy(lambda time, lr: 0.8),
        "test_accuracy": noisy(lambda time, lr: 0.7),
    },
}
STATES = ("absent", "head", "begun", "whole")


@pytest.mark.parametrize(
    "seed",
    [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 20))],
)
def test_records_in_any_state_can_be_drawn(tmp_path, seed):
    chance = random.Random(seed)
    scale, seeds = chance.choice([1.0, 0.3, 0.02]), chance.choice([None, 2])
    for run in profile("paper", scale, seeds).runs.values():
        state = chance.choice(STATES)
        upto = {"head": 0, "begun": chance.random() * run.epochs}.get(state, run.epochs)
        if state != "absent":
            write(run, tmp_path, COLUMNS[run.measures], upto=upto, rows=chance.choice([1, 12]))
    recorded = results.load(tmp_path / "records")
    found = verdicts.judge(recorded)
    listed = [tables.claim_table(group) for group in verdicts.grouped(found)]
    shown = [tables.summary(found), *listed, *tables.numbers(recorded)]
    assert len(to_markdown(shown)) > 1000
    for panel in PANELS.values():
        if all(name in recorded and len(recorded[name].epoch) for name in panel.runs):
            assert figures.draw(panel.id, recorded).axes
