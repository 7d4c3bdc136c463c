"""A program of small GPU kernels, for test_emulator_mojo.py: what MAX and the compiler make of Mojo runs right.

    emulator_kernels CASE INPUT OUTPUT   bytes in, bytes out
    emulator_kernels CASE                cases that check themselves: streams, peers, findings
"""

from std.atomic import Atomic
from std.math import ceildiv, exp
from std.memory import unsafe_stack_allocation
from std.sys import argv

from max.gpu import (
    AddressSpace,
    WARP_SIZE,
    barrier,
    block_dim,
    block_idx,
    global_idx,
    grid_dim,
    lane_id,
    thread_idx,
)
from max.gpu.compute.mma import mma
from max.gpu.host import DeviceContext
from max.gpu.memory import async_copy, async_copy_wait_all, external_memory
from max.gpu.primitives import block, warp

comptime F32 = DType.float32
comptime Ptr = Pointer[Float32, MutUntrackedOrigin]
comptime IPtr = Pointer[Int32, MutUntrackedOrigin]
comptime BPtr = Pointer[BFloat16, MutUntrackedOrigin]
comptime HPtr = Pointer[Float16, MutUntrackedOrigin]
comptime TILE = 16


def elementwise(y: Ptr, x: Ptr, n_: Int32):
    var n = Int(n_)
    var i = global_idx.x
    while i < n:
        y[unsafe_offset=i] = max(x[unsafe_offset=i], 0) * 2 + 1
        i += grid_dim.x * block_dim.x


# x: 33 x 50 and then 50 x 17 numbers
def matmul(y: Ptr, x: Ptr, n_: Int32):
    var M, N, K = 33, 17, 50
    var a = x
    var b = x.unsafe_offset(33 * 50)
    var As = unsafe_stack_allocation[TILE * TILE, F32, address_space=AddressSpace.SHARED]()
    var Bs = unsafe_stack_allocation[TILE * TILE, F32, address_space=AddressSpace.SHARED]()
    var tx, ty = thread_idx.x, thread_idx.y
    var row = block_idx.y * TILE + ty
    var col = block_idx.x * TILE + tx
    var acc: Float32 = 0
    for t in range(ceildiv(K, TILE)):
        var ka = t * TILE + tx
        var kb = t * TILE + ty
        As[unsafe_offset=ty * TILE + tx] = a[unsafe_offset=row * K + ka] if row < M and ka < K else 0
        Bs[unsafe_offset=ty * TILE + tx] = b[unsafe_offset=kb * N + col] if kb < K and col < N else 0
        barrier()
        comptime for q in range(TILE):
            acc += As[unsafe_offset=ty * TILE + q] * Bs[unsafe_offset=q * TILE + tx]
        barrier()
    if row < M and col < N:
        y[unsafe_offset=row * N + col] = acc


