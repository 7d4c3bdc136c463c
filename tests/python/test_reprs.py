"""What a notebook shows of an object that stands in the last line of a cell: one line, or a tree
of layers.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, Tensor, callbacks, data, loggers, nn, optim

X = np.arange(80, dtype=np.float32).reshape(40, 2)
SET = data.arrays(X, np.arange(40) % 3, classes=3, name="points")


class Own(callbacks.Callback):
    def __init__(self, model: nn.Module, often: int) -> None:
        self.model, self.often = model, often


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (SET, "ArrayDataset(points, 40 samples of (2,), classes=3)"),
        (
            data.DataLoader(SET, 16, shuffle=True),
            "DataLoader(ArrayDataset(points, 40 samples of (2,), classes=3), batch_size=16, "
            "shuffle=True, 3 batches)",
        ),
        (
            data.DataLoader([(X[0], 0)] * 4, 2),
            "DataLoader(list(4 samples), batch_size=2, shuffle=False, 2 batches)",
        ),
        (next(iter(data.DataLoader(SET, 16))), "Batch(16 samples, epoch=0, index=0)"),
        (data.split(SET)[1], "ArrayDataset(points, 4 samples of (2,), classes=3)"),
        (data.DistributedSampler(40, 3, 1), "DistributedSampler(rank 1 of 3, 13 samples)"),
        (
            callbacks.EarlyStopping(),
            "EarlyStopping(monitor='test_loss', patience=3, min_delta=0.0, mode='min')",
        ),
        (callbacks.Timer("00:01:00"), "Timer(duration=60.0)"),
        (callbacks.LambdaCallback(on_epoch_end=print), "LambdaCallback(on_epoch_end)"),
        (Own(nn.Linear(2, 3), 4), "Own(often=4)"),
        (loggers.CSVLogger("logs"), "CSVLogger(folder='logs', log_every_n_steps=10)"),
        (
            optim.SGD(lr=0.5, momentum=0.9),
            "SGD(lr=0.5, momentum=0.9, weight_decay=0.0, nesterov=False)",
        ),
        (optim.schedule("cosine", 100, 10), "linear_warmup(10, cosine(90))"),
        (optim.linear(0.5, total=10), "linear(0.5, total=10)"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "CrossEntropyLoss(label_smoothing=0.1)"),
        (Tensor([1.0, 2.5]), "Tensor([1. , 2.5])"),
    ],
)
def test_one_line(made, shown):
    assert repr(made) == shown


def test_large_tensors_are_cut_and_have_their_shape():
    shown = repr(Tensor(np.zeros((100, 100))))
    assert shown.endswith("shape=(100, 100))") and len(shown) < 600


def test_a_tree_of_layers():
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)]
    assert repr(nn.Sequential(*blocks, nn.Linear(2, 1))) == (
        "Sequential(\n  (0-2): Sequential(\n    (0): Linear(2, 2)\n    (1): ReLU()\n  )\n  (3): "
        "Linear(2, 1)\n)"
    )


def test_a_training():
    trainer = DistributedTrainer(nn.Linear(2, 3), optim.SGD(lr=0.001), threads=1)
    history = trainer.fit(data.DataLoader(SET, 16), SET, epochs=2, verbose=False)
    assert repr(trainer) == "DistributedTrainer(model=Linear, optimizer=SGD, rank 0 of 1, 6 steps)"
    assert repr(trainer.settings).startswith("Training(num_gpus=1, device='cpu', threads=1")
    assert repr(history).startswith(
        "History(2 epochs, 6 steps, train_loss="
    ) and "test_accuracy=" in repr(history)
    assert "\n" not in repr(history) + repr(trainer.context) and len(repr(history)) < 150
    assert repr(trainer.evaluate(SET)).endswith(", samples=40)")
