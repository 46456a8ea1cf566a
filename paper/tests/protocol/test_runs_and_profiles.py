"""The runs have the numbers of appendix B and section 3.3; invalid runs raise errors."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from equilibrate.record.jsonl import read_header
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.protocol.profiles import PROFILES, profile
from equilibrate_paper.protocol.run import PaperRun, Task
from equilibrate_paper.protocol.schedules import Adaptive, PiecewiseConstant

PAPER = PROFILES["paper"].runs
RECORDS = Path(__file__).parents[2] / "results" / "records"
TASK = Task("mlp", "digits-mlp", "digits", "MLP on digits")


def test_initial_runs_are_those_of_the_paper():
    for name, momentum in (("mlp-initial", 0.0), ("cnn-initial", 0.9)):
        run = PAPER[name]
        assert run.arms["initial"] == PiecewiseConstant(((0.1, 100),))
        assert (run.momentum, run.task.batch_size, run.task.weight_decay) == (momentum, 100, 0.01)
        assert run.start is None


def test_sequences_are_those_of_the_paper():
    mlp, cnn = PAPER["mlp-sequence"], PAPER["cnn-sequence"]
    assert mlp.arms["sequence"] == PiecewiseConstant(
        ((0.05, 500), (0.02, 500), (0.01, 500), (0.005, 1000), (0.003, 1000))
    )
    schedule = cnn.arms["sequence"]
    assert isinstance(schedule, PiecewiseConstant)
    lrs = (0.05, 0.02, 0.01, 0.005, 0.003, 0.002, 0.0015, 0.001, 0.0005, 0.00025, 0.0001)
    epochs = (200, 200, 200, 400, 400, 400, 400, 400, 800, 800, 800)
    assert schedule.phases == tuple(zip(lrs, epochs, strict=True))
    assert (len(mlp.seeds), len(cnn.seeds)) == (4, 16)
    assert (mlp.zero_velocity, cnn.zero_velocity) == (False, True)
    assert (mlp.start, cnn.start) == ("mlp-initial", "cnn-initial")
    assert cnn.momentum == 0.9


def test_scheduling_runs_are_those_of_the_paper():
    preset = PiecewiseConstant(((0.1, 100), (0.01, 100), (0.001, 100), (0.0001, 100)))
    for name in ("mlp-schedules", "cnn-schedules"):
        run = PAPER[name]
        assert run.arms["preset"] == preset
        assert run.arms["adaptive"] == Adaptive(lr=0.1, epochs=400, threshold=0.01, factor=0.9)
        assert (run.momentum, run.algorithm, run.start) == (0.0, "sgd", None)
    assert PAPER["cnn-schedules"].arms["eager"] == Adaptive(
        lr=0.1, epochs=400, threshold=0.1, factor=0.7
    )
    assert PAPER["cnn-schedules"].seeds == (0, 1, 2, 3)
    for name in ("mlp-amsgrad", "cnn-amsgrad", "mlp-adam", "cnn-adam"):
        (schedule,) = PAPER[name].arms.values()
        assert schedule == PiecewiseConstant(((0.001, 400),))
        assert PAPER[name].algorithm == name.split("-")[1]


def test_panels_are_fourteen_of_the_paper_and_eight_more():
    paper = "1a 1b 2a 2b 3a 3b 4a 4b S1a S1b S2a S2b S2c S2d"
    assert " ".join(PANELS) == f"{paper} B1a B1b B2a B2b B3a B3b B4a B4b"
    assert PROFILES["paper"].panels == tuple(PANELS)
    assert " ".join(PROFILES["quick"].panels) == f"{paper} B1a B1b B3a B3b"  # no GPU
    for each in PROFILES.values():
        assert each.runs_for(each.panels) == tuple(each.runs.values())


def test_optional_runs_of_a_panel_are_executed():
    names = [run.name for run in PROFILES["paper"].runs_for(["3b"])]
    assert names == ["cnn-initial", "cnn-unbiased", "cnn-sequence"]


def test_unbiased_runs_draw_independent_batches():
    mlp, cnn = PAPER["mlp-unbiased"], PAPER["cnn-unbiased"]
    assert list(mlp.arms.values()) == [
        PiecewiseConstant(((lr, 300),)) for lr in (0.05, 0.02, 0.01, 0.005, 0.003)
    ]
    (fifth,), (whole,) = cnn.arms.values(), PAPER["cnn-sequence"].arms.values()
    assert isinstance(fifth, PiecewiseConstant)
    assert isinstance(whole, PiecewiseConstant)
    assert [(lr, 5 * epochs) for lr, epochs in fifth.phases] == [*whole.phases]
    assert {run.sampling for run in (mlp, cnn)} == {"independent"}
    kinds = "unbiased", "independent"
    others = {run.sampling for name, run in PAPER.items() if not name.endswith(kinds)}
    assert others == {"shuffled"}
    assert (cnn.momentum, cnn.zero_velocity, cnn.start) == (0.9, True, "cnn-initial")


def test_compared_runs_differ_only_in_how_batches_are_drawn():
    """And, for the CNN, in their seeds and in how often rows are recorded."""
    shuffled, independent = PAPER["mlp-reshuffled"], PAPER["mlp-independent"]
    assert replace(shuffled, name="mlp-independent", sampling="independent") == independent
    assert (shuffled.precision, len(shuffled.seeds)) == ("tf32", 16)
    (schedule,) = shuffled.arms.values()
    assert schedule == PiecewiseConstant(
        ((0.05, 100), (0.02, 100), (0.01, 300), (0.005, 300), (0.003, 600))
    )
    sequence, independent = PAPER["cnn-sequence"], PAPER["cnn-independent"]
    assert len(independent.seeds) == independent.full_seeds == 8
    assert independent.record_every == independent.gradient_every
    same = {"name": "cnn-sequence", "sampling": "shuffled", "full_seeds": 16, "record_every": 1}
    assert replace(independent, **same, seeds=sequence.seeds) == sequence


def test_no_two_runs_from_one_state_share_the_order_of_their_batches():
    for first, second in combinations(PAPER.values(), 2):
        same = first.start == second.start is not None and first.sampling == second.sampling
        if same and first.task == second.task and first.precision == second.precision:
            assert not set(first.seeds) & set(second.seeds)


def test_grid_contains_both_settings_of_the_paper():
    for name in ("mlp-grid", "cnn-grid"):
        arms = PAPER[name].arms
        assert len(arms) == 16
        assert arms["X=0.01, Y=0.1"] == PAPER["cnn-schedules"].arms["adaptive"]
        assert arms["X=0.1, Y=0.3"] == PAPER["cnn-schedules"].arms["eager"]
        assert PAPER[name].momentum == 0


def test_runs_that_compare_precisions_differ_in_nothing_else():
    for task, kinds in (("mlp", ("fp32", "tf32")), ("cnn", ("fp32", "tf32", "fp16"))):
        runs = [PAPER[f"{task}-{kind}"] for kind in kinds]
        assert [run.precision for run in runs] == list(kinds)
        assert len({(run.seeds, run.momentum, run.start, *run.arms.values()) for run in runs}) == 1
        assert len(runs[0].seeds) == 16
    own = ("fp32", "tf32", "fp16", "reshuffled", "independent")
    rest = [run for name, run in PAPER.items() if name[4:] not in own]
    assert {(run.task.name, run.precision) for run in rest} == {("mlp", "fp32"), ("cnn", "fp16")}


def test_full_batch_gradient_is_due_every_few_epochs_and_at_the_end_of_a_phase():
    schedule = PiecewiseConstant(((0.1, 7), (0.01, 5)))
    run = PaperRun("r", TASK, {"a": schedule}, (0,), "landscape", gradient_every=5)
    assert [epoch for epoch in range(1, 13) if run.gradient_due(epoch)] == [5, 7, 10, 12]
    assert PAPER["cnn-sequence"].gradient_every == 5
    assert all(PAPER["mlp-sequence"].gradient_due(epoch) for epoch in range(1, 3501))


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_published_headers_are_those_of_the_runs(path):
    config = read_header(path).config
    run = PAPER[path.stem]
    assert PaperRun.from_config(config) == run
    assert json.loads(json.dumps(run.to_config())).items() <= config.items()


def test_runs_come_after_those_they_start_from():
    for each in PROFILES.values():
        names = list(each.runs)
        for run in each.runs.values():
            assert run.start is None or names.index(run.start) < names.index(run.name)


def test_shortened_runs_keep_the_size_of_the_protocol():
    run = profile("paper", epochs_scale=0.001, seeds=2).runs["cnn-sequence"]
    assert run.arms["sequence"].epochs == 11  # at least one for each phase
    assert run.seeds == (100, 101)
    assert (run.full_epochs, run.full_seeds) == (5000, 16)


@pytest.mark.parametrize("scale", [0.001, 0.013, 0.02, 0.1, 0.37, 0.999])
@pytest.mark.parametrize("name", PROFILES)
def test_scaled_arms_have_equal_lengths(name, scale):
    for run in profile(name, epochs_scale=scale).runs.values():
        assert len({schedule.epochs for schedule in run.arms.values()}) == 1


def test_learning_rate_changes_at_the_milestones():
    schedule = PiecewiseConstant(((0.1, 2), (0.05, 1), (0.02, 3)))
    assert schedule.milestones == (2, 3)
    assert [schedule.lr_at(epoch) for epoch in range(6)] == [0.1, 0.1, 0.05, 0.02, 0.02, 0.02]


def test_invalid_runs_and_profiles_raise():
    with pytest.raises(ValueError, match=r"phases must be .* got \(0.0, 3\)"):
        PiecewiseConstant(((0.0, 3),))
    with pytest.raises(ValueError, match="phases is empty"):
        PiecewiseConstant(())
    with pytest.raises(ValueError, match="must have the same number of epochs, got"):
        PaperRun(
            "r",
            TASK,
            {"a": PiecewiseConstant(((0.1, 1),)), "b": PiecewiseConstant(((0.1, 2),))},
            (0,),
            "performance",
        )
    apart = {"a": PiecewiseConstant(((0.1, 1), (0.05, 2))), "b": PiecewiseConstant(((0.1, 3),))}
    with pytest.raises(ValueError, match=r"at the same epochs, .* got \[\(\), \(1,\)\]"):
        PaperRun("r", TASK, apart, (0,), "landscape")
    assert PaperRun("r", TASK, apart, (0,), "performance").epochs == 3
    with pytest.raises(ValueError, match="must be distinct"):
        PaperRun("r", TASK, {"a": PiecewiseConstant(((0.1, 1),))}, (0, 0), "performance")
    with pytest.raises(ValueError, match="profile='fast' is unknown"):
        profile("fast")
    with pytest.raises(ValueError, match="epochs_scale must lie in"):
        profile("quick", epochs_scale=0)
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        profile("quick", seeds=0)
