"""A small task, an ensemble for it, and the loop that a user would write instead."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from equilibrate_paper.ensemble import Ensemble, Method
from equilibrate_paper.ensemble.sampling import draw

EXAMPLES, BATCH, STEPS = 125, 5, 25
SEEDS = (3, 1, 4)
LRS = (0.1, 0.03, 0.2)


def data(*shape, examples=EXAMPLES, classes=3):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, *shape, generator=generator)
    return inputs, torch.randint(classes, (examples,), generator=generator)


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)
    )


def convolutional(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


def ensemble_of(
    models=None, *, shape=(2, 3), lr=LRS, seeds=SEEDS, device="cpu", ops=None, **method
):
    models = [perceptron(s) for s in seeds] if models is None else models
    method = Method(**{"batch_size": BATCH, **method})
    return Ensemble(models, data(*shape), seeds=seeds, lr=lr, method=method, device=device, ops=ops)


def batches(seed, epochs, sampling="shuffled"):
    return itertools.chain(*(draw(seed, e, EXAMPLES, BATCH, sampling) for e in range(epochs)))


def plain_loop(model, seed, optimizer, epochs, shape=(2, 3), sampling="shuffled", naive=None):
    """What a user would write; returns the losses."""
    inputs, targets = data(*shape)
    losses = []
    for batch in batches(seed, epochs, sampling):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        if naive:
            naive.before()
        optimizer.step()
        if naive:
            naive.after()
        losses.append(float(loss.detach()))
    return losses


class NaiveSides:
    """O_L = θ·∇f and O_R = (1+μ)/2 η v² of each step of SGD, by copying everything."""

    def __init__(self, optimizer: torch.optim.SGD) -> None:
        self.optimizer = optimizer
        self.left: list[float] = []
        self.right: list[float] = []

    def before(self) -> None:
        """Call after backward, before the step."""
        [self.group] = self.optimizer.param_groups
        decay = self.group["weight_decay"]
        self.theta = [p.detach().double().clone() for p in self.group["params"]]
        self.gradient = [
            p.grad.double() + decay * theta
            for p, theta in zip(self.group["params"], self.theta, strict=True)
        ]

    def after(self) -> None:
        velocity = self.gradient
        if mu := self.group["momentum"]:
            state = self.optimizer.state
            velocity = [state[p]["momentum_buffer"].double() for p in self.group["params"]]
        pairs = zip(self.theta, self.gradient, strict=True)
        self.left.append(sum(float((theta * grad).sum()) for theta, grad in pairs))
        square = sum(float(v.square().sum()) for v in velocity)
        self.right.append((1 + mu) / 2 * self.group["lr"] * square)


def assert_same_parameters(model, other, atol=2e-5):
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        torch.testing.assert_close(p, q, atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
