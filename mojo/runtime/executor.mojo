"""Replays programs: one thread through a program, several threads through the shards of a step.

Which sums are made comes from a plan (python/odyssey/parallel/plan.py): a node of the tree of docs/determinism.md is
the sum of its two children, whoever computed them and in whatever order, so the bits do not depend on threads. Each
thread begins with a run of shards of its own and then takes what is left of the others' runs, always the first that
nobody has taken; who completes the second child of a node adds the two. A shard that a check stops does not keep the
others from being computed, so which one is reported is as independent of the threads.
"""

from std.atomic import Atomic, Ordering
from std.ffi import c_int, external_call
from std.memory import unsafe_memset_zero, unsafe_stack_allocation
from std.sys import CompilationTarget, inlined_assembly, llvm_intrinsic, prefetch
from std.time import perf_counter_ns

from kernels.buffers import TERMS, add_up
from kernels.lanes import LANES, LongPtr, Ptr
from kernels.op import Kernel, kernel_of
from kernels.record import Context, ContextPtr, GRADS, PARAMS, RECORD, Record, SPACES, WORK

from .helpers import together


struct FloatMode:
    """How this thread treats subnormal numbers: as IEEE 754 says while this lives, then as before.

    The pool's threads flush them to zero and a program's own threads do not; a library may have changed either. What a
    shard gives must not depend on who computes it.
    """

    var before: UInt64  # the control register as it was

    @always_inline
    def __init__(out self):
        """Nothing is flushed, numbers are rounded to nearest, nothing traps."""
        comptime if CompilationTarget.is_x86():
            self.before = UInt64(_mxcsr())
            _set_mxcsr(0x1F80)
        else:
            self.before = llvm_intrinsic["llvm.aarch64.get.fpcr", UInt64]()
            llvm_intrinsic["llvm.aarch64.set.fpcr", NoneType](UInt64(0))

    @always_inline
    def __deinit__(deinit self):
        """As it was before."""
        comptime if CompilationTarget.is_x86():
            _set_mxcsr(UInt32(self.before))
        else:
            llvm_intrinsic["llvm.aarch64.set.fpcr", NoneType](self.before)


@always_inline
def _mxcsr() -> UInt32:
    var word = Array[UInt32, 1](fill=0)
    var p = word.unsafe_ptr()
    inlined_assembly["stmxcsr ($0)", NoneType, constraints="r,~{memory}", has_side_effect=True](Int(p))
    return p[unsafe_offset=0]


@always_inline
def _set_mxcsr(value: UInt32):
    var word = Array[UInt32, 1](fill=value)
    inlined_assembly["ldmxcsr ($0)", NoneType, constraints="r,~{memory}", has_side_effect=True](Int(word.unsafe_ptr()))
    _ = word^


def run_program(table: LongPtr, program: LongPtr, records: Int, bases: LongPtr, ctx: ContextPtr) -> Int:
    """Runs all records in order.

    Args:
        table: The ops, as op.addresses has them. Python keeps it: programs may bring ops of their own.
        program: Where the records are.
        records: How many.
        bases: Base addresses of the SPACES spaces.
        ctx: Of the run.

    Returns:
        -1, or the record at which a check stopped the program.
    """
    var mode = FloatMode()
    var stopped = _replay(table, program, records, bases, ctx)
    _ = mode^
    return stopped


@always_inline
def _replay(table: LongPtr, program: LongPtr, records: Int, bases: LongPtr, ctx: ContextPtr) -> Int:
    if Int(ctx[].times):
        return _replayed[True](table, program, records, bases, ctx)
    return _replayed[False](table, program, records, bases, ctx)


def _replayed[timed: Bool](table: LongPtr, program: LongPtr, records: Int, bases: LongPtr, ctx: ContextPtr) -> Int:
    ctx[].stopped = 0
    var stopped = Pointer(to=ctx[].stopped)
    var begun = Int(perf_counter_ns()) if timed else 0
    for i in range(records):
        var r = Record(program.unsafe_offset(i * RECORD), bases, ctx)
        kernel_of[Kernel](table, r.code())(r)
        comptime if timed:
            var now = Int(perf_counter_ns())
            Times(ctx[].times).note(Int(ctx[].first), i, begun, now)
            begun = now
        if stopped.unsafe_load[volatile=True]():  # kernels write it
            return i
    return -1


