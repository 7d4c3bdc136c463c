"""The pending calls of a process group, in the order in which they were made, and torch's Works.

One thread per group carries the calls out. A thread that waits for a call carries out the calls
before it, and the call itself, unless the group's thread is carrying one out. While a call waits
for other ranks, or adds, its thread is in native code or asleep, without Python's lock. So groups
don't block each other, whatever order their calls have on other ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ..comm import Communicator, calls
from .streams import has_streams

# the latest error of a pending call, because torch sometimes passes on only the text of an error
failed: list[BaseException] = []


def device_of(value: Any) -> torch.device | None:
    """Returns the device of the first tensor in nested lists; None if there is none."""
    while isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value.device if isinstance(value, torch.Tensor) else None


def future_of(value: Any) -> Future:
    """Returns a Future for tensors like these; PyTorch needs the device of their streams."""
    device = device_of(value)
    if device is None or not has_streams(device):
        return Future()
    return Future(devices=[device])


class PendingCalls:
    """The pending calls of a group. timeout: seconds that each may wait; None: ODYSSEY_TIMEOUT."""

    def __init__(self, comm: Communicator, timeout: float | None) -> None:
        self.comm = comm
        self.timeout = timeout
        comm.timeout = timeout
        self._calls: deque[Pending] = deque()
        self._running = threading.Lock()  # held by the thread that carries out a call
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(
        self,
        work: Callable[[], Any],
        value: Any = None,
        later: bool = True,
        timeout: float | None = None,
    ) -> Pending | None:
        """Adds a call, which is carried out after the calls before it.

        Args:
            work: carries out the call.
            value: the result of the call's Work.
            later: True returns the Work now. False waits for the call, and returns None.
            timeout: seconds that the call may wait; None: the group's.

        Raises:
            BaseException: The error of the call, if `later` is False.
        """
        call = Pending(self, work, value, timeout)
        self._calls.append(call)
        if later:
            self._call_thread()
            return call
        call.wait()
        return None

    def _call_thread(self) -> None:
        """Wakes the thread that carries out calls; starts it the first time."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_calls, name="odyssey collectives", daemon=True
            )
            self._thread.start()
        self._wake.put(True)

    def _run_calls(self) -> None:
        """Carries out calls each time the thread is woken, until `finish`."""
        while self._wake.get():
            while self.step(wait=True):
                pass

    def step(self, wait: bool = False) -> bool:
        """Carries out the next call, and returns True.

        Returns False if there is no call, or if another thread is carrying one out and `wait` is
        False.
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
        """Carries out the remaining calls, and ends the thread."""
        if self._calls or self._running.locked():
            with contextlib.suppress(Exception):  # each Work has its own
                self.run(lambda: None, later=False)
        if self._thread is not None:
            self._wake.put(False)
            self._thread = None


@contextlib.contextmanager
def within(comm: Communicator, timeout: Any) -> Iterator[None]:
    """Limits the calls in the block to torch's `timeout`; None or zero sets no limit."""
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
        """Carries out the call, and keeps its error; PendingCalls calls it once."""
        comm = self._line.comm
        timeout = self._line.timeout
        comm.timeout = self._timeout or timeout
        calls.made.at = self._call_site
        try:
            self._work()
        except BaseException as error:  # `wait` raises it
            self._error = error
            failed[:] = [error]
        finally:
            comm.timeout = timeout
            calls.made.at = None
        self._over = True
        self._work = None
        self._latch.release()
        self._complete_futures()

    def _complete_futures(self) -> None:
        """Completes the futures of this call; it may be called by two threads at a time."""
        with contextlib.suppress(IndexError):  # the other thread has taken the last one
            while True:
                self._futures.pop().set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        if not self._over:
            with within(self._line.comm, timeout):
                while not self._over and self._line.step():
                    pass
                if not self._over:
                    # another thread is carrying out a call: it may have looked for the next one
                    # before this one was added
                    self._line._call_thread()
                    with self._latch:
                        pass
        self._return_outcome()
        return True

    def _return_outcome(self, _: Any = None) -> Any:
        """Returns the result of the call, or raises its error."""
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
        future = future_of(self._value)
        ended = future.then(self._return_outcome)  # the only way to give a Future an error
        self._futures.append(future)
        if self._over:
            self._complete_futures()
        return ended

    def synchronize(self) -> None:
        self.wait()
