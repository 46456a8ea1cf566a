"""A recorded run that is killed again and again; `killed` can be called in a loop.

Run `python -m support.recorded FOLDER KILLS SEED` in its own process: it forks.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import equilibrate as eq
from equilibrate.record import jsonl

STEPS = 10


def noisy_steps(optimizer, steps, generator=None, forecaster=None):
    """Steps of SGD on a quadratic, with noise; a forecaster is told their losses."""
    for _ in range(steps):
        loss = torch.zeros(())
        for group in optimizer.param_groups:
            for p in group["params"]:
                away = p.detach() - 1
                p.grad = 0.3 * away + torch.randn(p.shape, generator=generator)
                loss += 0.15 * away.square().sum()
        optimizer.step()
        if forecaster is not None:
            forecaster.update(loss)


def train(
    folder: Path,
    report: Callable[[int], None] = lambda step: None,
    *,
    epochs: int,
    load_first: int = True,
) -> None:
    """Train and record, and save a checkpoint after every third epoch; resume if there is one."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.nn.Parameter(torch.randn(6, generator=generator))
    optimizer = torch.optim.SGD([theta], lr=0.3)
    monitor = eq.Monitor(optimizer, every=1)
    scheduler = eq.FDRScheduler(optimizer, threshold=0.1, min_steps=STEPS, monitor=monitor)
    checkpoint = folder / "checkpoint.pt"
    saved = torch.load(checkpoint) if checkpoint.exists() else None

    def load() -> int:
        if saved is None:
            return 0
        theta.data.copy_(saved["theta"])
        generator.set_state(saved["generator"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        return saved["epoch"]

    done = load() if load_first else 0
    recorder = eq.Recorder(folder, scheduler, config={"lr": 0.3}, mode="resume")
    done = done if load_first else load()
    for epoch in range(done + 1, epochs + 1):
        noisy_steps(optimizer, STEPS, generator)
        scheduler.step()
        recorder.record(epoch=epoch, loss=float(theta.detach().square().mean()))
        report(scheduler.monitor.step)
        if epoch % 3 == 0:
            state = {"theta": theta.detach().clone(), "generator": generator.get_state()}
            state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save({**state, "epoch": epoch}, folder / "partial.pt")
            os.replace(folder / "partial.pt", checkpoint)
    recorder.close()


def sharded(folder: str) -> list[float]:
    """Record a sharded model on every process, stop between two rows, and resume.

    Returns:
        The residuals that this process has read, by which the test sees that all took part.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, model, every=1)
    scheduler = eq.FDRScheduler(optimizer, monitor=monitor, threshold=1e9, min_steps=4)
    found = []
    for steps in (10, 9):
        with eq.Recorder(folder, scheduler, mode="resume", every=4, layers=True) as recorder:
            for _ in range(steps):
                optimizer.zero_grad()
                loss = model(torch.randn(5, 4)).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                recorder.record(loss=loss)
        found.append(monitor.reading().residual)
    return found


def rows(folder: Path) -> list[dict]:
    """The rows of a run without what the clock decides."""
    found = jsonl.read(folder / "train.jsonl").rows
    return [{name: row[name] for name in row if name != "time"} for row in found]


def killed(folder: Path, *, kills: int, seed: int) -> int:
    """Kill a run `kills` times at random moments, let it end, and check its record.

    After each kill every row that was reported must be in the file; at the end the rows must be
    those of a run that was never killed. The process must have one thread, since it forks.

    Returns:
        The number of rows that were reported before the kills.
    """
    generator = random.Random(seed)
    epochs = 8 * (kills + 1)  # more than it makes between two kills
    train(folder / "straight", epochs=epochs)
    run, reported = folder / "killed", 0
    for _ in range(kills):
        after, more = generator.randrange(12), generator.uniform(0.0, 0.01)
        first = generator.random() < 0.5
        steps = _killed_once(run, after, more, epochs=epochs, load_first=first)
        reported += len(steps)
        if steps:
            present = [row["step"] for row in rows(run)]
            assert steps in (present[-len(steps) :], present[-len(steps) - 1 : -1])
    assert len(rows(run)) < epochs, "the run ended before the last kill"
    train(run, epochs=epochs)
    assert rows(run) == rows(folder / "straight")
    assert jsonl.read(run / "train.jsonl").end is not None
    return reported


def _killed_once(run: Path, after: int, more: float, **options: int) -> list[int]:
    """Train in a child, and kill it `more` seconds after it has reported `after` rows.

    Returns:
        The steps of the rows that it reported.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            train(run, lambda step: _tell(writing, step), **options)
            os.kill(os.getpid(), signal.SIGKILL)  # it has ended already
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        steps = [line for _ in range(after) if (line := pipe.readline())]
        time.sleep(more)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the run failed before it was killed"
        return [int(line) for line in [*steps, *pipe.read().split()]]


def _tell(pipe: int, step: int) -> None:
    os.write(pipe, b"%d\n" % step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(killed(Path(sys.argv[1]), kills=int(sys.argv[2]), seed=int(sys.argv[3])))
