"""The time of each launch of a training step on a GPU: where the milliseconds of GPT and
ResNet-18 go.

A step is taken and its launches are noted. Then the same launches are captured as a CUDA graph with
an event between every two of them, and the graph is replayed: the launches follow each other as
closely as in a training step, and no time of the host is in between. A time is the median over the
replays. It contains the gap to the next launch and an event, about a microsecond; "event us" is
that of two events with nothing between them, and it is not subtracted. "graph us" is one replay of
the same launches without events.

The launches are those of forward and backward pass, the sums of shards, the check of gradients and
the update. Copies between host and device are not among them. A record may have several kernels,
and a launch may compute several records; --profile runs single records for a profiler (ncu
--profile-from-start off).
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import gpu as steps
import models

EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL: the event is a node of the graph that is captured
CALLS = ("run", "tree_sum", "clear")  # of Gpu: what puts launches into the queue
# the lower bits of a record's first number are the code of its op (mojo/kernels/record.mojo)
CODES = 1 << 16
EMPTY = 32  # pairs of events with nothing between them


class Launch:
    """A launch: a label, and the function that enqueues it.

    Attributes:
        flops: float operations of products, for all shards.
        records: of a program that it computes.
    """

    def __init__(
        self, label: str, enqueue: Callable[[], object], flops: float = 0.0, records: int = 1
    ) -> None:
        self.label = label
        self.enqueue = enqueue
        self.flops = flops
        self.records = records


class Events:
    """Events of the driver with a time, in a queue."""

    def __init__(self, device: Any, count: int) -> None:
        from odyssey.core.cuda import driver

        self._driver = driver()
        self._stream = device.stream()
        self._events = [self._driver.get(ctypes.c_void_p, "cuEventCreate", 0) for _ in range(count)]

    def record(self, i: int) -> None:
        """Puts event i into the graph that is being captured."""
        self._driver.call("cuEventRecordWithFlags", self._events[i], self._stream, EXTERNAL)

    def between(self, i: int) -> float:
        """Microseconds from event i to the next one."""
        out = ctypes.c_float()
        self._driver.call(
            "cuEventElapsedTime", ctypes.byref(out), self._events[i], self._events[i + 1]
        )
        return 1000 * out.value


def noted(device: Any, step: Callable[[], object]) -> list[tuple[str, tuple[Any, ...]]]:
    """The calls that a step makes to put launches into the compute queue, with copies of their
    arguments.
    """
    from odyssey.core import native
    from odyssey.core.gpu_native import COMPUTE, GpuStep

    calls: list[tuple[str, tuple[Any, ...]]] = []

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(device, name)

        def call(*arguments: Any) -> Any:
            queue = arguments[2] if name == "clear" and len(arguments) > 2 else COMPUTE
            if queue == COMPUTE:
                calls.append((name, kept(arguments)))
            return real(*arguments)

        return call

    def kept(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if not arguments or not isinstance(arguments[0], GpuStep):
            return arguments
        one = GpuStep.from_buffer_copy(arguments[0])
        numbers = one.records * native.library().record
        program = (ctypes.c_int64 * numbers).from_buffer_copy(
            ctypes.string_at(one.program, numbers * ctypes.sizeof(ctypes.c_int64))
        )
        one.program = ctypes.addressof(program)
        return one, program

    for name in CALLS:
        setattr(device, name, noting(name))
    try:
        step()
    finally:
        for name in CALLS:
            delattr(device, name)
    return calls


def launches_of(trainer: Any, step: Callable[[], object]) -> list[Launch]:
    """The launches of a step, in order."""
    from odyssey.core.gpu_native import library
    from odyssey.engine.gpu import rewrite

    (runner,) = trainer.stepper.engine.runners
    (worker,) = trainer.stepper.engine.team.workers
    device = worker.gpu
    runner._prepared = [None]  # this step goes launch by launch, not by the graph that there is
    calls = noted(device, step)
    device.synchronize()
    records = rewrite.fuse(runner.programs[0].records)
    names = {code: name for name, code in library().codes.items()}
    launches = []
    for name, arguments in calls:
        if name != "run":
            label = f"{name} {arguments[3] if name == 'tree_sum' else arguments[1]}"
            label += f" x {arguments[4]} floats" if name == "tree_sum" else " bytes"
            launches.append(
                Launch(
                    label, lambda name=name, arguments=arguments: getattr(device, name)(*arguments)
                )
            )
            continue
        one, program = arguments
        of_program = records if one.records == len(records) else None
        launches += of_step(device, one, program, of_program, names)
    return launches


def of_step(
    device: Any, step: Any, program: Any, records: list[Any] | None, names: dict[int, str]
) -> list[Launch]:
    """The launches of a program.

    They are enqueued once, which shows the records that each computes.
    """
    from odyssey.core import native

    size = native.library().record
    launches = []
    first = 0
    while first < step.records:
        following = device.enqueue(step, first)
        if records is not None:
            label, flops = described(records[first], step.shards)
            flops *= following - first
        else:
            label = names[program[first * size] % CODES]
            flops = 0.0
        if following - first > 1:
            label += f" ({following - first} records)"
        enqueue = lambda step=step, first=first, program=program: device.enqueue(step, first)  # noqa: E731
        launches.append(Launch(label, enqueue, flops, following - first))
        first = following
    device.synchronize()
    return launches


def described(record: Any, shards: int) -> tuple[str, float]:
    """The label of a record, and its float operations for all shards."""
    from odyssey.core.gpu_native import library

    op = library().ops[record.op]
    numbers = record.args[len(record.args) - len(op.sizes) :] if op.sizes else ()
    sizes = " ".join(f"{name}={value}" for name, value in zip(op.sizes, numbers, strict=True))
    precision = "" if record.dtype == "fp32" else f" {record.dtype}"
    try:
        flops = models.operations(record, op.sizes, steps.LANES) * shards
    except KeyError:  # an op of these names with other sizes
        flops = 0.0
    return f"{record.op}{precision} {sizes}".strip(), flops


def graph_of(device: Any, enqueue: Callable[[], object]) -> Any:
    """The captured graph."""
    from odyssey.engine.gpu.graph import Graph

    return Graph(device, enqueue)


def replay_times(
    device: Any, launches: list[Launch], replays: int
) -> tuple[list[list[float]], float]:
    """Microseconds of each launch in each replay, and of an event with nothing before it."""
    events = Events(device, len(launches) + 1 + EMPTY)

    def enqueue() -> None:
        for i, launch in enumerate(launches):
            events.record(i)
            launch.enqueue()
        for i in range(EMPTY + 1):
            events.record(len(launches) + i)

    graph = graph_of(device, enqueue)
    times: list[list[float]] = [[] for _ in launches]
    empty = []
    for _ in range(replays):
        graph.launch()
        device.synchronize()
        for i, of_launch in enumerate(times):
            of_launch.append(events.between(i))
        empty += [events.between(len(launches) + i) for i in range(EMPTY)]
    graph.close()
    return times, common.median(empty)


def graph_time(device: Any, launches: list[Launch], replays: int) -> float:
    """Microseconds of a replay of the launches without events: the median of the host's clock."""

    def enqueue() -> None:
        for launch in launches:
            launch.enqueue()

    graph = graph_of(device, enqueue)
    times = []
    for _ in range(replays + 1):
        begun = time.perf_counter_ns()
        graph.launch()
        device.synchronize()
        times.append(1e-3 * (time.perf_counter_ns() - begun))
    graph.close()
    return common.median(times[1:])


