"""Callbacks: who hears of a training, may end it, and keeps state of its own in checkpoints.

    from odyssey.callbacks import EarlyStopping
    trainer.fit(loader, validation, epochs=50, callbacks=[EarlyStopping("test_loss", patience=3)])

The events and their order are in base.py, those that come with odyssey in standard.py, and
docs/callbacks.md shows how to use and write them. Loggers (odyssey.loggers) are callbacks as well.
"""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .averages import EMA as EMA
    from .averages import SWA as SWA

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


def __getattr__(name: str) -> Any:
    if name not in ("EMA", "SWA"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import averages  # most training runs don't need them

    return getattr(averages, name)
