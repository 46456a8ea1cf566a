"""Records of a user's own loop: complete rows, bounded cost, and nothing lost by a kill."""

import functools
import math
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from support import networks, recorded
from support.recorded import noisy_steps

import equilibrate as eq
from equilibrate import recorder as recorder_module
from equilibrate.runlog import records
from equilibrate.runlog.records import RecordError
from equilibrate.runlog.runs import dropped_path


def made(*, groups=1, names=False, **settings):
    """An optimizer of a few parameters, and its scheduler."""
    params = [torch.nn.Parameter(torch.randn(6)) for _ in range(2)]
    if groups == 2:
        options = [{"params": params[:1]}, {"params": params[1:], "lr": 0.2}]
        optimizer = torch.optim.SGD(options, lr=0.1)
    else:
        optimizer = torch.optim.SGD(params, lr=0.1)
    named = {"first.weight": params[0], "second.weight": params[1]}.items() if names else None
    monitor = eq.Monitor(optimizer, named_parameters=named, every=1)
    settings = {"min_steps": 10, **settings}
    return optimizer, eq.FDRScheduler(optimizer, monitor=monitor, **settings)


def rows(recorder):
    return records.read(recorder.path).rows


def test_a_row_has_the_reading_the_rates_and_the_decision(tmp_path):
    optimizer, scheduler = made(threshold=1e-9)
    with eq.Recorder(tmp_path / "run", scheduler, config={"name": "mine"}) as recorder:
        noisy_steps(optimizer, 40)
        scheduler.step()
        recorder.record(loss=0.5, epoch=1, split=numpy.float32(0.25), sizes=torch.tensor([1, 2]))
    assert recorder.path == tmp_path / "run" / "train.jsonl"
    (row,) = rows(recorder)
    reading, decision = scheduler.monitor.reading(), scheduler.last_decision
    assert row.pop("time") > 1e9
    assert row == {
        "step": 40,
        "loss": 0.5,
        "left": reading.left,
        "right": reading.right,
        "residual": reading.residual,
        "stderr": reading.stderr,
        "margin": reading.margin,
        "count": 20,
        "lr": 0.1,
        "lrs": [0.1],
        "lowered": False,
        "reason": decision.reason,
        "epoch": 1,
        "split": 0.25,
        "sizes": [1, 2],
    }
    header = records.read_header(recorder.path)
    assert header.config == {
        "name": "mine",
        "recorder": {
            "optimizer": "SGD",
            "groups": 1,
            "parameters": 12,
            "every": 1,
            "rule": {"name": "Threshold", "threshold": 1e-9},
            "factor": 0.9,
        },
    }


def test_right_after_a_lowering_the_row_has_what_was_judged(tmp_path):
    optimizer, scheduler = made(groups=2, names=True, threshold=1e9, factor=0.5)
    with eq.Recorder(tmp_path, scheduler, layers=True) as recorder:
        noisy_steps(optimizer, 30)
        before = scheduler.monitor.parameter_readings()
        scheduler.step()
        recorder.record()
        noisy_steps(optimizer, 4)
        recorder.record()
    first, second = rows(recorder)
    judged = scheduler.last_decision.reading
    assert (first["lowered"], first["left"], first["count"]) == (True, judged.left, 15)
    assert (first["lr"], first["lrs"]) == (None, [0.05, 0.1])  # two rates; each from now on
    expected, layer = before["first.weight"], first["layers"]["first.weight"]
    for name in ("left", "right", "residual"):
        assert layer[name] == pytest.approx(getattr(expected, name), rel=1e-5)
        assert len(repr(layer[name])) < 14
    assert (second["lowered"], second["count"]) == (False, 2)
    later = scheduler.monitor.parameter_readings()["second.weight"]
    assert second["layers"]["second.weight"]["left"] == pytest.approx(later.left, rel=1e-5)
    assert layer["state"] == "equilibrated"  # with the threshold of the scheduler


