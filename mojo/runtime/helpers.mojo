"""Threads that help the caller with the shards of a step, if they are awake in time.

A step belongs to the thread that called; helpers enter through a door that is open while there is something to take.
The caller works too, takes whatever nobody has taken, closes the door and waits only for helpers that are inside: one
that the system has not let run holds up nobody. What is done inside, and why its bits do not depend on who does it, is
executor.mojo's business.

Helpers wait for the next step by spinning, then by yielding, then asleep (futex). A core with nothing else to do gives
a thread that yields back at once, so on a quiet machine the door is seen within a microsecond; on a busy one, others
run meanwhile. A helper that loses its core inside holds the step up until it gets it back. When that costs much, steps
are taken without helpers for a while, which doubles while it goes on.

All memory of this is taken from the system once and never given back: helpers look at it until the process ends. A
forked child has no helpers and starts its own.
"""

from std.atomic import Atomic, Ordering
from std.ffi import c_int, external_call
from std.memory import unsafe_memset_zero
from std.sys import CompilationTarget
from std.time import perf_counter_ns

from kernels.lanes import BytePtr
from kernels.layout import LongPtr
from .shared_reduce import WordPtr, futex, pause

comptime Task = def(Int, Int) thin -> None
"""What is done inside: of which step (an address), by which thread (0: the caller)."""

comptime LINE = 64  # bytes; what different threads write lies in different cache lines
comptime OPEN = 1  # of the door: bit 0; above it twice the number of helpers inside

# Offsets in bytes.
comptime OWNER = 0  # 1: a step is using the helpers
comptime DOOR = LINE
comptime BELL = 2 * LINE  # uint32: how often the door was opened
comptime ASLEEP = 3 * LINE  # helpers asleep on the bell
comptime LEFT = 4 * LINE  # uint32: how often the last helper has left; the caller sleeps on it
comptime WAITS = 5 * LINE  # 1: the caller sleeps, or is about to
# What only the owner writes, and the others read inside.
comptime STEP = 6 * LINE
comptime THREADS = STEP + 8  # of this step, the caller included
comptime STARTED = 7 * LINE  # helpers that exist
comptime PROCESS = STARTED + 8  # in which they do
comptime WITHOUT = STARTED + 16  # steps still to be taken without helpers
comptime PENALTY = STARTED + 24  # how many those were last time
comptime BYTES = 8 * LINE

comptime SPIN_NS = 50_000  # a helper spins, and
comptime YIELD_NS = 2_000_000  # yields; then it sleeps: waking it takes 50 to 200 us
comptime TAIL_NS = 100_000  # the caller spins for helpers inside; then it sleeps
# A wait for helpers that is longer than this and than the caller itself computed is for a core that was lost.
comptime LOST_NS = 500_000
comptime MOST_WITHOUT = 1024  # steps
comptime PAUSES = 4  # between two looks at the clock or the door


@always_inline
def _long(pool: Int, at: Int) -> LongPtr:
    return LongPtr(unsafe_from_address=pool + at)


@always_inline
def _word(pool: Int, at: Int) -> WordPtr:
    return WordPtr(unsafe_from_address=pool + at)


@always_inline
def _pauses():
    for _ in range(PAUSES):
        pause()


def make_pool() -> Int:
    """Memory for helpers, none of which exist yet.

    Returns:
        Its address, to be kept for as long as the process lives; 0 if there is no memory.
    """
    var pool = external_call["aligned_alloc", Int](LINE, BYTES)
    if pool:
        unsafe_memset_zero(BytePtr(unsafe_from_address=pool), BYTES)
    return pool


def together[task: Task](pool: Int, step: Int, threads: Int):
    """Does a step: task(step, t) by the calling thread (t = 0) and by those of threads - 1 helpers that come in time.

    Returns when all that have begun have ended. While another thread's step uses the helpers, the caller is alone.

    Parameters:
        task: Takes what there is to do from the step until nothing is left. It must be the same for all steps.

    Args:
        pool: From make_pool, or 0: alone.
        step: Where what is to be done is described.
        threads: How many threads may take part.
    """
    var free = Int64(0)
    if threads < 2 or pool == 0 or not Atomic.compare_exchange(_long(pool, OWNER), free, 1):
        return task(step, 0)
    _start[task](pool, threads - 1)
    if _long(pool, WITHOUT)[] > 0:
        _long(pool, WITHOUT)[] -= 1
        task(step, 0)
    else:
        _long(pool, STEP)[] = Int64(step)
        _long(pool, THREADS)[] = Int64(threads)
        var begun = _own_time()
        Atomic.store(_long(pool, DOOR), Int64(OPEN))
        _ = Atomic.fetch_add(_word(pool, BELL), 1)
        if Atomic.load(_long(pool, ASLEEP)) > 0:
            futex(_word(pool, BELL), 1, 0x7FFFFFFF, 0)
        task(step, 0)
        var inside = Atomic.fetch_add(_long(pool, DOOR), -OPEN) - OPEN
        var worked = _own_time() - begun
        var waiting = Int(perf_counter_ns())
        if inside:
            _wait_for_helpers(pool)
        _judge(pool, worked, Int(perf_counter_ns()) - waiting)
    Atomic.store(_long(pool, OWNER), Int64(0))


