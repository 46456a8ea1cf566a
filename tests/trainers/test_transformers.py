"""The callback for Hugging Face, in its own Trainer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.hf_task import Noise, Notes, make_trainer
from support.rules import Noting
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import LinearLR
from transformers import TrainerCallback

import equilibrate as eq
from equilibrate.integrations.transformers import FDRCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

EAGER = {"threshold": 1e9, "factor": 0.5, "min_steps": 40, "every": 4}
"""Lowers the learning rate whenever there are enough steps: after every second epoch."""


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def attached(trainer, crash_at=None, **settings):
    fdr = FDRCallback(trainer, **settings)
    notes = Notes(fdr, crash_at)
    trainer.add_callback(fdr)
    trainer.add_callback(notes)
    return fdr, notes


def test_a_schedule_at_the_end_of_epochs(tmp_path):
    trainer = make_trainer(tmp_path, epochs=6)
    fdr, notes = attached(trainer, **EAGER)
    assert fdr.monitor is fdr.scheduler is None
    trainer.train()
    lrs = [notes.rows[step][0] for step in sorted(notes.rows)]
    assert lrs == [0.05] * 80 + [0.025] * 80 + [0.0125] * 80
    assert fdr.monitor is not None
    assert fdr.monitor.step == 240


def test_it_decides_what_a_scheduler_attached_by_hand_decides(tmp_path):
    class ByHand(TrainerCallback):
        def on_epoch_end(self, *_, **__):
            scheduler.step()

    by_hand = make_trainer(tmp_path, epochs=12, callbacks=[ByHand()])
    optimizer = by_hand.create_optimizer()
    by_hand.lr_scheduler = LinearLR(optimizer, start_factor=1.0)  # does nothing
    scheduler = eq.FDRScheduler(optimizer, threshold=0.5, min_steps=40)
    by_hand.train()
    trainer = make_trainer(tmp_path, epochs=12)
    fdr, _ = attached(trainer, threshold=0.5, min_steps=40)
    trainer.train()
    assert fdr.scheduler is not None
    assert fdr.scheduler.last_decision == scheduler.last_decision
    assert fdr.scheduler.get_last_lr()[0] < 0.05
    assert all(map(torch.equal, weights(by_hand), weights(trainer)))


def test_watching_changes_no_bit(tmp_path):
    options = {"epochs": 3, "lr_scheduler_type": "cosine", "warmup_steps": 10}
    alone = make_trainer(tmp_path, **options)
    alone.train()
    watched = make_trainer(tmp_path, **options)
    fdr, _ = attached(watched, schedule=False, layers=True)
    watched.train()
    assert all(map(torch.equal, weights(alone), weights(watched)))
    assert fdr.scheduler is None
    assert fdr.monitor is not None
    names = {name for name, _ in watched.model.named_parameters()}
    assert set(fdr.monitor.parameter_readings()) == names


def evaluated(trainer):
    """Return a list to which the parameters at each evaluation are appended."""
    seen = []
    trainer.compute_metrics = lambda _: seen.append(weights(trainer)) or {}
    return seen


@pytest.mark.parametrize("datasets", [1, 2])
def test_evaluations_with_averaged_parameters(datasets, tmp_path):
    data = Noise(32) if datasets == 1 else {"one": Noise(32), "two": Noise(16)}
    each = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    options = each | {"epochs": 3, "eval_dataset": data}
    alone = make_trainer(tmp_path / "alone", **options)
    without = evaluated(alone)
    alone.train()
    trainer = make_trainer(tmp_path, **options)
    fdr, _ = attached(trainer, schedule=False, evaluate_averaged=True)
    assert fdr.forecaster is None
    seen = evaluated(trainer)
    trainer.train()
    assert all(map(torch.equal, weights(alone), weights(trainer)))  # the training is the same
    saved = load_file(tmp_path / "checkpoint-120" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in trainer.model.named_parameters())
    assert len(seen) == 3 * datasets
    for ours, theirs in zip(seen, without, strict=True):
        assert not any(map(torch.equal, ours, theirs))
    with fdr.forecaster.averaged():
        assert all(map(torch.equal, seen[-1], weights(trainer)))
    trainer.evaluate()  # not a part of the training
    assert all(map(torch.equal, seen[-1], weights(trainer)))


def test_an_evaluation_that_fails_leaves_the_model_its_own_parameters(tmp_path):
    options = {"eval_strategy": "epoch", "eval_dataset": Noise(32)}
    alone = make_trainer(tmp_path, epochs=2, **options)
    alone.train()
    trainer = make_trainer(tmp_path, epochs=3, **options)
    attached(trainer, schedule=False, evaluate_averaged=True)
    seen = []

    def fail(_):
        seen.append(weights(trainer))
        if len(seen) == 2:
            raise KeyError("an evaluation that fails")
        return {}

    trainer.compute_metrics = fail
    with pytest.raises(KeyError, match="an evaluation that fails"):
        trainer.train()
    assert all(map(torch.equal, weights(alone), weights(trainer)))
    trainer.evaluate()  # by hand
    assert all(map(torch.equal, seen[-1], weights(trainer)))


class Listening:
    """Keeps the losses that it is given, and never acts."""

    needs = frozenset({"losses"})

    def __init__(self):
        self.losses = []

    def judge(self, reading):
        self.losses.append(reading.losses.values[-1])
        return eq.rules.Verdict(False, "never")


def test_callbacks_do_not_disturb_each_other_nor_methods_of_the_user(tmp_path):
    trainer = make_trainer(tmp_path, epochs=2, eval_strategy="epoch", eval_dataset=Noise(32))
    own, evaluate = [], trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: own.append(1) or evaluate(*args, **kwargs)
    seen = evaluated(trainer)
    rules = [Listening(), Listening()]
    for rule, averaged in zip(rules, (True, False), strict=True):
        fdr = FDRCallback(trainer, rule=rule, evaluate_averaged=averaged, min_steps=10)
        trainer.add_callback(fdr)
    for epochs in (2, 4):
        trainer.train()
        one, two = (rule.losses for rule in rules)
        assert len(one) == epochs
        assert one == two
    assert one[2] < 2 * one[1]  # and not the loss of every step twice
    assert len(own) == len(seen) == 4
    assert not any(map(torch.equal, seen[-1], weights(trainer)))
    trainer.evaluate()
    assert len(own) == 5
    assert all(map(torch.equal, seen[-1], weights(trainer)))


def test_a_second_training_is_logged_too(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1, logging_strategy="steps", logging_steps=20)
    attached(trainer, schedule=False)
    for _ in range(2):
        trainer.train()
        steps = [row["step"] for row in trainer.state.log_history if "equilibrate/lr" in row]
        assert steps == [20, 40]


def test_a_cooldown_is_followed_at_every_step_if_decisions_are_made_after_epochs(tmp_path):
    trainer = make_trainer(tmp_path, epochs=5)
    _, notes = attached(trainer, threshold=1e-9, cooldown_end=200)
    trainer.train()
    lrs = [notes.rows[step][0] for step in sorted(notes.rows)]
    assert lrs == pytest.approx([0.05] * 180 + [0.05 * (1 - i / 20) for i in range(20)])


def test_a_cooldown_ends_with_the_training(tmp_path):
    trainer = make_trainer(tmp_path, epochs=5, gradient_accumulation_steps=2, save_strategy="epoch")
    callback, notes = attached(trainer, threshold=1e-9, cooldown_end="end")
    trainer.train()
    lrs = [notes.rows[step][0] for step in sorted(notes.rows)]
    assert lrs == pytest.approx([0.05] * 90 + [0.05 * (1 - i / 10) for i in range(10)])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-60"))
    assert callback.scheduler.state_dict()["cooldown"]["end"] == 100


def test_statistics_that_do_not_fit_are_reported(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.model.net.insert(1, torch.nn.BatchNorm1d(8))
    attached(trainer, schedule=False, evaluate_averaged=True)
    with pytest.warns(UserWarning, match="statistics of BatchNorm do not fit averaged"):
        trainer.train()


def test_a_schedule_at_any_step(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1)
    _, notes = attached(trainer, interval="step", **EAGER | {"min_steps": 10, "every": 1})
    trainer.train()
    lowered = [step for step in sorted(notes.rows) if notes.rows[step][1].lowered]
    assert lowered == [19, 38]  # the later half of 19 steps has 10


def test_after_the_warm_up_of_the_trainer(tmp_path):
    warm_up = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 50}
    trainer = make_trainer(tmp_path, epochs=6, **warm_up)
    _, notes = attached(trainer, **EAGER)
    trainer.train()
    lrs = {step: row[0] for step, row in notes.rows.items()}
    assert all(lrs[step] < lrs[step + 1] for step in range(49))
    assert [lrs[step] for step in range(50, 160)] == [0.05] * 110
    assert [lrs[step] for step in range(160, 240)] == [0.025] * 80


def test_a_trainer_that_changes_the_learning_rate_itself_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, lr_scheduler_type="linear")
    attached(trainer)
    with pytest.raises(ValueError, match=r"lr_scheduler_type is 'linear'.*'constant_with_warmup'"):
        trainer.train()


def test_a_callback_without_a_trainer_is_refused():
    with pytest.raises(TypeError, match=r"trainer must be the trainer, got str: pass FDRCallback"):
        FDRCallback("adam")


def test_a_callback_of_another_trainer_is_refused(tmp_path):
    trainer, other = (make_trainer(tmp_path / name) for name in ("one", "other"))
    trainer.add_callback(FDRCallback(other))
    with pytest.raises(
        ValueError, match=r"trainer is not the one that .*add_callback\(FDRCallback"
    ):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"gradient_accumulation_steps": 3},
        {"max_grad_norm": 0.1},
        {"bf16": True, "gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
    ],
    ids=lambda options: ", ".join(options),
)
def test_the_readings_are_of_the_steps_that_were_made(options, tmp_path):
    """Against sums of −θ·Δ/η and Δ²/(2η) that another callback takes from the parameters."""
    sums: list[tuple] = []

    def flat(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()]).double()

    class Sums(TrainerCallback):
        def on_pre_optimizer_step(self, *_, model=None, **__):
            self.before = flat(model)

        def on_optimizer_step(self, *_, model=None, **__):
            delta = flat(model) - self.before
            sums.append((-(self.before @ delta), delta @ delta / 2))

    trainer = make_trainer(tmp_path, epochs=2, optim="adamw_torch", callbacks=[Sums()], **options)
    fdr, _ = attached(trainer, schedule=False, every=1)
    trainer.train()
    assert fdr.monitor is not None
    reading = fdr.monitor.reading()
    assert reading.step == len(sums) == trainer.state.global_step
    window = sums[-reading.count :]
    left, right = (sum(side).item() / len(window) / 0.05 for side in zip(*window, strict=True))
    assert reading.left == pytest.approx(left, rel=1e-4)
    assert reading.right == pytest.approx(right, rel=1e-4)


def test_a_rule_gets_the_loss_of_the_training(tmp_path):
    trainer = make_trainer(
        tmp_path, epochs=3, gradient_accumulation_steps=2, logging_strategy="epoch"
    )
    Noting.seen.clear()
    attached(trainer, rule=Noting(), horizons=[16], min_steps=10, every=2)
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert Noting.seen[-1].losses.values == pytest.approx(logged, rel=1e-4)
    assert Noting.seen[-1].forecasts[0].horizon == 16
    assert any("equilibrate/forecast/gain_16" in row for row in trainer.state.log_history)
    assert "training_step" not in vars(trainer)  # the trainer is as it was


# Logging --------------------------------------------------------------------------------------


def test_numbers_go_to_every_tool_of_report_to(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    options = {"logging_strategy": "steps", "logging_steps": 10, "report_to": ["tensorboard"]}
    trainer = make_trainer(tmp_path, epochs=2, **options)
    fdr, _ = attached(trainer, layers=True, **EAGER)
    trainer.train()
    history = trainer.state.log_history
    rows = {row["step"]: row for row in history if "equilibrate/residual" in row}
    losses = [row["step"] for row in history if "loss" in row]
    assert list(rows) == losses == list(range(10, 90, 10))
    assert [rows[step]["equilibrate/lr"] for step in (70, 80)] == [0.05, 0.025]
    assert [rows[step]["equilibrate/lowered"] for step in (70, 80)] == [0, 1]
    assert fdr.scheduler is not None
    judged = fdr.scheduler.last_decision.reading
    assert rows[80]["equilibrate/residual"] == judged.residual
    assert "equilibrate_layers/net.0.weight/residual" in rows[70]

    board = EventAccumulator(str(next(tmp_path.rglob("events.*")).parent))
    board.Reload()
    events = board.Scalars("train/equilibrate/residual")
    assert [event.step for event in events] == list(range(10, 90, 10))
    assert events[-1].value == pytest.approx(judged.residual)


def test_a_lowering_is_logged_when_it_happens(tmp_path):
    trainer = make_trainer(tmp_path, epochs=2)
    attached(trainer, **EAGER)
    trainer.train()
    [row] = [row for row in trainer.state.log_history if "equilibrate/lowered" in row]
    assert (row["step"], row["equilibrate/lowered"], row["equilibrate/lr"]) == (80, 1, 0.025)


# Checkpoints ----------------------------------------------------------------------------------

KIND = {"threshold": 0.5, "factor": 0.7, "min_steps": 40}
GAIN = {
    "rule": eq.rules.Gain(ahead=0.05, confidence=0.6),
    "horizons": [16],
    "every": 2,
    "interval": "step",
    "min_steps": 40,
}
SAVING = {
    "after each epoch": {"save_strategy": "epoch"},
    "after its last step": {"save_strategy": "steps", "save_steps": 40},
    "in the middle of it": {"save_strategy": "steps", "save_steps": 48},
    "after the best": {"save_strategy": "best", "metric_for_best_model": "loss"},
}


@pytest.mark.parametrize(
    ("saved", "settings"),
    [(saved, KIND) for saved in SAVING] + [("in the middle of it", GAIN)],
    ids=[*SAVING, "in the middle of it, gain"],
)
def test_a_run_that_crashes_and_resumes_is_the_uninterrupted_one(saved, settings, tmp_path):
    """After the best one of evaluations with averaged parameters, too."""
    settings = settings | {"evaluate_averaged": saved == "after the best"}
    options = SAVING[saved] | {"bf16": saved == "after each epoch"}
    if saved == "after the best":
        options |= {"eval_strategy": "steps", "eval_steps": 30, "eval_dataset": Noise(32)}

    def run(folder, crash_at=None, resume=None):
        trainer = make_trainer(folder, epochs=10, **options)
        fdr, notes = attached(trainer, crash_at, **settings)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except RuntimeError as error:
            assert str(error) == "crash"  # noqa: PT017
        return trainer, fdr, notes

    straight, reference, all_notes = run(tmp_path / "straight")
    run(tmp_path / "crashed", crash_at=255)
    checkpoints = (tmp_path / "crashed").glob("checkpoint-*")
    last = max(checkpoints, key=lambda path: int(path.name.split("-")[1]))
    moved = last.rename(tmp_path / last.name)  # a checkpoint may be resumed from anywhere
    resumed, fdr, notes = run(tmp_path / "resumed", resume=str(moved))
    begin = int(last.name.split("-")[1])
    assert 0 < begin <= 255
    assert all(map(torch.equal, weights(straight), weights(resumed)))
    assert fdr.monitor.reading() == reference.monitor.reading()
    assert notes.rows == {step: all_notes.rows[step] for step in range(begin, 400)}
    assert all_notes.rows[399][0] < all_notes.rows[begin][0] <= 0.05


def test_watching_resumes_too(tmp_path):
    def run(folder, crash_at=None, resume=None):
        trainer = make_trainer(folder, epochs=4, save_strategy="epoch")
        fdr, _ = attached(trainer, crash_at, schedule=False)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except RuntimeError as error:
            assert str(error) == "crash"  # noqa: PT017
        return fdr.monitor.reading()

    straight = run(tmp_path / "straight")
    run(tmp_path / "crashed", crash_at=100)
    assert run(tmp_path / "crashed", resume=True) == straight


def test_a_schedule_continues_the_window_of_a_run_that_was_only_watched(tmp_path):
    trainer = make_trainer(tmp_path, epochs=2, save_strategy="epoch")
    attached(trainer, schedule=False)
    trainer.train()
    trainer = make_trainer(tmp_path, epochs=3)
    fdr, _ = attached(trainer, threshold=1e9, min_steps=40)
    trainer.train(resume_from_checkpoint=True)
    assert fdr.monitor is not None
    assert fdr.monitor.step == 120
    assert fdr.scheduler.last_decision.lowered
    assert fdr.scheduler.last_decision.reading.count > 40


def test_watching_continues_the_window_of_a_schedule(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1, save_strategy="epoch")
    attached(trainer)
    trainer.train()
    trainer = make_trainer(tmp_path, epochs=2)
    fdr, _ = attached(trainer, schedule=False)
    trainer.train(resume_from_checkpoint=True)
    assert fdr.monitor is not None
    assert fdr.monitor.step == 80


@pytest.mark.parametrize("stale", [False, True], ids=["none", "an older one"])
def test_a_checkpoint_without_a_state_is_reported(stale, tmp_path):
    trainer = make_trainer(tmp_path, epochs=1, save_strategy="epoch")
    if stale:
        attached(trainer)
    trainer.train()
    if stale:
        file = tmp_path / "checkpoint-40" / "scheduler.pt"
        saved = torch.load(file)
        saved["equilibrate"]["global_step"] = 30
        torch.save(saved, file)
    trainer = make_trainer(tmp_path, epochs=2)
    fdr, _ = attached(trainer)
    with pytest.warns(UserWarning, match=r"checkpoint of step 40 holds no state of equilibrate"):
        trainer.train(resume_from_checkpoint=str(Path(tmp_path, "checkpoint-40")))
    assert fdr.monitor is not None
    assert fdr.monitor.step == 40


# Settings -------------------------------------------------------------------------------------


def test_settings_are_checked_when_the_callback_is_created(tmp_path):
    with pytest.raises(ValueError, match=r"factor must lie between 0 and 1, .* got 2"):
        FDRCallback(make_trainer(tmp_path), factor=2)
    with pytest.raises(ValueError, match=r"start must be a whole number .* at least 0, got -1"):
        FDRCallback(make_trainer(tmp_path), start=-1)
