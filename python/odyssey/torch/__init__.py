"""PyTorch models, loops and scripts under odyssey's promises; needs the extra `[torch]`.

Names are loaded when they are first used; `import odyssey` never imports torch. docs/data-flow.md
has the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import attach, install_extra
from ..errors import ConfigError

try:
    from . import c10d  # registers the backend
except ImportError as e:
    raise ConfigError(f"[torch] odyssey.torch needs PyTorch ({e}); {install_extra('torch')}") from e

if TYPE_CHECKING:
    from .data import DataLoader
    from .ddp import DistributedDataParallel
    from .foreign_trainers import HorovodTrainer, PyTorchDDPTrainer
    from .trainer import DistributedTrainer
    from .weights import load_torch, to_torch

__getattr__, _, _ = attach(
    __name__,
    {
        "torch.data": "DataLoader",
        "torch.ddp": "DistributedDataParallel",
        "torch.trainer": "DistributedTrainer",
        "torch.foreign_trainers": "HorovodTrainer PyTorchDDPTrainer",
        "torch.weights": "load_torch to_torch",
    },
)
__all__ = [
    "DataLoader",
    "DistributedDataParallel",
    "DistributedTrainer",
    "HorovodTrainer",
    "PyTorchDDPTrainer",
    "c10d",
    "load_torch",
    "to_torch",
]


def __dir__() -> list[str]:
    return sorted(__all__)
