"""The compiled kernel library: the only file that loads it and knows its C interface
(mojo/capi.mojo).

A program is an int64 array (records, RECORD); what its numbers mean is said in
mojo/kernels/record.mojo. What ops there are, and the roles of their arguments, the library says
(mojo/kernels/op.mojo). ctypes lets the GIL go in every call.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base import limits
from ..compile import library as build
from ..errors import BuildError, ConfigError
from ..settings.recipes import PRECISIONS

# Spaces of an operand: (space << 56) | byte offset.
ABSOLUTE, PARAMS, GRADS, WORK = range(4)
ALIGNMENT = 64  # bytes; one vector of 16 floats
#: Counts the changes of kernels that gave trainings other bits (CHANGELOG.md). A checkpoint says
#: which made it.
KERNELS = 7


def numbers(names: str) -> list[tuple[str, Any]]:
    """Fields of a structure: int64 of these names."""
    return [(name, ctypes.c_int64) for name in names.split()]


def declared(
    lib: ctypes.CDLL, name: str, arguments: Sequence[Any] = (), result: Any = ctypes.c_ssize_t
) -> Any:
    """A function of a C library, with its types."""
    function = getattr(lib, name)
    function.argtypes = arguments
    function.restype = result
    return function


class Context(ctypes.Structure):
    """Mirrors `Context` in mojo/kernels/record.mojo."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        *numbers("step first valid images bytes arrays rows scale shift"),
        ("loss_scale", ctypes.c_double),
        *numbers("stopped times outputs shard_run"),
    ]
    # what a run with it is called on a timeline, where its records are not told apart
    what: str | None = None


class Step(ctypes.Structure):
    """Mirrors `Step` in mojo/runtime/executor.mojo."""

    _fields_ = [
        *numbers(
            "table program records threads tables params work work_bytes slots base zero cleared "
            "clears"
        ),
        *numbers("buffers buffer_floats shard_size samples rows tail tail_records"),
        *numbers("tail_cleared tail_clears together own own_floats pieces piece_count"),
        ("context", Context),
    ]

    def take(self, tables: Sequence[np.ndarray], cleared: Sequence[tuple[int, int]]) -> None:
        """Sets what is run: a table of records for all shards, and one for a last shard of fewer
        samples, if any.

        cleared: runs of a buffer (begin and end, in floats) that are set to zero before.
        """
        runs = np.array(cleared, np.int64).reshape(-1, 2)
        self.kept_alive = [*tables, runs]  # as long as this
        self.cleared = runs.ctypes.data
        self.clears = len(runs)
        self.program = tables[0].ctypes.data
        self.records = len(tables[0])
        if len(tables) > 1:
            self.take_tail(tables[1], cleared)

    def take_tail(self, table: np.ndarray, cleared: Sequence[tuple[int, int]]) -> None:
        """Sets the records of a last shard of fewer samples, and what is set to zero before."""
        runs = np.array(cleared, np.int64).reshape(-1, 2)
        self.kept_alive += [table, runs]
        self.tail_cleared = runs.ctypes.data
        self.tail_clears = len(runs)
        self.tail = table.ctypes.data
        self.tail_records = len(table)


class Team(ctypes.Structure):
    """Mirrors `Team` in mojo/runtime/shared_reduce.mojo."""

    _fields_ = numbers("ranks rank counter bases slots slot_bytes barrier spins yields")


class Job(ctypes.Structure):
    """Mirrors `Job` in mojo/runtime/shared_reduce.mojo."""

    _fields_ = numbers("x y count item dtype op direct step arrived sequence signature")


# Bits of a record's header, above the op's code; and how products round their operands, in the
# order of their numbers.
ROWS = 16
BEGINS = 17
JOINED = 18
DTYPE = 24
OPS = 1024  # places for ops, those that programs bring included


