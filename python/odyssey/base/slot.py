"""The status slot of this process: what it does now and what it waits for, in 1024 bytes that
another process can read.

`odyssey.comm` writes calls and waits into it, the trainer writes phases and steps. The watcher of
the node (watch/watcher.py) reads it through /proc/PID/fd/N. `publish` moves the slot into a file
without a name (usually a memfd), so nothing stays on a disk. Before that, and on systems without
such files, the slot is plain memory. So a writer never has to check whether there is a reader.

How a write and a read fit together. Each number is one aligned 8-byte store, which a reader sees
whole. A record of several numbers and texts needs a version, as in a seqlock:

- A writer makes the version odd (`_begin_write`), stores the record, and stores the even version
  last. There is one writer, so no lock is needed.
- A reader copies the slot and compares the version of its copy with the one that is there now.
  If the version is odd or has changed, the copy mixes two moments, and `read` tries again.
- A process that stops or dies in the middle of a write leaves an odd version. `read` then returns
  the copy with `whole` False.

The slot is not a log, because it holds only the present. It is not safe for several writers:
phases, steps and waits are those of the thread that trains. This module uses the standard library
only, because the watcher runs without this package's dependencies.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

SIZE = 1024
MAGIC = int.from_bytes(b"odyslot1", "little")

#: What a rank does. "wait" is never set: `begin_wait` and `end_wait` count the time between them
#: for it, and not for the phase around them.
PHASES = (
    "start",
    "compile",
    "data",
    "compute",
    "wait",
    "evaluate",
    "checkpoint",
    "callback",
    "end",
)
CODES = {name: code for code, name in enumerate(PHASES)}
WAIT = CODES["wait"]
# phases that may take long without any sign of life
SLOW = ("start", "compile", "checkpoint", "end")

# Indexes of the 8-byte numbers at the start of the slot. _SINCE is a CLOCK_MONOTONIC time in ns:
# the times of the phases (_TIMES) are counted up to it.
(
    _MAGIC,
    _VERSION,
    _RANK,
    _WORLD,
    _PID,
    _ATTEMPT,
    _STEP,
    _SAMPLES,
    _PROGRESS,
    _PHASE,
    _SINCE,
    _TIMES,
) = range(12)
(
    _CALL,
    _CALL_GROUP,
    _WAITING,
    _WAIT_SEQUENCE,
    _WAIT_GROUP,
    _ENDED,
    _CODE,
    _STACKS,
    _ORDERS,
    _LINK,
) = range(_TIMES + len(PHASES), _TIMES + len(PHASES) + 10)
_LINK_LENGTH = 4
_NUMBER_COUNT = 34
assert _LINK + _LINK_LENGTH <= _NUMBER_COUNT

# a real-time one: none of the named ones is free in every MPI
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7

# Texts, UTF-8, padded with zeros: their sizes in bytes, in the order in which they follow the
# numbers.
TEXT = 144  # as in comm/calls.py
_SIZES = {
    "host": 64,
    "call_text": TEXT,
    "wait_text": TEXT,
    "members": 64,
    "missing": 64,
    "note": 96,
    "end": 176,
}
_ENDS = tuple(itertools.accumulate(_SIZES.values(), initial=8 * _NUMBER_COUNT))
_PLACES = {
    _name: (_end - _size, _end)
    for (_name, _size), _end in zip(_SIZES.items(), _ENDS[1:], strict=True)
}
_CALL_TEXT_START, _CALL_TEXT_END = _PLACES["call_text"]
_WAIT_TEXT_START, _WAIT_TEXT_END = _PLACES["wait_text"]
_MISSING_START, _MISSING_END = _PLACES["missing"]
# `begin_wait` writes members and missing as one piece, right behind the text of the wait.
assert _ENDS[-1] == SIZE and _PLACES["members"] == (_WAIT_TEXT_END, _MISSING_START)
_EVERYONE = (0, "all")

_now_ns = time.monotonic_ns

_memory: Any = bytearray(SIZE)
_numbers = memoryview(_memory).cast("q")  # the same memory, as signed 8-byte numbers
_numbers[_MAGIC] = MAGIC
_numbers[_PHASE] = CODES["start"]
_numbers[_SINCE] = _now_ns()
_numbers[_RANK] = 0
_numbers[_WORLD] = 1
_numbers[_CALL] = -1
_version = 0  # the even version that ends the latest write
_descriptor = -1
# the text of the latest call, if `note_short_call` has written it; compared by identity
_short_call_text: Any = None
# a timeline (view/timeline.py): its methods are called when a phase starts and when a wait ends
listener: Any = None


@functools.lru_cache(512)
def _encode_field(text: str, name: str) -> bytes:
    """Returns a text as the bytes of its field: padded with zeros, or cut with "..." at its end."""
    start, end = _PLACES[name]
    size = end - start
    data = text.encode(errors="replace")
    if len(data) > size:
        # decoding drops a character that the cut has split
        data = data[: size - 3].decode(errors="ignore").encode() + b"..."
    return data.ljust(size, b"\0")


def _begin_write() -> None:
    """Makes the version odd, so that readers reject what they copy from now on.

    The caller stores its record and then `_numbers[_VERSION] = _version`. That store comes last,
    because the even version promises readers that the record is complete. Writes may nest: a
    second call leaves the version odd, and the last store of `_version` ends both.
    """
    global _version
    _version += 2
    _numbers[_VERSION] = _version - 1


def phase(name: str) -> str:
    """Starts the phase `name`, one of PHASES, and returns the name of the phase before it.

    The time since the last change is added to the phase before.
    """
    numbers = _numbers  # a local name: faster than a global one in functions of every step
    now_ns = _now_ns()
    code = CODES[name]
    previous_code = numbers[_PHASE]
    _begin_write()
    numbers[_TIMES + previous_code] += now_ns - numbers[_SINCE]
    numbers[_SINCE] = now_ns
    numbers[_PHASE] = code
    numbers[_PROGRESS] += 1
    numbers[_VERSION] = _version
    if listener is not None:
        listener.phase(name, now_ns)
    return PHASES[previous_code]


class span:
    """A context that records its block as a span of the timeline, on the track of its thread.

    It does nothing if no timeline is recorded when the block starts. The slot itself does not
    change.
    """

    __slots__ = ("_begin_ns", "_name", "_timeline")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._timeline = listener  # the one at the start, even if it is removed meanwhile
        if self._timeline is not None:
            self._begin_ns = _now_ns()

    def __exit__(self, *problem: object) -> None:
        if self._timeline is None:
            return
        thread = threading.current_thread()
        track = "main" if thread is threading.main_thread() else thread.name
        self._timeline.span(track, self._name, self._begin_ns, _now_ns())


def step(number: int, samples: int = 0) -> None:
    """Notes that step `number` is complete and had `samples` samples on this rank.

    `number` is the count of steps so far.
    """
    numbers = _numbers
    _begin_write()
    numbers[_STEP] = number
    numbers[_SAMPLES] += samples
    numbers[_PROGRESS] += 1
    numbers[_VERSION] = _version


def note_call(sequence: int, text: str, group: tuple[int, str] = _EVERYONE) -> None:
    """Notes that a collective call was started.

    sequence: its number in its group.
    text: what it is, with file and line, as `Header.text`.
    group: as in `begin_wait`.
    """
    global _short_call_text
    numbers = _numbers
    _short_call_text = None  # its text is overwritten here
    _begin_write()
    numbers[_CALL] = sequence
    numbers[_CALL_GROUP] = group[0]
    _memory[_CALL_TEXT_START:_CALL_TEXT_END] = _encode_field(text, "call_text")
    numbers[_PROGRESS] += 1
    numbers[_VERSION] = _version


def begin_wait(sequence: int, text: str, group: tuple[int, str] = _EVERYONE) -> None:
    """Notes that this process waits from now on, until `end_wait`.

    A second call without `end_wait` replaces the first wait.

    sequence: the number of the collective call in its group; -1 for a message.
    text: what it is, with file and line, as `Header.text`.
    group: (a number that is the same on all members, the members as `format_ranks` writes them).
    """
    group_number, members = group
    numbers = _numbers
    now_ns = _now_ns()
    _begin_write()
    if not numbers[_WAITING]:
        numbers[_TIMES + numbers[_PHASE]] += now_ns - numbers[_SINCE]
        numbers[_SINCE] = now_ns
    numbers[_WAITING] = now_ns
    numbers[_WAIT_SEQUENCE] = sequence
    numbers[_WAIT_GROUP] = group_number
    _memory[_WAIT_TEXT_START:_WAIT_TEXT_END] = _encode_field(text, "wait_text")
    _memory[_WAIT_TEXT_END:_MISSING_END] = _encode_members(members)
    numbers[_VERSION] = _version


def end_wait() -> None:
    """Ends the wait, successful or not, and adds its time to "wait".

    Does nothing if this process does not wait.
    """
    numbers = _numbers
    if not numbers[_WAITING]:
        return
    now_ns = _now_ns()
    if listener is not None:
        wait_text = _memory[_WAIT_TEXT_START:_WAIT_TEXT_END].rstrip(b"\0")
        listener.waited(wait_text.decode(errors="replace"), numbers[_WAITING], now_ns)
    _begin_write()
    numbers[_TIMES + WAIT] += now_ns - numbers[_SINCE]
    numbers[_SINCE] = now_ns
    numbers[_WAITING] = 0
    numbers[_PROGRESS] += 1
    numbers[_VERSION] = _version


def note_missing_ranks(ranks: Sequence[int]) -> None:
    """Notes the world ranks that this process waits for, as far as it can tell.

    A waiting process calls this now and then.
    """
    _write_text("missing", format_ranks(ranks))


def count_wait(nanoseconds: int) -> None:
    """Moves `nanoseconds` from the time of the present phase to "wait".

    Calls that are too short for `begin_wait` and `end_wait` use it once they are over.
    """
    numbers = _numbers
    # Each sum is one aligned store, and a reader may see one without the other: no version.
    numbers[_TIMES + numbers[_PHASE]] -= nanoseconds
    numbers[_TIMES + WAIT] += nanoseconds
    if listener is not None:
        now_ns = _now_ns()
        listener.waited("a short call", now_ns - nanoseconds, now_ns)


def busy_nanoseconds() -> int:
    """Returns the nanoseconds that this process has spent on start-up, reading data and computing.

    Times of waiting are not included.
    """
    numbers = _numbers
    busy_codes = [CODES[name] for name in ("start", "data", "compute", "callback")]
    total_ns = sum(numbers[_TIMES + code] for code in busy_codes)
    if numbers[_PHASE] in busy_codes and not numbers[_WAITING]:
        total_ns += _now_ns() - numbers[_SINCE]  # the present phase, which is not added up yet
    return total_ns


def note_short_call(sequence: int, group: int, text: str) -> None:
    """Notes a collective call as `note_call` does, at a lower cost, for the shortest calls.

    The text is written only if it is another object than in the call before. A repeated call
    stores one number, which needs no version, and does not count as progress.
    """
    global _short_call_text
    _numbers[_CALL] = sequence
    if text is not _short_call_text:
        _short_call_text = text
        _numbers[_CALL_GROUP] = group
        _write_text("call_text", text)


def note_slow_link(rank: int, size: int, ns: int, times: int) -> None:
    """Notes that data from a rank on another machine come slowly.

    Of late, `size` bytes from `rank` took `ns` nanoseconds, which is `times` times as long as from
    other ranks. All four are 0 if no link is slow.
    """
    _begin_write()
    _numbers[_LINK] = rank
    _numbers[_LINK + 1] = size
    _numbers[_LINK + 2] = ns
    _numbers[_LINK + 3] = times
    _numbers[_VERSION] = _version


def note(text: str) -> None:
    """Notes what this rank is busy with: a tensor, a file. It counts as a sign of life."""
    _write_text("note", text)
    _numbers[_PROGRESS] += 1


def note_end(code: int, line: str = "") -> None:
    """Notes that this process ends, with an exit code and a reason.

    Only the first call has an effect, because later ends are consequences of the first.
    """
    numbers = _numbers
    if numbers[_ENDED]:
        return
    _begin_write()
    numbers[_CODE] = code
    numbers[_ENDED] = 1
    numbers[_PROGRESS] += 1
    _write_text("end", line)  # stores the even version, also for the numbers above


def _write_text(name: str, text: str) -> None:
    """Writes one text field, and completes the write that is under way, if there is one."""
    start, end = _PLACES[name]
    _begin_write()
    _memory[start:end] = _encode_field(text, name)
    _numbers[_VERSION] = _version


@functools.lru_cache(512)
def _encode_members(members: str) -> bytes:
    """Returns the bytes of the members of a group, followed by an empty list of missing ranks."""
    return _encode_field(members, "members") + _encode_field("", "missing")


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks as short text, such as "0-3,8"; "" for no ranks.

    A list that is too long for a slot is cut, and ends with "?".
    """
    words = []
    # neighbours have the same difference between rank and index
    for _, group in itertools.groupby(
        enumerate(sorted(set(ranks))), lambda pair: pair[1] - pair[0]
    ):
        run = [rank for _, rank in group]
        words.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    text = ",".join(words)
    return text if len(text) < 60 else f"{text[:60].rpartition(',')[0]},?"


