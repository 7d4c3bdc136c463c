"""Run under mpirun by test_gpu_transport.py: PeerTransport without MAX, on an emulated GPU.

Arguments: "exchanges", or "ends" or "late" for a last rank that ends, or is late.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time

import numpy as np

from odyssey import comm
from odyssey.comm.device import Exchanged
from odyssey.comm.peer import PeerTransport
from odyssey.core.cuda import driver
from odyssey.errors import CollectiveError

WORLD = comm.world("mpi")
N = WORLD.size
ME = WORLD.rank


def make_stream() -> int:
    driver().call("cuInit", 0)
    context = driver().get(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", ctypes.c_int(0))
    driver().call("cuCtxSetCurrent", context)
    return driver().get(ctypes.c_void_p, "cuStreamCreate", 1)


STREAM = make_stream()
PEERS = PeerTransport(WORLD, lambda: STREAM)


def upload(numbers: np.ndarray) -> int:
    address = driver().get(ctypes.c_uint64, "cuMemAlloc_v2", numbers.nbytes)
    driver().call("cuMemcpyHtoD_v2", address, numbers.ctypes.data, numbers.nbytes)
    return address


def numbers_of(sender: int, receiver: int, size: int, turn: int) -> np.ndarray:
    return np.random.default_rng([sender, receiver, turn]).integers(0, 256, size, np.uint8)


def exchange(sizes: list[list[int]], turns: int) -> None:
    """Exchanges messages of these sizes, [from][to]; 0 is none."""
    targets = [q for q in range(N) if q != ME and sizes[ME][q]]
    sources = [p for p in range(N) if p != ME and sizes[p][ME]]
    route = PEERS.route([(q, sizes[ME][q]) for q in targets])
    received = [upload(np.zeros(sizes[p][ME], np.uint8)) for p in sources]
    for turn in range(turns):
        sent = [upload(numbers_of(ME, q, sizes[ME][q], turn)) for q in targets]
        done = Exchanged(WORLD, [PEERS], "exchange")
        PEERS.exchange(
            [(q, at, sizes[ME][q]) for q, at in zip(targets, sent, strict=True)],
            [(p, at, sizes[p][ME]) for p, at in zip(sources, received, strict=True)],
            route,
        )
        done.mark()
        done.wait()
        for p, address in zip(sources, received, strict=True):
            found = np.zeros(sizes[p][ME], np.uint8)
            driver().call("cuMemcpyDtoH_v2", found.ctypes.data, address, found.nbytes)
            assert np.array_equal(found, numbers_of(p, ME, found.size, turn)), (p, ME, turn)


def exchanges() -> None:
    draw = random.Random(N)
    for _ in range(8):  # areas grow now and then
        limit = draw.choice([1, 300, 40_000, 3_000_000])
        exchange(
            [[draw.choice([0, draw.randint(1, limit)]) for _ in range(N)] for _ in range(N)], 3
        )
    print("exchanged", flush=True)


def fail(last: str) -> None:
    """The last rank ends, or is late. The others must report it, and not wait forever."""
    exchange([[100] * N] * N, 1)
    WORLD.barrier()
    if ME == N - 1:
        time.sleep(60)  # the others end it
        os._exit(0)
    if last == "ends":
        # the watcher would end all ranks before they notice, so another process ends instead
        child = subprocess.Popen(["true"])
        child.wait()
        PEERS._processes[N - 1][0] = child.pid
    begun = time.monotonic()
    try:
        exchange_without_last()
    except CollectiveError as error:
        print(f"after {time.monotonic() - begun:.1f} s: {error}", flush=True)
        os._exit(76)
    raise AssertionError("the exchange was complete")


def exchange_without_last() -> None:
    """An exchange whose route all ranks have made before."""
    route = ROUTE
    others = [p for p in range(N) if p != ME]
    at = upload(np.zeros(100 * N, np.uint8))
    done = Exchanged(WORLD, [PEERS], "exchange of 100 bytes")
    messages = [(p, at + 100 * p, 100) for p in others]
    PEERS.exchange(messages, messages, route)
    done.mark()
    done.wait()


if __name__ == "__main__":
    ROUTE = PEERS.route([(p, 100) for p in range(N) if p != ME])
    if sys.argv[1] == "exchanges":
        exchanges()
    else:
        fail(sys.argv[1])
