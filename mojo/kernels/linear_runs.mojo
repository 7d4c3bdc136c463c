"""Gradient of the weights of a linear layer, of several shards at once: runs of shards (docs/kernels.md).

A shard of 32 samples has few products per weight, so linear_backward_weight spends much of its time on reading and
writing dw, and adding up the shards' gradients takes the same again. Here a tile computes its sums for one shard after
the other, adds them along the tree of docs/determinism.md in registers and in the first level of the cache, and writes
each sum once. The additions of a sum and their order are those of linear_backward_weight and linear_backward_weight_bf16
followed by the executor's, so the bits are the same.

A pass takes the samples whose transposed x stays in the cache: a block of one shard, or several shards side by side. In
float32, where a chain of additions is at most BLOCK groups long, there may be several passes; the sums of a part of the
outputs wait for the next pass in scratch memory.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import prefetch

from .buffers import TERMS, add_neighbours, add_up, fill
from .lanes import F32, LANES, Ptr, Vec, in_tiles, load, load_first, store, store_first
from .linear import BLOCK, IB, OB, samples_first, weight_products
from .linear_bf16 import GROUPS, pairs_first, weight_products_bf16
from .lowp import HALF, HalfPtr, bias_gradient, pack_row
from .record import EARLIER, GRADS, OFFSET, Record

# Outputs whose sums wait for the next pass together: with their dy, at most 350 KB, they stay in the second level of
# the cache.
comptime CHUNK = 76 * OB
comptime LEVELS = 4  # of the tree over the shards of a pass: at most 16 shards


@fieldwise_init
struct Sums(TrivialRegisterPassable):
    """Where the sum of the shards' gradients goes, and the sums of earlier shards that it is added to."""

    var to: Ptr
    var earlier: SIMD[DType.int64, 4]  # addresses
    var n: Int  # how many of them

    @staticmethod
    def of(r: Record, i: Int) -> Self:
        """Of the gradients that argument i stands for."""
        ref run = r.context[].shard_run[]
        var offset = r.number(i) & Int64(OFFSET)
        return Self(Ptr(unsafe_from_address=Int(run.sum + offset)), run.earlier + offset, Int(run.before))

    @always_inline
    def at(self, t: Int) -> Ptr:
        """The earlier sums number t."""
        return Ptr(unsafe_from_address=Int(self.earlier[t]))

    @always_inline
    def from_(self, n: Int) -> Self:
        """The same from number n on."""
        return Self(self.to.unsafe_offset(n), self.earlier + Int64(4 * n), self.n)


def is_gradient(r: Record, i: Int) -> Bool:
    """True if argument i is a gradient of the arena: that of a missing bias is memory that nobody reads."""
    return Int(r.number(i)) >> 56 == GRADS


def _shards_of_a_pass(shards: Int, G: Int, groups: Int) -> Int:
    """How many shards of G groups one pass of `groups` groups takes: a power of two, so that it is a node."""
    var n = 1
    while 2 * n * G <= groups and n < shards:
        n *= 2
    return n


def _panel(I: Int) -> Int:
    """Inputs of a panel, at most."""
    return min(ceildiv(I, LANES), IB) * LANES


def _waiting(shards: Int, G: Int, I: Int, O: Int) -> Int:
    """Floats of the sums that wait for the next pass: none if there is one pass."""
    return 0 if shards * G <= BLOCK else min(O, CHUNK + OB) * _panel(I)


def runs_scratch(shards: Int, G: Int, I: Int, O: Int) -> Int:
    """Floats of scratch memory that weights_of_run and biases_of_run want for each shard."""
    return max(_waiting(shards, G, I, O) + shards * G * LANES * _panel(I), O)


def runs_scratch_bf16(shards: Int, G: Int, I: Int, O: Int) -> Int:
    """Floats of scratch memory that weights_of_run_bf16 and biases_of_run want for each shard."""
    return max(shards * G * HALF * _panel(I) + G * HALF * O, O)


@always_inline
def _products[ob: Int, ib: Int, halves: Bool](mut acc: Array[Vec, ob * ib], dy: Ptr, xt: Ptr, G: Int, O: Int):
    comptime if halves:
        weight_products_bf16[ob, ib](acc, dy.unsafe_bitcast[BFloat16](), xt.unsafe_bitcast[BFloat16](), G, O)
    else:
        weight_products[ob, ib](acc, dy, xt, G, O)


