"""Starting ranks and keeping a run going: `odyssey launch`, and the same from Python.

docs/data-flow.md says what each file is. What it is not: `odyssey.watch.launcher`, which reads what a launcher put into
the environment of a rank.
"""

from .config import LaunchConfig
from .supervisor import DistributedLauncher, launch_distributed_training

__all__ = ["DistributedLauncher", "LaunchConfig", "launch_distributed_training"]
