"""Output of ranks on its way through the launcher: into the attempt's log as it is, to the
launcher's own output with long lines cut, and without control characters where that is a
terminal.

Where that output takes nothing for STALLED seconds (a stopped terminal, a pager), the ranks do not
wait for it: the log goes on, and what the reader misses is counted and said. Bytes are passed on
when they come, complete lines or not.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import time
from typing import Any, BinaryIO

from ..errors import printable

LINE_LIMIT = 64 << 10  # bytes of one line that are shown
BACKLOG = 1 << 20  # bytes that wait for a slow reader
# seconds without a byte taken after which a reader misses what does not fit into the backlog
STALLED = 2.0
_CUT = b" ... (cut)\n"

# All of C0 but tab, line feed and carriage return, DEL, and C1 as UTF-8 writes it. What is left
# cannot move the cursor, set a title or answer a question that nobody asked.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")


# What MPICH's mpirun prints about a rank that has failed: a box, and lines with places in its own
# source. The launcher reports both better. The reason why ssh can't be started stays.
_OPENING = b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
_BOX = re.compile(
    rb"^\n?" + re.escape(_OPENING) + rb".{,2000}?^Please see the FAQ page for debugging [a-z]+\n",
    re.MULTILINE | re.DOTALL,
)
_SOURCE = re.compile(
    rb"^\[(?:mpiexec|proxy)[^\]\n]*\] \w+ \([^()\n]*\.c:[0-9]+\): (?!execvp error)[^\n]*\n",
    re.MULTILINE,
)
_SOURCE_STARTS = (b"[mpiexec", b"[proxy")
_BOX_LIMIT = 4096  # bytes that are held back at most


class WithoutHydra:
    """Passes on what ranks print, piece by piece, without the reports of MPICH's mpirun.

    What may be the start of such a report is held back until more comes.
    """

    def __init__(self) -> None:
        self._held = b""  # starts at the start of a line
        self._inside_line = False  # what was passed on last has no end of line yet

    def __call__(self, data: bytes) -> bytes:
        """Returns what is to be passed on, now that these bytes have come."""
        text = self._held + data
        line_end = text.find(b"\n") + 1 if self._inside_line else 0
        if self._inside_line and not line_end:
            return text
        lines = _SOURCE.sub(b"", _BOX.sub(b"", text[line_end:]))
        starts = [0, *(match.end() for match in re.finditer(rb"\n", lines))]
        place = next((n for n in starts if self._may_begin(lines[n:])), len(lines))
        self._held = lines[place:]
        passed = text[:line_end] + lines[:place]
        if passed:
            self._inside_line = not passed.endswith(b"\n")
        return passed

    @staticmethod
    def _may_begin(text: bytes) -> bool:
        """Returns whether this text may be the start of a report."""
        if not 0 < len(text) < _BOX_LIMIT:
            return False
        box = text[text.startswith(b"\n") :]
        is_source = text.startswith(_SOURCE_STARTS) and b"\n" not in text
        return (
            _OPENING.startswith(box)
            or box.startswith(_OPENING)
            or is_source
            or any(start.startswith(text) for start in _SOURCE_STARTS)
        )

    def end(self) -> bytes:
        """Returns what is held back, when nothing more comes."""
        text = self._held
        self._held = b""
        return text


class LiveLine:
    """One line that is written again and again, at the end of what a terminal shows.

    It does nothing if the stream is no terminal, and never waits for one that is stopped.
    """

    def __init__(self, stream: Any) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(AttributeError, OSError, ValueError):
            if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
                self._descriptor = stream.fileno()
        self._is_shown = False

    def show(self, text: str) -> None:
        """Writes the line, cut to the terminal's width."""
        width = shutil.get_terminal_size().columns - 1
        self._is_shown = self._write(f"\r{printable(text)[:width]}\x1b[K") or self._is_shown

    def clear(self) -> None:
        """Removes the line, so that something else can be written."""
        if self._is_shown:
            self._is_shown = not self._write("\r\x1b[K")

    def _write(self, text: str) -> bool:
        """Writes if the terminal takes it at once, and returns whether it did."""
        if self._descriptor is None:
            return False
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [self._descriptor], [], 0)[1]:
                os.write(self._descriptor, text.encode(errors="replace"))
                return True
        return False


