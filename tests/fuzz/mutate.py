"""A small fuzzer: inputs made from good ones by seeded damage, given to a parser that may only
accept or refuse.

`fuzz(parse, seeds, count, seed)` gives the parser `count` inputs and returns `Statistics`. It fails
(`Finding`) on an exception that is not allowed, on an input that takes too long and on memory that
grows. The same arguments give the same inputs on any machine. What it is not: guided by coverage.
It knows the parsers' formats instead: `Spans` cuts a seed into the parts that its grammar has, and
replaces, repeats, removes, nests and moves those.
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from odyssey.errors import OdysseyError

BLOCK = 1000  # inputs of one random sequence; the unit in which work is shared out
LONGEST = 1 << 16  # bytes of an input
ENDLESS = 10  # seconds after which an input is given up

_BITS = (0, 7, 8, 15, 16, 24, 31, 32, 40, 53, 62, 63, 64, 128)
_EDGES = sorted(
    {(1 << bits) + more for bits in _BITS for more in (-1, 0, 1)}
    | {3, 10, 100, 255, 4096, 10**6, 10**9}
)
_ODD_NUMBERS = (
    "-0 00 0x10 1e999 -1e999 1e-999 nan inf -inf NaN Infinity 1.5 0.1 1_000 +1 .5 5. 1e5 １".split()
)
NUMBERS = (
    *(str(number).encode() for edge in _EDGES for number in (edge, -edge)),
    *(number.encode() for number in _ODD_NUMBERS),
    b"9" * 400,
    b"9" * 5000,
)
_COMMANDS = (
    "$(touch x)",
    "`touch x`",
    ";touch x",
    "|touch x",
    "&&touch x",
    "-oProxyCommand=touch x",
    "--",
    "-",
)
_PLACES = (
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "/",
    "~",
    "*",
    "a/../b",
    "a//b",
    "A" * 300,
    "A" * 5000,
)
_LETTERS = (
    "\0",
    "\n",
    "\r\n",
    "\t",
    " ",
    "\\",
    '"',
    "'",
    "`",
    "#",
    ":",
    ",",
    "=",
    "[",
    "]",
    "{",
    "}",
    "\x1b[2J",
    "\u202e",
    "é",
    "\u2028",
    "😀",
)
_JSON = ("{}", "[]", "null", "true", "false", "{0}", "%s%n%x", "\\u0000", "\\ud800")
WORDS = (
    *(word.encode() for word in ("", *_COMMANDS, *_PLACES, *_LETTERS, *_JSON)),
    # no UTF-8; the last is a byte order mark
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
)


class Finding(AssertionError):
    """What the parser did with an input that it may not do; `data` is the input."""

    def __init__(self, what: str, data: bytes) -> None:
        shown = data if len(data) <= 2000 else data[:2000] + b"..."
        super().__init__(f"{what}\ninput of {len(data)} bytes: {shown!r}")
        self.data = data


@dataclass
class Statistics:
    """What became of the inputs.

    `places`: lines of code that refused one; few of them mean a shallow fuzzer.
    """

    inputs: int = 0
    accepted: int = 0
    rejected: int = 0
    seconds: float = 0.0  # mutations included
    slowest: float = 0.0  # seconds
    growth_mb: float = 0.0  # of the resident memory, at most
    places: set[str] = field(default_factory=set)

    def add(self, other: Statistics) -> None:
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.rejected += other.rejected
        self.seconds += other.seconds
        self.slowest = max(self.slowest, other.slowest)
        self.growth_mb = max(self.growth_mb, other.growth_mb)
        self.places |= other.places

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "places": sorted(self.places)}


# -- what a grammar's parts are --------------------------------------------------------------------


class Spans:
    """Damage to the parts of a text.

    find: the parts of a seed, as (start, end).
    literals: texts to put in a part's place.
    joiner: what stands between two parts of a list.
    nest: what opens and closes a nesting, or None.
    """

    def __init__(
        self,
        find: Callable[[bytes], list[tuple[int, int]]],
        literals: Sequence[bytes] = NUMBERS + WORDS,
        joiner: bytes = b",",
        nest: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self.find, self.literals, self.joiner, self.nest = find, literals, joiner, nest
        self._parts: dict[bytes, list[tuple[int, int]]] = {}
        self._pool: list[bytes] = []

    def prepare(self, seeds: Sequence[bytes]) -> None:
        for seed in seeds:
            self._parts[seed] = self.find(seed)
            self._pool += [seed[a:b] for a, b in self._parts[seed]]

    def __call__(self, rng: Random, seed: bytes) -> bytes:
        parts = self._parts[seed]
        if not parts:
            return seed
        a, b = parts[int(rng.random() * len(parts))]
        part, way = seed[a:b], rng.random()
        if way < 0.4:
            part = _choice(rng, self.literals)
        elif way < 0.6:
            part = _choice(rng, self._pool)
        elif way < 0.7:
            part = b""
        elif way < 0.8:
            part = part + self.joiner + (part if rng.random() < 0.5 else _choice(rng, self._pool))
        elif way < 0.86 and self.nest:
            opening, closing = _choice(rng, self.nest)
            times = _choice(rng, (1, 2, 8, 30, 33, 500))
            part = opening * times + part + closing * times
        elif way < 0.9:
            part = self.joiner.join([part] * _choice(rng, (3, 9, 65, 300)))
        else:  # two parts change places
            c, d = parts[int(rng.random() * len(parts))]
            if b <= c:
                return seed[:a] + seed[c:d] + seed[b:c] + part + seed[d:]
            part = part[: int(rng.random() * (len(part) + 1))]
        return seed[:a] + part + seed[b:]


_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+')


def json_parts(text: bytes) -> list[tuple[int, int]]:
    """Keys, values and members (key and value) of JSON."""
    parts: list[tuple[int, int]] = []
    starts: list[int] = []  # of open lists and objects
    key: list[int | None] = []  # where the member of each open object that is being read starts
    tokens = [(m.start(), m.end()) for m in _JSON_TOKEN.finditer(text)]
    for at, (a, b) in enumerate(tokens):
        word = text[a:b]
        if word in b"[{":
            starts.append(a)
            key.append(None)
            continue
        if word in b":,":
            continue
        if word in b"]}":
            a = starts.pop()
            key.pop()
        elif at + 1 < len(tokens) and text[tokens[at + 1][0] : tokens[at + 1][1]] == b":":
            parts.append((a, b))
            key[-1] = a
            continue
        parts.append((a, b))
        if key and key[-1] is not None:
            parts.append((key[-1], b))
            key[-1] = None
    return parts


def json_spans() -> Spans:
    return Spans(
        json_parts, joiner=b",", nest=((b"[", b"]"), (b'{"a":', b"}")), literals=JSON_LITERALS
    )


JSON_LITERALS = (
    NUMBERS
    + WORDS
    + tuple(b'"' + word + b'"' for word in WORDS if b'"' not in word)
    + (b"[0]", b'{"":0}')
)


def line_parts(pattern: str) -> Callable[[bytes], list[tuple[int, int]]]:
    """Lines, and the groups of a pattern in them."""
    compiled = re.compile(pattern.encode(), re.M)

    def find(text: bytes) -> list[tuple[int, int]]:
        parts = [m.span() for m in re.finditer(rb"[^\n]+", text)]
        for m in compiled.finditer(text):
            parts += [
                m.span(g) for g in range(1, (compiled.groups or 0) + 1) if m.span(g) != (-1, -1)
            ]
        return parts

    return find


# -- damage of bytes -------------------------------------------------------------------------------


def _choice(rng: Random, items: Sequence[Any]) -> Any:
    return items[int(rng.random() * len(items))]


class Mutator:
    """Makes inputs from seeds: half of them by `structure` first, then up to four random
    damages.
    """

    def __init__(
        self,
        seeds: Sequence[bytes],
        structure: Spans | None = None,
        tokens: Sequence[bytes] = WORDS + NUMBERS,
    ) -> None:
        if not seeds:
            raise ValueError("a fuzzer needs a seed")
        self.seeds, self.structure, self.tokens = list(seeds), structure, tokens
        if structure is not None:
            structure.prepare(self.seeds)

    def __call__(self, rng: Random) -> bytes:
        data = _choice(rng, self.seeds)
        rounds = (1, 1, 1, 2, 2, 3, 4)[int(rng.random() * 7)]
        if self.structure is not None and rng.random() < 0.6:
            data = self.structure(rng, data)
            rounds -= 1
        if rounds:
            work = bytearray(data)
            for _ in range(rounds):
                self._damage(rng, work)
            data = bytes(work)
        return data[:LONGEST]

    def _damage(self, rng: Random, work: bytearray) -> None:
        size = len(work)
        way, at = int(rng.random() * 10), int(rng.random() * (size + 1))
        if way <= 1 and size:
            work[at % size] ^= 1 << int(rng.random() * 8)
        elif way == 2 and size:
            work[at % size] = int(rng.random() * 256)
        elif way == 3:
            del work[at:]
        elif way == 4:
            del work[at : at + self._length(rng, size)]
        elif way == 5:
            work[at:at] = rng.randbytes(self._length(rng, 16))
        elif way == 6:  # a part of a seed
            other = _choice(rng, self.seeds)
            start = int(rng.random() * (len(other) + 1))
            work[at : at + self._length(rng, size)] = other[
                start : start + self._length(rng, len(other))
            ]
        elif way == 7:  # a number of 1, 2, 4 or 8 bytes
            width = 1 << int(rng.random() * 4)
            number = _choice(rng, _EDGES) & ((1 << 8 * width) - 1)
            work[at : at + width] = number.to_bytes(
                width, "big" if rng.random() < 0.5 else "little"
            )
        elif way == 8:
            token = _choice(rng, self.tokens)
            work[at : at + (len(token) if rng.random() < 0.5 else 0)] = token
        else:  # a part many times
            part = work[at : at + self._length(rng, 32)]
            work[at:at] = part * _choice(rng, (1, 2, 16, 200))

    @staticmethod
    def _length(rng: Random, longest: int) -> int:
        return 1 + int(rng.random() ** 3 * longest)  # short ones as a rule


# -- the loop --------------------------------------------------------------------------------------


def blocks(mutator: Mutator, count: int, seed: int, first: int = 0) -> Iterator[bytes]:
    """Inputs number `first` (a multiple of BLOCK) to `first + count` of a seed."""
    for start in range(first, first + count, BLOCK):
        rng = Random(f"{seed} {start}")
        for _ in range(min(BLOCK, first + count - start)):
            yield mutator(rng)


def fuzz(
    parse: Callable[[bytes], Any],
    seeds: Sequence[bytes],
    count: int,
    seed: int = 0,
    allowed: tuple[type[BaseException], ...] = (OdysseyError,),
    *,
    structure: Spans | None = None,
    tokens: Sequence[bytes] = WORDS + NUMBERS,
    first: int = 0,
    each: float = 1.0,
    growth_mb: float = 100.0,
    watch: Callable[[bytes], Any] | None = None,
) -> Statistics:
    """Gives `parse` so many damaged seeds.

    Args:
        parse: takes the bytes; returns anything, or raises one of `allowed`.
        seeds: inputs that it accepts; this is checked.
        structure, tokens: what is known of the format.
        first: number of the first input, a multiple of BLOCK: so that processes can share out a
            count.
        each: seconds that one input may take (processor time, so that a busy machine is no
            finding).
        growth_mb: how much resident memory may grow.
        watch: is given each input before `parse`, for finding the one that ends the process.

    Raises:
        Finding: another exception, a slow input, or memory; with the input.
    """
    for number, good in enumerate(seeds):
        try:
            parse(good)
        except Exception as error:
            raise Finding(
                f"seed {number} is refused: {type(error).__name__}: {error}", good
            ) from error
    done, began = Statistics(), time.perf_counter()
    mutator = Mutator(seeds, structure, tokens)
    clock, memory = time.process_time, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _no_endless_input():
        for data in blocks(mutator, count, seed, first):
            if watch is not None:
                watch(data)
            before = clock()
            try:
                parse(data)
                done.accepted += 1
            except allowed as refusal:
                done.rejected += 1
                done.places.add(_place(refusal))
                message = str(refusal)
                if len(message) > 6000 or "\x1b" in message:
                    raise Finding(
                        f"a message of {len(message)} characters: {message[:200]!r}", data
                    ) from None
            except BaseException as error:
                raise Finding(f"{type(error).__name__}: {str(error)[:300]}", data) from error
            took = clock() - before
            if took > done.slowest:
                done.slowest = took
                if took > each:
                    raise Finding(f"it took {took:.2f} s; {each} s are allowed", data)
            done.inputs += 1
            if not done.inputs % 100:
                signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS)
                done.growth_mb = (
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
                ) / 1024
                if done.growth_mb > growth_mb:
                    raise Finding(
                        f"resident memory grew by {done.growth_mb:.0f} MB; {growth_mb:.0f} are "
                        "allowed",
                        data,
                    )
    done.seconds = time.perf_counter() - began
    done.growth_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    return done


def _place(refusal: BaseException) -> str:
    """Where it was raised, and where the error that it is about was."""
    lines = []
    for error in (refusal, refusal.__context__):
        trace = None if error is None else error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            lines.append(f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}")
    return " < ".join(lines)


class _Endless(BaseException):
    """The parser does not come back."""


@contextlib.contextmanager
def _no_endless_input() -> Iterator[None]:
    """Ends a parser that takes ENDLESS seconds of processor time for a hundred inputs."""

    def ring(*_: Any) -> None:
        raise _Endless(f"no end after {ENDLESS} s")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
