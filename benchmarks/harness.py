"""Time several variants side by side, and compute ratios with confidence intervals.

A machine's speed drifts, so variants are measured in turn, in a new random order each round, and a
ratio is the median over rounds of what two variants took in the same round.
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch

from equilibrate.record.provenance import environment

T = TypeVar("T")


@dataclass(frozen=True)
class Comparison:
    """Times of a variant, and their ratio to those of another."""

    median: float
    quartiles: tuple[float, float]
    ratio: float
    ratio_interval: tuple[float, float]
    """Holds the ratio with 95 % confidence (bootstrap over rounds)."""

    def in_milliseconds(self) -> str:
        """The times: their median and quartiles."""
        low, high = (1e3 * q for q in self.quartiles)
        return f"{1e3 * self.median:.3f} ({low:.3f} to {high:.3f})"

    def as_ratio(self, places: int) -> str:
        """The ratio and its interval."""
        low, high = (f"{end:.{places}f}" for end in self.ratio_interval)
        return f"{self.ratio:.{places}f} ({low} to {high})"


def interleave(
    variants: Mapping[str, Callable[[], T]],
    rounds: int,
    seed: int = 0,
    *,
    seconds: float = math.inf,
    at_least: int = 3,
) -> dict[str, list[T]]:
    """Call each variant once a round, in a random order.

    Args:
        variants: What to call, by name.
        rounds: Number of rounds at most.
        seed: Seed of the order.
        seconds: Start no further round after this time.
        at_least: Rounds to complete whatever time they take, if `rounds` is not smaller.

    Returns:
        What each variant returned, round by round.
    """
    random, results = Random(seed), {name: [] for name in variants}
    end = time.monotonic() + seconds
    for done in range(rounds):
        if done >= at_least and time.monotonic() > end:
            break
        for name in random.sample(list(variants), len(variants)):
            results[name].append(variants[name]())
    return results


def compare(times: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Compare two variants that were measured in the same rounds."""
    ratios = np.divide(times, baseline)
    resampled = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    first, third = np.quantile(times, [0.25, 0.75])
    return Comparison(
        float(np.median(times)),
        (float(first), float(third)),
        float(np.median(ratios)),
        (float(low), float(high)),
    )


def markdown(
    name: str,
    result: Mapping[str, Any],
    details: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> str:
    """One workload as a table of Markdown, a row for each variant, under what was run."""
    sgd = ", ".join(f"{key} {value:g}" for key, value in result["sgd"].items())
    lines = [
        f"**{name}**, {details}, {sgd}; "
        f"{result['rounds']} rounds of {result['steps_a_round']} step(s)",
        "",
    ]
    table = [["", *columns], ["---"] * (1 + len(columns)), *rows]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in table])


def write(path: Path, results: Any) -> None:
    """Write results as JSON, with the environment that they were made in."""
    where = environment() | {
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "niceness": os.nice(0),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": where, "results": results}, indent=1, default=_plain)
    one_line = re.sub(r"\[[^\[\]{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    path.write_text(one_line + "\n")


def _plain(comparison: Comparison) -> dict[str, Any]:
    return {
        key: [_rounded(x) for x in value] if isinstance(value, tuple) else _rounded(value)
        for key, value in asdict(comparison).items()
    }


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def command(
    file: str,
    description: str | None,
    workloads: Mapping[str, Any],
    run: Callable[[Any], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> None:
    """The command line of a benchmark: measure workloads one by one, print tables, write JSON."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=workloads, default=list(workloads))
    parser.add_argument("--rounds", type=int, help="instead of each workload's own number")
    default = Path(file).parent / "results" / f"{Path(file).stem}.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Results of other workloads in the same file are kept.
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else {}
    for name in options.workload:
        workload = workloads[name]
        results[name] = run(replace(workload, rounds=options.rounds or workload.rounds))
        print(table(results[name]), end="\n\n", flush=True)
        write(options.out, results)
    print(f"written to {options.out}")
