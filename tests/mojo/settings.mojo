"""LeNet-5 with whatever settings of Python's trainer the options say, and how programs of several ranks end.

Not a test by itself: part of front_end.mojo, started by test_mojo_front_end.py.
"""

from std.ffi import c_int, external_call
from std.os import getenv
from std.sys import argv, exit

from shared.training import (
    DataLoader,
    DistributedTrainer,
    LeNet5,
    SGD,
    argument,
    connect,
    mesh,
    number,
    schedule,
)
from shared.training.mnist import mnist


def settings() raises:
    """Three steps; prints the weights and how the ranks are connected."""
    var gpus = Optional[Int](None)
    if number("num-gpus", 0):
        gpus = number("num-gpus", 0)
    var loader = DataLoader(mnist(train=True), 128, shuffle=True)
    var steps = number("steps", 3)
    var trainer = DistributedTrainer(
        LeNet5(),
        SGD(lr=0.05, momentum=0.9, weight_decay=5e-4),
        gpus,
        argument("backend", "auto"),
        device=argument("device", "auto"),
        reduction=argument("reduction", "tree"),
        zero=number("zero", 0),
        precision=argument("precision", "fp32"),
        mesh=mesh(pp=number("pp", 1), tp=number("tp", 1)),
        pipeline_schedule=argument("pipeline-schedule", "1f1b"),
        schedule=schedule("cosine", steps, min(100, steps // 5)),
    )
    var history = trainer.train(loader, steps=steps)
    if trainer.comm.rank() == 0:
        print("train loss", history.train_loss())
        print("weights", trainer.weights_sha256())
        print(trainer.comm.why())
    if number("validate", 0):
        var validated = trainer.train(loader, mnist(train=False), steps=steps + 1)
        var evaluation = trainer.evaluate(mnist(train=False))
        if trainer.comm.rank() == 0:
            print("test loss", validated.test_loss().value(), evaluation.loss)


def ends() raises:
    """What the word after the name says happens on rank 1."""
    var word = String(argv()[1])
    var me = getenv("PMI_RANK", getenv("OMPI_COMM_WORLD_RANK"))
    if word == "alike" or (word == "early" and me == "1"):
        raise Error("[data] it found nothing")
    var world = connect()
    if word == "well":
        print(
            world.all_reduce_sum(1),
            world.all_reduce_max(world.rank()),
            world.all_reduce_min(world.rank()),
            world.local_size(),
        )
        return
    world.barrier()
    if world.rank() == 1:
        if word == "exit":
            exit(3)
        if word == "killed":
            _ = external_call["raise", c_int](c_int(9))
        raise Error("[data] rank 1 found nothing")
    world.barrier()
    print("not reached")


def uncaught() raises:
    """Rank 1 raises out of main()."""
    var world = connect()
    world.barrier()
    if world.rank() == 1:
        raise Error("rank 1 found nothing")
    world.barrier()
    print("not reached")
