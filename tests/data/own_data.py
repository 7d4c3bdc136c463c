"""Data sets and transforms of a user's own, in a module that worker processes can import."""

from __future__ import annotations

import os
import time

import numpy as np


class Made:
    """Samples that are made one by one: `kind` says which tree they are; the epoch is part of
    them if `draws`.
    """

    def __init__(self, kind: str, n: int, classes: int | None = 3, draws: bool = False) -> None:
        self.kind, self.n, self.draws, self.epoch = kind, n, draws, 0
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch if self.draws else 0

    def __getitem__(self, i: int):
        x = np.random.default_rng([self.epoch, i]).normal(size=(2, 6, 5)).astype(np.float32)
        if self.kind == "image":
            return x, i % 3
        if self.kind == "bytes":
            return (x * 40).astype(np.int64).astype(np.uint8), i % 3
        if self.kind == "regression":
            return x[0, 0], float(x.sum())
        if self.kind == "ids":
            return np.arange(i, i + 4), np.arange(i + 1, i + 5)
        return {"image": x, "pair": (i, x[0] > 0)}, (x[:, 0], np.int16(i))


class Broken(Made):
    """Sample 7 cannot be read: `how` says what happens."""

    def __init__(self, how: str) -> None:
        super().__init__("image", 40)
        self.how = how

    def __getitem__(self, i: int):
        if i == 7 and self.how == "raise":
            raise KeyError("no such picture")
        if i == 7 and self.how == "exit":
            os._exit(3)
        if i == 7 and self.how == "sleep":
            time.sleep(600)
        return super().__getitem__(i)


def noise(sample, rng):
    """Something random added to every float of a sample."""
    if isinstance(sample, dict):
        return {**sample, "image": sample["image"] + rng.normal(size=sample["image"].shape)}
    return sample + rng.normal(size=sample.shape) if sample.dtype.kind == "f" else sample


def failing(sample, rng):
    raise ZeroDivisionError("one by nothing")


def flipped_pair(pair, rng):
    """Sample and target, of which the target tells whether the sample was turned."""
    x, _ = pair
    turn = bool(rng.random() < 0.5)
    return (x[:, :, ::-1] if turn else x), int(turn)
