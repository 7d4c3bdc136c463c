"""Callbacks: who hears of a training, may end it, and keeps state of its own in checkpoints.

    from odyssey.callbacks import EarlyStopping
    trainer.fit(loader, validation, epochs=50, callbacks=[EarlyStopping("test_loss", patience=3)])

The events and their order are in base.py, those that come with odyssey in standard.py, and
docs/callbacks.md shows how to use and write them. Loggers (odyssey.loggers) are callbacks as well.
"""

from .averages import EMA, SWA
from .base import Callback, Context, joined
from .standard import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    Monitor,
    ReduceLROnPlateau,
    Timer,
)

__all__ = [
    "EMA",
    "SWA",
    "Callback",
    "Context",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "Monitor",
    "ReduceLROnPlateau",
    "Timer",
    "joined",
]
