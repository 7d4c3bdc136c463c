"""One whole optimizer step on a GPU against PyTorch on the same GPU: eager, compiled, and as a
CUDA graph.

Ours: the next batch of a data.DataLoader over MNIST (of ResNet-18 and GPT: of random samples),
which lies on the device as it is stored, and DistributedTrainer.train_step on it: numbers of the
samples, gathering, normalising, forward, backward, sums of shards, SGD with momentum (GPT: AdamW),
and the loss on the host. PyTorch: the same from a data set that lies on the device normalised:
index_select, zero_grad, forward, loss, backward, the optimizer's step (fused), and loss.item().
"compiled" is torch.compile of the whole step's forward and loss; "graph" is the compiled step,
gathering and optimizer included, captured once as a CUDA graph and replayed; only the indices are
copied in. TF32 is off unless
--precision says so.

The sides take turns in one process. A time is the median over all steps of a host clock around a
step that ends with the loss on the host; a ratio is the median over the turns of theirs to ours.
"host us" is what our Python and Mojo take to enqueue a step. With --no-torch (or without PyTorch,
or on an emulated GPU) only ours is timed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import models
import nets
from step import Step, block, endless

RATE, MOMENTUM = 0.001, 0.9
LANES = 16  # of a group, all of which hold a sample or token of 16 samples
KINDS = ("eager", "compiled", "graph")
# networks of benchmarks/models.py, on its random samples, and batches
LARGE = {"resnet18": "64,512", "gpt": "8,64"}


def make_ours(options: Any, batch: int, dataset: Any) -> tuple[Step, Any, Any]:
    """A step of odyssey, the trainer and the model."""
    from odyssey import DistributedTrainer, data, nn, optim

    if options.model in nets.MODELS:
        model = nn.models.build(options.model)
    else:
        model = models.our_model(options.model)
    optimizer: Any = optim.SGD(lr=RATE, momentum=MOMENTUM)
    if options.model == "gpt":
        optimizer = optim.AdamW(lr=1e-4, weight_decay=0.1)
        optimizer.undecayed = optim.vectors
    trainer = DistributedTrainer(
        model,
        optimizer,
        backend="local",
        device="gpu",
        shard_size=options.shard_size,
        precision=options.precision,
    )
    batches = endless(data.DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True))
    return lambda: trainer.train_step(next(batches)), trainer, model


def make_torch(options: Any, batch: int, dataset: Any, model: Any, kind: str) -> Step:
    """A step of PyTorch from the same initial weights."""
    import numpy as np
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        options.precision == "tf32"
    )
    device = torch.device("cuda")
    gpt = options.model == "gpt"
    net: Any = (
        nets.torch_gpt(models.VOCABULARY, models.CONTEXT)
        if gpt
        else nets.torch_model(options.model)
    )
    net = net.to(device)
    if options.model in nets.MODELS:
        net.load_state_dict(
            {key: torch.from_numpy(value) for key, value in model.state_dict().items()}
        )
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)
    if gpt:
        groups = [
            {"params": [p for p in net.parameters() if (p.ndim > 1) == m], "weight_decay": 0.1 * m}
            for m in (1, 0)
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True, capturable=True)
    x, y = dataset.gather(np.arange(len(dataset)))
    images, labels = torch.from_numpy(x).to(device), torch.from_numpy(y).long().to(device)
    loss = getattr(
        net, "loss", lambda a, b: torch.nn.functional.cross_entropy(a.flatten(0, -2), b.flatten())
    )
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)

    def loss_of(index: Any) -> Any:
        with torch.autocast("cuda", dtype=narrow, enabled=narrow is not None):
            return loss(net(images.index_select(0, index)), labels.index_select(0, index))

    forward = loss_of if kind == "eager" else torch.compile(loss_of)
    rng = np.random.default_rng(0)
    indices = [
        torch.from_numpy(rng.permutation(len(dataset))[:batch]).pin_memory() for _ in range(8)
    ]
    static = indices[0].to(device)
    turn = 0

    def body() -> Any:
        optimizer.zero_grad(set_to_none=True)  # also captured so, as PyTorch's own recipe is
        loss = forward(static)
        loss.backward()
        optimizer.step()
        return loss

    def bring() -> None:
        nonlocal turn
        static.copy_(indices[turn % len(indices)], non_blocking=True)
        turn += 1

    if kind != "graph":

        def step() -> float:
            bring()
            return body().item()

        return step

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = body()

    def replay() -> float:
        bring()
        graph.replay()
        return loss.item()

    replay.reads = body  # type: ignore[attr-defined]  # the graph reads memory of what only `body` refers to
    return replay


def torch_on_gpu() -> bool:
    """Whether PyTorch is here and can use the GPU; says so on stderr if not."""
    if not common.have_torch():
        return False
    import torch

    if not torch.cuda.is_available():
        print(
            f"PyTorch {torch.__version__} cannot use the GPU: only ours is timed", file=sys.stderr
        )
    return torch.cuda.is_available()


def peaks(options: Any) -> dict[str, float]:
    """What PyTorch reaches on this GPU: TFLOP/s of a large product in this precision, GB/s of a
    large copy.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision, torch.float32)
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    big = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    other = torch.empty_like(big)

    def seconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(8):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return common.median(times[3:])

    product = seconds(lambda: a @ a)
    copy = seconds(lambda: other.copy_(big))
    return {"tflops": 2 * 8192**3 / product * 1e-12, "gb_per_second": 2 * 2**30 / copy * 1e-9}


