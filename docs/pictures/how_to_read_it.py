"""Draw the pictures of the page "How to read it", from runs that a monitor watches.

Run `python docs/pictures/how_to_read_it.py` (half a minute on one core; requires
`equilibrate[dev]` and Chromium). Seeds are fixed.
"""

from __future__ import annotations

import math
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from seeing_it import HIDDEN, browse, recorded, with_style
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import equilibrate as eq
from equilibrate.report import page

FOLDER = Path(__file__).parent
LEFT, LOSS, RATE = "#0b5394", "#38761d", "#333333"
TOLERANCE = 0.05
Row = dict[str, float]


def watch(
    params: list[nn.Parameter],
    loss: Callable[[], Tensor],
    steps: int,
    *,
    reads: int = 150,
    every: int = 16,
    **sgd: float,
) -> list[Row]:
    """Minimise a loss with SGD and read a monitor now and then."""
    optimizer = torch.optim.SGD(params, **sgd)
    monitor = eq.Monitor(optimizer, every=every)
    rows: list[Row] = []
    total = count = 0.0
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        total, count = total + value.item(), count + 1
        if step % (steps // reads) == 0:
            norm = sum(p.detach().square().sum().item() for p in params)
            reading = monitor.reading()
            row = {"step": step, "loss": total / count, "norm": norm}
            rows.append(row | {"residual": reading.residual, "margin": reading.margin})
            total = count = 0.0
    return rows


def digits() -> tuple[Tensor, Tensor]:
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return (images.float() - 4.9) / 6.0, labels


def on_digits(steps: int, **sgd: float) -> list[Row]:
    """Watch a small network that learns the digits of scikit-learn."""
    torch.manual_seed(0)
    images, labels = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss() -> Tensor:
        batch = torch.randint(len(images), (20,))
        return cross_entropy(model(images[batch]), labels[batch])

    return watch(list(model.parameters()), loss, steps, **sgd)


def on_a_quadratic(
    curvatures: Tensor, minimum: Tensor, start: Tensor, *, noise: float, steps: int, **settings: Any
) -> list[Row]:
    """Watch SGD on ½ Σ h(θ − m)², with normal noise added to the gradient."""
    generator = torch.Generator().manual_seed(0)
    theta = nn.Parameter(start.clone())

    def loss() -> Tensor:
        push = math.sqrt(noise) * torch.randn(len(theta), generator=generator)
        tilt = push @ theta
        return (curvatures * (theta - minimum).square()).sum() / 2 + tilt - tilt.detach()

    return watch([theta], loss, steps, **settings)


def draw(rows: list[Row], marks: dict[int, str] | None = None) -> Figure:
    """Return a figure of the loss, |θ|² and the residual over time, with some steps marked."""
    figure = Figure(figsize=(7.2, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm, residual = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 3))
    steps = [row["step"] for row in rows]
    for axes, key, colour, label in (
        (loss, "loss", LOSS, "loss"),
        (norm, "norm", RATE, "|θ|²"),
        (residual, "residual", LEFT, "residual  L/R − 1"),
    ):
        axes.plot(steps, [row[key] for row in rows], color=colour)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
        for step in marks or {}:
            axes.axvline(step, color="0.6", linewidth=0.8, linestyle=":")
    low = [row["residual"] - row["margin"] for row in rows]
    high = [row["residual"] + row["margin"] for row in rows]
    residual.fill_between(steps, low, high, color=LEFT, alpha=0.25, linewidth=0)
    for axes, key in ((loss, "loss"), (norm, "norm")):
        values = [row[key] for row in rows]
        if min(values) > 0 and max(values) > 20 * min(values):
            axes.set_yscale("log")
    residual.axhspan(-TOLERANCE, TOLERANCE, color=LOSS, alpha=0.15, linewidth=0)
    residual.axhline(0, color="0.5", linewidth=0.8)
    residual.set_yscale("symlog", linthresh=TOLERANCE, linscale=0.6)
    bottom, top = residual.get_ylim()
    ticks = [t for t in (-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100) if bottom <= t <= top]
    residual.set_yticks(ticks, [f"{t:g}".replace("-", "−") for t in ticks])
    residual.minorticks_off()
    for step, letter in (marks or {}).items():
        loss.annotate(
            letter, (step, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom"
        )
    residual.set_xlabel("step")
    return figure


def equilibrium() -> Figure:
    return draw(on_digits(6000, lr=0.1, weight_decay=0.02))


def drift() -> Figure:
    return draw(on_digits(6000, lr=0.1, weight_decay=0.0002))


def bounce() -> Figure:
    """The slow mode passes the origin on its way; 199 fast ones are noise.

    At A the norm turns, at B the residual changes its sign.
    """
    curvatures, origin = torch.ones(200), torch.zeros(200)
    slow = torch.eye(200)[0]
    rows = on_a_quadratic(
        curvatures - 0.98 * slow, origin + 6 * slow, -5 * slow, noise=0.05, steps=6000, lr=0.1
    )
    turn = min(rows[: len(rows) // 3], key=lambda row: row["norm"])
    crossing = next(row for row in rows if row["residual"] < 0)
    return draw(rows, {int(turn["step"]): "A", int(crossing["step"]): "B"})


def divergence() -> Figure:
    """At a curvature of 2.2/η the distance to the minimum grows by 20 % a step."""
    curvatures = torch.tensor([2.2, 0.1])
    rows = on_a_quadratic(
        curvatures, torch.ones(2), torch.zeros(2), noise=1.0, steps=100, reads=100, every=1, lr=1.0
    )
    return draw(rows)


def layers() -> tuple[str, str]:
    """Return the page of a convolutional network, and the last table of its layers."""
    torch.manual_seed(0)
    images, labels = digits()
    images = images.view(-1, 1, 8, 8)
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 8, 3, padding=1, bias=False),
            norm1=nn.BatchNorm2d(8),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(8, 16, 3, padding=1, bias=False),
            norm2=nn.BatchNorm2d(16),
            relu2=nn.ReLU(),
            pool2=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            head=nn.Linear(16, 10),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.002)
    monitor = eq.Monitor(optimizer, model)
    with (
        tempfile.TemporaryDirectory() as folder,
        eq.Recorder(folder, monitor, layers=True, every=100) as recorder,
    ):
        for _ in range(6000):
            batch = torch.randint(len(images), (20,))
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            recorder.record()
        html = page.render(recorded(recorder))
    return html, str(monitor.layers(TOLERANCE, budget=1000))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for picture in (equilibrium, drift, bounce, divergence):
        picture().savefig(FOLDER / f"{picture.__name__}.png", dpi=100)
    html, table = layers()
    alone = f"main > :not(#panels), .panel:not(#panel-layers) {HIDDEN}"
    browse(with_style(html, alone), FOLDER / "layers.png", 900, 600)
    (FOLDER / "layers.txt").write_text(table + "\n", encoding="utf-8")
