"""One whole optimizer step (forward, backward, SGD with momentum) against PyTorch eager, per
batch size.

Ours: the next batch of a data.DataLoader over MNIST (uint8, shuffled) and
DistributedTrainer.train_step on it, so gathering, normalising and Python are inside. PyTorch:
zero_grad, forward, loss, backward, SGD step and loss.item() on float32 tensors that are already
normalised and in its layout, so gathering is not inside. Both run on the same number of threads
(with one: on one and the same core), in turns: a machine that drifts is unfair to neither. A time
is the median over all steps; a ratio is the median over the turns. "torch" is PyTorch as one writes
it; "tuned" has the channels-last memory format and the fused optimizer, the fastest eager settings
that were found; "compiled" is torch.compile of the plain one.

With --precision bf16 (or fp16) ours rounds the operands of its products, PyTorch runs under
torch.autocast, and "fp32" is our own float32 step in the same turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import nets

RATE, MOMENTUM = 0.001, 0.9  # a rate at which batches of one sample do not diverge
TOLERANCE = 1e-5  # of --check, relative to the largest element of a tensor

Step = Callable[[], object]


# --- the two sides --------------------------------------------------------------------------------


def endless(loader: Any) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    while True:
        yield from loader


def make_ours(options: Any, batch: int, precision: str, dataset: Any) -> tuple[Step, Any]:
    """A step of odyssey, and the model."""
    from odyssey import DistributedTrainer, data, nn, optim

    model = nn.models.build(options.model)
    trainer = DistributedTrainer(
        model,
        optim.SGD(lr=RATE, momentum=MOMENTUM),
        backend="local",
        threads=options.threads,
        shard_size=options.shard_size,
        precision=precision,
    )
    batches = endless(data.DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True))
    return lambda: trainer.train_step(next(batches)), model


def make_torch(name: str, batch: int, precision: str, dataset: Any, model: Any, kind: str) -> Step:
    """A step of PyTorch from the same initial weights; `kind` is torch, tuned or compiled. fp16
    scales the loss.
    """
    import numpy as np
    import torch

    net = nets.torch_model(name)
    net.load_state_dict({key: torch.from_numpy(value) for key, value in model.state_dict().items()})
    layout = torch.channels_last if kind == "tuned" else torch.contiguous_format
    net = net.to(memory_format=layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, fused=kind == "tuned")
    run = torch.compile(net) if kind == "compiled" else net
    held = [dataset.gather(np.arange(i * batch, (i + 1) * batch)) for i in range(8)]
    tensors = [
        (torch.from_numpy(x).to(memory_format=layout), torch.from_numpy(y).long()) for x, y in held
    ]
    turn = 0

    def step() -> float:
        nonlocal turn
        x, y = tensors[turn % len(tensors)]
        turn += 1
        optimizer.zero_grad()
        loss = net.loss(run(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

    def narrow_step() -> float:
        nonlocal turn
        x, y = tensors[turn % len(tensors)]
        turn += 1
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=narrow):
            loss = net.loss(run(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step if precision == "fp32" else narrow_step


# --- measuring ------------------------------------------------------------------------------------


def block(step: Step, steps: int) -> list[float]:
    """Seconds of each of `steps` steps, after a few that are not timed: the other side ran
    before.
    """
    for _ in range(max(2, min(steps // 10, 20))):
        step()
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - start) * 1e-9)
    return times


def block_length(step: Step, seconds: float) -> int:
    """How many steps take about so long."""
    for _ in range(5):
        step()
    times = block(step, 5)
    return max(5, round(seconds / common.median(times)))


def in_turns(
    sides: dict[str, Step], rounds: int, steps: int | None, seconds: float
) -> dict[str, list[list[float]]]:
    """Times of each side per round; the sides take turns."""
    lengths = {key: steps or block_length(step, seconds) for key, step in sides.items()}
    times: dict[str, list[list[float]]] = {key: [] for key in sides}
    for _ in range(rounds):
        for key, step in sides.items():
            times[key].append(block(step, lengths[key]))
    return times


def python_share(step: Step, steps: int) -> float:
    """Share of a step that is not spent in calls of the kernel library (median)."""
    from odyssey.core import native

    lib = native.library()
    inside = 0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            nonlocal inside
            start = time.perf_counter_ns()
            result = call(*arguments)
            inside += time.perf_counter_ns() - start
            return result

        return wrapper

    shares = []
    lib.step, lib.run = timed(lib.step), timed(lib.run)  # type: ignore[method-assign]
    try:
        for _ in range(max(20, steps)):
            inside = 0
            start = time.perf_counter_ns()
            step()
            whole = time.perf_counter_ns() - start
            shares.append(1 - inside / whole)
    finally:
        del lib.step, lib.run
    return common.median(shares[5:])


def measure(options: Any, batch: int, dataset: Any, kinds: list[str]) -> dict[str, Any]:
    """One row."""
    ours, model = make_ours(options, batch, options.precision, dataset)
    sides = {"ours": ours}
    for kind in kinds:
        if kind == "fp32":
            sides[kind], _ = make_ours(options, batch, "fp32", dataset)
        else:
            sides[kind] = make_torch(options.model, batch, options.precision, dataset, model, kind)
    times = in_turns(sides, options.rounds, options.steps, options.seconds)
    row: dict[str, Any] = {"batch": batch, "flops_per_sample": nets.flops(options.model, model)}
    for key, rounds in times.items():
        row[key] = {"seconds": common.spread([t for one in rounds for t in one])}
        row[key]["samples_per_second"] = batch / row[key]["seconds"]["median"]
        row[key]["gflops"] = row["flops_per_sample"] * row[key]["samples_per_second"] * 1e-9
        if key != "ours":
            ratios = [
                common.median(a) / common.median(b)
                for a, b in zip(rounds, times["ours"], strict=True)
            ]
            row[key]["ratio"] = common.spread(ratios)
    row["python_share"] = python_share(ours, len(times["ours"][0]))
    return row


def show(rows: list[dict[str, Any]], peak: float, kinds: list[str]) -> str:
    """The table."""
    headers = ["batch", "ours us", "samples/s", "GFLOP/s", "% of peak", "Python %"]
    for kind in kinds:
        headers += [f"{kind} us", "ratio"]
    lines = []
    for row in rows:
        ours = row["ours"]
        line = [row["batch"], common.number(1e6 * ours["seconds"]["median"], 1)]
        line += [common.number(ours["samples_per_second"]), common.number(ours["gflops"], 1)]
        line += [
            common.number(100 * ours["gflops"] / peak, 1),
            common.number(100 * row["python_share"], 1),
        ]
        for kind in kinds:
            line += [common.number(1e6 * row[kind]["seconds"]["median"], 1)]
            line += [common.number(row[kind]["ratio"]["median"], 2)]
        lines.append(line)
    return common.table(headers, lines)


# --- the same numbers? ----------------------------------------------------------------------------


def check(batch: int, dataset: Any) -> dict[str, Any]:
    """One LeNet-5 step against PyTorch's on the same weights and data, in float32 and float64."""
    import numpy as np
    import torch

    from odyssey import DistributedTrainer, data, nn, optim

    model = nn.models.build("lenet5", seed=1)
    before = model.state_dict()
    optimizer = optim.SGD(lr=0.05, momentum=MOMENTUM)
    trainer = DistributedTrainer(model, optimizer, backend="local", threads=1)
    given = next(iter(data.DataLoader(dataset, batch_size=batch, shuffle=True, seed=1)))
    images, labels = given
    loss_sum, _ = trainer.train_step(given)
    # The momentum of a first step is the mean gradient, to the bit.
    gradients = {key: trainer.arena.view(optimizer.state["momentum"], key).copy() for key in before}
    ours = {"loss": np.array(loss_sum / batch)}
    ours |= {f"gradient {key}": value for key, value in gradients.items()}
    ours |= {f"weights {key}": value for key, value in model.state_dict().items()}

    def reference(dtype: Any) -> dict[str, Any]:
        net = nets.torch_model("lenet5").to(dtype)
        net.load_state_dict(
            {key: torch.from_numpy(value).to(dtype) for key, value in before.items()}
        )
        sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=MOMENTUM)
        loss = net.loss(net(torch.from_numpy(images).to(dtype)), torch.from_numpy(labels).long())
        loss.backward()
        found = {"loss": loss.detach().numpy()}
        found |= {f"gradient {key}": p.grad.numpy().copy() for key, p in net.named_parameters()}
        sgd.step()
        return found | {f"weights {key}": p.detach().numpy() for key, p in net.named_parameters()}

    single, double = reference(torch.float32), reference(torch.float64)
    rows = {}
    for key, mine in ours.items():
        rows[key] = {
            "ours_to_double": worst(mine, double[key]),
            "torch_to_double": worst(single[key], double[key]),
            "ours_to_single": worst(mine, single[key]),
        }
    return rows


