"""The recipe of the documentation for users of the paper's own code does what that code does."""

import re
from pathlib import Path

import torch

import equilibrate as eq

PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
CHECK, X, Y = 1000, 0.1, 0.5


class Author:
    """The rule of FDR_quencher: velocities before the step, lists, a check every CHECK steps."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.left, self.right = [], []
        self.lowered = []

    def before(self):
        [group] = self.optimizer.param_groups
        lr, mu, nu, decay = (group[k] for k in ("lr", "momentum", "dampening", "weight_decay"))
        left = square = 0.0
        for p in group["params"]:
            state = self.optimizer.state.get(p, {})
            buffer = state.get("momentum_buffer")
            square += 0.0 if buffer is None else buffer.square().sum().item()
            left += (p * (p.grad + decay * p)).sum().item()
        self.left.append(left)
        self.right.append(0.5 * lr * (1 + mu) / (1 - nu) * square)

    def after(self, step):
        t = len(self.left)
        if t % CHECK == 0:
            left, right = (
                sum(side[t // 2 :]) / len(side[t // 2 :]) for side in (self.left, self.right)
            )
            if abs(left / right - 1) < X:
                self.lowered.append(step)
                self.left, self.right = [], []


def test_the_same_lowerings_as_the_authors_code():
    p = torch.nn.Parameter(torch.full((20,), 2.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.5, weight_decay=0.01)
    recipe = re.search(
        r"eq\.FDRScheduler\(optimizer, .*, min_steps=(\d+), every=1\)", PAGE.read_text()
    )
    assert recipe is not None
    scheduler = eq.FDRScheduler(
        optimizer, threshold=X, factor=1 - Y, min_steps=int(recipe.group(1)), every=1
    )
    author, lowered = Author(optimizer), []
    for step in range(1, 5001):
        p.grad = 0.05 * (p.detach() - 1) + torch.randn(20, dtype=torch.float64)
        author.before()
        optimizer.step()
        author.after(step)
        if step % CHECK == 0:
            scheduler.step()
            if scheduler.last_decision.lowered:
                lowered.append(step)
    assert lowered == author.lowered
    assert 2 <= len(lowered) < 5  # it lowered, and it waited
