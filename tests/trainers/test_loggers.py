"""The loggers themselves store numbers, names, steps, decisions and reasons."""

import json
import math
import struct

import pytest
import torch
from support.recorded import noisy_steps

import equilibrate as eq
from equilibrate.integrations.loggers import Logger, TensorBoard, Trackio, WandB

EPOCHS = 6


def train(sink):
    """Log a short training, in which each second epoch lowers the learning rate."""
    params = {name: torch.nn.Parameter(torch.randn(6)) for name in ("a.weight", "b.weight")}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    monitor = eq.Monitor(optimizer, named_parameters=params.items(), every=1)
    scheduler = eq.FDRScheduler(optimizer, monitor=monitor, threshold=1e9, factor=0.5, min_steps=20)
    logger = Logger(sink, scheduler, layers=True)
    expected = []
    for _ in range(EPOCHS):
        noisy_steps(optimizer, 20)
        scheduler.step()
        logger.log()
        expected.append((scheduler.monitor.step, scheduler.last_decision))
    return expected


@pytest.fixture
def tensorboard():
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    return pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_tensorboard(tensorboard, tmp_path):
    sink = TensorBoard(tmp_path)
    expected = train(sink)
    sink.writer.close()
    events = tensorboard.EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    assert {"equilibrate/residual", "equilibrate/lr", "equilibrate/lowered"} <= set(names)
    assert "equilibrate_layers/a.weight/residual" in names
    found = events.Scalars("equilibrate/lr")
    assert [event.step for event in found] == [step for step, _ in expected]
    assert [event.value for event in found] == pytest.approx([d.lr for _, d in expected])
    lowered = [event.value for event in events.Scalars("equilibrate/lowered")]
    assert lowered == [d.lowered for _, d in expected]
    texts = events.Tensors("equilibrate/lowered/text_summary")
    reasons = [event.tensor_proto.string_val[0].decode() for event in texts]
    rates = [f"lowered to {d.lr:.4g}: {d.reason}" for _, d in expected if d.lowered]
    assert len(rates) > 1
    assert reasons == rates
    decisions = events.Tensors("equilibrate/decision/text_summary")
    judged = [d for _, d in expected if not d.reason.startswith("too few")]
    assert len(decisions) == len(judged)
    if math.isfinite(getattr(expected[-1][1].reading, "margin", math.nan)):
        assert "custom_scalars__config__" in events.Tags()["tensors"]
        curves = [events.Scalars(f"equilibrate_interval/{k}") for k in ("residual", "low", "high")]
        steps = [[event.step for event in curve] for curve in curves]
        assert steps[0] == steps[1] == steps[2] != []
        assert all(low.value < high.value for _, low, high in zip(*curves, strict=True))


def test_a_summary_writer_of_the_user(tensorboard, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 1.0, 1)
        train(TensorBoard(writer))
    events = tensorboard.EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"loss", "equilibrate/residual"} <= set(events.Tags()["scalars"])


def records_of(data):
    """The records of an offline run: LevelDB's log format, after a header of seven bytes."""
    block, place, parts = 32768, 7, []
    while place + 7 <= len(data):
        if block - place % block < 7:  # no record begins so close to the end of a block
            place += block - place % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        place += 7
        parts.append(data[place : place + size])
        place += size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="tests", mode="offline", dir=str(tmp_path))
    expected = train(WandB(run))
    run.log({"loss": 1.0})  # the user's own step counter goes on
    run.finish()
    wandb.teardown()  # the process that writes the file has ended
    (path,) = tmp_path.rglob("*.wandb")
    rows, metrics = [], {}
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        if record.WhichOneof("record_type") == "metric":
            metric = record.metric
            metrics[metric.name or metric.glob_name] = metric.step_metric
    assert metrics["equilibrate/*"] == metrics["equilibrate_layers/*"] == "equilibrate/step"
    ours = [row for row in rows if "equilibrate/step" in row]
    assert [row["equilibrate/step"] for row in ours] == [step for step, _ in expected]
    assert [row["equilibrate/lr"] for row in ours] == pytest.approx([d.lr for _, d in expected])
    assert all("equilibrate_layers/b.weight/residual" in row for row in ours)
    for row, (_, decision) in zip(ours, expected, strict=True):
        if decision.lowered:
            assert row["equilibrate/reason"] == decision.reason
    tables = sorted(
        (json.loads(p.read_text()) for p in tmp_path.rglob("*.table.json")),
        key=lambda table: len(table["data"]),
    )
    last = tables[-1]["data"]
    assert [row[0] for row in last] == [step for step, d in expected if d.lowered]
    assert last[0][2] == next(d.reason for _, d in expected if d.lowered)
    assert rows[-1]["loss"] == 1.0


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    run = trackio.init(project="tests", name="mine", embed=False)
    expected = train(Trackio(run))
    trackio.finish()
    logs = trackio.SQLiteStorage.get_logs("tests", "mine")
    ours = [row for row in logs if "equilibrate/lr" in row]
    assert [row["step"] for row in ours] == [step for step, _ in expected]
    assert [row["equilibrate/lr"] for row in ours] == pytest.approx([d.lr for _, d in expected])
    assert "equilibrate_layers/a.weight/residual" in ours[0]
    tables = [row["equilibrate/lowerings"] for row in ours if "equilibrate/lowerings" in row]
    assert len(tables) == sum(d.lowered for _, d in expected)
