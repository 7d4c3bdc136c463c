"""CUDA's driver, for what the kernel library has no call for: graphs, and events for another
library's streams.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..errors import DeviceError

_NOT_READY = 600  # what an event waits for is not done


class Driver:
    """The loaded driver.

    A function that it lacks, or that fails, raises DeviceError with the driver's words.

    Arguments that are integers are addresses or sizes, 8 bytes.
    """

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as problem:
            raise DeviceError(f"[gpu] no CUDA driver: {problem}") from None

    def call(self, name: str, *args: Any, accepted: int = 0) -> int:
        """Calls a function; its result, which is 0 or `accepted`."""
        try:
            function = getattr(self._lib, name)
        except AttributeError as problem:
            raise DeviceError(f"[gpu] this CUDA driver is too old: {problem}") from None
        result = function(*[ctypes.c_uint64(a) if isinstance(a, int) else a for a in args])
        if result not in (0, accepted):
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(result, ctypes.byref(text))
            raise DeviceError(
                f"[gpu] {name}: {(text.value or b'error').decode(errors='replace')} ({result})"
            )
        return result

    def get(self, kind: Any, name: str, *args: Any) -> int:
        """Returns what a function writes through its first argument."""
        out = kind()
        self.call(name, ctypes.byref(out), *args)
        return out.value or 0

    def ready(self, event: int) -> bool:
        """Returns whether an event has happened."""
        return self.call("cuEventQuery", event, accepted=_NOT_READY) == 0


@functools.cache
def driver() -> Driver:
    """The driver, loaded when first asked for."""
    return Driver()
