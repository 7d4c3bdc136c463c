"""Compares the products of wgmma.mojo with sums on the host. A program, not a test.

    mojo build --target-accelerator sm_90 check.mojo -o check; ./check

Sums are exact, so every number must be equal. Cases have tails, several shards, tiles of 64, 128 and 256 columns and
lanes of 16 and 64 tokens. test_gpu_hopper.py runs it on an emulated GPU. Exit code 1 if a number is wrong.
"""

from layer import NAMES, Layer
from max.gpu.host import DeviceContext
from std.sys import has_accelerator
from wgmma import F32, FORWARD, INPUT, WEIGHT


def wanted[op: Int, L: Int](layer: Layer[L, True], s: Int, i: Int) -> Float32:
    """Number i of the product of shard s, summed on the host."""
    var sum = Float32(0)
    comptime if op == WEIGHT:
        var row = i // layer.I
        var column = i % layer.I
        for g in range(s * layer.G, (s + 1) * layer.G):
            for l in range(L):
                var dy = layer.dy[(g * layer.O + row) * L + l].cast[F32]()
                sum += dy * layer.x[(g * layer.I + column) * L + l].cast[F32]()
        return sum
    var rows = layer.O if op == FORWARD else layer.I
    var g = s * layer.G + i // (rows * L)
    var r = i // L % rows
    comptime if op == FORWARD:
        for k in range(layer.I):
            sum += layer.w[r * layer.I + k].cast[F32]() * layer.x[(g * layer.I + k) * L + i % L].cast[F32]()
        return sum + layer.b[r]
    for k in range(layer.O):
        sum += layer.w[k * layer.I + r].cast[F32]() * layer.dy[(g * layer.O + k) * L + i % L].cast[F32]()
    return sum


def check[op: Int, columns: Int, L: Int](ctx: DeviceContext, shards: Int, G: Int, I: Int, O: Int) raises -> Int:
    """Returns how many numbers are wrong, and prints it."""
    var layer = Layer[L, True](ctx, shards, G, I, O)
    var result = layer.product[op, columns]()
    var size = layer.size[op]()
    var wrong = 0
    for s in range(shards):
        for i in range(size):
            wrong += Int(result[s * size + i] != wanted[op, L](layer, s, i))
    var name = materialize[NAMES]()[op]
    print(
        name, L, "tokens", columns, "columns", shards, "shards", G, "x", I, "x", O, "wrong", wrong, "of", shards * size
    )
    return wrong


def main() raises:
    comptime if has_accelerator():
        var ctx = DeviceContext()
        var wrong = 0
        comptime for L in [16, 64]:
            comptime for columns in [64, 128, 256]:
                wrong += check[FORWARD, columns, L](ctx, 1, 128 // L, 64, 128)
                wrong += check[FORWARD, columns, L](ctx, 3, 5, 200, 136)
                wrong += check[INPUT, columns, L](ctx, 1, 128 // L, 128, 64)
                wrong += check[INPUT, columns, L](ctx, 2, 5, 200, 136)
                wrong += check[WEIGHT, columns, L](ctx, 1, 64 // L, 64, 128)
                wrong += check[WEIGHT, columns, L](ctx, 3, 5, 200, 136)
        print("wrong in all:", wrong)
        if wrong:
            raise Error("products of wgmma.mojo are wrong")
