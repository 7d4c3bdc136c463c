"""The streams of a device: in which order it runs the operations of several threads.

A thread adds operations to its current stream, and the device runs them later. Another thread has
another current stream. So it must wait before it reads what the first thread has computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

#: For each device, the stream for copies that run beside the caller's operations.
_copy_streams: dict[torch.device, Any] = {}


def has_streams(device: torch.device) -> bool:
    """Returns whether operations of a device run later, in the order of a stream."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "current_stream")


class Handover:
    """A point in the caller's stream at which another thread continues.

    Args:
        device: the device of the stream, which has streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._start = self._module.current_stream(device).record_event()

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Runs operations of the block after the point, and waits for them at its end.

        So a stream of any thread may use the results afterwards.
        """
        try:
            with self.beside():
                yield
        finally:
            _copy_streams[self._device].synchronize()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Runs operations of the block after the point, on the stream for copies.

        The caller's stream doesn't wait for them.
        """
        stream = _copy_streams.get(self._device)
        if stream is None:
            stream = self._module.Stream(self._device)
            _copy_streams[self._device] = stream
        stream.wait_event(self._start)
        # leaving only the stream would make a context on the thread's former device
        with self._module.device(self._device), self._module.stream(stream):
            yield
