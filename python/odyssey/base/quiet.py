"""Hides what a model prints while odyssey only checks it.

All threads of a process share `sys.stdout`, and each thread may be a rank. A filter replaces
`sys.stdout` during a check. It holds the output of threads that check, and passes on all other
output.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Checking(threading.local):
    prints: list[str] | None = None  # of this thread; None if it is not in a check


_checking = _Checking()
_lock = threading.Lock()
_checks = 0  # of all threads


class _Filter:
    """Wraps `sys.stdout`, and holds the output of threads that are checking a model."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, text: str) -> int:
        if _checking.prints is None:
            return self.file.write(text)
        _checking.prints.append(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextlib.contextmanager
def without_prints(show: Callable[[BaseException], bool] = lambda error: True) -> Iterator[None]:
    """Hides what this thread prints in the block, and prints it if the block raises an error.

    Args:
        show: takes the error, and returns True if the hidden output should be printed.
    """
    global _checks
    outer_prints = _checking.prints
    _checking.prints = prints = []
    with _lock:
        _checks += 1
        if not isinstance(sys.stdout, _Filter):
            sys.stdout = _Filter(sys.stdout)
    try:
        yield
    except BaseException as error:
        if prints and show(error):
            _checking.prints = outer_prints
            sys.stdout.write("".join(prints))
        raise
    finally:
        _checking.prints = outer_prints
        with _lock:
            _checks -= 1
            if not _checks and isinstance(sys.stdout, _Filter):
                sys.stdout = sys.stdout.file
