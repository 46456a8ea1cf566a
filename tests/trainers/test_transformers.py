"""The callbacks for Hugging Face, in its own Trainer."""

import math
import random
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.hf_task import Net, Noise, Notes, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import LinearLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import equilibrate as eq
from equilibrate.forecast.running_mean import RunningMean
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

    def noting(self, loss=None, closure=None):
        losses.append(loss)
        step(self, loss, closure)

    monkeypatch.setattr(eq.Cooldown, "step", noting)
    options = {"logging_strategy": "steps", "logging_steps": 1}
    options["gradient_accumulation_steps"] = micro_batches
    trainer, _ = train(tmp_path, CooldownCallback(), epochs=2, **options)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == trainer.state.max_steps
    assert list(map(float, losses[1:])) == pytest.approx(logged, abs=1e-4)  # it may round them


@pytest.mark.parametrize("kind", [CooldownCallback, FDRCallback, MonitorCallback])
def test_no_callback_needs_arguments(kind, tmp_path):
    train(tmp_path, callback := kind(), epochs=1)
    assert (callback.monitor or callback.forecaster).step >= 32


def test_a_second_training_has_a_cooldown_of_its_own(tmp_path):
    callback = CooldownCallback()
    trainer, rows = train(tmp_path, callback, epochs=2)
    first = rates(rows)
    trainer.train()
    assert rates(rows) == first
    assert callback.scheduler.last_epoch == 80


def test_a_longer_training_keeps_cooling_down_until_its_end(tmp_path):
    train(tmp_path, CooldownCallback(), epochs=5, save_strategy="epoch")
    callback, path = CooldownCallback(), str(tmp_path / "checkpoint-120")
    with pytest.warns(UserWarning, match="total_steps=200; total_steps=240 of this"):
        _, rows = train(tmp_path, callback, resume=path, epochs=6)
    assert rows[161][0] == 0.05
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
    callback = MonitorCallback(layers=True)
    watched, _ = train(tmp_path, callback, **options)
    assert all(map(torch.equal, weights(alone), weights(watched)))
    assert callback.scheduler is callback.forecaster is None
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


# Training steps that are evaluated again ------------------------------------------------------

EVALUATIONS = []
"""Whether each one had gradients, and the dtype of its outputs."""


class Delicate(Net):
    """Has dropout, and statistics of BatchNorm."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(8))


class DelicateTrainer(Trainer):
    """Computes a loss that leaves traces wherever one can."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls, self.noises = 0, {"train": []}

    def compute_loss(self, model, inputs, *args, **kwargs):
        noise = random.random() + np.random.rand()  # noqa: NPY002
        inputs["inputs"] = inputs["inputs"] + 0.01 * noise
        outputs = model(**inputs)
        EVALUATIONS.append((torch.is_grad_enabled(), outputs["logits"].dtype))
        self.calls += 1
        self.noises["train"].append(noise)
        self.log({"noise": noise})
        return outputs["loss"]


def compared(forecaster):
    return [own - mean for own, mean in forecaster.state_dict()["comparisons"]["values"]]


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True, "gradient_accumulation_steps": 2, "epochs": 8}],
    ids=lambda options: ", ".join(options),
)
def test_evaluating_again_changes_nothing(options, tmp_path):
    settings = {"epochs": 4, "logging_strategy": "steps", "logging_steps": 1} | options
    found = []
    for callback in (None, MonitorCallback(forecast=True)):
        EVALUATIONS.clear()
        task = {"model": Delicate(), "kind": DelicateTrainer}
        trainer, _ = train(tmp_path, callback, **task, **settings)
        history = [
            (row["step"], *(row.get(name) for name in ("loss", "noise", "learning_rate")))
            for row in trainer.state.log_history
            if "loss" in row or "noise" in row
        ]
        randoms = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
        left = trainer.calls, trainer.noises, history, randoms
        found.append((trainer.model.state_dict(), left, EVALUATIONS.copy()))
    (state, left, alone), (again, same, evaluations) = found
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert same == left
    assert [made for made in evaluations if made[0]] == alone
    [evaluation] = {made for made in evaluations if not made[0]}
    assert evaluation[1] == alone[0][1]
    differences = compared(callback.forecaster)
    assert len(differences) == len(evaluations) - len(alone) == 3
    assert all(0 < abs(difference) < math.inf for difference in differences)


