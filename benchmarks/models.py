"""One whole training step of GPT, ResNet-18, LeNet-5 and MLP: ours against the fastest of
PyTorch's.

A case is MODEL:BATCH, with each number of threads and each precision. The sides take turns in one
process, which has one core for one thread: ours, at its defaults unless --shard-size is given,
ResNet-18 in fp32 also with direct convolutions only; PyTorch eager, with the channels-last memory
format (images), and under torch.compile if there is a C++ compiler; all with the fused optimizer,
on ready tensors, and malloc keeps large blocks (MALLOC_*). bf16 is torch.autocast there. "ratio" is
the time of PyTorch's fastest side / ours, the median over turns; "% of peak" is of the FMA peak
(bf16: of products of pairs, where there are such; AMX's tiles can be above it) that the same
process measured before and after, operations being those of linear layers, convolutions as defined
(however they are computed) and causal attention, with scores computed twice in the backward pass.
"activations": of ours the workspace of all threads, scratch memory included; of PyTorch what
autograd keeps for the backward pass, and the most that a step has at one time, by its profiler's
memory events: all that the step allocates but the gradients of parameters. --ops prints where our
step's time goes, record by record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import common
import nets
from step import in_turns

CASES = (
    "gpt:8 gpt:16 resnet18:32 resnet18:64 resnet18:128 lenet5:1 lenet5:64 lenet5:256 mlp:256"
).split()
IMAGES = {"resnet18": (3, 32, 32), "lenet5": (1, 28, 28), "mlp": (1, 28, 28)}
VOCABULARY, CONTEXT = 76, 256  # of gpt
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
Step = Callable[[], object]


def samples(name: str, batch: int) -> tuple[Any, Any]:
    """Inputs and targets of four batches."""
    import numpy as np

    rng, n = np.random.default_rng(0), 4 * batch
    if name == "gpt":
        ids = rng.integers(0, VOCABULARY, (n, CONTEXT + 1)).astype(np.int32)
        return ids[:, :-1].copy(), ids[:, 1:].copy()
    return rng.standard_normal((n, *IMAGES[name]), np.float32), rng.integers(0, 10, n).astype(
        np.int32
    )


def our_model(name: str) -> Any:
    from odyssey import nn

    if name == "gpt":
        return nn.models.build("gpt", vocab_size=VOCABULARY, context=CONTEXT)
    return nn.models.build(name, sample_shape=IMAGES[name])


def ours(
    name: str,
    batch: int,
    threads: int,
    precision: str,
    shard_size: int | None,
    algorithm: str = "auto",
) -> tuple[Step, Any, Any]:
    """A step of odyssey, its trainer, and its data set."""
    from odyssey import DistributedTrainer, data, optim

    x, y = samples(name, batch)
    dataset = data.arrays(x, y, **({} if name == "gpt" else {"classes": 10}))
    optimizer = (
        optim.AdamW(lr=1e-4, weight_decay=0.1)
        if name == "gpt"
        else optim.SGD(lr=1e-3, momentum=0.9)
    )
    if name == "gpt":
        optimizer.undecayed = optim.vectors
    model = our_model(name)
    trainer = DistributedTrainer(
        model,
        optimizer,
        threads=threads,
        precision=precision,
        conv_algorithm=algorithm,
        shard_size=shard_size,
        backend="local",
        metrics=[],
    )

    def batches() -> Any:
        while True:
            yield from data.DataLoader(dataset, batch_size=batch)

    turn = batches()
    return lambda: trainer.train_step(next(turn)), trainer, dataset


def torch_side(
    name: str, batch: int, precision: str, kind: str
) -> tuple[Step, Callable[[], dict[str, int]]]:
    """A step of PyTorch, and a function that gives the bytes that autograd keeps and the most
    that a step allocates.
    """
    import torch

    net = nets.torch_gpt(VOCABULARY, CONTEXT) if name == "gpt" else nets.torch_model(name)
    layout = torch.channels_last if kind == "channels-last" else torch.contiguous_format
    x, y = samples(name, batch)
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    if name == "gpt":
        x = x.long()
        groups = [
            {"params": [p for p in net.parameters() if (p.ndim > 1) == m], "weight_decay": 0.1 * m}
            for m in (1, 0)
        ]
        optimizer: Any = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    else:
        net = net.to(memory_format=layout)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)
        x = x.contiguous(memory_format=layout)
    held = list(zip(x.split(batch), y.split(batch), strict=True))
    run = torch.compile(net) if kind == "compiled" else net
    turn = 0

    def forward() -> Any:
        nonlocal turn
        a, b = held[turn % len(held)]
        turn += 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            return torch.nn.functional.cross_entropy(run(a).flatten(0, -2), b.flatten())

    def step() -> float:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        optimizer.step()
        return loss.item()

    def memory() -> dict[str, int]:
        own, found = {p.untyped_storage().data_ptr() for p in net.parameters()}, {}

        def note(t: Any) -> Any:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss = forward()
        loss.backward()
        return {"kept": sum(found.values()), "peak": allocated()}

    def allocated() -> int:
        """The most bytes of a step at one time, without the gradients of parameters that it
        leaves.
        """
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            step()
        left = {p.grad.untyped_storage().data_ptr() for p in net.parameters() if p.grad is not None}
        events, todo = [], list(profile.profiler.kineto_results.experimental_event_tree())
        while todo:
            event = todo.pop()
            todo += event.children
            if event.tag == torch._C._profiler._EventType.Allocation:
                events.append(
                    (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
                )
        events.sort()
        final = {at: i for i, (_, at, size) in enumerate(events) if size > 0}
        held, now, most = {}, 0, 0
        for i, (_, at, size) in enumerate(events):
            if size > 0 and not (at in left and final[at] == i):
                held[at] = size
            now += size if at in held and size > 0 else -held.pop(at, 0)
            most = max(most, now)
        return most

    return step, memory


def operations(record: Any, sizes: tuple[str, ...], lanes: float) -> float:
    """Float operations of a record of a convolution, a linear layer or attention; of others 0.

    lanes: of a group, on average, that hold a sample or token.
    """
    given = dict(zip(sizes, record.args[len(record.args) - len(sizes) :], strict=False))
    if record.op.startswith("linear_"):
        return 2.0 * lanes * given["G"] * given["I"] * given["O"]
    if record.op.startswith(("conv2d_", "winograd_")):
        p, q = ((given[n] - given[k]) // given["S"] + 1 for n, k in (("H", "R"), ("W", "T")))
        return 2.0 * lanes * given["G"] * given["C"] * given["K"] * given["R"] * given["T"] * p * q
    if record.op.startswith("attention_"):
        t, s, past = given["T"], given["S"], given["past"]
        seen = sum(min(s, i + 1 + past) for i in range(t))
        return (
            (4.0 if record.op.endswith("forward") else 10.0)
            * given["N"]
            * given["H"]
            * given["D"]
            * seen
        )
    return 0.0


def our_ops(trainer: Any, dataset: Any, size: int) -> dict[str, dict[str, float]]:
    """By op of one shard of `size` samples: seconds of its records one by one (best of five),
    records, operations.
    """
    from odyssey.core import native
    from odyssey.core.tensor import SMALL_BATCH
    from odyssey.parallel import costs

    table = native.library().ops
    records = trainer.stepper.engine.record(size, dataset.form)
    n = size * (CONTEXT if dataset.labels.ndim > 1 else 1)
    lanes = 1.0 if size <= SMALL_BATCH and n == size else n / -(-n // 16)
    found: dict[str, dict[str, float]] = {}
    for record, seconds in zip(records, costs.seconds(records, trainer.arena, size), strict=True):
        row = found.setdefault(record.op, {"seconds": 0.0, "records": 0, "operations": 0.0})
        row["seconds"] += float(seconds)
        row["records"] += 1
        row["operations"] += operations(record, table[record.op].sizes, lanes)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One case: what a process of its own prints as JSON."""
    name, batch = options.case.split(":")[0], int(options.case.split(":")[1])
    threads, precision = options.threads[0], options.precisions[0]
    if threads == 1:
        common.pin()
    step, trainer, dataset = ours(name, batch, threads, precision, options.shard_size)
    sides: dict[str, Step] = {"ours": step}
    if name == "resnet18" and precision == "fp32":
        sides["direct"] = ours(name, batch, threads, precision, options.shard_size, "direct")[0]
    theirs: dict[str, int] = {}
    missing = ""
    if common.have_torch():
        import torch

        torch.set_num_threads(threads)
        for kind in options.sides:
            if (kind == "channels-last" and name not in ("resnet18", "lenet5")) or (
                kind == "compiled" and not shutil.which("g++")
            ):
                continue
            made, memory = torch_side(name, batch, precision, kind)
            try:
                made()
                theirs |= memory() if kind == "eager" else {}
            except Exception as problem:  # a compiler that cannot
                missing = f"{kind}: {type(problem).__name__}"
                continue
            sides[kind] = made
    peaks = [common.peak(threads)]
    times = in_turns(sides, options.rounds, options.steps, options.seconds)
    peaks.append(common.peak(threads))
    peak = common.peak_of_products(peaks, precision)
    size = trainer.stepper.engine.shard_size_of(batch)
    by_op = our_ops(trainer, dataset, size)
    flops = sum(row["operations"] for row in by_op.values()) * batch / size
    row: dict[str, Any] = {
        "case": options.case,
        "threads": threads,
        "precision": precision,
        "peak": peak,
    }
    row |= {"operations": flops, "missing": missing, "ops": by_op, "shard_size": size}
    row["seconds"] = {
        key: common.median([t for one in found for t in one]) for key, found in times.items()
    }
    row["share"] = {key: flops / seconds * 1e-9 / peak for key, seconds in row["seconds"].items()}
    row["activations"] = {
        "ours": trainer.memory()["activations"],
        "kept": theirs.get("kept"),
        "peak": theirs.get("peak"),
    }
    others = {
        key: seconds for key, seconds in row["seconds"].items() if key not in ("ours", "direct")
    }
    if others:
        row["fastest"] = min(others, key=others.__getitem__)
        for side in sides.keys() - others.keys():
            turns = zip(times[row["fastest"]], times[side], strict=True)
            row[side] = common.spread([common.median(a) / common.median(b) for a, b in turns])
    return row


