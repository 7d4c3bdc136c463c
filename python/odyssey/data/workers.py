"""Processes that prepare samples ahead.

They are started, not forked, because MPI doesn't allow forks. The protocol, over a pair of sockets:

1. This process sends the preparation of Python's `multiprocessing`, then the pickled `Reader`.
2. It sends (epoch, numbers of samples) for each request.
3. The worker answers each request with (samples and targets, None) or (None, problem), in order.

A worker ends when its socket is closed, so also when this process is killed. Nothing is in shared
memory or in files. Objects that are not in a module that can be imported, such as a lambda, cannot
be sent.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from odyssey import errors
from odyssey.errors import ConfigError, DataError, OdysseyError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_MAIN = b"__main__"
#: Prefixes of the environment variables of a rank. A worker isn't a rank, so it gets none of them.
_RANKS = (
    "PMI",
    "PMIX",
    "OMPI_",
    "MPI_",
    "HYDRA",
    "SLURM_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "ODYSSEY_",
)
_CODE = "import sys; sys.path[:] = {path!r}; from odyssey.data.workers import main; main({socket})"
importing = False  # True while this process, a worker, imports the program it works for


class Workers:
    """A number of processes that read samples for one Reader.

    Batch k is prepared by process k modulo their number. Raises ConfigError if the data set or a
    transform cannot be sent to another process.
    """

    def __init__(self, reader: Any, count: int) -> None:
        from multiprocessing import spawn
        from multiprocessing.reduction import ForkingPickler

        self.name = reader.name
        request = (
            f"[data] num_workers={count} sends the data set ({self.name}) and its transforms "
            "to other processes"
        )
        try:
            preparation = dict(spawn.get_preparation_data("odyssey data worker"), authkey=None)
            payload = bytes(ForkingPickler.dumps(reader))
        except Exception as problem:
            raise ConfigError(
                f"{request}, which cannot be done: {problem}; define functions and classes at the "
                "top of a module (no lambda, nothing that is open), or use num_workers=0"
            ) from None
        if _MAIN not in payload:
            # Nothing in the pickle is of the program itself, so workers need not import it.
            preparation = {
                key: value for key, value in preparation.items() if not key.startswith("init_main")
            }
        del preparation["authkey"]
        self._sent = [0] * count
        self._received = [0] * count
        self._links = []
        self._processes = []
        # Ends the processes when this object is freed, or at the exit of Python.
        self._end = weakref.finalize(self, _end_processes, self._links, self._processes)
        for _ in range(count):
            self._start_process()
        for link in self._links:
            link.send(preparation)
            link.send_bytes(payload)

    def _start_process(self) -> None:
        """Starts one process, which waits for its preparation."""
        from multiprocessing.connection import Connection

        parent_socket, worker_socket = socket.socketpair()
        with worker_socket:
            environment = {
                key: value for key, value in os.environ.items() if not key.startswith(_RANKS)
            }
            environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
            words = [
                sys.executable,
                "-c",
                _CODE.format(path=sys.path, socket=worker_socket.fileno()),
            ]
            process = subprocess.Popen(
                words, pass_fds=[worker_socket.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._links.append(Connection(parent_socket.detach()))
        self._processes.append(process)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def idle(self) -> bool:
        """Tells whether all requests were answered, and the processes are not closed."""
        return self._sent == self._received and self._end.alive

    def ask(self, batch: int, epoch: int, numbers: np.ndarray) -> None:
        """Requests the samples `numbers` as batch number `batch`."""
        worker_index = batch % len(self)
        self._sent[worker_index] += 1
        # If the process has ended, `get` reports how.
        with contextlib.suppress(OSError):
            self._links[worker_index].send((epoch, numbers))

    def get(self, batch: int) -> Any:
        """Returns samples and targets, trees of arrays, that `ask` has requested.

        For each process, batches must be got in the order of the requests.

        Raises:
            OdysseyError: the worker raised this error.
            DataError: the worker raised another error, or has ended.
        """
        worker_index = batch % len(self)
        try:
            both, problem = self._links[worker_index].recv()
        except (EOFError, OSError):
            code = self._processes[worker_index].wait()
            exit_status = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise DataError(
                f"[data] a worker process of {self.name} has ended ({exit_status}) before its "
                "batch was ready; look at what it printed, give it more memory, or use "
                "num_workers=0"
            ) from None
        self._received[worker_index] += 1
        if problem is None:
            return both
        kind, text, trace = problem
        raise getattr(errors, kind, DataError)(text) from _InWorker(trace)

    def close(self) -> None:
        """Ends the processes."""
        self._end()


class _InWorker(Exception):
    """The cause of an error of a worker. Python prints it with the traceback in the worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _end_processes(links: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
    """Closes the sockets and waits for the processes. It kills those that don't end in a second."""
    for link in links:
        # A thread may be waiting for the socket. Closing doesn't wake it, a shutdown does.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        link.close()
    for process in processes:
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:  # it is in the middle of a sample
            process.kill()
            process.wait()


# --- in the worker --------------------------------------------------------------------------------


def main(number: int) -> None:
    """Runs a worker until its socket is closed.

    If the reader cannot be loaded, each request is answered with the problem.

    number: the file descriptor of the socket.
    """
    from multiprocessing.connection import Connection
    from multiprocessing.reduction import ForkingPickler

    # Ctrl-C is for the process that this one works for. It ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Connection(number)
    reader: Any = None
    problem: tuple[str, str, str] | None = None
    try:
        preparation = link.recv()
        payload = link.recv_bytes()
    except (EOFError, OSError):
        return
    try:
        _prepare_process(preparation)
        reader = ForkingPickler.loads(payload)
    except BaseException as error:
        problem = _describe_error(error, prepared=False)
    requests: queue.SimpleQueue[tuple[int, np.ndarray]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, requests), daemon=True).start()
    epoch = None
    while True:
        requested_epoch, numbers = requests.get()
        both = None
        if reader is not None:
            try:
                if requested_epoch != epoch:
                    reader.begin_epoch(requested_epoch)
                    epoch = requested_epoch
                both = reader.read(numbers, requested_epoch)
                problem = None
            except BaseException as error:
                problem = _describe_error(error)
        try:
            link.send((both, problem))
        except OSError:
            os._exit(0)