@pytest.mark.parametrize("decay", [0.01, 0.0])
def test_layers_have_a_state_and_scale_invariant_ones_an_angular_step(tmp_path, decay):
    model = networks.convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, weight_decay=decay)
    monitor = eq.Monitor(optimizer, named_parameters=model.named_parameters(), every=4)
    with eq.Recorder(tmp_path, monitor, layers=True) as recorder:
        networks.train(model, optimizer, 60)
        recorder.record()
    (row,) = rows(recorder)
    table = eq.layers.read(monitor)
    assert list(row["layers"]) == [layer.name for layer in table.layers]
    for layer in table.layers:
        found, angles = row["layers"][layer.name], {}
        assert found["state"] == layer.state
        assert found["margin"] == pytest.approx(layer.reading.margin, rel=1e-5)
        if layer.name in ("0.weight", "3.weight"):
            angles = {
                "scale_invariant": True,
                "angular_step": pytest.approx(layer.rotation.angular_step, rel=1e-5),
                "equilibrium": pytest.approx(layer.rotation.equilibrium, rel=1e-5),
                "relaxation": layer.rotation.relaxation if decay else None,
            }
        assert {k: v for k, v in found.items() if k in layer.OF_ROTATION} == angles


def test_rules_that_judge_a_model_leave_layers_to_the_default_threshold(tmp_path):
    weight = torch.nn.Parameter(torch.randn(6))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    monitor = eq.Monitor(optimizer, named_parameters={"w": weight}, every=1, trace=True)
    scheduler = eq.FDRScheduler(optimizer, monitor=monitor, rule=eq.rules.Stationary())
    with eq.Recorder(tmp_path, scheduler, layers=True) as recorder:
        noisy_steps(optimizer, 30)
        recorder.record()
    (row,) = rows(recorder)
    assert row["layers"]["w"]["state"] == eq.layers.read(monitor).layers[0].state


def test_all_judgements_since_the_last_row_are_recorded(tmp_path):
    optimizer, scheduler = made(threshold=1e9, factor=0.5, min_lr=0.04)
    with eq.Recorder(tmp_path, scheduler) as recorder:
        for _ in range(60):
            noisy_steps(optimizer, 1)
            scheduler.step()
        recorder.record()
        noisy_steps(optimizer, 1)
        scheduler.step()
        recorder.record()
    first, second = rows(recorder)
    assert first["lowered"]
    assert first["reason"].startswith("equilibrated: |L/R − 1| = ")
    assert [(j["step"], j["lowered"], j["lrs"]) for j in first["judgements"]] == [
        (19, True, [0.05]),  # the later half of 19 steps has 10
        (38, True, [0.04]),
        (57, False, [0.04]),
    ]
    assert first["judgements"][2]["reason"].endswith("but lr is at min_lr")
    assert not second["lowered"]
    assert second["reason"] == "too few steps: the next check is due at step 67"
    assert "judgements" not in second


def test_a_monitor_has_readings_and_no_decisions(tmp_path):
    optimizer, scheduler = made()
    with eq.Recorder(tmp_path / "mine.jsonl", scheduler.monitor) as recorder:
        recorder.record()
    (row,) = rows(recorder)
    assert recorder.path.name == "mine.jsonl"
    assert (row["step"], row["left"], row["lrs"]) == (0, None, [0.1])
    assert not {"lowered", "reason", "loss"} & row.keys()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_calls_between_rows_do_not_read(tmp_path, monkeypatch):
    """Neither the monitor nor a loss on a device may be waited for."""
    optimizer, scheduler = made()
    recorder = eq.Recorder(tmp_path, scheduler, every=8)
    read, waits = scheduler.monitor.reading, []
    monkeypatch.setattr(
        scheduler.monitor, "reading", lambda: waits.append(scheduler.monitor.step) or read()
    )
    losses = torch.arange(40.0, dtype=torch.float32)
    for loss in losses:
        noisy_steps(optimizer, 1)
        with monkeypatch.context() as patch:
            if scheduler.monitor.step % 8:
                for name in ("item", "tolist", "__float__", "__bool__", "cpu"):
                    patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("waited"))
            recorder.record(loss=loss)
    recorder.close()
    assert waits == [8, 16, 24, 32, 40]
    assert [row["step"] for row in rows(recorder)] == waits
    assert [row["loss"] for row in rows(recorder)] == losses.view(5, 8).mean(1).tolist()


def test_training_is_bit_identical_with_a_recorder(tmp_path):
    def trained(record):
        torch.manual_seed(1)
        optimizer, scheduler = made(names=True, threshold=0.3)
        recorder = eq.Recorder(tmp_path, scheduler, layers=True) if record else None
        for _ in range(10):
            noisy_steps(optimizer, 10)
            scheduler.step()
            if recorder:
                recorder.record(loss=optimizer.param_groups[0]["params"][0].mean())
        if recorder:
            recorder.close()
        params = optimizer.param_groups[0]["params"]
        return [*params, torch.get_rng_state(), torch.tensor(optimizer.param_groups[0]["lr"])]

    assert all(map(torch.equal, trained(False), trained(True)))


