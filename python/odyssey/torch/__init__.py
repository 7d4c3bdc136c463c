"""PyTorch models, loops and scripts under odyssey's promises; needs the extra `[torch]`.

| file | what it is |
|---|---|
| trainer.py | `DistributedTrainer`: fit, evaluate, predict of a torch module, on the session of our own trainer |
| shards.py | the shards of a global batch, run by torch one by one; sums along the tree of parallel/plan.py |
| arena.py | parameters, gradients and buffers of a module in memory that torch and the reductions see |
| state.py | the state of a training: checkpoints, fingerprints, what must be alike |
| batches.py | batches of tensors, as the session takes them |
| metrics.py | what is summed over samples beside the loss |
| weights.py | weights into our own models and back |
| names.py | PyTorchDDPTrainer, HorovodTrainer: other platforms' arguments |
| c10d.py | `init_process_group("odyssey")`: a backend of torch.distributed; registered by importing this package |
| horovod.py | Horovod's names: `import odyssey.torch.horovod as hvd` |
| ddp.py | `DistributedDataParallel`: a loop of one's own with the same bits on any number of ranks |
| data.py | `DataLoader`: global batches, of which a rank reads its own shards |

Names are loaded when they are first used. What it is not: imported by `import odyssey`, which never imports torch.
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
    from .names import HorovodTrainer, PyTorchDDPTrainer
    from .trainer import DistributedTrainer
    from .weights import load_torch, to_torch

_HOME = {
    "DataLoader": "data",
    "DistributedDataParallel": "ddp",
    "DistributedTrainer": "trainer",
    "HorovodTrainer": "names",
    "PyTorchDDPTrainer": "names",
    "load_torch": "weights",
    "to_torch": "weights",
}

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


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