def parse_ranks(text: str, size: int) -> list[int] | None:
    """Returns the ranks in a text of `format_ranks`, in a world of `size` ranks.

    Returns None if the list was cut, or if the text is not such a list. Any text will do.
    """
    if text == "all":
        return list(range(size))
    ranks: list[int] = []
    for word in text.split(",") if text else ():
        first, _, last = word.partition("-")
        last = last or first
        # isdigit also accepts digits of other scripts
        is_number_pair = f"{first}{last}".isascii() and first.isdigit() and last.isdigit()
        # the limit of the length comes before int(), which is slow for long texts
        if not (is_number_pair and len(word) < 14 and int(first) <= int(last) < size):
            return None
        ranks.extend(range(int(first), int(last) + 1))
    return ranks


def describe(rank: int, world: int, attempt: int = 0) -> None:
    """Notes who this process is: rank, world size, attempt, PID and host."""
    _begin_write()
    _numbers[_RANK] = rank
    _numbers[_WORLD] = world
    _numbers[_PID] = os.getpid()
    _numbers[_ATTEMPT] = attempt
    _write_text("host", os.uname().nodename)  # stores the even version, also for the numbers above


def note_descriptors(stacks: int, orders: int) -> None:
    """Notes two descriptors of this process that the watcher opens.

    stacks: the file into which this process dumps its stacks.
    orders: the pipe from which it reads orders.
    """
    _begin_write()
    _numbers[_STACKS] = stacks
    _numbers[_ORDERS] = orders
    _numbers[_VERSION] = _version


