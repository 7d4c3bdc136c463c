"""How the ranks of a group learn whether all make the same call: in rounds of a few short
messages, log4 of the ranks.

In round k a rank tells the ranks 1, 2 and 3 times 4^k after it what it knows, and hears as much
from those before it: it has then heard of the 4^(k + 1) ranks up to itself, and after the last
round of all. What it knows is a word of 32 bytes: its call and whether one that it heard of
differs. Counts that ranks may have of their own are checked by a sum (`balance`), a scatter's piece
follows the word. Only if calls differ do ranks need all headers, with their texts.

`Agreement` is what a rank knows; `Heads` moves the words over an mpi4py communicator that nothing
else uses.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from .calls import DIMENSIONS, Header, header_bytes, pack
from .staged import Met

RADIX = 4
_WORD = struct.Struct("<qqQQ")
WORD = _WORD.size
_PIECE = struct.Struct(f"<{2 + DIMENSIONS}q")
_DIFFERENT = 1
_PATIENT = 2
_KNOWN = 4
_MASK = (1 << 64) - 1
_NOTE = 100  # a tag above those of rounds
AGREED = Met(), Met(blocking=True)


@functools.lru_cache(64)
def distances(size: int) -> tuple[tuple[int, ...], ...]:
    """How far the ranks are, in each round, that a rank of a group of `size` sends its word to."""
    rounds = []
    step = 1
    while step < size:
        rounds.append(tuple(i * step for i in range(1, RADIX) if i * step < size))
        step *= RADIX
    return tuple(rounds)


class Agreement:
    """Knowledge of a rank of a group of `size` about the calls of all, after the rounds so far.
    different: not all make the same call. blocking: all wait at once. piece: dtype code,
    dimensions, shape (scatter).
    """

    __slots__ = ("_call", "_flags", "_full", "_rest", "_size", "_window", "piece")

    def __init__(self, header: Header, sequence: int, size: int) -> None:
        self._call = (sequence, header.signature)
        self._size = size
        self._flags = 0 if header.blocking else _PATIENT
        # Sums over the ranks that were heard of: the last 4^k of them, and, where the ranks are no
        # power of 4, the last (ranks modulo 4^k), which in the end are all.
        self._window = header.balance
        self._rest = 0
        self._full = size == RADIX ** len(distances(size))
        self.piece: tuple[int, ...] | None = None
        if header.kind == "scatter" and header.tail[0] >= 0:
            self.piece = header.tail
            self._flags = self._flags | _KNOWN

    def word(self) -> bytes:
        """Returns what the others are to know of it."""
        number, signature = self._call
        word = _WORD.pack(number << 8 | self._flags, signature, self._window, self._rest)
        return word if self.piece is None else word + _PIECE.pack(*self.piece)

    def take(self, k: int, words: Sequence[memoryview | bytes]) -> None:
        """The words of round k, of the ranks in the order of `distances`."""
        windows = [self._window]
        rests = [self._rest]
        digit = self._size // RADIX**k % RADIX
        for word in words:
            number, signature, window, rest = _WORD.unpack_from(word)
            self._flags |= number & 0xFF
            if (number >> 8, signature) != self._call:
                self._flags |= _DIFFERENT
            if number & _KNOWN:
                piece = _PIECE.unpack_from(word, WORD)
                if self.piece not in (None, piece):
                    self._flags |= _DIFFERENT
                self.piece = piece
            windows.append(window)
            rests.append(rest)
        self._rest = sum(windows[:digit], rests[digit] if digit < len(rests) else 0) & _MASK
        self._window = sum(windows) & _MASK

    @property
    def different(self) -> bool:
        return bool(self._flags & _DIFFERENT or (self._window if self._full else self._rest))

    @property
    def blocking(self) -> bool:
        return not self._flags & _PATIENT


class Heads:
    """The words of one call at a time, in persistent messages of each round. first: requests to
    be started with a call. begun: rounds in which this rank has sent its word. over: all have
    come, and so have those of the calls before. texts: of a call that differs, the headers of
    all ranks and their request.
    """

    def __init__(self, comm: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._comm = comm
        rounds = distances(size)
        self._send_buffers = np.zeros((len(rounds), WORD + _PIECE.size), np.uint8)
        self._sent_words = [memoryview(buffer)[:WORD] for buffer in self._send_buffers]
        self._came: list[list[memoryview]] = []
        self._receives: list[list[Any]] = []
        self._sends: list[list[Any]] = []
        for k, far in enumerate(rounds):
            came = np.zeros((len(far), WORD + _PIECE.size), np.uint8)
            self._came.append([memoryview(row) for row in came])
            self._receives.append(
                [comm.Recv_init(a, (rank - d) % size, k) for a, d in zip(came, far, strict=True)]
            )
            self._sends.append(
                [comm.Send_init(self._send_buffers[k, :WORD], (rank + d) % size, k) for d in far]
            )
        self._words = [[word[:WORD] for word in came] for came in self._came]
        self.first = [request for receives in self._receives for request in receives] + self._sends[
            0
        ]
        self._all_receives = self.first[: -len(self._sends[0])]
        self.requests = [*self.first, *(request for sends in self._sends[1:] for request in sends)]
        self._long: list[Any] = []  # sends that are not persistent: words with a piece
        self.begun = 0
        self._rounds_done = 0
        self.over = True
        # None: all that was heard is the same as this rank's
        self.agreement: Agreement | None = None
        self.texts: tuple[np.ndarray, Any] | None = None

    def start(self, header: Header, sequence: int) -> list[Any]:
        """Takes a call up, whose number need not be that in its header; gives the requests to be
        started now.
        """
        self._header = header
        self.sequence = sequence
        self.begun = 1
        self._rounds_done = 0
        self.over = False
        self.agreement = self.texts = None
        if header.balance or header.kind == "scatter":
            self.agreement = Agreement(header, sequence, self.size)
            self._say(0)
            if self.agreement.piece is not None:
                self._send_long(0)
                return self._all_receives
            return self.first
        for sent_word in self._sent_words:
            _WORD.pack_into(
                sent_word,
                0,
                sequence << 8 | (0 if header.blocking else _PATIENT),
                header.signature,
                0,
                0,
            )
        return self.first

    def _say(self, k: int) -> None:
        """Has the words of the rounds from k on say what is known now."""
        word = self.agreement.word()[:WORD]
        for sent_word in self._sent_words[k:]:
            sent_word[:] = word

    def _send_long(self, k: int) -> None:
        word = np.frombuffer(self.agreement.word(), np.uint8)
        for d in distances(self.size)[k]:
            self._long.append(self._comm.Isend(word, (self.rank + d) % self.size, k))

    def advance(self, limit: int) -> bool:
        """Goes on through the rounds as far as it can, but begins none that an earlier call has
        not begun (`limit`): messages of a round are in the order of the calls. Whether all
        words have come and are gone.
        """
        last = len(self._receives) - 1
        while (k := self._rounds_done) <= last:
            if k == self.begun:
                if k >= limit:
                    return False
                self.begun += 1
                if self.agreement is None or self.agreement.piece is None:
                    self._sends[k][0].Startall(self._sends[k])
                else:
                    self._send_long(k)
            receives = self.requests if k == last else self._receives[k]
            if not receives[0].Testall(receives):
                return False
            self._rounds_done += 1
            sent_word = self._sent_words[k]
            if self.agreement is None:
                for word in self._words[k]:
                    if word != sent_word:
                        self.agreement = Agreement(self._header, self.sequence, self.size)
                        break
                else:
                    continue  # nothing new
            self.agreement.take(k, self._came[k])
            self._say(k + 1)
        if self._long and self._long[0].Testall(self._long):
            self._long = []
        return not self._long

    def met(self) -> Met:
        """Returns what the words came to, where calls do not differ."""
        if self.agreement is None:
            return AGREED[self._header.blocking]
        return Met((), self.agreement.piece, self.agreement.blocking)

    def heard(self) -> set[int]:
        """Ranks of which it is known that they have come to the call."""
        step = RADIX**self._rounds_done
        ranks = {(self.rank - i) % self.size for i in range(step)}
        if self._rounds_done < len(self._receives):
            for d, request in zip(
                distances(self.size)[self._rounds_done],
                self._receives[self._rounds_done],
                strict=True,
            ):
                if request.Test():
                    ranks.update((self.rank - d - i) % self.size for i in range(step))
        return ranks

    def finish(self) -> None:
        """All words have come.

        Where calls differ, which all ranks know alike, it starts to get the headers of all.
        """
        self.over = True
        if self.agreement is not None and self.agreement.different:
            packed_header = np.zeros(header_bytes(self.size), np.uint8)
            pack(self._header._replace(sequence=self.sequence), packed_header)
            heads = np.zeros((self.size, len(packed_header)), np.uint8)
            self.texts = heads, self._comm.Iallgather(packed_header, heads)


class Roll:
    """Who has come to a call that takes long, where a rank hears from some ranks only: those
    that wait tell each other the number of their latest call, and those that are beyond it
    answer.
    """

    def __init__(self, comm: Any, rank: int, size: int) -> None:
        self._comm = comm
        self._rank = rank
        self.needed = len(distances(size)) > 1
        # calls that each has begun, as far as it is known
        self._came = [0] * size
        self._calls_told = [0] * size
        self._notes: list[tuple[np.ndarray, Any]] = []

    def _tell(self, to: int, calls_begun: int, calls_awaited: int = 0) -> None:
        self._calls_told[to] = calls_begun
        self._notes = [(note, request) for note, request in self._notes if not request.Test()]
        note = np.array([self._rank, calls_begun, calls_awaited], np.int64)
        self._notes.append((note, self._comm.Isend(note, to, _NOTE)))

    def listen(self, begun: int) -> None:
        """Hears what others have told. begun: calls that this rank has begun."""
        while self.needed and (message := self._comm.Improbe(tag=_NOTE)) is not None:
            note = np.zeros(3, np.int64)
            message.Recv(note)
            sender, theirs, calls_awaited = note.tolist()
            self._came[sender] = max(self._came[sender], theirs)
            if self._calls_told[sender] < calls_awaited <= begun:
                self._tell(sender, begun)

    def missing(self, heads: Heads, begun: int) -> list[int]:
        """Ranks of which it is not known that they have come to a call."""
        other_ranks = [p for p in range(heads.size) if p != self._rank]
        if self.needed:
            for p in other_ranks:
                if self._calls_told[p] <= heads.sequence:
                    self._tell(p, begun, heads.sequence + 1)
            self.listen(begun)
        arrived_ranks = heads.heard()
        return [
            p for p in other_ranks if p not in arrived_ranks and self._came[p] <= heads.sequence
        ]