@pytest.mark.parametrize("load_first", [True, False])
def test_a_resumed_run_has_each_row_once(tmp_path, load_first):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    recorded.train(straight, epochs=12)
    recorded.train(resumed, epochs=8)  # its checkpoint is that of epoch 6
    recorded.train(resumed, epochs=12, load_first=load_first)
    assert recorded.rows(resumed) == recorded.rows(straight)
    path = dropped_path(resumed / "train.jsonl")
    dropped = path.read_text().splitlines()
    assert len(dropped) == 2
    assert '"step": 70' in dropped[0]
    assert '"epoch": 8' in dropped[1]


def test_resuming_on_a_full_disk_keeps_all_rows(tmp_path, full_disk):
    recorded.train(tmp_path, epochs=8)
    dropped = dropped_path(tmp_path / "train.jsonl")
    dropped.write_bytes(b" " * 99_990 + b"\n")
    before = recorded.rows(tmp_path)
    with (
        full_disk(100_000),
        pytest.raises(RecordError, match=r"dropped\.jsonl \(File too large\).* and resume"),
    ):
        recorded.train(tmp_path, epochs=12)
    assert dropped.stat().st_size == 99_991
    assert recorded.rows(tmp_path) == before
    recorded.train(tmp_path, epochs=12)
    assert [row["epoch"] for row in recorded.rows(tmp_path)] == list(range(1, 13))


def test_every_continues_at_the_same_steps(tmp_path):
    """The checkpoint lies between two rows, and the recorder is created before it is loaded."""

    def run(folder, steps, state=None):
        optimizer, scheduler = made()
        recorder = eq.Recorder(folder, scheduler, mode="resume", every=7)
        if state is not None:
            scheduler.load_state_dict(state)
        for _ in range(steps):
            noisy_steps(optimizer, 1)
            recorder.record()
        recorder.close()
        return [row["step"] for row in rows(recorder)], scheduler.state_dict()

    _, state = run(tmp_path, 17)
    run(tmp_path / "other", 17)
    run(tmp_path / "other", 30)  # nothing was loaded: it starts again
    again = records.read(tmp_path / "other" / "train.jsonl").rows
    assert [row["step"] for row in again] == [7, 14, 21, 28]
    assert run(tmp_path, 20, state)[0] == [7, 14, 21, 28, 35]


def test_resuming_a_record_whose_header_was_cut(tmp_path):
    _, scheduler = made()
    (tmp_path / "train.jsonl").write_text('{"config": {"na')
    with eq.Recorder(tmp_path, scheduler, mode="resume") as recorder:
        recorder.record()
    assert len(rows(recorder)) == 1


def test_other_settings_are_told_and_the_header_stays(tmp_path):
    _, scheduler = made()
    eq.Recorder(tmp_path, scheduler, config={"epochs": 3, "data": Path("a")}, mode="resume").close()
    with pytest.warns(UserWarning, match=r"other settings \(epochs: 3 in the record, 5 now\)"):
        recorder = eq.Recorder(
            tmp_path, scheduler, config={"epochs": 5, "data": Path("a")}, mode="resume"
        )
    recorder.close()
    assert records.read_header(recorder.path).config["epochs"] == 3


def test_modes(tmp_path):
    _, scheduler = made()
    eq.Recorder(tmp_path, scheduler).close()
    with pytest.raises(
        RecordError, match=r"train\.jsonl already exists: resume it \(mode='resume'"
    ):
        eq.Recorder(tmp_path, scheduler)
    with eq.Recorder(tmp_path, scheduler, mode="overwrite") as recorder:
        recorder.record()
    assert len(rows(recorder)) == 1


