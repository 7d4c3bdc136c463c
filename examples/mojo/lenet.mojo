"""LeNet-5 on MNIST in Mojo, alone or on several ranks: the weights of `python -m odyssey.train`, to the last bit.

    mojo run -I . examples/mojo/lenet.mojo --steps 200
    mojo build -I . examples/mojo/lenet.mojo -o lenet
    mpirun -n 4 ./lenet --epochs 2

Options: --data-dir, --epochs, --steps, --seed, --batch-size, --accumulation-steps, --threads, --no-eval; --checkpoint-dir and
--checkpoint-every, from which `python -m odyssey.train --checkpoint-dir` goes on, and this program from Python's; --stop-at
ends after so many of the steps.
"""

from shared.training import (
    DataLoader,
    DistributedTrainer,
    LeNet5,
    SGD,
    argument,
    check_options,
    connect,
    flag,
    number,
    schedule,
    stop,
)
from shared.training.mnist import mnist


def lenet() raises:
    """Trains, and prints what the Python command prints: accuracy and the weights' SHA-256."""
    _ = connect()  # first of all: whatever is wrong on one rank ends the others
    check_options(
        "data-dir epochs steps seed batch-size accumulation-steps threads checkpoint-dir checkpoint-every stop-at",
        flags="no-eval",
    )
    var seed = UInt64(number("seed", 0, at_least=0))
    var accumulation = number("accumulation-steps", 1, at_least=1)
    var batch = number("batch-size", 128, at_least=1)
    if batch % accumulation:
        raise Error(
            "[usage] --batch-size is ",
            batch,
            "; it must divide by --accumulation-steps, ",
            accumulation,
        )
    var size = batch // accumulation
    var loader = DataLoader(mnist(train=True), size, shuffle=True, seed=seed)
    var per_epoch = (len(loader) + accumulation - 1) // accumulation
    var epochs = number("epochs", 8, at_least=1)
    var all = epochs * per_epoch
    var total = min(number("steps", all, at_least=1), all)
    var trainer = DistributedTrainer(
        LeNet5(),
        SGD(lr=0.05, momentum=0.9, weight_decay=5e-4),
        threads=number("threads", 0),
        schedule=schedule("cosine", total, min(100, total // 5)),
        seed=seed,
        accumulation_steps=accumulation,
        verbose=True,
    )
    var history = trainer.train(
        loader,
        epochs=epochs,
        steps=number("stop-at", total),
        checkpoint_dir=argument("checkpoint-dir", ""),
        checkpoint_every=number("checkpoint-every", 0),
    )
    if not flag("no-eval"):
        var test = DataLoader(mnist(train=False), 1024)
        var result = trainer.evaluate(test)
        if trainer.comm.rank() == 0:
            print("test loss", result.loss, "accuracy", result.accuracy)
    if trainer.comm.rank() == 0:
        print("train loss", history.train_loss())
        print("weights", trainer.weights_sha256())


def main():
    try:
        lenet()
    except e:
        stop(e)
