"""Writer of the watcher's output, in a thread of its own: files of a run, and words for people.

A disk that does not answer, or a terminal that nobody reads, must not keep it from telling other
machines that it is there.

A file is whole or not there, but not flushed to the disk: it is old a second later. The standard
library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base.files import FILE_MODE, make_directories, read_json, wait_until_read, write_whole
from ..errors import DataError

QUEUE = 64  # what waits to be written; more is left out


class Writer:
    """Does what it is given, one after the other, in a daemon thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._todo: dict[Any, Callable[[], Any]] = {}
        self._count = 0
        self._busy = False
        threading.Thread(target=self._work, name="odyssey writer", daemon=True).start()

    def put(self, act: Callable[[], Any], name: str = "") -> None:
        """Has this done. Of several of one name that wait only the latest is."""
        with self._condition:
            if not name and len(self._todo) >= QUEUE:
                return
            self._count += 1
            self._todo[name or self._count] = act
            self._condition.notify_all()

    def drain(self, seconds: float) -> bool:
        """Waits until all is done, but not for long; whether it is."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._todo and not self._busy, seconds)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._todo)
                act = self._todo.pop(next(iter(self._todo)))
                self._busy = True
            # of one thing that cannot be written; the next one may be
            with contextlib.suppress(Exception):
                act()
            with self._condition:
                self._busy = False
                self._condition.notify_all()


def say(text: str) -> None:
    """To stderr, and until the launcher has read it.

    Past sys.stderr, whose lock a blocked thread would keep.
    """
    data = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
        wait_until_read(2)


def write(path: str, text: str, mode: int = FILE_MODE) -> bool:
    """Writes a file, whole or not at all, and returns whether it could be written.

    mode: its permissions, less the umask.
    """
    with contextlib.suppress(OSError):
        make_directories(Path(path).absolute().parent)
        write_whole(
            Path(path), lambda file: file.write(text.encode(errors="replace")), mode, durable=False
        )
        return True
    return False


def renew(path: str, value: dict[str, Any], **identity: Any) -> None:
    """Writes as `write` does; on a full disk touches the old file instead, if it has `identity`:
    its age stays true.
    """
    if not write(path, json.dumps(value) + "\n") and is_of(path, **identity):
        with contextlib.suppress(OSError):
            os.utime(path)


def remove(path: str, **identity: Any) -> None:
    """Removes a file, if it has `identity`, and not of a later attempt."""
    if is_of(path, **identity):
        with contextlib.suppress(OSError):
            os.unlink(path)


def is_of(path: str, **identity: Any) -> bool:
    """Returns whether a JSON file has these values."""
    try:
        content = read_json(Path(path))
    except DataError:
        return False
    return isinstance(content, dict) and all(
        content.get(key) == value for key, value in identity.items()
    )
