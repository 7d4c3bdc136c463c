"""Process groups and collectives for hand-written loops, in the names that PyTorch's users know.

    from odyssey import distributed as dist

    dist.init_process_group()                      # mpirun -n 4 python script.py; alone it is a
                                                   # world of one
    dist.all_reduce(gradient)                      # in place, and returned
    mean = dist.metric_average(loss.item(), weight=len(batch))

Values are odyssey.Tensor, NumPy arrays or Python numbers (and torch tensors on the CPU, where
PyTorch is in use). A collective overwrites what it is given and returns it, as PyTorch's does; a
number comes back as a new one. Nothing is on the tape. `DistributedDataParallel` (ddp.py) keeps a
model's gradients in step. A DistributedTrainer needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import attach
from ..comm import ReduceOp
from . import collectives, groups
from .collectives import *  # noqa: F403
from .groups import *  # noqa: F403
from .values import Place, array_of, like, operation

if TYPE_CHECKING:
    from ..data import DistributedSampler
    from ..launch import DistributedLauncher, LaunchConfig, launch_distributed_training
    from .config import DistributedConfig
    from .ddp import DDP, DistributedDataParallel
    from .profiling import PerformanceMonitor, profile_communication

__getattr__, _, _ = attach(
    __name__,
    {
        "distributed.ddp": "DDP DistributedDataParallel",
        "distributed.config": "DistributedConfig",
        "launch": "DistributedLauncher LaunchConfig launch_distributed_training",
        "data": "DistributedSampler",
        "distributed.profiling": "PerformanceMonitor profile_communication",
    },
)
__all__ = [
    "DDP",
    "DistributedConfig",
    "DistributedDataParallel",
    "DistributedLauncher",
    "DistributedSampler",
    "LaunchConfig",
    "PerformanceMonitor",
    "Place",
    "ReduceOp",
    "array_of",
    "launch_distributed_training",
    "like",
    "operation",
    "profile_communication",
]
__all__ += collectives.__all__
__all__ += groups.__all__
