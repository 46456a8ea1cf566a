"""Lightning: the lines that end in `# equilibrate` turn it on.

The learning rate is constant, and decays to zero from where that pays until the last step.

python examples/lightning_trainer.py
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equilibrate.integrations.lightning import CooldownCallback  # equilibrate

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--folder", default="lightning_example")
parser.add_argument("--resume", help="a checkpoint to continue from")
args = parser.parse_args()


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


torch.set_num_threads(1)  # small operations are faster so
torch.manual_seed(0)
inputs = torch.randn(4096, 20)
labels = (inputs[:, :10].square().sum(1) > inputs[:, 10:].square().sum(1)).long()
labels = torch.where(torch.rand(4096) < 0.1, 1 - labels, labels)

callbacks = [ModelCheckpoint(args.folder, save_top_k=-1)]
callbacks.append(CooldownCallback())  # equilibrate
trainer = Trainer(
    accelerator="cpu",
    max_epochs=args.epochs,
    callbacks=callbacks,
    logger=CSVLogger(args.folder),
    enable_progress_bar=False,
)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
trainer.fit(Classifier(), loader, ckpt_path=args.resume)
print({name: f"{value.item():.4g}" for name, value in trainer.callback_metrics.items()})
