"""The engine behind a C interface: the root file of the library that python/odyssey/core/native.py loads.

Functions take addresses and sizes and return numbers; nothing here computes.
"""

from std.runtime import initialize_runtime

from kernels.bf16_bits import Halves, Words, narrow_bf16, widen_bf16
from kernels.fingerprint import fingerprint_runs
from kernels.lanes import BytePtr, LANES, LongPtr
from kernels.amx import permitted
from kernels.lowp import HAS_BF16
from kernels.op import addresses, describe, scratch_of
from kernels.record import ContextPtr, RECORD, STATS
from runtime.shared_reduce import JobPtr, TeamPtr, all_reduce, arrive, reduce_buffers, wait
from runtime.executor import StepPtr, run_program, run_shared
from runtime.helpers import make_pool
from runtime.ops import ops


@export
def odyssey_init() abi("C"):
    """Starts the thread pool; once, before anything else."""
    initialize_runtime()


@export
def odyssey_constant(which: Int) abi("C") -> Int:
    """LANES (0), RECORD (1), STATS (2), whether the target multiplies bf16 (3), whether the system lets this process
    use what the target needs (4).
    """
    if which == 0:
        return LANES
    elif which == 1:
        return RECORD
    elif which == 2:
        return STATS
    elif which == 3:
        return Int(HAS_BF16)
    return Int(permitted())


@export
def odyssey_ops() abi("C") -> Int:
    """How many ops there are."""
    return len(ops())


@export
def odyssey_op(op: Int, text: BytePtr, size: Int) abi("C") -> Int:
    """Writes name, roles and traits of an op (op.describe); returns the length."""
    return describe(ops(), op, text, size)


@export
def odyssey_kernels() abi("C") -> LongPtr:
    """Addresses of the kernel and of the scratch function of each op (op.addresses)."""
    return addresses(ops())


@export
def odyssey_scratch(table: LongPtr, record: LongPtr, shards: Int) abi("C") -> Int:
    """Bytes of scratch memory that a record wants; for so many shards, if it is joined."""
    return scratch_of(table, record, shards, 1)


@export
def odyssey_run(table: LongPtr, program: LongPtr, records: Int, bases: LongPtr, ctx: ContextPtr) abi("C") -> Int:
    """Runs a program (executor.run_program)."""
    return run_program(table, program, records, bases, ctx)


@export
def odyssey_helpers() abi("C") -> Int:
    """Memory for the helpers of this process (helpers.make_pool)."""
    return make_pool()


@export
def odyssey_step(step: StepPtr, helpers: Int) abi("C") -> Int:
    """Runs all shards of a step (executor.run_shared)."""
    return run_shared(step[], helpers)


@export
def odyssey_fingerprint(runs: LongPtr, count: Int) abi("C") -> UInt64:
    """The fingerprint of runs of floats (fingerprint.fingerprint_runs)."""
    return fingerprint_runs(runs, count)


@export
def odyssey_narrow_bf16(y: Halves, x: Words, n: Int) abi("C"):
    """Rounds floats to bf16 (bf16_bits.narrow_bf16)."""
    narrow_bf16(y, x, n)


@export
def odyssey_widen_bf16(y: Words, x: Halves, n: Int) abi("C"):
    """Makes floats of bf16 (bf16_bits.widen_bf16)."""
    widen_bf16(y, x, n)


@export
def odyssey_shared_arrive(team: TeamPtr, sequence: Int, signature: Int) abi("C"):
    """Arrives at the next barrier (shared_reduce.arrive)."""
    arrive(team[], sequence, signature)


@export
def odyssey_shared_wait(team: TeamPtr, nanoseconds: Int) abi("C") -> Int:
    """Waits for the others (shared_reduce.wait)."""
    return wait(team[], nanoseconds)


@export
def odyssey_shared_all_reduce(team: TeamPtr, job: JobPtr, nanoseconds: Int) abi("C") -> Int:
    """Moves an all-reduce on (shared_reduce.all_reduce)."""
    return all_reduce(team[], job[], nanoseconds)


@export
def odyssey_shared_all_reduce_at_once(
    team: TeamPtr, job: JobPtr, x: LongPtr, y: LongPtr, count: Int, sequence: Int, signature: Int, nanoseconds: Int
) abi("C") -> Int:
    """Begins an all-reduce of the array whose address is at x into that whose address is at y, and moves it on."""
    job[].x, job[].y = Int(x[]), Int(y[])
    job[].count = count
    job[].step, job[].arrived = 0, 0
    job[].sequence, job[].signature = sequence, signature
    return all_reduce(team[], job[], nanoseconds)


@export
def odyssey_shared_reduce(y: Int, buffers: LongPtr, n: Int, count: Int, dtype: Int, op: Int) abi("C"):
    """Reduces n buffers along the tree (shared_reduce.reduce_buffers)."""
    reduce_buffers(y, buffers, n, count, dtype, op)
