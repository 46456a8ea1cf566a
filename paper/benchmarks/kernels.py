"""The paper's CNN on R replicas: one training step through the Triton kernels and through cuDNN.

Both versions do the whole step: gather a batch from a data set on the device, three
convolution + ReLU + max-pool layers, the linear layer, cross-entropy, gradients, SGD with momentum
and weight decay, and the observables θ·∇f and v² of every replica, written to a buffer at a row
that a counter on the device names. Loss and update go through torch.compile, several steps are one
CUDA graph, and its replays are timed.

    python paper/benchmarks/kernels.py --out kernels.json
"""

import argparse
import json
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibrate_paper.ensemble._ops.conv import conv_relu_pool, pack_images
from equilibrate_paper.ensemble._ops.plain import grouped_conv_relu_pool
from equilibrate_paper.ensemble.examples import PackedImages
from equilibrate_paper.ensemble.precision import ConvPrecision

LAYERS = [(3, 16, 32), (16, 20, 16), (20, 20, 8)]
"""Input channels, filters and image width of the three layers; filters are 5×5."""
BATCH, IMAGES = 100, 50_000
LEARNING_RATE, MOMENTUM, DECAY = 0.01, 0.9, 0.01
STEPS_PER_GRAPH = 10

Layer = Callable[..., Tensor]


