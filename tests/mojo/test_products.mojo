"""Convolution and linear layers, in lanes and in rows, against their definitions, over many shapes."""

from std.testing import TestSuite

from kernels.conv2d import (
    Conv,
    conv2d_backward_input,
    conv2d_backward_input_any,
    conv2d_backward_weight,
    conv2d_forward,
)
from kernels.conv2d_rows import (
    conv2d_backward_input_rows,
    conv2d_backward_weight_rows,
    conv2d_forward_rows,
)
from kernels.functions import relu
from kernels.lanes import LANES
from kernels.layout import pack_rows, unpack_rows
from kernels.linear import (
    WEIGHT_SCRATCH,
    columns_scratch,
    linear_backward_input,
    linear_backward_weight,
    linear_forward,
)
from kernels.linear_rows import (
    linear_backward_input_rows,
    linear_backward_weight_rows,
    linear_forward_rows,
)
from definitions import conv2d_backward_naive, conv2d_forward_naive, linear_backward_naive, linear_forward_naive
from numbers import Floats

# C, H, W, K, R, T, S
comptime CONVOLUTIONS: List[Tuple[Int, Int, Int, Int, Int, Int, Int]] = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 32, 32, 6, 5, 5, 1),
    (6, 14, 14, 16, 5, 5, 1),
    (3, 7, 9, 5, 3, 3, 1),
    (2, 8, 11, 7, 3, 3, 2),
    (4, 6, 35, 9, 1, 1, 1),
    (3, 6, 13, 2, 2, 5, 1),
    (2, 9, 20, 3, 4, 2, 3),
    (5, 3, 3, 1, 3, 3, 1),
    (1, 5, 18, 4, 5, 3, 1),
]
# I, O
comptime LINEARS: List[Tuple[Int, Int]] = [
    (1, 1),
    (400, 120),
    (84, 10),
    (17, 33),
    (16, 5),
    (15, 12),
    (129, 23),
]


def _relu(y: Floats):
    for i in range(y.n):
        y.p[unsafe_offset=i] = relu[1](y.p[unsafe_offset=i])


def _check_conv[L: Int](G: Int) raises:
    for size in materialize[CONVOLUTIONS]():
        var C = size[0]
        var H = size[1]
        var W = size[2]
        var K = size[3]
        var R = size[4]
        var T = size[5]
        var S = size[6]
        var sizes = Conv(G, C, H, W, K, R, T, S)
        var P = sizes.P()
        var Q = sizes.Q()
        var x = Floats(G * C * H * W * L, noise=1)
        var w = Floats(K * C * R * T, noise=2)
        var b = Floats(K, noise=3)
        var dy = Floats(G * K * P * Q * L, noise=4)
        var y = Floats(dy.n)
        var wanted = Floats(dy.n)
        conv2d_forward_naive[L](wanted.p, x.p, w.p, b.p, sizes)
        for repetition in range(2):
            comptime if L == 1:
                conv2d_forward_rows[False](y.p, x.p, w.p, b.p, sizes)
            else:
                conv2d_forward[False](y.p, x.p, w.p, b.p, sizes)
            y.check_close(wanted, String("convolution ", repetition))
        var fused = Floats(dy.n)
        comptime if L == 1:
            conv2d_forward_rows[True](fused.p, x.p, w.p, b.p, sizes)
        else:
            conv2d_forward[True](fused.p, x.p, w.p, b.p, sizes)
        _relu(y)
        fused.check_same(y, "convolution with ReLU")
        fused.check_guards()

        # gradients of parameters are added to what is there
        var dx = Floats(x.n, fill=7)
        var dw = Floats(w.n, fill=0.5)
        var db = Floats(K, fill=-0.25)
        var dx_wanted = Floats(x.n)
        var dw_wanted = Floats(w.n, fill=0.5)
        var db_wanted = Floats(K, fill=-0.25)
        conv2d_backward_naive[L](
            dx_wanted.p,
            dw_wanted.p,
            db_wanted.p,
            dy.p,
            x.p,
            w.p,
            sizes,
        )
        comptime if L == 1:
            conv2d_backward_weight_rows(dw.p, db.p, dy.p, x.p, sizes)
            if S == 1:
                conv2d_backward_input_rows(dx.p, dy.p, w.p, sizes)
            else:
                conv2d_backward_input_any[1](dx.p, dy.p, w.p, sizes)
        else:
            conv2d_backward_weight(dw.p, db.p, dy.p, x.p, sizes)
            conv2d_backward_input(dx.p, dy.p, w.p, sizes)
        dx.check_close(dx_wanted, "gradient of the input")
        dw.check_close(dw_wanted, "gradient of the weights")
        db.check_close(db_wanted, "gradient of the bias")
        if S == 1:
            var other = Floats(x.n)
            conv2d_backward_input_any[L](other.p, dy.p, w.p, sizes)
            other.check_close(dx_wanted, "gradient of the input, any")
        x.check_guards()
        w.check_guards()


