"""What a program gets wrong in a loop of its own is an error, not memory of something else and not weights of NaN.

Not a test by itself: part of front_end.mojo, started by test_mojo_front_end.py.
"""

from shared.training import (
    Adam,
    DataLoader,
    Dataset,
    DistributedTrainer,
    Engine,
    Linear,
    Module,
    SGD,
    Tensor,
    linear_warmup,
    step_decay,
)
from zoo import noise


struct Plain(Module):
    comptime Input = Tensor[4]
    comptime Output = Tensor[3]
    var fc: Linear[4, 3]

    def __init__(out self):
        self.fc = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        return self.fc.forward(x)


struct Unused(Module):
    """It has a layer, and does not use it."""

    comptime Input = Tensor[4]
    comptime Output = Tensor[4]
    var fc: Linear[4, 4]

    def __init__(out self):
        self.fc = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        return x


struct Lying(Module):
    """Its type says three outputs, its values are four."""

    comptime Input = Tensor[4]
    comptime Output = Tensor[3]
    var fc: Linear[4, 4]

    def __init__(out self):
        self.fc = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        return Self.Output(self.fc.forward(x).value())


def rows(classes: Int) raises -> Dataset:
    """Eight samples of four features."""
    var labels = List[Int32]()
    for i in range(8):
        labels.append(Int32(i % classes))
    return Dataset(List[Float32](length=32, fill=0.5), labels^, channels=4, classes=classes)


def sizes(channels: Int, height: Int, width: Int, classes: Int) raises:
    """A data set of sizes that none has."""
    _ = Dataset(
        List[UInt8](length=4, fill=0),
        [0, 0],
        channels=channels,
        height=height,
        width=width,
        classes=classes,
    )


def expect(says: String, got: String) raises:
    """Fails unless a message has these words."""
    if says not in got:
        raise Error("'", says, "' is not in '", got, "'")


def refusals() raises:
    """Counts what was refused; raises where something was not."""
    var n = 0

    # a batch stays what it was when the loader goes on to another epoch
    var images = DataLoader(noise(), 50, shuffle=True, seed=3)
    var batch = images.batch(0, 1, 50)
    var part = batch.part(10, 5)
    _ = images.batch(1, 0, 50)
    _ = images.batch(2, 0, 50)
    var again = images.batch(0, 1, 50)
    for i in range(5):
        if Int(py=part.py.indices[i]) != Int(py=again.py.indices[10 + i]):
            raise Error("the rows of a batch are not those of its epoch")
    for i in range(3):
        try:
            _ = batch.part(48 if i == 0 else -i + 1, 0 if i == 1 else 5)
        except e:
            expect("of a batch of 50; there are none", String(e))
            n += 1

    var three = DataLoader(rows(3), 8)
    var engine = Engine(Plain())
    var before = engine.weights_sha256()
    var sgd = SGD(lr=0.1)
    var sums = engine.run(three.batch(0, 0, 8), three.dataset)
    if engine.update(sgd, engine.gradients(sums), 0, 0.1):
        raise Error("a step over no samples was taken")
    if engine.weights_sha256() != before or Int(py=sgd.value().steps) != 0:
        raise Error("a step that was not taken changed something")
    n += 1
    try:
        _ = engine.run(three.batch(0, 1, 8), three.dataset)
    except e:
        expect("[train] the batch has no samples: number 1 of epoch 0", String(e))
        n += 1
    var five = DataLoader(rows(5), 8)  # a batch size that it has met
    try:
        _ = engine.run(five.batch(0, 0, 8), five.dataset)
    except e:
        expect("has 5 classes and the model 3 outputs", String(e))
        n += 1

    var unused = Engine(Unused())
    try:
        _ = unused.run(three.batch(0, 0, 8), three.dataset)
    except e:
        expect("depends on nothing with requires_grad", String(e))
        n += 1
    var lying = Engine(Lying())
    try:
        _ = lying.run(three.batch(0, 0, 8), three.dataset)
    except e:
        expect(
            "forward() gives samples of (4,) on device(0); its Output is 3",
            String(e),
        )
        n += 1

    for bad in range(5):
        try:
            sizes(
                0 if bad == 0 else -2 if bad == 4 else 2,
                0 if bad == 1 else -1 if bad == 4 else 1,
                0 if bad == 2 else 1,
                0 if bad == 3 else 2,
            )
        except e:
            expect("each must be at least 1", String(e))
            n += 1
    try:
        _ = step_decay(0)
    except e:
        expect("[schedule] step_decay every 0 steps", String(e))
        n += 1
    try:
        _ = linear_warmup(-1)
    except e:
        expect("[schedule] a warm-up of -1 steps", String(e))
        n += 1

    try:
        _ = DistributedTrainer(Plain(), SGD(lr=0.1), zork=1)
    except e:
        expect("unexpected keyword argument 'zork'", String(e))
        n += 1
    try:
        _ = SGD(lr=0.1, zork=1)
    except e:
        expect("[SGD] got an unexpected keyword argument 'zork'", String(e))
        n += 1
    try:
        _ = Adam(1e-3, 1.5)
    except e:
        expect("[Adam] beta1", String(e))
        n += 1
    print(n, "refused")