@no_inline
def _tile[
    ob: Int, ib: Int, halves: Bool
](
    sums: Sums,
    waiting: Ptr,
    dy: Ptr,
    dy_shard: Int,
    xt: Ptr,
    shards: Int,
    G: Int,
    O: Int,
    valid: Int,
    row: Int,
    begins: Bool,
    follows: Bool,
    ends: Bool,
):
    """One pass over ob outputs and ib vectors of inputs, of which the last has `valid` inputs.

    Args:
        sums: Those of the first output and input; the next output is `row` floats after.
        waiting: Sums (ob, ib L) of the passes before, and for those after.
        dy: Of the first shard, (G, O, L); of a pass over several shards they are `dy_shard` floats apart.
        xt: (shards, G, L, ib L) or pairs of that.
        shards: Of the pass.
        G: Groups of each of them in this pass.
        O: Outputs of the layer.
        valid: Inputs of the last vector.
        row: Floats from one output's weights to the next one's.
        begins: The shards' sums begin in this pass.
        follows: There was a pass before.
        ends: There is no pass after.
    """
    comptime V = ob * ib * LANES
    comptime group = (HALF if halves else LANES) * ib * LANES  # floats of xt
    if ends:  # What is read and written at the end, for the tile below: it takes as long as the products.
        comptime for o in range(ob):
            comptime for i in range(ib):
                prefetch(sums.to.unsafe_offset((ob + o) * row + i * LANES))
        for t in range(sums.n):
            comptime for o in range(ob):
                comptime for i in range(ib):
                    prefetch(sums.at(t).unsafe_offset((ob + o) * row + i * LANES))
    var saved = unsafe_stack_allocation[LEVELS * V, F32, alignment=64]()
    var acc = Array[Vec, ob * ib](fill=Vec(0))
    var depth = 0  # sums of complete nodes, which wait for their neighbours
    for shard in range(shards):
        comptime for k in range(ob * ib):
            acc[k] = Vec(0)
        _products[ob, ib, halves](acc, dy.unsafe_offset(shard * dy_shard), xt.unsafe_offset(shard * G * group), G, O)
        if begins:  # a shard's sum is added to zeros: -0 becomes 0
            comptime for k in range(ob * ib):
                acc[k] = Vec(0) + acc[k]
        var pair = shard
        while depth > 0 and (pair & 1 == 1 or shard == shards - 1):
            depth -= 1
            comptime for k in range(ob * ib):
                acc[k] += load(saved, depth * V + k * LANES)
            pair >>= 1
        if shard < shards - 1:
            comptime for k in range(ob * ib):
                store(saved, depth * V + k * LANES, acc[k])
            depth += 1
    if follows:
        comptime for k in range(ob * ib):
            acc[k] = load(waiting, k * LANES) + acc[k]
    if not ends:
        comptime for k in range(ob * ib):
            store(waiting, k * LANES, acc[k])
        return
    for t in range(sums.n):
        comptime for o in range(ob):
            comptime for i in range(ib):
                var n = LANES if i < ib - 1 else valid
                acc[o * ib + i] += load_first(sums.at(t), o * row + i * LANES, n)
    comptime for o in range(ob):
        comptime for i in range(ib):
            var n = LANES if i < ib - 1 else valid
            store_first(sums.to, o * row + i * LANES, acc[o * ib + i], n)


