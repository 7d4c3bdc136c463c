"""A PyTorch model trained with the same bits on any number of processes.

    python examples/pytorch.py
    mpirun -n 2 python examples/pytorch.py
    odyssey launch -n 4 --run-dir runs/torch examples/pytorch.py      # restarts, goes on from its
                                                                      # checkpoints

All print the same SHA-256 of the weights. Needs PyTorch: `pip install -e '.[torch]'` in a checkout.
"""

import argparse

import torch
from torch import nn

from odyssey import data
from odyssey.torch import DistributedTrainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * 144, 10),
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    trainer = DistributedTrainer(module, optimizer, nn.CrossEntropyLoss(), scheduler=scheduler)
    loader = data.DataLoader(
        data.load("mnist", train=True), batch_size=128, shuffle=True
    )  # 128: of all processes together
    trainer.fit(loader, epochs=100, steps=options.steps)

    result, sha = trainer.evaluate(data.load("mnist", train=False)), trainer.weights_sha256()
    if trainer.comm.rank == 0:
        print(
            f"{trainer.comm.size} processes: accuracy {result.accuracy:.4f}, weights sha256 "
            f"{sha[:16]}"
        )


if __name__ == "__main__":
    main()
