"""Pipeline parallelism: a model as a row of stages that work on different micro-batches at the
same time.

    python examples/pipeline.py
    mpirun -n 3 python examples/pipeline.py --schedule gpipe

Prints the schedule as a picture, drawn by the code that runs it. On three ranks each has one stage;
alone one process computes all of them. The weights are the same bits, whatever the schedule.
docs/pipeline.md explains it.
"""

from __future__ import annotations

import argparse

from odyssey import DistributedTrainer, PipelineParallel, Stage, data, nn, optim
from odyssey import functional as F
from odyssey.parallel import schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    args = parser.parse_args()

    nn.manual_seed(0)
    conv1, conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
    conv3, conv4 = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3)
    fc1, fc2 = nn.Linear(16 * 4 * 4, 64), nn.Linear(64, 10)
    pool = nn.MaxPool2d(2)
    model = PipelineParallel(
        stages=[
            Stage(layers=[conv1, F.relu, conv2, F.relu, pool], device=0),
            Stage(layers=[conv3, F.relu, conv4, F.relu, pool], device=1),
            Stage(layers=[fc1, F.relu, fc2], device=2),
        ],
        micro_batch_size=8,
        schedule=args.schedule,
    )
    trainer = DistributedTrainer(model, optim.SGD(lr=0.05, momentum=0.9))
    first = trainer.comm.rank == 0
    if first:
        plan = schedule.make(args.schedule, stages=3, micro_batches=8)
        print(schedule.text(plan))
        print(
            f"{args.schedule}: devices wait {100 * schedule.bubble(plan):.0f} % of the time if "
            "stages are equal"
        )

    loader = data.DataLoader(data.load("mnist", train=True), batch_size=64, shuffle=True)
    history = trainer.fit(loader, epochs=100, steps=args.steps)
    weights = trainer.weights_sha256()
    if first:
        print(
            f"{trainer.mesh}: train loss {history.train_loss:.4f}  {history.steps} steps  "
            f"weights {weights[:16]}"
        )


if __name__ == "__main__":
    main()
