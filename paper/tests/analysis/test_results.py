"""Records as arrays: phases of constant learning rate."""

from paper_support.synthetic import write

from equilibrate_paper.analysis import results
from equilibrate_paper.protocol.profiles import PROFILES

PAPER = PROFILES["paper"].runs


def value(time, lr, arm, seed):
    """Different for every learning rate, arm and seed."""
    return 1e4 * lr + seed + len(arm) / 100


def load(folder):
    return results.load(folder / "records")


def test_each_constant_arm_is_a_phase(tmp_path):
    run = PAPER["mlp-unbiased"]
    write(run, tmp_path, {"landscape": value})
    phases = load(tmp_path)["mlp-unbiased"].phases()
    assert [(phase.arm, phase.lr) for phase in phases] == [
        (f"η={lr:g}", lr) for lr in (0.05, 0.02, 0.01, 0.005, 0.003)
    ]
    for phase in phases:
        assert phase.finished
        assert phase.last("landscape").tolist() == [
            value(0, phase.lr, phase.arm, seed) for seed in run.seeds
        ]


def test_adaptive_arms_have_no_phases(tmp_path):
    write(PAPER["mlp-schedules"], tmp_path, {"left": value})
    phases = load(tmp_path)["mlp-schedules"].phases()
    assert [(phase.arm, phase.start) for phase in phases] == [
        ("preset", start) for start in (0, 100, 200, 300)
    ]
