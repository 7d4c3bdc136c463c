"""What all GPU kernels share: the queue they are put into, operands that walk over shards, the context of a step.

The only file that imports the host side of MAX's GPU modules; kernel files import what they need from here.

A program (mojo/runtime/ops.mojo) is written for one shard. On a GPU one launch computes an op for all shards of a
chunk: an operand is the address it has for the first shard and a stride, the floats from one shard's copy to the
next (0 where all shards share it, as parameters). Layouts are those of the CPU (lanes.mojo), so a buffer means the
same on both, and the letters of lanes.mojo hold here too. In addition

    shards   shards of this launch
    fold     shards whose parameter gradients one buffer takes, a power of two; the stride of a gradient operand is
             from one such buffer to the next. Their sum is the subtree of docs/determinism.md, so `fold` changes no bit

A launcher has the name of the CPU kernel, a queue, `shards` and then the arguments in the CPU kernel's order. It only
enqueues: no synchronisation, no allocation. What it adds up, it adds up in an order that depends on the layer's sizes
alone, never on `shards`, `fold`, the grid or the device's size. No atomics on floats.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.utils import StaticTuple

from max.gpu.host import DeviceContext

from ..lanes import BytePtr, IntPtr, LongPtr, Ptr
from ..op import OpOf
from ..record import Argument, Arguments, BF16, FP16, FP32, OFFSET, RECORD, SPACES, Source, TF32

comptime Queue = DeviceContext
comptime SOME = 8  # records of one op that a launch may compute


@fieldwise_init
struct Operand(Argument, DevicePassable):
    """Where a tensor of the first shard is, and how many floats further that of the next. Kernels take it as it is."""

    comptime device_type: AnyType = Self

    var address: Int
    var stride: Int  # floats; of int32 tensors as well

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Operand"

    @staticmethod
    @always_inline
    def read[S: Source](r: S, mut i: Int) -> Self:
        i += 1
        return Self(r.address(i - 1), r.stride(i - 1))

    @always_inline
    def ptr(self) -> Ptr:
        """The first shard's floats."""
        return Ptr(unsafe_from_address=self.address)

    @always_inline
    def at(self, shard: Int) -> Ptr:
        """The floats of a shard."""
        return self.ptr().unsafe_offset(shard * self.stride)

    @always_inline
    def ints_at(self, shard: Int) -> IntPtr:
        """The int32 numbers of a shard."""
        return IntPtr(unsafe_from_address=self.address).unsafe_offset(shard * self.stride)

    @always_inline
    def step(self) -> Int64:
        """The stride as a kernel takes it."""
        return Int64(self.stride)


@fieldwise_init
struct Sent[T: TrivialRegisterPassable](DevicePassable, TrivialRegisterPassable):
    """A struct of sizes as a kernel takes it."""

    comptime device_type: AnyType = Self

    var sizes: Self.T

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Sent"


