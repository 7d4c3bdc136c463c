"""Runs jobs of kernels/gpu/linear.mojo for test_gpu_linear.py: a program with three files as arguments.

    jobs     a line of integers per job: op (0 forward, 1 gradient of the input, 2 of the weights), precision, tile (-1:
             chosen), shards, fold, G, I, O, relu or accumulate, then for four operands their floats and strides
    floats   what the operands hold before, job after job
    results  what the first two hold afterwards

The operands are y, x, w, b; dx, dy, w and an unused one; dw, db, dy, x.
"""

from std.sys import argv, is_defined

from max.gpu.host import DeviceBuffer

from kernels.gpu.launch import BF16, FP16, FP32, Operand, Queue, TF32
from kernels.gpu.linear import (
    linear_backward_input,
    linear_backward_weight,
    linear_forward,
)

comptime PRECISIONS: List[Int] = [FP32, BF16] if is_defined["PORTABLE"]() else [
    FP32,
    TF32,
    BF16,
    FP16,
]


def run[precision: Int](q: Queue, job: List[Int], o: List[Operand]) raises:
    var tile, shards, fold = job[2], job[3], job[4]
    var G, I, O = job[5], job[6], job[7]
    if job[0] == 0 and job[8] == 1:
        linear_forward[precision, True](q, shards, o[0], o[1], o[2], o[3], G, I, O, tile)
    elif job[0] == 0:
        linear_forward[precision, False](q, shards, o[0], o[1], o[2], o[3], G, I, O, tile)
    elif job[0] == 1:
        linear_backward_input[precision](q, shards, o[0], o[1], o[2], G, I, O, tile)
    else:
        linear_backward_weight[precision](
            q,
            shards,
            fold,
            o[0],
            o[1],
            o[2],
            o[3],
            G,
            I,
            O,
            job[8] == 1,
            tile,
        )


def main() raises:
    var arguments = argv()
    var lines: List[List[Int]] = []
    with open(String(arguments[1]), "r") as f:
        for line in f.read().split("\n"):
            if line.byte_length():
                var job: List[Int] = []
                for word in line.split(" "):
                    job.append(atol(word))
                lines.append(job^)
    var bytes: List[UInt8]
    with open(String(arguments[2]), "r") as f:
        bytes = f.read_bytes()
    var floats = bytes.unsafe_ptr().unsafe_bitcast[Float32]()
    var results = List[UInt8]()
    var at = 0
    var q = Queue(device_id=0)
    for job in lines:
        var buffers: List[DeviceBuffer[DType.float32]] = []
        var operands: List[Operand] = []
        for i in range(4):
            var n = job[9 + 2 * i]
            var buffer = q.enqueue_create_buffer[DType.float32](n)
            var host = q.enqueue_create_host_buffer[DType.float32](n)
            q.synchronize()
            for j in range(n):
                host[j] = floats[unsafe_offset=at + j]
            at += n
            q.enqueue_copy(buffer, host)
            q.synchronize()
            operands.append(Operand(Int(buffer.unsafe_ptr()), job[10 + 2 * i]))
            buffers.append(buffer^)
        comptime for p in range(len(PRECISIONS)):
            comptime precision = PRECISIONS[p]
            if job[1] == precision:
                run[precision](q, job, operands)
        for i in range(2):
            var n = job[9 + 2 * i]
            var host = q.enqueue_create_host_buffer[DType.float32](n)
            q.enqueue_copy(host, buffers[i])
            q.synchronize()
            var p = host.unsafe_ptr().unsafe_bitcast[UInt8]()
            for j in range(4 * n):
                results.append(p[unsafe_offset=j])
        _ = buffers^
    _ = bytes^
    with open(String(arguments[3]), "w") as f:
        f.write_bytes(results)
