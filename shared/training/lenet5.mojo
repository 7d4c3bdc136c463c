"""LeNet-5 as a program: the model of python/odyssey/nn/models.py on 28 x 28 grey images, written down in Mojo.

The same records as the Python recorder makes after fusion, so the same bits (tests/engine).
"""

from std.math import sqrt

from kernels.lanes import LANES
from kernels.random import uniform

from .arena import Arena
from .ops import GRADS, PARAMS, code
from .program import Program, float_bits, operand

comptime FC: List[Tuple[Int, Int]] = [(120, 400), (84, 120), (10, 84)]
comptime CLASSES = 10


struct LeNet5(Movable):
    """Five layers; parameters 2 i and 2 i + 1 of the arena are weight and bias of layer i.
    """

    var arena: Arena

    def __init__(out self, seed: UInt64):
        """Weights and biases uniform in +-1 / sqrt(fan-in), a function of the seed.
        """
        var shapes: List[Tuple[Int, Int]] = [(6, 25), (16, 150)]
        for fc in materialize[FC]():
            shapes.append(fc)
        var sizes = List[Int]()
        for s in shapes:
            sizes.append(s[0] * s[1])
            sizes.append(s[0])
        self.arena = Arena(sizes)
        for i in range(len(sizes)):
            var bound = Float32(1 / sqrt(Float64(shapes[i // 2][1])))
            uniform(
                self.arena.param(i), sizes[i], seed, UInt32(i), -bound, bound
            )

    def weight(self, i: Int) -> Int:
        """Weight of layer i as an operand."""
        return operand(PARAMS, 4 * self.arena.offsets[2 * i])

    def bias(self, i: Int) -> Int:
        """Bias of layer i as an operand."""
        return operand(PARAMS, 4 * self.arena.offsets[2 * i + 1])

    def dweight(self, i: Int) -> Int:
        """Gradient of the weight of layer i as an operand."""
        return operand(GRADS, 4 * self.arena.offsets[2 * i])

    def dbias(self, i: Int) -> Int:
        """Gradient of the bias of layer i as an operand."""
        return operand(GRADS, 4 * self.arena.offsets[2 * i + 1])

    def record(self, shard_size: Int) -> Program:
        """Forward and backward pass over one shard, loss included. shard_size must be a multiple of LANES.
        """
        var G = shard_size // LANES
        var p = Program()

        # --- forward ---
        var image = p.workspace(G * 784 * LANES)
        p.emit(comptime (code("input")), image, G, 784, 1)
        var x = p.workspace(G * 1024 * LANES)
        p.emit(comptime (code("pad_forward")), x, image, G, 28, 28, 2, 2)
        var y1 = p.workspace(G * 6 * 784 * LANES)
        p.emit(
            comptime (code("conv2d_forward")),
            y1,
            x,
            self.weight(0),
            self.bias(0),
            G,
            1,
            32,
            32,
            6,
            5,
            5,
            1,
            1,
        )
        var p1 = p.workspace(G * 6 * 196 * LANES)
        var a1 = p.workspace(
            G * 6 * 49 * LANES
        )  # bytes: a quarter of the floats
        p.emit(
            comptime (code("maxpool_forward")),
            p1,
            a1,
            y1,
            G * 6,
            28,
            28,
            2,
            2,
            2,
        )
        var y2 = p.workspace(G * 16 * 100 * LANES)
        p.emit(
            comptime (code("conv2d_forward")),
            y2,
            p1,
            self.weight(1),
            self.bias(1),
            G,
            6,
            14,
            14,
            16,
            5,
            5,
            1,
            1,
        )
        var p2 = p.workspace(G * 16 * 25 * LANES)
        var a2 = p.workspace(G * 100 * LANES)
        p.emit(
            comptime (code("maxpool_forward")),
            p2,
            a2,
            y2,
            G * 16,
            10,
            10,
            2,
            2,
            2,
        )
        var h: List[Int] = [p2]  # activations between the linear layers
        for i in range(3):
            var fc = materialize[FC]()[i]
            h.append(p.workspace(G * fc[0] * LANES))
            p.emit(
                comptime (code("linear_forward")),
                h[i + 1],
                h[i],
                self.weight(2 + i),
                self.bias(2 + i),
                G,
                fc[1],
                fc[0],
                1 if i < 2 else 0,
            )
        var labels = p.workspace(G * LANES)
        p.emit(comptime (code("labels")), labels, G)
        var stats = p.workspace(4)
        var probabilities = p.workspace(G * CLASSES * LANES)
        p.emit(
            comptime (code("cross_entropy_forward")),
            stats,
            probabilities,
            h[3],
            labels,
            G,
            CLASSES,
        )
        p.emit(
            comptime (code("stats")),
            operand(GRADS, 4 * self.arena.size),
            stats,
            stats,
        )

        # --- backward ---
        var one = p.workspace(4)
        p.emit(comptime (code("fill")), one, float_bits(1), 1)
        var d = p.workspace(G * CLASSES * LANES)
        p.emit(
            comptime (code("cross_entropy_backward")),
            d,
            one,
            probabilities,
            labels,
            G,
            CLASSES,
        )
        for i in reversed(range(3)):
            var fc = materialize[FC]()[i]
            var scratch = p.workspace(G * fc[1] * LANES)
            p.emit(
                comptime (code("linear_backward_weight")),
                self.dweight(2 + i),
                self.dbias(2 + i),
                d,
                h[i],
                scratch,
                G,
                fc[1],
                fc[0],
            )
            var dx = p.workspace(G * fc[1] * LANES)
            p.emit(
                comptime (code("linear_backward_input")),
                dx,
                d,
                self.weight(2 + i),
                G,
                fc[1],
                fc[0],
            )
            d = dx
            if (
                i > 0
            ):  # through the ReLU; the one before fc1 is part of the pool
                d = p.workspace(G * fc[1] * LANES)
                p.emit(
                    comptime (code("relu_backward")),
                    d,
                    dx,
                    h[i],
                    G * fc[1] * LANES,
                )
        var dy2 = p.workspace(G * 16 * 100 * LANES)
        p.emit(
            comptime (code("maxpool_backward")),
            dy2,
            d,
            a2,
            p2,
            G * 16,
            10,
            10,
            2,
            2,
            2,
            1,
        )
        p.emit(
            comptime (code("conv2d_backward_weight")),
            self.dweight(1),
            self.dbias(1),
            dy2,
            p1,
            G,
            6,
            14,
            14,
            16,
            5,
            5,
            1,
        )
        var dp1 = p.workspace(G * 6 * 196 * LANES)
        p.emit(
            comptime (code("conv2d_backward_input")),
            dp1,
            dy2,
            self.weight(1),
            G,
            6,
            14,
            14,
            16,
            5,
            5,
            1,
        )
        var dy1 = p.workspace(G * 6 * 784 * LANES)
        p.emit(
            comptime (code("maxpool_backward")),
            dy1,
            dp1,
            a1,
            p1,
            G * 6,
            28,
            28,
            2,
            2,
            2,
            1,
        )
        p.emit(
            comptime (code("conv2d_backward_weight")),
            self.dweight(0),
            self.dbias(0),
            dy1,
            x,
            G,
            1,
            32,
            32,
            6,
            5,
            5,
            1,
        )
        return p^
