"""How bytes move between the devices of ranks: which way is used, and what each way needs.

    PeerLinks     CUDA IPC (comm/peer.py): ranks of one machine, which may share a GPU
    GroupLinks    a process group of PyTorch, NCCL's: ranks on several machines, a GPU for each

A way moves bytes only. The additions are in rank_sums.py, along the tree. If no way works on all
ranks, sums go through the memory of the host.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base import launcher
from ..comm import Communicator, PeerTransport, deadline
from ..errors import CollectiveError, ConfigError, DeviceError
from ..parallel import plan as planning
from ..train import spread
from .device import Device
from .streams import has_streams

SETTING = "ODYSSEY_DEVICE_SUMS"
PROBE_FLOATS = 1 << 18
_FLOAT = 4  # bytes


class Links:
    """A way for float32 numbers between the devices of the ranks of a communicator.

    Tensors are flat and contiguous. All ranks make the same calls.
    """

    def prepare(self, send_counts: Sequence[int], ranges: Sequence[planning.Run]) -> Any:
        """Returns a plan for `all_to_all` and `all_gather`; a collective call.

        Args:
            send_counts: the floats that this rank sends to each rank.
            ranges: the floats of each rank in an `all_gather`.
        """
        raise NotImplementedError

    def all_to_all(
        self,
        plan: Any,
        sent: torch.Tensor,
        send_counts: Sequence[int],
        received: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> None:
        """Sends to each rank its floats of `sent`, and receives those from each rank in order."""
        raise NotImplementedError

    def all_gather(self, plan: Any, flat: torch.Tensor, ranges: Sequence[planning.Run]) -> None:
        """Sends this rank's range of `flat` to all ranks, and receives theirs."""
        raise NotImplementedError

    def mark(self) -> None:
        """Remembers what has been exchanged until now."""
        raise NotImplementedError

    def is_complete(self) -> bool:
        """Returns whether all of that is complete. Raises CollectiveError if it never will be."""
        raise NotImplementedError

    def abort(self) -> None:
        """Ends what is under way after an error, with wrong numbers."""
        raise NotImplementedError


