"""How a program of several ranks ends, built and under `mojo run`; small, as the latter compiles it on each rank.

Not a test by itself: test_mojo_mpi.py looks at what it leaves.
"""

from std.sys import argv, exit

from shared.training.launcher import announced_rank
from shared.training.world import World, connect, stop


def main() raises:
    var word = String(argv()[1])
    if word == "uncaught":
        run(word)
        return
    try:
        run(word)
    except e:
        stop(e)


def run(word: String) raises:
    if word == "alike" or (word == "early" and announced_rank() == 1):
        raise Error("[data] it found nothing")
    var world = connect()
    if word == "well":
        print(world.all_reduce_sum(1))
        return
    world.barrier()
    if world.rank() == 1:
        if word == "exit":
            exit(3)
        raise Error("[data] rank 1 found nothing")
    world.barrier()
    print("not reached")