def show(rows: list[dict[str, Any]], kinds: list[str]) -> str:
    """A line per case."""
    headers = [
        "case",
        "threads",
        "",
        "ours ms",
        "% of peak",
        "direct ms",
        *(f"{kind} ms" for kind in kinds),
    ]
    headers += ["ratio", "direct's", "% of peak"]
    shown = ("direct", *kinds)
    lines = []
    for row in rows:
        line = [
            row["case"],
            row["threads"],
            row["precision"],
            common.number(1e3 * row["seconds"]["ours"], 2),
        ]
        line += [common.number(100 * row["share"]["ours"], 1)]
        line += [
            common.number(1e3 * row["seconds"][k], 2) if k in row["seconds"] else None
            for k in shown
        ]
        fastest = row.get("fastest")
        line += [
            common.number(row[k]["median"], 2) if k in row else None for k in ("ours", "direct")
        ]
        line += [common.number(100 * row["share"][fastest], 1)] if fastest else []
        memory = (row["activations"][key] for key in ("ours", "kept", "peak"))
        lines.append(
            [
                *line,
                *[None] * (len(headers) - len(line)),
                *(m and common.number(m / 2**20) for m in memory),
            ]
        )
    return common.table([*headers, "activations MiB", "PyTorch keeps", "its peak"], lines)


