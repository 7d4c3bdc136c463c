"""Calls of a process group that are under way: a line of them, in the order in which they were
made, and torch's Works.

One thread per group carries them out; who waits for one carries out those before it himself, where
the thread is not at it. While a call waits for other ranks, or adds, the thread is in native code
or asleep, without Python's lock. So groups do not hold up each other, whatever order their calls
have on other ranks. What it is not: a transport.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from ..comm import Communicator, calls

# the latest error of a call under way: torch gives on its text alone, here and there
failed: list[BaseException] = []


class PendingCalls:
    """The calls of a group that are under way. timeout: seconds that each waits; None:
    ODYSSEY_TIMEOUT.
    """

    def __init__(self, comm: Communicator, timeout: float | None) -> None:
        self.comm = comm
        self.timeout = timeout
        comm.timeout = timeout
        self._calls: deque[Pending] = deque()
        self._running = threading.Lock()  # held by who carries out a call
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(
        self,
        work: Callable[[], Any],
        value: Any = None,
        later: bool = True,
        timeout: float | None = None,
    ) -> Pending | None:
        """Has a call carried out after those before it: its Work, whose result is `value`; None
        if it is over.
        """
        call = Pending(self, work, value, timeout)
        self._calls.append(call)
        if later:
            self._call_thread()
            return call
        call.wait()
        return None

    def _call_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="odyssey collectives", daemon=True
            )
            self._thread.start()
        self._wake.put(True)

    def _serve(self) -> None:
        while self._wake.get():
            while self.step(wait=True):
                pass

    def step(self, wait: bool = False) -> bool:
        """Carries out the next call; False: there is none, or another thread is at one and is
        not waited for.
        """
        if not self._running.acquire(blocking=wait):
            return False
        try:
            if not self._calls:
                return False
            self._calls.popleft().carry_out()
            return True
        finally:
            self._running.release()

    def finish(self) -> None:
        """Carries out what is left, and ends the thread."""
        if self._calls or self._running.locked():
            with contextlib.suppress(Exception):  # each Work has its own
                self.run(lambda: None, later=False)
        if self._thread is not None:
            self._wake.put(False)
            self._thread = None


@contextlib.contextmanager
def within(comm: Communicator, timeout: Any) -> Iterator[None]:
    """Gives up what is under way in the block at the end of torch's `timeout`, if it says one."""
    if timeout is None or timeout.total_seconds() <= 0:
        yield
        return
    comm.until = time.monotonic() + timeout.total_seconds()
    try:
        yield
    finally:
        comm.until = None


class Pending(dist.Work):
    """The Work of a collective call."""

    def __init__(
        self, line: PendingCalls, work: Callable[[], Any], value: Any, timeout: float | None
    ) -> None:
        super().__init__()
        self._line = line
        self._work = work
        self._value = value
        self._timeout = timeout
        self._call_site = calls.caller_location(2)
        self._error: BaseException | None = None
        self._over = False
        self._latch = threading.Lock()  # open when it is over
        self._latch.acquire()
        self._futures: list[Future] = []

    def carry_out(self) -> None:
        """Makes the call, and keeps what comes of it; called once, by the line."""
        comm = self._line.comm
        timeout = self._line.timeout
        comm.timeout = self._timeout or timeout
        calls.made.at = self._call_site
        try:
            self._work()
        except BaseException as error:  # raised where it is waited for
            self._error = error
            failed[:] = [error]
        finally:
            comm.timeout = timeout
            calls.made.at = None
        self._over = True
        self._work = None
        self._latch.release()
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may be at it
            while True:
                self._futures.pop().set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        if not self._over:
            with within(self._line.comm, timeout):
                while not self._over and self._line.step():
                    pass
                if not self._over:
                    # who is at it may have looked for more before this came
                    self._line._call_thread()
                    with self._latch:
                        pass
        self._outcome()
        return True

    def _outcome(self, _: Any = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def is_completed(self) -> bool:
        return self._over

    def is_success(self) -> bool:
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._value

    def get_future(self) -> Future:
        future = Future()
        ended = future.then(self._outcome)  # the only way to give a Future an error
        self._futures.append(future)
        if self._over:
            self._tell()
        return ended

    def synchronize(self) -> None:
        self.wait()
