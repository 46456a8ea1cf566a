"""Does a monitor grow? Resident memory and the time of a reading over a million steps.

    python benchmarks/memory.py

A model of 20 small tensors is monitored with a reading for each parameter. The gradients stay the
same, so that nearly all of the time is the optimizer's step and the monitor's.
"""

import argparse
import gc
import os
import time
from pathlib import Path
from statistics import median

import torch
from harness import write
from torch import nn

import equilibrate as eq

TENSORS = 20


def resident() -> float:
    """Return the resident memory of this process in megabytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def reading_time(monitor: eq.Monitor, repeats: int = 30) -> float:
    """Return the median time of reading every parameter, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        monitor.layers()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def measure(every: int, steps: int, momentum: float) -> list[dict[str, float]]:
    """Train for a number of steps and note memory and reading time at each power of ten."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(4) for _ in range(TENSORS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum, fused=True)
    monitor = eq.Monitor(optimizer, model, every)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    rows, start = [], time.perf_counter()
    moments = [10**k for k in range(3, 10) if 10**k <= steps]
    for t in range(1, steps + 1):
        optimizer.step()
        if t % 5000 == 0:  # a direction that turns around keeps the parameters bounded
            for p in model.parameters():
                p.grad.neg_()  # pyright: ignore[reportOptionalMemberAccess]
        if t in moments:
            row = {
                "steps": t,
                "resident_mb": resident(),
                "reading_ms": reading_time(monitor),
                "seconds": time.perf_counter() - start,
            }
            rows.append(row)
            print(
                f"every {every}: {t:>9,} steps, {row['resident_mb']:.1f} MB resident, "
                f"{row['reading_ms']:.2f} ms a reading, {row['seconds']:.0f} s",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure with every step and with every 16th step measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/memory.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for every in arguments.every:
        rows = measure(every, arguments.steps, arguments.momentum)
        at = {row["steps"]: row for row in rows}
        first, last = at[10**4], rows[-1]
        results[f"every {every}"] = {
            "rows": rows,
            "growth_mb": last["resident_mb"] - first["resident_mb"],
            "reading_time_ratio": last["reading_ms"] / first["reading_ms"],
        }
    write(arguments.out, {"tensors": TENSORS, "momentum": arguments.momentum, **results})


if __name__ == "__main__":
    main()