def host_time(trainer: Any, step: Step, steps: int) -> float:
    """Median seconds until a step of ours is enqueued, before it is waited for."""
    from odyssey.engine.gpu.runner import GpuRunner

    fetch, enqueued = GpuRunner.fetch, []
    begun = 0

    def noted(self: Any, result: int) -> Any:
        enqueued.append(time.perf_counter_ns() - begun)
        return fetch(self, result)

    GpuRunner.fetch = noted  # type: ignore[method-assign]
    try:
        for _ in range(steps):
            begun = time.perf_counter_ns()
            step()
    finally:
        GpuRunner.fetch = fetch  # type: ignore[method-assign]
    return common.median(enqueued) * 1e-9


def flops(name: str, model: Any) -> float:
    """Float operations of one sample, forward and backward: those of products (as
    benchmarks/models.py counts).
    """
    if name in nets.MODELS:
        return nets.flops(name, model)
    _, trainer, dataset = models.ours(name, LANES, 1, "fp32", LANES)
    from odyssey.core import native

    table = native.library().ops
    records = trainer.stepper.engine.record(LANES, dataset.form)
    return (
        sum(models.operations(record, table[record.op].sizes, LANES) for record in records) / LANES
    )


def measure(options: Any, batch: int, dataset: Any, kinds: list[str]) -> dict[str, Any]:
    """One row."""
    ours, trainer, model = make_ours(options, batch, dataset)
    ours()
    sides: dict[str, Step] = {"ours": ours}
    lengths = {}
    for kind in ["ours", *kinds]:
        try:
            if kind != "ours":
                sides[kind] = make_torch(options, batch, dataset, model, kind)
            times = block(sides[kind], 3)
        except Exception as problem:
            if kind == "ours":
                raise
            # one form of PyTorch that does not work here, say without a C compiler, leaves the
            # others
            print(
                f"{kind}, batch {batch}: {type(problem).__name__}: {str(problem)[:600]}",
                file=sys.stderr,
            )
            sides.pop(kind, None)
            continue
        lengths[kind] = options.steps or max(
            5, min(2000, round(options.seconds / common.median(times)))
        )
    rounds: dict[str, list[list[float]]] = {key: [] for key in sides}
    for _ in range(options.rounds):
        for key, step in sides.items():
            rounds[key].append(block(step, lengths[key]))
    row: dict[str, Any] = {"batch": batch, "flops_per_sample": flops(options.model, model)}
    for key, turns in rounds.items():
        row[key] = {"seconds": common.spread([t for one in turns for t in one])}
        row[key]["tflops"] = row["flops_per_sample"] * batch / row[key]["seconds"]["median"] * 1e-12
        if key != "ours":
            ratios = [
                common.median(a) / common.median(b)
                for a, b in zip(turns, rounds["ours"], strict=True)
            ]
            row[key]["ratio"] = common.spread(ratios)
    row["host_seconds"] = host_time(trainer, ours, min(lengths["ours"], 200))
    return row


