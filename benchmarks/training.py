"""Does lowering the learning rate at equilibrium pay in the training people do?

Four tasks, nineteen arms, eight trials of settings for each, five seeds for what is reported;
`training_study/page.md` says what is compared and how. Runs are made side by side in processes, and
a call continues where the last one stopped:

    python benchmarks/pack_data.py SOURCE data/training.xz --study        # once
    python benchmarks/training.py --data data/training.xz --plan --fit 24 # measure, set budgets
    python benchmarks/training.py --data data/training.xz --minutes 9 --pack training.tar
    python benchmarks/training.py --data data/training.xz --overhead      # after all runs
    python benchmarks/training.py --collect                               # one file for each task
    python benchmarks/training.py --figures                               # tables, figures, page

The first call writes `study.json` into `--out`; later ones use the settings in it.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from training_study import data, overhead, plan, records, runs, study, workers
from training_study.arms import ARMS, available
from training_study.controls import Cadence
from training_study.tasks import TASKS

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "training"
PAGE = ROOT / "docs" / "training-study.md"

TINY = Cadence(check=10, every=2, horizons=(8, 12))


def settings(options: argparse.Namespace) -> study.Study:
    """Return the study of the folder, or one from the options; they must not disagree.

    Arms can be added to a study, since no run depends on which other arms there are.

    Raises:
        ValueError: If the folder holds a study with other settings.
    """
    found = study.open_study(options.out)
    asked = {
        "budgets": _budgets(options) if options.budget or options.tasks else None,
        "arms": tuple(options.arms) if options.arms else None,
        "seeds": tuple(range(options.seeds)) if options.seeds else None,
    }
    asked = {key: value for key, value in asked.items() if value is not None}
    if found is not None:
        if set(asked.get("arms", ())) > set(found.arms):
            found = replace(found, arms=asked["arms"])
        differing = {key: value for key, value in asked.items() if getattr(found, key) != value}
        if differing:
            raise ValueError(
                f"{options.out} holds a study with other {', '.join(differing)}: leave the "
                "options out, or choose another --out"
            )
        return found
    arms, missing = available(options.arms)
    for name, reason in missing.items():
        print(f"left out: {name}, {reason}", flush=True)
    cadence = TINY if options.tiny else Cadence()
    return study.Study(
        **{"budgets": _budgets(options), **asked, "arms": tuple(arms)}, cadence=cadence
    )


def _budgets(options: argparse.Namespace) -> dict[str, int]:
    given = {name: int(steps) for name, _, steps in (b.partition("=") for b in options.budget)}
    tasks = options.tasks or list(TASKS)
    return {name: given.get(name, TASKS[name].budget) for name in tasks}


def perform(options: argparse.Namespace) -> int:
    """Make the runs that are missing, as many as fit; return how many failed."""
    chosen = settings(options)
    options.out.mkdir(parents=True, exist_ok=True)
    study.save(chosen, options.out)
    if options.data is not None:
        data.unpacked(options.data)  # once, before many processes want it
    place = runs.Place(options.out, options.data, tiny=options.tiny)
    assumed = plan.assumed()

    def remaining() -> list[workers.Work]:
        speeds = plan.observed(assumed, records.read(options.out))
        forked = place.forked()
        works = []
        for jobs in chosen.remaining(place):
            first = jobs[0]
            seconds = max(speeds[job.task].run(job, forked.get(job.name, 0)) for job in jobs)
            if first.shared is None or first.name in forked:
                works.append(workers.Work(first.name, runs.execute, (first, place), seconds))
            else:
                name = "shared_" + "_".join(map(str, first.shared))
                works.append(workers.Work(name, runs.execute_shared, (jobs, place), seconds))
        return works

    def tick() -> None:
        if options.pack:
            records.pack(options.out, options.pack)

    outcome = workers.work_off(remaining, options.workers, 60 * options.minutes, tick)
    left = len(chosen.total()) - len(records.read(options.out))
    print(
        f"{len(outcome.finished)} runs done in {outcome.seconds / 60:.1f} min, "
        f"{len(outcome.failed)} failed, {left} left",
        flush=True,
    )
    for name in outcome.failed:
        print(f"failed: {name}", flush=True)
    return len(outcome.failed)


def show_plan(options: argparse.Namespace) -> None:
    """Print how long the study takes; with `--fit`, set budgets that fit and save them."""
    chosen = settings(options)
    speeds = plan.assumed()
    if options.assume:
        print("speeds are assumed, not measured")
    else:
        began = time.monotonic()
        if options.data is not None:
            data.unpacked(options.data)
        place = runs.Place(options.out, options.data, tiny=options.tiny)
        speeds |= plan.measure(chosen.budgets, place, options.workers, options.plan_steps)
        print(f"measured in {time.monotonic() - began:.0f} s with {options.workers} workers")
    if options.fit:
        if study.open_study(options.out) is not None:
            raise ValueError(f"{options.out} holds a study already: --fit cannot change budgets")
        chosen = plan.fit(chosen, speeds, options.workers, 60 * options.fit)
        study.save(chosen, options.out)
    print(plan.report(chosen, speeds, options.workers), flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--data", type=Path, help="the file that pack_data.py --study wrote")
    made.add_argument("--out", type=Path, default=OUT, help="folder of the records")
    made.add_argument("--tasks", nargs="+", choices=TASKS)
    made.add_argument("--arms", nargs="+", choices=ARMS, help="all if not given; can be added to")
    made.add_argument("--seeds", type=int, help="number of reported seeds; 5 if not given")
    made.add_argument("--budget", nargs="+", default=[], metavar="TASK=STEPS")
    made.add_argument("--workers", type=int, default=16)
    made.add_argument("--minutes", type=float, default=9.0, help="start no run that ends later")
    made.add_argument("--pack", type=Path, metavar="FILE", help="records as one tar file")
    made.add_argument("--plan", action="store_true", help="measure, print, run nothing")
    made.add_argument("--plan-steps", type=int, default=200, help=argparse.SUPPRESS)
    made.add_argument("--assume", action="store_true", help="with --plan: do not measure")
    made.add_argument("--fit", type=float, metavar="MINUTES", help="with --plan: set budgets")
    made.add_argument("--overhead", action="store_true", help="measure the time of a step")
    made.add_argument("--collect", action="store_true", help="merge records, one file a task")
    made.add_argument("--figures", action="store_true", help="write the page from the records")
    made.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Run what the options ask for."""
    made = parser()
    options = made.parse_args(arguments)
    if options.tiny and options.out == OUT:
        made.error("--tiny needs --out: it cannot overwrite measured results")
    needs_data = not (options.collect or options.figures or options.tiny)
    if needs_data and options.data is None and not (options.plan and options.assume):
        made.error("--data is missing: pass the file that pack_data.py --study wrote")
    try:
        if options.collect:
            records.collect(options.out)
        elif options.figures:
            from training_study import figures  # matplotlib is not needed to run anything

            if not figures.write_page(options.out, PAGE):
                sys.exit(f"{options.out} holds no records to make tables from")
        elif options.plan:
            show_plan(options)
        elif options.overhead:
            chosen = settings(options)
            overhead.measure(
                chosen.budgets, chosen.arms, options.data, options.out, cadence=chosen.cadence,
                tiny=options.tiny,
            )  # fmt: skip
            if options.pack:
                records.pack(options.out, options.pack)
        elif perform(options):
            sys.exit(1)
    except ValueError as error:
        made.error(str(error))


if __name__ == "__main__":
    main()
