"""For the tests: floats on the heap between two guards that show whether a kernel wrote outside."""

from std.memory import alloc, Layout
from std.testing import assert_true

from kernels.lanes import LongPtr, Ptr
from kernels.op import Op
from kernels.record import RECORD, ROWS, SPACES, ContextPtr, Record

comptime GUARD = 64
comptime MARK = Float32(12345.5)


struct Floats(Movable):
    """So many floats, never freed: an address that a kernel gets keeps nothing alive."""

    var start: Ptr
    var p: Ptr
    var n: Int

    def __init__(out self, n: Int, fill: Float32 = 0):
        """Sets all of them to `fill`."""
        self.start = alloc(Layout[Float32](count=n + 2 * GUARD)).unsafe_leak()
        self.p = self.start.unsafe_offset(GUARD)
        self.n = n
        for i in range(n + 2 * GUARD):
            self.start[unsafe_offset=i] = MARK
        for i in range(n):
            self.p[unsafe_offset=i] = fill

    def __init__(out self, n: Int, *, noise: Int):
        """Numbers between -1 and 1 that look random, others for another `noise`."""
        self = Self(n)
        var state = UInt32(2654435761) * UInt32(noise + 1)
        for i in range(n):
            state = state * 1664525 + 1013904223
            self.p[unsafe_offset=i] = Float32(state >> 8) * Float32(2.0**-23) - 1

    def check_guards(self) raises:
        """Fails if a kernel wrote before the first float or behind the last."""
        for i in range(GUARD):
            assert_true(self.start[unsafe_offset=i] == MARK, "written before the array")
            assert_true(
                self.p[unsafe_offset=self.n + i] == MARK,
                "written behind the array",
            )

    def check_close(self, other: Self, what: String) raises:
        """Fails if a number is further from `other` than 1e-5 of the largest one."""
        var largest = Float32(0)
        var error = Float32(0)
        for i in range(self.n):
            largest = max(largest, abs(other.p[unsafe_offset=i]))
            error = max(
                error,
                abs(self.p[unsafe_offset=i] - other.p[unsafe_offset=i]),
            )
        assert_true(error <= 1e-5 * largest, String(what, " is off by ", error))
        self.check_guards()

    def check_same(self, other: Self, what: String) raises:
        """Fails if a bit differs."""
        for i in range(self.n):
            assert_true(
                self.p[unsafe_offset=i].to_bits() == other.p[unsafe_offset=i].to_bits(),
                String(what, ": number ", i, " differs"),
            )


def run_op(ops: List[Op], name: StaticString, rows: Bool, arguments: List[Int]) raises:
    """Computes an op of the CPU's tables; operands are addresses."""
    var numbers = List[Int64](length=RECORD, fill=0)
    var at = LongPtr(unsafe_from_address=Int(numbers.unsafe_ptr()))
    var bases = List[Int64](length=SPACES, fill=0)
    numbers[0] = Int64(Int(rows) << ROWS)
    for i in range(len(arguments)):
        numbers[1 + i] = Int64(arguments[i])
    for op in ops:
        if op.name == name:
            op.run(
                Record(
                    at,
                    LongPtr(unsafe_from_address=Int(bases.unsafe_ptr())),
                    ContextPtr(unsafe_from_address=Int(at)),
                )
            )
            _ = numbers^
            _ = bases^
            return
    raise Error(t"no op {name}")
