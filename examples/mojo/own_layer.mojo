"""A layer and a model of one's own: structs with a forward(). Nobody writes a backward pass.

    mojo run -I . examples/mojo/own_layer.mojo --steps 200
    mpirun -n 4 ./own_layer
"""

from shared.training import *
from shared.training.mnist import mnist


struct Residual[features: Int](Module):
    comptime Input = Tensor[Self.features]
    comptime Output = Tensor[Self.features]
    var inner: Linear[Self.features, Self.features]
    var outer: Linear[Self.features, Self.features]

    def __init__(out self):
        self.inner = {}
        self.outer = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        return x + self.outer.forward(relu(self.inner.forward(x)))


struct Classifier(Module):
    comptime Input = Tensor[1, 28, 28]
    comptime Output = Tensor[10]
    var first: Linear[784, 64]
    var block: Residual[64]
    var last: Linear[64, 10]

    def __init__(out self):
        self.first = {}
        self.block = {}
        self.last = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        var h = relu(self.first.forward(flatten(x)))
        return self.last.forward(self.block.forward(h))


def own_layer() raises:
    _ = connect()  # first: whatever is wrong on one rank ends the others
    check_options("data-dir steps")
    var loader = DataLoader(mnist(train=True), 128, shuffle=True)
    var trainer = DistributedTrainer(Classifier(), Adam(lr=1e-3))
    var history = trainer.train(loader, epochs=9, steps=number("steps", 200))
    if trainer.comm.rank() == 0:
        print("train loss", history.train_loss())
        print("weights", trainer.weights_sha256())


def main():
    try:
        own_layer()
    except e:
        stop(e)
