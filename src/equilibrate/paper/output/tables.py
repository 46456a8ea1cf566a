"""The numbers behind figures and claims as tables, made from the records alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from equilibrate.paper.analysis import findings, measures
from equilibrate.paper.analysis.claims import Claim
from equilibrate.paper.analysis.measures import END
from equilibrate.paper.analysis.results import Array, Result, Tread
from equilibrate.paper.analysis.statistics import Estimate, estimate
from equilibrate.paper.protocol.panels import runs_of_the_paper
from equilibrate.paper.protocol.profiles import PROFILES
from equilibrate.paper.protocol.run import whole_name
from equilibrate.paper.runs.timings import Timing
from equilibrate.report.page import Table, number

Results = Mapping[str, Result]

_ARMS = {
    "preset": "preset, η/10 for each quarter",
    "adaptive": "adaptive, X = 0.01, Y = 0.1",
    "eager": "adaptive, X = 0.1, Y = 0.3",
    "amsgrad": "AMSGrad",
    "adam": "Adam",
}


def numbers(results: Results, timings: Iterable[Timing] = ()) -> list[Table]:
    """Every table for which there are records, in the order of the figures."""
    results = {name: result for name, result in results.items() if len(result.epoch)}
    tasks = ("mlp", "cnn")
    found = [table(results, task) for table in (_equilibration, _landscape) for task in tasks]
    found.append(_accuracies(results, tasks))
    found += [table for task in tasks for table in _grid(results, task)]
    found += [_precision(results, tasks), _speed(timings)]
    return [table for table in found if table is not None and table.rows]


def of_claims(claims: Sequence[Claim]) -> list[Table]:
    """The paper's claims, and ours."""
    columns = ("Figure", "Claim", "Measured", "Held to", "Verdict")
    headings = {False: "Claims of the paper", True: "Claims beyond the paper"}
    return [
        Table(
            heading,
            columns,
            [
                (
                    claim.figure,
                    claim.statement,
                    number(claim.measured, claim.error),
                    claim.bound,
                    claim.verdict + (f" ({claim.remark})" if claim.remark else ""),
                )
                for claim in claims
                if claim.ours == ours
            ],
        )
        for ours, heading in headings.items()
    ]


_SUMMARY = (
    ("2", "the sides of FDR1 meet at every η", "sequence-meet", "{} % apart at the worst η", 100),
    ("2", "the smaller η, the longer it takes", "sequence-slows", "time ∝ η^({})", 1),
    ("3", "O_FB vanishes with η", "landscape-vanishes", "{} % left at the smallest η", 100),
    ("3", "O_FB is linear in η below 0.01", "landscape-linear", "{} % off the line", 100),
    ("3", "O_FB is anharmonic down to η ∼ 0.001", "landscape-bent", "{} % off the line", 100),
    ("4", "adaptive is comparable to preset", "adaptive-like-preset", "by {} points", 100),
    ("4", "adaptive ends above AMSGrad", "adaptive-beats-amsgrad", "by {} points", 100),
    ("4", "adaptive lags behind AMSGrad at first", "adaptive-lags", "by {} points", 100),
    ("S1", "AMSGrad ends marginally above Adam", "amsgrad-beats-adam", "by {} points", 100),
    ("S2", "X = 0.1, Y = 0.3 is ahead at first", "eager-faster", "by {} points", 100),
    ("S2", "… and ends below", "eager-ends-lower", "by {} points", 100),
)


def summary(claims: Sequence[Claim]) -> Table:
    """The paper's claims in a few words, with what was found for each task."""
    found = {claim.id: claim for claim in claims}

    def cell(claim: Claim | None, words: str, scale: float) -> str:
        if claim is None or claim.measured is None:
            return "–" if claim is None else "not run"
        error = None if claim.error is None else scale * claim.error
        return f"{claim.verdict}: {words.format(number(scale * claim.measured, error))}"

    rows = [
        (figure, says, *(cell(found.get(f"{id}-{task}"), words, scale) for task in ("mlp", "cnn")))
        for figure, says, id, words, scale in _SUMMARY
    ]
    heading = "In short (± is half a 95 % interval over seeds; points are of test accuracy)"
    return Table(heading, ("figure", "the paper says", "MLP", "CNN"), rows)


