"""Mixed precision: products of bf16 or fp16 operands, everything else in float32; fp16 scales
the loss.

    python examples/mixed_precision.py
    mpirun -n 2 python examples/mixed_precision.py

Trains LeNet-5 in each precision. The fp16 run starts with a loss scale that overflows: the steps
are skipped on all ranks together, and say so on standard error. docs/precision.md explains it.
"""

from __future__ import annotations

import argparse

from odyssey import DistributedTrainer, data, nn, optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scaler-init-scale", type=float, default=2.0**28, help="a power of two")
    args = parser.parse_args()

    test_set = data.load("mnist", train=False)
    for precision in ("fp32", "bf16", "fp16"):
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.LeNet5(),
            optim.SGD(lr=0.02, momentum=0.9),
            precision=precision,
            scaler_init_scale=args.scaler_init_scale,
            scaler_growth_interval=2000,
        )
        loader = data.DataLoader(data.load("mnist", train=True), batch_size=128, shuffle=True)
        trainer.fit(loader, epochs=100, steps=args.steps, verbose=False)
        accuracy = trainer.evaluate(test_set).accuracy
        weights = trainer.weights_sha256()
        if trainer.comm.rank == 0:
            skipped = f"  {trainer.scaler.skipped} steps skipped" if precision == "fp16" else ""
            print(
                f"{precision}: test accuracy {100 * accuracy:.2f} %  weights "
                f"{weights[:16]}{skipped}"
            )


if __name__ == "__main__":
    main()
