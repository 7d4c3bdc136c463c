"""How the ranks of a group check that all of them make the same call: in log4(ranks) rounds of
a few short messages.

In round k a rank sends its knowledge to the ranks 1, 2 and 3 times 4^k after it, and receives the
knowledge of the ranks as far before it. After that it knows about the 4^(k + 1) ranks up to itself,
and after the last round about all. The knowledge is a word of 32 bytes: the call of the rank, and
if a call that it knows of differs. Counts, which may differ between ranks, are checked by a sum
(`balance_counts`). A scatter's piece follows the word. The ranks exchange whole headers, with their
texts, only if calls differ.

`Agreement` is the knowledge of a rank. `Heads` moves the words over an mpi4py communicator that
nothing else uses.
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
    """Returns the distances to the ranks to which a rank sends its word, for each round.

    size: the ranks of the group.
    """
    rounds = []
    step = 1
    while step < size:
        multiples = [factor * step for factor in range(1, RADIX)]
        rounds.append(tuple(distance for distance in multiples if distance < size))
        step *= RADIX
    return tuple(rounds)


class Agreement:
    """The knowledge of a rank about the calls of all ranks, after the rounds so far.

    different: True if not all ranks make the same call.
    blocking: True if all ranks wait for the call at once.
    piece: of a scatter, the tail of a header that knows it: dtype code, dimensions, shape.
    """

    __slots__ = ("_call", "_flags", "_full", "_rest", "_size", "_window", "piece")

    def __init__(self, header: Header, sequence: int, size: int) -> None:
        self._call = (sequence, header.signature)
        self._size = size
        self._flags = 0 if header.blocking else _PATIENT
        # Sums of the balances of known ranks, after k rounds: _window of the last 4^k ranks, and
        # _rest of the last (size modulo 4^k) ranks. At the end one of them covers all ranks: the
        # window if the size is a power of 4, and the rest otherwise.
        self._window = header.balance
        self._rest = 0
        self._full = size == RADIX ** len(distances(size))
        self.piece: tuple[int, ...] | None = None
        if header.kind == "scatter" and header.tail[0] >= 0:
            self.piece = header.tail
            self._flags = self._flags | _KNOWN

    def word(self) -> bytes:
        """Returns the knowledge as bytes for other ranks: a word, and a piece if it is known."""
        sequence, signature = self._call
        # flags share a number with the sequence: the lowest 8 bits
        word = _WORD.pack(sequence << 8 | self._flags, signature, self._window, self._rest)
        return word if self.piece is None else word + _PIECE.pack(*self.piece)

    def take(self, k: int, words: Sequence[memoryview | bytes]) -> None:
        """Adds the words that came in round k, in the order of `distances`."""
        windows = [self._window]
        rests = [self._rest]
        digit = self._size // RADIX**k % RADIX  # digit k of the size in base 4
        for word in words:
            sequence_and_flags, signature, window, rest = _WORD.unpack_from(word)
            self._flags |= sequence_and_flags & 0xFF
            if (sequence_and_flags >> 8, signature) != self._call:
                self._flags |= _DIFFERENT
            if sequence_and_flags & _KNOWN:
                piece = _PIECE.unpack_from(word, WORD)
                if self.piece not in (None, piece):
                    self._flags |= _DIFFERENT
                self.piece = piece
            windows.append(window)
            rests.append(rest)
        # (size modulo 4^(k + 1)) ranks are `digit` windows of 4^k ranks, and the rest before them
        rest_before = rests[digit] if digit < len(rests) else 0
        self._rest = sum(windows[:digit], rest_before) & _MASK
        self._window = sum(windows) & _MASK

    @property
    def different(self) -> bool:
        return bool(self._flags & _DIFFERENT or (self._window if self._full else self._rest))

    @property
    def blocking(self) -> bool:
        return not self._flags & _PATIENT


class Heads:
    """The words of one call at a time, in persistent messages of each round.

    first: the requests that start with a call.
    rounds_begun: the number of rounds in which this rank has sent its word.
    over: True if all words have come, and those of the calls before as well.
    texts: of a call that differs, the headers of all ranks and the request that receives them.
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
        self.rounds_begun = 0
        self._rounds_done = 0
        self.over = True
        # None: all that was heard is the same as this rank's
        self.agreement: Agreement | None = None
        self.texts: tuple[np.ndarray, Any] | None = None

    def start(self, header: Header, sequence: int) -> list[Any]:
        """Prepares the words of a call, and returns the requests that the caller starts.

        sequence: the number of the call, which for a repeated call is not that in its header.
        """
        self._header = header
        self.sequence = sequence
        self.rounds_begun = 1
        self._rounds_done = 0
        self.over = False
        self.agreement = self.texts = None
        if header.balance or header.kind == "scatter":
            self.agreement = Agreement(header, sequence, self.size)
            self._set_words(0)
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

    def _set_words(self, k: int) -> None:
        """Writes the present knowledge into the words of round k and later rounds."""
        word = self.agreement.word()[:WORD]
        for sent_word in self._sent_words[k:]:
            sent_word[:] = word

    def _send_long(self, k: int) -> None:
        """Sends the word of round k with the piece of a scatter behind it."""
        word = np.frombuffer(self.agreement.word(), np.uint8)
        for distance in distances(self.size)[k]:
            peer = (self.rank + distance) % self.size
            self._long.append(self._comm.Isend(word, peer, k))

    def advance(self, limit: int) -> bool:
        """Continues the rounds as far as messages have come.

        It starts only rounds below `limit`, the number of rounds that the call before has started,
        because the messages of a round must be in the order of the calls.

        Returns True if all words have come and have been sent.
        """
        last = len(self._receives) - 1
        while (k := self._rounds_done) <= last:
            if k == self.rounds_begun:
                if k >= limit:
                    return False
                self.rounds_begun += 1
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
                    continue  # all words are the same as this rank's: nothing to add
            self.agreement.take(k, self._came[k])
            self._set_words(k + 1)
        if self._long and self._long[0].Testall(self._long):
            self._long = []
        return not self._long

    def agreed(self) -> Met:
        """Returns the result of the words of a call that does not differ."""
        if self.agreement is None:
            return AGREED[self._header.blocking]
        return Met((), self.agreement.piece, self.agreement.blocking)

    def ranks_that_came(self) -> set[int]:
        """Returns the ranks that are known to have come to the call."""
        # a word of round k is knowledge about 4^k ranks, up to its sender
        step = RADIX**self._rounds_done
        ranks = {(self.rank - i) % self.size for i in range(step)}
        if self._rounds_done < len(self._receives):
            far = distances(self.size)[self._rounds_done]
            receives = self._receives[self._rounds_done]
            for distance, request in zip(far, receives, strict=True):
                if request.Test():
                    ranks.update((self.rank - distance - i) % self.size for i in range(step))
        return ranks

    def finish(self) -> None:
        """Ends the rounds, after all words have come.

        If calls differ, it starts an exchange of the whole headers. All ranks do so, because all
        have the same result.
        """
        self.over = True
        if self.agreement is not None and self.agreement.different:
            packed_header = np.zeros(header_bytes(self.size), np.uint8)
            pack(self._header._replace(sequence=self.sequence), packed_header)
            heads = np.zeros((self.size, len(packed_header)), np.uint8)
            self.texts = heads, self._comm.Iallgather(packed_header, heads)


