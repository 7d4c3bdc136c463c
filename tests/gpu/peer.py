"""The transport between ranks of one machine (odyssey/comm/peer.py), for the native engine.

test_gpu_transport.py runs it on an emulated GPU, which several ranks may share.
"""

from __future__ import annotations

from collections.abc import Sequence

from odyssey.comm.base import Communicator
from odyssey.comm.device import Message
from odyssey.comm.peer import PeerTransport, Route
from odyssey.core.gpu_native import Gpu


class NativePeers(PeerTransport):
    """Messages between GPUs of ranks, with a route that is made when messages are new.

    All ranks must have new messages at the same time.
    """

    def __init__(self, comm: Communicator, gpu: Gpu) -> None:
        super().__init__(comm, gpu.stream)
        self._routes: dict[tuple[tuple[tuple[int, int], ...], ...], Route] = {}

    @property
    def exchanges(self) -> int:
        return self._count

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], route: Route | None = None
    ) -> None:
        if route is None:
            sizes = tuple(tuple((q, n) for q, _, n in some) for some in (sends, receives))
            if sizes not in self._routes:
                self._routes[sizes] = self.route([(q, size) for q, _, size in sends])
            route = self._routes[sizes]
        super().exchange(sends, receives, route)
