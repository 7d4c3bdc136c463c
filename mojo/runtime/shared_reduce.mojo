"""Ranks of one node over shared memory: arrive and wait, compare headers, add the ranks' slots along the tree.

What lies where is said once, in python/odyssey/comm/shm.py; here are the three things that must be fast or atomic. None
of them allocates, and a wait ends after the time it was given, so that the caller can look at signals, at its deadline
and at other requests.

A barrier is one shared counter. Barrier k of n ranks is passed when n k arrivals have been counted (modulo 2^32). Who
waits spins, then yields, then sleeps on the counter (futex); the last to arrive wakes the sleepers. With sequentially
consistent counters either the sleeper sees the last arrival or the last arrival sees the sleeper.

Rank r's header is one cache line beside its slot. It is written before the arrival (release) and read after the wait
(acquire). There are two, used in turns, as there are two of each slot: what was written before barrier k is read before
barrier k + 1, and written again after that.
"""

from std.atomic import Atomic, Ordering
from std.ffi import external_call
from std.memory import unsafe_memcpy
from std.sys import CompilationTarget, llvm_intrinsic
from std.time import perf_counter_ns
from std.utils.numerics import isnan

from kernels.lanes import BytePtr, F32, LANES, LongPtr, Ptr, Vec, in_tiles_and_ones, load, store
from kernels.reduce import split

comptime WordPtr = Pointer[UInt32, MutUntrackedOrigin]

comptime DONE = 0  # all ranks are here and their headers agree
comptime WAITING = 1  # the time is up
comptime DIFFERENT = 2  # all ranks are here, and a header differs

comptime HEADER = 64  # bytes, one cache line: the number of the barrier, of the call, and the call's signature
comptime MAX_RANKS = 1024

# Between two looks at the counter while spinning. A pause takes 40 to 140 cycles on x86.
comptime PAUSES = 4


struct Team(ImplicitlyCopyable, Movable):
    """Mirrors `Team` in python/odyssey/core/native.py: one communicator as one of its ranks sees it."""

    var ranks: Int
    var rank: Int
    var counter: Int  # address of the counter; 64 bytes behind it is the number of sleepers
    var bases: LongPtr  # (ranks,) addresses of the ranks' segments; two headers come first
    var slots: Int  # byte offset of the first slot in a segment; the second follows
    var slot_bytes: Int
    var barrier: Int  # how many this rank has arrived at
    var spins: Int  # looks at the counter before the first yield
    var yields: Int  # yields before the first sleep


comptime TeamPtr = Pointer[Team, MutUntrackedOrigin]


@always_inline
def pause():
    comptime if CompilationTarget.is_x86():
        llvm_intrinsic["llvm.x86.sse2.pause", NoneType]()
    else:
        llvm_intrinsic["llvm.aarch64.isb", NoneType](Int32(15))


@always_inline
def _counter(team: Team) -> WordPtr:
    return WordPtr(unsafe_from_address=team.counter)


@always_inline
def _sleepers(team: Team) -> WordPtr:
    return WordPtr(unsafe_from_address=team.counter + HEADER)


@always_inline
def _header(team: Team, rank: Int) -> LongPtr:
    return LongPtr(unsafe_from_address=Int(team.bases[unsafe_offset=rank]) + HEADER * (team.barrier & 1))


@always_inline
def slot(team: Team, rank: Int, parity: Int) -> Int:
    """Address of one of the two slots of a rank."""
    return Int(team.bases[unsafe_offset=rank]) + team.slots + parity * team.slot_bytes


