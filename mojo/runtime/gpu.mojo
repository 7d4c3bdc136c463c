"""One GPU: its memory, its queues and events, and programs replayed on it.

The owner of everything a device holds.

Python sees a GPU as a handle and memory as addresses (mojo/gpu_capi.mojo). Work goes into one of two queues: COMPUTE,
in the order of a step, and COPY, for batches that are brought while the step before is computed; events order the two.
Nothing here waits except `synchronize` and `wait_event`.
"""

from std.collections import Dict
from std.memory import unsafe_memset_zero
from std.utils import StaticTuple

from max.gpu.host import DeviceBuffer, DeviceContext, DeviceEvent, DeviceStream, HostBuffer
from max.gpu.host._nvidia_cuda import CUDA

from kernels.gpu.launch import Enqueue, Launch, Queue, StepContextPtr
from kernels.lanes import LongPtr, Ptr
from kernels.op import kernel_of, scratch_of
from kernels.record import CODES, GRADS, PARAMS, RECORD, SPACES, WORK

comptime U8 = DType.uint8  # memory is handled as bytes
comptime U8Ptr = Pointer[UInt8, MutUntrackedOrigin]  # bytes of any kind of memory; only copies look at them
comptime COMPUTE = 0  # the queue of steps
comptime COPY = 1  # the queue of batches that are brought ahead


@fieldwise_init
struct GpuStep(TrivialRegisterPassable):
    """A program for the shards of one chunk, as Python describes it; addresses are of device memory.

    python/odyssey/core/gpu_native.py mirrors it.
    """

    var table: LongPtr  # the ops, in host memory, as op.addresses has them
    var program: LongPtr  # the records, in host memory
    var records: Int64  # how many
    var params: Int64  # the arena of parameters
    var grads: Int64  # the first gradient buffer
    var grad_floats: Int64  # floats from one gradient buffer to the next
    var work: Int64  # the workspace of the first shard
    var work_floats: Int64  # floats from one shard's workspace to the next
    var scratch: Int64  # memory that launches share; `Gpu.scratch` says how much
    var context: Int64  # a StepContext
    var flag: Int64  # an int32: 1 while all numbers checked were finite
    var shards: Int64  # of the chunk
    var fold: Int64  # shards that share a gradient buffer: 1, 2, 4 or 8
    var accumulate: Int64  # 1: gradients are added to what the buffers hold


comptime GpuStepPtr = Pointer[GpuStep, MutUntrackedOrigin]  # a step that the caller keeps alive


