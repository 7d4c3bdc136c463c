"""Data parallelism by hand: copies of a model, a batch cut into pieces, gradients averaged, steps.

    mojo run -I . examples/mojo/manual_multi_device.mojo --devices 4

All copies start from the same weights and must end with the same weights. What it is not: parallel (one copy computes
after the other), or what to use: a DistributedTrainer does all of this, with the same bits on any number of devices.
"""

from shared.training import Batch, DataLoader, Engine, LeNet5, SGD
from shared.training import check_options, number, stop
from shared.training.mnist import mnist


def split_batch(batch: Batch, parts: Int) raises -> List[Batch]:
    """The batch as consecutive pieces of one size: only then is a mean of means the mean."""
    if batch.samples % parts:
        raise Error("[usage] the batch does not divide by --devices")
    var n = batch.samples // parts
    var pieces = List[Batch]()
    for k in range(parts):
        pieces.append(batch.part(k * n, n))
    return pieces^


def average_gradients(grads: List[Span[Float32, MutUntrackedOrigin]]):
    """Gives all copies the mean of their gradients."""
    var share = 1 / Float32(len(grads))
    for i in range(len(grads[0])):
        var sum: Float32 = 0
        for g in grads:
            sum += g[i]
        for g in grads:
            g[i] = sum * share


def manual_multi_device() raises:
    check_options("data-dir devices steps")
    var devices = number("devices", 4, at_least=1)
    var models = List[Engine[LeNet5]]()
    var optimizers = List[SGD]()
    for k in range(devices):
        models.append(Engine(LeNet5(), seed=0))  # all copies start alike
        models[k].to(device=k)
        optimizers.append(SGD(lr=0.1))
    var loader = DataLoader(mnist(train=True), 128, shuffle=True, drop_last=True)
    for step in range(number("steps", 50)):
        var batch = loader.batch(step // len(loader), step % len(loader), 128)
        var pieces = split_batch(batch, devices)
        var grads = List[Span[Float32, MutUntrackedOrigin]]()
        var loss: Float64 = 0
        var n = pieces[0].samples
        for k in range(devices):
            var piece = pieces[k].to(device=k)
            var sums = models[k].run(piece, loader.dataset)
            grads.append(models[k].gradients(sums))
            loss += sums.loss / Float64(n * devices)
        average_gradients(grads)
        for k in range(devices):
            if not models[k].update(optimizers[k], grads[k], Float32(n), 0.1):
                raise Error("[train] a gradient is not finite")
        if step % 10 == 9:
            print("step", step + 1, "loss", loss, "on", devices, "devices")
    for k in range(1, devices):
        if models[k].weights_sha256() != models[0].weights_sha256():
            raise Error("the copies differ; they must not")
    print("weights", models[0].weights_sha256())


def main():
    try:
        manual_multi_device()
    except e:
        stop(e)
