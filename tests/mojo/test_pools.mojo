"""Max-pools in rows have the bits of those in lanes, whose loops are the plain ones: odd widths, ties, NaN."""

from std.memory import alloc, Layout
from std.testing import TestSuite, assert_equal
from std.utils.numerics import nan

from kernels.lanes import F32, LANES, BytePtr
from kernels.layout import pack_rows
from kernels.op import Cpu
from kernels.pool import Windows, ops
from numbers import Floats, run_op

# planes, H, W, R = T, S
comptime POOLS: List[Tuple[Int, Int, Int, Int, Int]] = [
    (1, 2, 2, 2, 2),
    (6, 28, 28, 2, 2),
    (3, 10, 10, 2, 2),
    (2, 4, 34, 2, 2),
    (2, 6, 64, 2, 2),
    (2, 5, 7, 2, 2),
    (1, 7, 70, 2, 2),
    (2, 9, 9, 3, 2),
    (2, 6, 5, 2, 1),
]


def _bytes(n: Int) -> BytePtr:
    var p = alloc(Layout[UInt8](count=n + 64)).unsafe_leak()
    for i in range(n + 64):
        p[unsafe_offset=i] = 77
    return BytePtr(unsafe_from_address=Int(p))


def _run(name: StaticString, rows: Bool, operands: List[Int], s: Windows, relu: Bool = False) raises:
    var arguments = operands.copy()
    arguments.extend([s.planes, s.H, s.W, s.R, s.T, s.S, Int(relu)])
    run_op(ops[Cpu](), name, rows, arguments)


def test_rows_have_the_bits_of_lanes() raises:
    for size in materialize[POOLS]():
        var C = size[0]
        var s = Windows(C, size[1], size[2], size[3], size[3], size[4])
        var outs = C * s.P() * s.Q()
        var x = Floats(C * s.H * s.W, noise=1)
        for i in range(0, x.n, 3):  # ties
            x.p[unsafe_offset=i] = 0.5
        x.p[unsafe_offset=x.n // 2] = nan[F32]()
        var dy = Floats(outs, noise=2)
        var x_lanes = Floats(x.n * LANES)
        var dy_lanes = Floats(outs * LANES)
        pack_rows(x_lanes.p, x.p, 1, x.n)
        pack_rows(dy_lanes.p, dy.p, 1, outs)
        var y = Floats(outs, fill=7)
        var y_lanes = Floats(outs * LANES)
        var at = _bytes(outs)
        var at_lanes = _bytes(outs * LANES)
        _run("maxpool_forward", True, [Int(y.p), Int(at), Int(x.p)], s)
        _run("maxpool_forward", False, [Int(y_lanes.p), Int(at_lanes), Int(x_lanes.p)], s)
        for i in range(outs):
            assert_equal(
                y.p[unsafe_offset=i].to_bits(),
                y_lanes.p[unsafe_offset=i * LANES].to_bits(),
            )
            assert_equal(at[unsafe_offset=i], at_lanes[unsafe_offset=i * LANES])
        assert_equal(at[unsafe_offset=outs], 77)
        for relu in [False, True]:
            var dx = Floats(x.n, fill=7)
            var dx_lanes = Floats(x.n * LANES)
            _run("maxpool_backward", True, [Int(dx.p), Int(dy.p), Int(at), Int(y.p)], s, relu)
            var lanes: List[Int] = [Int(dx_lanes.p), Int(dy_lanes.p), Int(at_lanes), Int(y_lanes.p)]
            _run("maxpool_backward", False, lanes, s, relu)
            for i in range(x.n):
                assert_equal(
                    dx.p[unsafe_offset=i].to_bits(),
                    dx_lanes.p[unsafe_offset=i * LANES].to_bits(),
                )
            dx.check_guards()
        y.check_guards()


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