class Op(NamedTuple):
    """An op as its kernel file declares it (mojo/kernels/op.mojo).

    Attributes:
        outputs, inputs, sizes: names of its arguments, which come in this order.
        added: outputs that are added to instead of written.
        scratch: place of the scratch memory among the arguments; None if it wants none.
        traits: words that say what the rest of the program may do with it.
    """

    name: str
    code: int
    outputs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    added: frozenset[str] = frozenset()
    scratch: int | None = None
    traits: frozenset[str] = frozenset()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of all arguments, in their order."""
        return (*self.outputs, *self.inputs, *self.sizes)

    @property
    def of(self) -> tuple[str, ...]:
        """The names of the two ops that it stands for, by its trait `of:`; () of most ops."""
        return next(
            (tuple(word[3:].split("+")) for word in self.traits if word.startswith("of:")), ()
        )

    @classmethod
    def parse(cls, code: int, text: str) -> Op:
        """Returns what `odyssey_op` says: lines of name, roles and traits.

        Raises BuildError for what cannot be.
        """
        name, roles, traits = text.split("\n")
        groups = [
            tuple(filter(None, (word.strip() for word in group.split(","))))
            for group in roles.split(";")
        ]
        if len(groups) > 3 or any(
            word[0] == "~" for group in (groups[0], *groups[2:]) for word in group
        ):
            raise BuildError(
                f"[ops] {name} has the roles {roles!r}; expected 'outputs; inputs; sizes', with + "
                "before what is added to and ~ before scratch memory, which stands among the inputs"
            )
        outputs, inputs, sizes = (*groups, (), ())[:3]
        arguments = (*outputs, *inputs)
        scratch = [i for i, word in enumerate(arguments) if word[0] == "~"]
        return cls(
            name,
            code,
            tuple(word.lstrip("+") for word in outputs),
            tuple(word.lstrip("~") for word in inputs),
            sizes,
            frozenset(word[1:] for word in outputs if word[0] == "+"),
            scratch[0] if scratch else None,
            frozenset(traits.split()),
        )


class OpTable:
    """The ops of a library, by name, and where their kernels are, by code; programs may bring more.

    lib: exports `prefix`_ops, `prefix`_op and `prefix`_kernels.
    """

    def __init__(self, lib: ctypes.CDLL, prefix: str) -> None:
        self.ops: dict[str, Op] = {}
        self.codes: dict[str, int] = {}
        # as mojo/kernels/op.mojo has them: kernel, scratch function
        self._kernels = np.zeros((OPS, 2), np.int64)
        self.table: int = self._kernels.ctypes.data
        self.add(lib, prefix)

    def add(self, lib: ctypes.CDLL | str, prefix: str) -> list[Op]:
        """Takes the ops of a library, or of the one at a path, into the table, and returns them.

        Raises ConfigError.
        """
        if isinstance(lib, str):
            lib = ctypes.CDLL(lib)
        count: int = declared(lib, f"{prefix}_ops", result=ctypes.c_int)()
        describe = declared(
            lib, f"{prefix}_op", [ctypes.c_ssize_t, ctypes.c_char_p, ctypes.c_ssize_t]
        )
        kernels = declared(lib, f"{prefix}_kernels", result=ctypes.c_void_p)
        text = ctypes.create_string_buffer(4096)
        first = len(self.codes)
        added = []
        for i in range(count):
            length = describe(i, text, len(text))
            op = Op.parse(first + i, text.raw[:length].decode())
            if op.name in self.codes:
                raise ConfigError(
                    f"[ops] there is an op {op.name} already; give yours another name"
                )
            added.append(op)
        self._kernels[first : first + count] = (
            memory(kernels(), 16 * count).view(np.int64).reshape(count, 2)
        )
        self.ops.update((op.name, op) for op in added)
        self.codes.update((op.name, op.code) for op in added)
        return added


class Library(OpTable):
    """The loaded library: its constants, its ops, and the two ways to run a program.

    `shared_*` are the functions of mojo/runtime/shared_reduce.mojo; addresses and numbers, as they
    are.
    """

    def __init__(self, path: str, runtime: list[str]) -> None:
        for name in runtime:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        self.path = path
        lib = ctypes.CDLL(path)
        lib.odyssey_init()
        pointer = ctypes.c_void_p
        number = ctypes.c_ssize_t
        constant = declared(lib, "odyssey_constant", [number])
        self.lanes, self.record, self.stats = (constant(i) for i in range(3))
        self.bf16 = bool(constant(3))  # products of bf16 are instructions, not emulated
        if not constant(4):
            raise BuildError(
                f"[build] {path} multiplies with AMX's tile registers, which Linux does not let "
                "this process use; set ODYSSEY_TARGET_CPU=x86-64-v4+avx512bf16"
            )
        super().__init__(lib, "odyssey")
        self.timeline: Any = None  # that is open (timeline.py)
        # a code that is no op's ends a program
        self._kernels[len(self.codes) :] = self._kernels[self.codes["unknown"]]
        self._scratch = declared(lib, "odyssey_scratch", [pointer, pointer, number])
        self._run = declared(
            lib, "odyssey_run", [pointer, pointer, number, pointer, ctypes.POINTER(Context)]
        )
        self._step = declared(lib, "odyssey_step", [ctypes.POINTER(Step), number])
        self._helpers = declared(lib, "odyssey_helpers")()
        # mojo/kernels/bf16_bits.mojo
        self.narrow_bf16 = declared(lib, "odyssey_narrow_bf16", [pointer, pointer, number])
        self.widen_bf16 = declared(lib, "odyssey_widen_bf16", [pointer, pointer, number])
        # mojo/kernels/fingerprint.mojo
        self.fingerprint = declared(lib, "odyssey_fingerprint", [pointer, number], ctypes.c_uint64)
        for name, arguments in (
            ("arrive", [pointer, number, number]),
            ("wait", [pointer, number]),
            ("all_reduce", [pointer, pointer, number]),
            ("all_reduce_at_once", [pointer] * 4 + [number] * 4),
            ("reduce", [pointer, pointer] + [number] * 4),
        ):
            result = None if name in ("arrive", "reduce") else number
            setattr(
                self, f"shared_{name}", declared(lib, f"odyssey_shared_{name}", arguments, result)
            )
        self._bases = np.zeros(4, np.int64)
        self._bases_address = self._bases.ctypes.data

    def scratch(
        self,
        op: Op,
        sizes: Iterable[int],
        layout: str = "lanes",
        dtype: str = "fp32",
        joined_shards: int = 0,
    ) -> int:
        """Bytes of scratch memory that a record of these sizes wants.

        joined_shards: how many shards it computes in one call; 0: it is not joined.
        """
        record = np.zeros(self.record, np.int64)
        start = 1 + len(op.outputs) + len(op.inputs)
        for i, size in enumerate(sizes, start):
            record[i] = size
        record[0] = header(op.code, layout, dtype) | (joined_shards > 0) << JOINED
        return self._scratch(self.table, record.ctypes.data, max(joined_shards, 1))

    def run(self, program: int, records: int, context: Context, bases: int | None = None) -> int:
        """Runs records at address `program`.

        Returns -1, or the record that stopped it.

        `bases` is the address of the spaces' base addresses, int64 (4,); without it all operands
        are absolute.
        """
        bases = self._bases_address if bases is None else bases
        if self.timeline is not None:
            return self.timeline.run(self, program, records, context, bases)
        return self._run(self.table, program, records, bases, context)

    def run_records(self, program: int, records: int, context: Context, bases: int) -> int:
        """Runs as `run` does, for who times it."""
        return self._run(self.table, program, records, bases, context)

    def run_step(self, step: Step) -> int:
        """Takes a step as `step` does, for who times it: -1, or the record that failed."""
        return self._step(step, self._helpers)

    @property
    def named(self) -> dict[int, Op]:
        """The ops by their codes."""
        return {op.code: op for op in self.ops.values()}

    def step(self, step: Step) -> None:
        """Runs all shards of a step of this process.

        A record that failed is a defect of the program: RuntimeError.
        """
        step.table = self.table
        stopped = self.run_step(step) if self.timeline is None else self.timeline.step(self, step)
        if stopped >= 0:
            raise RuntimeError(
                f"record {stopped} of {step.records} of the program of a step failed"
            )


@functools.cache
def library() -> Library:
    """The library, compiled on first use on this machine. Raises BuildError, ConfigError."""
    limits.check_addresses()
    shared_library = build.open_library()
    return Library(shared_library.to_load(), [str(p) for p in build.runtime_libraries()])


def header(code: int, layout: str = "lanes", dtype: str = "fp32") -> int:
    """The first number of a record."""
    return code | (layout == "rows") << ROWS | PRECISIONS.index(dtype) << DTYPE


def float_bits(x: float) -> int:
    """The 32 bits of a float, as a record holds it."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def aligned(
    shape: int | tuple[int, ...], dtype: type = np.float32, *, zero: bool = True
) -> np.ndarray:
    """A C-contiguous array that starts on a vector boundary."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = (np.zeros if zero else np.empty)(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def trim() -> None:
    """Gives memory that was freed back to the system, which the C library (glibc) keeps in the
    middle of its heap.
    """
    if give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):
        give_back(ctypes.c_size_t(0))


def discard(array: np.ndarray) -> None:
    """Gives the whole pages of a contiguous array that nobody reads again back to the system,
    where that is Linux.
    """
    start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def address(structure: ctypes.Structure) -> int:
    """Where a structure lies."""
    return ctypes.addressof(structure)


def copied(start: int, size: int) -> bytes:
    """A copy of `size` bytes."""
    return ctypes.string_at(start, size)


def float_at(address: int) -> float:
    """A float that somebody else keeps."""
    return ctypes.c_float.from_address(address).value


def memory(start: int, size: int) -> np.ndarray:
    """`size` bytes that somebody else keeps, as uint8 (size,)."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)


def _offset_of_data() -> int:
    probe = np.zeros(3, np.float32)[1:]
    offset = object.__basicsize__
    address = ctypes.c_ssize_t.from_address(id(probe) + offset).value
    return offset if address == probe.ctypes.data else 0


# Where in the object of a NumPy array the address of its data stands: behind the head that all
# objects have (PyArrayObject, part of NumPy's binary interface). `array.ctypes.data` takes 0.8 us,
# a quarter of a small all-reduce of two ranks. 0 where it is not as expected: then the slow way is
# to be taken.
DATA = _offset_of_data()
