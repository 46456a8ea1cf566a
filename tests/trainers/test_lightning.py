"""The callbacks for Lightning, in Lightning's own Trainer."""

import csv
import importlib
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from support.lightning_task import Both, Notes, Task, fit, loader
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

import equilibrate as eq
from equilibrate.integrations.lightning import CooldownCallback, FDRCallback, MonitorCallback

# Lightning advises on workers and on intervals of logging.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EAGER = {"threshold": 1e9, "factor": 0.5, "min_steps": 40}
"""Lowers the learning rate whenever there are enough steps."""


def weights(task):
    return [p.detach().clone() for p in task.parameters()]


def rates(notes):
    return [notes.rows[step][0] for step in sorted(notes.rows)]


# Cooldown -------------------------------------------------------------------------------------


def loop(epochs, micro_batches, **settings):
    """A training by hand; Lightning divides the losses of a last step with fewer, too."""
    task, batches = Task(), loader()
    optimizer = task.configure_optimizers()
    total = epochs * -(-len(batches) // micro_batches)
    scheduler, lrs = eq.Cooldown(optimizer, total, **settings), []
    for epoch in range(epochs):
        batches.sampler.set_epoch(epoch)
        losses = []
        for i, (inputs, targets) in enumerate(batches):
            loss = torch.nn.functional.mse_loss(task.net(inputs), targets)
            (loss / micro_batches).backward()
            losses.append(loss.detach() / micro_batches * micro_batches)
            if (i + 1) % micro_batches == 0 or i + 1 == len(batches):
                lrs.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
                mean = torch.stack(losses).double().mean()

                def again(rest=mean - losses[-1], inputs=inputs, targets=targets):
                    return rest + torch.nn.functional.mse_loss(task.net(inputs), targets)

                scheduler.step(mean, again)
                losses = []
    return task, scheduler, lrs


@pytest.mark.parametrize(("epochs", "micro_batches"), [(10, 1), (20, 3)])
def test_a_cooldown_is_that_of_a_loop_by_hand(epochs, micro_batches, tmp_path):
    settings = {"warmup_steps": 20, "min_lr": 0.001}
    by_hand, scheduler, lrs = loop(epochs, micro_batches, **settings)
    task, callback = Task(), CooldownCallback(**settings)
    notes = Notes(callback)
    options = {"accumulate_grad_batches": micro_batches}
    fit(task, [callback, notes], tmp_path, epochs=epochs, **options)
    assert rates(notes) == lrs
    assert lrs[0] == pytest.approx(0.05 / 20)
    assert max(lrs) == 0.05 > lrs[-1]
    assert callback.scheduler.last_decision == scheduler.last_decision
    assert scheduler.last_decision.lowered
    assert all(map(torch.equal, weights(by_hand), weights(task)))


def test_the_docs_first_line(tmp_path):
    """Without an argument; a trial run of one step, too."""
    for options, lr in (({}, 0.0), ({"fast_dev_run": True}, 0.05)):
        trainer = fit(Task(), [CooldownCallback()], tmp_path, epochs=2, **options)
        assert trainer.callback_metrics["equilibrate/lr"] == lr


@pytest.mark.parametrize("kind", [CooldownCallback, FDRCallback, MonitorCallback])
def test_no_callback_needs_arguments(kind, tmp_path):
    fit(Task(), [callback := kind()], tmp_path, epochs=1)
    assert (callback.monitor or callback.forecaster).step >= 32


def test_a_longer_training_keeps_cooling_down_until_its_end(tmp_path):
    options = {"enable_checkpointing": True}
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1)
    fit(Task(), [CooldownCallback(), saving], tmp_path, epochs=5, **options)
    callback, saving = CooldownCallback(), ModelCheckpoint(tmp_path)
    notes = Notes(callback)
    options["ckpt_path"] = tmp_path / "step=120.ckpt"
    with pytest.warns(UserWarning, match="total_steps=200; total_steps=240 of this"):
        fit(Task(), [callback, notes, saving], tmp_path, epochs=6, **options)
    assert notes.rows[161][0] == 0.05
    assert callback.scheduler.get_last_lr() == [0.0]


