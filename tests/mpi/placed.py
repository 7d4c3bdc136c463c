"""Trains a model that is placed by hand or cut into stages, and prints the hash of its weights;
called by test_placed.py as `placed.py MODEL SCHEDULE`.
"""

from __future__ import annotations

import sys

import numpy as np

from odyssey import DistributedTrainer, PipelineParallel, Stage, checkpoint, data, device, nn, optim
from odyssey import functional as F
from odyssey.parallel.mesh import Mesh


class Placed(nn.Module):
    """Three places, one visited twice, and values that are used on two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(36, 24)
        self.fc2 = nn.Linear(24, 24) @ device(1)
        self.fc3 = nn.Linear(24, 24).to(2)
        self.fc4 = nn.Linear(24, 5) @ device(1)

    def forward(self, x):
        a = F.relu(self.fc1(F.flatten(x)))
        b = F.tanh(self.fc2(a.to(device(1))))
        c = self.fc3(a.to(device=2)) * b.to(2)
        return self.fc4(F.dropout(c.to(1) + b, 0.25, self.training))


class Returning(nn.Module):
    """Ends on the place where it began."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(36, 16)
        self.fc2 = nn.Linear(16, 16) @ device(1)
        self.fc3 = nn.Linear(16, 5)

    def forward(self, x):
        a = F.sigmoid(self.fc1(F.flatten(x)))
        return self.fc3(self.fc2(a.to(1)).to(0) + a)


def staged(schedule: str, wrap=lambda layer: layer) -> PipelineParallel:
    conv1, conv2, conv3 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3)
    fc1, fc2 = nn.Linear(24, 16), nn.Linear(16, 5)
    blocks = [
        [conv1, F.relu],
        [conv2, F.tanh, nn.Dropout(0.2)],
        [conv3, F.relu],
        [fc1, F.relu, nn.Dropout(0.1), fc2],
    ]
    if schedule == "interleaved":
        stages = [
            Stage([wrap(nn.Sequential(*named(b)))] if i < 3 else b, i % 2)
            for i, b in enumerate(blocks)
        ]
    else:
        first = [wrap(nn.Sequential(*named(blocks[0]))), *blocks[1]]
        stages = [
            Stage(first, 0),
            Stage([wrap(nn.Sequential(*named(blocks[2])))], 1),
            Stage(blocks[3], 2),
        ]
    return PipelineParallel(stages, micro_batch_size=8, schedule=schedule)


def named(layers):
    """Functions as modules."""
    return [
        {F.relu: nn.ReLU, F.tanh: nn.Tanh}[layer]() if not isinstance(layer, nn.Module) else layer
        for layer in layers
    ]


def main() -> None:
    name, schedule, pp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    nn.manual_seed(3)
    if name == "placed":
        model, size = Placed(), 8
    elif name == "returning":
        model, size = Returning(), 8
    else:
        model, size = (
            staged(schedule, checkpoint if name == "checkpointed" else lambda layer: layer),
            None,
        )
    rng = np.random.default_rng(0)
    dataset = data.arrays(
        rng.standard_normal((150, 1, 6, 6)).astype(np.float32), np.arange(150) % 5
    )
    trainer = DistributedTrainer(
        model,
        optim.Adam(lr=0.01),
        shard_size=size,
        mesh=Mesh(pp=pp),
        pipeline_schedule=schedule,
        seed=4,
    )
    history = trainer.fit(
        data.DataLoader(dataset, batch_size=56, shuffle=True), dataset, epochs=2
    )  # 7 micro-batches; 5
    digest = trainer.weights_sha256()
    if trainer.comm.rank == 0:
        print(digest, history.train_loss, history.test_loss)


if __name__ == "__main__":
    main()