@pytest.mark.parametrize("scaled", [False, True], ids=["divided", "scaled by its items"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_same_loss_is_compared(micro_batches, scaled, tmp_path, monkeypatch):
    """If parameters are not exchanged, nothing but dropout and the last step makes a difference."""

    class Scaled(Trainer):
        def compute_loss(self, model, inputs, num_items_in_batch=None, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            return loss * len(inputs["labels"]) / num_items_in_batch if scaled else loss

        def get_batch_samples(self, *args, **kwargs):
            batches, _ = super().get_batch_samples(*args, **kwargs)
            return batches, sum(len(batch["labels"]) for batch in batches)

    monkeypatch.setattr(RunningMean, "exchange", lambda self: nullcontext())
    model, callback = Net(), MonitorCallback(forecast=True)
    model.net[2] = torch.nn.Identity()
    settings = {"model": model, "kind": Scaled, "epochs": 12, "learning_rate": 1e-9}
    trainer = make_trainer(
        tmp_path, callbacks=[callback], gradient_accumulation_steps=micro_batches, **settings
    )
    trainer.model_accepts_loss_kwargs = scaled
    trainer.train()
    found = compared(callback.forecaster)
    assert len(found) >= 3
    assert found == pytest.approx([0] * len(found), abs=1e-5)


def test_a_training_step_that_cannot_be_evaluated_again(tmp_path):
    class Popping(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            return super().training_step(model, {"inputs": inputs.pop("inputs"), **inputs}, *args)

    alone, _ = train(tmp_path, epochs=6)
    callback = MonitorCallback(forecast=True)
    with pytest.warns(UserWarning, match=r"a second time \(KeyError: 'inputs'\)") as caught:
        trainer, _ = train(tmp_path, callback, epochs=6, kind=Popping)
    assert len([one for one in caught if "a second time" in str(one.message)]) == 1
    assert all(map(torch.equal, weights(alone), weights(trainer)))
    assert callback.forecaster.forecast(48).undefined is None  # from gradients


def test_each_of_two_callbacks_evaluates_by_itself(tmp_path):
    found = []
    for more in ([], [MonitorCallback(forecast=True)]):
        EVALUATIONS.clear()
        callback = MonitorCallback(forecast=True)
        task = {"model": Delicate(), "kind": DelicateTrainer, "callbacks": more}
        train(tmp_path, callback, epochs=4, **task)
        callbacks = [callback, *more]
        found += [(compared(c.forecaster), c.forecaster.forecast(40)) for c in callbacks]
        assert len(EVALUATIONS) == 160 + 3 * len(callbacks)
    assert found[0] == found[1] == found[2]


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


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_decisions_are_printed_as_sentences_and_numbers_are_not(disable_tqdm, tmp_path, capsys):
    options = {"disable_tqdm": disable_tqdm, "logging_strategy": "steps", "logging_steps": 50}
    options |= {"callbacks": [MonitorCallback()]}
    trainer, _ = train(tmp_path, CooldownCallback(), epochs=5, **options)
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if "equilibrate" in line]
    found = re.fullmatch(
        r"equilibrate: at step (\d+) the learning rate begins to fall from 0\.05: .+; the learning "
        r"rate decays linearly until step 200",
        line.strip(),
    )
    assert found
    assert printed.count("'loss'") == 4  # the trainer's own
    steps = [row["step"] for row in trainer.state.log_history if "equilibrate/lr" in row]
    assert int(found[1]) in steps
    steps = [row["step"] for row in trainer.state.log_history if "equilibrate/left" in row]
    assert steps == [50, 100, 150, 200]


def test_forecasts_are_logged(tmp_path):
    options = {"logging_strategy": "steps", "logging_steps": 120}
    trainer, _ = train(tmp_path, callback := MonitorCallback(forecast=True), epochs=6, **options)
    [*_, row] = [row for row in trainer.state.log_history if "equilibrate/lr" in row]
    made = callback.forecaster.forecast()
    assert row["equilibrate/forecast/after"] == made.after.value
    assert made.horizon == 48


# Checkpoints ----------------------------------------------------------------------------------

KINDS = {
    "cooldown": lambda **options: CooldownCallback(warmup_steps=20, **options),
    "threshold": lambda: FDRCallback(threshold=1.0, factor=0.7, min_steps=20),
    "watching": lambda: MonitorCallback(forecast=True),
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