def _listen(link: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Queues requests, and ends this process when the socket is closed.

    It runs on a thread, so that the process also ends in the middle of a sample.
    """
    try:
        while True:
            requests.put(link.recv())
    except (EOFError, OSError):
        os._exit(0)


def _prepare_process(preparation: dict[str, Any]) -> None:
    """Prepares a worker as `multiprocessing` does, which imports the program if it is needed."""
    global importing
    from multiprocessing import spawn

    importing = True
    try:
        spawn.prepare(preparation)
    finally:
        importing = False


def refuse_import() -> None:
    """Raises ConfigError if a program trains while a worker imports it for its classes."""
    if importing:
        raise ConfigError(
            "[data] num_workers starts processes that import this program for its classes, and "
            "it starts to train when "
            'it is imported; put what trains under `if __name__ == "__main__":`, or use '
            "num_workers=0"
        )


def _describe_error(error: BaseException, prepared: bool = True) -> tuple[str, str, str]:
    """Returns the class, the message and the traceback of an error, to be sent and raised again.

    prepared: the worker has loaded its reader, so the error is one of reading.
    """
    kind = type(error).__name__
    text = str(error)
    trace = traceback.format_exc()
    if isinstance(error, OdysseyError):
        return kind, text, trace
    if prepared:
        notes = " ".join(getattr(error, "__notes__", ["(in a worker process)"]))
        return "DataError", f"[data] {kind}: {text} {notes}", trace
    advice = "define its classes and functions in a file that can be imported, or use num_workers=0"
    return (
        "ConfigError",
        f"[data] a worker process cannot be given the data set: {kind}: {text}; {advice}",
        trace,
    )
