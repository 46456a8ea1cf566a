"""The tables and the figure of `docs/decisions.md`: `decisions.py` and `decision_limits.py`."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows."""


def ours(results: Mapping[str, Any]) -> Table:
    """Return what `Stationary` does on each process."""
    rows = []
    for name, case in results["processes"].items():
        score = case["rules"]["Stationary"]
        if "acts" in score:
            said = f"acts in {_percent(score['acts'])}; diffusing in {_percent(case['diffusing'])}"
            rows.append([name, said, "", "", ""])
        else:
            rows.append(
                [
                    name,
                    _percent(score["early"]),
                    _time(score["median"]),
                    _time(score["late"]),
                    _percent(score["silent"]),
                ]
            )
    head = ["process", "too early", "median delay", "90 % of delays", "silent for 50"]
    return head, rows


def rules(results: Mapping[str, Any]) -> Table:
    """Return the worst numbers of each rule over all processes."""
    rows = [
        [
            name,
            _percent(row["early"]),
            _time(row["median"]),
            _time(row["late"]),
            _percent(row["silent"]),
            _percent(row["acts"]),
        ]
        for name, row in results["worst"].items()
        if not name.startswith("strictness")
    ]
    head = ["rule", "too early", "median delay", "90 % of delays", "silent for 50"]
    return [*head, "acts without a stationary state"], rows


def frontier(results: Mapping[str, Any]) -> Table:
    """Return the worst numbers of `Stationary` from lenient to strict."""
    rows = [
        [
            name.removeprefix("strictness "),
            _percent(row["early"]),
            _time(row["median"]),
            _time(row["late"]),
            _percent(row["acts"]),
        ]
        for name, row in results["worst"].items()
        if name.startswith("strictness")
    ]
    head = ["strictness", "too early", "median delay", "90 % of delays"]
    return [*head, "acts without a stationary state"], rows


def halvings(results: Mapping[str, Any]) -> Table:
    """Return four halvings in a row."""
    rows = [
        [
            f"{dimensions} dimensions",
            str(i + 1),
            _percent(score["early"]),
            _time(score["median"]),
            _time(score["late"]),
        ]
        for dimensions, scores in results["halvings"].items()
        for i, score in enumerate(scores)
    ]
    return ["", "halving", "too early", "median delay", "90 % of delays"], rows


def oracle(results: Mapping[str, Any]) -> Table:
    """Return what a rule that is told the model reaches, and `Stationary` on the same runs."""
    rows = []
    for name, case in results["limits"].items():
        told, ours = (
            [_percent(score["early"]), _time(score["median"]), _time(score["late"])]
            for score in (case["oracle"], case["ours"])
        )
        rows.append([name, *told, *ours])
    numbers = ["too early", "median", "90 %"]
    return ["process", *(f"oracle: {n}" for n in numbers), *(f"ours: {n}" for n in numbers)], rows


def unseen(results: Mapping[str, Any]) -> Table:
    """Return what `Stationary` does on processes on which no setting was chosen."""
    rows = []
    for name, score in results["unseen"].items():
        if "acts" in score:
            rows.append([name, f"acts in {_percent(score['acts'])}", "", "", ""])
        else:
            times = [_time(score["median"]), _time(score["late"])]
            rows.append([name, _percent(score["early"]), *times, _percent(score["silent"])])
    return ["process", "too early", "median delay", "90 % of delays", "silent for 50"], rows


LIMITS: dict[str, Callable[[Mapping[str, Any]], Table]] = {
    "decisions, oracle": oracle,
    "decisions, unseen": unseen,
}
"""Tables of the results of `decision_limits.py` by the names of their places."""
TABLES: dict[str, Callable[[Mapping[str, Any]], Table]] = {
    "decisions, ours": ours,
    "decisions, rules": rules,
    "decisions, frontier": frontier,
    "decisions, halvings": halvings,
}
"""Tables by the names of their places."""


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the worst rate of acting too early against the worst median delay."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    floor = 0.5 / results["repetitions"]
    sweep = [row for name, row in results["worst"].items() if name.startswith("strictness")]
    sweep.sort(key=lambda row: row["median"])
    axes.plot(
        [row["median"] for row in sweep],
        [max(row["early"], floor) for row in sweep],
        "o-",
        label="Stationary, lenient to strict",
    )
    edge = 40.0
    for i, (name, row) in enumerate(results["worst"].items()):
        if name == "Stationary" or name.startswith("strictness"):
            continue
        late = not row["median"] < edge
        label = name + (f" (median {_time(row['median'])})" if late else "")
        x = min(max(row["median"], -1.0), edge)
        axes.plot(x, max(row["early"], floor), ">" if late else "s", color=f"C{i % 10}",
                  mfc="none" if i > 9 else None, label=label)  # fmt: skip
    axes.axhline(0.01, color="0.7", lw=1, zorder=0)
    axes.set_yscale("log")
    axes.set(
        xlabel="worst median delay, loss-relaxation times",
        ylabel="worst rate of acting too early",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _time(delay: float) -> str:
    return "never" if math.isinf(delay) else f"{delay:.1f}"
