"""What a step of each arm costs, relative to a bare one, alone on the machine."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from harness import compare, interleave

from training_study import data
from training_study.arms import ARMS, Context
from training_study.controls import Cadence
from training_study.runs import prepare, write
from training_study.tasks import TASKS, Loop, Network


def measure(
    tasks: Iterable[str],
    arms: Iterable[str],
    file: Path | None,
    out: Path,
    *,
    cadence: Cadence,
    rounds: int = 9,
    tiny: bool = False,
) -> None:
    """Time blocks of steps with one check each, all arms in turn; add the ratios to a file.

    Arms of equal cost are measured once, and a second bare loop shows the noise.
    """
    device = prepare()
    chosen = {ARMS[arm].cost: arm for arm in reversed(list(arms))}
    variants = {"bare": "constant", "bare again": "constant"}
    variants |= {cost: arm for cost, arm in reversed(chosen.items()) if cost != "bare"}
    path = out / "overhead.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in tasks:
        blocks = {
            cost: _block(name, arm, file, device, cadence, tiny=tiny)
            for cost, arm in variants.items()
        }
        for block in blocks.values():
            block()  # the first one compiles, allocates and measures more often
        times = interleave(blocks, rounds)
        found[name] = {cost: asdict(compare(t, times["bare"])) for cost, t in times.items()}
        write(path, found)
        print(
            f"{name}: "
            + ", ".join(f"{cost} {row['ratio']:.3f}" for cost, row in found[name].items()),
            flush=True,
        )


def _block(
    name: str, arm: str, file: Path | None, device: str, cadence: Cadence, *, tiny: bool
) -> Callable[[], float]:
    """Return a function that trains for one check interval and returns the time of a step."""
    task = TASKS[name]
    setting = ARMS[arm].trials(task)[0]
    network = Network(task, data.load(task.data, file), device, tiny=tiny)
    loop = Loop(network, 0, ARMS[arm].build(task, setting, device))
    options = {key: value for key, value in setting.items() if key != "lr"}
    cadence = cadence.fitted(network.epoch)
    context = Context(loop.optimizer, 10**6, 10**5, options, cadence)
    control = ARMS[arm].make(context)

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def block() -> float:
        began = now()
        before = network.total.item()
        for _ in range(cadence.check):
            control.factor(loop.step)
            loop.train()
        control.check(loop.step, (network.total.item() - before) / cadence.check)
        return (now() - began) / cadence.check

    return block
