"""The paper's schedule in a plain loop, with readings of layers and a checkpoint to resume from.

python examples/bare_loop.py             # train
python examples/bare_loop.py --resume    # continue from the checkpoint
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import equilibrate as eq

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--checkpoint", default="bare_loop.pt")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

torch.set_num_threads(1)  # small operations are faster so

# Two classes with a curved boundary, and a tenth of the labels wrong.
torch.manual_seed(0)
inputs = torch.randn(4096, 20)
labels = (inputs[:, :10].square().sum(1) > inputs[:, 10:].square().sum(1)).long()
labels = torch.where(torch.rand(4096) < 0.1, 1 - labels, labels)
order = torch.Generator().manual_seed(0)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True, generator=order)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
monitor = eq.Monitor(optimizer, model)
scheduler = eq.FDRScheduler(optimizer, threshold=0.05, factor=0.5, monitor=monitor)

done = 0
if args.resume:
    state = torch.load(args.checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    order.set_state(state["order"])
    done = state["epoch"]

for epoch in range(done + 1, args.epochs + 1):
    total = torch.zeros(())
    for batch_inputs, batch_labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch_inputs), batch_labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    scheduler.step()
    decision = scheduler.last_decision
    print(f"epoch {epoch:2}  loss {total / len(loader):.4f}  lr {decision.lr:g}  ", end="")
    print(f"since step {decision.step}: {decision.reason}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"scheduler": scheduler.state_dict(), "order": order.get_state(), "epoch": epoch}
    torch.save(state, args.checkpoint)

print(monitor.layers(threshold=0.05))
