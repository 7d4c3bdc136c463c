"""The compiled kernel library: the only file that loads it and knows its C interface (mojo/capi.mojo).

A program is an int64 array (records, RECORD); what its numbers mean is said in shared/training/record.mojo. ctypes lets
the GIL go during every call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct

import numpy as np

from . import build

# Threads of the pool wait this long (microseconds) for work before they sleep. Waking a sleeping one costs about
# 200 us, a fifth of a LeNet-5 step at batch 64. Read by the runtime when it starts; the user's own value is kept.
BUSY_WAIT_US = "2000"

# Spaces of an operand: (space << 56) | byte offset.
ABSOLUTE, PARAMS, GRADS, WORK = range(4)
ALIGNMENT = 64  # bytes; one vector of 16 floats


class Context(ctypes.Structure):
    """Mirrors `Context` in shared/training/record.mojo."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("valid", ctypes.c_int64),
        ("images", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("labels", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("scale", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("loss_scale", ctypes.c_double),
    ]


class Step(ctypes.Structure):
    """Mirrors `Step` in shared/training/executor.mojo."""

    _fields_ = [
        ("program", ctypes.c_int64),
        ("records", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("actions", ctypes.c_int64),
        ("counts", ctypes.c_int64),
        ("params", ctypes.c_int64),
        ("work", ctypes.c_int64),
        ("work_bytes", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("base", ctypes.c_int64),
        ("zero", ctypes.c_int64),
        ("buffers", ctypes.c_int64),
        ("buffer_floats", ctypes.c_int64),
        ("shard_size", ctypes.c_int64),
        ("samples", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("context", Context),
    ]


class Team(ctypes.Structure):
    """Mirrors `Team` in mojo/kernels/shared_reduce.mojo."""

    _fields_ = [
        ("ranks", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("counter", ctypes.c_int64),
        ("bases", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("barrier", ctypes.c_int64),
        ("spins", ctypes.c_int64),
        ("yields", ctypes.c_int64),
    ]


class Job(ctypes.Structure):
    """Mirrors `Job` in mojo/kernels/shared_reduce.mojo."""

    _fields_ = [
        ("x", ctypes.c_int64),
        ("y", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("item", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("op", ctypes.c_int64),
        ("direct", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("arrived", ctypes.c_int64),
        ("sequence", ctypes.c_int64),
        ("signature", ctypes.c_int64),
    ]


class Library:
    """The loaded library: its constants, the codes of its ops, and the two ways to run a program.

    `shared_*` are the functions of mojo/kernels/shared_reduce.mojo; addresses and numbers, as they are.
    """

    def __init__(self, path: str, runtime: list[str]) -> None:
        for name in runtime:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        self.path = path
        lib = ctypes.CDLL(path)
        lib.odyssey_init()
        lib.odyssey_constant.restype = ctypes.c_ssize_t
        lib.odyssey_constant.argtypes = [ctypes.c_ssize_t]
        self.lanes, self.record, self.stats, self.rows, n_ops = (lib.odyssey_constant(i) for i in range(5))
        self.bf16 = bool(lib.odyssey_constant(5))  # products of bf16 are instructions, not emulated
        lib.odyssey_op_name.restype = ctypes.c_ssize_t
        lib.odyssey_op_name.argtypes = [ctypes.c_ssize_t, ctypes.c_char_p, ctypes.c_ssize_t]
        text = ctypes.create_string_buffer(64)
        self.codes: dict[str, int] = {}
        for op in range(n_ops):
            length = lib.odyssey_op_name(op, text, len(text))
            self.codes[text.raw[:length].decode()] = op
        self._run = lib.odyssey_run
        self._run.restype = ctypes.c_ssize_t
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p, ctypes.POINTER(Context)]
        self._step = lib.odyssey_step
        self._step.restype = ctypes.c_ssize_t
        self._step.argtypes = [ctypes.POINTER(Step)]
        pointer, number = ctypes.c_void_p, ctypes.c_ssize_t
        self.fingerprint = lib.odyssey_fingerprint  # mojo/kernels/fingerprint.mojo
        self.fingerprint.argtypes, self.fingerprint.restype = [pointer, number], ctypes.c_uint64
        for name, arguments in (
            ("arrive", [pointer, number, number]),
            ("wait", [pointer, number]),
            ("all_reduce", [pointer, pointer, number]),
            ("all_reduce_at_once", [pointer] * 4 + [number] * 4),
            ("reduce", [pointer, pointer] + [number] * 4),
        ):
            function = getattr(lib, f"odyssey_shared_{name}")
            function.argtypes, function.restype = arguments, None if name in ("arrive", "reduce") else number
            setattr(self, f"shared_{name}", function)
        self._bases = np.zeros(4, np.int64)
        self._bases_address = self._bases.ctypes.data

    def run(self, program: int, records: int, context: Context, bases: int | None = None) -> int:
        """Runs records at address `program`. Returns -1, or the record that stopped it.

        `bases` is the address of the spaces' base addresses, int64 (4,); without it all operands are absolute.
        """
        return self._run(program, records, self._bases_address if bases is None else bases, context)

    def step(self, step: Step) -> None:
        """Runs all shards of a step of this process. A record that failed is a defect of the program: RuntimeError."""
        stopped = self._step(step)
        if stopped >= 0:
            raise RuntimeError(f"record {stopped} of {step.records} of the program of a step failed")


@functools.cache
def library() -> Library:
    """The library, compiled on first use on this machine. Raises BuildError."""
    os.environ.setdefault("MODULAR_THREAD_BUSY_WAIT_US", BUSY_WAIT_US)
    path = build.library_path()
    return Library(str(path), [str(p) for p in build.runtime_libraries()])


def float_bits(x: float) -> int:
    """The 32 bits of a float, as a record holds it."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def aligned(shape: int | tuple[int, ...], dtype: type = np.float32, *, zero: bool = True) -> np.ndarray:
    """A C-contiguous array that starts on a vector boundary."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = (np.zeros if zero else np.empty)(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def address(structure: ctypes.Structure) -> int:
    """Where a structure lies."""
    return ctypes.addressof(structure)


def memory(start: int, size: int) -> np.ndarray:
    """`size` bytes that somebody else keeps, as uint8 (size,)."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)


def _offset_of_data() -> int:
    probe, offset = np.zeros(3, np.float32)[1:], object.__basicsize__
    found = ctypes.c_ssize_t.from_address(id(probe) + offset).value
    return offset if found == probe.ctypes.data else 0


# Where in the object of a NumPy array the address of its data stands: behind the head that all objects have
# (PyArrayObject, part of NumPy's binary interface). `array.ctypes.data` takes 0.8 us, a quarter of a small all-reduce
# of two ranks. 0 where it is not as expected: then the slow way is to be taken.
DATA = _offset_of_data()