def rows_of(launches: list[Launch], times: list[list[float]]) -> list[dict[str, Any]]:
    """The launches with the same label together, those that take most time first."""
    rows: dict[str, dict[str, Any]] = {}
    for launch, of_launch in zip(launches, times, strict=True):
        row = rows.setdefault(
            launch.label, {"label": launch.label, "launches": 0, "us": 0.0, "flops": 0.0}
        )
        row["launches"] += 1
        row["us"] += common.median(of_launch)
        row["flops"] += launch.flops
    whole = sum(row["us"] for row in rows.values())
    for row in rows.values():
        flops = row.pop("flops")
        row["share"] = row["us"] / whole if whole else 0.0
        row["tflops"] = flops / row["us"] * 1e-6 if flops and row["us"] else None
    return sorted(rows.values(), key=lambda row: -row["us"])


def measure(options: Any) -> dict[str, Any]:
    """All facts of a step."""
    step, trainer, device = ready(options)
    launches = launches_of(trainer, step)
    times, empty = replay_times(device, launches, options.replays)
    whole = graph_time(device, launches, options.replays)
    rows = rows_of(launches, times)
    ends = []
    for _ in range(options.replays):
        begun = time.perf_counter_ns()
        step()
        ends.append(1e-3 * (time.perf_counter_ns() - begun))
    return {
        "launches": len(launches),
        "records": sum(launch.records for launch in launches),
        "sum_us": sum(row["us"] for row in rows),
        "graph_us": whole,
        "event_us": empty,
        "step_us": common.median(ends),
        "rows": rows,
        "in_order": [
            [launch.label, round(common.median(of_launch), 2)]
            for launch, of_launch in zip(launches, times, strict=True)
        ],
    }


