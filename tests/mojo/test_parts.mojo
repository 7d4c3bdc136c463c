"""Sums in parts: what a linear layer adds in which order, to the bit, and that the nodes of the sums add up.

The definition here is one float at a time: chains over the parts, a tree over the chains, the bias, the ReLU.
"""

from std.testing import TestSuite, assert_equal

from kernels.conv2d import (
    Conv,
    conv2d_backward_input,
    conv2d_backward_input_any,
)
from kernels.buffers import add
from kernels.lanes import F32, IntPtr, LANES, Ptr, madd
from kernels.layout import unpack_rows
from kernels.linear import (
    BLOCK,
    WEIGHT_SCRATCH,
    columns_scratch,
    linear_backward_input,
    linear_backward_input_parts,
    linear_backward_weight,
    linear_bias,
    linear_forward,
    linear_forward_parts,
)
from kernels.linear_rows import (
    linear_backward_input_rows,
    linear_forward_rows,
)
from kernels.op import Cpu
from kernels.parts import PARTS, cut
from kernels.softmax import ops
from numbers import Floats, run_op

comptime One = SIMD[F32, 1]
# I, O
comptime LINEARS: List[Tuple[Int, Int]] = [
    (1, 1),
    (3, 2),
    (400, 120),
    (84, 10),
    (17, 33),
    (129, 23),
]
# C, H, W, K, R, T, S
comptime CONVOLUTIONS: List[Tuple[Int, Int, Int, Int, Int, Int, Int]] = [
    (1, 6, 6, 1, 3, 3, 1),
    (6, 14, 14, 16, 5, 5, 1),
    (3, 7, 9, 5, 3, 3, 1),
    (2, 8, 11, 7, 3, 3, 2),
    (4, 6, 35, 9, 1, 1, 1),
    (2, 5, 40, 6, 3, 5, 1),
    (2, 9, 20, 3, 4, 2, 3),
]


def _chains(w: Ptr, w_step: Int, x: Ptr, n: Int) -> Float32:
    """The sum over n products w[i w_step] x[i LANES] in parts."""
    var sums = Array[One, PARTS](fill=One(0))
    for p in range(PARTS):
        for i in range(cut(n, p), cut(n, p + 1)):
            sums[p] = madd(
                One(x[unsafe_offset=i * LANES]),
                One(w[unsafe_offset=i * w_step]),
                sums[p],
            )
    return ((sums[0] + sums[1]) + (sums[2] + sums[3]))[0]


def _slice(x: Floats, G: Int, F: Int, a: Int, b: Int) -> Floats:
    """Features a..b of lanes x (G, F, L), as a tensor of its own."""
    var y = Floats(G * (b - a) * LANES)
    for g in range(G):
        for i in range((b - a) * LANES):
            y.p[unsafe_offset=g * (b - a) * LANES + i] = x.p[unsafe_offset=(g * F + a) * LANES + i]
    return y^