def test_convolution_in_lanes() raises:
    _check_conv[LANES](1)
    _check_conv[LANES](2)


def test_convolution_in_rows() raises:
    _check_conv[1](1)
    _check_conv[1](3)


def test_linear_in_lanes() raises:
    for size in materialize[LINEARS]():
        var I = size[0]
        var O = size[1]
        for G in range(1, 4):
            var x = Floats(G * I * LANES, noise=1)
            var w = Floats(O * I, noise=2)
            var b = Floats(O, noise=3)
            var dy = Floats(G * O * LANES, noise=4)
            var y = Floats(dy.n)
            var wanted = Floats(dy.n)
            linear_forward_naive(wanted.p, x.p, w.p, b.p, G, I, O)
            linear_forward[False](y.p, x.p, w.p, b.p, G, I, O)
            y.check_close(wanted, "linear")
            var fused = Floats(dy.n)
            linear_forward[True](fused.p, x.p, w.p, b.p, G, I, O)
            _relu(y)
            fused.check_same(y, "linear with ReLU")

            var dx = Floats(x.n, fill=7)
            var dw = Floats(w.n, fill=0.5)
            var db = Floats(O, fill=-0.25)
            var dx_wanted = Floats(x.n)
            var dw_wanted = Floats(w.n, fill=0.5)
            var db_wanted = Floats(O, fill=-0.25)
            var scratch = Floats(WEIGHT_SCRATCH)
            var packed = Floats(columns_scratch(G, O))
            linear_backward_naive(dx_wanted.p, dw_wanted.p, db_wanted.p, dy.p, x.p, w.p, G, I, O)
            linear_backward_weight(dw.p, db.p, dy.p, x.p, scratch.p, G, I, O, I)
            linear_backward_input(dx.p, dy.p, w.p, packed.p, G, I, O)
            dx.check_close(dx_wanted, "gradient of the input")
            dw.check_close(dw_wanted, "gradient of the weights")
            db.check_close(db_wanted, "gradient of the bias")
            scratch.check_guards()


def test_linear_in_rows() raises:
    """Against the definition in lanes, of which N are used."""
    for size in materialize[LINEARS]():
        var I = size[0]
        var O = size[1]
        for N in range(1, 5):
            var x = Floats(N * I, noise=1)
            var w = Floats(O * I, noise=2)
            var b = Floats(O, noise=3)
            var dy = Floats(N * O, noise=4)
            var x_lanes = Floats(I * LANES)
            var y_lanes = Floats(O * LANES)
            var dx_lanes = Floats(I * LANES)
            var dy_lanes = Floats(O * LANES)
            var y = Floats(dy.n)
            var wanted = Floats(dy.n)
            pack_rows(x_lanes.p, x.p, N, I)
            pack_rows(dy_lanes.p, dy.p, N, O)
            linear_forward_naive(y_lanes.p, x_lanes.p, w.p, b.p, 1, I, O)
            unpack_rows(wanted.p, y_lanes.p, N, O)
            linear_forward_rows[False](y.p, x.p, w.p, b.p, N, I, O)
            y.check_close(wanted, "linear")
            var fused = Floats(dy.n)
            linear_forward_rows[True](fused.p, x.p, w.p, b.p, N, I, O)
            _relu(y)
            fused.check_same(y, "linear with ReLU")

            var dx = Floats(x.n, fill=7)
            var dw = Floats(w.n, fill=0.5)
            var db = Floats(O, fill=-0.25)
            var dx_wanted = Floats(x.n)
            var dw_wanted = Floats(w.n, fill=0.5)
            var db_wanted = Floats(O, fill=-0.25)
            linear_backward_naive(
                dx_lanes.p,
                dw_wanted.p,
                db_wanted.p,
                dy_lanes.p,
                x_lanes.p,
                w.p,
                1,
                I,
                O,
            )
            unpack_rows(dx_wanted.p, dx_lanes.p, N, I)
            linear_backward_weight_rows(dw.p, db.p, dy.p, x.p, N, I, O)
            linear_backward_input_rows(dx.p, dy.p, w.p, N, I, O)
            dx.check_close(dx_wanted, "gradient of the input")
            dw.check_close(dw_wanted, "gradient of the weights")
            db.check_close(db_wanted, "gradient of the bias")


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
