"""The callbacks for Hugging Face, in its own Trainer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.hf_task import Noise, Notes, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import LinearLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import equilibrate as eq
from equilibrate.integrations.transformers import CooldownCallback, FDRCallback, MonitorCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

EAGER = {"threshold": 1e9, "factor": 0.5, "min_steps": 40}
"""Lowers the learning rate whenever there are enough steps."""


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def train(folder, callback=None, crash_at=None, resume=None, **options):
    """Train; return the trainer, and the learning rate and decision before each step."""
    notes = Notes(callback, crash_at)
    callbacks = ([] if callback is None else [callback, notes]) + options.pop("callbacks", [])
    trainer = make_trainer(folder, callbacks=callbacks, **options)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except RuntimeError as error:
        assert str(error) == "crash"  # noqa: PT017
    return trainer, notes.rows


def rates(rows):
    return [rows[step][0] for step in sorted(rows)]


# Cooldown -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup"])
def test_a_cooldown_takes_length_and_warm_up_from_the_trainer(kind, tmp_path):
    callback = CooldownCallback(min_lr=0.001)
    options = {"lr_scheduler_type": kind, "warmup_steps": 20, "logging_steps": 1}
    options |= {"epochs": 10, "logging_strategy": "steps"}
    trainer, rows = train(tmp_path, callback, **options)
    decision = callback.scheduler.last_decision
    assert decision.lowered
    lrs, start = rates(rows), decision.step
    assert lrs[:20] == pytest.approx([0.05 * (i + 1) / 20 for i in range(20)])
    assert lrs[20:start] == [0.05] * (start - 20)
    shares = [1 - i / (400 - start) for i in range(400 - start)]
    assert lrs[start:] == pytest.approx([0.001 + 0.049 * share for share in shares])
    logged = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert logged[1:] == pytest.approx(lrs[1:])  # the trainer logs what is used


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_cooldown_gets_the_losses_that_the_trainer_logs(micro_batches, tmp_path, monkeypatch):
    losses, step = [], eq.Cooldown.step

    def noting(self, loss=None):
        losses.append(loss)
        step(self, loss)

    monkeypatch.setattr(eq.Cooldown, "step", noting)
    options = {"logging_strategy": "steps", "logging_steps": 1}
    options["gradient_accumulation_steps"] = micro_batches
    trainer, _ = train(tmp_path, CooldownCallback(), epochs=2, **options)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == trainer.state.max_steps
    assert list(map(float, losses[1:])) == pytest.approx(logged, abs=1e-4)  # it may round them


def test_a_second_training_has_a_cooldown_of_its_own(tmp_path):
    callback = CooldownCallback()
    trainer, rows = train(tmp_path, callback, epochs=2)
    first = rates(rows)
    trainer.train()
    assert rates(rows) == first
    assert callback.scheduler.last_epoch == 80


def test_a_longer_training_keeps_cooling_down_until_its_end(tmp_path):
    train(tmp_path, CooldownCallback(), epochs=5, save_strategy="epoch")
    callback, path = CooldownCallback(), str(tmp_path / "checkpoint-160")
    with pytest.warns(UserWarning, match="total_steps=200; total_steps=240 of this"):
        _, rows = train(tmp_path, callback, resume=path, epochs=6)
    assert rows[215][0] == 0.05
    assert set(callback.scheduler.get_last_lr()) == {0.0}


@pytest.mark.parametrize("stale", [False, True], ids=["none", "an older one"])
def test_a_checkpoint_without_a_state_is_reported(stale, tmp_path):
    train(tmp_path, CooldownCallback() if stale else None, epochs=1, save_strategy="epoch")
    checkpoint = Path(tmp_path, "checkpoint-40")
    if stale:
        saved = torch.load(checkpoint / "scheduler.pt")
        saved["equilibrate_CooldownCallback"]["global_step"] = 30
        torch.save(saved, checkpoint / "scheduler.pt")
    callback = CooldownCallback()
    with pytest.warns(UserWarning, match=r"step 40 holds no state .* the 40 steps left"):
        train(tmp_path, callback, resume=str(checkpoint), epochs=2)
    assert callback.scheduler.last_epoch == 40


@pytest.mark.parametrize("kind", [CooldownCallback, FDRCallback])
def test_a_trainer_that_changes_the_learning_rate_itself_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=r"'linear'.* but \w+Callback sets it: .*'constant'"):
        train(tmp_path, kind(), lr_scheduler_type="linear")


def test_a_loop_without_a_trainer_is_refused(tmp_path):
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(TypeError, match=r"called by a transformers.Trainer: pass it to"):
        CooldownCallback().on_train_begin(arguments, TrainerState(), TrainerControl())


# The paper's schedule, and watching -----------------------------------------------------------


def test_it_decides_what_a_scheduler_attached_by_hand_decides(tmp_path):
    class ByHand(TrainerCallback):
        def on_epoch_end(self, *_, **__):
            scheduler.step()

    by_hand = make_trainer(tmp_path, epochs=12, callbacks=[ByHand()])
    optimizer = by_hand.create_optimizer()
    by_hand.lr_scheduler = LinearLR(optimizer, start_factor=1.0)  # does nothing
    scheduler = eq.FDRScheduler(optimizer, threshold=0.5, min_steps=40)
    by_hand.train()
    callback = FDRCallback(threshold=0.5, min_steps=40)
    trainer, _ = train(tmp_path, callback, epochs=12)
    assert callback.scheduler.last_decision == scheduler.last_decision
    assert callback.scheduler.get_last_lr()[0] < 0.05
    assert all(map(torch.equal, weights(by_hand), weights(trainer)))


def test_a_lowering_stays_after_the_warm_up_of_the_trainer(tmp_path):
    warm_up = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20}
    callback = FDRCallback(**EAGER)
    _, rows = train(tmp_path, callback, epochs=6, **warm_up)
    lrs = rates(rows)
    assert lrs[:20] == pytest.approx([0.05 * i / 20 for i in range(20)])
    # The first step, at a learning rate of 0, is none.
    steps = [made.step + 1 for made in callback.scheduler.decisions if made.lowered]
    assert len(steps) >= 2
    expected = [0.05 * 0.5 ** sum(at <= step for at in steps) for step in range(20, 240)]
    assert lrs[20:] == pytest.approx(expected)


def test_watching_changes_no_bit(tmp_path):
    options = {"epochs": 3, "lr_scheduler_type": "cosine", "warmup_steps": 10}
    options |= {"logging_strategy": "steps", "logging_steps": 20}
    alone, _ = train(tmp_path, **options)
    callback = MonitorCallback(layers=True, horizons=[64])
    watched, _ = train(tmp_path, callback, **options)
    assert all(map(torch.equal, weights(alone), weights(watched)))
    assert callback.scheduler is None
    assert callback.forecaster.horizons == (64,)
    for name, _ in watched.model.named_parameters():
        assert f"equilibrate_layers/{name}/residual" in watched.state.log_history[-3]


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True, "gradient_accumulation_steps": 3, "max_grad_norm": 0.1}],
    ids=lambda options: ", ".join(options),
)
def test_the_readings_are_of_the_steps_that_were_made(options, tmp_path):
    """What moved the parameters in its window telescopes: the difference of the sides."""
    norms = {}

    class Norms(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            squares = [p.detach().double().square().sum() for p in model.parameters()]
            norms[state.global_step] = float(sum(squares))

    callback = MonitorCallback()
    options |= {"callbacks": [Norms()], "optim": "adamw_torch", "learning_rate": 0.01}
    trainer, _ = train(tmp_path, callback, epochs=4, **options)
    reading = callback.monitor.reading()
    assert reading.step == trainer.state.global_step == len(norms)
    falls = [
        (norms[end - reading.count] - norms[end]) / (2 * 0.01 * reading.count)
        for end in range(reading.count + 1, reading.step + 1)
    ]
    assert min(abs(fall - reading.difference) for fall in falls) < 1e-4 * reading.right


# Averaged parameters --------------------------------------------------------------------------


class Evaluated(TrainerCallback):
    """Keeps the parameters that the model has at evaluations, and may fail at one of them."""

    def __init__(self, fail_at=None):
        self.seen, self.fail_at = [], fail_at

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.seen.append([p.detach().clone() for p in model.parameters()])
        if len(self.seen) == self.fail_at:
            raise KeyError("an evaluation that fails")


EVALUATING = {"epochs": 3, "eval_strategy": "epoch", "per_device_eval_batch_size": 32}


@pytest.mark.parametrize("datasets", [1, 2])
def test_evaluations_with_averaged_parameters(datasets, tmp_path):
    data = Noise(32) if datasets == 1 else {"one": Noise(32), "two": Noise(16)}
    options = EVALUATING | {"eval_dataset": data, "save_strategy": "epoch"}
    without, evaluated = Evaluated(), Evaluated()
    alone, _ = train(tmp_path / "alone", callbacks=[without], **options)
    callback = MonitorCallback(evaluate_averaged=True)
    trainer, _ = train(tmp_path, callback, callbacks=[evaluated], **options)
    assert all(map(torch.equal, weights(alone), weights(trainer)))  # the training is the same
    saved = load_file(tmp_path / "checkpoint-120" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in trainer.model.named_parameters())
    assert len(evaluated.seen) == 3 * datasets
    for ours, theirs in zip(evaluated.seen, without.seen, strict=True):
        assert not any(map(torch.equal, ours, theirs))
    with callback.forecaster.averaged():
        assert all(map(torch.equal, evaluated.seen[-1], weights(trainer)))
    trainer.evaluate()  # not a part of the training
    assert all(map(torch.equal, evaluated.seen[-1], weights(trainer)))


def test_an_evaluation_that_fails_leaves_the_model_its_own_parameters(tmp_path):
    options = EVALUATING | {"eval_dataset": Noise(32)}
    alone, _ = train(tmp_path, **options | {"epochs": 2})
    evaluated, callback = Evaluated(fail_at=2), MonitorCallback(evaluate_averaged=True)
    trainer = make_trainer(tmp_path, callbacks=[callback, evaluated], **options)
    with pytest.raises(KeyError, match="an evaluation that fails"):
        trainer.train()
    assert all(map(torch.equal, weights(alone), weights(trainer)))


def test_two_callbacks_do_not_disturb_each_other(tmp_path):
    options = {"epochs": 2, "save_strategy": "epoch"}
    alone, rows = train(tmp_path / "alone", CooldownCallback(), **options)
    cooldown, watching = CooldownCallback(), MonitorCallback(evaluate_averaged=True)
    options["callbacks"] = [watching]
    both, same = train(tmp_path / "both", cooldown, **options)
    assert same == rows
    assert all(map(torch.equal, weights(alone), weights(both)))
    path = str(tmp_path / "both" / "checkpoint-40")
    _, again = train(tmp_path / "both", cooldown, resume=path, **options)
    assert again == {step: rows[step] for step in range(40, 80)}
    assert watching.monitor.step == 80


# Logging --------------------------------------------------------------------------------------


def test_numbers_go_to_every_tool_of_report_to(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    options = {"logging_strategy": "steps", "logging_steps": 10, "report_to": ["tensorboard"]}
    trainer, _ = train(tmp_path, MonitorCallback(), epochs=2, **options)
    history = trainer.state.log_history
    rows = {row["step"]: row for row in history if "equilibrate/residual" in row}
    losses = [row["step"] for row in history if "loss" in row]
    assert list(rows) == losses == list(range(10, 90, 10))
    board = EventAccumulator(str(next(tmp_path.rglob("events.*")).parent))
    board.Reload()
    events = board.Scalars("train/equilibrate/residual")
    assert [event.step for event in events] == list(rows)
    assert events[-1].value == pytest.approx(rows[80]["equilibrate/residual"])


def test_a_lowering_is_logged_when_it_happens(tmp_path):
    callback = FDRCallback(**EAGER)
    trainer, _ = train(tmp_path, callback, epochs=3)
    [row] = [row for row in trainer.state.log_history if "equilibrate/lr" in row]
    [decision] = [made for made in callback.scheduler.decisions if made.lowered]
    assert (row["step"], row["equilibrate/lr"]) == (decision.step, 0.025)
    assert row["equilibrate/residual"] == decision.reading.residual


# Checkpoints ----------------------------------------------------------------------------------

KINDS = {
    "cooldown": lambda **options: CooldownCallback(warmup_steps=20, **options),
    "threshold": lambda: FDRCallback(threshold=1.0, factor=0.7, min_steps=20),
    "watching": lambda: MonitorCallback(horizons=[64]),
}
SAVING = {
    "after each epoch": {"save_strategy": "epoch"},
    "after its last step": {"save_strategy": "steps", "save_steps": 40},
    "in the middle of it": {"save_strategy": "steps", "save_steps": 48},
    "after the best": {"save_strategy": "best", "metric_for_best_model": "loss"},
}


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("cooldown", "after each epoch"),
        ("cooldown", "in the middle of it"),
        ("cooldown", "after the best"),
        ("threshold", "after each epoch"),
        ("threshold", "after its last step"),
        ("watching", "in the middle of it"),
    ],
)
def test_a_run_that_crashes_and_resumes_is_the_uninterrupted_one(kind, saved, tmp_path):
    """After the best one of evaluations with averaged parameters, too."""
    options = SAVING[saved] | {"bf16": saved == "after each epoch", "epochs": 10}
    settings = {}
    if saved == "after the best":
        settings["evaluate_averaged"] = True
        options |= {"eval_strategy": "steps", "eval_steps": 30, "eval_dataset": Noise(32)}

    def run(folder, **more):
        callback = KINDS[kind](**settings)
        trainer, rows = train(folder, callback, **more, **options)
        return weights(trainer), rows, callback._binding.scalars()

    straight, rows, numbers = run(tmp_path / "straight")
    run(tmp_path / "crashed", crash_at=255)
    checkpoints = (tmp_path / "crashed").glob("checkpoint-*")
    last = max(checkpoints, key=lambda path: int(path.name.split("-")[1]))
    moved = last.rename(tmp_path / last.name)  # a checkpoint may be resumed from anywhere
    resumed, later, same = run(tmp_path / "resumed", resume=str(moved))
    begin = int(last.name.split("-")[1])
    assert 0 < begin <= 255
    assert all(map(torch.equal, straight, resumed))
    assert same == numbers
    assert later == {step: rows[step] for step in range(begin, 400)}
    if kind != "watching":
        assert rows[399][0] < rows[begin + 1][0]  # it was lowered since
