"""Compares the bits of products of wgmma.mojo whose sums are not exact. A program, not a test.

    mojo build --target-accelerator sm_90 bits.mojo -o bits; ./bits

The bits must not depend on the width of a tile, on lanes of 16 or 64 tokens, or on the shards of a launch. A GPU has to
answer that: the emulated one rounds a step of 16 terms in its own way. test_gpu_hopper.py runs the program there.
Exit code 1 if bits differ.
"""

from layer import NAMES, Layer
from max.gpu.host import DeviceContext
from std.memory import bitcast
from std.sys import has_accelerator
from wgmma import FORWARD, INPUT, WEIGHT

comptime I = 1536
comptime O = 384
comptime T = 256  # tokens of a shard


def hashes[op: Int, columns: Int, L: Int](ctx: DeviceContext, shards: Int) raises -> List[UInt64]:
    """A hash of each shard's product, of numbers in an order that does not depend on L."""
    var layer = Layer[L, False](ctx, shards, T // L, I, O)
    var result = layer.product[op, columns]()
    var size = layer.size[op]()
    comptime rows = I if op == INPUT else O
    var hashes = List[UInt64]()
    for s in range(shards):
        var hash = UInt64(1469598103934665603)
        for i in range(size):
            var at = i
            comptime if op != WEIGHT:
                var t = i // rows
                at = (t // L * rows + i % rows) * L + t % L
            hash = (hash ^ UInt64(bitcast[DType.uint32](result[s * size + at]))) * 1099511628211
        hashes.append(hash)
    return hashes^


def main() raises:
    comptime if has_accelerator():
        var ctx = DeviceContext()
        var other = 0
        comptime for op in [FORWARD, INPUT, WEIGHT]:
            var first = hashes[op, 64, 16](ctx, 3)
            comptime for L in [16, 64]:
                comptime for columns in [64, 128, 256]:
                    for shards in [1, 3]:
                        var these = hashes[op, columns, L](ctx, shards)
                        var same = True
                        for s in range(shards):
                            same = same and these[s] == first[s]
                        other += Int(not same)
                        var answer = "same" if same else "OTHER BITS"
                        var name = materialize[NAMES]()[op]
                        print(name, L, "tokens", columns, "columns", shards, "shards", answer, hex(these[shards - 1]))
        if other:
            raise Error("bits of wgmma.mojo's products differ")
