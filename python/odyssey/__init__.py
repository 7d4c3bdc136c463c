"""odyssey: the same training, to the last bit, on any number of ranks.

Names are loaded when they are first used, so that importing the package costs little.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "DDP": "ddp",
    "DistributedConfig": "config",
    "DistributedDataParallel": "ddp",
    "DistributedTrainer": "trainer",
    "GradScaler": "precision",
    "GradientCompression": "parallel.compression",
    "History": "trainer",
    "Mesh": "parallel.mesh",
    "Tensor": "tensor",
    "no_grad": "tensor",
    "autocast": "precision",
    "from_dlpack": "tensor",
    "Device": "placement",
    "device": "placement",
    "manual_seed": "nn",
    "checkpoint": "nn",
    "PipelineParallel": "nn",
    "Stage": "nn",
    "OdysseyError": "errors",
}
_MODULES = (
    "comm",
    "data",
    "distributed",
    "errors",
    "functional",
    "nn",
    "optim",
    "parallel",
    "placement",
    "tensor",
    "trainer",
)

if TYPE_CHECKING:
    from . import comm, data, distributed, errors, functional, nn, optim, parallel, placement, tensor, trainer
    from .config import DistributedConfig
    from .ddp import DDP, DistributedDataParallel
    from .errors import OdysseyError
    from .nn import PipelineParallel, Stage, checkpoint, manual_seed
    from .parallel.compression import GradientCompression
    from .parallel.mesh import Mesh
    from .placement import Device, device
    from .precision import GradScaler, autocast
    from .tensor import Tensor, from_dlpack, no_grad
    from .trainer import DistributedTrainer, History

__all__ = [
    "DDP",
    "Device",
    "DistributedConfig",
    "DistributedDataParallel",
    "DistributedTrainer",
    "GradScaler",
    "GradientCompression",
    "History",
    "Mesh",
    "OdysseyError",
    "PipelineParallel",
    "Stage",
    "Tensor",
    "autocast",
    "checkpoint",
    "comm",
    "data",
    "device",
    "distributed",
    "errors",
    "from_dlpack",
    "functional",
    "manual_seed",
    "nn",
    "no_grad",
    "optim",
    "parallel",
    "placement",
    "tensor",
    "trainer",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _enter() -> None:
    """A process that a launcher started as one of several ranks ends as one: watch/entry.py."""
    from . import launcher

    if launcher.rank() is not None:
        from .watch import entry

        entry.install()


_enter()