def show(rows: list[dict[str, Any]], peak: dict[str, float], kinds: list[str]) -> str:
    """The table."""
    headers = ["batch", "ours us", "host us", "TFLOP/s", "% of peak"]
    for kind in kinds:
        headers += [f"{kind} us", "ratio"]
    lines = []
    for row in rows:
        ours = row["ours"]
        share = 100 * ours["tflops"] / peak["tflops"] if peak else None
        line = [row["batch"], common.number(1e6 * ours["seconds"]["median"], 1)]
        line += [common.number(1e6 * row["host_seconds"], 1), common.number(ours["tflops"], 2)]
        line += [common.number(share, 1)]
        for kind in kinds:
            theirs = row.get(kind)
            line += [common.number(1e6 * theirs["seconds"]["median"], 1) if theirs else None]
            line += [common.number(theirs["ratio"]["median"], 2) if theirs else None]
        lines.append(line)
    return common.table(headers, lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--model", choices=(*nets.MODELS, *LARGE), default="lenet5", help="which network"
    )
    parser.add_argument(
        "--batches", help="batch sizes (default: 64,1024,8192; resnet18 64,512; gpt 8,64)"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "tf32", "bf16", "fp16"), default="fp32", help="of products"
    )
    parser.add_argument(
        "--shard-size", type=int, help="samples of a shard of ours, instead of the default"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn")
    parser.add_argument("--steps", type=int, help="of one turn instead of --seconds")
    parser.add_argument("--kinds", default=",".join(KINDS), help="forms of PyTorch")
    parser.add_argument("--no-torch", action="store_true", help="only ours")
    options = parser.parse_args()
    batches = [
        int(word)
        for word in (options.batches or LARGE.get(options.model, "64,1024,8192")).split(",")
    ]

    from odyssey import data
    from odyssey.core.gpu_native import Gpu

    emulated = "ODYSSEY_EMULATED_GPUS" in os.environ
    kinds = [] if options.no_torch or emulated or not torch_on_gpu() else options.kinds.split(",")
    name = f"{Gpu(0).name}{' (emulated: times mean nothing)' if emulated else ''}"
    facts = common.print_machine(gpu=name)
    if options.model in LARGE:
        x, y = models.samples(options.model, max(batches))
        dataset = data.arrays(x, y, **({} if options.model == "gpt" else {"classes": 10}))
    else:
        dataset = data.load("mnist", train=True)
    peak = peaks(options) if kinds else {}
    if peak:
        print(
            f"peak of PyTorch's product {peak['tflops']:.1f} TFLOP/s, copy "
            f"{peak['gb_per_second']:.0f} GB/s"
        )
    rows = []
    for batch in batches:
        rows.append(measure(options, batch, dataset, kinds))
        print(
            f"batch {batch}: {1e6 * rows[-1]['ours']['seconds']['median']:.0f} us", file=sys.stderr
        )
        common.write_json(  # after each row: what comes next may be stopped
            options.json,
            "gpu",
            facts,
            model=options.model,
            precision=options.precision,
            peak=peak,
            rows=rows,
        )
    print(f"{options.model}, {options.precision}, one step")
    print(show(rows, peak, kinds))


if __name__ == "__main__":
    main()