def publish() -> int:
    """Moves the slot into a file that other processes of this user can open.

    Returns its descriptor in this process, or -1 if there is no such file. A second call returns
    the same descriptor.
    """
    global _memory, _numbers, _descriptor
    # After a fork the child has -1 here; the PID covers a fork that ran no handler.
    if _descriptor >= 0 and _numbers[_PID] == os.getpid():
        return _descriptor
    if not os.path.isdir("/proc/self/fd"):
        return -1  # nobody could open it
    try:
        descriptor = open_nameless_file("odyssey-slot")
        # there must be room for it: a store into a file on a full disk is a SIGBUS
        os.write(descriptor, bytes(SIZE))
        memory = mmap.mmap(descriptor, SIZE)
    except OSError:
        return -1
    memory[:] = bytes(_memory[:])
    _memory = memory
    _descriptor = descriptor
    _numbers = memoryview(memory).cast("q")
    return descriptor


def open_nameless_file(name: str) -> int:
    """Returns the descriptor of a new file without a name, in memory if possible.

    An old Python or a filter of system calls can prevent that. Then it is a temporary file that
    only this user can open and that is unlinked immediately. `name` is for people who list the
    descriptors.

    Raises:
        OSError: no such file can be created.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create(name)
    import tempfile

    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
    os.unlink(path)
    return descriptor


def _detach_after_fork() -> None:
    """Gives a forked child plain memory again, because it must not write into its parent's slot."""
    global _memory, _numbers, _descriptor
    _memory = bytearray(_memory[:])
    _numbers = memoryview(_memory).cast("q")
    _descriptor = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_after_fork)


