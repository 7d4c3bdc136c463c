"""PyTorch models, loops and scripts under odyssey's promises; needs the extra `[torch]`.

| file | what it is |
|---|---|
| c10d.py | `init_process_group("odyssey")`: a backend of torch.distributed; registered by importing this package |
| horovod.py | Horovod's names: `import odyssey.torch.horovod as hvd` |
| ddp.py | `DistributedDataParallel`: a loop of one's own with the same bits on any number of ranks |
| data.py | `DataLoader`: global batches, of which a rank reads its own shards |

What it is not: imported by `import odyssey`, which never imports torch.
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

_HOME = {"DataLoader": "data", "DistributedDataParallel": "ddp"}

__all__ = ["DataLoader", "DistributedDataParallel", "c10d"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