def test_a_checkpoint_without_a_state_is_reported(tmp_path):
    saving = ModelCheckpoint(tmp_path, "{step}")
    fit(Task(), [saving], tmp_path, epochs=3, enable_checkpointing=True)
    callback, options = CooldownCallback(), {"ckpt_path": tmp_path / "step=120.ckpt"}
    with pytest.warns(UserWarning, match="step 120 holds no state .* the 80 steps left"):
        fit(Task(), [callback, saving], tmp_path, epochs=5, enable_checkpointing=True, **options)
    assert callback.scheduler.get_last_lr() == [0.0]


class Manual(Task):
    """Makes its steps itself, with one optimizer or two."""

    def __init__(self, optimizers=1):
        super().__init__()
        self.automatic_optimization = False
        self.number = optimizers

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def configure_optimizers(self):
        return [super(Manual, self).configure_optimizers() for _ in range(self.number)]


class Scheduled(Task):
    """Has a scheduler."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": CosineAnnealingLR(optimizer, 10)}


@pytest.mark.parametrize(
    ("task", "callback", "words"),
    [
        (Manual(), CooldownCallback(), "make: automatic_optimization is False. Remove the callb"),
        (Manual(2), CooldownCallback(), "are 2 optimizers, and CooldownCallback is for one: remo"),
        (Manual(2), FDRCallback(), "2 optimizers, and FDRCallback is for one: .* for each optimi"),
        (Manual(2), MonitorCallback(), "and MonitorCallback is for one: .* eq.Monitor for each"),
        (Scheduled(), CooldownCallback(), "returns CosineAnnealingLR, but CooldownCallback sets"),
        (Scheduled(), FDRCallback(), "returns CosineAnnealingLR, but FDRCallback sets"),
        (Task(), CooldownCallback(warmup_steps=-1), "warmup_steps must be"),
    ],
)
def test_what_does_not_fit_is_refused(task, callback, words, tmp_path):
    with pytest.raises(ValueError, match=words) as told:
        fit(task, [callback], tmp_path, epochs=1)
    assert "limit the training" not in str(told.value)  # max_epochs is set


class TwoParts(Task):
    """Two optimizers, each with a loss and a scheduler of its own, as in the documentation."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(5, 1)
        self.seen = [[], []]

    def training_step(self, batch, batch_idx):
        parts = zip((self.net, self.other), self.optimizers(), self.lr_schedulers(), strict=True)
        for k, (part, optimizer, scheduler) in enumerate(parts):
            optimizer.zero_grad()
            loss = (part(batch[0]) - batch[1] + 3 * k).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step(loss)
            self.seen[k].append(scheduler.get_last_lr()[0])

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(p.parameters(), lr=0.05) for p in (self.net, self.other)]
        steps = int(self.trainer.estimated_stepping_batches)
        return optimizers, [eq.Cooldown(each, total_steps=steps) for each in optimizers]


def test_two_optimizers_have_schedulers_of_their_own_that_resume(tmp_path):
    whole, resumed = TwoParts(), TwoParts()
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = fit(whole, [saving], tmp_path, epochs=10, enable_checkpointing=True)
    assert trainer.global_step == 2 * len(whole.seen[0])
    schedulers = whole.lr_schedulers()
    assert [scheduler.get_last_lr() for scheduler in schedulers] == [[0.0], [0.0]]
    options = {"enable_checkpointing": True, "ckpt_path": tmp_path / "epoch=1.ckpt"}
    fit(resumed, [saving], tmp_path, epochs=10, **options)
    assert resumed.seen == [lrs[80:] for lrs in whole.seen]
    reasons = [[s.last_decision.reason for s in task.lr_schedulers()] for task in (whole, resumed)]
    assert reasons[0] == reasons[1]
    assert reasons[0][0] != reasons[0][1]


# The paper's schedule, and watching -----------------------------------------------------------


def test_it_decides_what_a_scheduler_attached_by_hand_decides(tmp_path):
    """The same module with the scheduler returned by configure_optimizers."""

    class ByHand(Task):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.scheduler = eq.FDRScheduler(optimizer, threshold=0.3, min_steps=40)
            return {"optimizer": optimizer, "lr_scheduler": self.scheduler}

    by_hand = ByHand()
    fit(by_hand, [], tmp_path, epochs=12)
    task, callback = Task(), FDRCallback(threshold=0.3, min_steps=40)
    fit(task, [callback], tmp_path, epochs=12)
    assert by_hand.scheduler.last_decision == callback.scheduler.last_decision
    assert callback.scheduler.get_last_lr()[0] < 0.05
    assert all(map(torch.equal, weights(by_hand), weights(task)))