def _judge(pool: Int, worked: Int, waited: Int):
    """After a step with helpers: whether the next ones are taken without."""
    var penalty = _long(pool, PENALTY)
    if waited > max(LOST_NS, worked):
        penalty[] = Int64(max(1, min(2 * Int(penalty[]), MOST_WITHOUT)))
        _long(pool, WITHOUT)[] = penalty[]
    else:  # forgotten within some hundred good steps, and not by a few good ones among bad ones
        penalty[] = penalty[] * 15 // 16


@always_inline
def _own_time() -> Int:
    """Nanoseconds that the calling thread has had a core."""
    comptime THREAD_CPU_TIME = 3 if CompilationTarget.is_linux() else 16
    var time = Array[Int64, 2](fill=0)
    _ = external_call["clock_gettime", c_int](c_int(THREAD_CPU_TIME), time.unsafe_ptr())
    return Int(time[0]) * 1_000_000_000 + Int(time[1])


def _wait_for_helpers(pool: Int):
    var end = Int(perf_counter_ns()) + TAIL_NS
    while Int(perf_counter_ns()) < end:
        if Atomic.load[ordering=Ordering.ACQUIRE](_long(pool, DOOR)) == 0:
            return
        _pauses()
    Atomic.store(_long(pool, WAITS), Int64(1))
    while True:
        var left = Atomic.load(_word(pool, LEFT))
        if Atomic.load(_long(pool, DOOR)) == 0:
            break
        futex(_word(pool, LEFT), 0, Int(left), 1_000_000_000)
    Atomic.store(_long(pool, WAITS), Int64(0))


# --- helpers -------------------------------------------------------------------------


def _start[task: Task](pool: Int, count: Int):
    """Starts helpers until there are `count`; fewer where the system refuses. Signals are left to other threads."""
    var process = Int64(external_call["getpid", c_int]())
    if _long(pool, PROCESS)[] != process:  # the first time, or after a fork
        _long(pool, PROCESS)[] = process
        _long(pool, STARTED)[] = 0
        _long(pool, ASLEEP)[] = 0
    if _long(pool, STARTED)[] >= Int64(count):
        return
    var signals = Array[Int64, 16](fill=-1)  # sigset_t, all of them
    var before = Array[Int64, 16](fill=0)
    comptime SIG_SETMASK = 2
    _ = external_call["pthread_sigmask", c_int](c_int(SIG_SETMASK), Int(signals.unsafe_ptr()), Int(before.unsafe_ptr()))
    while _long(pool, STARTED)[] < Int64(count):
        # What a helper is told: where the pool is, and its number. It keeps it for ever.
        var told = LongPtr(unsafe_from_address=external_call["aligned_alloc", Int](LINE, LINE))
        told[] = Int64(pool)
        told[unsafe_offset=1] = _long(pool, STARTED)[] + 1
        var thread = Int64(0)
        if external_call["pthread_create", c_int](Pointer(to=thread), 0, _helper[task], told) != 0:
            _long(pool, STARTED)[] = Int64(count)  # do not ask again
            break
        _ = external_call["pthread_detach", c_int](thread)
        _long(pool, STARTED)[] += 1
    _ = external_call["pthread_sigmask", c_int](c_int(SIG_SETMASK), Int(before.unsafe_ptr()), 0)
    _ = signals
    _ = before


def _helper[task: Task](told: LongPtr) abi("C") -> Int:
    """The life of a helper."""
    var pool = Int(told[])
    var me = Int(told[unsafe_offset=1])
    var heard = UInt32(0)
    while True:
        _wait_for_bell(pool, heard)
        heard = Atomic.load(_word(pool, BELL))
        var door = Atomic.load(_long(pool, DOOR))
        while door & OPEN:
            if not Atomic.compare_exchange(_long(pool, DOOR), door, door + 2):
                continue  # `door` is what it is now
            if me < Int(_long(pool, THREADS)[]):
                task(Int(_long(pool, STEP)[]), me)
            if Atomic.fetch_add(_long(pool, DOOR), -2) == 2:
                _ = Atomic.fetch_add(_word(pool, LEFT), 1)
                if Atomic.load(_long(pool, WAITS)):
                    futex(_word(pool, LEFT), 1, 1, 0)
            break


def _wait_for_bell(pool: Int, heard: UInt32):
    var bell = _word(pool, BELL)
    var begun = Int(perf_counter_ns())
    while True:
        if Atomic.load[ordering=Ordering.ACQUIRE](bell) != heard:
            return
        var waited = Int(perf_counter_ns()) - begun
        if waited < SPIN_NS:
            _pauses()
        elif waited < YIELD_NS:
            _ = external_call["sched_yield", c_int]()
        else:
            break
    _ = Atomic.fetch_add(_long(pool, ASLEEP), 1)
    while Atomic.load(bell) == heard:
        futex(bell, 0, Int(heard), 3_600_000_000_000)
    _ = Atomic.fetch_add(_long(pool, ASLEEP), -1)
