"""How often do rules lower the learning rate too early, and how long do they wait otherwise?

Each rule watches the same runs of SGD on quadratics, of which the mean loss is known. τ is the
excess of the mean loss over its stationary value, in units of the noise floor. A rule acts too
early if τ > 0.05 when it acts. Its delay is counted from when τ falls to 0.05, in units of the
loss-relaxation time t_r = 1/(2ηh) of the slowest direction. Rules look at the ends of epochs, which
are half a t_r long in most processes.

`Stationary` is the library's own code on the trace that its monitor would record. Its defaults were
chosen on other seeds than those that are reported.

    python benchmarks/decisions.py [--repetitions N] [--seed N] [--only NAME …] [--out FILE]

statopt, pymbar and red-molsim are optional; their rules are left out if they are not installed.
`tables.py` writes the table and the figure from the JSON.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decision_processes import EARLY, Process, Run, processes, simulate
from decision_rules import Fired, diffusing, missing, rules, sasa, several, stationary
from equilibrate.rules import Stationary
from harness import write

OUT = Path(__file__).parent / "results" / "decisions.json"
_DEFAULT = Stationary()
SWEEP = {
    f"{strictness:g}": Stationary(
        relaxations=_DEFAULT.relaxations * strictness,
        significance=_DEFAULT.significance * strictness**0.5,
        diffusing=_DEFAULT.diffusing / strictness,
    )
    for strictness in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3)
}
"""Settings of `Stationary` from lenient to strict."""


def score(run: Run, fired: Fired) -> dict[str, float]:
    """Return how often a rule acts too early, or at all, and its delays."""
    count = len(fired)
    acted = fired >= 0
    if not run.process.acts:
        return {"acts": float(acted.mean()), "count": count}
    early = acted & (run.excess[np.maximum(fired, 0)] > EARLY)
    steps = np.where(acted, run.epochs[np.maximum(fired, 0)], np.inf)
    delays = (steps - run.relaxed) / run.process.relaxation
    median, late = np.quantile(delays, [0.5, 0.9], method="higher")
    return {
        "early": float(early.mean()),
        "median": float(median),
        "late": float(late),
        "silent": float((delays > 50).mean()),
        "count": count,
    }


def compare(process: Process, repetitions: int, seed: int, *, others: bool) -> dict[str, Any]:
    """Return the scores of all rules on one process."""
    run = simulate(process, repetitions, np.random.default_rng([seed, _index(process)]))
    settings = several(run, list(SWEEP.values()))
    sweep = {name: score(run, each) for name, each in zip(SWEEP, settings, strict=True)}
    scores = {"Stationary": sweep["1"]}
    scores |= {name: score(run, rule(run)) for name, rule in rules().items()} if others else {}
    found: dict[str, Any] = {"rules": scores, "sweep": sweep}
    if not process.acts:
        found["diffusing"] = diffusing(run, Stationary())
    else:
        found["relaxed"] = run.relaxed / process.relaxation
    return found


def halvings(repetitions: int, seed: int, dimensions: int, times: int = 4) -> list[dict[str, Any]]:
    """Halve the learning rate each time `Stationary` acts, and score each of the times."""
    curvatures = np.geomspace(0.04, 0.4, dimensions)
    process = Process("halvings", curvatures, 30.0, horizon=60.0)
    rng = np.random.default_rng([seed, 10_000 + dimensions])
    state, scores, lr = None, [], 1.0
    for _ in range(times):
        run = simulate(process, repetitions, rng, lr=lr, state=state, keep=True)
        slower = replace(process, curvatures=curvatures * lr)  # t_r at this rate
        run.process = slower
        fired = stationary(run, Stationary())
        scores.append({"lr": lr, **score(run, fired)})
        ends = np.where(fired >= 0, fired, len(run.epochs) - 1)
        rows = np.arange(repetitions)
        state = run.states[0][ends, rows], run.states[1][ends, rows]
        lr /= 2
    return scores


def check_sasa(seed: int) -> float | None:
    """Return how often our vectorised test agrees with statopt's own; None without statopt."""
    try:
        import torch
        from statopt.bucket import LeakyBucket  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    run = simulate(processes()[0], 20, np.random.default_rng(seed))
    agree = []
    for overlapping, mode in ((False, "mb"), (True, "olbm")):
        fired = sasa(run, overlapping=overlapping)
        for i in range(20):
            found = -1
            for epoch in range(1, len(run.epochs)):
                end = int(run.epochs[epoch])
                if end // 2 <= 100:
                    continue
                bucket = LeakyBucket(1000, 1, torch.float64, "cpu")
                values = torch.from_numpy(run.differences[i, end - end // 2 : end].astype(float))
                bucket.buffer, bucket.count, bucket.end = values, len(values), len(values)
                if bucket.stats_test(0.05, mode, composite_test=True)[0]:
                    found = epoch
                    break
            agree.append(found == fired[i])
    return float(np.mean(agree))


def summary(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the worst numbers of each rule, and of each strictness of ours, over all processes.

    Delays in processes with long epochs are left out: rules look seldom there.
    """
    epochs = {process.name: process.epoch for process in processes()}
    worst: dict[str, dict[str, float]] = {}
    for kind, prefix in (("rules", ""), ("sweep", "strictness ")):
        names = next(iter(results.values()))[kind]
        for name in names:
            scores = [case[kind][name] for case in results.values()]
            truth = [s for s in scores if "early" in s]
            often = [
                case[kind][name]
                for process, case in results.items()
                if "early" in case[kind][name] and epochs[process] <= 0.5
            ]
            worst[prefix + name] = {
                "early": max(s["early"] for s in truth),
                "median": max(s["median"] for s in often),
                "late": max(s["late"] for s in often),
                "silent": max(s["silent"] for s in truth),
                "acts": max((s["acts"] for s in scores if "acts" in s), default=0.0),
            }
    return worst


def _index(process: Process) -> int:
    return [each.name for each in processes()].index(process.name)


def main(arguments: list[str] | None = None) -> None:
    """Run all processes, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--only", nargs="+", default=None, help="names of processes")
    parser.add_argument("--ours", action="store_true", help="leave out the other rules")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    begun, results = time.monotonic(), {}
    for process in processes():
        if options.only and process.name not in options.only:
            continue
        case = results[process.name] = compare(
            process, options.repetitions, options.seed, others=not options.ours
        )
        ours = {k: round(v, 4) for k, v in case["rules"]["Stationary"].items()}
        print(f"{process.name}: {ours}", flush=True)
    found = {
        "repetitions": options.repetitions,
        "seed": options.seed,
        "missing": missing(),
        "processes": results,
        "worst": summary(results),
    }
    if not options.only:
        found["halvings"] = {
            str(d): halvings(options.repetitions, options.seed, d) for d in (20, 2)
        }
        found["statopt_agrees"] = check_sasa(options.seed)
    found["seconds"] = round(time.monotonic() - begun)
    for name, row in found["worst"].items():
        print(f"{name:32}", {k: round(v, 4) for k, v in row.items()})
    write(options.out, found)
    print(f"written to {options.out} after {found['seconds']} s")


if __name__ == "__main__":
    main()
