"""A model as a row of stages, each on its place, computed in micro-batches of eight samples.

    mojo run -I . examples/mojo/pipeline.mojo --steps 50
    mpirun -n 3 ./pipeline

On three ranks each has one stage; one process computes them in a row. The weights are those of examples/pipeline.py:
whoever computes a stage, micro-batches are shards and are added along the same tree.
"""

from shared.training import (
    Conv2d,
    DataLoader,
    DistributedTrainer,
    Flatten,
    Linear,
    MaxPool2d,
    PipelineParallel,
    ReLU,
    SGD,
    Stage,
    Tensor,
    check_options,
    connect,
    number,
    stop,
)
from shared.training.mnist import mnist


def pipeline() raises:
    _ = connect()  # first of all: whatever is wrong on one rank ends the others
    check_options("data-dir steps")
    var model = PipelineParallel[In=Tensor[1, 28, 28], Out=Tensor[10, device=2], ...](
        stages=[
            Stage(
                layers=[Conv2d[1, 8, 3](), ReLU(), Conv2d[8, 8, 3](), ReLU(), MaxPool2d[2]()],
                device=0,
            ),
            Stage(
                layers=[Conv2d[8, 16, 3, device=1](), ReLU(), Conv2d[16, 16, 3, device=1](), ReLU(), MaxPool2d[2]()],
                device=1,
            ),
            Stage(
                layers=[Flatten(), Linear[256, 64, device=2](), ReLU(), Linear[64, 10, device=2]()],
                device=2,
            ),
        ],
        micro_batch_size=8,
    )
    var loader = DataLoader(mnist(train=True), 64, shuffle=True)
    var trainer = DistributedTrainer(model^, SGD(lr=0.05, momentum=0.9))
    var steps = number("steps", 50)
    var history = trainer.train(loader, epochs=100, steps=steps)
    if trainer.comm.rank() == 0:
        print("train loss", history.train_loss(), "steps", history.steps)
        print("weights", trainer.weights_sha256())


def main():
    try:
        pipeline()
    except e:
        stop(e)