def tiles(r: Record):
    """Runs a program of elementwise ops over runs of n floats tile by tile, so that what it computes on the way
    stays in the cache. Arguments: the ops, the program of a tile and its records, that of the rest behind the
    last whole tile and its records, floats of a tile, n; gaps between parameters (begin and end, in floats of the
    arena), how many, and where in it the runs begin: there all of them but the second, the gradients, become 0;
    how many runs, and their addresses, which are the spaces 1, 2, ... of the program.
    """
    var bases = Array[Int64, RECORD](fill=0)
    var tile = r.int(6)
    var runs = r.int(11)
    for k in range(runs):
        bases[1 + k] = Int64(r.int(12 + k))
    var at = bases.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var left = r.int(7)
    while left > 0:
        var whole = 2 if left >= tile else 4
        var records = r.int(whole + 1)
        # The next tile is fetched meanwhile, a part of it with each record: the hardware itself looks no further than a
        # page.
        var part = (tile // records // LANES + 1) * LANES
        var ahead = tile
        for i in range(records):
            var end = min(ahead + part, 2 * tile) if left > tile else ahead
            for k in range(runs):
                for line in range(ahead, end, LANES):
                    prefetch(Ptr(unsafe_from_address=Int(at[unsafe_offset=1 + k])).unsafe_offset(line))
            ahead = end
            var one = Record(LongPtr(unsafe_from_address=r.int(whole)).unsafe_offset(i * RECORD), at, r.context)
            kernel_of[Kernel](LongPtr(unsafe_from_address=r.int(1)), one.code())(one)
        for k in range(runs):
            bases[1 + k] += Int64(4 * tile)
        left -= tile
    _ = bases^
    for g in range(r.int(9)):
        var gap = LongPtr(unsafe_from_address=r.int(8)).unsafe_offset(2 * g)
        for i in range(max(Int(gap[]) - r.int(10), 0), min(Int(gap[unsafe_offset=1]) - r.int(10), r.int(7))):
            for k in range(r.int(11)):
                if k != 1:
                    Ptr(unsafe_from_address=r.int(12 + k))[unsafe_offset=i] = 0


struct Times(TrivialRegisterPassable):
    """When records ran on one thread: how many are noted, how many fit, and three numbers for each: its place in the
    program (SUM: additions of gradients) and the shard's first sample above it, ns of start and end. The threads'
    follow each other.
    """

    comptime SUM = _RECORDS - 1
    var at: LongPtr

    @always_inline
    def __init__(out self, at: LongPtr):
        self.at = at

    @always_inline
    def of(self, thread: Int) -> LongPtr:
        return self.at.unsafe_offset(thread * (2 + 3 * Int(self.at[unsafe_offset=1])))

    @always_inline
    def note(self, first: Int, record: Int, begun: Int, ended: Int):
        var n = Int(self.at[])
        if n < Int(self.at[unsafe_offset=1]):
            var entry = self.at.unsafe_offset(2 + 3 * n)
            entry[] = Int64(first * _RECORDS + record)
            entry[unsafe_offset=1] = Int64(begun)
            entry[unsafe_offset=2] = Int64(ended)
            self.at[] = Int64(n + 1)


@fieldwise_init
struct Step(TrivialRegisterPassable):
    """The forward and backward passes of one process in one step, as Python describes them."""

    var table: LongPtr  # the ops, as op.addresses has them
    var program: LongPtr  # records of one shard
    var records: Int64  # how many
    var threads: Int64  # how many run side by side
    var tables: LongPtr  # those of a plan (`Tables`)
    var params: Int64  # address of the arena
    var work: Int64  # address of the workspaces
    var work_bytes: Int64  # bytes of one workspace
    var slots: Int64  # workspaces of shards, used in turn; 0: one per thread
    var base: Int64  # the shard that has workspace 0
    var zero: Int64  # 1: shards add to buffers, and their buffers are added up
    # Runs of a buffer (begin and end, in floats) that are zeroed before a shard. Others begin with a record.
    var cleared: LongPtr
    var clears: Int64  # how many
    var buffers: Int64  # address of the gradient buffers
    var buffer_floats: Int64  # floats of one buffer, a multiple of LANES
    var shard_size: Int64  # samples of a shard
    var samples: Int64  # samples of the global batch
    var rows: LongPtr  # samples of the global batch, int64
    var tail: LongPtr  # records of the last shard, if it has fewer samples and a program for them
    var tail_records: Int64  # how many; 0: it runs that of the others
    var context: Context  # first, valid and rows are set per shard


comptime StepPtr = Pointer[Step, MutUntrackedOrigin]  # a step that the caller keeps alive


# What stopped a thread: shard * _RECORDS + record; _DONE if nothing did.
comptime _RECORDS = 1 << 24  # more than a program has
comptime _DONE = Int.MAX


# --- shards taken by whoever is free -------------------------------------------------

comptime NONE = -1  # no node, no buffer
comptime STRIDE = 8  # numbers from one counter to the next: a cache line


struct Tables(TrivialRegisterPassable):
    """Where things lie in the tables of a plan, int64 (parallel/plan.py, `Plan.tables`).

    Nodes 0 to shards - 1 are the shards of this process, the others the sums. Buffers are those that the finished
    nodes of this process end in, each for one shard, and those of the pool, for any other.
    """

    var shards: Int
    var threads: Int
    var pooled: Int
    # As the plan says.
    var parent: LongPtr  # of a node, or NONE
    var left: LongPtr  # of a sum
    var right: LongPtr
    var fixed: LongPtr  # of a shard: its buffer, or NONE if it takes one of the pool
    var ends: LongPtr  # of the threads' runs
    var pool: LongPtr  # buffers
    var begins: LongPtr
    # Of the step that is under way.
    var next: LongPtr  # of each thread's run the first shard that is not taken, a cache line each
    var stopped: LongPtr  # by thread: see _RECORDS; in the same line
    var complete: LongPtr  # children of a node
    var place: LongPtr  # buffer of a complete node
    var used: LongPtr  # of each buffer of the pool: 1 or 0
    var first: Int

    def __init__(out self, tables: LongPtr):
        self.first = Int(tables[])
        self.shards = Int(tables[unsafe_offset=1])
        var nodes = Int(tables[unsafe_offset=2])
        self.threads = Int(tables[unsafe_offset=3])
        self.pooled = Int(tables[unsafe_offset=4])
        self.parent = tables.unsafe_offset(STRIDE)
        self.left = self.parent.unsafe_offset(nodes)
        self.right = self.left.unsafe_offset(nodes)
        self.fixed = self.right.unsafe_offset(nodes)
        self.begins = self.fixed.unsafe_offset(self.shards)
        self.ends = self.begins.unsafe_offset(self.threads)
        self.pool = self.ends.unsafe_offset(self.threads)
        self.complete = self.pool.unsafe_offset(self.pooled)
        self.place = self.complete.unsafe_offset(nodes)
        self.used = self.place.unsafe_offset(nodes)
        self.next = self.used.unsafe_offset(self.pooled)
        self.stopped = self.next.unsafe_offset(1)

    def reset(self):
        """Before a step."""
        unsafe_memset_zero(self.complete, (Int(self.place) - Int(self.complete)) // 8)
        unsafe_memset_zero(self.used, self.pooled)
        for t in range(self.threads):
            self.next[unsafe_offset=STRIDE * t] = self.begins[unsafe_offset=t]
            self.stopped[unsafe_offset=STRIDE * t] = Int64(_DONE)

    def take_buffer(self, t: Int) -> Int:
        """A buffer of the pool, by preference one that thread t had before; its place in the pool, or NONE."""
        var start = self.pooled * t // self.threads
        for i in range(self.pooled):
            var p = (start + i) % self.pooled
            var used = self.used.unsafe_offset(p)
            var free = Int64(0)
            if Atomic.load[ordering=Ordering.RELAXED](used) == 0:
                if Atomic.compare_exchange(used, free, 1):
                    return p
        return NONE

    @always_inline
    def give_back(self, p: Int):
        Atomic.store[ordering=Ordering.RELEASE](self.used.unsafe_offset(p), Int64(0))


def run_shared(s: Step, helpers: Int) -> Int:
    """Runs all shards of this process, and adds what comes out, on up to `threads` threads.

    Args:
        s: What to run; `actions` are the tables of a plan for so many threads.
        helpers: Of the process (helpers.make_pool).

    Returns:
        -1, or the record at which a check stopped the first of the shards that were stopped.
    """
    var tables = Tables(s.tables)
    tables.reset()
    var step = s
    together[_take_shards](helpers, Int(Pointer(to=step)), Int(s.threads))
    _ = step
    var first = Int64(_DONE)
    for t in range(tables.threads):
        first = min(first, tables.stopped[unsafe_offset=STRIDE * t])
    return -1 if first == Int64(_DONE) else Int(first) & (_RECORDS - 1)


def _take_shards(step: Int, t: Int):
    """Takes shards until none is left: those of the run of thread t, then those of the runs after it."""
    var mode = FloatMode()
    var s = StepPtr(unsafe_from_address=step)[]
    var tables = Tables(s.tables)
    var left = tables.threads  # runs that may have a shard left
    var run = t
    while left:
        var next = tables.next.unsafe_offset(STRIDE * run)
        var shard = Atomic.load[ordering=Ordering.ACQUIRE](next)
        if shard >= tables.ends[unsafe_offset=run]:
            left -= 1
            run = (run + 1) % tables.threads
            continue
        # The buffer first: a shard that is taken must be computed, and it is others who give buffers back.
        var pooled = NONE
        if s.zero and tables.fixed[unsafe_offset=Int(shard)] == NONE:
            pooled = tables.take_buffer(t)
            if pooled == NONE:
                _ = external_call["sched_yield", c_int]()
                continue
        var mine = shard
        if not Atomic.compare_exchange(next, mine, shard + 1):
            if pooled != NONE:
                tables.give_back(pooled)
            continue
        var b = tables.fixed[unsafe_offset=Int(shard)]
        if pooled != NONE:
            b = tables.pool[unsafe_offset=pooled]
        elif not s.zero:
            b = 0
        var buffer = _buffer(s, b)
        if s.zero:
            for i in range(Int(s.clears)):
                var begin = Int(s.cleared[unsafe_offset=2 * i])
                unsafe_memset_zero(buffer.unsafe_offset(begin), Int(s.cleared[unsafe_offset=2 * i + 1]) - begin)
        var stopped = _run_shard(s, t, tables.first + Int(shard), buffer)
        if stopped >= 0:
            var all = tables.stopped.unsafe_offset(STRIDE * t)
            all[] = min(all[], shard * _RECORDS + Int64(stopped))
        if s.zero:
            if Int(s.context.times):
                var begun = Int(perf_counter_ns())
                _add_up(s, tables, Int(shard), b, pooled)
                var times = Times(Times(s.context.times).of(t))
                var first = (tables.first + Int(shard)) * Int(s.shard_size)
                times.note(first, Times.SUM, begun, Int(perf_counter_ns()))
            else:
                _add_up(s, tables, Int(shard), b, pooled)
    _ = mode^


@always_inline
def _buffer(s: Step, place: Int64) -> Ptr:
    return Ptr(unsafe_from_address=Int(s.buffers) + Int(place & 0xFFFFFFFF) * Int(s.buffer_floats) * 4)


def _add_up(s: Step, tables: Tables, shard: Int, b: Int64, pooled: Int):
    """A shard is complete, in buffer b: makes all sums that are complete with it, so many at once that memory is
    read and written as little as possible.
    """
    # A place says which buffer, and where in the pool it is (above), so that it can be given back.
    var node = shard
    var sum = b | Int64(pooled + 1) << 32
    while True:
        var places = Array[Int64, TERMS](fill=sum)
        var terms = Array[Ptr, TERMS](fill=_buffer(s, sum))
        var n = 1
        var parent = Int(tables.parent[unsafe_offset=node])
        while n < TERMS and parent != NONE and Atomic.load(tables.complete.unsafe_offset(parent)) != 0:
            var left = Int(tables.left[unsafe_offset=parent])
            var other = Int(tables.right[unsafe_offset=parent]) if left == node else left
            places[n] = tables.place[unsafe_offset=other]
            terms[n] = _buffer(s, places[n])
            if left == other:
                sum = places[n]
            n += 1
            node = parent
            parent = Int(tables.parent[unsafe_offset=node])
        comptime for k in range(2, TERMS + 1):
            if n == k:
                add_up[k](_buffer(s, sum), terms, Int(s.buffer_floats))
        for i in range(n):
            if places[i] != sum:
                tables.give_back(Int(places[i] >> 32) - 1)  # of the pool, as it is no left child
        tables.place[unsafe_offset=node] = sum
        if parent == NONE:
            return
        if n < TERMS and Atomic.fetch_add(tables.complete.unsafe_offset(parent), 1) == 0:
            return  # whoever completes the other child goes on


def _run_shard(s: Step, t: Int, shard: Int, grads: Ptr) -> Int:
    var bases = Array[Int64, SPACES](fill=0)
    bases[PARAMS] = s.params
    bases[GRADS] = Int64(Int(grads))
    var slot = Int64(t)
    if s.slots:
        slot = (Int64(shard) - s.base) % s.slots
    bases[WORK] = s.work + slot * s.work_bytes
    # Kernels write to it (`stopped`): memory that the compiler does not take for this function's alone.
    var ctx = unsafe_stack_allocation[1, Context]()
    ctx.unsafe_write(s.context)
    if Int(s.context.times):
        ctx[].times = Times(s.context.times).of(t)
    ctx[].first = Int64(shard) * s.shard_size
    ctx[].valid = min(s.shard_size, s.samples - ctx[].first)
    ctx[].rows = s.rows.unsafe_offset(Int(ctx[].first))
    var last = s.tail_records > 0 and ctx[].valid < s.shard_size
    var stopped = _replay(
        s.table,
        s.tail if last else s.program,
        Int(s.tail_records if last else s.records),
        bases.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        ctx.unsafe_origin_cast[MutUntrackedOrigin](),
    )
    _ = bases^
    return stopped