@pytest.mark.parametrize("kind", [Task, Manual, Scheduled])
def test_watching_changes_no_bit(kind, tmp_path):
    alone, watched = kind(), kind()
    fit(alone, [], tmp_path, epochs=2)
    callback = MonitorCallback(layers=True)
    trainer = fit(watched, [callback], tmp_path, epochs=2)
    assert all(map(torch.equal, weights(alone), weights(watched)))
    assert callback.scheduler is callback.forecaster is None
    assert callback.monitor.step == 80
    for name, _ in watched.named_parameters():
        assert f"equilibrate_layers/{name}/residual" in trainer.callback_metrics


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ],
    ids=lambda options: ", ".join(options),
)
def test_the_readings_are_of_the_steps_that_were_made(options, tmp_path):
    """What moved the parameters in its window telescopes: the difference of the sides."""
    norms = {}

    class Norms(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            squares = [p.detach().double().square().sum() for p in pl_module.parameters()]
            norms[trainer.global_step] = float(sum(squares))

    class Adam(Task):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    callback = MonitorCallback()
    trainer = fit(Adam(), [Norms(), callback], tmp_path, epochs=4, **options)
    reading = callback.monitor.reading()
    assert reading.step == trainer.global_step
    falls = [
        (norms[end - reading.count] - norms[end]) / (2 * 0.01 * reading.count)
        for end in range(reading.count + 1, reading.step + 1)
    ]
    assert min(abs(fall - reading.difference) for fall in falls) < 1e-4 * reading.right


# Training steps that are evaluated again ------------------------------------------------------

EVALUATIONS = []
"""Whether each one had gradients, and the dtype of its outputs."""


class Delicate(Task):
    """A training step that leaves traces wherever one can."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))
        self.target = torch.nn.Linear(5, 8).requires_grad_(False)
        self.error = MeanSquaredError()
        self.errors = MetricCollection([MeanSquaredError(), MeanAbsoluteError()])
        self.calls, self.noises = 0, {"all": []}
        self.generator = torch.Generator().manual_seed(0)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        noise = random.random() + np.random.rand()  # noqa: NPY002
        noise += torch.rand((), generator=self.generator).item()
        outputs = self.net(inputs + 0.01 * noise)
        EVALUATIONS.append((torch.is_grad_enabled(), outputs.dtype))
        for slow, fast in zip(self.target.parameters(), self.net[0].parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data
        self.calls += 1
        self.noises["all"].append(noise)
        self.error(outputs.detach(), targets)
        self.log("calls", float(self.calls), on_step=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log_dict(self.errors(outputs.detach(), targets), on_epoch=True)
        if self.logger is not None:
            self.logger.experiment.log_metrics({"calls by hand": self.calls})
        loss = torch.nn.functional.mse_loss(outputs, targets)
        return {"loss": loss + self.target(inputs).square().mean()}

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.5)


def everything(callback, folder, **options):
    """Train; return all that the training has left behind."""
    task, logger = Delicate(), CSVLogger(folder)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    settings = {"epochs": 4, "logger": logger, "log_every_n_steps": 1} | options
    fit(task, [] if callback is None else [callback], folder, **settings)
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        table = [
            {k: v for k, v in row.items() if v and "equilibrate" not in k}
            for row in csv.DictReader(file)
        ]
    randoms = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
    left = task.calls, task.noises, task.generator.get_state().tolist(), randoms
    grads = [p.grad.tolist() for p in task.net.parameters()]
    return task.state_dict(), [row for row in table if row.keys() - {"step"}], left, grads


def compared(forecaster):
    return forecaster.state_dict()["comparisons"]["values"]


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "epochs": 8}],
    ids=lambda options: ", ".join(options),
)
def test_evaluating_again_changes_nothing(options, tmp_path):
    EVALUATIONS.clear()
    state, *left = everything(None, tmp_path / "alone", **options)
    alone = EVALUATIONS.copy()
    EVALUATIONS.clear()
    callback = MonitorCallback(forecast=True)
    again, *same = everything(callback, tmp_path / "watched", **options)
    assert state.keys() == again.keys()
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert same == left
    assert [made for made in EVALUATIONS if made[0]] == alone
    [evaluation] = {made for made in EVALUATIONS if not made[0]}
    assert evaluation[1] == alone[0][1]
    found = compared(callback.forecaster)
    assert len(found) == len(EVALUATIONS) - len(alone) == 3
    assert all(0 < abs(own - mean) < math.inf for own, mean in found)


def test_a_cooldown_evaluates_until_it_decays(tmp_path):
    EVALUATIONS.clear()
    everything(CooldownCallback(), tmp_path, epochs=5)
    assert len(EVALUATIONS) == 203  # at steps 50, 100 and 150 of 200


class Penalized(Task):
    """Needs gradients in its training step."""

    def training_step(self, batch, batch_idx):
        inputs = batch[0].requires_grad_()
        [slope] = torch.autograd.grad(self.net(inputs).sum(), inputs, create_graph=True)
        return super().training_step(batch, batch_idx) + 0.01 * slope.square().mean()


class ManualWithLoss(Manual):
    """Makes its steps itself, and returns its loss."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return {"loss": torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]).detach()}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Penalized, r"a second time \(RuntimeError: .*does not require grad"),
        (ManualWithLoss, r"a second time \(ValueError: with manual optimization"),
    ],
)
def test_a_training_step_that_cannot_be_evaluated_again(kind, words, tmp_path):
    alone, task, callback = kind(), kind(), MonitorCallback(forecast=True)
    fit(alone, [], tmp_path, epochs=6)
    with pytest.warns(UserWarning, match=words) as caught:
        fit(task, [callback], tmp_path, epochs=6)
    assert len([one for one in caught if "a second time" in str(one.message)]) == 1
    assert all(map(torch.equal, weights(alone), weights(task)))
    assert callback.forecaster.forecast(48).undefined is None  # from gradients


