"""A model with every layer that LeNet-5 has not, and settings that the examples do not use; test_mojo_front_end.py does
the same in Python. Options pick the optimizer, the batch size and so on.
"""

from shared.training import (
    Adam,
    AdamW,
    AvgPool2d,
    Conv2d,
    DataLoader,
    Dataset,
    DistributedTrainer,
    Dropout,
    Engine,
    Flatten,
    Linear,
    LogSoftmax,
    Module,
    NLLLoss,
    Optimizer,
    RMSprop,
    SGD,
    Sequential,
    Sigmoid,
    Tanh,
    Tensor,
    argument,
    avg_pool2d,
    dropout,
    flatten,
    log_softmax,
    number,
    schedule,
    sigmoid,
    tanh,
)

comptime SAMPLES = 150


def noise() raises -> Dataset:
    """Images of 2 x 11 x 11 and labels of 5 classes."""
    var images = List[UInt8](length=SAMPLES * 242, fill=0)
    for i in range(len(images)):
        images[i] = UInt8((i * 7919 + i // 331) % 251)
    var labels = List[Int32](length=SAMPLES, fill=0)
    for i in range(SAMPLES):
        labels[i] = Int32(i * 7 % 5)
    return Dataset(
        images^,
        labels^,
        channels=2,
        height=11,
        width=11,
        classes=5,
        scale=0.0078125,
        shift=-1,
    )


struct Zoo(Module):
    """Strides, no biases, tanh, sigmoid, mean pooling, dropout, a skip, a product, places, log-softmax."""

    comptime Input = Tensor[2, 11, 11]
    comptime Output = Tensor[5, device=1]
    var conv: Conv2d[2, 4, 3, stride=2, padding=1, bias=False]
    var norm: Conv2d[4, 4, 1]
    var fc: Linear[36, 20]
    var gate: Linear[20, 20, bias=False]
    var tail: Sequential[Dropout[0.25], Linear[20, 5], In=Tensor[20], Out=Tensor[5]]

    def __init__(out self):
        self.conv = {}
        self.norm = {}
        self.fc = {}
        self.gate = {}
        self.tail = {Dropout[0.25](), Linear[20, 5]()}

    def forward(self, x: Self.Input) raises -> Self.Output:
        var a = tanh(self.conv.forward(x))
        var b = a + self.norm.forward(a) * 0.5
        var c = flatten(avg_pool2d[2](b))
        var d = dropout(sigmoid(self.fc.forward(c)), 0.5)
        var e = d * self.gate.forward(d) - d
        return log_softmax(self.tail.forward(e)).to(device=1)


def zoo() raises:
    """Trains with the optimizer that --optimizer names."""
    var name = argument("optimizer", "sgd")
    if name == "adam":
        train(Adam(0.01, 0.8, weight_decay=0.1))
    elif name == "adamw":
        train(AdamW(lr=0.01))
    elif name == "rmsprop":
        train(RMSprop(lr=0.01, alpha=0.9))
    else:
        train(SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01))


def elsewhere() raises:
    """A batch that is on another place than the model."""
    var loader = DataLoader(noise(), 8)
    var engine = Engine[L=NLLLoss, ...](Zoo())
    engine.to(device=2)
    _ = engine.run(loader.batch(0, 0, 8).to(device=2), loader.dataset)
    _ = engine.run(loader.batch(0, 0, 8), loader.dataset)


def train[O: Optimizer](var optimizer: O) raises:
    """Three epochs of batches of --batch-size."""
    var clip = Float64(argument("clip", "1e9"))
    var loader = DataLoader(
        noise(),
        number("batch-size", 70),
        shuffle=True,
        seed=UInt64(number("seed", 4)),
        drop_last=number("drop-last", 0) == 1,
    )
    var trainer = DistributedTrainer[L=NLLLoss, ...](
        Zoo(),
        optimizer^,
        number("num-gpus", 1),
        shard_size=16,
        threads=number("threads", 1),
        schedule=schedule(argument("schedule", "step"), 9, 2),
        seed=UInt64(number("seed", 4)),
        accumulation_steps=number("accumulation-steps", 1),
        clip_norm=clip,
    )
    var test = DataLoader(noise(), 64)
    var history = trainer.train(
        loader,
        test,
        epochs=3,
        steps=number("stop-at", 1000),
        checkpoint_dir=argument("checkpoint-dir", ""),
    )
    if trainer.comm.rank() == 0:
        for r in history.records:
            print(
                r.train_loss,
                r.train_accuracy,
                r.test_loss.value(),
                r.test_accuracy.value(),
            )
        print(history.steps, trainer.weights_sha256())
        for pair in trainer.py.arena.named:
            print(pair[0], end=" ")
        print()
