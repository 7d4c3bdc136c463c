"""odyssey: the same training, to the last bit, on any number of ranks.

Names are loaded when they are first used, so that importing the package costs little.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {  # what is loaded from where; front ends, such as torch.ray, by what they need
    "core.offload": "offload",
    "core.own_ops": "load_ops",
    "core.placement": "Device device",
    "core.precision": "GradScaler autocast",
    "core.tensor": "Tensor from_dlpack no_grad",
    "distributed.config": "DistributedConfig",
    "distributed.ddp": "DDP DistributedDataParallel",
    "errors": "OdysseyError",
    "nn": "PipelineParallel Stage checkpoint manual_seed",
    "inexact.compression": "GradientCompression",
    "parallel.mesh": "Mesh",
    "train.trained_models": "export load load_checkpoint load_model predict save_checkpoint "
    "save_model",
    "train.trainer": "DistributedTrainer History",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = frozenset(
    "callbacks comm data distributed errors functional loggers metrics nn optim parallel placement "
    "steplog tensor testing trainer verify watch".split()
)

if TYPE_CHECKING:
    from . import (
        callbacks,
        comm,
        data,
        distributed,
        errors,
        metrics,
        nn,
        optim,
        parallel,
        testing,
    )
    from .audit import steplog, verify
    from .callbacks import loggers
    from .core import functional, placement, tensor
    from .core.offload import offload
    from .core.own_ops import load_ops
    from .core.placement import Device, device
    from .core.precision import GradScaler, autocast
    from .core.tensor import Tensor, from_dlpack, no_grad
    from .distributed.config import DistributedConfig
    from .distributed.ddp import DDP, DistributedDataParallel
    from .errors import OdysseyError
    from .inexact.compression import GradientCompression
    from .nn import PipelineParallel, Stage, checkpoint, manual_seed
    from .parallel.mesh import Mesh
    from .train import trainer
    from .train.trained_models import (
        export,
        load,
        load_checkpoint,
        load_model,
        predict,
        save_checkpoint,
        save_model,
    )
    from .train.trainer import DistributedTrainer, History

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
    "callbacks",
    "checkpoint",
    "comm",
    "data",
    "device",
    "distributed",
    "errors",
    "export",
    "from_dlpack",
    "functional",
    "load",
    "load_checkpoint",
    "load_model",
    "load_ops",
    "loggers",
    "manual_seed",
    "metrics",
    "nn",
    "no_grad",
    "offload",
    "optim",
    "parallel",
    "placement",
    "predict",
    "save_checkpoint",
    "save_model",
    "steplog",
    "tensor",
    "testing",
    "trainer",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name == "TensorFlowDistributedTrainer":  # of other platforms
        from .errors import ConfigError

        raise ConfigError(
            f"[odyssey] there is no {name}: TensorFlow's distribution is tf.distribute; a Keras "
            "model trains with "
            "KERAS_BACKEND=torch and odyssey.torch.DistributedTrainer (docs/migration.md)"
        )
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    from .base import registry

    for kind in ("names", "modules"):
        if name in registry.provided(kind):
            return registry.load(kind, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _watch(world: Any) -> None:
    """Starts to watch a process that is one of several ranks, or part of a run."""
    from .base import runs

    if world.size > 1 or runs.Run.current() is not None:
        importlib.import_module(".watch.start_watcher", __name__).begin(world)


def _enter() -> None:
    """Lets rooms hear of each other that do not know each other, and a process that a launcher
    started as one of several ranks end as one: base/exits.py.
    """
    from .base import hooks, launcher

    hooks.on_world.append(_watch)
    hooks.connect.append(lambda: importlib.import_module(".comm", __name__).world("auto"))
    launcher.announce()
    if launcher.rank() is not None:
        from .base import exits

        exits.install()
    else:
        hooks.end_with_exit_codes()


_enter()
