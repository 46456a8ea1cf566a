"""Forecast what a cooldown would gain, then make it and compare.

python examples/forecast.py
"""

import argparse
import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import equilibrate as eq

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6000, help="before the cooldown")
parser.add_argument("--repeats", type=int, default=8, help="with other batches")
args = parser.parse_args()
HORIZON = 256

# Two classes with a curved boundary, and a tenth of the labels wrong.
torch.set_num_threads(1)  # small operations are faster so
torch.manual_seed(0)
inputs = torch.randn(4096, 20)
labels = (inputs[:, :10].square().sum(1) > inputs[:, 10:].square().sum(1)).long()
labels = torch.where(torch.rand(4096) < 0.1, 1 - labels, labels)


def train(model, optimizer, steps, lr_at=None):
    """Train with independent batches, at the rate that `lr_at` says."""
    for step in range(steps):
        if lr_at is not None:
            optimizer.param_groups[0]["lr"] = lr_at(step)
        batch = torch.randint(4096, (32,))
        optimizer.zero_grad()
        cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()


@torch.no_grad()
def full_loss(model):
    return cross_entropy(model(inputs), labels).item()


model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
forecaster = eq.Forecaster(optimizer, horizons=[HORIZON])
train(model, optimizer, args.steps)
print(forecaster.forecast(HORIZON))

# Was it right? Stay, and cool down, from here.
lr = optimizer.param_groups[0]["lr"]
gains = []
for _ in range(args.repeats):
    stay, cool = (copy.deepcopy((model, optimizer)) for _ in range(2))
    train(*stay, HORIZON)
    train(*cool, HORIZON, lambda step: lr * (1 - step / HORIZON))
    gains.append(full_loss(stay[0]) - full_loss(cool[0]))
print("cooling down did gain", eq.estimates.mean(torch.tensor(gains), independent=True))
