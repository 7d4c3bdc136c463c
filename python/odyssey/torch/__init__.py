"""PyTorch modules with the promises of odyssey: the same bits on any number of ranks. Needs the extra `torch`.

    trainer.py   DistributedTrainer: fit, evaluate, predict of a torch module, on the session of our own trainer
    shards.py    the shards of a global batch, run by torch one by one; sums along the tree of parallel/plan.py
    arena.py     parameters, gradients and buffers of a module in memory that torch and the reductions see
    state.py     the state of a training: checkpoints, fingerprints, what must be alike
    batches.py   batches of tensors, as the session takes them
    weights.py   weights into our own models and back
    names.py     PyTorchDDPTrainer, HorovodTrainer: other platforms' arguments

Names are loaded when they are first used. What it is not: imported by `import odyssey`.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import ConfigError

try:
    import torch as _torch  # noqa: F401
except ImportError as e:
    raise ConfigError(f"[torch] odyssey.torch needs PyTorch ({e}); pip install 'odyssey[torch]'") from e

_HOME = {
    "DataLoader": "data",
    "DistributedDataParallel": "ddp",
    "DistributedTrainer": "trainer",
    "HorovodTrainer": "names",
    "PyTorchDDPTrainer": "names",
    "load_torch": "weights",
    "to_torch": "weights",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
