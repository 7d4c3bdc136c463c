"""`python -m odyssey.distributed.launcher`: `python -m odyssey.launch` by the name of other
platforms.
"""

from ..launch import DistributedLauncher, LaunchConfig, launch_distributed_training
from ..launch.command_line import main

__all__ = ["DistributedLauncher", "LaunchConfig", "launch_distributed_training"]

if __name__ == "__main__":
    main()