def worst(value: Any, truth: Any) -> dict[str, float]:
    """The largest error relative to the largest element, and relative to the element itself
    where that is not tiny.
    """
    import numpy as np

    truth = np.asarray(truth, np.float64)
    error = np.abs(np.asarray(value, np.float64) - truth)
    size = np.abs(truth)
    top = float(size.max())
    large = size > 1e-3 * top
    return {
        "of_max": float(error.max()) / top,
        "of_element": float((error[large] / size[large]).max()),
    }


def run_check(batches: list[int], dataset: Any) -> tuple[dict[str, Any], bool]:
    """Prints a table per batch size; says whether all are within the tolerance."""
    results, good = {}, True
    for batch in batches:
        rows = results[str(batch)] = check(batch, dataset)
        print(f"\nLeNet-5, one step of {batch} samples: worst error of an element")
        headers = [
            "tensor",
            "ours-f64 / max",
            "torch-f64 / max",
            "ours-torch / max",
            "ours-f64 / own",
            "torch-f64 / own",
        ]
        lines = []
        for key, row in rows.items():
            double, torch, single = (
                row["ours_to_double"],
                row["torch_to_double"],
                row["ours_to_single"],
            )
            numbers = (
                double["of_max"],
                torch["of_max"],
                single["of_max"],
                double["of_element"],
                torch["of_element"],
            )
            lines.append([key, *(f"{n:.1e}" for n in numbers)])
            good = good and max(double["of_max"], single["of_max"]) <= TOLERANCE
        print(common.table(headers, lines))
    print("own: relative to the element itself, of elements above a thousandth of the largest")
    print(f"{'ok' if good else 'FAILED'}: ours within {TOLERANCE:g} of the largest element")
    return results, good


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 16, 64, 256, 1024],
        metavar="N",
        help="samples",
    )
    parser.add_argument("--threads", type=int, default=1, help="of both sides")
    parser.add_argument("--model", choices=nets.MODELS, default="lenet5", help="the network")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of both sides"
    )
    parser.add_argument(
        "--shard-size", type=int, help="samples of a shard of ours, instead of the default"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a turn")
    parser.add_argument("--steps", type=int, help="steps of a turn, instead of its length")
    parser.add_argument(
        "--core", type=int, help="the core for one thread; the last one if not given"
    )
    parser.add_argument("--compiled", action="store_true", help="torch.compile as well")
    parser.add_argument(
        "--check", action="store_true", help="compare the numbers of a LeNet-5 step first"
    )
    options = parser.parse_args()
    facts = common.print_machine()
    torch = common.have_torch()
    core = common.pin(options.core) if options.threads == 1 else None
    if torch:
        import torch as library

        library.set_num_threads(options.threads)
        library.set_num_interop_threads(1)
    from odyssey import data

    dataset = data.load("mnist", train=True)
    checked, good = None, True
    if options.check:
        if not torch:
            print("--check needs PyTorch", file=sys.stderr)
            return 1
        checked, good = run_check([1, 64, 100], dataset)
    peaks = [common.peak(options.threads)]
    kinds = ["fp32"] if options.precision != "fp32" else []
    kinds += ["torch", "tuned", *["compiled"] * options.compiled] if torch else []
    rows = [measure(options, batch, dataset, kinds) for batch in options.batches]
    peaks.append(common.peak(options.threads))
    peak = common.peak_of_products(peaks, options.precision)
    where = f"core {core}" if core is not None else f"{options.threads} threads"
    print(
        f"\n{options.model}, {options.precision}, {where}, "
        f"{rows[0]['flops_per_sample'] / 1e6:.2f} MFLOP per sample; "
        f"peak {peak:.0f} GFLOP/s"
    )
    print(show(rows, peak, kinds))
    if kinds:
        print(
            "ratio: time of the other / ours. PyTorch's input is ready float32; ours is gathered "
            "from uint8 in it."
        )
    settings = {
        k: getattr(options, k)
        for k in ("model", "precision", "threads", "shard_size", "rounds", "seconds", "steps")
    }
    common.write_json(
        options.json,
        "step",
        facts,
        options=settings,
        core=core,
        peak_gflops=peak,
        peaks=peaks,
        rows=rows,
        check=checked,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
