"""The callback for Lightning, in Lightning's own Trainer."""

import csv
import importlib
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from support.lightning_task import Both, Notes, Task, fit
from support.rules import Noting
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR

import equilibrate as eq
from equilibrate.integrations.lightning import FDRCallback

# Lightning advises on workers and on intervals of logging.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EAGER = {"threshold": 1e9, "factor": 0.5, "min_steps": 40, "every": 4}
"""Lowers the learning rate whenever there are enough steps: after every second epoch."""


def weights(task):
    return [p.detach().clone() for p in task.parameters()]


def test_a_schedule_at_the_end_of_epochs(tmp_path):
    task, fdr = Task(), FDRCallback(**EAGER)
    notes = Notes(fdr)
    fit(task, [fdr, notes], tmp_path, epochs=6)
    lrs = [notes.rows[step][0] for step in sorted(notes.rows)]
    assert lrs == [0.05] * 80 + [0.025] * 80 + [0.0125] * 80
    [scheduler], [monitor] = fdr.schedulers, fdr.monitors
    assert scheduler.monitor is monitor
    assert monitor.step == 240
    assert scheduler.last_decision.lowered


def test_it_decides_what_a_scheduler_attached_by_hand_decides(tmp_path):
    """The same module with the scheduler returned by configure_optimizers."""

    class ByHand(Task):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.scheduler = eq.FDRScheduler(optimizer, threshold=0.3, min_steps=40)
            return {"optimizer": optimizer, "lr_scheduler": self.scheduler}

    by_hand = ByHand()
    fit(by_hand, [], tmp_path, epochs=12)
    task, fdr = Task(), FDRCallback(threshold=0.3, min_steps=40)
    fit(task, [fdr], tmp_path, epochs=12)
    assert by_hand.scheduler.last_decision == fdr.schedulers[0].last_decision
    assert fdr.schedulers[0].get_last_lr()[0] < 0.05
    assert all(map(torch.equal, weights(by_hand), weights(task)))


def test_watching_changes_no_bit(tmp_path):
    alone, watched = Task(), Task()
    fit(alone, [], tmp_path, epochs=3)
    fdr = FDRCallback(schedule=False, layers=True)
    fit(watched, [fdr], tmp_path, epochs=3)
    assert all(map(torch.equal, weights(alone), weights(watched)))
    assert fdr.schedulers == []
    assert set(fdr.monitors[0].parameter_readings()) == {n for n, _ in watched.named_parameters()}


