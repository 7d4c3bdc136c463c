"""How parts of a module move between ranks that keep one each (ZeRO): between their devices, over
the links of links.py, or through the memory of the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from ..comm import Communicator, Exchanged
from ..core import native
from ..errors import CollectiveError
from ..parallel import plan as planning
from . import rank_sums
from .device import Device, host_array, on_host
from .links import Links
from .streams import Handover, has_streams

_FLOAT = 4  # bytes


class HostMoves:
    """Moves of flat float32 tensors of a device through the memory of the host.

    All ranks make the same calls.
    """

    def __init__(self, comm: Communicator, device: Device) -> None:
        self._comm = comm
        self._device = device

    def all_gather(self, flat: torch.Tensor, ranges: Sequence[planning.Run]) -> None:
        """Sends this rank's range of `flat` to all ranks, and receives theirs."""
        with on_host(flat) as values:
            self._comm.all_gather_v(values, ranges)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Sends all of `flat` from rank `root` to all ranks."""
        if self._device.is_host:
            # Tensor.numpy() isn't used: torch can't give back memory that a NumPy array refers to.
            memory = native.memory(flat.data_ptr(), _FLOAT * flat.numel()).view(np.float32)
            self._comm.broadcast(memory, root=root)
        else:
            with on_host(flat) as values:
                self._comm.broadcast(values, root=root)

    def start_all_to_all(
        self,
        key: Hashable,
        sent: torch.Tensor,
        send_counts: Sequence[int],
        received: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> Callable[[], Any]:
        """Sends to each rank its floats of `sent`, and receives those from each rank in order.

        Args:
            key: the same on all ranks, and another one for each combination of counts.
            sent, send_counts: the floats to each rank, one after the other. They stay as they are
                until the exchange is complete.
            received, receive_counts: the floats from each rank.

        Returns:
            A function that waits until `received` is complete. It is called once.
        """
        source = host_array(sent)
        is_host = self._device.is_host
        target = received.numpy() if is_host else np.empty(received.numel(), np.float32)
        request = self._comm.all_to_all_v(source, send_counts, target, receive_counts, wait=False)
        return functools.partial(self._finish, request, source, target, received)

    def _finish(
        self, request: Any, source: np.ndarray, target: np.ndarray, received: torch.Tensor
    ) -> None:
        """Waits for an exchange, which reads `source` until it is complete."""
        request.wait()
        if not self._device.is_host:
            received.copy_(torch.from_numpy(target))


class LinkedMoves(HostMoves):
    """Moves between the devices of ranks. The host waits for each, so that it sees ranks that end.

    Args:
        comm: the ranks.
        device: the device of this rank.
        links: the way between the devices.
    """

    def __init__(self, comm: Communicator, device: Device, links: Links) -> None:
        super().__init__(comm, device)
        self._links = links
        self._plans: dict[Hashable, Any] = {}

    def _find_plan(
        self, key: Hashable, send_counts: Sequence[int], ranges: Sequence[planning.Run]
    ) -> Any:
        """Returns the plan of an exchange; collective, if there is none for the key."""
        if key not in self._plans:
            self._plans[key] = self._links.prepare(send_counts, ranges)
        return self._plans[key]

    def _start(self, text: str, move: Callable[[], None]) -> Callable[[], Any]:
        """Starts an exchange, and returns a function that waits for it.

        It runs on another stream than the backward pass, which continues meanwhile.

        Raises CollectiveError: a rank has ended, or did not come before the deadline.
        """
        exchanged = Exchanged(self._comm, [self._links], text)
        device = self._device.torch_device
        with Handover(device).beside() if has_streams(device) else self._device.entered():
            try:
                move()
            except CollectiveError as error:
                exchanged.broke(error)
                raise
            exchanged.mark()

        def finish() -> None:
            with self._device.entered():
                exchanged.wait()

        return finish

    def all_gather(self, flat: torch.Tensor, ranges: Sequence[planning.Run]) -> None:
        floats = max(1, rank_sums.PIECE_FLOATS // self._comm.size)
        longest = max(stop - start for start, stop in ranges)
        for offset in range(0, longest, floats):
            piece = [(min(a + offset, b), min(a + offset + floats, b)) for a, b in ranges]
            with self._device.entered():
                plan = self._find_plan(tuple(b - a for a, b in piece), [0] * len(piece), piece)

            def move(plan: Any = plan, piece: list[planning.Run] = piece) -> None:
                self._links.all_gather(plan, flat, piece)

            self._start("parts of parameters between devices", move)()

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        floats = flat.numel()
        self.all_gather(flat, [(0, floats * (p == root)) for p in range(self._comm.size)])

    def start_all_to_all(
        self,
        key: Hashable,
        sent: torch.Tensor,
        send_counts: Sequence[int],
        received: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> Callable[[], Any]:
        with self._device.entered():
            plan = self._find_plan(key, send_counts, [(0, 0)] * len(send_counts))

        def move() -> None:
            self._links.all_to_all(plan, sent, send_counts, received, receive_counts)

        return self._start("parts of gradients between devices", move)