def ready(options: Any) -> tuple[Callable[[], object], Any, Any]:
    """A step of odyssey that was taken twice, the trainer, and its device."""
    from odyssey import data

    x, y = models.samples(options.model, options.batch)
    dataset = data.arrays(x, y, **({} if options.model == "gpt" else {"classes": 10}))
    step, trainer, _ = steps.make_ours(options, options.batch, dataset)
    for _ in range(2):
        step()
    (worker,) = trainer.stepper.engine.team.workers
    return step, trainer, worker.gpu


def profile(options: Any) -> None:
    """Runs the first launch of each label that --profile names, between the driver's marks for a
    profiler.
    """
    from odyssey.core.cuda import driver

    step, trainer, device = ready(options)
    launches = {launch.label: launch for launch in reversed(launches_of(trainer, step))}
    missing = [label for label in options.profile if label not in launches]
    if missing:
        raise SystemExit(f"no launch is called {missing}; there are {list(launches)}")
    driver().call("cuProfilerStart")
    for label in options.profile:
        print(f"profiled: {label}", flush=True)
        launches[label].enqueue()
        device.synchronize()
    driver().call("cuProfilerStop")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--model", choices=("gpt", *models.IMAGES), default="gpt", help="which network"
    )
    parser.add_argument("--batch", type=int, default=8, help="samples")
    parser.add_argument(
        "--precision", choices=("fp32", "tf32", "bf16", "fp16"), default="bf16", help="of products"
    )
    parser.add_argument("--shard-size", type=int, help="samples of a shard, instead of the default")
    parser.add_argument("--replays", type=int, default=20, help="of the graph")
    parser.add_argument("--rows", type=int, default=25, help="printed")
    parser.add_argument(
        "--profile", nargs="+", metavar="LABEL", help="only run these launches, for a profiler"
    )
    options = parser.parse_args()
    if options.profile:
        profile(options)
        return
    facts = common.print_machine()
    result = measure(options)
    print(
        f"{options.model}, {options.precision}, batch {options.batch}: {result['launches']} "
        f"launches, {result['sum_us']:.0f} us in all, as a graph {result['graph_us']:.0f} us, a "
        f"whole step {result['step_us']:.0f} us, an event {result['event_us']:.2f} us"
    )
    lines = []
    for row in result["rows"][: options.rows]:
        speed = common.number(row["tflops"], 1)
        lines.append(
            [row["label"], row["launches"], f"{row['us']:.1f}", f"{100 * row['share']:.1f}", speed]
        )
    print(common.table(["launch", "launches", "us", "%", "TFLOP/s"], lines))
    settings = {
        name: getattr(options, name)
        for name in ("model", "batch", "precision", "shard_size", "replays")
    }
    common.write_json(options.json, "gpu_launches", facts, **settings, **result)


if __name__ == "__main__":
    sys.exit(main())
