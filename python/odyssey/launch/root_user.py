"""Rule for root: it may not start a run where other people work, unless that is asked for.

A rank as root reads and writes everybody's files, and MPI's connections are not authenticated. In a
container root is the usual user, and nobody else is there. What counts is who has a process now,
not who has an account: images of containers and machines come with accounts that nobody uses.
"""

from __future__ import annotations

import contextlib
import os

from ..errors import ConfigError
from . import leftovers

# user ids of people; below and above are those of services
FIRST = 1000
LAST = 59999
ALLOW = "ODYSSEY_ALLOW_ROOT"


def check(allowed: bool) -> None:
    """Raises ConfigError if this is root on a machine where others work."""
    if os.geteuid() != 0 or allowed or os.environ.get(ALLOW) == "1":
        return
    users = working()
    if users:
        raise ConfigError(
            f"[launch] this is root, and user {users[0]} works on this machine too; start it as an "
            f"ordinary user, or give --allow-root (or {ALLOW}=1)"
        )


def working() -> list[int]:
    """Ids of the people that have a process on this machine."""
    user_ids = set()
    for pid in leftovers.pids():
        with contextlib.suppress(OSError):
            user_ids.add(os.stat(f"/proc/{pid}").st_uid)
    return sorted(user for user in user_ids if FIRST <= user <= LAST)
