"""One piece of memory twice, on the host for the CPU kernels and on the device, and how the two are compared.

A test places tensors in it by offset, shard behind shard at any stride, runs the same op on both sides and compares
everything, so a write beside a tensor is found as well.
"""

from std.math import isnan
from std.memory import Layout, alloc, bitcast
from std.utils import StaticTuple

from kernels.gpu.launch import (
    Enqueue,
    GpuOp,
    Launch,
    Operand,
    Queue,
    StepContext,
    StepContextPtr,
)
from kernels.lanes import F32, BytePtr, IntPtr, LongPtr, Ptr
from kernels.op import Kernel, Op
from kernels.record import Context, ContextPtr, RECORD, Record, SPACES
from kernels.reduce import split
from max.gpu.host import DeviceBuffer


comptime SCRATCH = 4096  # floats that an op may want


struct Lab:
    """`n` floats on both sides, filled with the same numbers in [-4, 4)."""

    var q: Queue
    var host: List[Float32]
    var device: DeviceBuffer[F32]
    var scratch: DeviceBuffer[F32]
    var n: Int

    def __init__(out self, q: Queue, n: Int, seed: Int = 1) raises:
        self.q = q
        self.n = n
        self.host = List[Float32](length=n, fill=0)
        self.device = self.q.enqueue_create_buffer[F32](n)
        self.scratch = self.q.enqueue_create_buffer[F32](SCRATCH)
        var state = UInt64(seed) * 0x9E3779B97F4A7C15 + 1
        for i in range(n):
            state = state * 6364136223846793005 + 1442695040888963407
            self.host[i] = Float32(Int(state >> 40)) / 2097152.0 - 4

    # --- addresses on the host ---

    def ptr(self, at: Int) -> Ptr:
        return Ptr(unsafe_from_address=self.address(at))

    def address(self, at: Int) -> Int:
        return Int(self.host.unsafe_ptr()) + 4 * at

    def ints(self, at: Int) -> IntPtr:
        return IntPtr(unsafe_from_address=self.address(at))

    def longs(self, at: Int) -> LongPtr:
        return LongPtr(unsafe_from_address=self.address(at))

    def bytes(self, at: Int) -> BytePtr:
        return BytePtr(unsafe_from_address=self.address(at))

    # --- on the device ---

    def there(self, at: Int) -> Int:
        return Int(self.device.unsafe_ptr()) + 4 * at

    def op(self, at: Int, stride: Int = 0) -> Operand:
        return Operand(self.there(at), stride)

    def dptr(self, at: Int) -> Ptr:
        return Ptr(unsafe_from_address=self.there(at))

    def dints(self, at: Int) -> IntPtr:
        return IntPtr(unsafe_from_address=self.there(at))

    def dlongs(self, at: Int) -> LongPtr:
        return LongPtr(unsafe_from_address=self.there(at))

    def dbytes(self, at: Int) -> BytePtr:
        return BytePtr(unsafe_from_address=self.there(at))

    def upload(self) raises:
        """The device has what the host has."""
        self.q.enqueue_copy(self.device, self.host.unsafe_ptr())
        self.q.synchronize()

    def compare(
        self,
        name: String,
        tolerance: Float32 = 0,
        skip: Int = -1,
        words: Int = 0,
    ) raises:
        """Raises where the two differ by more than tolerance times max(1, |x|); in a bit, if the tolerance is 0.

        `words` words from `skip` on are left out.
        """
        var got = List[Float32](length=self.n, fill=0)
        self.q.enqueue_copy(got.unsafe_ptr(), self.device)
        self.q.synchronize()
        for i in range(self.n):
            if i >= skip and i < skip + words:
                continue
            var a = got[i]
            var b = self.host[i]
            if bitcast[DType.uint32](a) == bitcast[DType.uint32](b):
                continue
            if isnan(a) and isnan(b):
                continue
            if tolerance > 0 and abs(a - b) <= tolerance * max(Float32(1), abs(b)):
                continue
            raise Error(t"{name}: float {i} is {a} on the GPU, {b} on the CPU")


def up(n: Int) -> Int:
    """The next multiple of 16."""
    return (n + 15) // 16 * 16


def added(lab: Lab, at: Int, stride: Int, n: Int) -> Float32:
    """The sum of n floats along the tree."""
    if n == 1:
        return lab.host[at]
    var left = split(n)
    return added(lab, at, stride, left) + added(lab, at + left * stride, stride, n - left)


@fieldwise_init
struct Shape(TrivialRegisterPassable):
    """The context of a launch, for both sides: where its parts lie in a lab."""

    var first: Int
    var samples: Int
    var shard_size: Int

    def valid(self, s: Int) -> Int:
        return max(
            0,
            min(self.samples - self.first - s * self.shard_size, self.shard_size),
        )


def put_context(
    mut lab: Lab,
    at: Int,  # even
    shape: Shape,
    images: Int = 0,
    bytes: Int = 0,
    arrays: Int = 0,
    rows: Int = 0,
    scale: Int = 0,
    shift: Int = 0,
) -> StepContextPtr:
    """Writes a StepContext with addresses on the device into the host's memory at `at`; returns where it will be."""
    var here = StepContextPtr(unsafe_from_address=lab.address(at))
    here[] = StepContext(
        seed=0x123456789ABCDEF,
        step=77,
        first=Int64(shape.first),
        samples=Int64(shape.samples),
        shard_size=Int64(shape.shard_size),
        images=BytePtr(unsafe_from_address=lab.there(images)),
        bytes=Int64(bytes),
        arrays=LongPtr(unsafe_from_address=lab.there(arrays)),
        rows=LongPtr(unsafe_from_address=lab.there(rows)),
        scale=Ptr(unsafe_from_address=lab.there(scale)),
        shift=Ptr(unsafe_from_address=lab.there(shift)),
        loss_scale=1024,
        unused=0,
    )
    return StepContextPtr(unsafe_from_address=lab.there(at))


