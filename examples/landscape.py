"""The loss landscape of your own model: curvature and noise at one point, then over learning rates.

python examples/landscape.py
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import equilibrate as eq

parser = argparse.ArgumentParser()
parser.add_argument("--threshold", type=float, default=0.05, help="how closely FDR1 must hold")
args = parser.parse_args()

torch.set_num_threads(1)  # small operations are faster so
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
labels = (inputs.sum(1) > 0).long()
labels = torch.where(torch.rand(1024) < 0.1, 1 - labels, labels)

# At one point: train a little, then measure with the whole training set.
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
for _ in range(10):
    for batch in torch.randperm(1024).split(32):
        optimizer.zero_grad()
        cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
landscape = eq.landscape.Landscape(model, cross_entropy, (inputs, labels), weight_decay=0.05)
gradient = landscape.gradient()
noise = landscape.noise(batch_size=32)
print(f"loss {landscape.value():.4f}, |∇f|² {gradient @ gradient:.2e}")
print(f"noise Tr C̃ {noise.total}, curvature along it ", end="")
print(landscape.noise_curvature(batch_size=32).sharpness)

# Over learning rates: four copies of the model, trained at each of them until FDR1 holds.
points = eq.landscape.sweep(
    model,
    cross_entropy,
    (inputs, labels),
    lrs=[0.1, 0.2, 0.4],
    batch_size=32,
    weight_decay=0.05,
    threshold=args.threshold,
)
for point in points.points:
    print(f"lr {point.lr:<5} ⟨(∇f)²⟩ {point.estimate}  ", end="")
    print(f"after {point.epochs_waited} epochs, L/R − 1 = {point.residual:+.3f}")
print(eq.landscape.fit(points).summary())
