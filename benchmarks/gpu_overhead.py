"""The cost of a monitored training step on a GPU, relative to a bare one.

One model is trained with one optimizer, on one batch that stays on the device, in eager mode. A
round runs a block of steps with each watcher in random order; watchers are attached before and
detached after their block, so that all variants share memory and kernels. The clock is wall time
between two synchronizations. A ratio is the median over rounds of the ratio to the bare block of
the same round. Blocks are multiples of 16 steps, so every block contains as many measurements as
its share of the run. "bare again" is a second bare variant: its ratio is the noise.

An eager loop of small kernels waits for the host, so the time that the host spends in the hooks is
added to each step. It is measured in blocks of its own, with a clock around each hook, and given
relative to a bare step: a second, far less noisy measure of the same cost wherever the host is the
bottleneck, and an upper bound on what the host adds elsewhere.

Memory is the peak of what a separate loop of each variant allocates, in excess of bare.

    python benchmarks/gpu_overhead.py [--models mlp resnet18 gpt2]
        [--optimizers sgd adamw-fused ...] [--rounds N] [--minutes M] [--out FILE] [--dry-run]

Results are written after each model and optimizer. Cases that the output file already holds and
that are not measured again are kept. `python benchmarks/tables.py` turns them into tables.
"""

import argparse
import copy
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import compare, interleave, write
from watchers import WATCHERS, Bare
from workloads import (
    FUSED,
    OPTIMIZERS,
    Workload,
    gpt2,
    has_transformers,
    make_optimizer,
    mlp,
    resnet18,
)

OUT = Path(__file__).parent / "results" / "gpu_overhead.json"
NAMES = [name for base in ("sgd", "momentum", "nesterov", "adamw") for name in (base, base + FUSED)]


@dataclass(frozen=True)
class MeasuringPlan:
    """How a model is measured."""

    build: Callable[..., Workload]
    steps: int
    """Steps in a block, a multiple of 16."""
    minutes: float
    """Time for each optimizer, setting up included."""


PLANS = {
    "mlp": MeasuringPlan(mlp, 64, 0.3),
    "resnet18": MeasuringPlan(partial(resnet18, autocast=True), 16, 0.6),
    "gpt2": MeasuringPlan(partial(gpt2, autocast=True), 16, 1.2),
}
DRY_RUN = {"batch_size": 2, "tiny": True}


class GpuLoop:
    """A training loop with its own model, optimizer and watcher.

    Args:
        workload: The model, of which a copy is trained, and its data.
        optimizer: Name of the optimizer.
        watcher: What watches the loop.
    """

    def __init__(
        self, workload: Workload, optimizer: str, watcher: Callable[..., Bare] = Bare
    ) -> None:
        self.workload = workload
        self.model = copy.deepcopy(workload.model)
        self.optimizer = make_optimizer(optimizer, self.model.parameters())
        self.watcher = watcher(self.model, self.optimizer)

    def run(self, steps: int) -> None:
        """Train for a number of steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.workload.backward(self.model)
            self.watcher.before_step()
            self.optimizer.step()
            self.watcher.after_step(loss)

    def seconds_per_step(self, watcher: Callable[..., Bare], steps: int) -> float:
        """Return the wall time of a step with a watcher, averaged over a block."""
        self.watcher = watcher(self.model, self.optimizer)
        self.run(2)  # a monitor measures more at the beginning of a window
        _synchronize()
        begun = time.perf_counter()
        self.run(steps)
        _synchronize()
        seconds = time.perf_counter() - begun
        self.watcher.close()
        return seconds / steps

    def hook_seconds_per_step(self, watcher: Callable[..., Bare], steps: int) -> float:
        """Return the time that the host spends in a watcher's hooks, averaged over a block."""
        self.watcher = watcher(self.model, self.optimizer)
        self.run(2)
        clock = HookClock(self.optimizer)
        self.run(steps)
        _synchronize()
        self.watcher.close()
        return clock.seconds / steps


