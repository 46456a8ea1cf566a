"""Write the tables of `README.md` and draw `docs/figures/overhead.png` from `results/`.

    python benchmarks/tables.py

Each table replaces what is between `<!-- table: NAME -->` and `<!-- end -->` in `README.md`. A
table whose results do not exist is left as it is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE / "README.md"
FIGURE = HERE.parent / "docs" / "figures" / "overhead.png"
MODELS = {"mlp": "MLP", "resnet18": "ResNet-18", "gpt2": "GPT-2"}
CPU_TITLES = {
    "mlp-sgd": "MLP, SGD with decay",
    "mlp-momentum": "MLP, momentum",
    "mlp-adamw": "MLP, AdamW",
    "resnet18": "ResNet-18, momentum",
}

Ratios = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Comparison with bare, as JSON, by workload and variant."""


def cpu_ratios(results: Mapping[str, Any]) -> Ratios:
    """Return the ratios that `overhead.py` measured."""
    return {
        CPU_TITLES[name]: {v: row["step"] for v, row in results[name]["variants"].items()}
        for name in CPU_TITLES
        if name in results
    }


def gpu_ratios(results: Mapping[str, Any]) -> Ratios:
    """Return the ratios that `gpu_overhead.py` measured."""
    return {
        f"{MODELS[model]}, {optimizer}": {v: row["wall"] for v, row in case["variants"].items()}
        for model in MODELS
        for optimizer, case in results.get(model, {}).items()
    }


def ratio_table(ratios: Ratios, places: int = 3) -> str:
    """Return a row for each workload: ms of a bare step, and ratios with half a 95 % interval."""
    variants = list(next(iter(ratios.values())))
    rows = [
        [
            workload,
            f"{1e3 * row['bare']['median']:.3g}",
            *(_ratio(row[name], places) for name in variants[1:]),
        ]
        for workload, row in ratios.items()
    ]
    return markdown(["", "bare, ms", *variants[1:]], rows)


def memory_table(results: Mapping[str, Any]) -> str:
    """Return a row for each workload on a GPU: MiB of a bare step and in excess of it."""
    cases = {
        f"{MODELS[model]}, {optimizer}": case["variants"]
        for model in MODELS
        for optimizer, case in results.get(model, {}).items()
    }
    variants = list(next(iter(cases.values())))
    rows = [
        [
            workload,
            f"{row['bare']['memory_bytes'] / 2**20:.0f}",
            *(f"{row[name]['memory_over_bare_bytes'] / 2**20:+.1f}" for name in variants[1:]),
        ]
        for workload, row in cases.items()
    ]
    return markdown(["", "bare, MiB", *variants[1:]], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    table = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def replace_table(text: str, name: str, table: str) -> str:
    """Return the text with the table of that name replaced.

    Raises:
        ValueError: If the text has no place for it.
    """
    pattern = rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)"
    replaced, count = re.subn(
        pattern, lambda found: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"found {count} places for the table {name!r}, expected one")
    return replaced


def tables(results: Path) -> dict[str, str]:
    """Return the tables whose results exist in a folder, by name."""
    found: dict[str, str] = {}
    if cpu := _load(results / "overhead.json"):
        found["cpu"] = ratio_table(cpu_ratios(cpu), places=4)
    if gpu := _load(results / "gpu_overhead.json"):
        found["gpu"] = _gpu_heading(gpu) + "\n\n" + ratio_table(gpu_ratios(gpu))
        found["gpu memory"] = memory_table(gpu)
    return found


def draw(panels: Mapping[str, Ratios], path: Path) -> None:
    """Draw the ratios of all workloads, a panel for each device."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [len(ratios) for ratios in panels.values()]
    figure, grid = plt.subplots(
        len(panels),
        figsize=(8, 1.4 + 0.36 * sum(rows) + 0.9 * len(panels)),
        height_ratios=[count + 1 for count in rows],
        layout="constrained",
        squeeze=False,
    )
    for axes, (title, ratios) in zip(grid[:, 0], panels.items(), strict=True):
        variants = [name for name in next(iter(ratios.values())) if name != "bare"]
        for i, variant in enumerate(variants):
            comparisons = [row[variant] for row in ratios.values()]
            x = [c["ratio"] for c in comparisons]
            low, high = zip(*(c["ratio_interval"] for c in comparisons), strict=True)
            offset = 0.6 * (i / (len(variants) - 1) - 0.5)
            errors = [
                [max(0.0, r - end) for r, end in zip(x, low, strict=True)],
                [max(0.0, end - r) for r, end in zip(x, high, strict=True)],
            ]
            color = {"bare again": "0.5", "histograms, every 16": "C9"}.get(variant, f"C{i}")
            y = [k + offset for k in range(len(x))]
            axes.errorbar(x, y, xerr=errors, fmt="o", ms=4, color=color, label=variant)
        axes.axvline(1, color="0.7", lw=1, zorder=0)
        axes.set_yticks(range(len(ratios)), list(ratios))
        axes.invert_yaxis()
        axes.set(title=title, xlabel="time of a step, relative to a bare one")
        axes.set_xscale("log")
        _label_ratios(axes)
        axes.grid(axis="x", alpha=0.3)
    legends = [axes.get_legend_handles_labels() for axes in grid[:, 0]]
    complete = max(legends, key=lambda legend: len(legend[1]))  # a device may lack a variant
    grid[0, 0].legend(*complete, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label_ratios(axes: Any) -> None:
    """Label a logarithmic axis of ratios near 1 with the ratios themselves."""
    low, high = axes.get_xlim()
    candidates = [0.9, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10, 20]
    ticks = [tick for tick in candidates if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _gpu_heading(results: Mapping[str, Any]) -> str:
    cases = [case for model in results.values() for case in model.values()]
    devices = sorted({f"{case['device']}, torch {case['torch']}" for case in cases})
    rounds = [case["rounds"] for case in cases]
    return f"{'; '.join(devices)}. {min(rounds)} to {max(rounds)} rounds."


def _ratio(comparison: Mapping[str, Any], places: int) -> str:
    low, high = comparison["ratio_interval"]
    return f"{comparison['ratio']:.{places}f} ± {(high - low) / 2:.{places}f}"


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["results"] if path.exists() else {}


def main() -> None:
    """Write the tables and draw the figure."""
    results = HERE / "results"
    text = README.read_text()
    for name, table in tables(results).items():
        text = replace_table(text, name, table)
        print(f"{name}\n{table}\n")
    README.write_text(text)
    panels = {
        "CPU, one thread": cpu_ratios(_load(results / "overhead.json")),
        "GPU": gpu_ratios(_load(results / "gpu_overhead.json")),
    }
    draw({title: ratios for title, ratios in panels.items() if ratios}, FIGURE)
    print(f"written to {README} and {FIGURE}")


if __name__ == "__main__":
    main()
