"""Times the products of wgmma.mojo on a Hopper GPU, for the layers of a GPT of 6 x 384 with sequences of 256 tokens.

    mojo build --target-accelerator sm_90 bench.mojo -o bench; ./bench [--turns N] [batch ...]

Prints microseconds per launch and TFLOP/s: the best of three measurements, each of N launches in a row (50). The default
batches are 8 and 64.
"""

from layer import NAMES
from max.gpu.host import DeviceContext
from std.sys import argv, has_accelerator
from std.time import perf_counter_ns
from wgmma import BF16, F32, FORWARD, INPUT, WEIGHT, Lanes, enqueue


def time_of[op: Int, columns: Int, L: Int](ctx: DeviceContext, turns: Int, batch: Int, I: Int, O: Int) raises:
    """Prints the time of one product of a layer with I inputs and O outputs."""
    var G = 256 // L  # a sequence is a shard
    var x = ctx.enqueue_create_buffer[BF16](batch * G * I * L)
    var dy = ctx.enqueue_create_buffer[BF16](batch * G * O * L)
    var w = ctx.enqueue_create_buffer[BF16](O * I)
    var b = ctx.enqueue_create_buffer[F32](O)
    ctx.enqueue_memset(x, BFloat16(0.01))
    ctx.enqueue_memset(dy, BFloat16(0.01))
    ctx.enqueue_memset(w, BFloat16(0.01))
    ctx.enqueue_memset(b, Float32(0))
    var size = G * O * L if op == FORWARD else (G * I * L if op == INPUT else O * I)
    var y = ctx.enqueue_create_buffer[F32 if op == WEIGHT else BF16](batch * size)
    var of_y = Lanes(Int(y.unsafe_ptr()), size)
    var of_x = Lanes(Int(x.unsafe_ptr()), G * I * L)
    var of_dy = Lanes(Int(dy.unsafe_ptr()), G * O * L)
    var of_w = Lanes(Int(w.unsafe_ptr()), 0)

    @always_inline
    def once() raises {imm}:
        comptime if op == FORWARD:
            enqueue[op, columns, BF16, L](ctx, batch, of_y, of_w, of_x, Int(b.unsafe_ptr()), G, I, O, 0)
        elif op == INPUT:
            enqueue[op, columns, BF16, L](ctx, batch, of_y, of_w, of_dy, Int(b.unsafe_ptr()), G, I, O, 0)
        else:
            enqueue[op, columns, F32, L](ctx, batch, of_y, of_dy, of_x, Int(b.unsafe_ptr()), G, I, O, 0)

    once()
    ctx.synchronize()
    var best = Float64(1e30)
    for _ in range(3):
        var begun = perf_counter_ns()
        for _ in range(turns):
            once()
        ctx.synchronize()
        best = min(best, Float64(perf_counter_ns() - begun) / Float64(turns))
    var flop = Float64(2 * batch * 256) * Float64(I) * Float64(O)
    var name = materialize[NAMES]()[op]
    var us = best / 1000
    var rate = flop / best / 1000
    print(name, batch, "x", I, "x", O, "in lanes of", L, "columns", columns, "us", us, "TFLOP/s", rate, flush=True)
    _ = x^
    _ = dy^
    _ = w^
    _ = b^
    _ = y^


def main() raises:
    comptime if has_accelerator():
        var ctx = DeviceContext()
        var batches = List[Int]()
        var turns = 50
        var i = 1
        while i < len(argv()):
            if argv()[i] == "--turns" and i + 1 < len(argv()):
                i += 1
                turns = Int(String(argv()[i]))
            else:
                batches.append(Int(String(argv()[i])))
            i += 1
        if not batches:
            batches = [8, 64]
        comptime for L in [16, 64]:
            for batch in batches:
                for layer in [(384, 1152), (384, 384), (384, 1536), (1536, 384)]:
                    comptime for columns in [128, 256]:
                        time_of[FORWARD, columns, L](ctx, turns, batch, layer[0], layer[1])
                        time_of[INPUT, columns, L](ctx, turns, batch, layer[0], layer[1])
                    comptime for columns in [64, 128]:
                        time_of[WEIGHT, columns, L](ctx, turns, batch, layer[0], layer[1])