def test_how_a_run_ended(tmp_path):
    _, scheduler = made()

    def ended(error=None):
        with eq.Recorder(tmp_path, scheduler, mode="overwrite") as recorder:
            recorder.record()
            if error is not None:
                raise error
        return

    def status():
        end = records.read(tmp_path / "train.jsonl").end
        assert end is not None
        return end.status

    ended()
    assert status() == "finished"
    with pytest.raises(KeyboardInterrupt):
        ended(KeyboardInterrupt())
    assert status() == "interrupted"
    with pytest.raises(RuntimeError, match="loss"):
        ended(RuntimeError("loss is nan\nmore"))
    assert status() == "failed: RuntimeError: loss is nan"
    with pytest.raises(ValueError, match=r"^$"):
        ended(ValueError())
    assert status() == "failed: ValueError"


def test_two_recorders_cannot_write_one_record(tmp_path, monkeypatch):
    impatient = functools.partial(recorder_module.lock_record, timeout=0)
    monkeypatch.setattr(recorder_module, "lock_record", impatient)
    _, scheduler = made()
    first = eq.Recorder(tmp_path, scheduler)
    with pytest.raises(RecordError, match=r"another run is writing to .*train\.jsonl: wait"):
        eq.Recorder(tmp_path, scheduler, mode="resume")
    eq.Recorder(tmp_path / "other.jsonl", scheduler).close()
    first.close()
    with pytest.raises(RecordError, match="already exists"):
        eq.Recorder(tmp_path, scheduler)
    eq.Recorder(tmp_path, scheduler, mode="resume").close()  # the error has released the lock


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    _, scheduler = made()
    with eq.Recorder(tmp_path, scheduler, mode="resume") as recorder:
        recorder.record(loss=1.0)
    assert list(tmp_path.iterdir()) == []


def test_errors(tmp_path):
    optimizer, scheduler = made()
    with pytest.raises(ValueError, match=r"every must be a whole number of steps, .* got 0"):
        eq.Recorder(tmp_path, scheduler, every=0)
    with pytest.raises(TypeError, match=r"path must be a folder or .*, got FDRScheduler: pass Rec"):
        eq.Recorder(scheduler, tmp_path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"source must be an eq\.Monitor or .*, got SGD"):
        eq.Recorder(tmp_path, optimizer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="there is no name for any parameter"):
        eq.Recorder(tmp_path, scheduler, layers=True)
    assert list(tmp_path.iterdir()) == []
    recorder = eq.Recorder(tmp_path, scheduler)
    with pytest.raises(ValueError, match="left, lr is written by the recorder: rename it"):
        recorder.record(lr=1, left=2)
    with pytest.raises(TypeError, match=r"loss must be a number .* got str: pass the mean"):
        recorder.record(loss="1.0")
    with pytest.raises(TypeError, match=r"loss must be a number .* got ndarray: pass the mean"):
        recorder.record(loss=numpy.ones(2))
    with pytest.raises(TypeError, match=r"tensor with one element, got a tensor of shape \(2,\)"):
        recorder.record(loss=torch.ones(2))
    with pytest.raises(TypeError, match=r"the row cannot be written as JSON"):
        recorder.record(model=object())
    recorder.close()
    recorder.close()
    with pytest.raises(ValueError, match=r"Recorder\(.*\) is closed: create another"):
        recorder.record()


def test_undefined_numbers_are_null_and_losses_may_be_nan(tmp_path):
    _, scheduler = made()
    with eq.Recorder(tmp_path, scheduler) as recorder:
        recorder.record(loss=math.nan, other=[math.inf, 1.0])
    (row,) = rows(recorder)
    assert (row["loss"], row["residual"], row["other"]) == (None, None, [None, 1.0])


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path):
    """In a process of its own, which forks: see `support.recorded`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "support.recorded", str(tmp_path), "5", "0"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


@pytest.mark.gpu
def test_calls_between_rows_do_not_wait_for_a_gpu(tmp_path):
    theta = torch.nn.Parameter(torch.randn(64, device="cuda"))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    monitor = eq.Monitor(optimizer, every=4)
    recorder = eq.Recorder(tmp_path, monitor, every=50)
    theta.grad = torch.zeros_like(theta)

    def step():
        theta.grad.copy_(0.3 * theta.detach() + torch.randn_like(theta))
        optimizer.step()

    step()  # what is set up at the first step
    try:
        for _ in range(100):
            writes = (monitor.step + 1) % 50 == 0
            torch.cuda.set_sync_debug_mode("default" if writes else "error")
            step()
            recorder.record(loss=theta.detach().square().mean())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recorder.close()
    assert [row["step"] for row in rows(recorder)] == [50, 100]
    assert all(row["loss"] > 0 for row in rows(recorder))