# per block of 256: the softmax of 256 numbers; per warp its sum
def reductions(y: Ptr, x: Ptr, n: Int32):
    var i = global_idx.x
    var v = x[unsafe_offset=i]
    var m = block.max[block_size=256, broadcast=True](v)
    var e = exp(v - m)
    var s = block.sum[block_size=256, broadcast=True](e)
    y[unsafe_offset=i] = e / s
    var w = warp.sum(v)
    if lane_id() == 0:
        y[unsafe_offset=Int(n) + i // WARP_SIZE] = w


# Collatz steps, at most 200; an early way out for multiples of 7
def divergence(y: Ptr, x: Ptr, n: Int32):
    var i = global_idx.x
    if i >= Int(n):
        return
    var v = Int32(x[unsafe_offset=i])
    if v % 7 == 0:
        y[unsafe_offset=i] = -1
        return
    var steps = 0
    while v != 1 and steps < 200:
        if v & 1:
            v = 3 * v + 1
        else:
            v //= 2
        steps += 1
    y[unsafe_offset=i] = Float32(steps)


# rounds to bfloat16 and half and back: sum, and products in the small types
def small_types(y: Ptr, x: Ptr, n: Int32):
    var i = global_idx.x
    if i < Int(n):
        var v = x[unsafe_offset=i]
        var b = v.cast[DType.bfloat16]()
        var h = v.cast[DType.float16]()
        y[unsafe_offset=i] = b.cast[F32]()
        y[unsafe_offset=Int(n) + i] = h.cast[F32]()
        y[unsafe_offset=2 * Int(n) + i] = (h * h).cast[F32]()


# a table per thread that is indexed at run time: local memory
def local_memory(y: Ptr, x: Ptr, n: Int32):
    var table = unsafe_stack_allocation[8, F32]()
    for j in range(8):
        table[unsafe_offset=j] = 0
    for j in range(32):
        var v = x[unsafe_offset=thread_idx.x * 32 + j]
        table[unsafe_offset=Int(v) & 7] += v
    for j in range(8):
        y[unsafe_offset=thread_idx.x * 8 + j] = table[unsafe_offset=j]


# one warp: C (16 x 8) = A (16 x 32) B (32 x 8), rounded to bfloat16
def tensor_core(y: Ptr, x: Ptr, n: Int32):
    var lane = lane_id()
    var g, t = lane // 4, lane % 4
    var a = x
    var b = x.unsafe_offset(16 * 32)
    var acc = SIMD[F32, 4](0)
    for k0 in range(0, 32, 16):
        var fa = SIMD[DType.bfloat16, 8]()
        var fb = SIMD[DType.bfloat16, 4]()
        comptime for h in range(2):
            comptime for e in range(2):
                comptime for r in range(2):
                    fa[h * 4 + r * 2 + e] = a[unsafe_offset=(g + 8 * r) * 32 + k0 + t * 2 + e + 8 * h].cast[
                        DType.bfloat16
                    ]()
                fb[h * 2 + e] = b[unsafe_offset=(k0 + t * 2 + e + 8 * h) * 8 + g].cast[DType.bfloat16]()
        mma(acc, fa, fb, acc)
    comptime for r in range(2):
        comptime for e in range(2):
            y[unsafe_offset=(g + 8 * r) * 8 + t * 2 + e] = acc[r * 2 + e]


# 4 KiB per block through dynamic shared memory, each thread reads what another one has copied
def asynchronous(y: Ptr, x: Ptr, n: Int32):
    var smem = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var i = thread_idx.x * 4
    async_copy[16](
        x.unsafe_offset(block_idx.x * 1024 + i).unsafe_address_space_cast[AddressSpace.GLOBAL](),
        smem.unsafe_offset(i),
    )
    async_copy_wait_all()
    barrier()
    y.unsafe_store(
        block_idx.x * 1024 + i,
        smem.unsafe_offset(1020 - i).unsafe_load[width=4](),
    )


# a histogram of integers, and how many there are, in integers
def counting(y: Ptr, x: Ptr, n: Int32):
    var i = global_idx.x
    var counts = IPtr(unsafe_from_address=Int(y))
    if i < Int(n):
        _ = Atomic.fetch_add(counts.unsafe_offset(Int(x[unsafe_offset=i]) & 15), Int32(1))


def race(y: Ptr, x: Ptr, n: Int32):
    var s = unsafe_stack_allocation[256, F32, address_space=AddressSpace.SHARED]()
    s[unsafe_offset=thread_idx.x] = x[unsafe_offset=thread_idx.x]
    if n == 0:  # it is not
        barrier()
    y[unsafe_offset=thread_idx.x] = s[unsafe_offset=255 - thread_idx.x]


def missing_barrier(y: Ptr, x: Ptr, n: Int32):
    var s = unsafe_stack_allocation[256, F32, address_space=AddressSpace.SHARED]()
    s[unsafe_offset=thread_idx.x] = x[unsafe_offset=thread_idx.x]
    if thread_idx.x < Int(n):
        barrier()
        y[unsafe_offset=thread_idx.x] = s[unsafe_offset=thread_idx.x ^ 1]


def beyond(y: Ptr, x: Ptr, n: Int32):
    y[unsafe_offset=global_idx.x + 1] = x[unsafe_offset=global_idx.x]


def run(name: String, source: String, target: String) raises:
    var q = DeviceContext(device_id=0)
    var bytes: List[UInt8]
    with open(source, "r") as f:
        bytes = f.read_bytes()
    var n = len(bytes) // 4
    var out_n = 4 * n  # room for all cases
    var hx = q.enqueue_create_host_buffer[F32](n)
    var hy = q.enqueue_create_host_buffer[F32](out_n)
    q.synchronize()
    var p = bytes.unsafe_ptr().unsafe_bitcast[Float32]()
    for i in range(n):
        hx[i] = p[unsafe_offset=i]
    var x = q.enqueue_create_buffer[F32](n)
    var y = q.enqueue_create_buffer[F32](out_n)
    q.enqueue_copy(x, hx)
    y.enqueue_fill(0)
    var m = Int32(n)
    if name == "elementwise":
        q.enqueue_function[elementwise](y, x, m, grid_dim=3, block_dim=96)
    elif name == "matmul":
        q.enqueue_function[matmul](y, x, m, grid_dim=(2, 3), block_dim=(TILE, TILE))
    elif name == "reductions":
        q.enqueue_function[reductions](y, x, m, grid_dim=n // 256, block_dim=256)
    elif name == "divergence":
        q.enqueue_function[divergence](y, x, m, grid_dim=ceildiv(n, 128), block_dim=128)
    elif name == "small_types":
        q.enqueue_function[small_types](y, x, m, grid_dim=ceildiv(n, 128), block_dim=128)
    elif name == "local_memory":
        q.enqueue_function[local_memory](y, x, m, grid_dim=1, block_dim=n // 32)
    elif name == "tensor_core":
        q.enqueue_function[tensor_core](y, x, m, grid_dim=1, block_dim=WARP_SIZE)
    elif name == "asynchronous":
        q.enqueue_function[asynchronous](
            y,
            x,
            m,
            grid_dim=n // 1024,
            block_dim=256,
            shared_mem_bytes=4096,
        )
    elif name == "counting":
        q.enqueue_function[counting](y, x, m, grid_dim=ceildiv(n, 128), block_dim=128)
    elif name == "race":
        q.enqueue_function[race](y, x, m, grid_dim=1, block_dim=256)
    elif name == "missing_barrier":
        q.enqueue_function[missing_barrier](y, x, m - 128, grid_dim=1, block_dim=256)
    elif name == "beyond":
        q.enqueue_function[beyond](x, y, m, grid_dim=1, block_dim=n)
    else:
        raise Error("no case ", name)
    q.enqueue_copy(hy, y)
    q.synchronize()
    with open(target, "w") as f:
        f.write_bytes(
            Span(
                unsafe_ptr=hy.unsafe_ptr().unsafe_bitcast[UInt8](),
                length=4 * out_n,
            )
        )


# Two streams: the second doubles what the first has made; with the event between them 2 * 3, without it what was there.
def streams(with_event: Bool) raises:
    var q = DeviceContext(device_id=0)
    var n = 1000
    var x = q.enqueue_create_buffer[F32](n)
    var y = q.enqueue_create_buffer[F32](n)
    var z = q.enqueue_create_buffer[F32](n)
    var hz = q.enqueue_create_host_buffer[F32](n)
    x.enqueue_fill(1)
    y.enqueue_fill(10)
    q.synchronize()
    var f = q.compile_function[elementwise]()
    var s2 = q.create_stream()
    var e = q.create_event()
    q.enqueue_function(f, y, x, Int32(n), grid_dim=4, block_dim=256)
    if with_event:
        q.stream().record_event(e)
        s2.enqueue_wait_for(e)
    s2.enqueue_function(f, z, y, Int32(n), grid_dim=4, block_dim=256)
    s2.synchronize()
    q.enqueue_copy(hz, z)
    q.synchronize()
    print(hz[0], hz[n - 1])


# Two devices: a copy from one to the other, then a kernel that reads the other's memory.
def peers() raises:
    var a = DeviceContext(device_id=0)
    var b = DeviceContext(device_id=1)
    var n = 300
    var x = a.enqueue_create_buffer[F32](n)
    x.enqueue_fill(4)
    a.synchronize()
    var y = b.enqueue_create_buffer[F32](n)
    b.enqueue_copy(y, x)
    var h = b.enqueue_create_host_buffer[F32](n)
    b.enqueue_copy(h, y)
    b.synchronize()
    print(DeviceContext.number_of_devices(), h[0], h[n - 1], end=" ")
    if b.can_access(a):
        b.enable_peer_access(a)
    b.enqueue_function[elementwise](y, x, Int32(n), grid_dim=2, block_dim=256)
    b.enqueue_copy(h, y)
    b.synchronize()
    print(h[0], h[n - 1])


def main() raises:
    var args = argv()
    var name = String(args[1])
    if name == "streams":
        streams(String(args[2]) == "event")
    elif name == "peers":
        peers()
    else:
        run(name, String(args[2]), String(args[3]))
