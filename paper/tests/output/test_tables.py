"""Tables of records in which every number is known."""

import math

import numpy as np
from paper_support.synthetic import write

from equilibrate.report.numbers import format_estimate, format_number
from equilibrate_paper.analysis import results
from equilibrate_paper.analysis.seeds import mean_over_seeds
from equilibrate_paper.analysis.verdicts import judge
from equilibrate_paper.output import tables
from equilibrate_paper.protocol.profiles import PROFILES, profile

PAPER = PROFILES["paper"].runs
LENGTHS = dict(PAPER["mlp-sequence"].arms["sequence"].phases)


def landscape(lower=1.0):
    return {
        "left": lambda time, lr, arm, seed: lr + 1e-4 / time,
        "right": lambda time, lr, arm, seed: lr,
        "loss": lambda time, lr, arm, seed: (1 + 0.1 / time) * lower * (1 + 0.1 * (seed % 4)),
        "landscape": lambda time, lr, arm, seed: lower * lr * (1 + 0.1 * (seed % 4)),
    }


def performance(time, lr, arm, seed):
    return 0.9 + 0.01 * seed + 0.001 * len(arm)


PERFORMANCE = {
    "lr": lambda time, lr, arm, seed: lr * (1 + seed),
    "test_accuracy": performance,
    "train_accuracy": lambda *values: performance(*values) + 0.05,
}


def made(folder, *names, **options):
    for name in names:
        run = profile("paper", **options).runs[name]
        lower = 0.8 if run.sampling == "shuffled" else 1.0
        columns = landscape(lower) if run.measures == "landscape" else PERFORMANCE
        write(run, folder, columns, rows=400 if "grid" in name else 12)
    recorded = results.load(folder / "records") if names else {}
    return {table.heading: table for table in tables.numbers(recorded)}


def test_without_records_there_are_no_tables(tmp_path):
    assert made(tmp_path) == {}


def test_accuracies_are_means_and_deviations_over_seeds(tmp_path):
    found = made(tmp_path, "cnn-schedules", "cnn-adam")
    table = found["Final accuracies, mean ± s.d. over seeds"]
    assert [row[1] for row in table.rows][-1] == "Adam"
    deviation = 100 * np.std([0.0, 0.01, 0.02, 0.03], ddof=1)
    assert table.rows[0] == (
        "CNN on CIFAR-10",
        "preset, η/10 for each quarter",
        f"{100 * (0.915 + 0.006):.2f} ± {deviation:.2f}",
        f"{100 * (0.965 + 0.006):.2f} ± {deviation:.2f}",
        "0.0001 to 0.0004",
        "4",
    )


def test_landscapes_of_both_kinds_of_batches_share_a_table(tmp_path):
    found = made(tmp_path, "mlp-sequence", "mlp-unbiased")
    table = found["O_FB, MLP on MNIST"]
    assert [row[0] for row in table.rows] == ["0.05", "0.02", "0.01", "0.005", "0.003"]
    seeds = mean_over_seeds(0.8 * 0.05 * (1 + 0.1 * np.arange(4)))
    others = mean_over_seeds(0.05 * (1 + 0.1 * (np.array(PAPER["mlp-unbiased"].seeds) % 4)))
    assert table.rows[0][1] == format_estimate(seeds)
    assert table.rows[0][2] == format_number(seeds.value / 0.05, seeds.margin / 0.05)
    assert table.rows[0][3] == format_estimate(others)
    margin = math.hypot(seeds.margin, others.margin)
    assert table.rows[0][5] == format_number(seeds.value - others.value, margin)
    assert len(table.columns) == 6


def test_headings_state_what_is_missing(tmp_path):
    names = list(made(tmp_path, "mlp-sequence", "mlp-schedules", epochs_scale=0.1, seeds=2))
    assert all("incomplete – mlp-" in name and "2 of 4 seeds" in name for name in names)


def test_summary_has_a_row_for_each_short_text(tmp_path):
    def accuracy(time, lr, arm, seed):
        return {"preset": 0.97, "adaptive": 0.98, "amsgrad": 0.95}[arm] + 0.001 * seed

    for name in ("mlp-schedules", "mlp-amsgrad"):
        write(PAPER[name], tmp_path, {"test_accuracy": accuracy})
    rows = tables.summary(judge(results.load(tmp_path / "records"))).rows
    assert [row[0] for row in rows] == ["2", "2", "3", "3", "3", "4", "4", "4", "S1", "S2", "S2"]
    cells = {row[1]: row[2:] for row in rows}
    assert cells["adaptive ends above AMSGrad"] == ("holds: by 3 points", "not run")
    assert cells["adaptive is comparable to preset"][0] == "fails: by 1 points"
    assert cells["adaptive lags behind AMSGrad at first"] == ("–", "not run")
