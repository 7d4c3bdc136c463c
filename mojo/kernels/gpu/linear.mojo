"""Linear layers on a GPU: y = W x + b and its gradients, for all shards of a launch at once.

Layouts and arguments are those of ../linear.mojo; launch.mojo explains `shards`, `fold` and operands. This file chooses
the tile and launches; the kernel is gemm.mojo. Addresses must be multiples of 16 bytes, and so must the strides.

Float32 sums are chains of fused multiply-adds, in the order that gemm.mojo describes.
"""

from std.math import ceildiv

from max.gpu.host import FuncAttribute

from ..lanes import LANES
from .gemm import product
from .gemm_tiles import (
    ACCUMULATE,
    ALIGNED,
    FORWARD,
    INPUT,
    LARGE,
    MEDIUM,
    RELU,
    SHARED_LIMIT,
    SMALL,
    TEAMS,
    Tile,
    WEIGHT,
    parts_of,
)
from .launch import Operand, Queue

# When a larger tile is worth it: there are enough of them for 132 multiprocessors, which hold two blocks of LARGE or
# eight warps of MEDIUM each, and not much of them is beyond the result. Nothing but the time depends on it, and it was
# not measured.
comptime ANY = -1  # the launcher chooses the tile; a test names SMALL, MEDIUM or LARGE
comptime ENOUGH_BLOCKS = 100
comptime ENOUGH_WARPS = 384


@fieldwise_init
struct _Product(TrivialRegisterPassable):
    """A product as gemm.mojo has it: y (rows, columns) of a and b, over `terms`."""

    var y: Operand
    var a: Operand
    var b: Operand
    var bias: Operand
    var rows: Int
    var columns: Int
    var terms: Int
    var G: Int
    var shards: Int
    var teams: Int
    var flags: Int

    def launch[op: Int, precision: Int](self, q: Queue, tile: Int) raises:
        """Enqueues it, with the tile given or the best."""
        var floats = self.columns if op == WEIGHT else self.columns * LANES
        var buffers = ceildiv(self.shards, self.teams) if op == WEIGHT else 1

        @always_inline
        def tiles[size: Int]() {imm} -> Int:
            comptime T = Tile[op, precision, size]
            return ceildiv(self.rows, T.ROWS) * ceildiv(floats, T.COLUMNS) * buffers

        @always_inline
        def area[size: Int]() {imm} -> Int:
            """Of the tiles, with what they have beyond the result."""
            comptime T = Tile[op, precision, size]
            return tiles[size]() * T.ROWS * T.COLUMNS

        @always_inline
        def fits[size: Int]() {imm} -> Bool:
            var within = Tile[op, precision, size].shared_bytes(self.teams) <= SHARED_LIMIT
            return within and (op == WEIGHT or self.flags & ALIGNED != 0)

        var size = tile
        if tile < 0:
            size = SMALL
            if tiles[LARGE]() >= ENOUGH_BLOCKS and 7 * area[LARGE]() <= 8 * area[MEDIUM]() and fits[LARGE]():
                size = LARGE
            elif (
                tiles[MEDIUM]() * self.teams >= ENOUGH_WARPS and area[MEDIUM]() <= 2 * area[SMALL]() and fits[MEDIUM]()
            ):
                size = MEDIUM
        if size == LARGE:
            self._enqueue[op, precision, LARGE](q)
        elif size == MEDIUM:
            self._enqueue[op, precision, MEDIUM](q)
        else:
            self._enqueue[op, precision, SMALL](q)

    @always_inline
    def _enqueue[op: Int, precision: Int, size: Int](self, q: Queue) raises:
        comptime T = Tile[op, precision, size]
        var threads = T.TEAM * (1 if size == LARGE else self.teams)
        var grid = ceildiv(self.rows, T.ROWS)
        var buffers = 1
        comptime if op == WEIGHT:
            grid *= ceildiv(self.columns, T.COLUMNS)
            grid += ceildiv(self.rows, threads // LANES)
            buffers = ceildiv(self.shards, self.teams)
        else:
            grid *= ceildiv(self.columns * LANES, T.COLUMNS)
        q.enqueue_function[product[op, precision, size]](
            self.y.ptr(),
            self.y.step(),
            self.a.ptr(),
            self.a.step(),
            self.b.ptr(),
            self.b.step(),
            self.bias.ptr(),
            self.bias.step(),
            Int32(self.rows),
            Int32(self.columns),
            Int32(self.terms),
            Int32(self.G),
            Int32(self.shards),
            Int32(self.teams),
            Int32(self.flags),
            grid_dim=(grid, buffers),
            block_dim=threads,
            shared_mem_bytes=T.shared_bytes(self.teams),
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(min(SHARED_LIMIT, T.shared_bytes(TEAMS)))
            ),
        )


def linear_forward[
    precision: Int, relu: Bool
](
    q: Queue,
    shards: Int,
    y: Operand,  # (G, O, L)
    x: Operand,  # (G, I, L)
    w: Operand,  # (O, I)
    b: Operand,  # (O)
    G: Int,
    I: Int,
    O: Int,
    tile: Int = ANY,
) raises:
    """Computes y = W x + b, then max(y, 0) if `relu`."""
    var flags = (RELU if relu else 0) | (ALIGNED if I % 4 == 0 else 0)
    var of = _Product(y, w, x, b, O, shards * G, I, G, shards, parts_of(I, O), flags)
    of.launch[FORWARD, precision](q, tile)


def linear_backward_input[
    precision: Int
](
    q: Queue,
    shards: Int,
    dx: Operand,  # (G, I, L)
    dy: Operand,  # (G, O, L)
    w: Operand,  # (O, I)
    G: Int,
    I: Int,
    O: Int,
    tile: Int = ANY,
) raises:
    """Computes dx = W^T dy."""
    var flags = ALIGNED if I % 4 == 0 else 0
    var of = _Product(dx, w, dy, w, I, shards * G, O, G, shards, parts_of(O, I), flags)
    of.launch[INPUT, precision](q, tile)


def linear_backward_weight[
    precision: Int
](
    q: Queue,
    shards: Int,
    fold: Int,
    dw: Operand,  # (O, I), one buffer per `fold` shards
    db: Operand,  # (O), likewise
    dy: Operand,  # (G, O, L)
    x: Operand,  # (G, I, L)
    G: Int,
    I: Int,
    O: Int,
    accumulate: Bool,
    tile: Int = ANY,
) raises:
    """Computes dW = dy x^T and db = the sum of dy over samples, shards added along the fixed tree; adds them to what is
    there if `accumulate`. db is summed in float32 from dy as it is, in every precision.
    """
    if fold > TEAMS:
        raise Error(
            t"[gpu] fold={fold} is refused: linear_backward_weight adds at most {TEAMS} shards; use a smaller fold"
        )
    var flags = (ACCUMULATE if accumulate else 0) | (ALIGNED if I % 4 == 0 else 0)
    var of = _Product(dw, dy, x, db, O, I, 0, G, shards, min(fold, shards), flags)
    of.launch[WEIGHT, precision](q, tile)
