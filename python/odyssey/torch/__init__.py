"""PyTorch models, loops and scripts under odyssey's promises; needs the extra `[torch]`.

docs/data-flow.md says what each file is. Names are loaded when they are first used. What it is not: imported by
`import odyssey`, which never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

try:
    from . import c10d  # registers the backend
except ImportError as e:
    raise ConfigError(f"[torch] odyssey.torch needs PyTorch ({e}); pip install 'odyssey[torch]'") from e

if TYPE_CHECKING:
    from .data import DataLoader
    from .ddp import DistributedDataParallel
    from .foreign_trainers import HorovodTrainer, PyTorchDDPTrainer
    from .trainer import DistributedTrainer
    from .weights import load_torch, to_torch

_HOMES = {
    "data": "DataLoader",
    "ddp": "DistributedDataParallel",
    "trainer": "DistributedTrainer",
    "foreign_trainers": "HorovodTrainer PyTorchDDPTrainer",
    "weights": "load_torch to_torch",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "DataLoader", "DistributedDataParallel", "DistributedTrainer", "HorovodTrainer", "PyTorchDDPTrainer", "c10d",
    "load_torch", "to_torch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
