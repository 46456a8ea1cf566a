"""Every `py` block of the page on trainers runs as printed, and so does the class for timm."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import equilibrate as eq

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [
    block
    for block in re.findall(r"^```py\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    if "torchtitan" not in block
]


def package(block):
    """Return the first package that is imported and is not torch."""
    found = re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE)
    return next(name for name in found if name != "torch")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", BLOCKS, ids=package)
def test_a_block_runs(block, tmp_path, monkeypatch):
    if find_spec(package(block)) is None:
        pytest.skip(f"{package(block)} is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, PAGE.name, "exec"), {"__name__": "example"})


def test_there_are_blocks():
    names = [package(block) for block in BLOCKS]
    assert sorted(names) == sorted(
        ["accelerate", "transformers", "lightning", "lightning", "lightning", "ignite", "skorch"]
    )


def test_the_scheduler_for_timm_is_called_as_its_script_does():
    (block,) = re.findall(r"^```python\n(class TimmCooldown.*?)^```", TEXT, re.DOTALL | re.M)
    namespace = {"eq": eq}
    exec(compile(block, PAGE.name, "exec"), namespace)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epochs, updates_per_epoch, num_updates = 5, 60, 0
    lr_scheduler = namespace["TimmCooldown"](optimizer, epochs * updates_per_epoch, warmup_steps=9)
    for epoch in range(epochs):
        for _ in range(updates_per_epoch):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            num_updates += 1
            optimizer.zero_grad()
            lr_scheduler.step_update(num_updates=num_updates, metric=loss.item())
        lr_scheduler.step(epoch + 1, None)
    assert not lr_scheduler.t_in_epochs
    assert lr_scheduler.scheduler.is_decaying
    assert optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.filterwarnings("ignore")
def test_manual_optimization_is_resumed_with_its_schedule(tmp_path):
    (block,) = [block for block in BLOCKS if "automatic_optimization" in block]
    namespace = {"__name__": "example"}
    exec(compile(block.split("trainer = Trainer")[0], PAGE.name, "exec"), namespace)
    batches = torch.utils.data.DataLoader(torch.randn(400, 4), batch_size=8)

    def fit(seed, *, max_epochs, **options):
        torch.manual_seed(seed)
        task = namespace["Regression"]()
        plain = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = namespace["Trainer"](max_epochs=max_epochs, accelerator="cpu", **plain)
        trainer.fit(task, batches, **options)
        return trainer, task.layer.weight

    stopped, _ = fit(0, max_epochs=2)
    stopped.save_checkpoint(tmp_path / "stopped.ckpt")
    options = {"ckpt_path": tmp_path / "stopped.ckpt", "weights_only": True}
    (first, weight), (second, again) = (fit(seed, max_epochs=6, **options) for seed in (1, 2))
    for trainer in (first, second):
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        assert (scheduler.last_epoch, scheduler.total_steps) == (300, 300)
    assert torch.equal(weight, again)
