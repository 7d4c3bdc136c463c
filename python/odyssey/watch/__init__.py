"""Knowing what every rank does, and ending a job that cannot go on.

| file | what it is |
|---|---|
| start.py | in a rank, at the start: who is where; starts the watcher |
| watcher.py | the process that watches; process.py is one rank as it sees it |
| writer.py | what it writes, in a thread of its own |
| judge.py | who hangs, who is slow, and the words for it; pure functions |
| link.py | messages between watchers of several machines |

What it watches is the status slot of each rank, process/slot.py. docs/watch.md explains it. What it is not: a way to
steer a training.
"""

from ..process import slot

__all__ = ["slot"]