@always_inline
def of_several[T: TrivialRegisterPassable, //](all: Sent[StaticTuple[T, SOME]], i: Int) -> T:
    """What launch.several found i-th, without an index, for which they would be copied to local memory."""
    var one = all.sizes[0]
    comptime for k in range(1, SOME):
        if i == k:
            one = all.sizes[k]
    return one


@fieldwise_init
struct StepContext(TrivialRegisterPassable):
    """What changes from step to step without being an address; in device memory, written before a step's launches.

    Shard s of the launch has samples first + s shard_size up to at most shard_size of them, of `samples` in the global
    batch; `rows` are the positions in the data set of the samples from `first` on.
    """

    var seed: UInt64
    var step: Int64
    var first: Int64
    var samples: Int64
    var shard_size: Int64
    var images: BytePtr  # the data set, (samples, F)
    var bytes: Int64  # 1 if it is uint8, 0 if float32
    var arrays: LongPtr  # addresses of the arrays that `array` gathers
    var rows: LongPtr
    var scale: Ptr  # (C)
    var shift: Ptr  # (C)
    var loss_scale: Float32  # a power of two; Metal has no doubles
    var unused: Float32

    @always_inline
    def valid(self, shard: Int) -> Int:
        """Samples that shard `shard` of the launch has."""
        var left = Int(self.samples) - Int(self.first) - shard * Int(self.shard_size)
        return max(0, min(left, Int(self.shard_size)))


comptime StepContextPtr = Pointer[StepContext, MutUntrackedOrigin]


@always_inline
def blocks(n: Int, size: Int) -> Int:
    """Blocks of `size` threads for n of them; at least one."""
    return max(1, ceildiv(n, size))


# --- records -----------------------------------------------------------------------------


@fieldwise_init
struct Launch(Copyable, Source):
    """One record with what it needs to become a launch.

    An operand in a space becomes an address and a stride, and the op is enqueued for all shards at once.
    """

    var at: LongPtr  # numbers of the record
    var bases: StaticTuple[Int, SPACES]  # addresses of the spaces, of shard 0
    var strides: StaticTuple[Int, SPACES]  # floats from one shard to the next
    var shards: Int  # of the chunk
    var fold: Int  # shards that share a gradient buffer: 1, 2, 4 or 8
    var accumulate: Bool  # whether gradients are added to what the buffers hold
    var scratch: Ptr  # memory that launches share
    var context: StepContextPtr  # what a run brings to the program
    var flag: Int  # address of an int32: 1 while all numbers checked were finite
    var left: Pointer[Int, MutUntrackedOrigin]  # records of the program behind this one that are not computed with it

    @always_inline
    def number(self, i: Int) -> Int64:
        return self.at[unsafe_offset=i]

    @always_inline
    def ints[n: Int](self, first: Int) -> StaticTuple[Int64, n]:
        """Arguments `first` to first + n - 1 as a kernel takes them."""
        var numbers = StaticTuple[Int64, n](fill=0)
        for i in range(n):
            numbers[i] = self.number(first + i)
        return numbers

    @always_inline
    def address(self, i: Int) -> Int:
        var v = Int(self.at[unsafe_offset=i])
        return self.bases[v >> 56] + (v & OFFSET)

    @always_inline
    def stride(self, i: Int) -> Int:
        return self.strides[Int(self.at[unsafe_offset=i]) >> 56]

    @always_inline
    def run(self) -> Int:
        return Int(self.context)

    def several[T: TrivialRegisterPassable, //, f: def(Self) thin -> T](self) -> Tuple[StaticTuple[T, SOME], Int]:
        """What f gives of this record and of those behind it of the same op, as many as one launch computes, and how
        many.
        """
        var found = StaticTuple[T, SOME](fill=f(self))
        var many = 1
        var other = self.copy()
        while many < SOME and self.left[] > 0:
            other.at = self.at.unsafe_offset(many * RECORD)
            if other.number(0) != self.number(0):
                break
            found[many] = f(other)
            many += 1
            self.left[] -= 1
        return found, many

    @always_inline
    def op(self, i: Int) -> Operand:
        """Argument i as an operand that walks over the shards."""
        return Operand(self.address(i), self.stride(i))

    @always_inline
    def ok(self) -> IntPtr:
        """The flag: 1 while all numbers checked were finite."""
        return IntPtr(unsafe_from_address=self.flag)


comptime Enqueue = def(Queue, Launch) raises thin  # enqueues a record
comptime GpuOp = OpOf[Enqueue]  # one op of a GPU


def call[
    Ts: TypeList[Trait=AnyType, ...], //, f: def(Queue, Int, /, * args: * Ts) raises thin
](q: Queue, r: Launch) raises:
    """f for all shards, with the record's arguments, each read as the type that f declares (record.Arguments)."""
    var arguments = Arguments[Ts]()
    var pack = arguments.read(r)
    f(q, r.shards, *pack)
    _ = arguments^
