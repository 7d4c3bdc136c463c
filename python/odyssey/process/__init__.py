"""This process as one of a job: what it does, where others can read it, how it ends, and what it may have.

| file | what it is |
|---|---|
| slot.py | its status slot, written by comm, the trainer and the compiler's lock, read by the watcher |
| entry.py | how a rank ends, and what it does when the watcher asks |
| limits.py | what it may have of shared memory and address space |

All of it lies below everything that trains; what is needed of that is handed to them here.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from typing import Any

# odyssey/__init__.py fills these lists: who calls need not know who is called.
on_world: list[Callable[[Any], None]] = []  # with each communicator of all processes, when comm has made it
connect: list[Callable[[], Any]] = []  # one function, which makes the communicator of all processes

worlds: list[Any] = []  # the communicators of all processes that there are, as comm has made them


def machine() -> int:
    """Names this machine, as two may have one host name."""
    name = os.uname().nodename
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        name += file.read()
    return zlib.crc32(name.encode())


def process_space() -> int:
    """Names the space in which process numbers mean something; 0 where that is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
