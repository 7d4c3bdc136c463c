"""Tensor parallelism: each layer is shared by all ranks; the model is an ordinary one.

    python examples/tensor_parallel.py
    mpirun -n 2 python examples/tensor_parallel.py

One to four ranks. Rank 0 says how each layer is split. The weights are the same bits: sums are cut
into parts that do not depend on the number of ranks. docs/tensor-parallel.md explains it.
"""

from __future__ import annotations

import argparse

from odyssey import DistributedTrainer, Mesh, comm, data, nn, optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    world = comm.world()
    nn.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, args.hidden),
        nn.Tanh(),
        nn.Linear(args.hidden, args.hidden),
        nn.Tanh(),
        nn.Linear(args.hidden, 10),
    )
    trainer = DistributedTrainer(model, optim.AdamW(lr=1e-3), mesh=Mesh(tp=world.size))
    loader = data.DataLoader(data.load("mnist", train=True), batch_size=128, shuffle=True)
    history = trainer.fit(loader, epochs=100, steps=args.steps)
    weights = trainer.weights_sha256()
    if world.rank == 0:
        print(f"{trainer.mesh}: train loss {history.train_loss:.4f}  weights {weights[:16]}")


if __name__ == "__main__":
    main()
