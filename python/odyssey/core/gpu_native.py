"""The compiled library for GPUs: the only file that loads it and knows its C interface
(mojo/gpu_capi.mojo).

MAX's own Python driver is not used: it would bring a library of 165 MB, and the same runtime is
behind both. A GPU is a handle, memory is an address; work goes into one of two queues, COMPUTE and
COPY; only `synchronize` and `wait` wait.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from typing import Any

import numpy as np

from ..compile import library as build
from ..errors import DeviceError
from . import native as host
from . import own_ops

COMPUTE, COPY = range(2)


class StepContext(ctypes.Structure):
    """Mirrors `StepContext` in mojo/kernels/gpu/launch.mojo."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        *host.numbers("step first samples shard_size images bytes arrays rows scale shift"),
        ("loss_scale", ctypes.c_float),
        ("unused", ctypes.c_float),
    ]


class GpuStep(ctypes.Structure):
    """Mirrors `GpuStep` in mojo/runtime/gpu.mojo."""

    _fields_ = host.numbers(
        "table program records params grads grad_floats work work_floats scratch context flag "
        "shards fold accumulate"
    )


class StepBlock(ctypes.Structure):
    """Block of what the host tells a device per step, in one copy."""

    _fields_ = [
        ("context", StepContext),
        ("divisor", ctypes.c_float),
        ("flag", ctypes.c_int32),
        ("unused", ctypes.c_int64),
    ]


BLOCK_BYTES = ctypes.sizeof(StepBlock)
_ERROR = 1024  # bytes of a message


class GpuLibrary(host.OpTable):
    """The loaded library. A function that fails raises DeviceError with the driver's words."""

    def __init__(self, path: str, runtime: list[str]) -> None:
        for name in runtime:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        self._lib = lib = ctypes.CDLL(path)
        lib.odyssey_gpu_init()
        size = lib.odyssey_gpu_context_size()
        assert size == ctypes.sizeof(StepContext), (size, ctypes.sizeof(StepContext))
        number = ctypes.c_ssize_t
        pointer = ctypes.c_void_p
        super().__init__(lib, "odyssey_gpu")
        cpu_ops = host.library().ops
        # as the CPU's table declares them
        self.ops = {name: cpu_ops.get(name, op) for name, op in self.ops.items()}
        for name, arguments in {
            "open": [number, pointer],
            "memory": [pointer, pointer],
            "peer": [pointer, pointer],
            "allocate": [pointer, number, number, pointer],
            "free": [pointer, number],
            "copy": [pointer] + [number] * 5,
            "copy_peer": [pointer, pointer] + [number] * 3,
            "clear": [pointer] + [number] * 3,
            "event": [pointer] + [number] * 3,
            "synchronize": [pointer, number],
            "stream": [pointer, number],
            "run": [pointer, pointer],
            "enqueue": [pointer, pointer, number],
            "scratch": [pointer, pointer],
            "tree_sum": [pointer] + [number] * 5,
            "norm": [pointer] + [number] * 3,
            "fingerprint": [pointer] + [number] * 5,
        }.items():
            host.declared(lib, f"odyssey_gpu_{name}", [*arguments, ctypes.c_char_p, number])
        self.name = host.declared(lib, "odyssey_gpu_name", [pointer, ctypes.c_char_p, number])
        self.count = host.declared(lib, "odyssey_gpu_count")  # GPUs of this machine that it can use
        self.close = host.declared(lib, "odyssey_gpu_close", [pointer], None)  # gives a device back
        self.fingerprint_scratch = host.declared(
            lib, "odyssey_gpu_fingerprint_scratch", [number, number]
        )
        self._text = ctypes.create_string_buffer(_ERROR)

    def call(self, name: str, *args: Any) -> int:
        """Calls odyssey_gpu_`name`. Raises DeviceError where it failed."""
        result = getattr(self._lib, f"odyssey_gpu_{name}")(*args, self._text, _ERROR)
        if result < 0:
            words = " ".join(self._text.value.decode(errors="replace").split())
            words = re.sub(r"^At \S+: |To get more accurate error information.*", "", words).strip()
            raise DeviceError(f"[gpu] {name}: {words}")
        return result


@functools.cache
def library() -> GpuLibrary:
    """The library, compiled on first use on this machine. Raises BuildError."""
    host.library()  # sets what the runtime reads when it starts
    # MAX would take 90 % of the device for a pool of its own. Areas here are few, large and kept,
    # so each is taken from the driver as it is: several processes can share a device, and what is
    # free is what the driver says.
    os.environ.setdefault("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE", "0")
    # else 1.28 GiB, pinned, per device
    os.environ.setdefault("MODULAR_DEVICE_CONTEXT_HOST_MEMORY_MANAGER_SIZE", "0")
    # the order of NVML, which was asked for their kinds
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    loaded = GpuLibrary(
        build.open_gpu_library().to_load(), [str(p) for p in build.runtime_libraries()]
    )
    own_ops.add_to_gpus(loaded)
    return loaded


