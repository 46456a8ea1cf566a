"""A monitor beside other optimizers, gradient scaling, accumulation and other hooks."""

import pytest
import torch
from support.monitored import STEPS, assert_agrees, small_model, train
from support.naive import NaiveSGDSides
from torch import nn

import equilibrate as eq


class SignDescent(torch.optim.Optimizer):
    """Somebody's own optimizer, whose groups have no learning rate called lr."""

    def __init__(self, params):
        super().__init__(params, {"size": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["size"] * p.grad.sign())


class HalvedSGD(torch.optim.SGD):
    """A subclass that does something else must not be taken for SGD."""

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] / 2 * p.grad)


class DecayedSGD(torch.optim.SGD):
    """Decays the weights by itself and leaves the rest to its parent."""

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return super().step(closure)


OTHERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "HalvedSGD": lambda params: HalvedSGD(params, lr=0.1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_step_form_of_any_optimizer_equals_naive_accumulation(name):
    model = small_model()
    optimizer = OTHERS[name](model.parameters())
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    if name == "HalvedSGD":
        naive.optimizer = type("Other", (), {"param_groups": optimizer.param_groups})()
    train(model, optimizer, naive)
    # Δ is read in single precision as a difference of parameters.
    assert_agrees(monitor.reading(), naive.left, naive.right, 1e-4)


def test_a_step_that_calls_its_parents_is_one_step():
    """Torch calls hooks around the `step` of every class of which there has been an instance."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    model = small_model()
    optimizer = DecayedSGD(model.parameters(), lr=0.1)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    naive.optimizer = type("Other", (), {"param_groups": optimizer.param_groups})()

    def fail():
        raise InterruptedError

    train(model, optimizer, naive, steps=4)
    with pytest.raises(InterruptedError):
        optimizer.step(fail)
    for p in model.parameters():
        p.data.div_(0.99)
    train(model, optimizer, naive, steps=4)
    assert (monitor.reading().step, monitor.reading().count) == (8, 4)
    assert_agrees(monitor.reading(), naive.left, naive.right, 1e-4)


def test_an_optimizer_without_a_learning_rate():
    model = small_model()
    optimizer = SignDescent(model.parameters())
    monitor = eq.Monitor(optimizer, every=1)
    train(model, optimizer)
    assert monitor.reading().right == pytest.approx(1e-4 * 83 / 2, rel=1e-3)
    assert monitor.reading().lr != monitor.reading().lr


def test_zero_learning_rate_reads_undefined_not_equilibrium():
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, every=1)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, steps=4)
    assert monitor.reading().undefined is not None
    assert "zero" in str(monitor.reading().undefined)


def test_a_learning_rate_tensor_of_zero_counts_nothing():
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    monitor = eq.Monitor(optimizer, every=1)
    optimizer.param_groups[0]["lr"].zero_()
    train(model, optimizer, steps=4)
    assert (monitor.reading().left, monitor.reading().right) == (0.0, 0.0)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_and_its_skipped_steps(fused):
    """A skipped step is not counted, even if it is skipped inside a fused kernel."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05, fused=fused)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(12):
        loss = model(torch.randn(16, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        naive.before()
        optimizer.zero_grad()
        scaler.scale(loss * torch.inf if t == 8 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        naive.after()
    del naive.left[8], naive.right[8]
    assert_agrees(monitor.reading(), naive.left, naive.right)
    assert (monitor.reading().step, monitor.reading().count) == (11, 6)


def test_gradient_accumulation_reads_what_the_step_used():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.randn(16, 6)).square().mean().backward()
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_clipping_in_a_hook_that_comes_later_is_seen():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)

    def clip_and_note(*_):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        naive.before()

    optimizer.register_step_pre_hook(clip_and_note)
    train(model, optimizer, on_step=lambda t: naive.after())
    assert_agrees(monitor.reading(), naive.left, naive.right)
