"""For the programs that tests of this folder run as ranks: how long something took, and how much
of that a busy machine took from this thread; and files by which ranks tell each other that
they are done, when their communicator is broken.

What it is not: part of the tests' own process.
"""

from __future__ import annotations

import time
from pathlib import Path


def starved() -> float:
    """Seconds for which this thread could have run and had no core, since it began; 0 where the
    system does not say.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Stopwatch:
    """Started when it is made; as text "1.5 s (0.0 s without a core)"."""

    def __init__(self) -> None:
        self._begun, self._starved = time.monotonic(), starved()

    def __str__(self) -> str:
        return (
            f"{time.monotonic() - self._begun:.1f} s ({starved() - self._starved:.1f} s "
            "without a core)"
        )


#: What tests look for: seconds, and those without a core.
PATTERN = r"after (\d+\.\d) s \((\d+\.\d) s without a core\): "


def done(rank: int) -> None:
    """This rank has said what it had to say."""
    Path(f"done-{rank}").touch()


def wait_for(ranks: range, seconds: float = 60) -> None:
    """Until these ranks have."""
    until = time.monotonic() + seconds
    while not all(Path(f"done-{rank}").exists() for rank in ranks) and time.monotonic() < until:
        time.sleep(0.02)
