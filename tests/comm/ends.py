"""Run under a launcher by test_ends.py: the last rank misbehaves in a way that is named in the
argument.

Prints one line per rank that gets an error. What each rank did is in the lines; that the job ends
at all is the point.
"""

from __future__ import annotations

import os
import sys
import time

import clock
import numpy as np

from odyssey import comm
from odyssey.errors import CollectiveError

which, backend, limit = sys.argv[1:4]
world = comm.world(backend)
last = world.rank == world.size - 1
a = np.ones(8, np.float32)
assert world.all_reduce(a)[0] == world.size


def attempt(function, of: range = range(0)) -> None:
    """Tells the error of this rank, and lets the ranks `of` tell theirs before it ends all.

    The deadline is set only here: a busy machine starts the ranks seconds apart.
    """
    os.environ["ODYSSEY_TIMEOUT"] = limit
    watch = clock.Stopwatch()
    try:
        function()
    except CollectiveError as error:
        print(f"rank {world.rank} after {watch}: {error}\n", end="", flush=True)
        clock.done(world.rank)
        clock.wait_for(of)
        raise


everybody, others = range(world.size), range(world.size - 1)
if which == "late":  # comes when the others have given up
    if last:
        clock.wait_for(others)
    attempt(lambda: world.all_reduce(a), others)
elif which == "leaves":  # ends normally, one call early
    if not last:
        attempt(lambda: world.all_reduce(a))
elif which == "one by one":  # all is well, and some have more to do after the last call
    time.sleep(1.5 * world.rank)
elif which == "raises":
    if last:
        raise ValueError("a defect of this rank")
    attempt(lambda: world.all_reduce(a))
elif which == "waits for a message":
    if not last:
        attempt(lambda: world.recv(a, world.size - 1))
# a request that was started and never waited for, whose partners never come
elif which == "unfinished":
    if last:
        world.all_reduce(a, wait=False)
elif which == "unfinished, and exits":  # with a code, while the others wait for something else
    if last:
        world.all_reduce(a, wait=False)
        sys.exit(3)
    attempt(lambda: world.recv(a, world.size - 1))
elif which == "unfinished in two groups":  # each ends with a call that the others never come to
    part = world.split(0)
    (part if last else world).all_reduce(a, wait=False)
elif which == "forgotten":  # started by all and waited for by none: nothing is wrong
    world.all_reduce(a, wait=False)
elif which == "forgotten, and one is late":
    if last:
        time.sleep(4)
    world.all_reduce(a, wait=False)
elif which == "caught":  # the error is caught; the program may go on to its end, but not to a hang
    if last:
        clock.wait_for(others)
    else:
        try:
            attempt(lambda: world.barrier(), others)
        except CollectiveError:
            pass
elif which == "elsewhere":  # one is in a group's call, the others in the world's
    part = world.split(0)
    attempt(part.barrier if last else world.barrier)
elif which == "cores":  # waits 2 s for the last rank, and counts what it used meanwhile
    if last:
        time.sleep(2)
    used = time.process_time()
    world.barrier()
    used = time.process_time() - used
    world.all_reduce(a, wait=False).wait()
    print(f"rank {world.rank} used {used:.3f} s\n", end="", flush=True)
# calls that are made again and again, whose data do not wait for headers
elif which.startswith("again"):
    n = world.size
    big = np.zeros(300_000 * n, np.float32)
    more = int(which == "again, other counts" and world.rank == 0)
    counts, given = [300_000] * n, [300_000] * (n - 1) + [300_000 - more]
    x = world.all_to_all_v_init(big, given, np.zeros_like(big), counts)
    y = world.all_gather_v_init(big, [(p, p + 1) for p in range(n)])
    if which == "again, another order":
        both = (y, x) if last else (x, y)
        attempt(lambda: [request.wait() for request in [one.start() for one in both]], everybody)
    elif which == "again, another call":  # and the ranks go on, as far as they can
        try:
            attempt(world.barrier if last else lambda: x.start().wait(), everybody)
        except CollectiveError as error:
            try:
                y.start() if last else world.barrier()
            except CollectiveError as second:
                print(f"rank {world.rank}: the same error {second is error}\n", end="", flush=True)
    elif which == "again, late":
        if last:
            clock.wait_for(others)
        attempt(lambda: x.start().wait(), others)
    elif which == "again, unfinished":
        if last:
            x.start()
            try:
                x.start()
            except CollectiveError as error:
                print(f"rank {world.rank}: {error}\n", end="", flush=True)
    elif which == "again, forgotten":
        y.start()
    else:
        attempt(lambda: x.start().wait(), everybody)
elif which == "killed":
    if last:
        os.kill(os.getpid(), 9)
    attempt(world.barrier)