class HookClock:
    """Adds up the time that the host spends in the step hooks that an optimizer has now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds = 0.0
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            for key, hook in hooks.items():
                hooks[key] = partial(self._call, hook)

    def _call(self, hook: Callable[..., Any], *arguments: Any) -> None:
        begun = time.perf_counter()
        hook(*arguments)
        self.seconds += time.perf_counter() - begun


def measure(
    workload: Workload, optimizer: str, steps: int, minutes: float, rounds: int
) -> dict[str, Any]:
    """Measure all variants of one model and optimizer."""
    end = time.monotonic() + 60 * minutes
    loop = GpuLoop(workload, optimizer)
    loop.run(20)  # autotuning and workspaces, which are not a variant's own
    memory = {
        name: _peak_memory(partial(GpuLoop, workload, optimizer, watcher))
        for name, watcher in WATCHERS.items()
    }
    blocks = {
        name: partial(loop.seconds_per_step, watcher, steps) for name, watcher in WATCHERS.items()
    }
    hooked = [name for name in WATCHERS if "every=" in name]
    for name in hooked:
        blocks[_in_hooks(name)] = partial(loop.hook_seconds_per_step, WATCHERS[name], steps)
    times = interleave(blocks, rounds, seconds=end - time.monotonic())
    return {
        "workload": workload.title,
        "parameters": workload.parameters,
        "batch": list(workload.inputs.shape),
        "autocast": workload.autocast,
        "optimizer": OPTIMIZERS[optimizer.removesuffix(FUSED)][1],
        "device": _device_name(workload.inputs.device),
        "torch": torch.__version__,
        "rounds": len(times["bare"]),
        "steps_per_block": steps,
        "variants": {
            name: {
                "wall": compare(times[name], times["bare"]),
                "memory_bytes": memory[name],
                "memory_over_bare_bytes": memory[name] - memory["bare"],
            }
            | ({"hooks": compare(times[_in_hooks(name)], times["bare"])} if name in hooked else {})
            for name in WATCHERS
        },
    }


def _in_hooks(name: str) -> str:
    """Return the name of the blocks in which the hooks of a variant are timed."""
    return f"hooks of {name}"


def _peak_memory(make: Callable[[], GpuLoop]) -> int:
    """Return the peak memory of a loop on the GPU, from its construction on."""
    gc.collect()
    if not torch.cuda.is_available():
        make().run(16)
        return 0
    _synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make().run(17)
    _synchronize()
    return torch.cuda.max_memory_allocated() - before


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases, print them and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--optimizers", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=200, help="rounds at most")
    parser.add_argument(
        "--minutes", type=float, help="minutes for each model and optimizer (default: by model)"
    )
    parser.add_argument("--out", type=Path, help=f"JSON file (default: {OUT})")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny models and one round, on any machine; --out is then required",
    )
    options = parser.parse_args(arguments)
    if options.dry_run and options.out is None:
        parser.error("--dry-run needs --out, so that it cannot overwrite measured results")
    options.out = options.out or OUT
    if not torch.cuda.is_available() and not options.dry_run:
        parser.exit(1, "this benchmark needs a CUDA device; --dry-run works without one\n")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else {}
    begun = time.monotonic()
    for model in options.models:
        if model == "gpt2" and not has_transformers():
            print("gpt2: skipped, transformers is not installed", flush=True)
            continue
        plan = PLANS[model]
        workload = plan.build(device, **(DRY_RUN if options.dry_run else {}))
        for optimizer in options.optimizers:
            result = measure(
                workload,
                optimizer,
                16 if options.dry_run else plan.steps,
                options.minutes or plan.minutes,
                1 if options.dry_run else options.rounds,
            )
            results.setdefault(model, {})[optimizer] = result
            write(options.out, results)
            print(_summary(f"{model} {optimizer}", result, time.monotonic() - begun), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    print(f"written to {options.out}")


def _summary(case: str, result: dict[str, Any], seconds: float) -> str:
    bare = result["variants"]["bare"]["wall"]
    lines = [
        f"[{seconds:5.0f} s] {case}: bare {1e3 * bare.median:.3f} ms, {result['rounds']} round(s) "
        f"of {result['steps_per_block']} steps"
    ]
    for name, row in result["variants"].items():
        extra = row["memory_over_bare_bytes"] / 2**20
        hooks = f"  hooks {row['hooks'].as_ratio(4)}" if "hooks" in row else ""
        lines.append(f"    {name:26} {row['wall'].as_ratio(4):28} {extra:+9.1f} MiB{hooks}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
