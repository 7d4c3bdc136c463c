"""Overlap: the gradients of the last layers are summed between ranks while the first layers' are
computed.

    python examples/overlapped.py
    mpirun -n 2 python examples/overlapped.py

Times steps with overlap and without, one after the other by turns, and shows that the weights are
the same bits. How much is hidden depends on the machine: ranks that share cores hide little.
docs/data-parallel.md explains it.
"""

from __future__ import annotations

import argparse
import statistics
import time

from odyssey import DistributedTrainer, data, nn, optim


def trainer_of(width: int, depth: int, overlap: bool) -> DistributedTrainer:
    """A trainer of `depth` layers whose gradients go in buckets of about one layer."""
    nn.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    bucket = 4 * width * (width + 1) / 2**20
    return DistributedTrainer(model, optim.SGD(lr=0.01), overlap=overlap, bucket_size_mb=bucket)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    trainers = {
        kind: trainer_of(args.width, args.depth, kind == "overlapped")
        for kind in ("overlapped", "afterwards")
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in trainers}
    loader = data.DataLoader(data.load("mnist", train=True), batch_size=128, shuffle=True)
    for step, batch in enumerate(loader):
        if step == args.steps:
            break
        for kind, trainer in trainers.items():
            trainer.comm.barrier()
            begin = time.perf_counter()
            trainer.train_step(batch)
            seconds[kind].append(time.perf_counter() - begin)

    weights = {trainer.weights_sha256()[:16] for trainer in trainers.values()}
    if trainer.comm.rank == 0:
        times = "  ".join(
            f"{kind} {1e3 * statistics.median(taken):.1f} ms" for kind, taken in seconds.items()
        )
        same = "the same" if len(weights) == 1 else "DIFFERENT"
        print(
            f"{trainer.comm.size} ranks, median step: {times}  {same} weights "
            f"{' '.join(sorted(weights))}"
        )


if __name__ == "__main__":
    main()
