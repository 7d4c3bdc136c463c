"""The op table, a program written in Mojo run record by record, and a step on one and on several threads."""

from std.testing import TestSuite, assert_equal, assert_true

from kernels.elementwise import relu_forward
from kernels.lanes import LANES
from kernels.layout import LongPtr
from kernels.linear import linear_forward_naive
from numbers import Floats
from shared.training import (
    ADD,
    Context,
    NAMES,
    Plan,
    Program,
    RECORD,
    RUN,
    STATS,
    Step,
    code,
    float_bits,
    operand,
    run_program,
    run_step,
)
from shared.training.record import ABSOLUTE, GRADS, PARAMS, SPACES, WORK


def _context(step: Int = 0) -> Context:
    return Context(
        seed=5,
        step=Int64(step),
        first=0,
        valid=0,
        images=0,
        bytes=0,
        labels=0,
        rows=0,
        scale=0,
        shift=0,
        loss_scale=1,
    )


def test_names_are_codes() raises:
    var names = materialize[NAMES]()
    assert_true(len(names) > 30)
    for i in range(len(names)):
        assert_equal(code(names[i]), i)
    assert_equal(code("zork"), -1)
    assert_equal(code("add"), comptime (code("add")))


def test_a_program() raises:
    """A linear layer, ReLU and a sum, its operands in three spaces; then a check that stops it.
    """
    comptime I = 5
    comptime O = 3
    var w = Floats(O * I + O, noise=1)
    var x = Floats(I * LANES, noise=2)
    var program = Program()
    var hidden = program.workspace(O * LANES)
    var out = program.workspace(O * LANES)
    assert_equal(program.work_bytes, 2 * 4 * O * LANES)
    program.emit(
        code("linear_forward"),
        hidden,
        operand(ABSOLUTE, Int(x.p)),
        operand(PARAMS, 0),
        operand(PARAMS, 4 * O * I),
        1,
        I,
        O,
        0,
    )
    program.emit(code("relu_forward"), out, hidden, O * LANES)
    program.emit(code("sum_lanes"), operand(GRADS, 0), out, 7, 1, O)
    program.emit(
        code("scale"),
        operand(GRADS, 4),
        operand(GRADS, 0),
        float_bits(-0.5),
        1,
    )
    program.emit(code("finite"), operand(GRADS, 0), 2)
    program.emit(code("fill"), operand(GRADS, 8), float_bits(9), 1)
    assert_equal(len(program), 6)

    var grads = Floats(4)
    var work = Floats(program.work_bytes // 4)
    var bases = List[Int64](length=SPACES, fill=0)
    bases[PARAMS] = Int64(Int(w.p))
    bases[GRADS] = Int64(Int(grads.p))
    bases[WORK] = Int64(Int(work.p))
    var table = LongPtr(unsafe_from_address=Int(bases.unsafe_ptr()))

    var y = Floats(O * LANES)
    linear_forward_naive(y.p, x.p, w.p, w.p.unsafe_offset(O * I), 1, I, O)
    relu_forward(y.p, y.p, y.n)
    var wanted: Float32 = 0
    for o in range(O):
        for l in range(7):
            wanted += y.p[unsafe_offset=o * LANES + l]
    assert_equal(
        run_program(program.address(), len(program), table, _context()), -1
    )
    assert_true(abs(grads.p[] - wanted) < 1e-5)
    assert_equal(grads.p[unsafe_offset=1], -0.5 * grads.p[])
    assert_equal(grads.p[unsafe_offset=2], 9)
    grads.check_guards()
    work.check_guards()

    grads.p[unsafe_offset=2] = 0
    w.p[] = Float32(1e38) * 1e38  # infinite
    x.p[] = 1
    assert_equal(
        run_program(program.address(), len(program), table, _context()), 4
    )
    assert_equal(grads.p[unsafe_offset=2], 0, "nothing after the check ran")
    _ = program^
    _ = bases^


def test_a_record_without_a_meaning_stops_the_program() raises:
    var program = Program()
    program.emit(len(materialize[NAMES]()))
    var bases = List[Int64](length=SPACES, fill=0)
    var table = LongPtr(unsafe_from_address=Int(bases.unsafe_ptr()))
    assert_equal(run_program(program.address(), 1, table, _context()), 0)
    _ = program^
    _ = bases^


comptime FLOATS = 4 * LANES
comptime SHARDS = 7


def _masks() -> Program:
    """Each shard's gradient is its dropout mask; the sum of seven shards depends on the order of additions only in
    which masks meet, so it must be that of the whole batch however it is cut.
    """
    var program = Program()
    var ones = program.workspace(FLOATS)
    program.emit(code("fill"), ones, float_bits(1), FLOATS)
    program.emit(
        code("dropout"), operand(GRADS, 0), ones, 1, 4, float_bits(0.3), 2
    )
    return program^


def _step(
    mut buffers: Floats,
    program: Program,
    threads: Int,
    repeat: Int,
    samples: Int = SHARDS * LANES,
) raises -> Int:
    """Runs a program over seven shards so often; returns how the last run ended.
    """
    var work = Floats(threads * program.work_bytes // 4)
    var lists = List[List[Int64]]()
    var used: Int
    if threads == 1:
        var plan = Plan(SHARDS)
        lists.append(plan.threads[0].numbers.copy())
        used = plan.buffers
        lists.append(List[Int64]())
    else:  # shards 0-3 and 4-6, then both
        var left: List[Int64] = [
            RUN,
            0,
            0,
            RUN,
            1,
            1,
            ADD,
            0,
            1,
            RUN,
            2,
            1,
            RUN,
            3,
            2,
            ADD,
            1,
            2,
            ADD,
            0,
            1,
        ]
        var right: List[Int64] = [
            RUN,
            4,
            3,
            RUN,
            5,
            4,
            ADD,
            3,
            4,
            RUN,
            6,
            4,
            ADD,
            3,
            4,
        ]
        var final: List[Int64] = [ADD, 0, 3]
        lists.append(left^)
        lists.append(right^)
        lists.append(final^)
        used = 5
    assert_true(used * FLOATS <= buffers.n)
    var starts = List[Int64]()
    var counts = List[Int64]()
    for i in range(len(lists)):
        starts.append(Int64(Int(lists[i].unsafe_ptr())))
        counts.append(Int64(len(lists[i]) // 3))
    var end = -2
    for _ in range(repeat):
        end = run_step(
            Step(
                program=program.address(),
                records=Int64(len(program)),
                threads=Int64(threads),
                actions=LongPtr(unsafe_from_address=Int(starts.unsafe_ptr())),
                counts=LongPtr(unsafe_from_address=Int(counts.unsafe_ptr())),
                params=0,
                work=Int64(Int(work.p)),
                work_bytes=Int64(program.work_bytes),
                slots=0,
                base=0,
                zero=1,
                buffers=Int64(Int(buffers.p)),
                buffer_floats=FLOATS,
                shard_size=LANES,
                samples=Int64(samples),
                rows=LongPtr(unsafe_from_address=Int(buffers.p)),
                context=_context(11),
            )
        )
    buffers.check_guards()
    work.check_guards()
    _ = lists^
    _ = starts^
    _ = counts^
    return end


def test_threads_change_no_bit() raises:
    var one = Floats(5 * FLOATS, fill=3)
    assert_equal(_step(one, _masks(), 1, 1), -1)
    var sum: Float32 = 0
    for i in range(FLOATS):
        sum += one.p[unsafe_offset=i]
    assert_true(sum > FLOATS * SHARDS * 0.8 and sum < FLOATS * SHARDS * 1.2)
    for _ in range(10):
        var two = Floats(5 * FLOATS, fill=-8)
        assert_equal(_step(two, _masks(), 2, 3), -1)
        for i in range(FLOATS):
            assert_equal(two.p[unsafe_offset=i], one.p[unsafe_offset=i])


def test_a_check_that_fails_in_a_shard_is_the_end_of_the_step() raises:
    """Of the first such shard, on any number of threads."""
    for everywhere in [False, True]:
        var program = Program()
        var x = program.workspace(LANES)
        var y = program.workspace(LANES)
        program.emit(code("fill"), x, float_bits(1), LANES)
        program.emit(code("sum_lanes"), y, x, -1, 1, 1)  # the shard's samples
        program.emit(code("fill"), x, float_bits(Float32(LANES) - 0.5), 1)
        program.emit(code("axpy"), x, y, float_bits(-1), 1)
        program.emit(code("relu_forward"), x, x, 1)  # 0 if the shard is full
        program.emit(code("scale"), x, x, float_bits(1e38), 1)
        program.emit(code("finite"), x, 1)
        if everywhere:
            program.emit(code("fill"), x, float_bits(Float32.MAX), 1)
            program.emit(code("scale"), x, x, float_bits(2), 1)
            program.emit(code("finite"), x, 1)
        for threads in range(1, 3):
            var buffers = Floats(5 * FLOATS)
            var full = SHARDS * LANES
            assert_equal(
                _step(buffers, program, threads, 2, full),
                9 if everywhere else -1,
            )
            assert_equal(
                _step(buffers, program, threads, 2, full - 12),
                9 if everywhere else 6,
            )


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
