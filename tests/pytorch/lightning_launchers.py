"""A training by Lightning on two ranks: BACKEND of the group, and how its launcher starts them
(popen, spawn, fork).
"""

import sys

import torch
import vision  # noqa: F401 (Lightning's metrics import torchvision)
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

import odyssey.torch  # noqa: F401 (its backend)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)
        )

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main(backend, start):
    seed_everything(3, verbose=False)
    x = torch.randn(120, 7)
    samples = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = DDPStrategy(process_group_backend=backend, start_method=start)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        enable_model_summary=False,
        **quiet,
    )
    net = Net()
    trainer.fit(net, torch.utils.data.DataLoader(samples, batch_size=20))
    if trainer.global_rank == 0:
        print("weights", *(p.detach().double().sum().item().hex() for p in net.parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
