"""A process as one of a job: what it may have, what it does where others can read it, how it ends; and the watcher.

| file | what it is |
|---|---|
| launcher.py | what the launcher that started this process says about it |
| limits.py | what it may have of shared memory and address space |
| files.py, outputs.py | whole files, locks, untrusted JSON; what a command leaves where the user said |
| runs.py | the run directory, where there is one |
| slot.py | the status slot of a rank, written by comm, the trainer and the compiler's lock |
| entry.py | how a rank ends, and what it does when the watcher asks |
| hooks.py | what is called when ranks have met, filled from above |
| start.py | in a rank, at the start: who is where; starts the watcher |
| watcher.py | the process that watches: knows what every rank does, ends a job that cannot go on |
| process.py, judge.py | one rank as the watcher sees it; who hangs, who is slow, and the words for it |
| writer.py, link.py, view.py | what it writes; messages between watchers; what `odyssey top` reads |

docs/watch.md explains it. Everything that trains lies above this folder.
"""

from . import slot

__all__ = ["slot"]
