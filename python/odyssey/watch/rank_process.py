"""One rank on this machine, as the watcher sees it: its slot, its process, its stacks; and what
can be done to it. The standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Sequence

from ..base import slot
from ..base.proc import SHARED, mapped, stat
from .diagnosis import WINDOW, Seen

STACKS_LIMIT = 256 << 10  # bytes of one rank's stacks
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

#: What a rank's slot says that is shown as it is.
_OF_SLOT = [
    name
    for name in Seen._fields
    if hasattr(slot.StatusSlot, name) and name not in ("rank", "pid", "times")
]


def _signs(of: slot.StatusSlot) -> tuple[int, ...]:
    """Returns what differs between two looks at a rank that goes on; a call's number
    (`slot.note_short_call`) counts nothing.
    """
    return of.progress, of.waiting, of.call, of.call_group


def _rise(numbers: Sequence[tuple[float, float]]) -> float:
    """By how much a number rises per second, of (when, number); 0 as long as that is not known."""
    (a, first), (b, latest) = (numbers[0], numbers[-1]) if numbers else ((0, 0), (0, 0))
    return (latest - first) / (b - a) if b > a else 0.0


class WatchedRank:
    """A rank of this machine; `handle` and `slot_file` as `attach` gives them. alive: its
    process is there. files: in shared memory, that MPI made and would leave behind; name ->
    inode.
    """

    def __init__(self, rank: int, pid: int, handle: int, slot_file: int) -> None:
        self.rank = rank
        self.pid = pid
        self.handle = handle
        self._slot = slot_file
        self.files: dict[str, int] = {}
        self._stacks = self._orders = -1
        self.last: slot.StatusSlot | None = None
        self._changed = time.monotonic()
        self._cpu: deque[tuple[float, float]] = deque(maxlen=8)  # (when, seconds used)
        self._samples: deque[tuple[float, int]] = deque(maxlen=12)
        # (when, step, own ns, of it in data)
        self._steps: deque[tuple[float, int, int, int]] = deque(maxlen=400)
        self._state = "?"
        self._rss = 0
        # its start time, which tells it from a later process of the same number
        self._start: bytes | None = None
        self._used = self._used_before = 0.0  # CPU seconds: so far, and at the last sign of life
        with contextlib.suppress(OSError):
            self.last = slot.read(self._slot) if self._slot >= 0 else None
        self.alive = True
        self._look_at_process(self._changed)
        self.alive = True  # an end that has been already is noticed as any other: at the first look
        self._used_before = self._used
        if self.last is not None:
            for name, flags in (("stacks", os.O_RDONLY), ("orders", os.O_WRONLY | os.O_NONBLOCK)):
                with contextlib.suppress(OSError, OverflowError):
                    number = getattr(self.last, name)
                    opened = (
                        os.open(f"/proc/{pid}/fd/{number}", flags | os.O_CLOEXEC)
                        if number > 2
                        else -1
                    )
                    setattr(self, f"_{name}", opened)

    def look(self, now: float, floor: float) -> Seen:
        """Returns what it does now.

        No time is counted from before `floor`, when the watcher itself did not run.
        """
        self._look_at_process(now)
        status = slot.read(self._slot) if self._slot >= 0 else None
        if status is not None:
            if self.last is None or _signs(status) != _signs(self.last):
                self._changed = now
                self._used_before = self._used
            self.last = status
        last = self.last
        if last is None:
            # Nothing is known of it but that it is gone; who waits for it waits in vain.
            idle = 0.0 if self.alive else round(now - max(self._changed, floor), 3)
            return Seen(self.rank, pid=self.pid, state=self._state, idle=idle)
        self._samples.append((now, last.samples))
        waited = now - max(last.waiting / 1e9, floor) if last.waiting else 0.0
        own_time, own_data_time = self._measure_own_time(now, last)
        if not last.waiting:
            last = last._replace(wait_text="", members="", missing="")
        return Seen(
            rank=self.rank,
            pid=self.pid,
            state=self._state,
            **{name: getattr(last, name) for name in _OF_SLOT},
            idle=round(now - max(self._changed, floor), 3),
            waited=round(max(waited, 0.0), 3),
            cpu=round(_rise(self._cpu), 3),
            busy=round((self._used - self._used_before) / max(now - self._changed, 1.0), 3),
            rss=self._rss,
            rate=round(max(_rise(self._samples), 0.0), 1),
            own=own_time,
            own_data=own_data_time,
            times=tuple(round(t / 1e9, 3) for t in self._times(last)),
        )

    def _look_at_process(self, now_s: float) -> None:
        """State, time used and memory out of /proc/PID/stat."""
        if not self.alive:
            self._state = "gone"
            return
        try:
            words = stat(self.pid)
            if self._start not in (None, words[19]):
                raise ProcessLookupError  # the number belongs to another process now
            self._start = words[19]
            if self.handle < 0 and words[0] in (b"Z", b"X"):
                raise ProcessLookupError  # it has ended; a handle would have said so
            self._state = words[0].decode()
            self._used = (int(words[11]) + int(words[12])) / _TICK
            self._cpu.append((now_s, self._used))
            self._rss = int(words[21]) * _PAGE
        except (OSError, IndexError, ValueError):
            # a handle tells its end itself
            self.alive = self.handle >= 0
            self._state = "gone"

    def code(self) -> int | None:
        """The wait status of a process that its parent has not collected yet; None where it is
        not to be had.
        """
        with contextlib.suppress(OSError, IndexError, ValueError):
            if (words := stat(self.pid))[0] in (b"Z", b"X"):
                return int(words[49])
        return None

    def map_files(self) -> None:
        """Looks which files of MPI in shared memory it has mapped."""
        self.files.update(
            (path, inode) for path, inode in mapped(self.pid).items() if path.startswith(SHARED)
        )

    def _times(self, last: slot.StatusSlot) -> list[int]:
        """ns in each phase up to now."""
        times = list(last.times)
        times[slot.WAIT if last.waiting else slot.CODES[last.phase]] += max(
            time.monotonic_ns() - last.since, 0
        )
        return times

    def _measure_own_time(self, now_s: float, last: slot.StatusSlot) -> tuple[float, float]:
        """Seconds per step before any wait, and of these in data, over the last WINDOW steps or
        the last second.
        """
        if not self._steps or self._steps[-1][1] != last.step:
            data = last.times[slot.CODES["data"]]
            self._steps.append((now_s, last.step, data + last.times[slot.CODES["compute"]], data))
        end = self._steps[-1]
        while (
            len(self._steps) > 2
            and self._steps[1][1] <= end[1] - WINDOW
            and self._steps[1][0] <= end[0] - 1
        ):
            self._steps.popleft()
        first = self._steps[0]
        steps = end[1] - first[1]
        if steps < WINDOW or end[0] - first[0] < 1 or now_s - end[0] > 60:
            return 0.0, 0.0
        return (end[2] - first[2]) / steps / 1e9, (end[3] - first[3]) / steps / 1e9

    def signal(self, number: int) -> bool:
        """Sends a signal, to this process and no later one of the same number."""
        if self.handle >= 0:
            try:
                signal.pidfd_send_signal(self.handle, number)
            except ProcessLookupError:
                return False
            except (OSError, AttributeError):
                pass  # a filter of system calls
            else:
                return True
        try:
            if self._start is None or stat(self.pid)[19] != self._start:
                return False
            os.kill(self.pid, number)
        except (OSError, IndexError):
            return False
        return True

    def ask_for_stacks(self) -> int:
        """Asks for its stacks; where the answer will begin, -1 if there can be none."""
        if self._stacks < 0 or not self.alive or self._state in ("T", "t"):
            return -1
        try:
            offset = os.fstat(self._stacks).st_size
        except OSError:
            return -1
        return offset if self.signal(slot.STACKS_SIGNAL) else -1

    def answer(self, offset: int) -> int:
        """Bytes that it has answered from there on; -1 if there can be no answer."""
        with contextlib.suppress(OSError):
            return os.fstat(self._stacks).st_size - offset if offset >= 0 else -1
        return -1

    def stacks(self, offset: int) -> str:
        """Returns what it has answered from there on; shown as it is, but for control
        characters.
        """
        if offset < 0:
            return ""
        with contextlib.suppress(OSError):
            text = os.pread(self._stacks, STACKS_LIMIT, offset).decode(errors="replace")
            return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
        return ""

    def order(self, code: int) -> bool:
        """Asks it to end all ranks with this exit code."""
        with contextlib.suppress(OSError):
            return self._orders >= 0 and os.write(self._orders, f"{code}\n".encode()) > 0
        return False
