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

# Two classes with a curved boundary, and a tenth of the labels wrong.
torch.set_num_threads(1)  # small operations are faster so
torch.manual_seed(0)
inputs = torch.randn(8192, 20)
labels = (inputs[:, :10].square().sum(1) > inputs[:, 10:].square().sum(1)).long()
labels = torch.where(torch.rand(8192) < 0.1, 1 - labels, labels)
inputs, held_out = inputs.chunk(2)
labels, held_out_labels = labels.chunk(2)


def loss_of(model):
    """Return the loss of examples that are not trained on."""
    with torch.no_grad():
        return cross_entropy(model(held_out), held_out_labels).item()


def train(schedule):
    """Train with one of the schedules, and print where it ends."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.002)
    forecaster = eq.Forecaster(optimizer)
    cosine = CosineAnnealingLR(optimizer, args.steps)
    scheduler = eq.Cooldown(optimizer, total_steps=args.steps)
    for _ in range(args.steps):
        batch = torch.randint(4096, (32,))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if schedule == "cosine":
            cosine.step()
        elif schedule == "cooldown":
            scheduler.step(loss)
    print(f"{schedule}: held-out loss {loss_of(model):.4f}")
    if scheduler.is_decaying:
        decision = scheduler.last_decision
        print(f"  began at step {decision.step}: {decision.reason}")
    if schedule == "constant":  # nearly as good, and possible at any time
        with forecaster.averaged():
            print(f"  with averaged parameters {loss_of(model):.4f}")


for name in ("constant", "cosine", "cooldown"):
    train(name)
