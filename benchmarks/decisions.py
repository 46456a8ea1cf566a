"""How often do rules lower the learning rate too early, and how long do they wait otherwise?

Each rule watches the same runs of SGD on quadratics, of which the mean loss is known. τ is the
excess of the mean loss over its stationary value, in units of the noise floor. A rule acts too
early if τ > 0.05 when it acts. Its delay is counted from when τ falls to 0.05, in units of the
loss-relaxation time t_r = 1/(2ηh) of the slowest direction. Rules look at the ends of epochs, which
are half a t_r long in most processes.

`Stationary` is the library's own code on the positions that it would record. Its defaults were
chosen on other seeds than those that are reported.

    python benchmarks/decisions.py [--repetitions N] [--only NAME …] [--out FILE]

The tables of docs/decisions.md are made from the JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from decision_processes import EARLY, Process, SimulatedRuns, processes, simulate, stride
from harness import write
from numpy.typing import NDArray
from tables import markdown, replace_table

from equilibrate.stationarity import Stationary, assess

OUT = Path(__file__).parent / "results" / "decisions.json"
PAGE = Path(__file__).parents[1] / "docs" / "decisions.md"
SEED = 2024
Fired = NDArray[np.int64]
"""The check at which each repetition acts first, −1 if it never does."""


def stationary(run: SimulatedRuns, rule: Stationary) -> Fired:
    """Return when `Stationary` acts on the positions that it would hold."""
    fired = np.full(len(run.right), -1)
    for epoch in range(1, len(run.epochs)):
        waiting = np.flatnonzero(fired < 0)
        if not len(waiting):
            break
        late = run.epochs[epoch] > 25 * run.process.relaxation and epoch % 2  # look less often
        if not late and epoch // stride(epoch) > rule.shortest:
            fired[waiting[rule.satisfied(run.trace(epoch, waiting))]] = epoch
    return fired


def threshold(run: SimulatedRuns, bound: float) -> Fired:
    """Return when `Threshold` acts: |L̄/R̄ − 1| below it over the later half of the steps."""
    acts = np.zeros_like(run.right, bool)
    for epoch in range(2, len(run.epochs)):
        half = epoch // 2
        difference = run.potential[:, half] - run.potential[:, epoch]
        acts[:, epoch] = np.abs(difference) < bound * (run.right[:, epoch] - run.right[:, half])
    return np.where(acts.any(1), acts.argmax(1), -1)


def score(run: SimulatedRuns, fired: Fired) -> dict[str, float]:
    """Return how often a rule acts too early, or at all, and its delays."""
    acted = fired >= 0
    if not run.process.acts:
        return {"acts": float(acted.mean())}
    early = acted & (run.excess[np.maximum(fired, 0)] > EARLY)
    steps = np.where(acted, run.epochs[np.maximum(fired, 0)], np.inf)
    delays = (steps - run.relaxed) / run.process.relaxation
    median, late = np.quantile(delays, [0.5, 0.9], method="higher")
    return {
        "early": float(early.mean()),
        "median": float(median),
        "late": float(late),
        "silent": float((delays > 50).mean()),
    }


def compare(process: Process, repetitions: int) -> dict[str, Any]:
    """Return the scores of all rules on one process."""
    index = [each.name for each in processes()].index(process.name)
    run = simulate(process, repetitions, np.random.default_rng([SEED, index]))
    found: dict[str, Any] = {"Stationary": score(run, stationary(run, Stationary()))}
    for bound in (0.01, 0.1):
        found[f"Threshold({bound})"] = score(run, threshold(run, bound))
    if not process.acts:
        everything = run.trace(len(run.epochs) - 1, np.arange(repetitions))
        found["diffusing"] = float(Stationary().is_diffusing(assess(everything)).mean())
    return found


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page: our rule on each process, and the worst of each rule.

    Delays in processes with long epochs are left out of the second: rules look seldom there.
    """
    rows = []
    for name, case in results.items():
        ours = case["Stationary"]
        if "acts" in ours:
            words = f"acts in {ours['acts']:.1%}; diffusing in {case['diffusing']:.1%}"
            rows.append([name, words.replace("%", " %"), "", "", ""])
        else:
            rows.append([name, *_words(ours)])
    head = ["too early", "median delay", "90 % of delays", "silent for 50"]
    found = {"decisions, processes": markdown(["process", *head], rows)}
    often = {process.name for process in processes() if process.epoch <= 0.5}
    rows = []
    for rule in ("Stationary", "Threshold(0.01)", "Threshold(0.1)"):
        truth = {name: case[rule] for name, case in results.items() if "early" in case[rule]}
        worst = {key: max(s[key] for s in truth.values()) for key in ("early", "silent")}
        seen = [s for name, s in truth.items() if name in often]
        worst |= {key: max(s[key] for s in seen) for key in ("median", "late")}
        acts = max(case[rule]["acts"] for case in results.values() if "acts" in case[rule])
        rows.append([f"`{rule}`", *_words(worst), _percent(acts)])
    head = ["rule", *head, "acts without a stationary state"]
    return found | {"decisions, rules": markdown(head, rows)}


def _words(scores: dict[str, float]) -> list[str]:
    delays = [
        "never" if np.isinf(scores[key]) else f"{scores[key]:.1f}" for key in ("median", "late")
    ]
    return [_percent(scores["early"]), *delays, _percent(scores["silent"])]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main(arguments: list[str] | None = None) -> None:
    """Run all processes, and write the results and the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--only", nargs="+", help="names of processes; the page is left as it is")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    results = {}
    for process in processes():
        if not options.only or process.name in options.only:
            results[process.name] = compare(process, options.repetitions)
            print(process.name, json.dumps(results[process.name]), flush=True)
    write(options.out, {"repetitions": options.repetitions, "processes": results})
    if options.out == OUT and not options.only:
        text = PAGE.read_text()
        for name, table in tables(results).items():
            text = replace_table(text, name, table)
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
