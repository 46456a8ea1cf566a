"""Make the pictures of the page "Seeing it", from a run that is recorded.

Run `python docs/pictures/seeing_it.py` (a minute on one core; requires `equilibrate[dev]`
and Chromium, which takes the pictures). The seed is fixed.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageChops
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import equilibrate as eq
from equilibrate.report import live, page
from equilibrate.report.run import Run, load

FIGURES = Path(__file__).parents[1] / "figures"
EPOCHS = 120
CURVES = "#panels ~ *, #panel-layers"
"""What the picture of the curves leaves out."""
LAYERS = (
    "#panels ~ :not(#layers, #layers + p, #layers + p + details), .panel:not(#panel-layers), "
    "main > :not(#panels, #panels ~ *)"
)
"""What the picture of the layers leaves out."""
HIDDEN = "{ display: none !important }"
TERMINAL = """<body style="margin: 8px">
<svg overflow="visible" viewBox="0 0 {terminal_width} {terminal_height}"
  xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px 'DejaVu Sans Mono', monospace }}
{styles}
</style>
<defs>{lines}</defs>{backgrounds}<g class="{unique_id}-matrix">{matrix}</g>
</svg></body>"""
"""A page with a terminal. Each piece of text has its width, whatever font has its characters."""
COLORS = 128
"""Colours of a picture, which keep its file small."""


def record(folder: Path) -> Run:
    """Train a small network with BatchNorm on the digits, and return its record."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float().view(-1, 1, 8, 8) - 4.9) / 6.0
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.005)
    monitor = eq.Monitor(optimizer, model)
    scheduler = eq.FDRScheduler(optimizer, monitor=monitor, threshold=0.02, factor=0.7)
    forecaster = eq.Forecaster(optimizer, model)
    with eq.Recorder(folder / "digits-cnn", scheduler, forecaster, layers=True) as recorder:
        for epoch in range(1, EPOCHS + 1):
            total = torch.zeros(())
            for batch in torch.randperm(len(images)).split(15):
                optimizer.zero_grad()
                loss = cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                forecaster.update(loss)
                total += len(batch) * loss.detach()
            scheduler.step()
            recorder.record(epoch=epoch, loss=total / len(images))
    return recorded(recorder)


def recorded(recorder: eq.Recorder) -> Run:
    """Return what a recorder has written."""
    run = load(recorder.path)
    assert run is not None
    return run


def browse(html: str, path: Path, width: int, height: int) -> None:
    """Save a picture of a page without the margin below it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("Chromium is not installed: it takes the pictures")
    with tempfile.TemporaryDirectory() as folder:
        file, png = Path(folder, "page.html"), Path(folder, "page.png")
        file.write_text(html)
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000",
            f"--window-size={width},{height}", f"--screenshot={png}", file.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        picture = Image.open(io.BytesIO(png.read_bytes())).convert("RGB")
    background = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    bounds = ImageChops.difference(picture, background).getbbox()
    if bounds is None:
        sys.exit(f"the picture {path} is empty")
    picture = picture.crop((0, 0, width, min(picture.height, bounds[3] + 12)))
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Record the run, and make all pictures of it."""
    with tempfile.TemporaryDirectory() as folder:
        run = record(Path(folder))
    html = page.render(run)
    browse(with_style(html, f"{CURVES} {HIDDEN}"), FIGURES / "report.png", 1050, 2400)
    browse(with_style(html, f"{LAYERS} {HIDDEN}"), FIGURES / "report-layers.png", 1050, 1600)
    console = Console(record=True, width=104, file=io.StringIO())
    console.print(Text.from_ansi(live.view(run, width=104, colours=True)))
    terminal = console.export_svg(theme=DEFAULT_TERMINAL_THEME, code_format=TERMINAL)
    browse(terminal, FIGURES / "watch.png", 840, 800)


def with_style(html: str, style: str) -> str:
    """Return a page with another style sheet."""
    return html.replace("</head>", f"<style>{style}</style></head>")


if __name__ == "__main__":
    main()