class PeerLinks(Links):
    """CUDA IPC between ranks of one machine."""

    def __init__(self, comm: Communicator, stream: Callable[[], int]) -> None:
        self._comm = comm
        self._transport = PeerTransport(comm, stream)
        self.mark = self._transport.mark
        self.is_complete = self._transport.is_complete
        self.abort = self._transport.abort

    def prepare(self, send_counts: Sequence[int], ranges: Sequence[planning.Run]) -> Any:
        local_floats = ranges[self._comm.rank][1] - ranges[self._comm.rank][0]
        return (
            self._transport.route(self._sizes(send_counts)),
            self._transport.route(self._sizes([local_floats] * self._comm.size)),
        )

    def _sizes(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (rank, bytes) of the messages to other ranks."""
        return [
            (p, _FLOAT * count) for p, count in enumerate(counts) if count and p != self._comm.rank
        ]

    def _messages(
        self, flat: torch.Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Returns (rank, address, bytes) of the messages of other ranks in `flat`."""
        first = flat.data_ptr()
        return [(p, first + _FLOAT * starts[p], size) for p, size in self._sizes(counts)]

    def all_to_all(
        self,
        plan: Any,
        sent: torch.Tensor,
        send_counts: Sequence[int],
        received: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> None:
        route, _ = plan
        me = self._comm.rank
        send_starts = _starts(send_counts)
        receive_starts = _starts(receive_counts)
        target = received[receive_starts[me] :][: receive_counts[me]]
        target.copy_(sent[send_starts[me] :][: send_counts[me]])
        self._transport.exchange(
            self._messages(sent, send_starts, send_counts),
            self._messages(received, receive_starts, receive_counts),
            route,
        )

    def all_gather(self, plan: Any, flat: torch.Tensor, ranges: Sequence[planning.Run]) -> None:
        _, route = plan
        start, stop = ranges[self._comm.rank]
        size = self._comm.size
        self._transport.exchange(
            self._messages(flat, [start] * size, [stop - start] * size),
            self._messages(flat, [a for a, _ in ranges], [b - a for a, b in ranges]),
            route,
        )


class GroupLinks(Links):
    """A process group of PyTorch, which moves bytes only.

    Args:
        group: of the same ranks.
        device: of the tensors.
    """

    def __init__(self, comm: Communicator, group: Any, device: torch.device) -> None:
        self._comm = comm
        self._group = group
        self._device = device
        self._event: Any = None

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a tensor as the group takes it."""
        return flat

    def prepare(self, send_counts: Sequence[int], ranges: Sequence[planning.Run]) -> Any:
        return None

    def all_to_all(
        self,
        plan: Any,
        sent: torch.Tensor,
        send_counts: Sequence[int],
        received: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> None:
        target = self.view(received[: sum(receive_counts)])
        source = self.view(sent[: sum(send_counts)])
        counts = list(receive_counts), list(send_counts)
        self._group.alltoall_base(target, source, *counts).wait()

    def all_gather(self, plan: Any, flat: torch.Tensor, ranges: Sequence[planning.Run]) -> None:
        options = dist.BroadcastOptions()
        works = []
        for root, (start, stop) in enumerate(ranges):
            if start < stop:
                options.rootRank = root
                works.append(self._group.broadcast([self.view(flat[start:stop])], options))
        for work in works:
            work.wait()

    def mark(self) -> None:
        if has_streams(self._device):
            module = torch.get_device_module(self._device)
            self._event = module.current_stream(self._device).record_event()

    def is_complete(self) -> bool:
        return self._event is None or self._event.query()

    def abort(self) -> None:
        with contextlib.suppress(AttributeError):  # older versions of PyTorch
            self._group.abort()


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts).tolist()][:-1]


# --- which way is used ---


def _connect_peers(comm: Communicator, device: Device) -> Links:
    return PeerLinks(comm, device.stream)


def _connect_nccl(comm: Communicator, device: Device) -> Links:
    """Returns links over a process group of NCCL.

    Raises DeviceError: there is no NCCL, or ranks share a GPU. All ranks raise it.
    """
    has_nccl = dist.is_nccl_available() and not comm.in_threads
    if not comm.all_reduce(np.array([has_nccl], np.int8), "min")[0]:
        raise DeviceError("[torch] a rank has no NCCL")
    names = [row.tobytes() for row in comm.all_gather_each(device.identity())]
    if len(set(names)) < len(names):
        raise DeviceError("[torch] ranks share a GPU, which NCCL doesn't support")
    limit = datetime.timedelta(seconds=min(2 * deadline() + 60, 1e6))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    group = dist.ProcessGroupNCCL(make_store(comm, limit), comm.rank, comm.size, options)
    return GroupLinks(comm, group, device.torch_device)


def make_store(comm: Communicator, limit: datetime.timedelta) -> dist.TCPStore:
    """Returns a store of all ranks, in which a process group of PyTorch can meet.

    A collective call. limit: how long a rank waits for the others.
    """
    host, port = spread(comm, [socket.gethostname(), launcher.free_port()])
    return dist.TCPStore(host, port, comm.size, comm.rank == 0, limit)


#: For each type of device, the ways to try, in this order.
WAYS: dict[str, list[tuple[str, Callable[[Communicator, Device], Links]]]] = {
    "cuda": [("CUDA IPC", _connect_peers), ("NCCL", _connect_nccl)],
}
#: For ranks and a device, the result of `connect`. It stays, because other ranks map its memory.
_known_links: dict[tuple[Communicator, str], tuple[Links | None, str]] = {}


def connect(comm: Communicator, device: Device) -> tuple[Links | None, str]:
    """Returns the way between the devices of all ranks; a collective call.

    Returns None, and the reason, if sums go through the host. All ranks get the same way. Later
    calls for the same ranks and device return the same links.

    Raises ConfigError: ODYSSEY_DEVICE_SUMS has a value that isn't supported.
    """
    text = os.environ.get(SETTING, "") or "auto"
    code = {"auto": 0, "host": 1}.get(text, 2)
    key = (comm, device.name)
    is_new = key not in _known_links
    largest_code, is_new = comm.all_reduce(np.array([code, is_new], np.int8), "max").tolist()
    if largest_code > 1:
        value = f"{SETTING}={text}" if code > 1 else f"{SETTING} of another rank"
        raise ConfigError(f"[torch] {value} isn't supported; use auto or host").on_all_ranks()
    if largest_code == 1:
        return None, f"{SETTING}=host"
    if is_new:
        _known_links[key] = _connect_first(comm, device)
    return _known_links[key]


def _connect_first(comm: Communicator, device: Device) -> tuple[Links | None, str]:
    """Returns the first way that works on all ranks."""
    if comm.in_threads:
        return None, "ranks are threads of one process"
    problems = []
    for name, make in WAYS.get(device.type, []):
        links, problem = _agree(comm, partial(_open, make, comm, device))
        if not problem:
            _, problem = _agree(comm, partial(_probe, comm, links, device))
        if not problem:
            return links, ""
        problems.append(f"{name}: {problem}")
    return None, "; ".join(problems) or f"devices of type {device.type} have no other way"


def _open(make: Callable[[Communicator, Device], Links], comm: Communicator, device: Device) -> Any:
    with device.entered():
        return make(comm, device)


def _agree(comm: Communicator, step: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of a step, and the problem of the first rank on which it failed.

    A collective call. The problem is "" if no rank had one.
    """
    result = None
    problem = ""
    try:
        result = step()
    except CollectiveError:
        raise
    except (DeviceError, RuntimeError) as error:  # PyTorch's errors are RuntimeErrors
        problem = " ".join(str(error).split())[:300] or type(error).__name__
    texts = comm.all_gather_each(np.frombuffer(problem.encode(), np.uint8))
    failed = [row.tobytes().decode(errors="ignore") for row in texts if row.size]
    return result, re.sub(r"^\[\w+\] ", "", failed[0]) if failed else ""


def _probe(comm: Communicator, links: Links, device: Device) -> None:
    """Sends a pattern from each rank to all ranks, and then other parts of it to each rank.

    Raises DeviceError: numbers are wrong.
    """
    counts = [PROBE_FLOATS] * comm.size
    ranges = [(p * PROBE_FLOATS, (p + 1) * PROBE_FLOATS) for p in range(comm.size)]
    numbers = torch.arange(comm.size * PROBE_FLOATS, dtype=torch.float32)
    start, stop = ranges[comm.rank]
    flat = device.zeros(len(numbers))
    flat[start:stop] = numbers[start:stop].to(device.torch_device)
    received = device.zeros(len(numbers))
    with device.entered():
        plan = links.prepare(counts, ranges)
        links.all_gather(plan, flat, ranges)
        links.all_to_all(plan, flat, counts, received, counts)
    expected = numbers[start:stop].repeat(comm.size)
    if not (torch.equal(flat.cpu(), numbers) and torch.equal(received.cpu(), expected)):
        raise DeviceError("[torch] a pattern did not arrive")
