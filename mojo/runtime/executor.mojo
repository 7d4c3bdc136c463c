"""Replays programs: one thread through a program, several threads through the shards of a step.

Which sums are made comes from a plan (python/odyssey/parallel/plan.py): a node of the tree of docs/determinism.md is
the sum of its two children, whoever computed them and in whatever order, so the bits do not depend on threads. Each
thread begins with a run of shards of its own and then takes what is left of the others' runs, always the first that
nobody has taken; who completes the second child of a node adds the two. A shard that a check stops does not keep the
others from being computed, so which one is reported is as independent of the threads.

A thread may take several shards at once, a node of the tree (docs/kernels.md, "Runs of shards"). Records that are joined
are then run once for all of them, and write the sum of the shards' gradients; the others are run shard by shard.
"""

from std.atomic import Atomic, Ordering
from std.ffi import c_int, external_call
from std.memory import unsafe_memset_zero, unsafe_stack_allocation
from std.sys import CompilationTarget, inlined_assembly, llvm_intrinsic, prefetch
from std.time import perf_counter_ns

from kernels.buffers import TERMS, add_neighbours, add_up
from kernels.lanes import LANES, LongPtr, Ptr
from kernels.op import Kernel, kernel_of
from kernels.record import (
    Context,
    ContextPtr,
    GRADS,
    JOINED,
    PARAMS,
    RECORD,
    Record,
    SPACES,
    ShardRun,
    WORK,
)

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
    var stopped = _replay(table, program, 0, records, bases, ctx)
    _ = mode^
    return stopped


@always_inline
def _replay(table: LongPtr, program: LongPtr, start: Int, end: Int, bases: LongPtr, ctx: ContextPtr) -> Int:
    if Int(ctx[].times):
        return _replayed[True](table, program, start, end, bases, ctx)
    return _replayed[False](table, program, start, end, bases, ctx)


