"""Data parallelism with a trainer: every worker has the whole model and its share of each batch.

    python examples/data_parallel.py
    mpirun -n 2 python examples/data_parallel.py

Alone there are four workers, on n ranks 4 n; the weights are the same bits. A custom training loop
is in ddp_loop.py.
"""

from __future__ import annotations

import argparse

from odyssey import DistributedTrainer, data, nn, optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="stop after so many")
    args = parser.parse_args()

    nn.manual_seed(0)
    model = nn.LeNet5()
    optimizer = optim.SGD(lr=0.05, momentum=0.9)
    trainer = DistributedTrainer(model=model, optimizer=optimizer, num_gpus=4, backend="auto")

    # 512 samples are 16 shards of 32: enough for 16 workers.
    train_loader = data.DataLoader(data.load("mnist", train=True), batch_size=512, shuffle=True)
    history = trainer.train(train_loader, epochs=args.epochs, steps=args.steps)

    result = trainer.evaluate(data.load("mnist", train=False))
    weights = trainer.weights_sha256()
    if trainer.comm.rank == 0:
        print(
            f"{trainer.workers} workers on {trainer.comm.size} ranks, {history.steps} steps: "
            f"test accuracy {100 * result.accuracy:.2f} %  weights {weights[:16]}"
        )


if __name__ == "__main__":
    main()
