"""Cutting runs into parts, and distributing the parts over ranks."""

import pytest
from paper_support.synthetic import write

from equilibrate_paper.protocol.profiles import profile
from equilibrate_paper.runs.folder import record_path
from equilibrate_paper.runs.shares import (
    assign,
    cut,
    epochs_done,
    missing_parts,
    records_to_replace,
)

RUNS = profile("paper").runs
RUN = RUNS["cnn-sequence"]  # seeds 100 to 115


def parts_of(parts):
    return [part.name.partition(".")[2] for part in parts]


def record(run, out, upto=None):
    write(run, out, {"left": lambda *_: 1.0}, upto=run.epochs if upto is None else upto)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [""]),
        (2, ["100-107", "108-115"]),
        (3, ["100-104", "105-109", "110-115"]),
        (16, [f"{seed}-{seed}" for seed in range(100, 116)]),
        (17, [""]),
    ],
)
def test_seeds_are_cut_evenly_unless_there_are_too_few(count, expected):
    assert parts_of(cut(RUN, RUN.seeds, count)) == expected


def test_parts_do_not_contain_the_seeds_in_a_gap():
    assert parts_of(cut(RUN, (100, 101, 105, 106), 2)) == ["100-101", "105-106"]
    assert parts_of(cut(RUN, (100, 105, 106), 1)) == ["100-100", "105-106"]


def test_recorded_parts_keep_their_seeds(tmp_path):
    assert missing_parts(RUN, tmp_path, 1) == [RUN]
    record(RUN.part(100, 103), tmp_path)
    record(RUN.part(106, 107), tmp_path, upto=20)
    assert parts_of(missing_parts(RUN, tmp_path, 1)) == ["106-107", "104-105", "108-115"]
    expected = ["106-107", "104-105", "108-110", "111-115"]
    assert parts_of(missing_parts(RUN, tmp_path, 2)) == expected
    for first, last in ((104, 105), (106, 107), (108, 115)):
        record(RUN.part(first, last), tmp_path)
    assert missing_parts(RUN, tmp_path, 2) == []


def test_requested_part_is_cut_and_completed_like_a_whole_run(tmp_path):
    part = RUN.part(100, 103)
    assert parts_of(missing_parts(part, tmp_path, 2)) == ["100-101", "102-103"]
    record(RUN.part(100, 101), tmp_path)
    assert parts_of(missing_parts(part, tmp_path, 1)) == ["102-103"]


def test_recorded_whole_run_is_not_cut(tmp_path):
    record(RUN, tmp_path, upto=20)
    assert missing_parts(RUN, tmp_path, 4) == [RUN]


def test_parts_with_other_settings_are_not_used(tmp_path):
    record(profile("paper", 0.1).runs["cnn-sequence"].part(100, 103), tmp_path)
    assert missing_parts(RUN, tmp_path, 1) == [RUN]


def test_parts_and_whole_runs_are_distributed_evenly():
    parts = [*cut(RUNS["mlp-schedules"], (0, 1, 2, 3), 2), RUNS["mlp-grid"], RUNS["cnn-grid"]]
    work = [(part, part.epochs) for part in parts]
    first, second = assign(work, 2)
    assert [run.name for run in first] == ["mlp-schedules.0-1", "mlp-grid"]
    assert [run.name for run in second] == ["mlp-schedules.2-3", "cnn-grid"]
    assert assign(work, 1) == [parts]


def test_runs_that_start_from_others_are_distributed_separately():
    halves = [*cut(RUN, RUN.seeds, 2)]
    work = [(part, part.epochs) for part in (RUNS["cnn-initial"], RUNS["cnn-grid"], *halves)]
    assert [parts[-1] for parts in assign(work, 2)] == halves


def test_finished_runs_are_no_work():
    work = [(RUNS["mlp-grid"], 0), (RUNS["mlp-initial"], 100), (RUNS["mlp-adam"], 400)]
    first, second = assign(work, 2)
    assert [run.name for run in first] == ["mlp-grid", "mlp-initial"]
    assert [run.name for run in second] == ["mlp-adam"]


def test_recorded_epochs_are_counted(tmp_path):
    assert epochs_done(RUN, tmp_path) == 0
    record(RUN, tmp_path, upto=100)
    assert epochs_done(RUN, tmp_path) == 100


def test_overwriting_replaces_records_with_the_same_seeds(tmp_path):
    for run in (RUN, RUN.part(100, 103), RUN.part(104, 109)):
        record(run, tmp_path)
    halves = [*cut(RUN, RUN.seeds, 2)]
    assert [path.stem for path in records_to_replace(RUN, halves, tmp_path)] == [
        "cnn-sequence",
        "cnn-sequence.100-103",
        "cnn-sequence.104-109",
    ]
    part = RUN.part(100, 107)
    replaced = records_to_replace(part, [part], tmp_path)
    assert replaced == [record_path(tmp_path, "cnn-sequence.100-103")]
