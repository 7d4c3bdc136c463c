"""Channels (views.Channel) on a GPU: a block computes one of a shard, four neighbouring numbers of a thread at a
time; its sums are put together as a tree over the threads, which is not the order of the CPU.

A block has as many threads as give each some eight quads, which depends on the sizes of a shard alone: many small
channels run side by side then, and of large ones so few that what a block reads two or three times stays in the cache.
"""

from std.math import iota
from std.utils import StaticTuple

from max.gpu import block_idx, thread_idx

from ..lanes import F32, LANES, Ptr
from ..record import sizes_of
from ..views import Channel, Channels, OfChannels, Two
from .launch import Launch, Queue, Sent, StepContextPtr
from .quads import QUADS, block_sum, load4, store4

comptime MOST = 8  # operands


@fieldwise_init
struct _Block[threads: Int](Channel):
    """One channel, by all threads of a block."""

    comptime L = 4
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
        return Self.own[whole](load4(p, at), own)

    @staticmethod
    @always_inline
    def own[whole: Bool](v: SIMD[F32, Self.L], own: Int) -> SIMD[F32, Self.L]:
        return iota[DType.int32, Self.L]().lt(Int32(own)).select(v, SIMD[F32, Self.L](0))

    @staticmethod
    @always_inline
    def store[whole: Bool](p: Ptr, at: Int, v: SIMD[F32, Self.L], there: Int):
        store4(p, at, v)

    @always_inline
    def fold[B: def[whole: Bool](Int, Int, Two[Self.L]) -> Two[Self.L], //, both: Bool](self, body: B) -> Two[1]:
        var sums = Two[Self.L](0, 0)

        @always_inline
        def add[whole: Bool](at: Int, own: Int, there: Int) {mut sums, imm body}:
            sums = body[whole](at, own, sums)

        self.each(add)
        var s = (sums.s[0] + sums.s[1]) + (sums.s[2] + sums.s[3])
        comptime if both:
            var t = (sums.t[0] + sums.t[1]) + (sums.t[2] + sums.t[3])
            var two = block_sum[Self.threads](SIMD[F32, 2](s, t))
            return Two[1](two[0], two[1])
        else:
            return Two[1](block_sum[Self.threads](SIMD[F32, 1](s)), 0)

    @always_inline
    def each[B: def[whole: Bool](Int, Int, Int) -> None, //](self, body: B):
        var n = UInt32(self.z.P * QUADS)  # quads of a plane
        var g = UInt32(thread_idx.x) // n
        var i = UInt32(thread_idx.x) - g * n
        var groups = UInt32(Self.threads) // n  # from one quad of this thread to the next
        var rest = UInt32(Self.threads) - groups * n
        while g < UInt32(self.z.G):
            var own = self.live - Int(g) * LANES - Int(i % UInt32(QUADS)) * Self.L
            var at = (Int(g) * self.z.C + block_idx.x) * self.z.P * LANES + Self.L * Int(i)
            body[False](at, own, Self.L)
            g += groups
            i += rest
            if i >= n:
                i -= n
                g += 1


def _channels[
    A: Channels, f: def[T: Channel](T, A) thin, threads: Int
](sent: Sent[A], strides: Sent[StaticTuple[Int, MOST]], ctx: StepContextPtr):
    var a = sent.sizes
    comptime for i in range(min(MOST, reflect[A].field_count())):
        comptime if reflect[A].field_types()[i] == Ptr:
            ref place = reflect[A].field_ref[i](a)
            Pointer(to=place).unsafe_bitcast[Int]()[] += 4 * block_idx.y * strides.sizes[i]
    var z = a.sizes()
    f(_Block[threads](z, z.N if z.N >= 0 else ctx[].valid(block_idx.y)), a)


def enqueue_channels[A: Channels, f: def[T: Channel](T, A) thin](q: Queue, r: Launch) raises:
    """Computes f of every channel of every shard."""
    var a = sizes_of[A](r, 1)
    var strides = StaticTuple[Int, MOST](fill=0)
    for i in range(MOST):
        strides[i] = r.stride(1 + i)

    @always_inline
    def launch[threads: Int]() raises {imm}:
        q.enqueue_function[_channels[A, f, threads]](
            Sent(a), Sent(strides), r.context, grid_dim=(a.sizes().C, r.shards), block_dim=threads
        )

    var quads = a.sizes().G * a.sizes().P * QUADS
    if quads <= 512:
        launch[64]()
    elif quads <= 4096:
        launch[256]()
    else:
        launch[1024]()
