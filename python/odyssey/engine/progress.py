"""Progress of transfers while this process computes: most MPI libraries move data only inside of
their calls.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

PERIOD_S = 1e-3  # seconds between looks: sockets hold what a link of 10 Gbit/s moves meanwhile
BUSY_POLL_S = 10e-6  # seconds from which on a look has moved something, and another will move more


class Progress:
    """Thread that polls while its owner runs kernels, and never beside the owner's own Python.

    poll: makes transfers go on, without waiting; what it raises is raised where the owner goes on.
    """

    def __init__(self, poll: Callable[[], object]) -> None:
        self._poll = poll
        self._error = None
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="odyssey progress", daemon=True)

    def __enter__(self) -> Progress:
        self._turn.acquire()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._turn.release()
        self._thread.join()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Polls meanwhile. What is computed must not use what `poll` does."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            with self._turn:
                if self._over.is_set() or self._error is not None:
                    return
                start = last = time.perf_counter()
                try:
                    while True:
                        self._poll()
                        polled_at = time.perf_counter()
                        if polled_at - last < BUSY_POLL_S or polled_at - start > PERIOD_S:
                            break
                        last = polled_at
                except BaseException as error:
                    self._error = error