class Gpu:
    """One device: memory, copies, events, programs.

    Its memory is given back with it. number: of the device, from 0.
    """

    def __init__(self, number: int) -> None:
        self._library = library()
        out = ctypes.c_int64()
        self._handle: int | None = None
        self._library.call("open", number, ctypes.addressof(out))
        self.number = number
        self._handle = out.value
        text = ctypes.create_string_buffer(256)
        length = self._library.name(self._handle, text, 256)
        self.name = text.raw[:length].decode(errors="replace")

    def close(self) -> None:
        """Gives it back; nothing may use its memory any more."""
        if self._handle is not None:
            self._library.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    def _call(self, name: str, *args: Any) -> int:
        return self._library.call(name, self._handle, *args)

    def memory(self) -> tuple[int, int]:
        """Bytes of memory that are free, and of all."""
        out = (ctypes.c_int64 * 2)()
        self._call("memory", ctypes.addressof(out))
        return out[0], out[1]

    def allocate(self, nbytes: int) -> int:
        """Device memory, not initialised; its address."""
        out = ctypes.c_int64()
        try:
            self._call("allocate", nbytes, 0, ctypes.addressof(out))
        except DeviceError as problem:
            free = self.memory()[0]
            raise DeviceError(
                f"[gpu] gpu:{self.number} has {free >> 20} MiB free and {-(-nbytes >> 20)} MiB "
                "are needed; lower "
                f"--global-batch-size, use more GPUs, or fewer workers on one ({problem})"
            ) from None
        return out.value

    def pinned(self, nbytes: int) -> np.ndarray:
        """Host memory (nbytes,) uint8, zero, that the device reads and writes by itself, also in
        kernels.
        """
        out = ctypes.c_int64()
        self._call("allocate", nbytes, 1, ctypes.addressof(out))
        buffer = host.memory(out.value, max(nbytes, 1))
        buffer.base.gpu = self  # which must stay open
        return buffer[:nbytes]

    def free(self, address: int) -> None:
        """Gives memory of either kind back."""
        self._call("free", address)

    def upload(self, address: int, array: np.ndarray, queue: int = COMPUTE) -> None:
        """Enqueues a copy of an array to device memory.

        The array must stay as it is until the copy is done.
        """
        if array.nbytes:
            self._call("copy", 0, address, array.ctypes.data, array.nbytes, queue)

    def download(self, array: np.ndarray, address: int, queue: int = COMPUTE) -> None:
        """Enqueues a copy of device memory into an array."""
        if array.nbytes:
            self._call("copy", 1, array.ctypes.data, address, array.nbytes, queue)

    def move(self, to: int, address: int, nbytes: int, queue: int = COMPUTE) -> None:
        """Enqueues a copy within the device."""
        self._call("copy", 2, to, address, nbytes, queue)

    def take(self, source: Gpu, to: int, address: int, nbytes: int) -> None:
        """Enqueues a copy from another device's memory, when what is in its COMPUTE queue now is
        done.
        """
        self._call("copy_peer", source._handle, to, address, nbytes)

    def reaches(self, peer: Gpu) -> bool:
        """Returns whether kernels here may read the other's memory."""
        return bool(self._call("peer", peer._handle))

    def clear(self, address: int, nbytes: int, queue: int = COMPUTE) -> None:
        """Enqueues setting memory to zero."""
        self._call("clear", address, nbytes, queue)

    def event(self) -> Event:
        return Event(self, self._call("event", 0, 0, 0))

    def synchronize(self, queue: int = COMPUTE) -> None:
        """Waits until a queue is empty."""
        self._call("synchronize", queue)

    def stream(self, queue: int = COMPUTE) -> int:
        """The CUstream of a queue, for a library that puts work into it; makes the device the
        thread's current one.
        """
        return self._call("stream", queue)

    def run(self, step: GpuStep) -> None:
        """Enqueues a program."""
        step.table = self._library.table
        self._call("run", ctypes.addressof(step))

    def enqueue(self, step: GpuStep, first: int) -> int:
        """Enqueues one record of a program and the records that it computes as well; returns the
        number of the next.
        """
        step.table = self._library.table
        return self._call("enqueue", ctypes.addressof(step), first)

    def scratch(self, step: GpuStep) -> int:
        """Floats of scratch memory that a program wants."""
        step.table = self._library.table
        return self._call("scratch", ctypes.addressof(step))

    def tree_sum(self, to: int, address: int, stride: int, n: int, floats: int) -> None:
        """Enqueues the sum along the tree of n buffers of `floats` floats, `stride` floats
        apart.
        """
        self._call("tree_sum", to, address, stride, n, floats)

    def norm(self, out: int, address: int, floats: int) -> None:
        """Enqueues what norm.py needs of floats, in a unit of their own: two int64 of squares,
        then the largest one.
        """
        self._call("norm", out, address, floats)

    def fingerprint_scratch(self, count: int, longest: int) -> int:
        """Bytes of scratch memory that the fingerprint of `count` runs of at most `longest`
        floats wants.
        """
        return 8 * self._library.fingerprint_scratch(count, longest)

    def fingerprint(self, out: int, scratch: int, runs: int, count: int, longest: int) -> None:
        """Enqueues the fingerprint of runs, (count, 3) int64 in device memory, into a uint64
        there.
        """
        self._call("fingerprint", out, scratch, runs, count, longest)


class Event:
    """A point in a queue that others can wait for."""

    def __init__(self, gpu: Gpu, number: int) -> None:
        self._gpu = gpu
        self._number = number

    def record(self, queue: int = COMPUTE) -> None:
        """It happens when all that is in the queue now is done."""
        self._gpu._call("event", 1, self._number, queue)

    def hold(self, queue: int) -> None:
        """Makes what is put into the queue from now on wait for it."""
        self._gpu._call("event", 2, self._number, queue)

    def wait(self) -> None:
        """Blocks until it has happened."""
        self._gpu._call("event", 3, self._number, 0)