class Validated(Task):
    """Keeps the parameters that it has in validations, and may fail in one of them."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.seen, self.fail_at = [], fail_at

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.seen.append(weights(self))
        if len(self.seen) == self.fail_at:
            raise RuntimeError("a validation that fails")


def test_validations_with_averaged_parameters(tmp_path):
    alone = Validated()
    fit(alone, [], tmp_path, epochs=3, data=Both())
    task, fdr = Validated(), FDRCallback(schedule=False, evaluate_averaged=True)
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 1}
    trainer = fit(task, [fdr, saving], tmp_path, epochs=3, data=Both(), **options)
    assert all(map(torch.equal, weights(alone), weights(task)))  # the training is the same
    saved = torch.load(tmp_path / "step=120.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], p) for name, p in task.named_parameters())
    sanity, *seen = task.seen
    assert all(map(torch.equal, sanity, weights(Validated())))
    for ours, theirs in zip(seen, alone.seen, strict=True):
        assert not any(map(torch.equal, ours, theirs))
    [forecaster] = fdr.forecasters
    with forecaster.averaged():
        assert all(map(torch.equal, seen[-1], weights(task)))
    trainer.validate(task, Both().val_dataloader(), verbose=False)  # not a part of a training
    assert all(map(torch.equal, task.seen[-1], weights(task)))


def test_a_validation_that_fails_leaves_the_model_its_own_parameters(tmp_path):
    alone = Validated()
    fit(alone, [], tmp_path, epochs=2, data=Both())
    task, fdr = Validated(fail_at=2), FDRCallback(schedule=False, evaluate_averaged=True)
    with pytest.raises(RuntimeError, match="a validation that fails"):
        fit(task, [fdr], tmp_path, epochs=3, data=Both())
    assert all(map(torch.equal, weights(alone), weights(task)))


def test_a_cooldown_is_followed_at_every_step_and_validated_with_own_parameters(tmp_path):
    task = Validated()
    fdr = FDRCallback(threshold=1e-9, cooldown_end=200, evaluate_averaged=True)
    notes = Notes(fdr)
    fit(task, [fdr, notes], tmp_path, epochs=5, data=Both())
    lrs = [notes.rows[step][0] for step in sorted(notes.rows)]
    assert lrs == pytest.approx([0.05] * 180 + [0.05 * (1 - i / 20) for i in range(20)])
    assert all(map(torch.equal, task.seen[-1], weights(task)))


def test_a_cooldown_ends_with_the_training(tmp_path):
    settings = {"threshold": 1e-9, "cooldown_end": "end"}
    fdr, saving = FDRCallback(**settings), ModelCheckpoint(tmp_path, "{step}", save_top_k=-1)
    notes = Notes(fdr)
    options = {"epochs": 5, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    fit(Task(), [fdr, notes, saving], tmp_path, **options)
    lrs = [notes.rows[step][0] for step in sorted(notes.rows)]
    assert lrs == pytest.approx([0.05] * 90 + [0.05 * (1 - i / 10) for i in range(10)])
    resumed, saving = FDRCallback(**settings), ModelCheckpoint(tmp_path)
    options["ckpt_path"] = tmp_path / "step=60.ckpt"
    for epochs, end in ((5, 100), (6, 120)):
        fit(Task(), [resumed, saving], tmp_path, **options | {"epochs": epochs})
        assert resumed.schedulers[0].cooldown_end == end


def test_a_cooldown_ends_with_a_training_that_was_begun_without_it(tmp_path):
    saving = ModelCheckpoint(tmp_path, "{step}")
    fit(Task(), [saving], tmp_path, epochs=3, enable_checkpointing=True)
    fdr, options = FDRCallback(cooldown_end="end"), {"ckpt_path": tmp_path / "step=120.ckpt"}
    with pytest.warns(UserWarning, match="step 120 holds no state .* will end at step 200"):
        fit(Task(), [fdr, saving], tmp_path, epochs=5, enable_checkpointing=True, **options)
    assert fdr.schedulers[0].state_dict()["cooldown"]["end"] == 80
    assert fdr.schedulers[0].get_last_lr() == [0.0]


def test_an_end_that_is_unknown_is_reported(tmp_path):
    class Manual(Task):
        automatic_optimization = False

    with pytest.raises(ValueError, match="cooldown_end='end', but the trainer does not know"):
        fit(Manual(), [FDRCallback(cooldown_end="end")], tmp_path, epochs=1)


def test_a_checkpoint_without_a_state_is_reported(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}")
    fit(Task(), [saving], tmp_path, epochs=2, enable_checkpointing=True)
    fdr, again = FDRCallback(cooldown_end=200), ModelCheckpoint(tmp_path)
    words = "checkpoint of step 80 holds no state .* the cooldown will end at step 280"
    with pytest.warns(UserWarning, match=words):
        fit(
            Task(), [fdr, again], tmp_path, epochs=3, ckpt_path=tmp_path / "step=80.ckpt",
            enable_checkpointing=True,
        )  # fmt: skip
    assert fdr.monitors[0].step == 40


def test_a_validation_right_after_parameters_were_added(tmp_path):
    class Unfreezing(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 40:
                added = torch.nn.Parameter(torch.zeros(1))
                trainer.optimizers[0].add_param_group({"params": [added]})

    task, fdr = Validated(), FDRCallback(schedule=False, evaluate_averaged=True)
    fit(task, [fdr, Unfreezing()], tmp_path, epochs=2, data=Both())
    assert len(task.seen) == 2
    assert not any(map(torch.equal, task.seen[1], weights(task)))


def test_statistics_that_do_not_fit_are_reported(tmp_path):
    class Normalised(Validated):
        def __init__(self):
            super().__init__()
            self.net.insert(1, torch.nn.BatchNorm1d(8))

    fdr = FDRCallback(schedule=False, evaluate_averaged=True)
    with pytest.warns(UserWarning, match="statistics of BatchNorm do not fit averaged"):
        fit(Normalised(), [fdr], tmp_path, epochs=1, data=Both())


def test_a_schedule_at_any_step(tmp_path):
    fdr = FDRCallback(interval="step", **EAGER | {"min_steps": 10, "every": 1})
    notes = Notes(fdr)
    fit(Task(), [fdr, notes], tmp_path, epochs=1)
    lowered = [step for step in sorted(notes.rows) if notes.rows[step][1][0].lowered]
    assert lowered == [19, 38]  # the later half of 19 steps has 10


@pytest.mark.parametrize(
    "warm_up",
    [
        lambda optimizer: LinearLR(optimizer, start_factor=0.1, total_iters=50),
        lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, 0.1 + 0.9 * step / 50)),
    ],
    ids=["LinearLR", "LambdaLR"],
)
def test_a_warm_up_of_the_module(warm_up, tmp_path):
    task, fdr = Task(warm_up), FDRCallback(start=50, **EAGER)
    notes = Notes(fdr)
    fit(task, [fdr, notes], tmp_path, epochs=6)
    lrs = {step: row[0] for step, row in notes.rows.items()}
    assert lrs[0] == pytest.approx(0.005)
    assert all(lrs[step] < lrs[step + 1] for step in range(48))
    assert [lrs[step] for step in range(51, 160)] == pytest.approx([0.05] * 109)
    assert [lrs[step] for step in range(160, 240)] == pytest.approx([0.025] * 80)


def test_another_schedule_that_undoes_the_lowering_is_reported(tmp_path):
    task = Task(lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=1000))
    with pytest.warns(UserWarning, match=r"lowered to .* OneCycleLR sets it"):
        fit(task, [FDRCallback(**EAGER)], tmp_path, epochs=6)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ],
    ids=lambda options: ", ".join(options),
)
def test_the_readings_are_of_the_steps_that_were_made(options, tmp_path):
    """Against sums of −θ·Δ/η and Δ²/(2η) that another callback takes from the parameters."""

    class Sums(Notes):
        def on_before_zero_grad(self, *_):
            """Called after every optimizer step, and before the first."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.before = torch.cat([p.detach().flatten() for p in pl_module.parameters()]).double()
            self.at = trainer.global_step

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step > self.at:
                now = torch.cat([p.detach().flatten() for p in pl_module.parameters()]).double()
                delta = now - self.before
                self.rows[trainer.global_step] = -(self.before @ delta), delta @ delta / 2

    class Adam(Task):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    fdr = FDRCallback(schedule=False, every=1)
    sums = Sums(fdr)
    trainer = fit(Adam(), [sums, fdr], tmp_path, epochs=2, **options)
    reading = fdr.monitors[0].reading()
    assert reading.step == trainer.global_step == len(sums.rows)
    window = list(sums.rows.values())[-reading.count :]
    left, right = (sum(side).item() / len(window) / 0.01 for side in zip(*window, strict=True))
    assert reading.left == pytest.approx(left, rel=1e-4)
    assert reading.right == pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("automatic", [True, False])
