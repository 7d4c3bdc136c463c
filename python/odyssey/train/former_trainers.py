"""The memory of trainers that a program has dropped.

The parts of a trainer refer to each other, so a dropped one lives until Python's collector runs.
The collector counts objects and not bytes: a program that trains many models, such as
cross-validation, could fill the memory before that.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

#: Parameters of all trainers that are still in memory, from which on the collector runs before
#: another trainer takes memory. A run of the collector takes up to 0.1 s.
COLLECT_FROM = 1 << 20

_trainers: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def collect_before(trainer: Any) -> None:
    """Frees dropped trainers if there are large ones, and remembers the new `trainer`."""
    with _lock:
        arenas = [vars(former).get("arena") for former in _trainers]
        _trainers.add(trainer)
    if sum(arena.size for arena in arenas if arena is not None) >= COLLECT_FROM:
        del arenas
        gc.collect()
