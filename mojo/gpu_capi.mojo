"""GPUs behind a C interface: the root file of the library that python/odyssey/core/gpu_native.py loads.

Functions take numbers and addresses and return 0, or -1 with what went wrong, in UTF-8, in `error` (of `size` bytes).
"""

from std.memory import Layout, alloc
from std.runtime import initialize_runtime
from std.sys import size_of

from kernels.gpu.fingerprint import fingerprint, fingerprint_scratch
from kernels.gpu.launch import StepContext
from kernels.gpu.reduce import fixed_squares, largest, tree_sum_strided
from kernels.lanes import BytePtr, IntPtr, LongPtr, Ptr
from kernels.op import addresses, describe, write_text
from max.gpu.host import DeviceContext
from runtime.gpu import Gpu, GpuStepPtr
from runtime.gpu_ops import gpu_ops

comptime GpuPtr = Pointer[Gpu, MutUntrackedOrigin]


def _fail(error: BytePtr, size: Int, e: Error) -> Int:
    var n = write_text(String(e), error, size - 1)
    error[unsafe_offset=min(n, size - 1)] = 0
    return -1


@export
def odyssey_gpu_init() abi("C"):
    """Starts the runtime; once, before anything else."""
    initialize_runtime()


@export
def odyssey_gpu_count() abi("C") -> Int:
    """GPUs that this library can use on this machine."""
    return DeviceContext.number_of_devices()


@export
def odyssey_gpu_context_size() abi("C") -> Int:
    """Bytes of a StepContext, to compare."""
    return size_of[StepContext]()


@export
def odyssey_gpu_ops() abi("C") -> Int:
    """How many ops there are."""
    return len(gpu_ops())


@export
def odyssey_gpu_op(op: Int, text: BytePtr, size: Int) abi("C") -> Int:
    """Writes name, roles and traits of an op (op.describe); returns the length."""
    return describe(gpu_ops(), op, text, size)


@export
def odyssey_gpu_kernels() abi("C") -> LongPtr:
    """Addresses of the launcher and of the scratch function of each op (op.addresses)."""
    return addresses(gpu_ops())


@export
def odyssey_gpu_open(number: Int, handle: LongPtr, error: BytePtr, size: Int) abi("C") -> Int:
    """Opens a GPU; writes its handle."""
    try:
        var gpu = Gpu(number)
        var p = alloc(Layout[Gpu](count=1)).unsafe_leak()
        p.unsafe_write(gpu^)
        handle[] = Int64(Int(p))
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_close(gpu: GpuPtr) abi("C"):
    """Gives a GPU back with all its memory."""
    gpu.unsafe_deinit_pointee()
    gpu.unsafe_free()


@export
def odyssey_gpu_name(gpu: GpuPtr, text: BytePtr, size: Int) abi("C") -> Int:
    """Writes the name of the device."""
    return write_text(gpu[].compute.name(), text, size)


