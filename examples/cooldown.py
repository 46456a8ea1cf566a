"""WSD whose decay begins by itself, next to a constant rate and a cosine.

python examples/cooldown.py
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import equilibrate as eq

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6000, help="of each training")
args = parser.parse_args()

torch.set_num_threads(1)  # small operations are faster so
torch.manual_seed(0)


def draw(count=32):
    """Return new examples of two classes with a curved boundary, a tenth of the labels wrong."""
    inputs = torch.randn(count, 20)
    labels = (inputs[:, :10].norm(dim=1) > inputs[:, 10:].norm(dim=1)).long()
    return inputs, labels ^ (torch.rand(count) < 0.1)


held_out, held_out_labels = draw(20_000)


def loss_of(model):
    """Return the loss of examples that are not trained on."""
    with torch.no_grad():
        return cross_entropy(model(held_out), held_out_labels).item()


def train(schedule):
    """Train with one of the schedules, and print where it ends."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    forecaster = eq.Forecaster(optimizer)
    scheduler = None
    if schedule == "cosine":
        scheduler = CosineAnnealingLR(optimizer, args.steps)
    elif schedule == "cooldown":
        scheduler = eq.Cooldown(optimizer, total_steps=args.steps)
    for _ in range(args.steps):
        inputs, labels = draw()
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, eq.Cooldown):
            scheduler.step(loss)
        elif scheduler is not None:
            scheduler.step()
    print(f"{schedule}: held-out loss {loss_of(model):.4f}")
    if isinstance(scheduler, eq.Cooldown):
        decision = scheduler.last_decision
        print(f"  began at step {decision.step}: {decision.reason}")
    if schedule == "constant":  # nearly as good, and possible at any time
        with forecaster.averaged():
            print(f"  with averaged parameters {loss_of(model):.4f}")


for name in ("constant", "cosine", "cooldown"):
    train(name)