class StatusSlot(NamedTuple):
    """The contents of a slot, in the order in which they are stored.

    Times are CLOCK_MONOTONIC of its machine in ns.

    waiting: the time at which the present wait started; 0 if the rank does not wait.
    times: ns in each of PHASES, up to `since`.
    call: the number of the latest collective call, in group `call_group`; -1 if there was none.
    link: the four numbers of `note_slow_link`.
    whole: True if all contents are of one moment.
    """

    rank: int
    world: int
    pid: int
    attempt: int
    step: int
    samples: int
    progress: int
    phase: str
    since: int
    times: tuple[int, ...]
    call: int
    call_group: int
    waiting: int
    wait_sequence: int
    wait_group: int
    ended: bool
    code: int
    stacks: int
    orders: int
    link: tuple[int, ...]
    host: str
    call_text: str
    wait_text: str
    members: str
    missing: str
    note: str
    end: str
    whole: bool

    @property
    def doing(self) -> str:
        """The phase, or "wait"."""
        return "wait" if self.waiting else self.phase


def parse(data: bytes) -> StatusSlot | None:
    """Returns the slot in these bytes, or None if they are not a slot. Any bytes will do."""
    if len(data) != SIZE:
        return None
    numbers = memoryview(data).cast("q")
    if numbers[_MAGIC] != MAGIC or not 0 <= numbers[_PHASE] < len(PHASES):
        return None
    if not 0 <= numbers[_RANK] < numbers[_WORLD] < 1 << 24:
        return None
    texts = {
        name: _printable_text(data[start:end].rstrip(b"\0"))
        for name, (start, end) in _PLACES.items()
    }
    return StatusSlot(
        *numbers[_RANK : _PROGRESS + 1],
        PHASES[numbers[_PHASE]],
        numbers[_SINCE],
        tuple(numbers[_TIMES:_CALL]),
        *numbers[_CALL : _WAIT_GROUP + 1],
        bool(numbers[_ENDED]),
        *numbers[_CODE : _ORDERS + 1],
        tuple(numbers[_LINK : _LINK + _LINK_LENGTH]),
        whole=not numbers[_VERSION] & 1,
        **texts,
    )


def _printable_text(data: bytes) -> str:
    """Returns bytes as text for a terminal, with "?" for each character that controls it."""
    text = data.decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def read(descriptor: int, tries: int = 5) -> StatusSlot | None:
    """Returns the slot in an open file; None if the file does not hold one.

    Repeats while the owner writes. After `tries` attempts it returns the last copy, with `whole`
    False.
    """
    status = None
    for _ in range(tries):
        data = os.pread(descriptor, SIZE, 0)
        status = parse(data)
        if status is None:
            return None
        # The copy is of one moment if the version, in the first 16 bytes, is still the same.
        if status.whole and os.pread(descriptor, 16, 0) == data[:16]:
            return status
        time.sleep(1e-4)
    return status._replace(whole=False) if status else None


def read_current() -> StatusSlot:
    """Returns the slot of this process."""
    status = parse(bytes(_memory[:]))
    assert status is not None
    return status
