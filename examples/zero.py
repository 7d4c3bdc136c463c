"""ZeRO: replicas keep parts of the optimizer state (1), the gradients as well (2), the
parameters as well (3).

    python examples/zero.py
    mpirun -n 4 python examples/zero.py

Trains the same network with each stage and prints what one rank holds. Alone there is nothing to
cut. The weights are the same bits. docs/data-parallel.md explains it.
"""

from __future__ import annotations

import argparse

from odyssey import DistributedTrainer, data, nn, optim


def network(width: int, depth: int) -> nn.Module:
    """`depth` equal layers, so that no single one sets how much has to be kept."""
    nn.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    weights = set()
    for stage in (0, 1, 2, 3):
        trainer = DistributedTrainer(
            network(args.width, args.depth), optim.Adam(lr=1e-3), zero=stage, bucket_size_mb=0.25
        )
        loader = data.DataLoader(data.load("mnist", train=True), batch_size=128, shuffle=True)
        trainer.fit(loader, steps=args.steps)
        memory = {
            what: size / 2**20 for what, size in trainer.memory().items() if what != "activations"
        }
        weights.add(trainer.weights_sha256()[:16])
        if trainer.comm.rank == 0:
            held = "  ".join(f"{what} {size:5.2f}" for what, size in memory.items())
            print(
                f"zero {stage}: {held}  together {sum(memory.values()):5.2f} MiB on rank 0 of "
                f"{trainer.comm.size}"
            )
    if trainer.comm.rank == 0:
        print(
            f"{'the same' if len(weights) == 1 else 'DIFFERENT'} weights "
            f"{' '.join(sorted(weights))}"
        )


if __name__ == "__main__":
    main()
