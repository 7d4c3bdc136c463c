"""Model parallelism by hand: each layer on a place of its own, activations moved between them; the places are types.

    mojo run -I . examples/mojo/large_model.mojo --steps 200
    mpirun -n 3 ./large_model

Leave one `.to(device=...)` out and it does not compile: "the input is on another device than the layer". The weights are
those of examples/large_model.py, to the last bit; on three ranks each has one layer.
"""

from shared.training import (
    DataLoader,
    DistributedTrainer,
    Linear,
    Module,
    SGD,
    Tensor,
    check_options,
    connect,
    flatten,
    number,
    relu,
    stop,
)
from shared.training.mnist import mnist


struct LargeModel(Module):
    """Three linear layers on three places."""

    comptime Input = Tensor[1, 28, 28]
    comptime Output = Tensor[10, device=2]
    var layer1: Linear[784, 512, device=0]
    var layer2: Linear[512, 512, device=1]
    var layer3: Linear[512, 10, device=2]

    def __init__(out self):
        self.layer1 = {}
        self.layer2 = {}
        self.layer3 = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        var a = relu(self.layer1.forward(flatten(x))).to(device=1)
        # its gradient will come back the same way
        var b = relu(self.layer2.forward(a)).to(device=2)
        return self.layer3.forward(b)


def large_model() raises:
    _ = connect()  # first of all: whatever is wrong on one rank ends the others
    check_options("data-dir steps")
    var loader = DataLoader(mnist(train=True), 128, shuffle=True)
    var trainer = DistributedTrainer(LargeModel(), SGD(lr=0.05, momentum=0.9))
    var steps = number("steps", 200)
    var history = trainer.train(loader, epochs=100, steps=steps)
    if trainer.comm.rank() == 0:
        print("train loss", history.train_loss(), "steps", history.steps)
        print("weights", trainer.weights_sha256())


def main():
    try:
        large_model()
    except e:
        stop(e)
