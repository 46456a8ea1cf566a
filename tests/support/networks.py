"""Small networks with each kind of normalisation, and a loop that trains them on digits."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


@cache
def digits():
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return ((images.float() - 4.9) / 6.0).view(-1, 1, 8, 8), labels


def convolutional(norm=nn.BatchNorm2d, channels=4):
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=2, bias=False),
        norm(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, bias=False),
        norm(2 * channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels, 10),
    )
    # A gain before another normalisation is scale-invariant as long as its bias is zero.
    nn.init.normal_(model[1].bias)
    return model


def linear(norm, *, bias=False):
    first = nn.Linear(64, 24, bias=bias)
    return nn.Sequential(nn.Flatten(), first, norm(24), nn.ReLU(), nn.Linear(24, 10))


def reparametrised(how):
    first = how(nn.Linear(64, 24, bias=False))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(24, 10))


WEIGHT = "1.parametrizations.weight"
INVARIANT = {
    "BatchNorm": (convolutional, {"0.weight", "3.weight"}),
    "GroupNorm": (lambda: convolutional(lambda c: nn.GroupNorm(2, c)), {"0.weight", "3.weight"}),
    "LayerNorm": (lambda: linear(nn.LayerNorm), {"1.weight"}),
    "RMSNorm": (lambda: linear(nn.RMSNorm), {"1.weight"}),
    "weight_norm": (lambda: reparametrised(weight_norm), {"1.parametrizations.weight.original1"}),
    "spectral_norm": (
        lambda: reparametrised(spectral_norm),
        {"1.parametrizations.weight.original"},
    ),
}
"""Networks by their normalisation, with the names of the scale-invariant weights."""


def train(model, optimizer, steps, *, batch=20, autocast=False, seed=1):
    images, labels = digits()
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(images[chosen].to(dtype))
        optimizer.zero_grad()
        cross_entropy(outputs.float(), labels[chosen]).backward()
        optimizer.step()
