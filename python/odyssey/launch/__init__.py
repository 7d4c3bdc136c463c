"""Starting ranks and keeping a run going: `odyssey launch`, and the same from Python.

| file | what it is |
|---|---|
| config.py | `LaunchConfig`: what is asked for, checked |
| hosts.py | names of hosts, strictly read; who gets how many ranks |
| starting.py | which launcher, its argument list, the environment of ranks |
| supervisor.py | `DistributedLauncher`: attempt after attempt |
| attempt.py | one attempt: mpirun or srun, watched and ended |
| output.py | what ranks print, on its way through |
| rank_wrapper.py, die_with_parent.py | programs of their own: a rank's parent; what ends with its parent |
| ends.py | how ranks ended, from what the rank wrappers write |
| decide.py | what comes after an attempt |
| leftovers.py | processes and files that a killed attempt left |
| lock.py, users.py | one launcher per run; root |

What it is not: `odyssey.watch.launcher`, which reads what a launcher put into the environment of a rank.
"""

from .config import LaunchConfig
from .supervisor import DistributedLauncher, launch_distributed_training

__all__ = ["DistributedLauncher", "LaunchConfig", "launch_distributed_training"]
