"""How often is a weight taken for scale-invariant, and how often is a scale-invariant one missed?

Small networks with each normalisation are trained on digits, in three precisions and with several
seeds. After each of three stages every parameter is classified from its newest samples
(`Monitor.parameter_rotations`), and compared with what it is by construction:

- *invariant*: the loss does not depend on the norm of this weight;
- *jointly*: only on a common factor of this weight and others (a gain and its bias before another
  normalisation, a weight and its bias before LayerNorm or GroupNorm);
- *ordinary*: all others.

Run `python benchmarks/scale_invariance.py` (about two minutes on one core; needs
`equilibrate[dev]`).
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import write
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import equilibrate as eq
from equilibrate.scale_invariance import THRESHOLD

OUT = Path(__file__).parent / "results" / "scale_invariance.json"

STAGES = (60, 200, 600)
"""Steps after which weights are classified."""
PRECISIONS = ("float32", "autocast", "bfloat16")


@dataclass(frozen=True)
class Network:
    """A network, and the names of its parameters that are not ordinary."""

    make: Callable[[], nn.Module]
    invariant: tuple[str, ...]
    jointly: tuple[str, ...] = ()


def convolutions(norm: Callable[[int], nn.Module], *, bias: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=bias),
        norm(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=bias),
        norm(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def perceptron(norm: Callable[[int], nn.Module], *, bias: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 48, bias=bias),
        norm(48),
        nn.GELU(),
        nn.Linear(48, 48, bias=bias),
        norm(48),
        nn.GELU(),
        nn.Linear(48, 10),
    )


def reparametrised(how: Callable[[nn.Module], nn.Module]) -> nn.Module:
    layers = how(nn.Linear(64, 48)), nn.ReLU(), how(nn.Linear(48, 48)), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(48, 10))


class Transformer(nn.Module):
    """One block on the eight rows of an image, with the norms after attention and perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 24, bias=False)
        self.place = nn.Parameter(0.1 * torch.randn(8, 24))
        self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(x.view(-1, 8, 8)) + self.place).mean(1))


NETWORKS = {
    "BatchNorm": Network(
        lambda: convolutions(nn.BatchNorm2d), ("1.weight", "5.weight"), ("2.weight", "2.bias")
    ),
    "BatchNorm, biases": Network(
        lambda: convolutions(nn.BatchNorm2d, bias=True),
        ("1.weight", "5.weight"),
        ("2.weight", "2.bias"),
    ),
    "GroupNorm": Network(
        lambda: convolutions(lambda c: nn.GroupNorm(4, c)),
        ("1.weight", "5.weight"),
        ("2.weight", "2.bias"),
    ),
    "GroupNorm, biases": Network(
        lambda: convolutions(lambda c: nn.GroupNorm(4, c), bias=True),
        (),
        ("1.weight", "1.bias", "2.weight", "2.bias", "5.weight", "5.bias"),
    ),
    "LayerNorm": Network(lambda: perceptron(nn.LayerNorm), ("0.weight", "3.weight")),
    "LayerNorm, biases": Network(
        lambda: perceptron(nn.LayerNorm, bias=True),
        (),
        ("0.weight", "0.bias", "3.weight", "3.bias"),
    ),
    "RMSNorm": Network(lambda: perceptron(nn.RMSNorm), ("0.weight", "3.weight")),
    "weight_norm": Network(
        lambda: reparametrised(weight_norm),
        ("0.parametrizations.weight.original1", "2.parametrizations.weight.original1"),
    ),
    "spectral_norm": Network(
        lambda: reparametrised(spectral_norm),
        ("0.parametrizations.weight.original", "2.parametrizations.weight.original"),
    ),
    "transformer": Network(Transformer, ()),
    "none": Network(lambda: perceptron(lambda _: nn.Identity(), bias=True), ()),
}


def classify(network: Network, precision: str, seed: int) -> Iterable[tuple[int, str, str, float]]:
    """Yield stage, name, what a parameter is by construction, and its alignment."""
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    torch.manual_seed(seed)
    model = network.make()
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model, images = model.to(dtype), ((images.float() - 4.9) / 6.0).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=2e-3)
    monitor = eq.Monitor(optimizer, named_parameters=model.named_parameters(), every=4)
    for step in range(1, STAGES[-1] + 1):
        chosen = torch.randint(len(images), (32,))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            outputs = model(images[chosen])
        optimizer.zero_grad()
        cross_entropy(outputs.float(), labels[chosen]).backward()
        optimizer.step()
        if step in STAGES:
            for name, rotation in monitor.parameter_rotations().items():
                kind = "invariant" if name in network.invariant else "ordinary"
                kind = "jointly" if name in network.jointly else kind
                if rotation.scale_invariant is not None:
                    yield step, name, kind, rotation.alignment
            monitor.reset()  # eight new samples follow


def main(arguments: list[str] | None = None) -> None:
    """Train, classify, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    mistaken: dict[str, int] = defaultdict(int)
    for title, network in NETWORKS.items():
        for precision in PRECISIONS:
            for seed in options.seeds:
                for stage, name, kind, alignment in classify(network, precision, seed):
                    found[kind, precision, stage].append(alignment)
                    if (alignment < THRESHOLD) != (kind == "invariant"):
                        mistaken[f"{kind}, {title}, {name}, {precision}, step {stage}"] += 1
    rows = [
        {
            "kind": kind,
            "precision": precision,
            "step": stage,
            "weights": len(alignments),
            "taken for scale-invariant": sum(a < THRESHOLD for a in alignments),
            "smallest alignment": min(alignments),
            "largest alignment": max(alignments),
        }
        for (kind, precision, stage), alignments in sorted(found.items())
    ]
    for row in rows:
        print(*(f"{v:.2g}" if isinstance(v, float) else f"{v}" for v in row.values()), sep="\t")
    print(*(f"{each}: {count}" for each, count in mistaken.items()), sep="\n")
    write(options.out, {"seeds": options.seeds, "rows": rows, "mistaken": mistaken})


if __name__ == "__main__":
    main()