def cpu_record(
    mut lab: Lab,
    shape: Shape,
    shard: Int,
    images: Int = 0,
    bytes: Int = 0,
    arrays: Int = 0,
    rows: Int = 0,
    scale: Int = 0,
    shift: Int = 0,
) -> Record:
    """A record without arguments, for CPU kernels that read the same context for one shard; never freed."""
    var context = alloc(Layout[Context](count=1)).unsafe_leak()
    context.unsafe_write(
        Context(
            seed=0x123456789ABCDEF,
            step=77,
            first=Int64(shape.first + shard * shape.shard_size),
            valid=Int64(shape.valid(shard)),
            images=lab.bytes(images),
            bytes=Int64(bytes),
            arrays=lab.longs(arrays),
            rows=lab.longs(rows).unsafe_offset(shard * shape.shard_size),
            scale=lab.ptr(scale),
            shift=lab.ptr(shift),
            loss_scale=1024,
            stopped=0,
            times=lab.longs(0),
            outputs=lab.longs(0),
        )
    )
    var none = lab.longs(0)
    return Record(none, none, ContextPtr(unsafe_from_address=Int(context)))


# --- ops by their names ---------------------------------------------------------------------------------------------------


def kernel(ops: List[Op], name: StaticString) raises -> Kernel:
    """The op of a table."""
    for op in ops:
        if op.name == name:
            return op.run
    raise Error(t"no op {name} in the CPU's table")


def kernel(ops: List[GpuOp], name: StaticString) raises -> Enqueue:
    """The same of a GPU's table."""
    for op in ops:
        if op.name == name:
            return op.run
    raise Error(t"no op {name} in the GPU's table")


def bits(x: Float32) -> Int:
    """A float as the argument of a record."""
    return Int(bitcast[DType.uint32](x))


@fieldwise_init
struct Part(Copyable):
    """An operand of an op: where it lies in a lab for shard 0, and floats to that of the next shard."""

    var at: Int
    var stride: Int


@fieldwise_init
struct Call(Copyable):
    """The arguments of an op and what a run brings to it, for both sides. At most four operands differ in their strides.
    """

    var operands: List[Part]
    var sizes: List[Int]
    var shards: Int
    var shape: Shape
    var context: Int  # where put_context wrote; -1: none
    var flag: Int  # where the int32 lies that stops an optimizer; -1: none

    def __init__(out self, *operands: Part, sizes: List[Int], shards: Int = 1):
        self = Self(List[Part](), sizes.copy(), shards, Shape(0, 0, 0), -1, -1)
        for part in operands:
            self.operands.append(part.copy())

    def on_cpu(self, mut lab: Lab, kernel: Kernel) raises:
        """Computes all shards, one after the other."""
        for s in range(self.shards):
            var r = cpu_record(lab, self.shape, s)
            var numbers = List[Int64](length=RECORD, fill=0)
            var bases = List[Int64](length=SPACES, fill=0)
            for i in range(len(self.operands)):
                ref part = self.operands[i]
                numbers[1 + i] = Int64(lab.address(part.at + s * part.stride))
            for i in range(len(self.sizes)):
                numbers[1 + len(self.operands) + i] = Int64(self.sizes[i])
            kernel(
                Record(
                    LongPtr(unsafe_from_address=Int(numbers.unsafe_ptr())),
                    LongPtr(unsafe_from_address=Int(bases.unsafe_ptr())),
                    r.context,
                )
            )
            _ = numbers^
            _ = bases^

    def on_gpu(self, lab: Lab, enqueue: Enqueue) raises:
        """Computes all shards in one launch."""
        _ = launches(lab, [self.copy()], enqueue)


def launches(lab: Lab, calls: List[Call], enqueue: Enqueue) raises -> Int:
    """Enqueues calls of one op, a program; returns how many launches it had. Each stride is that of a space of its own.
    """
    var numbers = List[Int64](length=RECORD * len(calls), fill=0)
    var strides = List[Int]()
    for k in range(len(calls)):
        ref call = calls[k]
        for i in range(len(call.operands)):
            ref part = call.operands[i]
            if part.stride not in strides:
                strides.append(part.stride)
            var space = 0
            while strides[space] != part.stride:
                space += 1
            numbers[RECORD * k + 1 + i] = Int64(space << 56 | lab.there(part.at))
        for i in range(len(call.sizes)):
            numbers[RECORD * k + 1 + len(call.operands) + i] = Int64(call.sizes[i])
    var of_spaces = StaticTuple[Int, SPACES](fill=0)
    for i in range(len(strides)):
        of_spaces[i] = strides[i]
    var many = 0
    var left = len(calls)
    while left > 0:
        var at = RECORD * (len(calls) - left)
        left -= 1
        many += 1
        var launch = Launch(
            LongPtr(unsafe_from_address=Int(numbers.unsafe_ptr())).unsafe_offset(at),
            StaticTuple[Int, SPACES](fill=0),
            of_spaces,
            calls[0].shards,
            1,
            False,
            Ptr(unsafe_from_address=Int(lab.scratch.unsafe_ptr())),
            StepContextPtr(unsafe_from_address=lab.there(max(calls[0].context, 0))),
            lab.there(max(calls[0].flag, 0)),
            Pointer(to=left).unsafe_origin_cast[MutUntrackedOrigin](),
        )
        enqueue(lab.q, launch)
    _ = numbers^
    return many
