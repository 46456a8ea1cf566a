"""Forecast where two runs would end if they were cooled down now, then cool them down and compare.

Their training losses are about the same, but the one with the higher learning rate is worth more.

python examples/forecast.py
"""

import argparse
import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import equilibrate as eq

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000, help="before the cooldown")
parser.add_argument("--repeats", type=int, default=4, help="cooldowns with other batches")
args = parser.parse_args()

torch.set_num_threads(1)  # small operations are faster so
torch.manual_seed(0)


def draw(count=32):
    """Return new examples of two classes with a curved boundary, a tenth of the labels wrong."""
    inputs = torch.randn(count, 20)
    labels = (inputs[:, :10].norm(dim=1) > inputs[:, 10:].norm(dim=1)).long()
    return inputs, labels ^ (torch.rand(count) < 0.1)


many = draw(20_000)


def loss_of(model, examples):
    inputs, labels = examples
    return cross_entropy(model(inputs), labels)


def make_step(model, optimizer):
    """Make one step; return the loss of the mini-batch, and a closure that evaluates it again."""
    examples = draw()
    optimizer.zero_grad()
    loss = loss_of(model, examples)
    loss.backward()
    optimizer.step()
    return loss, lambda: loss_of(model, examples)


def cool_down(model, optimizer, steps):
    """Lower the learning rate of a copy linearly to zero, and return where its loss ends."""
    model, optimizer = copy.deepcopy((model, optimizer))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        make_step(model, optimizer)
        schedule.step()
    with torch.no_grad():
        return loss_of(model, many).item()


for lr in (0.005, 0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    forecaster = eq.Forecaster(optimizer, model)
    for _ in range(args.steps):
        forecaster.update(*make_step(model, optimizer))
    forecast = forecaster.forecast(0.2)
    print(f"lr {lr}: {forecast}")

    ends = [cool_down(model, optimizer, forecast.horizon) for _ in range(args.repeats)]
    print("  made, it ended at", eq.estimates.mean(torch.tensor(ends), independent=True))
