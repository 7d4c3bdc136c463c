"""The loops of a `Device` (kernels/op.mojo) on a GPU: one launch each, shards side by side.

n counts the floats of one shard and may be any number. What neither divides nor has exp or tanh has the bits of the
CPU.
"""

from std.utils import StaticTuple

from max.gpu import block_idx, grid_dim, thread_idx

from ..lanes import F32, IntPtr, LANES, LongPtr
from ..op import Device, Kernel, OpOf
from ..views import (
    Cell,
    Cells,
    Channel,
    Channels,
    Of1,
    OfCell,
    Of2,
    OfLoss,
    OfNumber,
    OfRow,
    OfTerm,
    Rule,
    Shard,
    Weights,
)
from .channels import enqueue_channels
from .lane_parts import enqueue_columns, enqueue_losses, enqueue_rows, losses_scratch
from .launch import Enqueue, GpuOp, Launch, Operand, Queue, SOME, Sent, StepContextPtr, blocks, call, of_several
from .quads import THREADS, aligned, divide, divisor, in_lanes, index, load4, of_shard, quads, small_index, store4


struct OnGpu(Device):
    """The loops of a GPU."""

    comptime Run = Enqueue

    @staticmethod
    def map[f: Of1]() -> Self.Run:
        return _enqueue1[f]

    @staticmethod
    def map[f: OfNumber]() -> Self.Run:
        return _enqueue_number[f]

    @staticmethod
    def map[f: Of2]() -> Self.Run:
        return _enqueue2[f]

    @staticmethod
    def rows[f: OfRow, operands: Int]() -> Self.Run:
        return enqueue_rows[f, operands]

    @staticmethod
    def columns[f: OfTerm, operands: Int]() -> Self.Run:
        return enqueue_columns[f, operands]

    @staticmethod
    def losses[
        f: OfLoss, operands: Int
    ](name: StaticString, roles: StaticString, traits: StaticString = "") -> OpOf[Self.Run]:
        return OpOf[Self.Run](name, roles, enqueue_losses[f, operands], traits, losses_scratch[operands])

    @staticmethod
    def cells[Z: Cells, f: OfCell[Z], operands: Int, wide: Int = 4]() -> Self.Run:
        return _enqueue_cells[Z, f, operands, wide]

    @staticmethod
    def cells[Z: Cells, f: OfCell[Z], operands: Int, *, cpu: Kernel]() -> Self.Run:
        return _enqueue_cells[Z, f, operands, 4]

    @staticmethod
    def either[
        Z: Cells, f: OfCell[Z], test: def(Z) thin -> Bool, Y: Cells, g: OfCell[Y], operands: Int, cpu: Kernel
    ]() -> Self.Run:
        return _enqueue_either[Z, f, test, Y, g, operands]

    @staticmethod
    def channels[A: Channels, f: def[T: Channel](T, A) thin]() -> Self.Run:
        return enqueue_channels[A, f]

    @staticmethod
    def update[R: Rule]() -> Self.Run:
        return _enqueue_update[R]


# --- maps: a thread has four floats -----------------------------------------------------------------------------------


def _map[f: OfNumber](y_: Operand, x_: Operand, a: Float32, n_: Int64):
    var n = Int(n_)
    var y = of_shard(y_)
    var x = of_shard(x_)
    var i = 4 * index()
    var end = min(i + 4, n)
    if i + 4 <= n and aligned(y) and aligned(x):
        store4(y, i, f[4](load4(x, i), a))
        return
    while i < end:
        y[unsafe_offset=i] = f[1](x[unsafe_offset=i], a)
        i += 1


def _map2[f: Of2](y_: Operand, u_: Operand, v_: Operand, n_: Int64):
    var n = Int(n_)
    var y = of_shard(y_)
    var u = of_shard(u_)
    var v = of_shard(v_)
    var i = 4 * index()
    var end = min(i + 4, n)
    if i + 4 <= n and aligned(y) and aligned(u) and aligned(v):
        store4(y, i, f[4](load4(u, i), load4(v, i)))
        return
    while i < end:
        y[unsafe_offset=i] = f[1](u[unsafe_offset=i], v[unsafe_offset=i])
        i += 1


@always_inline
def _launch[f: OfNumber](q: Queue, shards: Int, y: Operand, x: Operand, a: Float32, n: Int) raises:
    q.enqueue_function[_map[f]](y, x, a, Int64(n), grid_dim=(blocks(n, 4 * THREADS), shards), block_dim=THREADS)


