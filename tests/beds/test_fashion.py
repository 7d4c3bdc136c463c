"""ResNet-18 on Fashion-MNIST, 50 steps of it; Debian's package dataset-fashion-mnist has the
pictures. The whole of it is `odyssey train --model resnet18 --dataset fashion-mnist
--data-dir /usr/share/datasets --nesterov --epochs 5`, with 93.35 % in bf16 (docs/log.md).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim

FOLDER = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets"))


@pytest.mark.skipif(
    not (FOLDER / "fashion-mnist").is_dir(),
    reason="needs Fashion-MNIST; FASHION_MNIST=FOLDER names it",
)
def test_resnet18_learns_in_50_steps():
    train, test = (
        data.load("fashion-mnist", train=part, data_dir=FOLDER) for part in (True, False)
    )
    model = nn.models.build("resnet18", sample_shape=(1, 28, 28), classes=10)
    optimizer = optim.SGD(lr=0.05, momentum=0.9, weight_decay=5e-4)
    rate = optim.schedule("cosine", 50, 10)
    trainer = DistributedTrainer(model, optimizer, schedule=rate, shard_size=16, backend="local")
    history = trainer.fit(
        data.DataLoader(train, batch_size=32, shuffle=True), steps=50, verbose=False
    )
    found = trainer.evaluate(test.take(512))
    assert history.steps == 50 and np.isfinite(history.train_loss)
    assert found.accuracy > 0.6 and found.loss < 1.1, found
