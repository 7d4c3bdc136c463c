"""The plan for distributed training that this project started from, as it was written: data, model and pipeline
parallelism. test_mojo_seed_text.py compiles and runs it, and compares the weights with those of Python.

Mojo has changed since the plan (`def` for `fn`, `raises`), layers need their sizes, and a pipeline needs the types of its
ends. Everything else is literal, also `trainer.train(...)` without `_ =`, which the compiler warns about.
"""

from shared.training import (
    Conv2d,
    DataLoader,
    Dataset,
    DistributedTrainer,
    Flatten,
    LeNet5,
    Linear,
    Module,
    PipelineParallel,
    SGD,
    Stage,
    Tensor,
    argument,
    connect,
    flatten,
    stop,
)


def images() raises -> Dataset:
    """Images of 28 x 28 and their labels."""
    comptime SAMPLES = 96
    var pixels = List[UInt8](length=SAMPLES * 784, fill=0)
    for i in range(len(pixels)):
        pixels[i] = UInt8((i * 7919 + i // 331) % 251)
    var labels = List[Int32](length=SAMPLES, fill=0)
    for i in range(SAMPLES):
        labels[i] = Int32(i * 7 % 10)
    return Dataset(pixels^, labels^, channels=1, height=28, width=28, classes=10, scale=1 / 255)


def data_parallel(train_loader: DataLoader) raises:
    var model = LeNet5()
    var optimizer = SGD(lr=0.01)

    # Automatic multi-GPU distribution
    var trainer = DistributedTrainer(
        model=model,
        optimizer=optimizer,
        num_gpus=4,
        backend=argument("backend", "auto"),
    )

    trainer.train(train_loader, epochs=100)
    print("data", trainer.weights_sha256())


struct LargeModel(Module):
    comptime Input = Tensor[1, 28, 28]
    comptime Output = Tensor[10, device=2]
    var layer1: Linear[784, 64, device=0]  # On GPU 0
    var layer2: Linear[64, 64, device=1]  # On GPU 1
    var layer3: Linear[64, 10, device=2]  # On GPU 2

    def __init__(out self):
        self.layer1 = {}
        self.layer2 = {}
        self.layer3 = {}

    def forward(self, input: Self.Input) raises -> Self.Output:
        var x = self.layer1.forward(flatten(input))  # GPU 0
        var y = x.to(device=1)  # Transfer to GPU 1
        y = self.layer2.forward(y)  # GPU 1
        var z = y.to(device=2)  # Transfer to GPU 2
        return self.layer3.forward(z)  # GPU 2


def model_parallel(train_loader: DataLoader) raises:
    var trainer = DistributedTrainer(LargeModel(), SGD(lr=0.01))
    _ = trainer.train(train_loader, epochs=10)
    print("model", trainer.weights_sha256())


def pipeline_parallel(train_loader: DataLoader) raises:
    var conv1 = Conv2d[1, 8, 3]()
    var conv2 = Conv2d[8, 8, 3, stride=2]()
    var conv3 = Conv2d[8, 16, 3, device=1]()
    var conv4 = Conv2d[16, 16, 3, stride=2, device=1]()
    var fc1 = Linear[256, 64, device=2]()
    var fc2 = Linear[64, 10, device=2]()
    var pipeline = PipelineParallel[In=Tensor[1, 28, 28], Out=Tensor[10, device=2], ...](
        stages=[
            Stage(layers=[conv1, conv2], device=0),
            Stage(layers=[conv3, conv4], device=1),
            Stage(layers=[Flatten(), fc1, fc2], device=2),
        ],
        micro_batch_size=8,
    )
    var trainer = DistributedTrainer(pipeline^, SGD(lr=0.01))
    _ = trainer.train(train_loader, epochs=10)
    print("pipeline", trainer.weights_sha256())


def main():
    try:
        _ = connect()
        var train_loader = DataLoader(images(), 48, shuffle=True)
        data_parallel(train_loader)
        model_parallel(train_loader)
        pipeline_parallel(train_loader)
    except e:
        stop(e)
