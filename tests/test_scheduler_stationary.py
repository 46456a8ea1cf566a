"""A scheduler with `Stationary` on reshuffled data, whose noise cancels within each epoch."""

import pytest
import torch

import equilibrate as eq

BATCHES = 40


def regression(seed):
    """Least squares with directions that relax in a fifth of an epoch and in thirty epochs."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -2.2, 10, dtype=torch.float64).sqrt()
    inputs = torch.randn(BATCHES * 8, 10, generator=generator, dtype=torch.float64) * scales
    noise = torch.randn(len(inputs), generator=generator, dtype=torch.float64)
    return inputs, inputs @ (1 / scales) + noise, generator


def train(seed, epochs):
    """Return the decisions at the end of each epoch, and how far the slowest direction is."""
    inputs, targets, generator = regression(seed)
    theta = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, rule=eq.rules.Stationary(), min_steps=BATCHES)
    best = torch.linalg.lstsq(inputs, targets[:, None]).solution[:, 0]
    decisions, left = [], []
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs), generator=generator).view(BATCHES, -1):
            optimizer.zero_grad()
            (inputs[batch] @ theta - targets[batch]).square().mean().div(2).backward()
            optimizer.step()
        scheduler.step()
        decisions.append(scheduler.last_decision)
        left.append(((theta - best)[-1] / best[-1]).abs().item())
    return decisions, left


@pytest.mark.parametrize("seed", range(4))
def test_what_cancels_within_an_epoch_is_not_taken_for_a_restoring_force(seed):
    decisions, left = train(seed, 25)
    assert left[-1] > 0.3  # the slowest direction is still on its way
    assert not any(decision.lowered for decision in decisions)
    assert len(decisions[-1].reading.trace) == 26  # the start, and each epoch's end
