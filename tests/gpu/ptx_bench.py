"""Runs PTX written by hand on the emulated GPU, through its driver's C functions: no MAX, no
compiler.

For the emulator's own tests. Each `Gpu` is an instance of the driver of its own, with settings of
its own.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from gpu.emulated import build

ILLEGAL_ADDRESS = 700
_numbers = itertools.count()
_copies = Path(tempfile.mkdtemp(prefix="odyssey-emulator-"))


class Failed(RuntimeError):
    """A call of the driver that did not return CUDA_SUCCESS."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned {code}")
        self.code = code


class Gpu:
    """A driver of its own. `settings`: the emulator's environment, as ODYSSEY_EMULATOR_LATE="1"."""

    def __init__(self, **settings: str) -> None:
        # a file of its own: a library of its own, with its own state
        copy = _copies / f"{next(_numbers)}.so"
        shutil.copy(build() / "libcuda.so.1", copy)
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("ODYSSEY_EMULAT")
        }
        with mock.patch.dict(os.environ, clean | settings, clear=True):
            self.lib = ctypes.CDLL(str(copy))
            self.call("cuInit", 0)
        self.call("cuCtxSetCurrent", self.context(0))

    def context(self, device: int) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def use(self, device: int) -> None:
        self.call("cuCtxSetCurrent", self.context(device))

    def call(self, name: str, *args: object) -> None:
        code = getattr(self.lib, name)(*args)
        if code:
            raise Failed(name, code)

    def new(self, name: str, *args: object) -> ctypes.c_void_p:
        """The handle that a function writes to its first argument."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *args)
        return handle

    def empty(self, n_bytes: int) -> int:
        return self.new("cuMemAlloc_v2", ctypes.c_size_t(n_bytes)).value

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        self.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(address),
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(array.nbytes),
        )
        return address

    def get(self, address: int, shape: object, dtype: object) -> np.ndarray:
        out = np.empty(shape, dtype)
        self.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(out.ctypes.data),
            ctypes.c_uint64(address),
            ctypes.c_size_t(out.nbytes),
        )
        return out

    def kernel(self, body: str, params: str = "", before: str = "") -> ctypes.c_void_p:
        """A kernel `k` of PTX text. `params`: types, as "u64 u64 u32"; they are p0, p1, ..."""
        body = body.replace(";", ";\n")
        declared = ", ".join(f".param .{t} p{i}" for i, t in enumerate(params.split()))
        text = (
            f".version 8.1\n.target sm_90a\n.address_size 64\n{before}\n.visible .entry "
            f"k({declared})\n{{\n{body}\n}}\n"
        )
        module = self.new("cuModuleLoadData", ctypes.c_char_p(text.encode()))
        return self.new("cuModuleGetFunction", module, ctypes.c_char_p(b"k"))

    def launch(
        self,
        kernel: ctypes.c_void_p,
        *args: object,
        grid: int | tuple[int, int, int] = 1,
        block: int | tuple[int, int, int] = 32,
        shared: int = 0,
        stream: object = None,
    ) -> None:
        """`args`: ints are 64-bit numbers or addresses; ctypes values are what they are."""
        values = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_uint64(a) for a in args]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
        g, b = ((x, 1, 1) if isinstance(x, int) else x for x in (grid, block))
        self.call("cuLaunchKernel", kernel, *g, *b, shared, stream, pointers, None)

    def free_everything(self) -> None:
        """Clears a sticky error, as the reset of a device does."""
        self.call("cuDevicePrimaryCtxReset_v2", 0)
