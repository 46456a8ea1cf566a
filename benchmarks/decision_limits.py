"""What can a rule reach in one and two dimensions, and what does ours do on unseen processes?

The first part compares `Stationary` with an oracle that is told the model (`decision_oracle.py`) on
the same runs. The oracle has one setting, the probability below which it acts. It is the largest of
a list that acts too early in at most 1 % of runs, chosen for each process by itself, on the runs
that are reported: this flatters the oracle.

The second part runs `Stationary` with its defaults on processes that none of its settings were
chosen on: other dimensions, condition numbers, starts, relaxation times and momenta.

    python benchmarks/decision_limits.py [--repetitions N] [--seed N] [--out FILE]
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from decision_oracle import BOUNDS, oracle
from decision_processes import Process, simulate
from decision_rules import stationary
from decisions import score
from equilibrate.rules import Stationary
from harness import write

OUT = Path(__file__).parent / "results" / "decision_limits.json"
_ONE = np.full(1, 0.02)


def known() -> list[Process]:
    """Return the processes of the oracle: one axis, or one that is slow and one that is fast."""
    wide = np.array([0.04, 0.4])
    return [
        Process("1 dimension", _ONE),
        Process("1 dimension, far", _ONE, 1e4),
        Process("1 dimension, after a halving", _ONE, None),
        Process("2 dimensions", np.array([0.02, 0.1])),
        Process("2 dimensions, first of the halvings", wide, 30.0),
        Process("2 dimensions, after a halving", wide / 2, None),
    ]


def unseen() -> list[Process]:
    """Return processes on which no setting was chosen."""
    quarter, single = np.r_[np.full(48, 0.02), np.zeros(16)], np.r_[np.full(19, 0.02), 0.0]
    return [
        Process("1 dimension, start 3", _ONE, 3.0),
        Process("1 dimension, start 1,000", _ONE, 1000.0),
        Process("1 dimension, 3 times slower", _ONE / 3),
        Process("1 dimension, 3 times faster", _ONE * 3),
        Process("2 equal dimensions, start 30", np.full(2, 0.02), 30.0),
        Process("3 dimensions, condition 10, start 3", np.geomspace(0.01, 0.1, 3), 3.0),
        Process("3 dimensions, condition 100", np.geomspace(0.005, 0.5, 3)),
        Process("3 dimensions, momentum 0.5", np.geomspace(0.01, 0.1, 3), 30.0, momentum=0.5),
        Process("20 dimensions, condition 10, start 3", np.geomspace(0.01, 0.1, 20), 3.0),
        Process("50 dimensions, condition 10, start 1,000", np.geomspace(0.02, 0.2, 50), 1000.0),
        Process("50 dimensions, condition 250", np.geomspace(0.002, 0.5, 50), 30.0),
        Process("drifting minimum, 5 dimensions", np.full(5, 0.02), 10.0, drift=0.8, acts=False),
        Process("2 dimensions, free diffusion", np.zeros(2), 0.0, acts=False),
        Process("a quarter of the noise diffuses, 64 dimensions", quarter, 30.0, acts=False),
        Process("1 of 20 dimensions diffuses", single, 30.0, acts=False),
    ]


def limits(repetitions: int, seed: int) -> dict[str, Any]:
    """Return the scores of the oracle and of `Stationary` on the same runs."""
    found: dict[str, Any] = {}
    for index, process in enumerate(known()):
        run = simulate(process, repetitions, np.random.default_rng([seed, 20_000 + index]))
        scores = [
            {"bound": bound, **score(run, fired)}
            for bound, fired in zip(BOUNDS, oracle(run, seed), strict=True)
        ]
        chosen = next((each for each in scores if each["early"] <= 0.01), scores[-1])
        ours = score(run, stationary(run, Stationary()))
        found[process.name] = {"oracle": chosen, "ours": ours, "all": scores}
        print(f"{process.name}: {chosen}, {ours}", flush=True)
    return found


def others(repetitions: int, seed: int) -> dict[str, Any]:
    """Return the scores of `Stationary` on processes on which no setting was chosen."""
    found: dict[str, Any] = {}
    for index, process in enumerate(unseen()):
        run = simulate(process, repetitions, np.random.default_rng([seed, 30_000 + index]))
        found[process.name] = score(run, stationary(run, Stationary()))
        print(f"{process.name}: {found[process.name]}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run both parts, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    found = {
        "repetitions": options.repetitions,
        "seed": options.seed,
        "limits": limits(options.repetitions, options.seed),
        "unseen": others(options.repetitions, options.seed),
    }
    found["seconds"] = round(time.monotonic() - begun)
    write(options.out, found)
    print(f"written to {options.out} after {found['seconds']} s")


if __name__ == "__main__":
    main()
