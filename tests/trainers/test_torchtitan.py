"""The schedulers for torchtitan, in its own Trainer, with FSDP on two processes."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.torchrun import torchrun

import equilibrate as eq

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_a_killed_run_resumes(tmp_path):
    for mode in ("straight", "killed", "resumed"):
        done = torchrun("support.titan_task", mode, str(tmp_path))
        if mode == "killed":
            assert "SIGKILL" in done.stderr
        else:
            assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        weights, lrs, decisions = torch.load(tmp_path / f"straight-{rank}.pt")
        again, later_lrs, later_decisions = torch.load(tmp_path / f"resumed-{rank}.pt")
        assert all(map(torch.equal, weights, again))
        assert later_lrs == lrs[20:]
        assert later_decisions == decisions[20:]
        warm_up = [1e-3 * (step + 1) / 5 for step in range(5)]
        assert lrs[:5] == pytest.approx(warm_up)
        lowered = [step for step, text in enumerate(decisions) if "lowered=True" in text]
        assert lowered[0] < 20 < lowered[1]  # windows have 8 of some 16 steps
        expected = [1e-3 * 0.5 ** sum(at < step for at in lowered) for step in range(5, 40)]
        assert lrs[5:] == pytest.approx(expected)


def test_a_decay_of_torchtitan_is_refused():
    from equilibrate.integrations.torchtitan import build_lr_schedulers

    config = SimpleNamespace(decay_ratio=0.8, warmup_steps=5)
    with pytest.raises(ValueError, match=r"decay_ratio is 0.8, .* set it to 0"):
        build_lr_schedulers()([], config, 10)


def test_several_optimizers_are_refused():
    from torchtitan.config import LRScheduler

    from equilibrate.integrations.torchtitan import build_lr_schedulers

    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]) for _ in range(2)]
    config = LRScheduler(warmup_steps=5, decay_ratio=0.0)
    with pytest.raises(ValueError, match=r"there are 2 optimizers, .* without pipeline"):
        build_lr_schedulers()(optimizers, config, 10)


def test_settings_are_checked_when_the_function_is_made():
    from equilibrate.integrations.torchtitan import build_lr_schedulers

    with pytest.raises(ValueError, match=r"factor must lie between 0 and 1"):
        build_lr_schedulers(factor=1.5)


def test_the_block_of_the_documentation_runs():
    from torchtitan.protocols.train_spec import get_train_spec

    page = Path(__file__).parents[2] / "docs" / "integrations.md"
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    [block] = [block for block in blocks if "torchtitan" in block]
    exec(compile(block, page.name, "exec"), {"__name__": "example"})
    assert get_train_spec("llama3_fdr").build_lr_schedulers_fn.__module__.startswith("equilibrate")


def test_a_rule_that_needs_the_loss_is_refused():
    from equilibrate.integrations.torchtitan import build_lr_schedulers

    with pytest.raises(ValueError, match=r"the rule Gain needs the loss, which torchtitan"):
        build_lr_schedulers(rule=eq.rules.Gain())


def test_a_cooldown_ends_with_the_training():
    from torchtitan.config import LRScheduler

    from equilibrate.integrations.torchtitan import build_lr_schedulers

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    build = build_lr_schedulers(threshold=1e-9, cooldown_end="end")
    schedulers = build([optimizer], LRScheduler(warmup_steps=5, decay_ratio=0.0), 100)
    lrs = []
    for _ in range(100):
        lrs.append(optimizer.param_groups[0]["lr"])
        p.grad = p.detach().clone()
        optimizer.step()
        schedulers.step()
    assert lrs[5:90] == pytest.approx([0.1] * 85)
    assert lrs[90:] == pytest.approx([0.1 * (1 - i / 10) for i in range(10)])
