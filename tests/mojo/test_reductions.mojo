"""Philox against the published vectors; sums along the tree, squared norm and finite check against plain loops."""

from std.math import nan, inf
from std.testing import TestSuite, assert_almost_equal, assert_equal
from std.testing import assert_false, assert_true

from kernels.lanes import F32, LANES
from kernels.random import U32, philox, uniform, unit
from kernels.layout import LongPtr
from kernels.reduce import fixed_squares, is_finite, largest, split, tree_sum
from kernels.layout import LongPtr
from numbers import Floats


def _known(
    c0: UInt32,
    c1: UInt32,
    c2: UInt32,
    c3: UInt32,
    seed: UInt64,
    w0: UInt32,
    w1: UInt32,
    w2: UInt32,
    w3: UInt32,
) raises:
    var one = philox[1](c0, c1, c2, c3, seed)
    assert_equal(one[0][0], w0)
    assert_equal(one[1][0], w1)
    assert_equal(one[2][0], w2)
    assert_equal(one[3][0], w3)
    # the same counter in one lane of many
    var many = philox[LANES](
        SIMD[U32, LANES](c0),
        SIMD[U32, LANES](c1),
        SIMD[U32, LANES](c2),
        SIMD[U32, LANES](c3),
        seed,
    )
    for l in range(LANES):
        assert_equal(many[0][l], w0)
        assert_equal(many[3][l], w3)


def test_philox_known_answers() raises:
    """Vectors of Random123 for philox4x32-10; the key is (low, high) of the seed."""
    _known(0, 0, 0, 0, 0, 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    _known(
        0xFFFFFFFF,
        0xFFFFFFFF,
        0xFFFFFFFF,
        0xFFFFFFFF,
        0xFFFFFFFFFFFFFFFF,
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )
    _known(
        0x243F6A88,
        0x85A308D3,
        0x13198A2E,
        0x03707344,
        0x299F31D0A4093822,
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    )


def test_unit_is_below_one() raises:
    assert_equal(unit[1](UInt32(0)), Float32(0))
    assert_true(unit[1](UInt32(0xFFFFFFFF))[0] < 1)
    assert_true(unit[1](UInt32(0xFFFFFFFF))[0] > 0.9999999)


def test_uniform_is_a_prefix() raises:
    """More numbers of one stream begin with the same ones."""
    var all = Floats(37)
    uniform(all.p, 37, 5, 2, -1, 3)
    for n in range(1, 37):
        var some = Floats(n)
        uniform(some.p, n, 5, 2, -1, 3)
        some.check_same(all, String(n, " numbers"))
        some.check_guards()


def _explicit(n: Int, v: List[Float32]) raises -> Float32:
    """The trees of one to nine leaves, written out."""
    if n == 1:
        return v[0]
    elif n == 2:
        return v[0] + v[1]
    elif n == 3:
        return (v[0] + v[1]) + v[2]
    elif n == 4:
        return (v[0] + v[1]) + (v[2] + v[3])
    elif n == 5:
        return ((v[0] + v[1]) + (v[2] + v[3])) + v[4]
    elif n == 6:
        return ((v[0] + v[1]) + (v[2] + v[3])) + (v[4] + v[5])
    elif n == 7:
        return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6])
    elif n == 8:
        return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
    return (((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))) + v[8]


def test_tree_sum() raises:
    comptime SIZE = 3 * LANES
    for n in range(1, 10):
        var data = Floats(n * SIZE, noise=n)
        for i in range(data.n):  # so different in size that the order shows
            data.p[unsafe_offset=i] *= Float32(10) ** (i // SIZE % 5)
        var addresses = List[Int64]()
        for i in range(n):
            addresses.append(Int64(Int(data.p.unsafe_offset(i * SIZE))))
        var wanted = Floats(SIZE)
        for i in range(SIZE):
            var v = List[Float32]()
            for k in range(n):
                v.append(data.p[unsafe_offset=k * SIZE + i])
            wanted.p[unsafe_offset=i] = _explicit(n, v)
        var table = LongPtr(unsafe_from_address=Int(addresses.unsafe_ptr()))
        var y = Floats(SIZE)
        tree_sum(y.p, table, n, SIZE)
        y.check_same(wanted, String(n, " leaves"))
        y.check_guards()
        # into one of the buffers
        tree_sum(data.p.unsafe_offset((n - 1) * SIZE), table, n, SIZE)
        for i in range(SIZE):
            assert_equal(
                data.p[unsafe_offset=(n - 1) * SIZE + i],
                wanted.p[unsafe_offset=i],
            )
        _ = addresses^


def test_split_is_the_largest_power_of_two_below() raises:
    for n in range(2, 200):
        var left = split(n)
        assert_equal(left & (left - 1), 0)
        assert_true(left < n)
        assert_true(2 * left >= n)


def squares(x: Floats, n: Int, unit: Float32) -> Tuple[Int64, Int64]:
    var y: List[Int64] = [-1, -1]
    fixed_squares(LongPtr(unsafe_from_address=Int(y.unsafe_ptr())), x.p, n, unit)
    return (y[0], y[1])


def test_fixed_squares() raises:
    for n in [0, 1, 15, 16, 17, 4097, 10000]:
        var x = Floats(n, noise=n)
        var wanted: Float64 = 0
        for i in range(n):
            var v = x.p[unsafe_offset=i].cast[DType.float64]()
            wanted += v * v
        var s = squares(x, n, 0.125)
        var found = s[0].cast[DType.float64]() * 2.0**-31 + s[1].cast[DType.float64]() * 2.0**-62
        assert_almost_equal(64 * found, wanted, rtol=1e-12, atol=0)
        # in two pieces, cut anywhere: the same integers
        for cut in [0, n // 3, n]:
            var rest = Floats(n - cut)
            for i in range(n - cut):
                rest.p[unsafe_offset=i] = x.p[unsafe_offset=cut + i]
            var a = squares(x, cut, 0.125)
            var b = squares(rest, n - cut, 0.125)
            assert_equal(a[0] + b[0], s[0])
            assert_equal(a[1] + b[1], s[1])


def test_largest() raises:
    for n in [0, 1, 15, 16, 17, 100]:
        var x = Floats(n, fill=Float32(-0.5))
        var y = Floats(1)
        largest(y.p, x.p, n)
        assert_equal(y.p[], Float32(0.5) if n else Float32(0))
        for i in range(n):
            x.p[unsafe_offset=i] = -3
            largest(y.p, x.p, n)
            assert_equal(y.p[], 3)
            for bad in [nan[F32](), inf[F32](), -inf[F32]()]:
                x.p[unsafe_offset=i] = bad
                largest(y.p, x.p, n)
                assert_equal(y.p[], inf[F32]())
            x.p[unsafe_offset=i] = 0


def test_is_finite() raises:
    for n in [0, 1, 15, 16, 17, 33, 100]:
        var x = Floats(n, fill=Float32(3e38))
        assert_true(is_finite(x.p, n))
        for i in range(n):
            for bad in [nan[F32](), inf[F32](), -inf[F32]()]:
                x.p[unsafe_offset=i] = bad
                assert_false(is_finite(x.p, n))
            x.p[unsafe_offset=i] = -3e38
        assert_true(is_finite(x.p, n))
        # what stands behind the last one does not count
        x.p[unsafe_offset=n] = nan[F32]()
        assert_true(is_finite(x.p, n))


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
