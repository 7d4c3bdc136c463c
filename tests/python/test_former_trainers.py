"""The memory of trainers that a program has dropped."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import odyssey
from odyssey import data, nn, optim
from odyssey.train import former_trainers

SAMPLES = data.arrays(np.ones((8, 4), np.float32), np.arange(8) % 2, classes=2)


def train() -> weakref.ref:
    odyssey.manual_seed(0)
    trainer = odyssey.DistributedTrainer(nn.Linear(4, 2), optim.SGD(lr=0.1))
    trainer.fit(data.DataLoader(SAMPLES, 8), epochs=1, verbose=False)
    return weakref.ref(trainer)


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1 << 20, 4)])
def test_a_dropped_trainer_is_freed_before_the_next_one(monkeypatch, least, most):
    """Small ones wait for Python's collector, whose run takes longer than they do."""
    monkeypatch.setattr(former_trainers, "COLLECT_FROM", least)
    monkeypatch.setattr(former_trainers, "_trainers", weakref.WeakSet())
    gc.collect()
    gc.disable()
    try:
        trainers = [train() for _ in range(4)]
        assert sum(trainer() is not None for trainer in trainers) == most
    finally:
        gc.enable()
        gc.collect()
    assert not any(trainer() for trainer in trainers)


def test_a_trainer_in_use_stays(monkeypatch):
    monkeypatch.setattr(former_trainers, "COLLECT_FROM", 1)
    first = odyssey.DistributedTrainer(nn.Linear(4, 2), optim.SGD(lr=0.1))
    train()
    first.fit(data.DataLoader(SAMPLES, 8), epochs=1, verbose=False)
    assert first.steps == 1
