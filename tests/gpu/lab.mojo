"""One piece of memory twice, on the host for the CPU kernels and on the device, and how the two are compared.

A test places tensors in it by offset, shard behind shard at any stride, runs the same op on both sides and compares
everything, so a write beside a tensor is found as well.
"""

from std.math import isnan
from std.memory import Layout, alloc, bitcast

from kernels.gpu.launch import Operand, Queue, StepContext, StepContextPtr
from kernels.lanes import F32, BytePtr, IntPtr, LongPtr, Ptr
from kernels.record import Context, ContextPtr, Record
from kernels.reduce import split
from max.gpu.host import DeviceBuffer


struct Lab:
    """`n` floats on both sides, filled with the same numbers in [-4, 4)."""

    var q: Queue
    var host: List[Float32]
    var device: DeviceBuffer[F32]
    var n: Int

    def __init__(out self, q: Queue, n: Int, seed: Int = 1) raises:
        self.q = q
        self.n = n
        self.host = List[Float32](length=n, fill=0)
        self.device = self.q.enqueue_create_buffer[F32](n)
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
        )
    )
    var none = lab.longs(0)
    return Record(none, none, ContextPtr(unsafe_from_address=Int(context)))
