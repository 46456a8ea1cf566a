"""What a step of the paper's two networks costs on a GPU: in an eager loop, and in ensembles.

Ensembles do everything they do in a reproduction: orders drawn and sent, batches gathered,
gradients, update, observables, rows fetched once an epoch. The eager loop is torch's own: the same
model, `torch.optim.SGD`, data on the device, a `Monitor`. The clock is the wall's, over whole
epochs, and each row is measured twice (the two show the noise).

    python paper/benchmarks/gpu.py --out gpu.json
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibrate import Monitor
from equilibrate_paper.ensemble import Ensemble, Method
from equilibrate_paper.protocol.models import ARCHITECTURES, build

EXAMPLES = {"mlp": 60_000, "cnn": 50_000}
MOMENTUM = {"mlp": 0.0, "cnn": 0.9}
BATCH = 100
PRECISIONS = {"mlp": ("fp32", "tf32"), "cnn": ("tf32", "fp16")}


def data(model: str) -> tuple[Tensor, Tensor]:
    """Random images and classes of the right shapes, on the device."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (EXAMPLES[model], *ARCHITECTURES[model].input_shape)
    images = torch.randn(shape, device="cuda", generator=generator)
    return images, torch.randint(10, shape[:1], device="cuda", generator=generator)


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Wall time of `work`, the device's included, after one call that sets things up."""
    work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats


def eager(model: str, steps: int = 200) -> dict[str, float]:
    """µs a step of one loop as anybody would write it, watched by a monitor."""
    images, labels = data(model)
    network = build(model, seed=0).cuda()
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.01, momentum=MOMENTUM[model], weight_decay=0.01
    )
    Monitor(optimizer)

    def loop() -> None:
        for batch in torch.randperm(len(images), device="cuda").split(BATCH)[:steps]:
            optimizer.zero_grad()
            F.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()

    first, again = (seconds(loop) / steps * 1e6 for _ in range(2))
    return {"replica_step": first, "again": again}


def ensemble(model: str, replicas: int, precision: Any) -> dict[str, float]:
    """µs for one replica and step, and seconds of what is read over the whole training set."""
    images, labels = data(model)
    several = Ensemble(
        [build(model, seed) for seed in range(replicas)],
        (images, labels),
        seeds=range(replicas),
        lr=[0.01] * replicas,
        method=Method(BATCH, "sgd", MOMENTUM[model], 0.01, precision=precision),
        device="cuda",
    )
    each = 1e6 / several.steps_per_epoch / replicas
    first, again = (seconds(several.run_epoch, repeats=3) * each for _ in range(2))
    return {
        "replica_step": first,
        "again": again,
        "full_gradient_seconds": seconds(several.full_gradient_square),
        "evaluate_seconds": seconds(several.evaluate),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 8, 4])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA device\n")
    print("µs for one replica and step, twice; seconds of a full-batch gradient and an evaluation")
    results: dict[str, dict[str, float]] = {}
    for model, precisions in PRECISIONS.items():
        rows: dict[str, Callable[[], dict[str, float]]] = {
            f"{model} eager": lambda model=model: eager(model)
        }
        for replicas in args.replicas:
            for precision in precisions:
                rows[f"{model} {replicas} {precision}"] = (
                    lambda model=model, replicas=replicas, precision=precision: ensemble(
                        model, replicas, precision
                    )
                )
        for name, measure in rows.items():
            results[name] = measure()
            print(f"{name:16}", *(f"{value:10.3f}" for value in results[name].values()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
