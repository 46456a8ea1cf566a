"""Verdicts on records for which it is known what holds."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from paper_support.synthetic import write

from equilibrate_paper.analysis import measures, results
from equilibrate_paper.analysis.seeds import mean_over_seeds
from equilibrate_paper.analysis.verdicts import grouped, judge
from equilibrate_paper.protocol.profiles import PROFILES, profile

PAPER = PROFILES["paper"].runs


def noise(seed: int, size: float) -> float:
    """A deterministic variation between seeds, with mean zero over four of them."""
    return size * (seed % 4 - 1.5)


def sides(run, folder, residual=0.01, spread=0.001, power=-1.0, **options):
    """Write L̄/R̄ − 1 = residual plus a transient that is 0.1 after 0.04·η^power epochs."""

    def left(time, lr, arm, seed):
        return 1 + residual + noise(seed, spread) + 0.09 * 0.04 * lr**power / time

    columns = {"left": left, "right": lambda *_: 1.0, "landscape": landscape(0.0)}
    write(run, folder, columns | options.pop("columns", {}), **options)


def landscape(bend: float):
    return lambda time, lr, arm, seed: lr * (1 + bend * lr) * (1 + noise(seed, 0.001))


def performance(task, folder, accuracy, **options):
    for name in ("schedules", "amsgrad", "adam"):
        columns = {"test_accuracy": lambda time, lr, arm, seed: accuracy[arm] + noise(seed, 1e-4)}
        write(PAPER[f"{task}-{name}"], folder, columns, **options)


def verdicts(folder):
    return {claim.id: claim for claim in judge(results.load(folder / "records"))}


def test_without_records_nothing_is_tested():
    found = judge({})
    assert {claim.verdict for claim in found} == {"not tested at this scale"}
    assert {claim.measured for claim in found} == {None}
    assert found[0].remark == "not run: mlp-initial"


def test_claims_are_ordered_by_figure_and_those_of_the_paper_come_first():
    found = [(claim.ours, claim.figure) for claim in judge({})]
    figures = ["1a", "1b", "2a", "2b", "3a", "3b", "4a", "4b", "S1a", "S1b", "S2"]
    assert list(dict.fromkeys(figure for ours, figure in found if not ours)) == figures
    own = list(dict.fromkeys(figure for ours, figure in found if ours))
    assert own == ["3a", "3b", "B1a", "B1b", "B2a", "B2b"]
    assert found == sorted(found, key=lambda pair: pair[0])


def test_groups_show_the_claims_about_some_panels():
    paper, ours = grouped(judge({}))
    assert (len(paper.claims), len(ours.claims)) == (19, 14)
    (group,) = grouped(judge({}), ["S2c"])
    assert [claim.id for claim in group.claims] == ["eager-faster-cnn", "eager-ends-lower-cnn"]
    assert {claim.figure for group in grouped(judge({}), ["3a"]) for claim in group.claims} == {
        "3a"
    }
    assert grouped(judge({}), []) == []


@pytest.mark.parametrize(
    ("residual", "spread", "verdict"),
    [
        (0.01, 0.001, "holds"),
        (-0.01, 0.001, "holds"),
        (0.2, 0.001, "fails"),
        (-0.2, 0.001, "fails"),
        (0.04, 0.02, "undecided"),
    ],
)
def test_sides_that_meet_hold(tmp_path, residual, spread, verdict):
    for name in ("mlp-initial", "mlp-sequence", "mlp-unbiased"):
        sides(PAPER[name], tmp_path, residual, spread)
    found = verdicts(tmp_path)
    for name in ("initial-meet-mlp", "sequence-meet-mlp", "unbiased-meet-mlp"):
        assert found[name].verdict == verdict
        assert found[name].measured == pytest.approx(residual, abs=0.02)
        assert found[name].margin is not None
    width = float(mean_over_seeds(np.array([noise(seed, spread) for seed in range(4)])).margin)
    assert found["initial-meet-mlp"].margin == pytest.approx(width, rel=1e-4)


def test_one_learning_rate_outside_the_bound_fails(tmp_path):
    def left(time, lr, arm, seed):
        return 1 + noise(seed, 0.03) + (0.3 if lr == 0.01 else 0.0)

    sides(PAPER["mlp-sequence"], tmp_path, columns={"left": left})
    claim = verdicts(tmp_path)["sequence-meet-mlp"]
    assert claim.verdict == "fails"
    assert claim.measured == pytest.approx(0.3)


@pytest.mark.parametrize(("power", "verdict"), [(-1.0, "holds"), (0.8, "fails")])
def test_slower_relaxation_at_small_learning_rates(tmp_path, power, verdict):
    scale = {} if power < 0 else {"residual": 0.0}
    run = PAPER["mlp-sequence"]

    def left(time, lr, arm, seed):
        reach = 2.0 / lr if power < 0 else 4000 * lr
        return 1 + 0.1 * reach / time * (1 + noise(seed, 0.02))

    sides(run, tmp_path, columns={"left": left}, **scale)
    claim = verdicts(tmp_path)["sequence-slows-mlp"]
    assert claim.verdict == verdict
    assert claim.measured is not None
    assert math.copysign(1, claim.measured) == math.copysign(1, power)


@pytest.mark.parametrize(("bend", "straight"), [(0.0, True), (60.0, False), (-60.0, False)])
def test_linear_and_anharmonic_landscapes(tmp_path, bend, straight):
    sides(PAPER["mlp-sequence"], tmp_path, columns={"landscape": landscape(bend)})
    sides(PAPER["cnn-sequence"], tmp_path, columns={"landscape": landscape(15 * bend)})
    found = verdicts(tmp_path)
    assert found["landscape-linear-mlp"].verdict == ("holds" if straight else "fails")
    assert found["landscape-bent-cnn"].verdict == ("fails" if straight else "holds")
    expected = abs((1 + 15 * bend * 0.001) / (1 + 15 * bend * 0.0001) - 1)
    assert found["landscape-bent-cnn"].measured == pytest.approx(expected, abs=1e-4)


def test_landscape_that_vanishes_with_the_learning_rate(tmp_path):
    sides(PAPER["mlp-sequence"], tmp_path)
    flat = {"landscape": lambda time, lr, arm, seed: 1 / lr + seed % 4}
    sides(PAPER["cnn-sequence"], tmp_path, columns=flat)
    found = verdicts(tmp_path)
    assert found["landscape-vanishes-mlp"].verdict == "holds"
    assert found["landscape-vanishes-mlp"].measured == pytest.approx(0.003 / 0.05)
    assert found["landscape-vanishes-cnn"].verdict == "fails"
    assert found["landscape-falls-mlp"].measured == found["landscape-vanishes-mlp"].measured
    assert found["landscape-falls-cnn"].measured == pytest.approx(1)  # it is largest there
    assert found["landscape-falls-cnn"].verdict == "fails"


def test_a_landscape_with_a_maximum_falls_from_it(tmp_path):
    """With η/(η + 0.002)² the maximum is at 0.002, and the value at 0.0001 is 0.18 of it."""
    run = PAPER["cnn-sequence"]

    def peaked(time, lr, arm, seed):
        return lr / (lr + 0.002) ** 2 * (1 + noise(seed, 0.001))

    sides(run, tmp_path, columns={"landscape": peaked})
    found = verdicts(tmp_path)
    lrs = sorted({lr for arm in run.arms.values() for lr, _ in arm.phases})
    values = [lr / (lr + 0.002) ** 2 for lr in lrs]
    assert found["landscape-falls-cnn"].measured == pytest.approx(values[0] / max(values), 1e-4)
    assert found["landscape-falls-cnn"].verdict == "holds"
    assert found["landscape-vanishes-cnn"].measured == pytest.approx(values[0] / values[-1], 1e-4)
    assert found["landscape-vanishes-cnn"].verdict == "fails"


def test_schedules_ranked_as_in_the_paper(tmp_path):
    ranked = {"preset": 0.72, "adaptive": 0.721, "eager": 0.70, "amsgrad": 0.69, "adam": 0.68}
    performance("cnn", tmp_path, ranked)
    found = verdicts(tmp_path)
    holds = ("adaptive-like-preset", "adaptive-beats-amsgrad", "amsgrad-beats-adam")
    assert all(found[f"{name}-cnn"].verdict == "holds" for name in holds)
    assert found["eager-ends-lower-cnn"].verdict == "holds"
    assert found["eager-faster-cnn"].verdict == "fails"  # here it is lower from the start
    assert found["adaptive-lags-cnn"].verdict == "fails"
    assert found["adaptive-beats-amsgrad-cnn"].measured == pytest.approx(0.031)


def test_schedules_ranked_the_other_way(tmp_path):
    ranked = {"preset": 0.80, "adaptive": 0.70, "eager": 0.72, "amsgrad": 0.75, "adam": 0.76}
    performance("cnn", tmp_path, ranked)
    found = verdicts(tmp_path)
    for name in (
        "adaptive-like-preset",
        "adaptive-beats-amsgrad",
        "amsgrad-beats-adam",
        "eager-ends-lower",
    ):
        assert found[f"{name}-cnn"].verdict == "fails"
    assert found["adaptive-lags-cnn"].verdict == "holds"


def test_beginning_and_end_are_parts_of_the_run(tmp_path):
    run = PAPER["cnn-schedules"]

    def accuracy(time, lr, arm, seed):
        return {"eager": 0.6, "adaptive": 0.5, "preset": 0.5}[arm] + noise(seed, 1e-4)

    write(run, tmp_path, {"test_accuracy": accuracy}, rows=100)
    result = results.load(tmp_path / "records")["cnn-schedules"]
    rows = list(result.rows)
    values = np.linspace(0, 1, len(rows))
    assert len(rows) == run.epochs == 400
    for row, value in zip(rows, values, strict=True):
        row["test_accuracy"][:] = [value] * 12
    early = measures.accuracy(result, "eager", measures.BEGINNING)
    late = measures.accuracy(result, "eager", measures.END)
    assert early == pytest.approx(np.full(4, values[:50].mean()), abs=1e-9)
    assert late == pytest.approx(np.full(4, values[-20:].mean()), abs=1e-9)


def test_the_end_of_a_short_run_is_its_last_epoch(tmp_path):
    write(PAPER["mlp-adam"], tmp_path, {"test_accuracy": lambda time, *_: time / 400}, rows=4)
    result = results.load(tmp_path / "records")["mlp-adam"]
    assert measures.accuracy(result, "adam", measures.END) == pytest.approx(np.ones(4))


def test_variation_common_to_two_learning_rates_cancels_in_their_ratio(tmp_path):
    """O_FB/η does not depend on η, and differs between seeds by up to half of it."""
    common = {"landscape": lambda time, lr, arm, seed: lr * (1 + noise(seed, 0.2))}
    sides(PAPER["mlp-sequence"], tmp_path, columns=common)
    found = verdicts(tmp_path)
    assert found["landscape-linear-mlp"].measured == pytest.approx(0, abs=1e-9)
    assert found["landscape-linear-mlp"].margin == pytest.approx(0, abs=1e-9)
    assert found["landscape-vanishes-mlp"].margin == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("factor", "verdict"), [(0.7, "holds"), (1.2, "fails")])
@pytest.mark.parametrize("task", ["mlp", "cnn"])
def test_shuffling_that_lowers_the_landscape(tmp_path, task, factor, verdict):
    lowered = {"landscape": lambda time, lr, arm, seed: factor * lr * (1 + noise(seed, 0.01))}
    sides(PAPER[f"{task}-sequence"], tmp_path, columns=lowered)
    sides(PAPER[f"{task}-unbiased"], tmp_path)
    claim = verdicts(tmp_path)[f"shuffling-lowers-{task}"]
    assert claim.verdict == verdict
    assert claim.measured == pytest.approx(factor - 1, abs=0.005)


def test_shuffling_is_judged_at_common_learning_rates(tmp_path):
    """The sequence stops before 0.005 and 0.003, where O_FB/η is 100 times larger."""
    sides(PAPER["mlp-sequence"], tmp_path, upto=1500)
    rates = {"landscape": lambda time, lr, arm, seed: lr * (100 if lr < 0.01 else 1)}
    sides(PAPER["mlp-unbiased"], tmp_path, columns=rates)
    claim = verdicts(tmp_path)["shuffling-lowers-mlp"]
    assert claim.verdict == "not tested at this scale"
    assert claim.measured == pytest.approx(0.0, abs=0.005)
    sides(PAPER["mlp-sequence"], tmp_path, upto=1000)
    assert verdicts(tmp_path)["shuffling-lowers-mlp"].measured is None  # only two are common


def test_unclear_effect_of_shuffling_is_undecided(tmp_path):
    spread = {"landscape": lambda time, lr, arm, seed: 0.95 * lr * (1 + noise(seed, 0.1))}
    sides(PAPER["mlp-sequence"], tmp_path, columns=spread)
    sides(PAPER["mlp-unbiased"], tmp_path)
    claim = verdicts(tmp_path)["shuffling-lowers-mlp"]
    assert claim.verdict == "undecided"
    assert claim.remark == "the interval straddles the bound"


@pytest.mark.parametrize(
    ("worst", "seeds", "verdict"),
    [(0.718, 1e-4, "holds"), (0.69, 1e-4, "fails"), (0.71, 5e-3, "undecided")],
)
def test_grid_is_compared_with_the_sampling_error(tmp_path, worst, seeds, verdict):
    """Two sampling errors of a difference at p = 0.72 are 0.0127."""

    def grid(time, lr, arm, seed):
        return worst if arm == "X=0.1, Y=0.5" else 0.72

    write(PAPER["cnn-grid"], tmp_path, {"test_accuracy": grid})
    schedules = {"test_accuracy": lambda time, lr, arm, seed: 0.72 + noise(seed, seeds)}
    write(PAPER["cnn-schedules"], tmp_path, schedules)
    claim = verdicts(tmp_path)["grid-comparable-cnn"]
    assert claim.verdict == verdict
    assert claim.measured == pytest.approx(0.72 - worst)
    deviation = np.std([noise(seed, seeds) for seed in range(4)], ddof=1)
    assert claim.margin == pytest.approx(3.1824 * math.sqrt(2) * deviation, rel=1e-3)


@pytest.mark.parametrize(
    ("shift", "spread", "verdict"),
    [(0.0, 0.01, "holds"), (0.1, 0.01, "fails"), (0.0, 0.5, "undecided")],
)
def test_precision_without_effect(tmp_path, shift, spread, verdict):
    """Only half precision is shifted. The residual varies 20 times less than O_FB."""

    def columns(kind):
        moved = shift if kind == "fp16" else 0.0

        def other(seed):  # variation between precisions, with mean zero over seeds
            return spread * (1 if seed % 2 else -1) * (kind != "fp32")

        return {
            "left": lambda time, lr, arm, seed: 1 + (moved + other(seed)) / 20 + noise(seed, 0.01),
            "right": lambda *_: 1.0,
            "landscape": lambda time, lr, arm, seed: 3 * (1 + moved + other(seed)),
        }

    for kind in ("fp32", "tf32", "fp16"):
        write(PAPER[f"cnn-{kind}"], tmp_path, columns(kind))
    found = verdicts(tmp_path)
    for name, unit in (("precision-landscape-cnn", 1), ("precision-residual-cnn", 1 / 20)):
        assert found[name].verdict == verdict
        assert found[name].measured == pytest.approx(shift * unit, abs=1e-9)
        # Student's t with 15 degrees of freedom at 1 − 0.05/6, two-sided
        margin = 3.0363 * spread * unit * math.sqrt(16 / 15) / 4
        assert found[name].margin == pytest.approx(margin, rel=1e-3)


def test_differences_use_the_common_seeds(tmp_path):
    """Values depend on the seed only, so that every paired difference is zero."""
    accuracy = {"test_accuracy": lambda time, lr, arm, seed: 0.5 + 0.01 * seed}
    write(PAPER["mlp-schedules"], tmp_path, accuracy)
    write(replace(PAPER["mlp-amsgrad"], seeds=(2, 3)), tmp_path, accuracy)
    columns = {
        "left": lambda time, lr, arm, seed: seed,
        "right": lambda *_: 1.0,
        "landscape": lambda time, lr, arm, seed: seed,
    }
    write(replace(PAPER["mlp-fp32"], seeds=tuple(range(304, 316))), tmp_path, columns)
    write(replace(PAPER["mlp-tf32"], seeds=tuple(range(300, 308))), tmp_path, columns)
    found = verdicts(tmp_path)
    for name in ("adaptive-beats-amsgrad", "precision-residual", "precision-landscape"):
        claim = found[f"{name}-mlp"]
        assert (claim.measured, claim.margin) == (0.0, 0.0)
        assert claim.verdict == "not tested at this scale"


@pytest.mark.parametrize("residual", [0.2, 0.001])
def test_fewer_epochs_are_not_tested(tmp_path, residual):
    sides(profile("paper", epochs_scale=0.5).runs["mlp-initial"], tmp_path, residual)
    claim = verdicts(tmp_path)["initial-meet-mlp"]
    assert (claim.verdict, claim.remark) == (
        "not tested at this scale",
        "incomplete – mlp-initial: 50 of 100 epochs",
    )


def test_fewer_seeds_can_confirm_but_not_refute(tmp_path):
    run = profile("paper", seeds=3).runs["mlp-initial"]
    for residual, verdict in ((0.2, "not tested at this scale"), (0.001, "holds")):
        sides(run, tmp_path, residual)
        claim = verdicts(tmp_path)["initial-meet-mlp"]
        assert claim.verdict == verdict
        assert claim.remark.endswith("mlp-initial: 3 of 4 seeds")


def test_interrupted_run_is_not_tested(tmp_path):
    ranked = {"preset": 0.72, "adaptive": 0.721, "eager": 0.70, "amsgrad": 0.69, "adam": 0.68}
    performance("mlp", tmp_path, ranked, upto=300)
    claim = verdicts(tmp_path)["adaptive-beats-amsgrad-mlp"]
    assert claim.verdict == "not tested at this scale"
    assert "mlp-schedules: 300 of 400 epochs" in claim.remark


def test_other_data_test_only_general_claims(tmp_path):
    ranked = {"preset": 0.72, "adaptive": 0.721, "eager": 0.70, "amsgrad": 0.69, "adam": 0.68}
    performance("mlp", tmp_path, ranked, profile="quick")
    sides(PAPER["mlp-initial"], tmp_path, 0.2, profile="quick")
    found = verdicts(tmp_path)
    assert found["adaptive-beats-amsgrad-mlp"].verdict == "not tested at this scale"
    assert found["adaptive-beats-amsgrad-mlp"].measured == pytest.approx(0.031)
    assert found["adaptive-beats-amsgrad-mlp"].statement.startswith("MLP on MNIST")
    assert found["initial-meet-mlp"].verdict == "fails"


@pytest.mark.parametrize(("profile_name", "images"), [("paper", 10_000), ("quick", 297)])
def test_the_bound_states_the_number_of_test_images_in_use(tmp_path, profile_name, images):
    """p(1−p) = 0.25: two sampling errors of a difference are √(2/n)."""
    limit = math.sqrt(2 / images)
    run = profile(profile_name).runs["mlp-schedules"]
    for difference, decided in ((0.9 * limit, "holds"), (1.1 * limit, "fails")):
        accuracy = {"preset": 0.5, "adaptive": 0.5 + difference}
        columns = {"test_accuracy": lambda time, lr, arm, seed, a=accuracy: a[arm]}
        write(run, tmp_path, columns, profile=profile_name)
        claim = verdicts(tmp_path)["adaptive-like-preset-mlp"]
        assert (
            re.findall(r"\d{3,}", claim.bound) == re.findall(r"\d{3,}", claim.why) == [f"{images}"]
        )
        tested = decided if profile_name == "paper" else "not tested at this scale"
        assert claim.verdict == tested


def test_one_seed_is_not_tested(tmp_path):
    sides(profile("paper", seeds=1).runs["mlp-initial"], tmp_path, 0.001)
    claim = verdicts(tmp_path)["initial-meet-mlp"]
    assert claim.verdict == "not tested at this scale"
    assert claim.margin is None