def weights_of_run(
    sums: Sums,  # (O, I)
    dy: Ptr,  # (G, O, L) of each shard
    x: Ptr,  # (G, I, L) of each shard
    scratch: Ptr,  # runs_scratch floats: that of the first shard
    shards: Int,
    apart: Int,  # floats from dy and x of one shard to those of the next
    G: Int,
    I: Int,
    O: Int,
):
    """Computes the sum of dW = dy x^T over samples and along the tree over shards, added to earlier sums.

    Either a shard is one block, or the run is one shard.
    """
    var vectors = ceildiv(I, LANES)
    var panels = ceildiv(vectors, IB)
    var several = G <= BLOCK  # passes over shards, not over the blocks of one
    var each = _shards_of_a_pass(shards, G, BLOCK) if several else 1
    var passes = ceildiv(shards, each) if several else ceildiv(G, BLOCK)
    var chunks = ceildiv(O, CHUNK) if passes > 1 else 1
    var xt = scratch.unsafe_offset(_waiting(shards, G, I, O))
    for p in range(panels):
        var first = vectors * p // panels
        var last = vectors * (p + 1) // panels
        comptime for ib in range(1, IB + 1):
            if last - first == ib:
                var inputs = min(last * LANES, I) - first * LANES
                for s in range(shards):
                    samples_first[ib](
                        xt.unsafe_offset(s * G * LANES * ib * LANES),
                        x.unsafe_offset(s * apart + first * LANES * LANES),
                        G,
                        I,
                        inputs,
                    )
                for c in range(chunks):
                    var start = O * c // chunks // OB * OB
                    var end = O if c == chunks - 1 else O * (c + 1) // chunks // OB * OB
                    for q in range(passes):
                        var g = 0 if several else q * BLOCK
                        var s = q * each if several else 0

                        @always_inline
                        def tile[ob: Int](o: Int) {imm}:
                            _tile[ob, ib, False](
                                sums.from_((start + o) * I + first * LANES),
                                scratch.unsafe_offset(o * ib * LANES),
                                dy.unsafe_offset(s * apart + (g * O + start + o) * LANES),
                                apart,
                                xt.unsafe_offset((s * G + g) * LANES * ib * LANES),
                                min(each, shards - s),
                                min(BLOCK, G - g),
                                O,
                                inputs - (ib - 1) * LANES,
                                I,
                                g == 0,
                                q > 0,
                                q == passes - 1,
                            )

                        in_tiles[OB](end - start, tile)


def weights_of_run_bf16(
    sums: Sums,  # (O, I)
    dy: Ptr,  # (G, O, L) of each shard
    x: Ptr,  # (G, I, L) of each shard
    scratch: Ptr,  # runs_scratch_bf16 floats of each shard
    shards: Int,
    apart: Int,  # floats from dy, x and scratch of one shard to those of the next
    G: Int,
    I: Int,
    O: Int,
):
    """The same of pairs of bf16, in one pass: for at most GROUPS groups of all shards."""
    var vectors = ceildiv(I, LANES)
    var panels = ceildiv(vectors, IB)
    var xt = scratch  # (shards, G, HALF, ib L, 2)
    var dyp = scratch.unsafe_offset(shards * G * HALF * _panel(I))  # (G, O, HALF, 2) of each shard
    for s in range(shards):
        pack_row(dyp.unsafe_offset(s * apart).unsafe_bitcast[BFloat16](), dy.unsafe_offset(s * apart), G * O * LANES)
    for p in range(panels):
        var first = vectors * p // panels
        var last = vectors * (p + 1) // panels
        comptime for ib in range(1, IB + 1):
            if last - first == ib:
                var inputs = min(last * LANES, I) - first * LANES
                for s in range(shards):
                    pairs_first[ib](
                        xt.unsafe_offset(s * G * HALF * ib * LANES).unsafe_bitcast[BFloat16](),
                        x.unsafe_offset(s * apart + first * LANES * LANES),
                        G,
                        I,
                        inputs,
                    )

                @always_inline
                def tile[ob: Int](o: Int) {imm}:
                    _tile[ob, ib, True](
                        sums.from_(o * I + first * LANES),
                        scratch,
                        dyp.unsafe_offset(o * HALF),
                        apart,
                        xt,
                        shards,
                        G,
                        O,
                        inputs - (ib - 1) * LANES,
                        I,
                        True,
                        False,
                        True,
                    )

                in_tiles[OB](O, tile)


def biases_of_run(
    sums: Sums,  # (O)
    dy: Ptr,  # (G, O, L) of each shard
    scratch: Ptr,  # (O) of each shard
    shards: Int,
    apart: Int,  # floats from dy and scratch of one shard to those of the next
    G: Int,
    O: Int,
):
    """Computes the sum of db = dy over samples and along the tree over shards, added to earlier sums."""
    for s in range(shards):
        var db = scratch.unsafe_offset(s * apart)
        fill(db, 0, O)
        bias_gradient[LANES](db, dy.unsafe_offset(s * apart), G, O, 1)
    add_neighbours(scratch, apart, shards, O)
    var terms = Array[Ptr, TERMS](fill=scratch)
    for t in range(sums.n):
        terms[1 + t] = sums.at(t)
    comptime for k in range(1, EARLIER + 2):
        if sums.n + 1 == k:
            add_up[k](sums.to, terms, O)
