"""Draw sgd-is-not-an-sde.png: SGD on one mode of a quadratic, compared with an SDE.

Run `python docs/figures/sgd_is_not_an_sde.py` (a few seconds; requires `equilibrate[dev]`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equilibrate.solvable import Quadratic

ONE = torch.ones(1, dtype=torch.float64)
MOMENTA = {0.0: "#0b5394", 0.5: "#38761d", 0.9: "#e69138"}
REPLICAS, STEPS = 20_000, 200


def model(rate: float, momentum: float) -> Quadratic:
    """Return SGD on one mode with h = c = 1, so that η equals ηh."""
    return Quadratic(ONE, ONE, lr=rate, momentum=momentum)


def simulated_excess_loss(rate: float, momentum: float) -> float:
    """Return ⟨f − f₀⟩ of simulated replicas that start at the minimum, far from stationary."""
    sgd = model(rate, momentum)
    generator = torch.Generator().manual_seed(0)
    theta, velocity = sgd.stationary(REPLICAS, generator)
    start = torch.zeros_like(theta), torch.zeros_like(velocity)
    *_, last = sgd.simulate(start, STEPS, generator)
    return sgd.loss(last.parameters_after).mean().item()


def draw() -> Figure:
    """Return a figure of the mean loss above the minimum (left) and of the SDE's error (right)."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for momentum, colour in MOMENTA.items():
        edge = 2 * (1 + momentum)
        rates = np.linspace(0.01, 0.97, 200) * edge
        exact = np.array([model(r, momentum).excess_loss for r in rates])
        sde = np.array([model(r, momentum).sde().excess_loss for r in rates])
        left.plot(rates, exact, color=colour, label=f"SGD, μ = {momentum:g}")
        left.plot(rates, sde, "--", color=colour, linewidth=1)
        dots = np.array([0.1, 0.3, 0.5, 0.7, 0.85, 0.93]) * edge
        found = [simulated_excess_loss(r, momentum) for r in dots]
        left.plot(dots, found, "o", color=colour, markersize=4)
        right.plot(rates, 100 * (sde / exact - 1), color=colour, label=f"μ = {momentum:g}")
    left.plot([], [], "--", color="0.3", linewidth=1, label="SDE")
    left.plot([], [], "o", color="0.3", markersize=4, label="simulated SGD")
    left.set_yscale("log")
    left.set_ylabel("⟨f − f₀⟩, mean loss above the minimum")
    right.set_ylabel("error of the SDE, %")
    right.axhline(0, color="0.6", linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel("ηh, learning rate × curvature")
        axes.legend(frameon=False, fontsize="small")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_name("sgd-is-not-an-sde.png"), dpi=110)
