"""Curves of ResNet-18 by both ways to compute convolutions, direct and Winograd's: does a
training see the difference?

Pairs of trainings from the same weights, the same samples in the same order, one thread, float32;
Fashion-MNIST. Loss and accuracy of held-out pictures are measured after so many steps. Winograd's
algorithm is the default (docs/kernels.md), so its losses must be no worse: at each of them, the
mean loss may exceed that of direct convolutions by at most the standard deviation of direct's
losses between seeds, and the mean accuracy may be at most half a point lower. A line of JSON per
training is appended to a file, so that a run that was cut short goes on; `--torch` adds PyTorch's
curve of each seed, from the same weights.

    python benchmarks/convolution_curves.py --seeds 6 --output curves.jsonl [--torch] [--data-dir
    DIR] [--size 16]

A training of 2,000 steps on pictures of 28 x 28 takes some 30 minutes of a core. On 16 x 16, a
third of that, Winograd's algorithm has the layers of 64 and 128 channels; the others are too small
for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import common
import nets

MARKS = (500, 1000, 2000)
RATE, MOMENTUM, DECAY, HELD_OUT = 0.05, 0.9, 5e-4, 2000


def pictures(size: int, folder: str | None) -> list[Any]:
    """Fashion-MNIST, to train with and held out; pictures of 16 x 16 are means of 2 x 2 pixels
    in a frame of zeros.
    """
    import numpy as np

    from odyssey import data

    found = []
    for part in (True, False):
        whole = data.load("fashion-mnist", train=part, data_dir=folder)
        if size < 28:
            x, y = whole.gather(np.arange(len(whole)))
            x = x.reshape(-1, 1, 14, 2, 14, 2).mean((3, 5), dtype=np.float32)
            x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
            whole = data.arrays(x, y, classes=10)
        found.append(whole)
    return found


def ours(
    seed: int, algorithm: str, size: int, folder: str | None, marks: tuple[int, ...], batch: int
) -> list[tuple[int, float, float]]:
    """(steps, test loss, test accuracy in %) of a training with odyssey."""
    from odyssey import DistributedTrainer, callbacks, data, nn, optim

    model = nn.models.build("resnet18", seed=seed, sample_shape=(1, size, size), classes=10)
    trainer = DistributedTrainer(
        model,
        optim.SGD(lr=RATE, momentum=MOMENTUM, weight_decay=DECAY),
        schedule=optim.cosine(marks[-1]),
        conv_algorithm=algorithm,
        threads=1,
        backend="local",
    )
    train, test = pictures(size, folder)
    held, curve = data.DataLoader(test.take(HELD_OUT), batch_size=250), []

    def look(context: callbacks.Context) -> None:
        if trainer.steps in marks:
            found = trainer.evaluate(held)
            curve.append((trainer.steps, found.loss, 100 * found.accuracy))

    loader = data.DataLoader(train, batch_size=batch, shuffle=True, seed=seed)
    listener = callbacks.LambdaCallback(on_step_end=look)
    trainer.fit(loader, epochs=9, steps=marks[-1], callbacks=[listener], verbose=False)
    return curve


def torchs(
    seed: int, size: int, folder: str | None, marks: tuple[int, ...], batch: int
) -> list[tuple[int, float, float]]:
    """The same of PyTorch's ResNet-18, from odyssey's initial weights and with its samples."""
    import numpy as np
    import torch

    from odyssey import data, nn, optim

    torch.set_num_threads(1)
    model = nn.models.build("resnet18", seed=seed, sample_shape=(1, size, size), classes=10)
    net = nets.torch_resnet18(1, 10)
    net.load_state_dict(
        {k: torch.from_numpy(np.array(v)) for k, v in model.state_dict().items()}, strict=False
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    rate = optim.cosine(marks[-1])
    train, test = pictures(size, folder)
    loader, curve, step = data.DataLoader(train, batch_size=batch, shuffle=True, seed=seed), [], 0
    for epoch in range(9):
        loader.set_epoch(epoch)
        for x, y in loader:
            if step == marks[-1]:
                return curve
            for group in optimizer.param_groups:
                group["lr"] = RATE * rate(step)
            optimizer.zero_grad()
            x, y = (torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y))
            torch.nn.functional.cross_entropy(net(x.float()), y.long()).backward()
            optimizer.step()
            step += 1
            if step in marks:
                net.eval()
                x, y = test.gather(np.arange(HELD_OUT))
                x, y = torch.from_numpy(np.ascontiguousarray(x)).float(), torch.from_numpy(y).long()
                with torch.no_grad():
                    out = torch.cat([net(part) for part in x.split(250)])
                loss = torch.nn.functional.cross_entropy(out, y).item()
                curve.append((step, loss, 100 * (out.argmax(1) == y).float().mean().item()))
                net.train()
    return curve


def verdict(runs: list[dict[str, Any]]) -> list[str]:
    """A line per number of steps: differences within pairs, beside the deviation between seeds."""
    curves = {
        (run["seed"], run["kind"]): {at: (loss, right) for at, loss, right in run["curve"]}
        for run in runs
    }
    seeds = sorted(
        {s for s, kind in curves if kind == "winograd"}
        & {s for s, kind in curves if kind == "direct"}
    )
    lines = []
    for at in sorted({at for curve in curves.values() for at in curve}):
        direct, other = ([curves[s, kind][at] for s in seeds] for kind in ("direct", "winograd"))
        if len(seeds) < 2:
            continue
        loss = statistics.mean(b[0] - a[0] for a, b in zip(direct, other, strict=True))
        right = statistics.mean(b[1] - a[1] for a, b in zip(direct, other, strict=True))
        between = statistics.stdev(a[0] for a in direct)
        theirs = [curves[s, "torch"][at] for s in seeds if (s, "torch") in curves]
        means = [
            f"{name} {statistics.mean(c[0] for c in of):.4f}, "
            f"{statistics.mean(c[1] for c in of):.2f} %"
            for name, of in (("direct", direct), ("winograd", other), ("torch", theirs))
            if of
        ]
        passed = loss < between and right > -0.5
        lines.append(
            f"step {at}, {len(seeds)} pairs: loss {loss:+.4f} (between seeds {between:.4f}), "
            f"accuracy {right:+.2f} "
            f"points -> {'no worse' if passed else 'WORSE'}; means: {'; '.join(means)}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--torch", action="store_true", help="PyTorch's curves too")
    parser.add_argument(
        "--marks", default=",".join(map(str, MARKS)), help="numbers of steps after which to measure"
    )
    parser.add_argument("--size", type=int, default=28, choices=(28, 16), help="pixels a side")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--data-dir", help="folder of Fashion-MNIST's files")
    parser.add_argument("--output", type=Path, default=Path("convolution_curves.jsonl"))
    parser.add_argument("--of", default="", help="SEED:KIND, this training alone")
    given = parser.parse_args()
    common.print_machine()
    marks = tuple(map(int, given.marks.split(",")))
    kinds = ["direct", "winograd", *["torch"] * given.torch]
    wanted = [(seed, kind) for seed in range(given.seeds) for kind in kinds]
    if given.of:
        seed, _, kind = given.of.partition(":")
        wanted = [(int(seed), kind)]
    for seed, kind in wanted:
        runs = (
            [json.loads(line) for line in given.output.read_text().splitlines()]
            if given.output.exists()
            else []
        )
        if any((run["seed"], run["kind"]) == (seed, kind) for run in runs):
            continue
        begun = time.process_time()
        where = given.size, given.data_dir, marks, given.batch_size
        curve = torchs(seed, *where) if kind == "torch" else ours(seed, kind, *where)
        run = {
            "seed": seed,
            "kind": kind,
            "curve": curve,
            "processor_seconds": round(time.process_time() - begun, 1),
        }
        with given.output.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(json.dumps(run), flush=True)
    for line in verdict([json.loads(line) for line in given.output.read_text().splitlines()]):
        print(line)


if __name__ == "__main__":
    main()
