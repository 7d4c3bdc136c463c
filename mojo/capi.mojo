"""The engine behind a C interface: the root file of the library that python/odyssey/native.py loads.

Functions take addresses and sizes and return numbers; nothing here computes.
"""

from std.runtime import initialize_runtime

from kernels.lanes import BytePtr, LANES
from kernels.layout import LongPtr
from kernels.lowp import HAS_BF16
from shared.training.executor import StepPtr, run_program, run_step
from shared.training.ops import ContextPtr, NAMES, RECORD, ROWS, STATS


@export
def odyssey_init() abi("C"):
    """Starts the thread pool; once, before anything else."""
    initialize_runtime()


@export
def odyssey_constant(which: Int) abi("C") -> Int:
    """LANES (0), RECORD (1), STATS (2), ROWS (3), the number of ops (4), whether the target multiplies bf16 (5).
    """
    if which == 0:
        return LANES
    elif which == 1:
        return RECORD
    elif which == 2:
        return STATS
    elif which == 3:
        return ROWS
    elif which == 5:
        return Int(HAS_BF16)
    return len(materialize[NAMES]())


@export
def odyssey_op_name(op: Int, text: BytePtr, size: Int) abi("C") -> Int:
    """Writes the name of an op (at most `size` bytes); returns its length."""
    var name = materialize[NAMES]()[op]
    var bytes = name.as_bytes()
    for i in range(min(len(bytes), size)):
        text[unsafe_offset=i] = bytes[i]
    return len(bytes)


@export
def odyssey_run(
    program: LongPtr, records: Int, bases: LongPtr, ctx: ContextPtr
) abi("C") -> Int:
    """Runs a program (executor.run_program)."""
    return run_program(program, records, bases, ctx[])


@export
def odyssey_step(step: StepPtr) abi("C"):
    """Runs all shards of a step (executor.run_step)."""
    run_step(step[])