def test_cut() raises:
    """Runs that follow each other, and differ by one at most."""
    for n in range(100):
        assert_equal(cut(n, 0), 0)
        assert_equal(cut(n, PARTS), n)
        for i in range(PARTS):
            var length = cut(n, i + 1) - cut(n, i)
            assert_equal(length == n // PARTS or length == n // PARTS + 1, True)


def test_linear_adds_in_this_order() raises:
    for size in materialize[LINEARS]():
        var I = size[0]
        var O = size[1]
        for G in range(1, 4):
            var x = Floats(G * I * LANES, noise=1)
            var w = Floats(O * I, noise=2)
            var b = Floats(O, noise=3)
            var dy = Floats(G * O * LANES, noise=4)
            var packed = Floats(columns_scratch(G, O))
            var y = Floats(dy.n)
            var wanted = Floats(dy.n)
            for g in range(G):
                for o in range(O):
                    for l in range(LANES):
                        wanted.p[unsafe_offset=(g * O + o) * LANES + l] = (
                            _chains(
                                w.p.unsafe_offset(o * I),
                                1,
                                x.p.unsafe_offset(g * I * LANES + l),
                                I,
                            )
                            + b.p[unsafe_offset=o]
                        )
            linear_forward[False](y.p, x.p, w.p, b.p, G, I, O)
            y.check_same(wanted, "linear")

            var dx = Floats(x.n, fill=7)
            var dx_wanted = Floats(x.n)
            for g in range(G):
                for i in range(I):
                    for l in range(LANES):
                        dx_wanted.p[unsafe_offset=(g * I + i) * LANES + l] = _chains(
                            w.p.unsafe_offset(i),
                            I,
                            dy.p.unsafe_offset(g * O * LANES + l),
                            O,
                        )
            linear_backward_input(dx.p, dy.p, w.p, packed.p, G, I, O)
            dx.check_same(dx_wanted, "gradient of the input")
            packed.check_guards()


def test_linear_weight_gradients_add_in_this_order() raises:
    """A chain per block of samples; the chains of the blocks one after the other."""
    for size in materialize[LINEARS]():
        var I = size[0]
        var O = size[1]
        for G in [1, 3, BLOCK, BLOCK + 1, 2 * BLOCK + 3]:
            var x = Floats(G * I * LANES, noise=1)
            var dy = Floats(G * O * LANES, noise=4)
            var dw = Floats(O * I, fill=0.5)
            var db = Floats(O)
            var scratch = Floats(WEIGHT_SCRATCH)
            var wanted = Floats(O * I, fill=0.5)
            for o in range(O):
                for i in range(I):
                    var sum = Float32(0.5)
                    for first in range(0, G, BLOCK):
                        var chain = One(0)
                        for g in range(first, min(first + BLOCK, G)):
                            for l in range(LANES):
                                chain = madd(
                                    One(x.p[unsafe_offset=(g * I + i) * LANES + l]),
                                    One(dy.p[unsafe_offset=(g * O + o) * LANES + l]),
                                    chain,
                                )
                        sum += chain[0]
                    wanted.p[unsafe_offset=o * I + i] = sum
            linear_backward_weight(dw.p, db.p, dy.p, x.p, scratch.p, G, I, O, I)
            dw.check_same(wanted, String("gradient of the weights, ", G))
            dw.check_guards()
            scratch.check_guards()


def test_rows_have_the_bits_of_lanes() raises:
    """Forward, and the gradient of the input: what else is in the batch, and the layout, change nothing."""
    for size in materialize[LINEARS]():
        var I = size[0]
        var O = size[1]
        var x = Floats(I * LANES, noise=1)
        var dy = Floats(O * LANES, noise=4)
        var w = Floats(O * I, noise=2)
        var b = Floats(O, noise=3)
        var packed = Floats(columns_scratch(1, O))
        var y = Floats(dy.n)
        var dx = Floats(x.n)
        linear_forward[True](y.p, x.p, w.p, b.p, 1, I, O)
        linear_backward_input(dx.p, dy.p, w.p, packed.p, 1, I, O)
        for N in range(1, 10):
            var xs = Floats(N * I)
            var dys = Floats(N * O)
            unpack_rows(xs.p, x.p, N, I)
            unpack_rows(dys.p, dy.p, N, O)
            var ys = Floats(N * O, fill=7)
            var dxs = Floats(N * I, fill=7)
            linear_forward_rows[True](ys.p, xs.p, w.p, b.p, N, I, O)
            linear_backward_input_rows(dxs.p, dys.p, w.p, N, I, O)
            var wanted = Floats(N * O)
            unpack_rows(wanted.p, y.p, N, O)
            ys.check_same(wanted, String("linear in rows, ", N))
            var dx_wanted = Floats(N * I)
            unpack_rows(dx_wanted.p, dx.p, N, I)
            dxs.check_same(dx_wanted, String("its gradient in rows, ", N))
            ys.check_guards()
            dxs.check_guards()


def test_losses_in_rows_have_the_bits_of_lanes() raises:
    """Lanes without a label count nowhere, so a group's loss can be that of one sample."""
    for F in [1, 2, 10, 65, 133]:
        var x = Floats(F * LANES, noise=F)
        var p = Floats(F * LANES)
        var logs = Floats(F * LANES)
        run_op(ops[Cpu](), "log_softmax_forward", False, [Int(logs.p), Int(x.p), 1, F])
        for l in range(LANES):
            var row = Floats(F)
            var labels = Floats(LANES)
            var many = IntPtr(unsafe_from_address=Int(labels.p))
            for f in range(F):
                row.p[unsafe_offset=f] = x.p[unsafe_offset=f * LANES + l]
            for i in range(LANES):
                many[unsafe_offset=i] = -1
            many[unsafe_offset=l] = Int32(F // 2)
            var one = many.unsafe_offset(l)
            var wanted = Floats(4)
            var stats = Floats(4)
            run_op(
                ops[Cpu](),
                "cross_entropy_forward",
                False,
                [Int(wanted.p), Int(p.p), Int(x.p), Int(many), 1, F],
            )
            var row_p = Floats(F)
            run_op(
                ops[Cpu](),
                "cross_entropy_forward",
                True,
                [Int(stats.p), Int(row_p.p), Int(row.p), Int(one), 1, F],
            )
            stats.check_same(wanted, "cross-entropy")
            var row_logs = Floats(F)
            run_op(ops[Cpu](), "log_softmax_forward", True, [Int(row_logs.p), Int(row.p), 1, F])
            for f in range(F):
                var at = f * LANES + l
                assert_equal(row_p.p[unsafe_offset=f], p.p[unsafe_offset=at])
                assert_equal(row_logs.p[unsafe_offset=f], logs.p[unsafe_offset=at])


def _add_nodes(mut nodes: List[Floats]):
    """The first becomes the sum along the tree over them; 1, 2, 3 or 4."""
    var n = len(nodes)
    if n >= 2:
        add(nodes[0].p, nodes[0].p, nodes[1].p, nodes[0].n)
    if n == 3:
        add(nodes[0].p, nodes[0].p, nodes[2].p, nodes[0].n)
    if n == 4:
        add(nodes[2].p, nodes[2].p, nodes[3].p, nodes[0].n)
        add(nodes[0].p, nodes[0].p, nodes[2].p, nodes[0].n)


def test_nodes_of_linear_add_up() raises:
    """Processes 0..n-1 own parts 4 t // n to 4 (t + 1) // n; each has its features only."""
    for size in materialize[LINEARS]():
        var I = size[0]
        var O = size[1]
        for G in range(1, 4):
            var x = Floats(G * I * LANES, noise=1)
            var w = Floats(O * I, noise=2)
            var b = Floats(O, noise=3)
            var dy = Floats(G * O * LANES, noise=4)
            var packed = Floats(columns_scratch(G, O))
            var y = Floats(dy.n)
            var dx = Floats(x.n)
            linear_forward[True](y.p, x.p, w.p, b.p, G, I, O)
            linear_backward_input(dx.p, dy.p, w.p, packed.p, G, I, O)
            for n in range(1, PARTS + 1):
                var ys = List[Floats]()
                var dxs = List[Floats]()
                for t in range(n):
                    var p = PARTS * t // n
                    var q = PARTS * (t + 1) // n
                    ys.append(Floats(y.n, fill=7))
                    dxs.append(Floats(dx.n, fill=7))
                    linear_forward_parts(
                        ys[t].p,
                        _slice(x, G, I, cut(I, p), cut(I, q)).p,
                        w.p,
                        G,
                        I,
                        O,
                        p,
                        q - p,
                    )
                    linear_backward_input_parts(
                        dxs[t].p,
                        _slice(dy, G, O, cut(O, p), cut(O, q)).p,
                        w.p,
                        packed.p,
                        G,
                        I,
                        O,
                        p,
                        q - p,
                    )
                _add_nodes(ys)
                linear_bias[True](ys[0].p, ys[0].p, b.p, G, O)
                ys[0].check_same(y, String("linear in ", n))
                _add_nodes(dxs)
                dxs[0].check_same(dx, String("gradient of the input in ", n))
                for t in range(n):
                    ys[t].check_guards()
                    dxs[t].check_guards()


def test_weight_gradients_of_some_columns() raises:
    """They lie where the whole gradient has them, and the others are left alone."""
    for size in materialize[LINEARS]():
        var I = size[0]
        var O = size[1]
        var G = 2
        var x = Floats(G * I * LANES, noise=1)
        var dy = Floats(G * O * LANES, noise=4)
        var whole = Floats(O * I, fill=0.5)
        var pieces = Floats(O * I, fill=0.5)
        var db = Floats(O)
        var scratch = Floats(WEIGHT_SCRATCH)
        linear_backward_weight(whole.p, db.p, dy.p, x.p, scratch.p, G, I, O, I)
        for p in range(PARTS):
            var a = cut(I, p)
            var columns = cut(I, p + 1) - a
            linear_backward_weight(
                pieces.p.unsafe_offset(a),
                db.p,
                dy.p,
                _slice(x, G, I, a, a + columns).p,
                scratch.p,
                G,
                columns,
                O,
                I,
            )
        pieces.check_same(whole, "gradient of the weights by columns")
        pieces.check_guards()


def _check_convolution[any: Bool](size: Tuple[Int, Int, Int, Int, Int, Int, Int]) raises:
    var G = 2
    var C = size[0]
    var H = size[1]
    var W = size[2]
    var K = size[3]
    var R = size[4]
    var T = size[5]
    var S = size[6]
    var sizes = Conv(G, C, H, W, K, R, T, S)
    var pixels = sizes.P() * sizes.Q()
    var dy = Floats(G * K * pixels * LANES, noise=1)
    var w = Floats(K * C * R * T, noise=2)

    def run(dx: Floats, dy: Floats, part: Int, parts: Int) {imm w, imm sizes}:
        comptime if any:
            conv2d_backward_input_any[LANES](dx.p, dy.p, w.p, sizes, part, parts)
        else:
            conv2d_backward_input(dx.p, dy.p, w.p, sizes, part, parts)

    var dx = Floats(G * C * H * W * LANES, fill=7)
    run(dx, dy, 0, PARTS)
    for n in range(1, PARTS + 1):
        var nodes = List[Floats]()
        for t in range(n):
            var p = PARTS * t // n
            var q = PARTS * (t + 1) // n
            nodes.append(Floats(dx.n, fill=7))
            run(
                nodes[t],
                _slice(dy, G, K * pixels, cut(K, p) * pixels, cut(K, q) * pixels),
                p,
                q - p,
            )
        _add_nodes(nodes)
        nodes[0].check_same(dx, String("convolution in ", n))
        for t in range(n):
            nodes[t].check_guards()


def test_nodes_of_convolution_add_up() raises:
    for size in materialize[CONVOLUTIONS]():
        _check_convolution[False](size)
        _check_convolution[True](size)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
