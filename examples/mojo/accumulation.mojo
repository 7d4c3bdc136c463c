"""Gradient accumulation: several batches of the loader make one step, the same step as with one batch of them all.

    mojo run -I . examples/mojo/accumulation.mojo --steps 20

Prints the weights after training with 4 x 32 samples and with 128: they are the same bits, because a step divides once,
by all its samples, and adds its shards along one tree. The last step of an epoch, of fewer batches, is right as well.
"""

from shared.training import (
    Adam,
    DataLoader,
    DistributedTrainer,
    LeNet5,
    check_options,
    connect,
    number,
    stop,
)
from shared.training.mnist import mnist


def train_with_accumulation(batch_size: Int, steps: Int) raises -> String:
    """The weights after some steps of 128 samples, in batches of batch_size."""
    var loader = DataLoader(mnist(train=True), batch_size, shuffle=True)
    var trainer = DistributedTrainer(LeNet5(), Adam(lr=0.003), accumulation_steps=128 // batch_size)
    var history = trainer.train(loader, epochs=9, steps=steps)
    if trainer.comm.rank() == 0:
        print(128 // batch_size, "x", batch_size, end=": ")
        print("train loss", history.train_loss(), trainer.weights_sha256())
    return trainer.weights_sha256()


def accumulation() raises:
    _ = connect()  # first of all: whatever is wrong on one rank ends the others
    check_options("data-dir steps")
    var steps = number("steps", 20)
    var whole = train_with_accumulation(128, steps)
    if train_with_accumulation(32, steps) != whole:
        raise Error("the weights differ; they must not")


def main():
    try:
        accumulation()
    except e:
        stop(e)
