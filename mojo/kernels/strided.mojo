"""Ops on tensors whose numbers lie anywhere: up to five axes, each with its own stride, 0 where a number is used again.

Slices, permutations, expanded and joined tensors and the gradients of all of them are one copy (`copy_strided`);
arithmetic of tensors that are broadcast is one loop over a function of two numbers (`Strided.pairs`). The sizes are
those of memory, so samples in lanes are two of the axes, the groups first and the 16 samples of a group last.
"""

from .buffers import add
from .lanes import LANES, LongPtr, Ptr, Vec, load, store
from .op import Kernel, Op, call
from .record import Record
from .views import Of2

comptime AXES = 5


trait Strided:
    """The loop of a device over two tensors with strides."""

    comptime Run: Copyable & Deinitable  # its kernels

    @staticmethod
    def pairs[f: Of2]() -> Self.Run:
        """Arguments y; a, b; 5 sizes, 5 strides of a, 5 of b: y = f(a, b), y without gaps."""
        ...


struct CpuStrided(Strided):
    """This processor, 16 floats at a time where they are neighbours."""

    comptime Run = Kernel

    @staticmethod
    def pairs[f: Of2]() -> Self.Run:
        return _pairs[f]


@always_inline
def walk[B: def(Int, Int, Int) -> None](at: LongPtr, body: B):
    """Calls body(row, u, v) for every row along the last axis, in order: its number and where it begins in two tensors.

    `at`: five sizes, five strides of u, five of v.
    """

    @always_inline
    def n(i: Int) {imm at} -> Int:
        return Int(at[unsafe_offset=i])

    var row = 0
    for i0 in range(n(0)):
        for i1 in range(n(1)):
            for i2 in range(n(2)):
                for i3 in range(n(3)):
                    var u = i0 * n(5) + i1 * n(6) + i2 * n(7) + i3 * n(8)
                    var v = i0 * n(10) + i1 * n(11) + i2 * n(12) + i3 * n(13)
                    body(row, u, v)
                    row += 1


def _copy(r: Record):
    """Arguments y; x; where y begins, where x begins, 5 sizes, 5 strides of y, 5 of x."""
    var y = r.ptr(1).unsafe_offset(r.int(3))
    var x = r.ptr(2).unsafe_offset(r.int(4))
    var at = r.at.unsafe_offset(5)
    var n = r.int(5 + AXES - 1)
    var sy = r.int(5 + 2 * AXES - 1)
    var sx = r.int(5 + 3 * AXES - 1)

    @always_inline
    def body(row: Int, u: Int, v: Int) {imm}:
        var i = 0
        if sy == 1 and sx <= 1:
            while i + LANES <= n:
                var a = load(x, v + i) if sx == 1 else Vec(x[unsafe_offset=v])
                store(y, u + i, a)
                i += LANES
        while i < n:
            y[unsafe_offset=u + i * sy] = x[unsafe_offset=v + i * sx]
            i += 1

    walk(at, body)


def _pairs[f: Of2](r: Record):
    var y = r.ptr(1)
    var a = r.ptr(2)
    var b = r.ptr(3)
    var at = r.at.unsafe_offset(4)
    var n = r.int(4 + AXES - 1)
    var sa = r.int(4 + 2 * AXES - 1)
    var sb = r.int(4 + 3 * AXES - 1)

    @always_inline
    def body(row: Int, u: Int, v: Int) {imm}:
        var i = 0
        if sa <= 1 and sb <= 1:
            while i + LANES <= n:
                var p = load(a, u + i) if sa == 1 else Vec(a[unsafe_offset=u])
                var q = load(b, v + i) if sb == 1 else Vec(b[unsafe_offset=v])
                store(y, row * n + i, f[LANES](p, q))
                i += LANES
        while i < n:
            y[unsafe_offset=row * n + i] = f[1](a[unsafe_offset=u + i * sa], b[unsafe_offset=v + i * sb])
            i += 1

    walk(at, body)


def _accumulate(y: Ptr, x: Ptr, n: Int):
    add(y, y, x, n)


def ops() -> List[Op]:
    """The ops of this file."""
    return [
        Op("copy_strided", "y; x; from_y, from_x, d0, d1, d2, d3, d4, y0, y1, y2, y3, y4, x0, x1, x2, x3, x4", _copy),
        Op("accumulate", "+y; x; n", call[_accumulate], "sums"),
    ]
