"""Records of a user's own loop: complete rows, bounded cost, and nothing lost by a kill."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from support import networks, recorded
from support.recorded import noisy_steps

import equilibrate as eq
from equilibrate import cli
from equilibrate.record import jsonl
from equilibrate.record.jsonl import RecordError
from equilibrate.record.observe import KEYS, forecast_of

KILLS = os.environ.get("EQUILIBRATE_KILLS", "5")


def made(*, groups=1, names=False, **settings):
    """An optimizer of a few parameters, and its scheduler."""
    params = [torch.nn.Parameter(torch.randn(6)) for _ in range(2)]
    options = [{"params": params}]
    if groups == 2:
        options = [{"params": params[:1]}, {"params": params[1:], "lr": 0.2}]
    optimizer = torch.optim.SGD(options, lr=0.1)
    model = torch.nn.ParameterDict(dict(zip(("first", "second"), params, strict=True)))
    monitor = eq.Monitor(optimizer, model if names else None, every=1)
    settings = {"min_steps": 10, **settings}
    return optimizer, eq.FDRScheduler(optimizer, monitor=monitor, **settings)


def rows(recorder):
    return jsonl.read(recorder.path).rows


def test_a_row_has_the_reading_the_rates_and_the_decision(tmp_path):
    optimizer, scheduler = made(threshold=1e-9)
    with eq.Recorder(tmp_path / "run", scheduler, config={"name": "mine"}) as recorder:
        noisy_steps(optimizer, 40)
        scheduler.step()
        recorder.record(loss=0.5, epoch=1, split=numpy.float32(0.25), sizes=torch.tensor([1, 2]))
    assert recorder.path == tmp_path / "run" / "train.jsonl"
    (row,) = rows(recorder)
    reading, reason = scheduler.monitor.reading(), scheduler.last_decision.reason
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
        "lrs": [0.1],
        "decisions": [{"step": 40, "lowered": False, "reason": reason, "lrs": [0.1]}],
        "epoch": 1,
        "split": 0.25,
        "sizes": [1, 2],
    }
    header = jsonl.read_header(recorder.path)
    assert header.config["name"] == "mine"
    settings = {"optimizer": "SGD", "parameters": 12, "every": 1, "threshold": 1e-9, "factor": 0.9}
    assert settings.items() <= header.config["recorder"].items()


def test_right_after_a_lowering_the_row_has_what_was_judged(tmp_path):
    optimizer, scheduler = made(groups=2, names=True, threshold=1e9, factor=0.5)
    with eq.Recorder(tmp_path, scheduler, layers=True) as recorder:
        noisy_steps(optimizer, 30)
        scheduler.step()
        recorder.record()
        noisy_steps(optimizer, 4)
        recorder.record()
    first, second = rows(recorder)
    judged = scheduler.last_decision.reading
    assert (first["left"], first["count"], first["lrs"]) == (judged.left, 15, [0.05, 0.1])
    assert second["count"] == 2
    assert "decisions" not in second
    layer, expected = second["layers"]["second"], scheduler.monitor.layers().layers[1]
    for name in ("left", "right", "residual"):
        assert layer[name] == pytest.approx(getattr(expected.reading, name), rel=1e-5)
        assert len(repr(layer[name])) < 14
    assert layer["state"] == "equilibrated"  # with the threshold of the scheduler


@pytest.mark.parametrize("decay", [0.01, 0.0])
def test_layers_have_a_state_and_scale_invariant_ones_an_angular_step(tmp_path, decay):
    model = networks.convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, weight_decay=decay)
    monitor = eq.Monitor(optimizer, model, every=4)
    with eq.Recorder(tmp_path, monitor, layers=True) as recorder:
        networks.train(model, optimizer, 120)
        recorder.record()
    (row,) = rows(recorder)
    table = monitor.layers()
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


@pytest.mark.parametrize("record_first", [False, True])
def test_each_decision_is_recorded_once_with_its_own_step_and_rate(tmp_path, record_first):
    optimizer, scheduler = made(threshold=1e9, factor=0.5, min_lr=0.04)
    with eq.Recorder(tmp_path, scheduler, every=19) as recorder:
        for _ in range(60):
            noisy_steps(optimizer, 1)
            if record_first:
                recorder.record()
            scheduler.step()
            if not record_first:
                recorder.record()
        recorder.every = 1
        recorder.record()
        recorder.record()
    decisions = [made for row in rows(recorder) for made in row.get("decisions", ())]
    assert [(d["step"], d["lowered"], d["lrs"]) for d in decisions] == [
        (19, True, [0.05]),  # the later half of 19 steps has 10
        (38, True, [0.04]),
        (57, False, [0.04]),
    ]
    assert decisions[2]["reason"].endswith("but lr is at min_lr")


def test_a_monitor_has_readings_and_no_decisions(tmp_path):
    optimizer, scheduler = made()
    with eq.Recorder(tmp_path / "mine.jsonl", scheduler.monitor) as recorder:
        recorder.record(loss=math.nan, other=[math.inf, 1.0])
    (row,) = rows(recorder)
    assert recorder.path.name == "mine.jsonl"
    assert (row["step"], row["left"], row["lrs"]) == (0, None, [0.1])  # undefined: null
    assert (row["loss"], row["other"]) == (None, [None, 1.0])
    assert "decisions" not in row
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_several_sources_each_offer_what_they_have(tmp_path):
    optimizer, scheduler = made()
    forecaster = eq.Forecaster(optimizer, horizon=64)
    with eq.Recorder(tmp_path, scheduler, forecaster) as recorder:
        noisy_steps(optimizer, 500, forecaster=forecaster)
        recorder.record()
    (row,) = rows(recorder)
    forecast = forecaster.forecast()
    assert row["forecast"] == {
        "horizon": 64,
        "now": forecast.now.value,
        "after": forecast.after.value,
        "after_margin": forecast.after.margin,
        "staying": forecast.staying.value,
        "gain": forecast.gain.value,
        "gain_margin": forecast.gain.margin,
        "over_staying": forecast.over_staying.value,
        "over_staying_margin": forecast.over_staying.margin,
    }
    assert row["residual"] == scheduler.monitor.reading().residual


def test_the_forecast_of_a_row_reads_as_the_forecaster_tells_it(tmp_path):
    optimizer, _ = made()
    forecaster = eq.Forecaster(optimizer)
    sentences = []
    with eq.Recorder(tmp_path, forecaster) as recorder:
        for steps in (50, 350, 600):
            noisy_steps(optimizer, steps, forecaster=forecaster)
            recorder.record()
            sentences.append(str(forecaster.forecast()))
    found = rows(recorder)
    assert [str(forecast_of(row)) for row in found] == sentences
    reason = "it needs 128 steps at this learning rate, and has seen 50"
    assert found[0]["forecast"] == {"horizon": 10, "undefined": reason}
    assert sentences[2].startswith("a cooldown over 200 steps would end at ")
    assert forecast_of({"step": 1}) is None


def test_every_key_of_a_row_is_reserved(tmp_path):
    optimizer, scheduler = made(names=True)
    forecaster = eq.Forecaster(optimizer)
    with eq.Recorder(tmp_path, scheduler, forecaster, layers=True) as recorder:
        noisy_steps(optimizer, 40)
        scheduler.step()
        recorder.record(loss=1.0)
    (row,) = rows(recorder)
    assert row.keys() == KEYS
    assert all(f"`{key}`" in (eq.Recorder.__doc__ or "") for key in KEYS)


def test_calls_between_rows_do_not_read(tmp_path, monkeypatch):
    """Neither the monitor nor a loss on a device may be waited for."""
    optimizer, scheduler = made()
    recorder = eq.Recorder(tmp_path, scheduler, every=8)
    read, waits = scheduler.monitor.read, []
    monkeypatch.setattr(
        scheduler.monitor, "read", lambda: waits.append(scheduler.monitor.step) or read()
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


@pytest.mark.parametrize("load_first", [True, False])
def test_every_continues_at_the_same_steps(tmp_path, load_first):
    """The checkpoint lies between two rows."""

    def run(steps, state=None):
        optimizer, scheduler = made()
        if state is not None and load_first:
            scheduler.load_state_dict(state)
        recorder = eq.Recorder(tmp_path, scheduler, mode="resume", every=7)
        if state is not None and not load_first:
            scheduler.load_state_dict(state)
        for _ in range(steps):
            noisy_steps(optimizer, 1)
            recorder.record()
        recorder.close()
        return [row["step"] for row in rows(recorder)], scheduler.state_dict()

    _, state = run(17)
    assert run(25)[0] == [7, 14, 21]  # nothing was loaded: it starts again
    assert run(20, state)[0] == [7, 14, 21, 28, 35]


def test_going_back_to_a_checkpoint_removes_the_rows_after_it(tmp_path):
    optimizer, scheduler = made()
    states = []
    with eq.Recorder(tmp_path, scheduler) as recorder:
        for _ in range(3):
            noisy_steps(optimizer, 10)
            recorder.record()
            states.append(scheduler.state_dict())
        scheduler.load_state_dict(states[0])
        noisy_steps(optimizer, 5)
        recorder.record()
    assert [row["step"] for row in rows(recorder)] == [10, 15]


def test_other_settings_are_told_and_the_header_stays(tmp_path):
    _, scheduler = made()
    eq.Recorder(tmp_path, scheduler, config={"epochs": 3, "data": Path("a")}, mode="resume").close()
    with pytest.warns(UserWarning, match=r"other settings \(epochs: 3 in the file, 5 now\)"):
        recorder = eq.Recorder(
            tmp_path, scheduler, config={"epochs": 5, "data": Path("a")}, mode="resume"
        )
    recorder.close()
    assert jsonl.read_header(recorder.path).config["epochs"] == 3


def test_modes(tmp_path):
    _, scheduler = made()
    for mode in ("new", "overwrite"):
        with eq.Recorder(tmp_path, scheduler, mode=mode) as recorder:
            recorder.record()
        assert len(rows(recorder)) == 1
    with pytest.raises(RecordError, match=r"train\.jsonl already exists: resume it \(mode='resum"):
        eq.Recorder(tmp_path, scheduler)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("loss is nan\nmore"), "failed: RuntimeError: loss is nan"),
        (ValueError(), "failed: ValueError"),
    ],
)
def test_how_a_run_ended(tmp_path, error, status):
    _, scheduler = made()
    recorder = eq.Recorder(tmp_path, scheduler)
    recorder.__exit__(error and type(error), error, None)
    assert (jsonl.read(recorder.path).end or {})["status"] == status


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
    with pytest.raises(TypeError, match=r"source must be an eq\.Monitor, .*, got SGD"):
        eq.Recorder(tmp_path, optimizer)
    with pytest.raises(ValueError, match="there is no name for any parameter"):
        eq.Recorder(tmp_path, scheduler, layers=True)
    assert list(tmp_path.iterdir()) == []
    recorder = eq.Recorder(tmp_path, scheduler)
    with pytest.raises(ValueError, match="left, lrs is written by the recorder: rename it"):
        recorder.record(lrs=1, left=2)
    recorder.close()
    recorder.close()
    with pytest.raises(ValueError, match=r"Recorder\(.*\) is closed: create another"):
        recorder.record()


def endless():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("caf\udce9", "caf\udce9"),
        (10**400, None),
        ([-(10**5000)], [None]),
        (float("nan"), None),
        (torch.eye(2).to_sparse(), ...),
        (torch.empty(2, device="meta"), ...),
        (object(), ...),
        ({1, 2}, ...),
        (endless(), ...),
    ],
)
def test_no_value_stops_a_training(tmp_path, value, written):
    """What cannot be written is left out, with a warning; the rest of the row is written."""
    _, scheduler = made()
    with eq.Recorder(tmp_path, scheduler) as recorder:
        if written is ...:
            kind = type(value).__name__
            with pytest.warns(UserWarning, match=f"'value', a value of type {kind}, is not rec"):
                recorder.record(value=value, other=1, loss=2.0)
        else:
            recorder.record(value=value, other=1, loss=2.0)
    (row,) = jsonl.read(recorder.path).rows
    assert (row["other"], row["loss"]) == (1, 2.0)
    assert row.get("value", ...) == written
    cli.main(["report", str(tmp_path)])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("1.0", "loss must be a number .* got str: it is the training loss"),
        (torch.ones(2), r"tensor with one element, got a tensor of shape \(2,\)"),
        (torch.ones(1).to_sparse(), "sparse"),
        (10**400, "too large"),
    ],
)
def test_no_loss_stops_a_training(tmp_path, loss, words):
    _, scheduler = made()
    with eq.Recorder(tmp_path, scheduler) as recorder:
        recorder.record(loss=1.0)
        with pytest.warns(UserWarning, match=f"the loss is not recorded: .*{words}"):
            recorder.record(loss=loss)
    assert [row.get("loss") for row in jsonl.read(recorder.path).rows] == [1.0, None]


def test_a_full_disk_does_not_stop_a_training(tmp_path, full_disk):
    _, scheduler = made()
    with eq.Recorder(tmp_path, scheduler) as recorder:
        recorder.record(note="before")
        size = recorder.path.stat().st_size
        with full_disk(size), pytest.warns(UserWarning, match=r"row of step 0 is not .*free some"):
            recorder.record(note="lost")
        recorder.record(note="after")
        with full_disk(1), pytest.warns(UserWarning, match="the end of the run is not recorded"):
            recorder.close()
    assert [row["note"] for row in jsonl.read(recorder.path).rows] == ["before", "after"]


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path):
    """In a process of its own, which forks: see `support.recorded`. `make kills` asks for 100."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "support.recorded", str(tmp_path), KILLS, "0"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60 + 10 * int(KILLS),
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


@pytest.mark.gpu
def test_calls_between_rows_do_not_wait_for_a_gpu(tmp_path):
    theta = torch.nn.Parameter(torch.randn(64, device="cuda"))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    monitor = eq.Monitor(optimizer, every=4)
    recorder = eq.Recorder(tmp_path, monitor, every=50)
    theta.grad = grad = torch.zeros_like(theta)

    def step():
        grad.copy_(0.3 * theta.detach() + torch.randn_like(theta))
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