def show_ops(row: dict[str, Any]) -> str:
    """Where the time of a shard goes, ops of at least half a percent."""
    whole, peak = sum(op["seconds"] for op in row["ops"].values()), row["peak"] / row["threads"]
    lines = []
    for name, op in sorted(row["ops"].items(), key=lambda item: -item[1]["seconds"]):
        if op["seconds"] < 0.005 * whole:
            continue
        speed = op["operations"] / op["seconds"] * 1e-9
        line = [name, int(op["records"]), common.number(1e3 * op["seconds"], 2)]
        line += [common.number(100 * op["seconds"] / whole, 1)]
        lines.append(
            [
                *line,
                *(
                    (common.number(speed, 0), common.number(100 * speed / peak, 0))
                    if speed
                    else (None, None)
                ),
            ]
        )
    headers = ["op", "records", "ms", "% of time", "GFLOP/s", "% of peak"]
    title = (
        f"\n{row['case']}, {row['precision']}, a shard of {row['shard_size']} on one thread: "
        f"{1e3 * whole:.1f} ms"
    )
    return f"{title}\n{common.table(headers, lines)}"


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        metavar="MODEL:BATCH",
        help="gpt, resnet18, lenet5, mlp",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of both sides")
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=("fp32", "bf16"),
        default=["fp32", "bf16"],
        help="products",
    )
    kinds = ("eager", "channels-last", "compiled")
    parser.add_argument("--sides", nargs="+", choices=kinds, default=list(kinds), help="of PyTorch")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    parser.add_argument("--steps", type=int, help="steps of a turn, instead of its length")
    parser.add_argument(
        "--shard-size", type=int, help="samples of a shard of ours, instead of the default"
    )
    parser.add_argument("--ops", action="store_true", help="print the time of our ops as well")
    parser.add_argument("--case", help=common.INTERNAL)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options)))
        return 0
    facts, rows = common.print_machine(), []
    for case in options.cases:
        for threads in options.threads:
            for precision in options.precisions:
                words = [
                    "--case",
                    case,
                    "--threads",
                    str(threads),
                    "--precisions",
                    precision,
                    "--sides",
                    *options.sides,
                ]
                words += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
                words += ["--steps", str(options.steps)] if options.steps else []
                words += ["--shard-size", str(options.shard_size)] if options.shard_size else []
                set_before = {"OMP_NUM_THREADS": str(threads), **TUNED, **os.environ}
                done = subprocess.run(
                    [sys.executable, __file__, *words],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=set_before,
                )
                if done.returncode:
                    print(
                        f"{case}, {threads} threads, {precision}: exit code {done.returncode}",
                        file=sys.stderr,
                    )
                    return 1
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                asked = {
                    k: getattr(options, k)
                    for k in ("rounds", "seconds", "steps", "sides", "shard_size")
                }
                common.write_json(options.json, "models", facts, options=asked, rows=rows)
                ratio = rows[-1].get("ours", {}).get("median")
                print(
                    f"{case}, {threads} threads, {precision}: {ratio or 'done'}",
                    file=sys.stderr,
                    flush=True,
                )
    print(show(rows, options.sides))
    for row in rows:
        if options.ops and row["threads"] == min(options.threads):
            print(show_ops(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