def _replayed[
    timed: Bool
](table: LongPtr, program: LongPtr, start: Int, end: Int, bases: LongPtr, ctx: ContextPtr) -> Int:
    ctx[].stopped = 0
    var stopped = Pointer(to=ctx[].stopped)
    var begun = Int(perf_counter_ns()) if timed else 0
    for i in range(start, end):
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
    var tail_cleared: LongPtr  # as `cleared`, for that program
    var tail_clears: Int64  # how many
    # Runs of shards: a thread computes the shards of a leaf of the plan together. Gradients of records that are not
    # joined are then in a buffer of each shard, which has these gradients only.
    var together: Int64  # shards of a leaf, at most; 0: leaves are single shards, in whole buffers
    var own: Int64  # address of the shards' own buffers: `together` for each thread
    var own_floats: Int64  # floats of one
    var pieces: LongPtr  # of these floats: begin and end in a whole buffer, begin in a shard's
    var piece_count: Int64  # how many
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

    Nodes 0 to leaves - 1 are the leaves of this process, single shards or runs of them, the others the sums. Buffers
    are those that the finished nodes of this process end in, each for one leaf, and those of the pool, for any other.
    """

    var leaves: Int
    var threads: Int
    var pooled: Int
    # As the plan says.
    var parent: LongPtr  # of a node, or NONE
    var left: LongPtr  # of a sum
    var right: LongPtr
    var fixed: LongPtr  # of a leaf: its buffer, or NONE if it takes one of the pool
    var first: LongPtr  # of a leaf: its first shard
    var shards: LongPtr  # of a leaf: how many
    var begins: LongPtr  # of the threads' parts of the leaves
    var ends: LongPtr
    var pool: LongPtr  # buffers
    # Of the step that is under way.
    var next: LongPtr  # of each thread's part the first leaf that is not taken, a cache line each
    var stopped: LongPtr  # by thread: see _RECORDS; in the same line
    var complete: LongPtr  # children of a node
    var place: LongPtr  # buffer of a complete node
    var used: LongPtr  # of each buffer of the pool: 1 or 0

    def __init__(out self, tables: LongPtr):
        self.leaves = Int(tables[])
        var nodes = Int(tables[unsafe_offset=1])
        self.threads = Int(tables[unsafe_offset=2])
        self.pooled = Int(tables[unsafe_offset=3])
        self.parent = tables.unsafe_offset(STRIDE)
        self.left = self.parent.unsafe_offset(nodes)
        self.right = self.left.unsafe_offset(nodes)
        self.fixed = self.right.unsafe_offset(nodes)
        self.first = self.fixed.unsafe_offset(self.leaves)
        self.shards = self.first.unsafe_offset(self.leaves)
        self.begins = self.shards.unsafe_offset(self.leaves)
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
    """Takes leaves until none is left: those of the part of thread t, then those of the parts after it."""
    var mode = FloatMode()
    var s = StepPtr(unsafe_from_address=step)[]
    var tables = Tables(s.tables)
    var left = tables.threads  # parts that may have a leaf left
    var part = t
    while left:
        var next = tables.next.unsafe_offset(STRIDE * part)
        var leaf = Atomic.load[ordering=Ordering.ACQUIRE](next)
        if leaf >= tables.ends[unsafe_offset=part]:
            left -= 1
            part = (part + 1) % tables.threads
            continue
        # The buffer first: a leaf that is taken must be computed, and it is others who give buffers back.
        var pooled = NONE
        if s.zero and tables.fixed[unsafe_offset=Int(leaf)] == NONE:
            pooled = tables.take_buffer(t)
            if pooled == NONE:
                _ = external_call["sched_yield", c_int]()
                continue
        var mine = leaf
        if not Atomic.compare_exchange(next, mine, leaf + 1):
            if pooled != NONE:
                tables.give_back(pooled)
            continue
        var b = tables.fixed[unsafe_offset=Int(leaf)]
        if pooled != NONE:
            b = tables.pool[unsafe_offset=pooled]
        elif not s.zero:
            b = 0
        var first = Int(tables.first[unsafe_offset=Int(leaf)])
        var stopped: Int
        # A place says which buffer, and where in the pool it is (above), so that it can be given back.
        var place = b | Int64(pooled + 1) << 32
        if s.together and not _has_tail_program(s, first):
            stopped = _run_together(s, tables, t, Int(leaf), place)
        else:
            stopped = _run_alone(s, tables, t, Int(leaf), place)
        var all = tables.stopped.unsafe_offset(STRIDE * t)
        all[] = min(all[], Int64(stopped))
    _ = mode^


@always_inline
def _has_tail_program(s: Step, shard: Int) -> Bool:
    """Whether a shard is the last one and has a program of its own, as it has fewer samples."""
    return s.tail_records > 0 and s.samples < Int64(shard + 1) * s.shard_size


def _run_alone(s: Step, tables: Tables, t: Int, leaf: Int, place: Int64) -> Int:
    """Runs a leaf of one shard, whose gradients go to a buffer, and makes the sums that are complete then.

    Returns:
        What stopped it (see _RECORDS).
    """
    var shard = Int(tables.first[unsafe_offset=leaf])
    var buffer = _buffer(s, place)
    if s.zero:
        var tail = _has_tail_program(s, shard)
        _clear(buffer, s.tail_cleared if tail else s.cleared, Int(s.tail_clears if tail else s.clears))
    var stopped = _run_shard(s, t, shard, buffer)
    if s.zero:
        var begun = Int(perf_counter_ns())
        _add_up(s, tables, leaf, place)
        _note_sum(s, t, shard, begun)
    return _DONE if stopped < 0 else shard * _RECORDS + stopped


@always_inline
def _clear(buffer: Ptr, ranges: LongPtr, count: Int):
    """Sets some ranges of a buffer to zero."""
    for i in range(count):
        var begin = Int(ranges[unsafe_offset=2 * i])
        unsafe_memset_zero(buffer.unsafe_offset(begin), Int(ranges[unsafe_offset=2 * i + 1]) - begin)


@always_inline
def _note_sum(s: Step, t: Int, shard: Int, begun: Int):
    """Notes an addition of gradients on a timeline, if there is one."""
    if Int(s.context.times):
        var times = Times(Times(s.context.times).of(t))
        times.note(shard * Int(s.shard_size), Times.SUM, begun, Int(perf_counter_ns()))


@always_inline
def _buffer(s: Step, place: Int64) -> Ptr:
    return Ptr(unsafe_from_address=Int(s.buffers) + Int(place & 0xFFFFFFFF) * Int(s.buffer_floats) * 4)


@fieldwise_init
struct Complete(TrivialRegisterPassable):
    """A complete node with the complete nodes that it is added to, up the tree: together they are the node `node`.

    At most TERMS at once, so that memory is read and written as little as possible.
    """

    var node: Int
    var sum: Int64  # the place that the sum goes to: that of the leftmost
    var places: SIMD[DType.int64, TERMS]  # of the nodes; the first is that of the node that was complete last
    var n: Int

    @staticmethod
    def above(tables: Tables, node: Int, place: Int64) -> Self:
        """Takes all that are complete now."""
        var all = Self(node, place, SIMD[DType.int64, TERMS](place), 1)
        var parent = all.parent(tables)
        while all.n < TERMS and parent != NONE and Atomic.load(tables.complete.unsafe_offset(parent)) != 0:
            var left = Int(tables.left[unsafe_offset=parent])
            var other = Int(tables.right[unsafe_offset=parent]) if left == all.node else left
            all.places[all.n] = tables.place[unsafe_offset=other]
            if left == other:
                all.sum = all.places[all.n]
            all.n += 1
            all.node = parent
            parent = all.parent(tables)
        return all

    @always_inline
    def parent(self, tables: Tables) -> Int:
        return Int(tables.parent[unsafe_offset=self.node])

    def terms(self, s: Step, begin: Int) -> Array[Ptr, TERMS]:
        """The buffers of the nodes, from a float on."""
        var terms = Array[Ptr, TERMS](fill=_buffer(s, self.sum))
        for i in range(self.n):
            terms[i] = _buffer(s, self.places[i]).unsafe_offset(begin)
        return terms^

    def finish(self, tables: Tables) -> Bool:
        """The sum is in its place. False if somebody else goes on, or if nothing is left to be added."""
        for i in range(self.n):
            if self.places[i] != self.sum:
                tables.give_back(Int(self.places[i] >> 32) - 1)  # of the pool, as it is no left child
        tables.place[unsafe_offset=self.node] = self.sum
        var parent = self.parent(tables)
        if parent == NONE:
            return False
        # Whoever completes the other child goes on.
        return self.n == TERMS or Atomic.fetch_add(tables.complete.unsafe_offset(parent), 1) != 0


def _add_up(s: Step, tables: Tables, node: Int, place: Int64):
    """A node is complete, in a place: makes all sums that are complete with it."""
    var all = Complete.above(tables, node, place)
    while True:
        comptime for k in range(2, TERMS + 1):
            if all.n == k:
                add_up[k](_buffer(s, all.sum), all.terms(s, 0), Int(s.buffer_floats))
        if not all.finish(tables):
            return
        all = Complete.above(tables, all.node, all.sum)


# --- runs of shards ------------------------------------------------------------------

comptime MOST = 16  # shards of a run (engine/shard_runs.py: at least one group of samples each)


def _run_together(s: Step, tables: Tables, t: Int, leaf: Int, place: Int64) -> Int:
    """Runs the shards of a leaf, and makes the sums that are complete then.

    Joined records add their gradients to the sums that are complete before, and write them where the sum belongs. What
    the others have added to the shards' own buffers is added up afterwards: few gradients.

    Returns:
        What stopped the first of its shards that was stopped (see _RECORDS).
    """
    var first = Int(tables.first[unsafe_offset=leaf])
    var shards = Int(tables.shards[unsafe_offset=leaf])
    var all = Complete.above(tables, leaf, place)
    var earlier = SIMD[DType.int64, 4](0)
    for i in range(1, all.n):
        earlier[i - 1] = Int64(Int(_buffer(s, all.places[i])))
    var run = unsafe_stack_allocation[1, ShardRun]()
    run.unsafe_write(
        ShardRun(Int64(shards), s.work_bytes // 4, Int64(Int(_buffer(s, all.sum))), Int64(all.n - 1), earlier)
    )
    var own = Ptr(unsafe_from_address=Int(s.own) + t * Int(s.together * s.own_floats) * 4)
    var contexts = unsafe_stack_allocation[MOST, Context]()
    var bases = Array[Int64, MOST * SPACES](fill=0)
    for k in range(shards):
        var buffer = own.unsafe_offset(k * Int(s.own_floats))
        _clear(buffer, s.cleared, Int(s.clears))
        bases[k * SPACES + PARAMS] = s.params
        bases[k * SPACES + GRADS] = Int64(Int(buffer))
        bases[k * SPACES + WORK] = s.work + (Int64(t) * s.together + Int64(k)) * s.work_bytes
        _set_context(s, t, first + k, contexts.unsafe_offset(k))
        contexts[unsafe_offset=k].shard_run = run.unsafe_origin_cast[MutUntrackedOrigin]()
    var stopped = _run_records(
        s,
        shards,
        bases.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        contexts.unsafe_origin_cast[MutUntrackedOrigin](),
    )
    _ = bases^
    var begun = Int(perf_counter_ns())
    add_neighbours(own, Int(s.own_floats), shards, Int(s.own_floats))
    for i in range(Int(s.piece_count)):
        var piece = s.pieces.unsafe_offset(3 * i)
        var begin = Int(piece[])
        var count = Int(piece[unsafe_offset=1]) - begin
        var terms = all.terms(s, begin)
        terms[0] = own.unsafe_offset(Int(piece[unsafe_offset=2]))
        comptime for k in range(1, TERMS + 1):
            if all.n == k:
                add_up[k](_buffer(s, all.sum).unsafe_offset(begin), terms, count)
    if all.finish(tables):
        _add_up(s, tables, all.node, all.sum)
    _note_sum(s, t, first, begun)
    return _DONE if stopped == _DONE else first * _RECORDS + stopped


def _run_records(s: Step, shards: Int, bases: LongPtr, contexts: ContextPtr) -> Int:
    """Runs the program for all shards: joined records once, those between them shard by shard.

    A shard that a check stops runs no further records. Joined records then compute with what it has left.

    Returns:
        The first shard that was stopped * _RECORDS + the record, or _DONE.
    """
    var records = Int(s.records)
    var stopped = Array[Int, MOST](fill=-1)
    var running = shards
    var i = 0
    while i < records and running > 0:
        var end = i
        while end < records and not (s.program[unsafe_offset=end * RECORD] >> JOINED) & 1:
            end += 1
        for k in range(shards):
            if i < end and stopped[k] < 0:
                stopped[k] = _replay(
                    s.table, s.program, i, end, bases.unsafe_offset(k * SPACES), contexts.unsafe_offset(k)
                )
                running -= Int(stopped[k] >= 0)
        if end < records and running > 0:
            _run_joined(s, shards, end, bases, contexts)
        i = end + 1
    for k in range(shards):
        if stopped[k] >= 0:
            return k * _RECORDS + stopped[k]
    return _DONE


def _run_joined(s: Step, shards: Int, i: Int, bases: LongPtr, contexts: ContextPtr):
    """Runs record i once for all shards. On a timeline each shard has an equal part of the time."""
    var begun = Int(perf_counter_ns())
    var r = Record(s.program.unsafe_offset(i * RECORD), bases, contexts)
    kernel_of[Kernel](s.table, r.code())(r)
    if Int(s.context.times):
        var spent = Int(perf_counter_ns()) - begun
        for k in range(shards):
            ref ctx = contexts[unsafe_offset=k]
            var start = begun + spent * k // shards
            Times(ctx.times).note(Int(ctx.first), i, start, begun + spent * (k + 1) // shards)


@always_inline
def _set_context(s: Step, t: Int, shard: Int, ctx: ContextPtr):
    """The context of a shard that thread t runs."""
    ctx.unsafe_write(s.context)
    if Int(s.context.times):
        ctx[].times = Times(s.context.times).of(t)
    ctx[].first = Int64(shard) * s.shard_size
    ctx[].valid = min(s.shard_size, s.samples - ctx[].first)
    ctx[].rows = s.rows.unsafe_offset(Int(ctx[].first))


def _run_shard(s: Step, t: Int, shard: Int, grads: Ptr) -> Int:
    var bases = Array[Int64, SPACES](fill=0)
    bases[PARAMS] = s.params
    bases[GRADS] = Int64(Int(grads))
    var slot = Int64(t) * max(s.together, 1)
    if s.slots:
        slot = (Int64(shard) - s.base) % s.slots
    bases[WORK] = s.work + slot * s.work_bytes
    # Kernels write to it (`stopped`): memory that the compiler does not take for this function's alone.
    var ctx = unsafe_stack_allocation[1, Context]()
    _set_context(s, t, shard, ctx.unsafe_origin_cast[MutUntrackedOrigin]())
    var last = _has_tail_program(s, shard)
    var stopped = _replay(
        s.table,
        s.tail if last else s.program,
        0,
        Int(s.tail_records if last else s.records),
        bases.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        ctx.unsafe_origin_cast[MutUntrackedOrigin](),
    )
    _ = bases^
    return stopped