def markdown(tables: Iterable[Table]) -> str:
    """The tables as Markdown, a heading above each.

    >>> print(markdown([Table("Size", ("what", "|x|"), [("a", "1")])]))
    ### Size
    <BLANKLINE>
    | what | \\|x\\| |
    | --- | --- |
    | a | 1 |
    <BLANKLINE>
    """
    parts = []
    for table in tables:
        lines = [_line(table.columns), _line(["---"] * len(table.columns))]
        lines += [_line(row) for row in table.rows]
        parts.append(f"### {table.heading}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _heading(text: str, *results: Result) -> str:
    missing = [f"{r.run.name}: {shortfall}" for r in results if (shortfall := r.shortfall)]
    return text + (f" (incomplete – {'; '.join(missing)})" if missing else "")


def _text(found: Estimate, scale: float = 1.0) -> str:
    error = None if math.isnan(found.half_width) else scale * found.half_width
    return number(None if math.isnan(found.mean) else scale * found.mean, error)


def _percent(values: Array) -> str:
    """Mean ± standard deviation over seeds of numbers in [0, 1]."""
    spread = f" ± {100 * values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{100 * values.mean():.2f}{spread}"


# FDR1 and FDR2 --------------------------------------------------------------------------------


def _equilibration(results: Results, task: str) -> Table | None:
    result, independent = results.get(f"{task}-sequence"), results.get(f"{task}-unbiased")
    if result is None:
        return None
    treads = measures.finished(result)
    fit = measures.relaxation_power(treads)
    power = "" if fit is None else f", time ∝ η^({_text(estimate(fit[0]))})"
    columns = ["η", "L̄/R̄ − 1 at the end", "epochs until it stays within ± 0.1"]
    rows = [[f"{t.lr:g}", _text(estimate(measures.residual(t))), _meeting_time(t)] for t in treads]
    if independent is not None:
        columns.append("L̄/R̄ − 1, independent batches")
        others = {tread.lr: tread for tread in measures.finished(independent)}
        for tread, row in zip(treads, rows, strict=True):
            other = others.get(tread.lr)
            row.append("–" if other is None else _text(estimate(measures.residual(other))))
    there = [r for r in (result, independent) if r is not None]
    return Table(_heading(f"Equilibration, {result.run.task.title}{power}", *there), columns, rows)


def _meeting_time(tread: Tread) -> str:
    times = measures.meeting_times(tread)
    if np.isnan(times).any():
        return f"{np.isnan(times).sum()} of {len(times)} seeds longer than {tread.epochs}"
    mean, low, high = measures.geometric(times)
    return f"{mean:.3g}" + ("" if math.isnan(low) else f" ({low:.3g} to {high:.3g})")


def _landscape(results: Results, task: str) -> Table | None:
    both = [results[name] for kind in _BATCHES if (name := f"{task}-{kind}") in results]
    if not both:
        return None
    treads = {r.run.name: {t.lr: t for t in measures.finished(r)} for r in both}
    columns = ["η"]
    for result in both:
        kind = _BATCHES[result.run.name.removeprefix(f"{task}-")]
        columns += [f"O_FB, {kind}", f"O_FB/η, {kind}"]
    if len(both) == 2:
        columns.append("reshuffled − independent")
        if both[0].run.momentum:
            columns.append("by the second term, at most (predicted)")
    rows = []
    for lr in sorted({lr for found in treads.values() for lr in found}, reverse=True):
        cells = [f"{lr:g}"]
        values = [_value(found.get(lr)) for found in treads.values()]
        for value in values:
            cells += [_text(value), _text(value, 1 / lr)]
        if len(both) == 2:
            error = math.hypot(*(value.half_width for value in values))
            cells.append(_text(Estimate(values[0].mean - values[1].mean, error)))
            if both[0].run.momentum:
                shuffled = treads[both[0].run.name].get(lr)
                cells.append("–" if shuffled is None else _offset(shuffled))
        rows.append(cells)
    return Table(_heading(f"O_FB, {both[0].run.task.title}", *both), columns, rows)


_BATCHES = {"sequence": "reshuffled", "unbiased": "independent"}


def _value(tread: Tread | None) -> Estimate:
    return Estimate(math.nan, math.nan) if tread is None else estimate(tread.last("landscape"))


def _offset(tread: Tread) -> str:
    return f"{measures.reshuffling_offset(tread):.2g}".replace("-", "−")


# Schedules ------------------------------------------------------------------------------------


def _accuracies(results: Results, tasks: Sequence[str]) -> Table:
    names = [f"{task}-{kind}" for task in tasks for kind in ("schedules", "amsgrad", "adam")]
    there = [results[name] for name in names if name in results]
    rows = []
    for result in there:
        for arm in result.run.arms:
            rates = result.column("lr", arm)[-1]
            ends = dict.fromkeys(f"{lr:.2g}" for lr in (rates.min(), rates.max()))
            rows.append(
                (
                    result.run.task.title,
                    _ARMS[arm],
                    _percent(measures.accuracy(result, arm, END)),
                    _percent(measures.accuracy(result, arm, END, "train_accuracy")),
                    " to ".join(ends),
                    f"{len(result.run.seeds)}",
                )
            )
    columns = ("Task", "Schedule", "test accuracy (%)", "training accuracy (%)", "last η", "seeds")
    return Table(_heading("Final accuracies, mean ± s.d. over seeds", *there), columns, rows)


def _grid(results: Results, task: str) -> list[Table]:
    result = results.get(f"{task}-grid")
    if result is None:
        return []
    found = measures.grid(result)
    columns = ["X \\ Y", *(f"{y:g}" for y in found.decreases)]

    def table(heading: str, values: Array, places: int) -> Table:
        rows = [
            [f"{x:g}", *(f"{v:.{places}f}" if np.isfinite(v) else "never" for v in row)]
            for x, row in zip(found.tolerances, values, strict=True)
        ]
        return Table(_heading(f"{heading}, {result.run.task.title}", result), columns, rows)

    return [
        table("Final test accuracy (%) over X and Y", 100 * found.accuracy, 2),
        table("Epochs until it stays there, over X and Y", found.arrival, 0),
    ]


# Precision and speed --------------------------------------------------------------------------


def _precision(results: Results, tasks: Sequence[str]) -> Table:
    rows, there = [], []
    for task in tasks:
        mine = [
            results[name] for kind in measures.PRECISIONS if (name := f"{task}-{kind}") in results
        ]
        there += mine
        treads = {r.run.precision: t for r in mine for t in measures.finished(r)}
        for precision, tread in treads.items():
            single = treads.get("fp32") if precision != "fp32" else None
            rows.append(
                (
                    tread.result.run.task.title,
                    measures.PRECISIONS[precision],
                    _text(estimate(measures.residual(tread))),
                    _difference(single, tread, measures.residual),
                    _text(estimate(tread.last("landscape"))),
                    _difference(single, tread, lambda tread: tread.last("landscape")),
                )
            )
    columns = ("Task", "precision", "L̄/R̄ − 1", "− single", "O_FB", "− single")
    heading = f"Precision of products; differences at 95 % for all {findings.COMPARISONS} together"
    return Table(_heading(heading, *there), columns, rows)


def _difference(single: Tread | None, tread: Tread, quantity: findings.Quantity) -> str:
    return "–" if single is None else _text(findings.paired(single, tread, quantity))


def _speed(timings: Iterable[Timing]) -> Table:
    """Runs in the order of the protocol, and how long those of the paper took, and all."""
    order = [*PROFILES["paper"].runs]
    whole = {timing: whole_name(timing.run) for timing in timings}
    made = sorted(whole, key=lambda t: (order.index(whole[t]), t.run))
    rows = [
        (
            timing.run,
            f"{timing.replicas}",
            f"{timing.epochs}",
            measures.PRECISIONS[timing.precision],
            _clock(timing.seconds),
            f"{timing.steps_per_second:.0f}",
            f"{timing.replica_step_microseconds:.1f}",
            f"{timing.device}, torch {timing.torch}",
            _abbreviated(timing.commit),
        )
        for timing in made
    ]
    theirs = [timing for timing in made if whole[timing] in runs_of_the_paper()]
    for name, some in {"those of the paper": theirs, "all": made}.items():
        if some:
            rows.append((name, "", "", "", _clock(sum(t.seconds for t in some)), "", "", "", ""))
    columns = ("Run", "replicas", "epochs", "precision", "wall time", "steps/s", "µs/replica-step")
    return Table("Speed, all measurements included", (*columns, "on", "commit"), rows)


def _abbreviated(commit: str | None) -> str:
    """A commit as one names it; + stands for changes that no commit holds.

    >>> _abbreviated("a7f4e8912ab4c5d6e7f8091a2b3c4d5e6f708192+")
    'a7f4e89+'
    """
    return "–" if commit is None else commit[:7] + "+" * commit.endswith("+")


def _clock(seconds: float) -> str:
    """Seconds as one reads a watch.

    >>> [_clock(s) for s in (4.26, 59.97, 347.0)]
    ['4.3 s', '1 min 0 s', '5 min 47 s']
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