struct Gpu(Movable):
    """A device with its two queues.

    Memory that it gave is freed with it.

    Memory is named by addresses, its size by bytes, an event by its number; `which` is COMPUTE or COPY. Methods raise
    an Error when the device refuses; those that wait, when something that they wait for has failed.
    """

    var compute: Queue  # the queue of steps
    var stream: DeviceStream  # which the other queue is
    var copy: Queue  # the queue of batches
    var buffers: Dict[Int, DeviceBuffer[U8]]  # device memory, by address
    var pinned: Dict[Int, HostBuffer[U8]]  # pinned host memory, by address
    var events: List[DeviceEvent]  # by number

    def __init__(out self, number: Int) raises:
        """Opens a device by its number, from 0."""
        self.compute = DeviceContext(device_id=number)
        self.stream = self.compute.create_stream()  # stream 1 of this context
        self.copy = self.compute.select_stream(1)
        self.buffers = Dict[Int, DeviceBuffer[U8]]()
        self.pinned = Dict[Int, HostBuffer[U8]]()
        self.events = List[DeviceEvent]()

    def queue(self, which: Int) -> Queue:
        """One of the two queues."""
        return self.copy if which == COPY else self.compute

    # --- memory ---

    def allocate(mut self, bytes: Int) raises -> Int:
        """Returns the address of new device memory, not initialised."""
        var buffer = self.compute.enqueue_create_buffer[U8](max(bytes, 16))
        var address = Int(buffer.unsafe_ptr())
        self.buffers[address] = buffer^
        return address

    def allocate_pinned(mut self, bytes: Int) raises -> Int:
        """Returns the address of new host memory that the device copies from and to by itself, set to 0."""
        var buffer = self.compute.enqueue_create_host_buffer[U8](max(bytes, 16))
        self.compute.synchronize()
        var address = Int(buffer.unsafe_ptr())
        unsafe_memset_zero(U8Ptr(unsafe_from_address=address), bytes)
        self.pinned[address] = buffer^
        return address

    def free(mut self, address: Int) raises:
        """Gives memory of either kind back; raises an Error if there is none at this address."""
        if address in self.buffers:
            _ = self.buffers.pop(address)
        elif address in self.pinned:
            _ = self.pinned.pop(address)
        else:
            raise Error("no memory at ", address, " to free")

    def move(self, dst: Int, src: Int, bytes: Int, which: Int) raises:
        """Enqueues a copy between any two of device, pinned and other devices' memory."""
        var q = self.queue(which)
        q.enqueue_copy(U8Ptr(unsafe_from_address=dst), U8Ptr(unsafe_from_address=src), bytes)

    def take(self, other: Gpu, dst: Int, src: Int, bytes: Int) raises:
        """Enqueues a copy from another device's memory, behind what is in that device's compute queue now."""
        self.compute.enqueue_wait_for(other.compute)
        self.compute.enqueue_copy(
            DeviceBuffer[U8](self.compute, U8Ptr(unsafe_from_address=dst), bytes, owning=False),
            DeviceBuffer[U8](other.compute, U8Ptr(unsafe_from_address=src), bytes, owning=False),
        )

    def upload(self, dst: Int, src: Int, bytes: Int, which: Int) raises:
        """Enqueues a copy from host to device memory."""
        var q = self.queue(which)
        q.enqueue_copy(
            DeviceBuffer[U8](q, U8Ptr(unsafe_from_address=dst), bytes, owning=False), U8Ptr(unsafe_from_address=src)
        )

    def download(self, dst: Int, src: Int, bytes: Int, which: Int) raises:
        """Enqueues a copy from device to host memory."""
        var q = self.queue(which)
        q.enqueue_copy(
            U8Ptr(unsafe_from_address=dst), DeviceBuffer[U8](q, U8Ptr(unsafe_from_address=src), bytes, owning=False)
        )

    def clear(self, address: Int, bytes: Int, which: Int) raises:
        """Enqueues setting bytes to 0."""
        var q = self.queue(which)
        q.enqueue_memset(DeviceBuffer[U8](q, U8Ptr(unsafe_from_address=address), bytes, owning=False), UInt8(0))

    # --- order ---

    def make_event(mut self) raises -> Int:
        """Returns the number of a new event."""
        self.events.append(self.compute.create_event())
        return len(self.events) - 1

    def record_event(self, event: Int, which: Int) raises:
        """The event happens when all that is in the queue now is done."""
        self.queue(which).stream().record_event(self.events[event])

    def await_event(self, event: Int, which: Int) raises:
        """What is put into the queue from now on waits for the event."""
        self.queue(which).stream().enqueue_wait_for(self.events[event])

    def wait_event(self, event: Int) raises:
        """Blocks until the event has happened."""
        self.events[event].synchronize()

    def synchronize(self, which: Int) raises:
        """Blocks until the queue is empty."""
        self.queue(which).synchronize()

    def native_stream(self, which: Int) raises -> Int:
        """The CUstream of a queue, for libraries that put work into it themselves; raises an Error if the device is not
        NVIDIA's. The device is made the current one of the calling thread, as they expect.
        """
        var q = self.queue(which)
        q.set_as_current()
        var handle = CUDA(q.stream())
        return Int(handle.value()) if handle else 0

    # --- programs ---

    def run(self, s: GpuStep) raises:
        """Enqueues a program for all shards of a chunk; raises an Error if a record has no kernel for GPUs."""
        var next = 0
        while next < Int(s.records):
            next = self.enqueue(s, next)

    def enqueue(self, s: GpuStep, first: Int) raises -> Int:
        """Enqueues one record of a program for all shards of a chunk, with the records that it computes along with it.

        Returns the number of the record that comes next. Raises an Error if the record has no kernel for GPUs.
        """
        var bases = StaticTuple[Int, SPACES](fill=0)
        bases[PARAMS] = Int(s.params)
        bases[GRADS] = Int(s.grads)
        bases[WORK] = Int(s.work)
        var strides = StaticTuple[Int, SPACES](fill=0)
        strides[GRADS] = Int(s.grad_floats)
        strides[WORK] = Int(s.work_floats)
        var at = s.program.unsafe_offset(first * RECORD)
        var left = Int(s.records) - first - 1
        try:
            kernel_of[Enqueue](s.table, Int(at[] & (CODES - 1)))(
                self.compute,
                Launch(
                    at,
                    bases,
                    strides,
                    Int(s.shards),
                    Int(s.fold),
                    s.accumulate != 0,
                    Ptr(unsafe_from_address=max(Int(s.scratch), 16)),
                    StepContextPtr(unsafe_from_address=max(Int(s.context), 16)),
                    Int(s.flag),
                    Pointer(to=left).unsafe_origin_cast[MutUntrackedOrigin](),
                ),
            )
        except e:
            raise Error("record ", first, " of the program: ", e)
        return Int(s.records) - left

    def scratch(self, s: GpuStep) -> Int:
        """Floats of scratch memory that a program wants."""
        var most = 0
        for i in range(Int(s.records)):
            var at = s.program.unsafe_offset(i * RECORD)
            most = max(most, scratch_of(s.table, at, Int(s.shards), Int(s.fold)))
        return most // 4
