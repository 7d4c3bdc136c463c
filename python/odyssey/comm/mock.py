"""Ranks that are threads of this process: programs of several ranks tested without MPI and
without processes.

`run(4, function)` calls `function(communicator)` on four ranks. Bytes move by copying, sums are
added along the fixed tree over ranks. What it is not: a way to compute faster; the threads share
one interpreter.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import random_scopes
from ..errors import CollectiveError, ConfigError
from . import base
from .base import Communicator
from .calls import Call, Header, find_mismatch, tree_reduce
from .requests import MessageQueue, Received, Request, Waiting, deadline


class _World:
    """State that all threads share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.ended: set[int] = set()
        self.aborted: int | None = None
        self.groups: dict[tuple, _Group] = {}
        self.size = size


class _Group:
    """State that the members of one group share."""

    def __init__(self) -> None:
        self.meetings: dict[int, _Meeting] = {}
        self.lines: dict[tuple[int, int, int], MessageQueue] = {}


class _Meeting:
    """One collective call of a group: done by the last rank that comes."""

    def __init__(self, size: int) -> None:
        self.calls: list[Call | None] = [None] * size
        self.complete = False
        self.wrong: str | None = None


class MockCommunicator(Communicator):
    """One rank of a group of threads; made by `run` and by `split`."""

    name = "mock"

    def __init__(self, world: _World, group: _Group, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self._world = world
        self._group = group
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.local_size = self.size
        self.local_rank = rank
        self.in_threads = self.size > 1
        self.why = f"mock: {world.size} threads"

    def _begin(self, call: Call) -> Request:
        with self._world.changed:
            sequence = call.header.sequence
            meeting = self._group.meetings.setdefault(sequence, _Meeting(self.size))
            meeting.calls[self.rank] = call
            if None not in meeting.calls:
                del self._group.meetings[sequence]
                meeting.wrong = find_mismatch([c.header for c in meeting.calls], self.ranks)
                if meeting.wrong is None:
                    exchange(meeting.calls)
                meeting.complete = True
                self._world.changed.notify_all()
        return _Met(self, meeting, call)

    def _send(self, array: np.ndarray, dest: int, tag: int, envelope: Header) -> Request:
        with self._world.changed:
            line = self._group.lines.setdefault((self.rank, dest, tag), MessageQueue())
            line.messages.append((array.copy(), envelope))
            self._world.changed.notify_all()
        return Request()

    def _recv(self, out: np.ndarray, source: int, tag: int, envelope: Header) -> Request:
        with self._world.changed:
            line = self._group.lines.setdefault((source, self.rank, tag), MessageQueue())
            receive = Received(line, out, envelope, self.ranks[source], self.ranks[self.rank])
        return _Received(self, receive, source)

    def _create_subgroup(self, members: tuple[int, ...]) -> MockCommunicator:
        ranks = tuple(self.ranks[p] for p in members)
        with self._world.changed:  # all members have made the same number of calls in this group
            group = self._world.groups.setdefault(
                (id(self._group), self._sequence, ranks), _Group()
            )
        return MockCommunicator(self._world, group, ranks, members.index(self.rank))

    def abort(self, code: int) -> None:
        """Ends the threads: those that wait get a CollectiveError, this one SystemExit."""
        with self._world.changed:
            self._world.aborted = code
            self._world.changed.notify_all()
        sys.exit(code)


def exchange(calls: Sequence[Call]) -> None:
    """Carries out one collective whose calls, of ranks 0, 1, ..., agree."""
    first = calls[0]
    size = len(calls)
    # an out may be another's send
    sends = [None if c.send is None else c.send.copy().reshape(-1) for c in calls]
    if first.op is not None:
        total = tree_reduce(sends, first.op)
        parts = total.reshape(size, -1) if first.kind == "reduce_scatter" else [total] * size
        for call, part in zip(calls, parts, strict=True):
            if call.out is not None:
                call.out.reshape(-1)[...] = part
    elif first.kind not in ("barrier", "group"):
        for call in calls if first.kind == "scatter" else ():
            call.place(calls[first.root].header.tail)
        routes = [call.routes(p, size) for p, call in enumerate(calls)]
        for p, (gives, _) in enumerate(routes):
            for q, (a, b) in enumerate(gives):
                if b > a:
                    calls[q].out.reshape(-1)[slice(*routes[q][1][p])] = sends[p][a:b]


class _Patient(Waiting):
    """Waits on the condition of the world."""

    __slots__ = ()

    def test(self) -> bool:
        if not self._complete:
            with self._comm._world.changed:
                self._try_complete()
        return self._complete

    def _try_complete(self) -> None:
        """Completes if it can; the lock is held."""
        raise NotImplementedError

    def _block(self) -> None:
        world = self._comm._world
        timeout = deadline()
        until = time.monotonic() + timeout
        with world.changed:
            while True:
                self._try_complete()
                if self._complete:
                    return
                ended_ranks = sorted(world.ended & {self._comm.ranks[p] for p in self._find_late()})
                remaining_s = until - time.monotonic()
                if world.aborted is not None:
                    self._give_up(
                        f"[comm] {self._text}: all ranks were ended with code {world.aborted}"
                    )
                elif ended_ranks:
                    self._give_up(self._describe_end(ended_ranks))
                elif remaining_s <= 0:
                    self._give_up(self._describe_timeout(timeout))
                else:
                    world.changed.wait(remaining_s)


class _Met(_Patient):
    __slots__ = ("_meeting", "_call")

    def __init__(self, comm: MockCommunicator, meeting: _Meeting, call: Call) -> None:
        super().__init__(comm, call.header.text)
        self._meeting = meeting
        self._call = call

    def _try_complete(self) -> None:
        if not self._meeting.complete:
            return
        if self._meeting.wrong:
            error = CollectiveError(self._meeting.wrong)
            error.raised_on_all_ranks = self._comm.size == self._comm._world.size
            self._fail(error)
        else:
            self._result = self._call.result()
            self._complete = True
        self._meeting = self._call = None

    def _find_late(self) -> list[int]:
        return [p for p, call in enumerate(self._meeting.calls) if call is None]


class _Received(_Patient):
    __slots__ = ("_receive", "_source")

    def __init__(self, comm: MockCommunicator, receive: Received, source: int) -> None:
        super().__init__(comm, receive.describe())
        self._receive = receive
        self._source = source

    def _try_complete(self) -> None:
        self._follow(self._receive)

    def _find_late(self) -> list[int]:
        return [self._source]


def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `function(communicator, *arguments)` on ranks 0 to `ranks` - 1, each in a thread;
    returns their results. In these threads `comm.world()` is the rank's communicator. Raises
    Whatever a rank raised: of several errors one that is not a CollectiveError, of the lowest
    rank.
    """
    if ranks < 1:
        raise ConfigError(f"[comm] mock world of {ranks} ranks; give at least 1")
    world = _World(ranks)
    group = _Group()
    everyone = tuple(range(ranks))
    results: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        base.here.world = MockCommunicator(world, group, everyone, rank)
        random_scopes.join_group(id(world))
        try:
            results[rank] = function(base.here.world, *arguments)
        except BaseException as error:  # SystemExit as well: it belongs to the caller of run
            errors[rank] = error
        finally:
            base.here.world = None
            with world.changed:
                world.ended.add(rank)
                world.changed.notify_all()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in everyone
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors.items(), key=lambda item: (isinstance(item[1], CollectiveError), item[0]))[
            1
        ]
    return results
