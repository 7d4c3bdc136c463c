"""An op of one's own: examples/own_ops.mojo is compiled on first use and trained with like any other.

    mojo run -I . examples/mojo/own_op.mojo --steps 200
    mpirun -n 4 ./own_op --ops examples/own_ops.mojo
"""

from shared.training import *
from shared.training.mnist import mnist


struct Classifier(Module):
    comptime Input = Tensor[1, 28, 28]
    comptime Output = Tensor[10]
    var first: Linear[784, 64]
    var mish: Unary
    var last: Linear[64, 10]

    def __init__(out self) raises:
        self.first = {}
        self.mish = {"mish", saves = "x"}
        self.last = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        return self.last.forward(self.mish(self.first.forward(flatten(x))))


def own_op() raises:
    _ = connect()  # first: whatever is wrong on one rank ends the others
    check_options("data-dir steps ops")
    load_ops(argument("ops", "examples/own_ops.mojo"))
    var loader = DataLoader(mnist(train=True), 128, shuffle=True)
    var trainer = DistributedTrainer(Classifier(), Adam(lr=1e-3))
    var history = trainer.train(loader, epochs=9, steps=number("steps", 200))
    if trainer.comm.rank() == 0:
        print("train loss", history.train_loss())
        print("weights", trainer.weights_sha256())


def main():
    try:
        own_op()
    except e:
        stop(e)