def test_a_rule_gets_the_loss_of_the_training(tmp_path, automatic):
    """An epoch of 40 batches ends with one micro-batch of three."""
    losses = []

    class Losses(Task):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.detach().item())
            if not automatic:
                self.manual_backward(loss / 3)
                if batch_idx % 3 == 0:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
            return loss

    Noting.seen.clear()
    fdr = FDRCallback(rule=Noting(), horizons=[16], min_steps=10, every=2)
    options = {"accumulate_grad_batches": 3} if automatic else {}
    trainer = fit(Losses(), [fdr], tmp_path, epochs=3, **options)
    values = Noting.seen[-1].losses.values
    expected = [sum(losses[40 * epoch : 40 * epoch + 40]) / 40 for epoch in range(3)]
    assert values == pytest.approx(expected, rel=1e-5)
    assert Noting.seen[-1].forecasts[0].horizon == 16
    assert "equilibrate/forecast/gain_16" in trainer.callback_metrics


def test_several_optimizers(tmp_path):
    class Two(Task):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                inputs, targets = batch
                loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            first, second = self.net[0].parameters(), self.net[2].parameters()
            return [torch.optim.SGD(first, lr=0.05), torch.optim.SGD(second, lr=0.1)]

    Two.automatic_optimization = property(lambda self: False, lambda self, value: None)
    fdr = FDRCallback(**EAGER)
    trainer = fit(Two(), [fdr], tmp_path, epochs=2)
    assert [scheduler.get_last_lr() for scheduler in fdr.schedulers] == [[0.025], [0.05]]
    assert trainer.callback_metrics["equilibrate/optimizer_0/lr"] == 0.025
    assert trainer.callback_metrics["equilibrate/optimizer_1/lr"] == 0.05


def trained_with(package, folder, epochs, **options):
    """Train the demo of one of Lightning's packages; return its weights, and the callback."""
    pl = importlib.import_module(package)
    demo = importlib.import_module(f"{package}.demos.boring_classes").BoringModel
    ours = package.removesuffix(".pytorch")
    fdr = importlib.import_module(f"equilibrate.integrations.{ours}").FDRCallback(**EAGER)
    saving = pl.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[fdr, saving], **quiet)
    model = demo()
    trainer.fit(model, **options)
    assert "equilibrate/lr" in trainer.callback_metrics
    return weights(model), fdr


def test_the_trainer_of_pytorch_lightning(tmp_path):
    """It does the same in both packages, and resumes from its checkpoints."""
    both = ("lightning.pytorch", "pytorch_lightning")
    found = [trained_with(package, tmp_path / package, 4) for package in both]
    assert all(map(torch.equal, found[0][0], found[1][0]))
    first, second = (fdr.schedulers[0].last_decision for _, fdr in found)
    assert first == second
    assert first.lrs[0] < 0.1
    folder = tmp_path / both[1]
    _, resumed = trained_with(both[1], folder, 4, ckpt_path=folder / "step=128.ckpt")
    assert resumed.schedulers[0].last_decision == first


