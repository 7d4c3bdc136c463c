"""Passes of a model that are checks, and whose prints nobody wants to see.

`sys.stdout` is one for all threads of a process, and a thread may be a rank, so it is replaced by
a file that keeps back what the thread of a check prints, and passes on what others print.
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
    """A file that keeps back what threads in a check write."""

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
    """Keeps back what this thread prints in the block. If the block fails, it is printed then.

    Args:
        show: returns for an error of the block whether to print.
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
