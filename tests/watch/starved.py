"""How long processes of this machine have had no core: what a second try of a test that looks at
a clock depends on.

What it is not: a reason to believe a test that has failed twice.
"""

from __future__ import annotations

from pathlib import Path


def starved() -> float:
    """Seconds since the machine began in which some process could have run and had no core; 0
    where nobody counts.
    """
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0].split()
        return int(next(word for word in some if word.startswith("total="))[6:]) / 1e6
    except (OSError, ValueError, IndexError, StopIteration):
        return 0.0
