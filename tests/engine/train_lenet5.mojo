"""Trains LeNet-5 for a few steps without Python and prints its parameters; test_mojo_lenet5.py does the same in Python."""

from std.os import getenv

from kernels.lanes import LANES, Ptr
from kernels.layout import LongPtr
from shared.training import (
    Adam,
    Context,
    LeNet5,
    Plan,
    SGD,
    STATS,
    Step,
    aligned_zeros,
    run_step,
)

comptime SHARD = 32
comptime BATCH = 50  # a full shard and a partial one
comptime STEPS = 4
comptime SAMPLES = 200


def main() raises:
    var images = List[UInt8](length=SAMPLES * 784, fill=0)
    for i in range(len(images)):
        images[i] = UInt8((i * 7919 + i // 331) % 251)
    var labels = List[Int32](length=SAMPLES, fill=0)
    var rows = List[Int64](length=SAMPLES, fill=0)
    for i in range(SAMPLES):
        labels[i] = Int32(i * 7 % 10)
        rows[i] = Int64(i)
    var scale = aligned_zeros(1)
    var shift = aligned_zeros(1)
    scale[] = 0.00390625
    shift[] = -0.5

    var model = LeNet5(seed=3)
    var sgd = SGD(model.arena, lr=0.05, momentum=0.9, weight_decay=5e-4)
    var adam = Adam(model.arena, lr=1e-3)
    var use_adam = getenv("OPTIMIZER") == "adam"
    var program = model.record(SHARD)
    var plan = Plan((BATCH + SHARD - 1) // SHARD)
    var final = List[Int64]()
    var floats = model.arena.size + STATS
    var buffers = aligned_zeros(plan.buffers * floats)
    var work = aligned_zeros(program.work_bytes // 4)
    var starts: List[Int64] = [
        Int64(Int(plan.actions.unsafe_ptr())),
        Int64(Int(final.unsafe_ptr())),
    ]
    var counts: List[Int64] = [Int64(len(plan)), 0]

    for step in range(STEPS):
        run_step(
            Step(
                program=program.address(),
                records=Int64(len(program)),
                threads=1,
                actions=LongPtr(unsafe_from_address=Int(starts.unsafe_ptr())),
                counts=LongPtr(unsafe_from_address=Int(counts.unsafe_ptr())),
                params=Int64(Int(model.arena.params)),
                work=Int64(Int(work)),
                work_bytes=Int64(program.work_bytes),
                slots=0,
                base=0,
                zero=1,
                buffers=Int64(Int(buffers)),
                buffer_floats=Int64(floats),
                shard_size=SHARD,
                samples=BATCH,
                rows=LongPtr(
                    unsafe_from_address=Int(rows.unsafe_ptr())
                    + 8 * step * BATCH
                ),
                context=Context(
                    seed=0,
                    step=Int64(step),
                    first=0,
                    valid=0,
                    images=Int64(Int(images.unsafe_ptr())),
                    bytes=1,
                    labels=Int64(Int(labels.unsafe_ptr())),
                    rows=0,
                    scale=Int64(Int(scale)),
                    shift=Int64(Int(shift)),
                    loss_scale=1,
                ),
            )
        )
        var ok = adam.apply(model.arena, buffers) if use_adam else sgd.apply(
            model.arena, buffers
        )
        if not ok:
            raise Error("not finite at step ", step)
        print("loss", buffers[unsafe_offset=model.arena.size] / BATCH)
    for i in range(model.arena.size):
        print(hex(model.arena.params[unsafe_offset=i].to_bits()))
    # the addresses above are not tracked: keep what they point to alive up to here
    _ = images^
    _ = labels^
    _ = rows^
    _ = plan^
    _ = final^
    _ = starts^
    _ = counts^
    _ = program^
