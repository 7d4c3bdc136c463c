"""Ranks get to know each other's processes, and one on each machine starts the watcher: called
once, by `comm.world`.

Everything that goes wrong here is survived: then a rank, or a machine, is not watched.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..base import exits, runs, slot
from ..base.hooks import machine, process_space
from ..base.limits import seconds
from ..errors import ConfigError

WATCHDOG = "ODYSSEY_WATCHDOG"
HEARTBEAT = "ODYSSEY_HEARTBEAT"
ADDRESSES = 6
# variables that decide which calls a rank makes
COMPARED = "ODYSSEY_BACKEND", "ODYSSEY_RUN_DIR"
_begun = 0  # pid


def begin(world: Any) -> None:
    """Has this process and its peers watched; once per process, by all ranks of the world, a
    Communicator. Raises ConfigError: ODYSSEY_WATCHDOG or ODYSSEY_HEARTBEAT is no time.
    """
    global _begun
    run = runs.Run.current()
    if _begun == os.getpid() or (world.size == 1 and run is None):
        return
    from ..base.proc import attach
    from .diagnosis import name

    _begun = os.getpid()
    settings = {
        "watchdog": seconds("watch", WATCHDOG, 60.0, least=0, most=1e9),
        "given": bool(os.environ.get(WATCHDOG)),
        "heartbeat": seconds("watch", HEARTBEAT, 5.0, most=1e9),
        "world": world.size,
        "attempt": run.attempt if run else 0,
        "run": str(run.path.absolute()) if run else "",
    }
    slot.describe(world.rank, world.size, settings["attempt"])
    descriptor = slot.publish()
    exits.listen()
    # with MPI it tells the other ranks as well: comm/mpi.py
    if world.size == 1 or world.name == "gloo":
        atexit.register(_leave, os.getpid())
        forked = getattr(sys.modules.get("multiprocessing.util"), "Finalize", lambda *_, **__: None)
        forked(None, _leave, (os.getpid(),), exitpriority=0)  # which ends by os._exit, after these
    started = getattr(sys.modules.get("odyssey.comm.mpi"), "STARTED", (0, 0))
    node = machine() << 31 ^ process_space()  # names those processes that see each other in /proc
    me = [os.getpid(), descriptor, node, *started, *_addresses(), *_variables()]
    everyone = world.all_gather(np.array(me, np.int64)).tolist()
    _check_variables([numbers[-len(COMPARED) :] for numbers in everyone])
    nodes: dict[int, list[int]] = {}
    for rank, (_, _, node, *_) in enumerate(everyone):
        nodes.setdefault(node, []).append(rank)
    local_ranks = nodes[everyone[world.rank][2]]
    watches = world.rank == local_ranks[0] and any(everyone[rank][1] >= 0 for rank in local_ranks)
    # Now, as all are there: one of them may have ended, after a word, before the watcher runs.
    attached = {rank: attach(*everyone[rank][:2]) for rank in local_ranks} if watches else {}
    secret = np.frombuffer(os.urandom(32), np.uint8).copy()
    world.broadcast(secret)
    exits.named(hashlib.sha256(b"name" + secret.tobytes()).hexdigest()[:16])
    listener = None
    endpoint = np.zeros(2, np.int64)
    if len(nodes) > 1:
        if world.rank == 0:
            listener, endpoint = _listen(
                everyone[0][5 : 5 + ADDRESSES],
                [everyone[ranks[0]][5 : 5 + ADDRESSES] for ranks in nodes.values()],
            )
        world.broadcast(endpoint)
    unseen = [rank for rank, (_, its, *_) in enumerate(everyone) if its < 0]
    if world.rank == 0 and unseen and settings["watchdog"]:
        line = (
            f"odyssey: [watch] {name(unseen)} cannot be watched: there is no memory that "
            "another process could read"
        )
        print(line, file=sys.stderr, flush=True)
    if watches:
        settings |= {
            "ranks": [[rank, everyone[rank][0], *opened] for rank, opened in attached.items()],
            "nodes": list(nodes.values()),
            "secret": secret.tobytes().hex(),
            "main": world.rank == 0,
            "detach": True,
            "listen": listener.fileno() if listener else -1,
            "address": [_text(int(endpoint[0])), int(endpoint[1])] if endpoint[1] else None,
            "files": _left_behind([everyone[rank][3:5] for rank in local_ranks]),
        }
        opened = [number for numbers in attached.values() for number in numbers if number >= 0]
        _start(settings, [*opened, *([listener.fileno()] if listener else [])])
        for number in opened:
            os.close(number)
    if listener is not None:
        listener.close()
    if slot.read_current().phase == "start":
        slot.phase("compute")  # until somebody says something else


def _variables() -> list[int]:
    """Returns one number for each variable in COMPARED, so that ranks can compare their values."""
    backend, run_dir = (os.environ.get(name, "") for name in COMPARED)
    # A run directory may have another path on each machine.
    return [zlib.crc32(backend.encode(errors="replace")), int(bool(run_dir))]


def _check_variables(everyone: list[list[int]]) -> None:
    """Raises ConfigError: a variable that decides which calls ranks make differs between ranks."""
    for name, values in zip(COMPARED, zip(*everyone, strict=True), strict=True):
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), 0)
        if rank:
            difference = f"differs between rank 0 and rank {rank}"
            if 0 in (values[0], values[rank]):
                owner = 0 if values[0] else rank
                difference = f"is set on rank {owner}, but not on rank {rank - owner}"
            raise ConfigError(
                f"[launch] {name} {difference}; export the same value on all ranks, or on none"
            ).on_all_ranks()


def _leave(process: int) -> None:
    """In an exit handler: the watcher is to know that this process ends in order, and not by
    `os._exit`.
    """
    if os.getpid() == process:
        slot.note_end(*exits.leaving())


def _start(settings: dict[str, Any], descriptors: list[int]) -> None:
    """Starts the watcher, which takes over these open files."""
    program = Path(__file__).with_name("watcher.py")
    with contextlib.suppress(OSError):
        words = [sys.executable, "-I", "-S", str(program)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        # in a session of its own: it outlives the ranks by a moment, also when their process group
        # is killed
        process = subprocess.Popen(words, **pipes, start_new_session=True, pass_fds=descriptors)
        # it goes on in a process that is no child of this one
        threading.Thread(target=process.wait, name="odyssey watcher", daemon=True).start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.close()


def _addresses() -> list[int]:
    """IPv4 addresses of this machine's interfaces, without loopback, as numbers; filled up with
    zeros.
    """
    addresses = []
    with (
        contextlib.suppress(ImportError, OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s,
    ):
        import fcntl

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # SIOCGIFADDR
                answer = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                addresses.append(int.from_bytes(answer[20:24], "big"))
    addresses = [a for a in addresses if a >> 24 not in (0, 127)]
    return (addresses + [0] * ADDRESSES)[:ADDRESSES]


def _text(address: int) -> str:
    return socket.inet_ntoa(address.to_bytes(4, "big"))


def _listen(
    own_addresses: list[int], nodes: list[list[int]]
) -> tuple[socket.socket | None, np.ndarray]:
    """(listening socket, [address, port]) on the one address through which the other machines
    reach this one.
    """
    for theirs in nodes[1:]:
        for address in theirs:
            # such as that of a bridge for containers, the same everywhere
            if not address or address in own_addresses:
                continue
            with contextlib.suppress(OSError):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                    s.connect((_text(address), 9))  # sends nothing: asks which way it would go
                    own_address = s.getsockname()[0]
                listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                listener.bind((own_address, 0))
                listener.listen(128)
                number = int.from_bytes(socket.inet_aton(own_address), "big")
                return listener, np.array([number, listener.getsockname()[1]], np.int64)
    return None, np.zeros(2, np.int64)


def _left_behind(started: list[list[int]]) -> list[str]:
    """Files that MPI leaves behind when a job is aborted: those in shared memory that this
    process has mapped, and the one that hydra made for the ranks of this machine when the
    first of them started MPI: between the earliest begin and the earliest end of `started`,
    in ns. If there are several of that age, none.
    """
    import tempfile

    from ..base.proc import SHARED, mapped

    shared_files = [path for path in mapped() if path.startswith(SHARED)]
    first, last = (min(times) for times in zip(*started, strict=True))
    hydra_files = []
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob("hydra_hwloc_xmlfile_*") if first else ():
            with contextlib.suppress(OSError):
                status = path.lstat()
                # a clock's tick
                if (
                    status.st_uid == os.getuid()
                    and first - 10_000_000 <= status.st_mtime_ns <= last
                ):
                    hydra_files.append(str(path))
    return sorted({*shared_files, *(hydra_files if len(hydra_files) == 1 else ())})