class Training:
    """R replicas of the CNN on random images, and the step that trains them."""

    def __init__(
        self,
        replicas: int,
        layer: Layer,
        steps: int,
        *,
        packed: ConvPrecision | None = None,
        compiled: bool = False,
        device: str = "cuda",
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        random = partial(torch.randn, device=device, generator=generator)
        self.layer, self.replicas = layer, replicas
        shapes = [s for c, o, _ in LAYERS for s in ((o, c, 5, 5), (o,))] + [(320, 10), (1, 10)]
        sizes = [torch.Size(s).numel() for s in shapes]
        self.theta = random(replicas, sum(sizes)) * 0.05
        self.velocity = torch.zeros_like(self.theta)
        self.parameters = [
            part.view(replicas, *shape).detach().requires_grad_()
            for part, shape in zip(self.theta.split(sizes, dim=1), shapes, strict=True)
        ]
        *convolutions, weight, bias = self.parameters
        self.layers = list(zip(convolutions[::2], convolutions[1::2], strict=True))
        self.linear = weight, bias
        images = random(IMAGES, 3, 32, 32)
        self.images: Tensor | PackedImages = images
        if packed is not None:
            self.images = pack_images(images, 5, packed)
        self.labels = torch.randint(10, (IMAGES,), device=device, generator=generator)
        self.order = torch.stack(
            [torch.randperm(IMAGES, device=device, generator=generator) for _ in range(replicas)]
        )
        self.column = torch.arange(BATCH, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.observables = torch.zeros(steps, replicas, 2, device=device)
        if compiled:
            torch.compiler.reset()  # or many trainings in a row would reach its limit of variants
            self.loss = torch.compile(self.loss, fullgraph=True, dynamic=False)
            self.update = torch.compile(self.update, fullgraph=True, dynamic=False)

    def loss(self) -> Tensor:
        """Sum over replicas of the mean cross-entropy of the counter's batch."""
        column = (self.counter * BATCH + self.column) % IMAGES
        index = self.order.index_select(1, column)
        (first, bias), *rest = self.layers
        x = self.layer(self.images, first, bias, index=index)
        for weight, bias in rest:
            x = self.layer(x, weight, bias)
        weight, bias = self.linear
        logits = torch.baddbmm(bias, x.flatten(2), weight)
        target = self.labels[index]
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / BATCH

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """SGD with momentum, and the two observables of the step."""
        g = torch.cat([part.flatten(1) for part in gradients], dim=1) + DECAY * self.theta
        left = (self.theta * g).sum(1)
        self.velocity.mul_(MOMENTUM).sub_(g)
        self.theta.add_(self.velocity, alpha=LEARNING_RATE)
        row = torch.stack((left, self.velocity.square().sum(1)), dim=1)
        self.observables.index_copy_(0, self.counter % len(self.observables), row[None])
        self.counter.add_(1)

    def step(self) -> None:
        """One SGD step of all replicas; nothing leaves the device."""
        gradients = torch.autograd.grad(self.loss(), self.parameters)
        with torch.no_grad():
            self.update(gradients)


def captured(step: Callable[[], None], steps: int = STEPS_PER_GRAPH) -> torch.cuda.CUDAGraph:
    """A CUDA graph of several steps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            step()
    return graph


def microseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of `run` on the device."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return median(times)


def fused_training(replicas: int, precision: ConvPrecision) -> Training:
    """The CNN on a packed data set, through the Triton kernels."""
    layer = partial(conv_relu_pool, precision=precision)
    return Training(replicas, layer, steps=1000, packed=precision, compiled=True)


def step_time(training: Training, *, graph: bool = True) -> float:
    """Microseconds a step of all replicas takes."""
    if not graph:
        return microseconds(training.step)
    return microseconds(captured(training.step).replay) / STEPS_PER_GRAPH


def kernel_times(training: Training) -> list[tuple[str, float]]:
    """Every kernel of one step in its order, with its microseconds."""
    graph = captured(training.step, steps=1)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(profile.events() or [], key=lambda event: event.time_range.start)
    return [(event.name, event.device_time_total) for event in events if event.device_time_total]


def relative_errors(precision: ConvPrecision, replicas: int = 2) -> dict[str, list[float]]:
    """‖ours − float64‖/‖float64‖ of result and gradients, layer by layer, the maxima held fixed."""
    errors = {}
    for c, o, width in LAYERS:
        x = torch.randn(replicas, BATCH, c, width, width, device="cuda", requires_grad=True)
        weight = torch.randn(replicas, o, c, 5, 5, device="cuda", requires_grad=True)
        bias = torch.randn(replicas, o, device="cuda", requires_grad=True)
        operands = (x, weight, bias)
        packed = torch.ops.equilibrate.pack(x.detach(), None, 5, precision)
        y, argmax = torch.ops.equilibrate.conv_relu_pool(x, packed, weight, bias, None, precision)
        cotangent = torch.randn_like(y) / BATCH  # as of a mean
        ours = (y, *torch.autograd.grad(y, operands, cotangent))
        exact = [t.detach().double().requires_grad_() for t in operands]
        images = exact[0].transpose(0, 1).flatten(1, 2)
        full = F.conv2d(
            images, exact[1].flatten(0, 1), exact[2].flatten(), padding=2, groups=replicas
        )
        full = full.unflatten(1, (replicas, o)).transpose(0, 1)
        windows = full.unfold(3, 2, 2).unfold(4, 2, 2).flatten(-2)
        argmax = argmax.permute(0, 1, 4, 2, 3)
        taken = windows.gather(-1, argmax.clamp(max=3)[..., None].long())[..., 0]
        held = torch.where(argmax < 4, taken, 0.0)
        twin = (held, *torch.autograd.grad(held, exact, cotangent.double()))
        errors[f"{c}→{o}"] = [
            float((a.double() - b).detach().norm() / b.detach().norm())
            for a, b in zip(ours, twin, strict=True)
        ]
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 4, 1])
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32 in the linear layer too, in every version
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "steps": {},
    }
    print(record["device"], "torch", record["torch"], "triton", record["triton"])
    print("replicas and version: µs a step, µs a replica-step")
    plain = partial(Training, layer=grouped_conv_relu_pool, steps=1000)
    versions: dict[str, Callable[[int], Training]] = {
        "eager": plain,
        "cuDNN": partial(plain, compiled=True),
        "fp16": partial(fused_training, precision="fp16"),
        "tf32": partial(fused_training, precision="tf32"),
        "tf32x3": partial(fused_training, precision="tf32x3"),
    }
    wanted = dict.fromkeys(versions, args.replicas) | {
        "eager": [1],
        "tf32x3": [max(args.replicas)],
    }
    for replicas in args.replicas:
        for name, make in versions.items():
            if replicas not in wanted[name]:
                continue
            time = step_time(make(replicas), graph=name != "eager")
            record["steps"][f"{replicas} {name}"] = time
            print(f"{replicas:3} {name:8} {time:9.1f} {time / replicas:9.1f}", flush=True)
    record["kernels"] = kernel_times(fused_training(max(args.replicas), "fp16"))
    for name, time in record["kernels"]:
        print(f"{time:8.1f} µs  {name[:60]}")
    print("relative errors against float64 of y and the gradients of x, weight, bias", flush=True)
    record["errors"] = {p: relative_errors(p) for p in get_args(ConvPrecision)}
    for precision, errors in record["errors"].items():
        for name, values in errors.items():
            print(f"{precision:7} {name:6}", *(f"{v:.1e}" for v in values))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
