"""Ranks started, and started again: the launcher, its attempts, and what ranks leave when they
end.

docs/launch.md explains it, docs/data-flow.md says what each file is.
"""

from typing import TYPE_CHECKING

from ..base.lazy import attach

if TYPE_CHECKING:
    from .command_line import main as main
    from .command_line import parse as parse
    from .config import MOST, LaunchConfig
    from .supervisor import DistributedLauncher, launch_distributed_training

__getattr__, _, _ = attach(
    __name__,
    {
        "launch.command_line": "main parse",
        "launch.config": "LaunchConfig MOST",
        "launch.supervisor": "DistributedLauncher launch_distributed_training",
    },
)
__all__ = ["MOST", "DistributedLauncher", "LaunchConfig", "launch_distributed_training"]
