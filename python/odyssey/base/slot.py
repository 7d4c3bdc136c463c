"""The status slot of this process: where it is and what it waits for, in 1024 bytes that another
process can read.

Written by `odyssey.comm` (calls, waits) and by the trainer (phases, steps); read by the watcher of
the node (run/watcher.py) out of /proc/PID/fd/N. `publish` puts it into a file without a name (a
memfd, as a rule), of which nothing is left behind; before that, and where there is none, it is
plain memory, so that writing never asks.

Numbers are aligned 8-byte stores. A version, odd while something is written, says to a reader
whether what it has copied is of one moment; who stops or ends in the middle of writing leaves an
odd version, and `read` says so.

What it is not: a log (only the present is here), or safe for several writers: phases, steps and
waits are those of the thread that trains. The standard library only: the watcher runs without this
package's dependencies.
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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

SIZE = 1024
MAGIC = int.from_bytes(b"odyslot1", "little")

#: What a rank does. "wait" is never set: it is what `enter` and `leave` take off the phase around
#: them.
PHASES = ("start", "compile", "data", "compute", "wait", "evaluate", "checkpoint", "end")
CODES = {name: code for code, name in enumerate(PHASES)}
WAIT = CODES["wait"]
# phases that may take long without any sign of life
SLOW = ("start", "compile", "checkpoint", "end")

# Numbers of 8 bytes, from the start. _SINCE is CLOCK_MONOTONIC ns: how far the times of phases are
# counted.
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
_NUMBERS = 34
assert _LINK + 4 <= _NUMBERS

# a real-time one: none of the named ones is free in every MPI
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7

# Texts, UTF-8, padded with zeros.
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
_ENDS = tuple(itertools.accumulate(_SIZES.values(), initial=8 * _NUMBERS))
_PLACES = {
    _name: (_at - _size, _at) for (_name, _size), _at in zip(_SIZES.items(), _ENDS[1:], strict=True)
}
_CALL_AT, _CALL_TO = _PLACES["call_text"]
_WAIT_AT, _WAIT_TO = _PLACES["wait_text"]
_MISSING_TO = _PLACES["missing"][1]
assert _ENDS[-1] == SIZE and _PLACES["members"] == (_WAIT_TO, _PLACES["missing"][0])
_EVERYONE = (0, "all")

_now_ns = time.monotonic_ns

_memory: Any = bytearray(SIZE)
_q = memoryview(_memory).cast("q")
_q[_MAGIC] = MAGIC
_q[_PHASE] = CODES["start"]
_q[_SINCE] = _now_ns()
_q[_RANK] = 0
_q[_WORLD] = 1
_q[_CALL] = -1
_version = 0
_descriptor = -1
_quick: Any = None  # the text of the latest call, if `quick` has written it
listener: Any = None  # a timeline (view/timeline.py): it hears of phases and waits when they end


@functools.lru_cache(512)
def _fitted(text: str, name: str) -> bytes:
    """A text as the bytes of its place, shortened at its end if need be."""
    a, b = _PLACES[name]
    data = text.encode(errors="replace")
    if len(data) > b - a:
        data = data[: b - a - 3].decode(errors="ignore").encode() + b"..."
    return data.ljust(b - a, b"\0")


def _open() -> None:
    """A write begins: the version is odd until `_close`."""
    global _version
    _version += 2
    _q[_VERSION] = _version - 1


def phase(name: str) -> str:
    """This process now does `name`, one of PHASES; returns what it did before."""
    q = _q
    now_ns = _now_ns()
    code = CODES[name]
    previous_code = q[_PHASE]
    _open()
    q[_TIMES + previous_code] += now_ns - q[_SINCE]
    q[_SINCE] = now_ns
    q[_PHASE] = code
    q[_PROGRESS] += 1
    q[_VERSION] = _version
    if listener is not None:
        listener.phase(name, now_ns)
    return PHASES[previous_code]


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """For timelines: what is done within it, on a track of its thread."""
    if listener is None:
        yield
        return
    timeline = listener
    begin_ns = _now_ns()
    thread = threading.current_thread()
    try:
        yield
    finally:
        timeline.span(
            "main" if thread is threading.main_thread() else thread.name, name, begin_ns, _now_ns()
        )


def step(number: int, samples: int = 0) -> None:
    """Step `number` (the count of steps so far) is complete; it had so many samples on this
    rank.
    """
    q = _q
    _open()
    q[_STEP] = number
    q[_SAMPLES] += samples
    q[_PROGRESS] += 1
    q[_VERSION] = _version


def call(sequence: int, text: str, group: tuple[int, str] = _EVERYONE) -> None:
    """A collective call was started: its number in its group, what it is and where it stands in
    the program.
    """
    global _quick
    q = _q
    _quick = None
    _open()
    q[_CALL] = sequence
    q[_CALL_GROUP] = group[0]
    _memory[_CALL_AT:_CALL_TO] = _fitted(text, "call_text")
    q[_PROGRESS] += 1
    q[_VERSION] = _version


def enter(sequence: int, text: str, group: tuple[int, str] = _EVERYONE) -> None:
    """This process waits from now on, in a collective call (its number in its group) or for a
    message (-1).

    text: what it is, with file and line, as `Header.text`.
    group: (a number that is the same on all members, who they are as `ranges` writes it).
    """
    q = _q
    now_ns = _now_ns()
    _open()
    if not q[_WAITING]:
        q[_TIMES + q[_PHASE]] += now_ns - q[_SINCE]
        q[_SINCE] = now_ns
    q[_WAITING] = now_ns
    q[_WAIT_SEQUENCE] = sequence
    q[_WAIT_GROUP] = group[0]
    _memory[_WAIT_AT:_WAIT_TO] = _fitted(text, "wait_text")
    _memory[_WAIT_TO:_MISSING_TO] = _waited_for(group[1])
    q[_VERSION] = _version


def leave() -> None:
    """Ends the wait, successfully or not."""
    q = _q
    if not q[_WAITING]:
        return
    now_ns = _now_ns()
    if listener is not None:
        listener.waited(
            _memory[_WAIT_AT:_WAIT_TO].rstrip(b"\0").decode(errors="replace"), q[_WAITING], now_ns
        )
    _open()
    q[_TIMES + WAIT] += now_ns - q[_SINCE]
    q[_SINCE] = now_ns
    q[_WAITING] = 0
    q[_PROGRESS] += 1
    q[_VERSION] = _version


def missing(ranks: Sequence[int]) -> None:
    """World ranks that this process waits for, as far as it can tell; said now and then while it
    waits.
    """
    _text("missing", ranges(ranks))


def waited(nanoseconds: int) -> None:
    """So much of the time of this phase went by waiting, in a call that is too short for `enter`
    and `leave`.
    """
    q = _q
    q[_TIMES + q[_PHASE]] -= nanoseconds
    q[_TIMES + WAIT] += nanoseconds
    if listener is not None:
        now_ns = _now_ns()
        listener.waited("a short call", now_ns - nanoseconds, now_ns)


def busy() -> int:
    """Nanoseconds so far in which this process read data and computed, without those in which it
    waited.
    """
    q = _q
    working = [CODES[name] for name in ("start", "data", "compute")]
    elapsed_ns = _now_ns() - q[_SINCE] if q[_PHASE] in working and not q[_WAITING] else 0
    return elapsed_ns + sum(q[_TIMES + code] for code in working)


def quick(sequence: int, group: int, text: str) -> None:
    """Does what `call` does, for the shortest calls: rewrites the text only where it is another
    object than before.
    """
    global _quick
    _q[_CALL] = sequence
    if text is not _quick:
        _quick = text
        _q[_CALL_GROUP] = group
        _text("call_text", text)


def link(rank: int, size: int, ns: int, times: int) -> None:
    """Data of a rank on another machine are slow: so many bytes of late took so long, so many
    times as long as those of others. times = 0: none are.
    """
    _open()
    _q[_LINK] = rank
    _q[_LINK + 1] = size
    _q[_LINK + 2] = ns
    _q[_LINK + 3] = times
    _q[_VERSION] = _version


def note(text: str) -> None:
    """Notes what this rank is busy with: a tensor, a file. It counts as a sign of life."""
    _text("note", text)
    _q[_PROGRESS] += 1


def ended(code: int, line: str = "") -> None:
    """This process ends, with an exit code and for a reason; the first reason stays."""
    q = _q
    if q[_ENDED]:
        return
    _open()
    q[_CODE] = code
    q[_ENDED] = 1
    q[_PROGRESS] += 1
    _text("end", line)


def _text(name: str, text: str) -> None:
    a, b = _PLACES[name]
    _open()
    _memory[a:b] = _fitted(text, name)
    _q[_VERSION] = _version


@functools.lru_cache(512)
def _waited_for(members: str) -> bytes:
    """The members of a group, and, after them, that nobody is known to be missing yet."""
    return _fitted(members, "members") + _fitted("", "missing")


def ranges(ranks: Sequence[int]) -> str:
    """Ranks as short text: "0-3,8".

    "" for none; "?" in the end where they are too many for a slot.
    """
    words = []
    for _, group in itertools.groupby(
        enumerate(sorted(set(ranks))), lambda pair: pair[1] - pair[0]
    ):
        run = [rank for _, rank in group]
        words.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    text = ",".join(words)
    return text if len(text) < 60 else f"{text[:60].rpartition(',')[0]},?"


def ranks_of(text: str, size: int) -> list[int] | None:
    """The ranks of `ranges`, in a world of `size`; None if they are not all known, or if it is
    no such text.
    """
    if text == "all":
        return list(range(size))
    ranks: list[int] = []
    for word in text.split(",") if text else ():
        a, _, b = word.partition("-")
        b = b or a
        if not (
            f"{a}{b}".isascii()
            and a.isdigit()
            and b.isdigit()
            and len(word) < 14
            and int(a) <= int(b) < size
        ):
            return None
        ranks.extend(range(int(a), int(b) + 1))
    return ranks


def describe(rank: int, world: int, attempt: int = 0) -> None:
    _open()
    _q[_RANK] = rank
    _q[_WORLD] = world
    _q[_PID] = os.getpid()
    _q[_ATTEMPT] = attempt
    _text("host", os.uname().nodename)


def arm(stacks: int, orders: int) -> None:
    """Descriptors of this process: the file that its stacks are dumped into, the pipe that it
    takes orders from.
    """
    _open()
    _q[_STACKS] = stacks
    _q[_ORDERS] = orders
    _q[_VERSION] = _version


def publish() -> int:
    """Puts the slot where other processes of this user can open it; its descriptor here, or -1
    where there is none.
    """
    global _memory, _q, _descriptor
    if _descriptor >= 0 and _q[_PID] == os.getpid():
        return _descriptor
    if not os.path.isdir("/proc/self/fd"):
        return -1  # nobody could open it
    try:
        descriptor = nameless("odyssey-slot")
        # there must be room for it: a store into a file on a full disk is a SIGBUS
        os.write(descriptor, bytes(SIZE))
        memory = mmap.mmap(descriptor, SIZE)
    except OSError:
        return -1
    memory[:] = bytes(_memory[:])
    _memory = memory
    _descriptor = descriptor
    _q = memoryview(memory).cast("q")
    return descriptor


def nameless(name: str) -> int:
    """A descriptor of a file without a name: in memory, or, where an old Python or a filter of
    system calls is against that, one of this user alone that was unlinked at once. Raises
    OSError: there is none to be had.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create(name)
    import tempfile

    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
    os.unlink(path)
    return descriptor