def test_pytorch_lightning_is_enough():
    code = """
import sys
sys.modules["lightning"] = None
from equilibrate.integrations.pytorch_lightning import FDRCallback
FDRCallback(threshold=0.01)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_go_to_the_trainers_loggers(tmp_path):
    fdr = FDRCallback(layers=True, **EAGER)
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    trainer = fit(Task(), [fdr], tmp_path, epochs=2, logger=loggers, log_every_n_steps=10)
    with open(f"{loggers[0].log_dir}/metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    losses = {int(row["step"]) for row in table if row["loss"]}
    rows = {int(row["step"]): row for row in table if row["equilibrate/residual"]}
    assert set(rows) == {9, 19, 29, 39, 49, 59, 69, 79} == losses  # the steps of the module's own
    assert [rows[step]["equilibrate/lr"] for step in (69, 79)] == ["0.05", "0.025"]
    assert [rows[step]["equilibrate/lowered"] for step in (69, 79)] == ["0.0", "1.0"]
    judged = fdr.schedulers[0].last_decision.reading
    assert float(rows[79]["equilibrate/residual"]) == judged.residual
    assert "equilibrate_layers/net.0.weight/residual" in rows[79]
    assert trainer.callback_metrics["equilibrate/residual"] == judged.residual


def test_other_callbacks_can_use_the_numbers(tmp_path):
    stop = EarlyStopping("equilibrate/lr", stopping_threshold=0.03, check_on_train_epoch_end=True)
    trainer = fit(Task(), [FDRCallback(**EAGER), stop], tmp_path, epochs=6)
    assert trainer.global_step == 80


# Checkpoints ----------------------------------------------------------------------------------

KINDS = {
    "threshold": {"threshold": 0.5, "factor": 0.7, "min_steps": 40},
    "gain": {
        "rule": eq.rules.Gain(ahead=0.05, confidence=0.6),
        "horizons": [16],
        "every": 2,
        "interval": "step",
        "min_steps": 40,
    },
    "stationary": {"rule": eq.rules.Stationary(), "min_steps": 40},
    "watching": {"schedule": False, "horizons": [64]},
}


@pytest.mark.parametrize(
    ("kind", "saved", "precision"),
    [
        ("threshold", "after each epoch", "32-true"),
        ("threshold", "after each epoch", "bf16-mixed"),
        ("threshold", "after its last batch", "bf16-mixed"),
        ("gain", "after its last batch", "32-true"),
        ("stationary", "after each epoch", "32-true"),
        ("watching", "after its last batch", "32-true"),
    ],
)
def test_a_run_that_crashes_and_resumes_is_the_uninterrupted_one(kind, saved, precision, tmp_path):
    interval = {"every_n_train_steps": 40} if "batch" in saved else {"every_n_epochs": 1}
    settings = KINDS[kind]

    def run(crash_at=None, ckpt_path=None):
        task, fdr = Task(), FDRCallback(**settings)
        notes = Notes(fdr, crash_at)
        checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **interval)
        callbacks = [fdr, notes, checkpoint] if crash_at != 0 else [fdr, notes]
        options = {"enable_checkpointing": True, "precision": precision}
        try:
            fit(task, callbacks, tmp_path, epochs=10, ckpt_path=ckpt_path, **options)
        except RuntimeError as error:
            assert str(error) == "crash"  # noqa: PT017
        return task, fdr, notes

    straight, reference, all_notes = run()
    for file in tmp_path.glob("*.ckpt"):
        file.unlink()
    run(crash_at=255)
    resumed, fdr, notes = run(ckpt_path=tmp_path / "step=240.ckpt")
    assert all(map(torch.equal, weights(straight), weights(resumed)))
    assert fdr.monitors[0].reading() == reference.monitors[0].reading()
    assert notes.rows == {step: all_notes.rows[step] for step in range(240, 400)}
    if kind in ("threshold", "gain"):
        assert all_notes.rows[239][0] < 0.05  # it was lowered before, and is again after
        assert all_notes.rows[399][0] < all_notes.rows[241][0]


# Settings -------------------------------------------------------------------------------------


def test_settings_are_checked_when_the_callback_is_created():
    with pytest.raises(ValueError, match=r"threshold must be a positive number .* got -1"):
        FDRCallback(threshold=-1)
    with pytest.raises(ValueError, match=r"start must be a whole number .* at least 0, got -1"):
        FDRCallback(start=-1)