@export
def odyssey_gpu_memory(gpu: GpuPtr, into: LongPtr, error: BytePtr, size: Int) abi("C") -> Int:
    """Writes bytes of free and of all device memory."""
    try:
        var free, total = gpu[].compute.get_memory_info()
        into[unsafe_offset=0] = Int64(Int(free))
        into[unsafe_offset=1] = Int64(Int(total))
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_peer(gpu: GpuPtr, other: GpuPtr, error: BytePtr, size: Int) abi("C") -> Int:
    """Whether kernels of `gpu` can read the memory of `other` (1 or 0), which they may from now on."""
    try:
        if not gpu[].compute.can_access(other[].compute):
            return 0
        gpu[].compute.enable_peer_access(other[].compute)
        return 1
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_allocate(
    gpu: GpuPtr, bytes: Int, pinned: Int, into: LongPtr, error: BytePtr, size: Int
) abi("C") -> Int:
    """Writes the address of new device memory, or of new pinned host memory."""
    try:
        into[] = Int64(gpu[].allocate_pinned(bytes) if pinned else gpu[].allocate(bytes))
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_free(gpu: GpuPtr, address: Int, error: BytePtr, size: Int) abi("C") -> Int:
    """Gives memory back."""
    try:
        gpu[].free(address)
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_copy(
    gpu: GpuPtr,
    kind: Int,  # 0 host to device, 1 device to host, 2 device to device
    dst: Int,
    src: Int,
    bytes: Int,
    queue: Int,
    error: BytePtr,
    size: Int,
) abi("C") -> Int:
    """Enqueues a copy."""
    try:
        if kind == 0:
            gpu[].upload(dst, src, bytes, queue)
        elif kind == 1:
            gpu[].download(dst, src, bytes, queue)
        else:
            gpu[].move(dst, src, bytes, queue)
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_copy_peer(
    gpu: GpuPtr, other: GpuPtr, dst: Int, src: Int, bytes: Int, error: BytePtr, size: Int
) abi("C") -> Int:
    """Enqueues a copy from another device's memory (Gpu.take)."""
    try:
        gpu[].take(other[], dst, src, bytes)
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_clear(gpu: GpuPtr, address: Int, bytes: Int, queue: Int, error: BytePtr, size: Int) abi("C") -> Int:
    """Enqueues setting memory to 0."""
    try:
        gpu[].clear(address, bytes, queue)
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_event(
    gpu: GpuPtr,
    what: Int,  # 0 make, 1 record, 2 let the queue wait, 3 wait here
    event: Int,
    queue: Int,
    error: BytePtr,
    size: Int,
) abi("C") -> Int:
    """Makes an event (returns its number) or uses one."""
    try:
        if what == 0:
            return gpu[].make_event()
        elif what == 1:
            gpu[].record_event(event, queue)
        elif what == 2:
            gpu[].await_event(event, queue)
        else:
            gpu[].wait_event(event)
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_synchronize(gpu: GpuPtr, queue: Int, error: BytePtr, size: Int) abi("C") -> Int:
    """Blocks until a queue is empty."""
    try:
        gpu[].synchronize(queue)
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_stream(gpu: GpuPtr, queue: Int, error: BytePtr, size: Int) abi("C") -> Int:
    """The CUstream of a queue (Gpu.native_stream)."""
    try:
        return gpu[].native_stream(queue)
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_run(gpu: GpuPtr, step: GpuStepPtr, error: BytePtr, size: Int) abi("C") -> Int:
    """Enqueues a program (Gpu.run)."""
    try:
        gpu[].run(step[])
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_enqueue(gpu: GpuPtr, step: GpuStepPtr, first: Int, error: BytePtr, size: Int) abi("C") -> Int:
    """Enqueues one record of a program; returns the number of the record that comes next (Gpu.enqueue)."""
    try:
        return gpu[].enqueue(step[], first)
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_scratch(gpu: GpuPtr, step: GpuStepPtr, error: BytePtr, size: Int) abi("C") -> Int:
    """Floats of scratch memory that a program wants."""
    return gpu[].scratch(step[])


@export
def odyssey_gpu_tree_sum(
    gpu: GpuPtr, y: Int, x: Int, stride: Int, n: Int, floats: Int, error: BytePtr, size: Int
) abi("C") -> Int:
    """Enqueues the sum along the tree of n buffers, `stride` floats apart."""
    try:
        tree_sum_strided(gpu[].compute, Ptr(unsafe_from_address=y), Ptr(unsafe_from_address=x), stride, n, floats)
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_norm(gpu: GpuPtr, y: Int, x: Int, floats: Int, error: BytePtr, size: Int) abi("C") -> Int:
    """Enqueues what a norm is made of: writes two int64 (fixed_squares), then the largest magnitude, a float32."""
    try:
        var most = Ptr(unsafe_from_address=y + 16)
        var numbers = Ptr(unsafe_from_address=x)
        largest(gpu[].compute, most, numbers, floats)
        fixed_squares(
            gpu[].compute, LongPtr(unsafe_from_address=y), IntPtr(unsafe_from_address=y + 16), numbers, floats
        )
        return 0
    except e:
        return _fail(error, size, e)


@export
def odyssey_gpu_fingerprint_scratch(count: Int, longest: Int) abi("C") -> Int:
    """Int64 numbers of scratch memory that `odyssey_gpu_fingerprint` wants."""
    return fingerprint_scratch(count, longest)


@export
def odyssey_gpu_fingerprint(
    gpu: GpuPtr, y: LongPtr, scratch: LongPtr, runs: LongPtr, count: Int, longest: Int, error: BytePtr, size: Int
) abi("C") -> Int:
    """Enqueues the fingerprint of runs in device memory (kernels/gpu/fingerprint.mojo)."""
    try:
        fingerprint(gpu[].compute, y, scratch, runs, count, longest)
        return 0
    except e:
        return _fail(error, size, e)