def test_forecasts_are_logged(tmp_path):
    callback = MonitorCallback(forecast=True)
    trainer = fit(Task(), [callback], tmp_path, epochs=6)
    made = callback.forecaster.forecast()
    assert trainer.callback_metrics["equilibrate/forecast/after"] == made.after.value
    assert made.horizon == 48


# Averaged parameters --------------------------------------------------------------------------


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
    task, callback = Validated(), MonitorCallback(evaluate_averaged=True)
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 1}
    trainer = fit(task, [callback, saving], tmp_path, epochs=3, data=Both(), **options)
    assert all(map(torch.equal, weights(alone), weights(task)))  # the training is the same
    saved = torch.load(tmp_path / "step=120.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], p) for name, p in task.named_parameters())
    sanity, *seen = task.seen
    assert all(map(torch.equal, sanity, weights(Validated())))
    for ours, theirs in zip(seen, alone.seen, strict=True):
        assert not any(map(torch.equal, ours, theirs))
    with callback.forecaster.averaged():
        assert all(map(torch.equal, seen[-1], weights(task)))
    trainer.validate(task, Both().val_dataloader(), verbose=False)  # not a part of a training
    assert all(map(torch.equal, task.seen[-1], weights(task)))


def test_a_cooldown_is_validated_with_averages_until_it_decays(tmp_path):
    task, callback = Validated(), CooldownCallback(evaluate_averaged=True)
    alone = Validated()
    fit(task, [callback], tmp_path, epochs=5, data=Both())
    fit(alone, [CooldownCallback()], tmp_path, epochs=5, data=Both())
    for epoch, (ours, theirs) in enumerate(zip(task.seen, alone.seen, strict=True)):
        assert any(map(torch.equal, ours, theirs)) is (epoch >= 3)  # the last fifth: it decays


def test_a_validation_that_fails_leaves_the_model_its_own_parameters(tmp_path):
    alone = Validated()
    fit(alone, [], tmp_path, epochs=2, data=Both())
    task, callback = Validated(fail_at=2), MonitorCallback(evaluate_averaged=True)
    with pytest.raises(RuntimeError, match="a validation that fails"):
        fit(task, [callback], tmp_path, epochs=3, data=Both())
    assert all(map(torch.equal, weights(alone), weights(task)))


# Logging --------------------------------------------------------------------------------------


def test_numbers_go_to_the_trainers_loggers(tmp_path):
    callback = FDRCallback(**EAGER)
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    trainer = fit(Task(), [callback], tmp_path, epochs=3, logger=loggers, log_every_n_steps=10)
    with open(f"{loggers[0].log_dir}/metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    losses = {int(row["step"]) for row in table if row["loss"]}
    rows = {int(row["step"]): row for row in table if row["equilibrate/lr"]}
    assert set(rows) == set(range(9, 120, 10)) == losses  # the steps of the module's own
    [decision] = (decision for decision in callback.scheduler.decisions if decision.lowered)
    last = rows[decision.step - 1]
    assert last["equilibrate/lr"] == "0.025"
    assert float(last["equilibrate/residual"]) == decision.reading.residual
    assert trainer.callback_metrics["equilibrate/lr"] == 0.025


def test_other_callbacks_can_use_the_numbers(tmp_path):
    stop = EarlyStopping("equilibrate/lr", stopping_threshold=0.03, check_on_train_epoch_end=True)
    trainer = fit(Task(), [FDRCallback(**EAGER), stop], tmp_path, epochs=6)
    assert 80 <= trainer.global_step <= 120


# Checkpoints, and the other package -----------------------------------------------------------

KINDS = {
    "cooldown": lambda: CooldownCallback(warmup_steps=20),
    "threshold": lambda: FDRCallback(threshold=0.5, factor=0.7, min_steps=20),
    "stationary": lambda: FDRCallback(rule=eq.stationarity.Stationary(), min_steps=40),
    "watching": lambda: MonitorCallback(forecast=True),
}


@pytest.mark.parametrize(
    ("kind", "saved", "precision"),
    [
        ("cooldown", "after each epoch", "32-true"),
        ("cooldown", "after its last batch", "bf16-mixed"),
        ("threshold", "after each epoch", "bf16-mixed"),
        ("threshold", "after its last batch", "32-true"),
        ("stationary", "after each epoch", "32-true"),
        ("watching", "after its last batch", "32-true"),
    ],
)
def test_a_run_that_crashes_and_resumes_is_the_uninterrupted_one(kind, saved, precision, tmp_path):
    interval = {"every_n_train_steps": 40} if "batch" in saved else {"every_n_epochs": 1}

    def run(crash_at=None, ckpt_path=None):
        task, callback = Task(), KINDS[kind]()
        notes = Notes(callback, crash_at)
        checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **interval)
        options = {"enable_checkpointing": True, "precision": precision, "ckpt_path": ckpt_path}
        try:
            trainer = fit(task, [callback, notes, checkpoint], tmp_path, epochs=10, **options)
        except RuntimeError as error:
            assert str(error) == "crash"  # noqa: PT017
            return None
        metrics = {k: v for k, v in trainer.callback_metrics.items() if "equilibrate" in k}
        return weights(task), metrics, notes.rows

    straight, reference, rows = run()
    for file in tmp_path.glob("*.ckpt"):
        file.unlink()
    run(crash_at=255)
    resumed, metrics, later = run(ckpt_path=tmp_path / "step=240.ckpt")
    assert all(map(torch.equal, straight, resumed))
    assert metrics == reference
    assert later == {step: rows[step] for step in range(240, 400)}
    if kind in ("cooldown", "threshold"):
        assert rows[399][0] < rows[241][0]  # it was lowered since


def trained_with(package, folder, **options):
    """Train the demo of one of Lightning's packages; return its weights, and the callback."""
    pl = importlib.import_module(package)
    demo = importlib.import_module(f"{package}.demos.boring_classes").BoringModel
    ours = importlib.import_module(f"equilibrate.integrations.{package.removesuffix('.pytorch')}")
    callback = ours.CooldownCallback()

    class Alone(demo):
        def configure_optimizers(self):
            return super().configure_optimizers()[0]

    saving = pl.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", callbacks=[callback, saving], **quiet)
    model = Alone()
    trainer.fit(model, **options)
    assert trainer.callback_metrics["equilibrate/lr"] == 0
    return weights(model), callback


def test_the_trainer_of_pytorch_lightning(tmp_path):
    """It does the same in both packages, and resumes from its checkpoints."""
    both = ("lightning.pytorch", "pytorch_lightning")
    found = [trained_with(package, tmp_path / package) for package in both]
    assert all(map(torch.equal, found[0][0], found[1][0]))
    first, second = (callback.scheduler.last_decision for _, callback in found)
    assert first == second
    folder = tmp_path / both[1]
    _, resumed = trained_with(both[1], folder, ckpt_path=folder / "step=128.ckpt")
    assert resumed.scheduler.last_decision == first


def test_pytorch_lightning_is_enough():
    code = """
import sys
sys.modules["lightning"] = None
from equilibrate.integrations.pytorch_lightning import CooldownCallback
CooldownCallback()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