def _enqueue1[f: Of1](q: Queue, r: Launch) raises:
    @always_inline
    def g[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
        return f[w](x)

    _launch[g](q, r.shards, r.op(1), r.op(2), 0, r.int(3))


def _enqueue_number[f: OfNumber](q: Queue, r: Launch) raises:
    _launch[f](q, r.shards, r.op(1), r.op(2), r.float(3), r.int(4))


def _enqueue2[f: Of2](q: Queue, r: Launch) raises:
    var n = r.int(4)
    var y = r.op(1)
    var u = r.op(2)
    var v = r.op(3)
    q.enqueue_function[_map2[f]](y, u, v, Int64(n), grid_dim=(blocks(n, 4 * THREADS), r.shards), block_dim=THREADS)


# --- places of planes -------------------------------------------------------------------------------------------------


@fieldwise_init
struct _Grid(TrivialRegisterPassable):
    """Operands, and how threads find their places."""

    var a: Operand
    var b: Operand
    var c: Operand
    var d: Operand
    var context: StepContextPtr
    var threads: UInt32
    var rows: UInt32
    var columns: UInt32
    var by_rows: UInt64
    var by_columns: UInt64


def _cells[Z: Cells, f: OfCell[Z], wide: Int](sent: Sent[_Grid], z: Sent[Z]):
    var grid = sent.sizes
    var i = small_index()
    if i >= grid.threads:
        return
    comptime PER = UInt32(LANES // wide)  # threads of a place
    var at = i // PER
    var row = divide(at, grid.by_columns)
    var plane = divide(row, grid.by_rows)
    ref step = grid.context[]
    f[wide](
        Cell[wide](
            of_shard(grid.a),
            of_shard(grid.b),
            of_shard(grid.c),
            of_shard(grid.d),
            Shard(step.seed, step.step, step.first + Int64(block_idx.y) * step.shard_size),
            Int(at),
            Int(plane),
            Int(row - plane * grid.rows),
            Int(at - row * grid.columns),
            Int(i % PER) * wide,
            LANES,
        ),
        z.sizes,
    )


def _enqueue_cells[Z: Cells, f: OfCell[Z], operands: Int, wide: Int](q: Queue, r: Launch) raises:
    comptime if wide == 4:
        comptime for i in range(operands):
            in_lanes(r.op(1 + i))
    var i = operands + 1
    var z = Z.read(r, i)
    var planes, rows, columns = z.shape()
    var n = quads(planes * rows * columns) * (4 // wide)
    var grid = _Grid(
        r.op(1),
        r.op(min(2, operands)),
        r.op(min(3, operands)),
        r.op(min(4, operands)),
        r.context,
        UInt32(n),
        UInt32(rows),
        UInt32(columns),
        divisor(rows),
        divisor(columns),
    )
    q.enqueue_function[_cells[Z, f, wide]](
        Sent(grid), Sent(z), grid_dim=(blocks(n, THREADS), r.shards), block_dim=THREADS
    )


def _enqueue_either[
    Z: Cells, f: OfCell[Z], test: def(Z) thin -> Bool, Y: Cells, g: OfCell[Y], operands: Int
](q: Queue, r: Launch) raises:
    var i = operands + 1
    if test(Z.read(r, i)):
        _enqueue_cells[Z, f, operands, 4](q, r)
    else:
        _enqueue_cells[Y, g, operands, 4](q, r)


# --- optimizers: the device decides itself whether the step is taken, so that no host has to wait for it --------------


def _update[R: Rule](ok: IntPtr, pieces: Sent[StaticTuple[Weights[R], SOME]]):
    var weights = of_several(pieces, block_idx.y)
    var i = 4 * index()
    if i >= weights.n or ok[] == 0:
        return
    var mean = 1 / weights.samples[]
    var all = aligned(weights.w) and aligned(weights.g)
    comptime for j in range(R.STATES):
        all = all and aligned(weights.states[j])
    if i + 4 <= weights.n and all:
        weights.step[4](i, mean)
        return
    var end = min(i + 4, weights.n)
    while i < end:
        weights.step[1](i, mean)
        i += 1


def _enqueue_update[R: Rule](q: Queue, r: Launch) raises:
    """Also of the pieces that follow, of the same arena or of others: no program changes a weight twice."""
    var pieces, many = r.several[Weights[R].read[Launch]]()
    var most = 0
    for k in range(many):
        most = max(most, pieces[k].n)
    q.enqueue_function[_update[R]](r.ok(), Sent(pieces), grid_dim=(blocks(most, 4 * THREADS), many), block_dim=THREADS)


# --- optimizers that are rules (python/odyssey/optim/rule.py): op by op, with results written to the arena at the end


def _taken(ok: IntPtr, y: Operand, x: Operand, table: Operand, at_: Int64, n: Int64):
    if ok[] == 0:
        return
    var at = Int(at_)
    var ends = LongPtr(unsafe_from_address=table.address).unsafe_offset(2 * block_idx.x)
    var i = max(Int(ends[]) - at, 0) + block_idx.y * THREADS + thread_idx.x
    while i < min(Int(ends[unsafe_offset=1]) - at, Int(n)):
        y.ptr()[unsafe_offset=i] = x.ptr()[unsafe_offset=i]
        i += grid_dim.y * THREADS


def _enqueue_taken(q: Queue, r: Launch) raises:
    """Arguments y; x; table, count, at, n: the n numbers from place `at` of the arena that are parameters', if all
    numbers checked were finite. The table has where `count` parameters begin and end there.
    """
    var count = r.int(4)
    q.enqueue_function[_taken](
        r.ok(),
        r.op(1),
        r.op(2),
        r.op(3),
        Int64(r.int(5)),
        Int64(r.int(6)),
        grid_dim=(count, blocks(r.int(6), 4 * THREADS * count)),
        block_dim=THREADS,
    )


# --- ops with a loop of their own -------------------------------------------------------------------------------------


@always_inline
def _same[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return x


@always_inline
def _number[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
    return a


def _fill(q: Queue, r: Launch) raises:
    """Arguments y; ; a, n. What _number is given is not read."""
    _launch[_number](q, r.shards, r.op(1), r.op(1), r.float(2), r.int(3))


def _loss_scale(y: Operand, shards: Int32, ctx: StepContextPtr):
    var s = index()
    if s < Int(shards):
        y.at(s)[] = ctx[].loss_scale


def loss_scale(q: Queue, shards: Int, y: Operand, ctx: StepContextPtr) raises:
    """Writes the step's loss scale, one float per shard."""
    q.enqueue_function[_loss_scale](y, Int32(shards), ctx, grid_dim=blocks(shards, THREADS), block_dim=THREADS)


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("copy", OnGpu.map[_same]()),
        GpuOp("taken", "+y; x, table; count, at, n", _enqueue_taken),
        GpuOp("fill", _fill),
        GpuOp("loss_scale", call[loss_scale]),
    ]