def futex(word: WordPtr, operation: Int, value: Int, nanoseconds: Int):
    """Waits while the word has the value (operation 0), or wakes `value` waiters (1); not private to the process."""
    comptime if CompilationTarget.is_linux():
        comptime NUMBER = 202 if CompilationTarget.is_x86() else 98
        var timeout = Array[Int64, 2](fill=0)
        timeout[0] = Int64(nanoseconds // 1_000_000_000)
        timeout[1] = Int64(nanoseconds % 1_000_000_000)
        _ = external_call["syscall", Int, num_fixed_args=1](
            NUMBER, Int(word), operation, value, timeout.unsafe_ptr(), 0, 0
        )
        _ = timeout
    else:
        if operation == 0:
            _ = external_call["usleep", Int32](UInt32(min(nanoseconds // 1000, 100)))


@always_inline
def _behind(team: Team) -> Bool:
    """True while arrivals for this rank's barrier are missing."""
    var seen = Atomic.load[ordering=Ordering.ACQUIRE](_counter(team))
    return Int32(seen - UInt32(team.ranks * team.barrier)) < 0


def arrive(mut team: Team, sequence: Int, signature: Int):
    """Publishes this rank's header and everything written so far, and counts it as arrived."""
    team.barrier += 1
    var mine = _header(team, team.rank)
    mine[unsafe_offset=1] = Int64(sequence)
    mine[unsafe_offset=2] = Int64(signature)
    Atomic.store[ordering=Ordering.RELEASE](mine, Int64(team.barrier))
    var before = Atomic.fetch_add(_counter(team), 1)
    if before + 1 == UInt32(team.ranks * team.barrier) and (Atomic.load(_sleepers(team)) > 0):
        futex(_counter(team), 1, 0x7FFFFFFF, 0)


def wait(team: Team, nanoseconds: Int) -> Int:
    """Waits for all ranks, at most for a time. DONE, WAITING or DIFFERENT."""
    if _behind(team):
        if nanoseconds <= 0:
            return WAITING
        var spins = 0
        while spins < team.spins and _behind(team):
            for _ in range(PAUSES):
                pause()
            spins += 1
    if _behind(team):
        var end = Int(perf_counter_ns()) + nanoseconds
        var yields = 0
        while _behind(team):
            if yields < team.yields:
                _ = external_call["sched_yield", Int32]()
                yields += 1
                continue
            var left = end - Int(perf_counter_ns())
            if left <= 0:
                return WAITING
            _ = Atomic.fetch_add(_sleepers(team), 1)
            var seen = Atomic.load(_counter(team))
            if Int32(seen - UInt32(team.ranks * team.barrier)) < 0:
                futex(_counter(team), 0, Int(seen), left)
            _ = Atomic.fetch_add(_sleepers(team), 0xFFFFFFFF)  # minus 1
    return compare(team)


def compare(team: Team) -> Int:
    """DONE if all ranks' headers agree with this rank's, else DIFFERENT."""
    var mine = _header(team, team.rank)
    for r in range(team.ranks):
        var other = _header(team, r)
        if other[unsafe_offset=1] != mine[unsafe_offset=1] or other[unsafe_offset=2] != mine[unsafe_offset=2]:
            return DIFFERENT
    return DONE


# --- sums along the tree -------------------------------------------------------------


@always_inline
def _sum[n: Int, lo: Int](p: Array[Ptr, 8], i: Int) -> Vec:
    comptime if n == 1:
        return load(p[lo], i)
    else:
        comptime left = split(n)
        return _sum[left, lo](p, i) + _sum[n - left, lo + left](p, i)


def _sum_few[n: Int](y: Ptr, buffers: LongPtr, count: Int):
    """The sum of n buffers, their addresses in registers."""
    var p = Array[Ptr, 8](fill=y)
    comptime for r in range(n):
        p[r] = Ptr(unsafe_from_address=Int(buffers[unsafe_offset=r]))
    var i = 0
    while i + 2 * LANES <= count:
        var a = _sum[n, 0](p, i)
        var b = _sum[n, 0](p, i + LANES)
        store(y, i, a)
        store(y, i + LANES, b)
        i += 2 * LANES
    while i + LANES <= count:
        store(y, i, _sum[n, 0](p, i))
        i += LANES
    while i < count:
        y[unsafe_offset=i] = _reduce[F32, 0, 1](buffers, 0, n, i)[0]
        i += 1


@always_inline
def _combine[dtype: DType, op: Int, w: Int](a: SIMD[dtype, w], b: SIMD[dtype, w]) -> SIMD[dtype, w]:
    comptime if op == 0:
        return a + b
    elif op == 1:
        return a * b
    else:
        var m = (a.lt(b) if op == 2 else b.lt(a)).select(b, a)
        comptime if dtype.is_floating_point():
            m = isnan(b).select(b, m)  # NaN wins
        return m


def _reduce[dtype: DType, op: Int, w: Int](buffers: LongPtr, lo: Int, n: Int, i: Int) -> SIMD[dtype, w]:
    if n == 1:
        var p = Pointer[Scalar[dtype], MutUntrackedOrigin](unsafe_from_address=Int(buffers[unsafe_offset=lo]))
        return p.unsafe_offset(i).unsafe_load[width=w]()
    var left = split(n)
    return _combine[op=op](
        _reduce[dtype, op, w](buffers, lo, left, i), _reduce[dtype, op, w](buffers, lo + left, n - left, i)
    )


def _reduce_all[dtype: DType, op: Int](y: Int, buffers: LongPtr, n: Int, count: Int):
    var to = Pointer[Scalar[dtype], MutUntrackedOrigin](unsafe_from_address=y)

    @always_inline
    def some[w: Int](i: Int) {imm}:
        to.unsafe_store(i, _reduce[dtype, op, w](buffers, 0, n, i))

    in_tiles_and_ones[LANES](count, some)


comptime TYPES: List[DType] = [.float32, .float64, .int8, .int16, .int32, .int64, .uint8, .uint16, .uint32, .uint64]

comptime FEW: List[Int] = [2, 3, 4, 8]  # ranks that most nodes have


def reduce_buffers(
    y: Int,
    buffers: LongPtr,  # addresses of n buffers of `count` numbers
    n: Int,
    count: Int,
    dtype: Int,  # index in TYPES
    op: Int,  # sum, prod, max, min
):
    """Reduces n buffers along the tree into y, which may be any of them."""
    if dtype == 0 and op == 0:
        comptime for i in range(len(FEW)):
            comptime few = materialize[FEW]()[i]
            if n == few:
                return _sum_few[few](Ptr(unsafe_from_address=y), buffers, count)
    comptime for t in range(len(TYPES)):
        comptime for o in range(4):
            if dtype == t and op == o:
                return _reduce_all[TYPES[t], o](y, buffers, n, count)


def copy(to: Int, source: Int, bytes: Int):
    """Copies bytes that do not overlap."""
    unsafe_memcpy(dest=BytePtr(unsafe_from_address=to), src=BytePtr(unsafe_from_address=source), count=bytes)


# --- all-reduce ---------------------------------------------------------------------------


struct Job(ImplicitlyCopyable, Movable):
    """Mirrors `Job` in python/odyssey/core/native.py: one all-reduce under way."""

    var x: Int  # address of what this rank gives
    var y: Int  # address of the result, may be x; 0 if this rank wants none
    var count: Int
    var item: Int  # bytes of a number
    var dtype: Int
    var op: Int
    var direct: Int  # bytes up to which every rank adds everything
    var step: Int
    var arrived: Int
    var sequence: Int  # the header
    var signature: Int


comptime JobPtr = Pointer[Job, MutUntrackedOrigin]


def _part(count: Int, parts: Int, p: Int) -> Int:
    """Where part p of `count` numbers begins: whole vectors."""
    var blocks = (count + LANES - 1) // LANES
    return min(blocks * p // parts * LANES, count)


def all_reduce(mut team: Team, mut job: Job, nanoseconds: Int) -> Int:
    """Moves an all-reduce on until it is done or the time is up (`wait`).

    Small: x into the slot, a barrier, and each rank adds all slots. Large: in chunks of a slot, rank p adds range p.
    Between two barriers a rank copies chunk k of x into its slot (but for its own range), adds its range of chunk
    k - 1 into its place for results, and copies chunk k - 2 of the result out of everyone's, so there is one barrier
    per chunk and what was copied in is still in the cache when it is added.
    """
    var small = job.count * job.item <= job.direct
    var chunk = job.count if small else team.slot_bytes // job.item
    var chunks = 1 if small else (job.count + chunk - 1) // chunk
    var last = 1 if small else chunks + 1
    while True:
        if job.arrived != 0:
            var state = wait(team, nanoseconds)
            if state != DONE:
                return state
            job.arrived = 0
            job.step += 1
        var next = (team.barrier + 1) & 1  # the slots of the coming barrier
        if small:
            if job.step == 0:
                copy(slot(team, team.rank, next), job.x, job.count * job.item)
            elif job.y != 0:
                _reduce_slots(team, job, job.y, 0, job.count)
        else:
            if job.step < chunks:
                var at = job.step * chunk
                var n = min(chunk, job.count - at)
                var a = _part(n, team.ranks, team.rank) * job.item
                var b = _part(n, team.ranks, team.rank + 1) * job.item
                var to = slot(team, team.rank, next)
                var source = job.x + at * job.item
                copy(to, source, a)
                copy(to + b, source + b, n * job.item - b)
            if 1 <= job.step and job.step <= chunks:
                var at = (job.step - 1) * chunk
                var n = min(chunk, job.count - at)
                var a = _part(n, team.ranks, team.rank)
                var b = _part(n, team.ranks, team.rank + 1)
                _reduce_slots(team, job, _result(team, team.rank, next), a, b - a, job.x + at * job.item)
            if 2 <= job.step and job.y != 0:
                var at = (job.step - 2) * chunk
                var n = min(chunk, job.count - at)
                for r in range(team.ranks):
                    var a = _part(n, team.ranks, r)
                    var b = _part(n, team.ranks, r + 1)
                    copy(job.y + (at + a) * job.item, _result(team, r, 1 - next), (b - a) * job.item)
        if job.step == last:
            return DONE
        arrive(team, job.sequence, job.signature)
        job.arrived = 1


def _result(team: Team, rank: Int, parity: Int) -> Int:
    """Address of one of the two places for results of a rank, behind its slots."""
    return slot(team, rank, 2) + parity * (team.slot_bytes // team.ranks // HEADER * HEADER + 2 * HEADER)


def _reduce_slots(team: Team, job: Job, y: Int, first: Int, count: Int, own: Int = 0):
    """Reduces numbers first, first + 1, ... of all ranks' slots of the barrier that was passed, into y; this rank's
    are at address `own` instead, if that is given.
    """
    if count <= 0:
        return
    var buffers = Array[Int64, MAX_RANKS](uninitialized=True)
    for r in range(team.ranks):
        buffers[r] = Int64((own if own != 0 and r == team.rank else slot(team, r, team.barrier & 1)) + first * job.item)
    reduce_buffers(
        y, buffers.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](), team.ranks, count, job.dtype, job.op
    )
    _ = buffers
