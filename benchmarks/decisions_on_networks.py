"""When does `rules.Stationary` lower the learning rate of a small network, and what follows?

A network with one hidden layer on scikit-learn's digits, SGD with batches of 15, reshuffled in each
epoch, 250 epochs, factor 0.5. There is no known truth here. The table has the epochs at which the
rule acts, and the training loss before and after each of them.

    python benchmarks/decisions_on_networks.py [--seeds N] [--out FILE]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from harness import write
from sklearn.datasets import load_digits
from torch import nn

import equilibrate as eq

OUT = Path(__file__).parent / "results" / "decisions_on_networks.json"
EPOCHS = 250
AROUND = 10
"""Epochs before and after a lowering over which the loss is averaged."""
CASES = {
    "weight decay 0.01": (False, 0.01),
    "weight decay 0.001": (False, 0.001),
    "BatchNorm, weight decay 0.001": (True, 0.001),
}


def train(normalised: bool, weight_decay: float, seed: int) -> dict[str, Any]:
    """Train one network, and return its losses and lowerings."""
    torch.manual_seed(seed)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float() - 4.9) / 6.0
    middle = [nn.BatchNorm1d(32)] if normalised else []
    model = nn.Sequential(nn.Linear(64, 32), *middle, nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=weight_decay)
    scheduler = eq.FDRScheduler(optimizer, rule=eq.rules.Stationary(), factor=0.5)
    losses, lowered = [], []
    for epoch in range(1, EPOCHS + 1):
        total = torch.zeros(())
        batches = torch.randperm(len(images)).split(15)
        for batch in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(float(total) / len(batches))
        scheduler.step()
        if scheduler.last_decision.lowered:
            lowered.append({"epoch": epoch, "reason": scheduler.last_decision.reason})
    for each in lowered:
        at = each["epoch"]
        each["before"] = _mean(losses[max(0, at - AROUND) : at])
        each["after"] = _mean(losses[at : at + AROUND])
    return {"lowered": lowered, "losses": losses, "last_reason": scheduler.last_decision.reason}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def main() -> None:
    """Train all networks, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        for seed in range(options.seeds):
            found = train(*case, seed)
            found["losses"] = [round(loss, 5) for loss in found["losses"]]
            results.setdefault(name, []).append(found)
            print(name, seed, [each["epoch"] for each in found["lowered"]], flush=True)
    write(options.out, results)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