class Pump:
    """Copies one pipe of the ranks to one stream of the launcher. source: descriptor to read; it
    is made non-blocking. target: descriptor to write. log: file that gets everything
    unchanged, or None. words: that it listens for. without: leaves out what MPICH's mpirun says.
    """

    def __init__(
        self,
        source: int,
        target: int,
        log: BinaryIO | None,
        words: bytes = b"",
        without: WithoutHydra | None = None,
    ) -> None:
        os.set_blocking(source, False)
        self.source = source
        self.target = target
        self.log = log
        self.terminal = os.isatty(target)
        self.unshown = 0  # bytes that a reader who took nothing missed, and was not told of yet
        self._progress_time = time.monotonic()  # the target took something, or had nothing to take
        self._own_descriptor: int | None = None
        if self.terminal:  # opened anew, so that it does not block although the shell's does
            with contextlib.suppress(OSError):
                self._own_descriptor = os.open(
                    os.ttyname(target), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                )
                self.target = self._own_descriptor
        self.words = words
        self._without = without
        self._last = b""
        self.heard = False  # the words came
        self.closed = False
        self.problem = ""  # why the target takes no more; "" also where its reader is gone
        self._line_bytes = 0  # bytes of the current line
        self._pending = bytearray()

    def __call__(self) -> bool:
        """Passes on what is there and can be taken, without waiting; whether there was
        something.
        """
        self._pass_on()
        if not self.reading:
            # the target does not take more: the ranks wait as they would at a full pipe
            return False
        try:
            data = os.read(self.source, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.closed = True
            if self._without is not None:
                self._pending += self.shown(self._without.end())
                self._pass_on()
            return False
        if self.log is not None:
            with contextlib.suppress(OSError):  # a full disk does not end the training
                self.log.write(data)
                self.log.flush()
        if self.words and not self.heard:
            self.heard = self.words in self._last + data
            self._last = data[-len(self.words) :]
        text = self.shown(data if self._without is None else self._without(data))
        if self.unshown or (len(self._pending) + len(text) > BACKLOG and self._stalled):
            self.unshown += len(text)
        else:
            self._pending += text
        self._pass_on()
        return True

    @property
    def reading(self) -> bool:
        """Returns whether more of what ranks print is wanted now."""
        return not self.closed and (
            len(self._pending) < BACKLOG or (self.log is not None and self._stalled)
        )

    @property
    def _stalled(self) -> bool:
        return time.monotonic() - self._progress_time > STALLED

    def close(self) -> None:
        """Gives up what the target has not taken, and counts it."""
        self.unshown += len(self._pending)
        self._pending.clear()
        if self._own_descriptor is not None:
            os.close(self._own_descriptor)
            self._own_descriptor = None

    @property
    def inside_line(self) -> bool:
        """Returns whether what the target has taken ends within a line."""
        return bool(self._line_bytes or self._pending)

    @property
    def full(self) -> bool:
        """Returns whether the target has not yet taken everything."""
        return bool(self._pending)

    @property
    def done(self) -> bool:
        """Returns whether everything that was printed is passed on."""
        return self.closed and self._pass_on()

    def shown(self, data: bytes) -> bytes:
        """Returns what of `data` the launcher's own output gets."""
        out = []
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
            room = max(0, LINE_LIMIT - self._line_bytes)
            out.append(line if len(line) <= room else line[:room] + _CUT if room else b"")
            self._line_bytes = 0 if line.endswith(b"\n") else self._line_bytes + len(line)
        text = b"".join(out)
        return (
            _CONTROL.sub(lambda m: b"".join(b"\\x%02x" % byte for byte in m[0]), text)
            if self.terminal
            else text
        )

    def _pass_on(self) -> bool:
        """Writes what the target takes at once; whether nothing is left."""
        while self._pending or self.unshown:
            if not self._pending:  # it takes bytes again
                log_hint = f", see {getattr(self.log, 'name', 'the log')}"
                text = f"\nodyssey: {self.unshown} bytes of the ranks' output not shown{log_hint}\n"
                self._pending += text.encode(errors="replace")
                self.unshown = 0
            try:
                if not select.select([], [self.target], [], 0)[1]:
                    return False
                # A pipe that is writable has room for so much: a write of it does not wait.
                del self._pending[: os.write(self.target, self._pending[: select.PIPE_BUF])]
                self._progress_time = time.monotonic()
            except BlockingIOError:
                return False
            except (OSError, ValueError) as problem:  # the training goes on, its log is complete
                if not isinstance(problem, BrokenPipeError):
                    self.problem = getattr(problem, "strerror", None) or str(problem)
                self._pending.clear()
                self.unshown = 0
                self.shown = lambda data: b""
        self._progress_time = time.monotonic()
        return True
