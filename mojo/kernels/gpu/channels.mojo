"""Channels (views.Channel) on a GPU: a block computes one of a shard, thread t every 256th number; halves are added, which is not
the order of the CPU.
"""

from std.utils import StaticTuple

from max.gpu import barrier, block_idx, thread_idx

from ..lanes import F32, LANES, Ptr
from ..record import sizes_of
from ..views import Channel, Channels, OfChannels, Two
from .launch import Launch, Queue, Sent, StepContextPtr
from .quads import THREADS, block_sum

comptime MOST = 8  # operands


@fieldwise_init
struct _Block(Channel):
    """One channel, by all threads of a block."""

    comptime L = 1
    var z: OfChannels
    var live: Int  # samples that count

    @always_inline
    def number(self) -> Int:
        return block_idx.x

    @always_inline
    def samples(self) -> Int:
        return self.live

    @always_inline
    def leads(self) -> Bool:
        return thread_idx.x == 0

    @staticmethod
    @always_inline
    def load[whole: Bool](p: Ptr, at: Int, own: Int) -> SIMD[F32, Self.L]:
        return p[unsafe_offset=at] if own > 0 else 0

    @staticmethod
    @always_inline
    def own[whole: Bool](v: SIMD[F32, Self.L], own: Int) -> SIMD[F32, Self.L]:
        return v if own > 0 else 0

    @staticmethod
    @always_inline
    def store[whole: Bool](p: Ptr, at: Int, v: SIMD[F32, Self.L], there: Int):
        p[unsafe_offset=at] = v[0]

    @always_inline
    def fold[B: def[whole: Bool](Int, Int, Two[Self.L]) -> Two[Self.L], //, both: Bool](self, body: B) -> Two[1]:
        var sums = Two[Self.L](0, 0)

        @always_inline
        def add[whole: Bool](at: Int, own: Int, there: Int) {mut sums, imm body}:
            sums = body[whole](at, own, sums)

        self.each(add)
        var s = _summed(sums.s[0])
        return Two[1](s, _summed(sums.t[0]) if both else 0)

    @always_inline
    def each[B: def[whole: Bool](Int, Int, Int) -> None, //](self, body: B):
        var plane = self.z.P * LANES
        for i in range(thread_idx.x, self.z.G * plane, THREADS):
            var g = i // plane
            var own = Int(g * LANES + i % LANES < self.live)
            body[False]((g * self.z.C + block_idx.x) * plane + i % plane, own, 1)


@always_inline
def _summed(value: Float32) -> Float32:
    """The sum over the block, for all its threads."""
    var s = block_sum[THREADS](value)
    barrier()
    return s


def _channels[
    A: Channels, f: def[T: Channel](T, A) thin
](sent: Sent[A], strides: Sent[StaticTuple[Int, MOST]], ctx: StepContextPtr):
    var a = sent.sizes
    comptime for i in range(min(MOST, reflect[A].field_count())):
        comptime if reflect[A].field_types()[i] == Ptr:
            ref place = reflect[A].field_ref[i](a)
            Pointer(to=place).unsafe_bitcast[Int]()[] += 4 * block_idx.y * strides.sizes[i]
    var z = a.sizes()
    f(_Block(z, z.N if z.N >= 0 else ctx[].valid(block_idx.y)), a)


def enqueue_channels[A: Channels, f: def[T: Channel](T, A) thin](q: Queue, r: Launch) raises:
    """Computes f of every channel of every shard."""
    var a = sizes_of[A](r, 1)
    var strides = StaticTuple[Int, MOST](fill=0)
    for i in range(MOST):
        strides[i] = r.stride(1 + i)
    q.enqueue_function[_channels[A, f]](
        Sent(a), Sent(strides), r.context, grid_dim=(a.sizes().C, r.shards), block_dim=THREADS
    )