def _forked() -> None:
    """A child must not write into its parent's slot."""
    global _memory, _q, _descriptor
    _memory = bytearray(_memory[:])
    _q = memoryview(_memory).cast("q")
    _descriptor = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class StatusSlot(NamedTuple):
    """Contents of a slot, in the order in which they stand there.

    Times are CLOCK_MONOTONIC of its machine in ns; `waiting` is 0 for a rank that does not wait.

    `times`: ns in each of PHASES, up to `since`. `whole`: it is of one moment. `link`: as `link()`
    was told. `call` numbers the latest collective call that it has started, in group `call_group`;
    -1: none.
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
    """A slot from its bytes, or None if they are none. Any bytes will do."""
    if len(data) != SIZE:
        return None
    q = memoryview(data).cast("q")
    if q[_MAGIC] != MAGIC or not 0 <= q[_PHASE] < len(PHASES):
        return None
    if not 0 <= q[_RANK] < q[_WORLD] < 1 << 24:
        return None
    texts = {
        name: "".join(
            c if c.isprintable() else "?" for c in data[a:b].rstrip(b"\0").decode(errors="replace")
        )
        for name, (a, b) in _PLACES.items()
    }
    return StatusSlot(
        *q[_RANK : _PROGRESS + 1],
        PHASES[q[_PHASE]],
        q[_SINCE],
        tuple(q[_TIMES:_CALL]),
        *q[_CALL : _WAIT_GROUP + 1],
        bool(q[_ENDED]),
        *q[_CODE : _ORDERS + 1],
        tuple(q[_LINK : _LINK + 4]),
        whole=not q[_VERSION] & 1,
        **texts,
    )


def read(descriptor: int, tries: int = 5) -> StatusSlot | None:
    """The slot in an open file; None if it is none.

    After some tries as it is, with `whole` False.
    """
    status = None
    for _ in range(tries):
        data = os.pread(descriptor, SIZE, 0)
        status = parse(data)
        if status is None:
            return None
        if status.whole and os.pread(descriptor, 16, 0) == data[:16]:  # the version has stayed
            return status
        time.sleep(1e-4)
    return status._replace(whole=False) if status else None


def mine() -> StatusSlot:
    status = parse(bytes(_memory[:]))
    assert status is not None
    return status
