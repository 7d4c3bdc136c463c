"""What --trace costs a step: trainings of one thread, rounds with and without in turns, CPU time
of the process.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import common
import numpy as np

import odyssey
from odyssey import data, nn, optim

ROUNDS, SECONDS = 15, 0.4


def cases() -> list[tuple[str, odyssey.DistributedTrainer, list]]:
    """(name, trainer, batches)"""
    rng = np.random.default_rng(0)
    made = []
    for batch in (1, 64, 256):
        x, y = rng.normal(size=(batch, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, batch)
        trainer = odyssey.DistributedTrainer(nn.LeNet5(), optim.SGD(lr=1e-4), threads=1)
        made.append(
            (
                f"LeNet-5, batch {batch}",
                trainer,
                list(data.DataLoader(data.arrays(x, y, classes=10), batch)),
            )
        )
    tokens = "".join(rng.choice(list("abcdefgh "), 4000))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text(tokens)
        text = data.opened(
            "text", Path(folder) / "text.txt", train=True, size=0, target=None, length=64
        )
        model = nn.models.build("gpt-mini", vocab_size=text.classes, context=64, dropout=0.0)
        trainer = odyssey.DistributedTrainer(model, optim.AdamW(lr=1e-4), threads=1)
        made.append(
            (
                "gpt-mini, 8 x 64 tokens",
                trainer,
                list(itertools.islice(data.DataLoader(text, 8), 4)),
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--off",
        action="store_true",
        help="no turns, no timeline: to compare versions of the package",
    )
    off = parser.parse_args().off
    common.print_machine()
    for name, trainer, batches in cases():
        again = itertools.cycle(batches)
        for _ in range(10):
            trainer.train_step(next(again))
        begun = time.process_time()
        for _ in range(10):
            trainer.train_step(next(again))
        count = max(3, int(SECONDS / ((time.process_time() - begun) / 10)))
        plain, traced, bytes_ = [], [], 0
        with tempfile.TemporaryDirectory() as folder:
            for i in range(ROUNDS * (1 if off else 2)):
                recording = None
                if not off and i % 2:
                    from odyssey.view.trace import TimelineRecorder

                    recording = TimelineRecorder(Path(folder) / f"{i}.json", None)
                    recording.on_fit_start(trainer.context)
                begun = time.process_time()
                for _ in range(count):
                    trainer.train_step(next(again))
                    if recording is not None:
                        recording.on_step_end(trainer.context)
                (traced if recording else plain).append((time.process_time() - begun) / count * 1e6)
                if recording is not None:
                    recording._timeline.close()
                    bytes_ = (
                        sum(p.stat().st_size for p in Path(folder).rglob("rank-*"))
                        / count
                        / (i // 2 + 1)
                    )
        base = statistics.median(plain)
        line = f"{name:<26} {base:10.1f} us per step"
        if traced:
            cost = statistics.median(b - a for a, b in zip(plain, traced, strict=True))
            line += f"   with --trace {cost:+7.1f} us, {cost / base:+.1%}, {bytes_ / 1e3:.1f} KB"
        print(line, flush=True)


if __name__ == "__main__":
    main()
