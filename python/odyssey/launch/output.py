"""What ranks print, on its way through the launcher: into the attempt's log as it is, to the launcher's own output with
long lines cut, and without control characters where that is a terminal.

What it is not: a formatter. Bytes are passed on when they come, complete lines or not.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from typing import BinaryIO

LINE_LIMIT = 64 << 10  # bytes of one line that are shown
_CUT = b" ... (cut)\n"

# All of C0 but tab, line feed and carriage return, DEL, and C1 as UTF-8 writes it. What is left cannot move the cursor,
# set a title or answer a question that nobody asked.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")


class Pump:
    """Copies one pipe of the ranks to one stream of the launcher.

    Args:
        source: descriptor to read; it is made non-blocking. target: descriptor to write. log: file that gets everything
            unchanged, or None.
    """

    def __init__(self, source: int, target: int, log: BinaryIO | None) -> None:
        os.set_blocking(source, False)
        self.source, self.target, self.log = source, target, log
        self.terminal = os.isatty(target)
        self.closed = False
        self._shown = 0  # bytes of the current line
        self._pending = bytearray()

    def __call__(self) -> bool:
        """Passes on what is there and can be taken, without waiting; whether there was something."""
        if not self._pass_on():
            return False  # the target does not take more: the ranks wait as they would at a full pipe
        try:
            data = os.read(self.source, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return False
        if self.log is not None:
            with contextlib.suppress(OSError):  # a full disk does not end the training
                self.log.write(data)
                self.log.flush()
        self._pending += self.shown(data)
        self._pass_on()
        return True

    @property
    def full(self) -> bool:
        """Whether the target has not yet taken everything."""
        return bool(self._pending)

    @property
    def done(self) -> bool:
        """Whether everything that was printed is passed on."""
        return self.closed and self._pass_on()

    def shown(self, data: bytes) -> bytes:
        """What of `data` the launcher's own output gets."""
        out = []
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
            room = max(0, LINE_LIMIT - self._shown)
            ends = line.endswith(b"\n")
            if len(line) <= room:
                out.append(line)
            elif room:
                out.append(line[:room] + _CUT)
            self._shown = 0 if ends else self._shown + len(line)
        text = b"".join(out)
        return _CONTROL.sub(lambda m: b"".join(b"\\x%02x" % byte for byte in m[0]), text) if self.terminal else text

    def _pass_on(self) -> bool:
        """Writes what the target takes at once; whether nothing is left."""
        while self._pending:
            try:
                if not select.select([], [self.target], [], 0)[1]:
                    return False
                # A pipe that is writable has room for so much: a write of it does not wait.
                del self._pending[: os.write(self.target, self._pending[: select.PIPE_BUF])]
            except BlockingIOError:
                return False
            except (OSError, ValueError):  # the reader is gone: the training goes on, its log is complete
                self._pending.clear()
                self.shown = lambda data: b""
        return True
