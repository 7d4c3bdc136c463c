"""odyssey: the same training, to the last bit, on any number of ranks.

Names are loaded when they are first used, so that importing the package costs little.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "DDP": "distributed.ddp",
    "DistributedConfig": "config",
    "DistributedDataParallel": "distributed.ddp",
    "DistributedTrainer": "trainer",
    "GradScaler": "precision",
    "GradientCompression": "parallel.compression",
    "History": "trainer",
    "Mesh": "parallel.mesh",
    "Tensor": "tensor",
    "no_grad": "tensor",
    "autocast": "precision",
    "load_ops": "own_ops",
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
    "testing",
    "trainer",
)

if TYPE_CHECKING:
    from . import comm, data, distributed, errors, functional, nn, optim, parallel, placement, tensor, testing, trainer
    from .config import DistributedConfig
    from .distributed.ddp import DDP, DistributedDataParallel
    from .errors import OdysseyError
    from .nn import PipelineParallel, Stage, checkpoint, manual_seed
    from .own_ops import load_ops
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
    "load_ops",
    "manual_seed",
    "nn",
    "no_grad",
    "optim",
    "parallel",
    "placement",
    "tensor",
    "testing",
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
    """Lets rooms hear of each other that do not know each other, and a process that a launcher started as one of
    several ranks end as one: process/entry.py."""
    from . import launcher, process

    process.on_world.append(lambda world: importlib.import_module(".watch.start", __name__).begin(world))
    process.connect.append(lambda: importlib.import_module(".comm", __name__).world("auto"))
    if launcher.rank() is not None:
        from .process import entry

        entry.install()


_enter()