class Roll:
    """The ranks that have come to a call, for messages about a call that takes long.

    The words of a call come from a few ranks only. So ranks that wait send all others the number
    of their latest call, and ranks that are beyond that call answer.
    """

    def __init__(self, comm: Any, rank: int, size: int) -> None:
        self._comm = comm
        self._rank = rank
        self.is_needed = len(distances(size)) > 1
        # calls that each has begun, as far as it is known
        self._came = [0] * size
        self._calls_told = [0] * size
        self._notes: list[tuple[np.ndarray, Any]] = []

    def _send_note(self, to: int, calls_begun: int, calls_awaited: int = 0) -> None:
        """Tells a rank how many calls this rank has begun.

        calls_awaited: asks that rank for an answer once it has begun so many calls.
        """
        self._calls_told[to] = calls_begun
        self._notes = [(note, request) for note, request in self._notes if not request.Test()]
        note = np.array([self._rank, calls_begun, calls_awaited], np.int64)
        self._notes.append((note, self._comm.Isend(note, to, _NOTE)))

    def listen(self, calls_begun: int) -> None:
        """Receives the notes of other ranks, and answers those that wait for an answer.

        calls_begun: the number of calls that this rank has begun.
        """
        while self.is_needed and (message := self._comm.Improbe(tag=_NOTE)) is not None:
            note = np.zeros(3, np.int64)
            message.Recv(note)
            sender, sender_calls_begun, calls_awaited = note.tolist()
            self._came[sender] = max(self._came[sender], sender_calls_begun)
            if self._calls_told[sender] < calls_awaited <= calls_begun:
                self._send_note(sender, calls_begun)

    def missing(self, heads: Heads, calls_begun: int) -> list[int]:
        """Returns the ranks that are not known to have come to a call.

        It asks those that it has not asked about this call, so a later answer may be shorter.
        """
        other_ranks = [p for p in range(heads.size) if p != self._rank]
        if self.is_needed:
            for p in other_ranks:
                if self._calls_told[p] <= heads.sequence:
                    self._send_note(p, calls_begun, heads.sequence + 1)
            self.listen(calls_begun)
        arrived_ranks = heads.ranks_that_came()
        return [
            p for p in other_ranks if p not in arrived_ranks and self._came[p] <= heads.sequence
        ]
