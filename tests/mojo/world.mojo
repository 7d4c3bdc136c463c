"""What test_mojo_mpi.py asks of the communicators: a program with a word for each.

Not a test by itself: the ranks' output is compared there.
"""

from std.sys import argv

from kernels.elementwise import add
from kernels.lanes import Ptr
from kernels.reduce import split
from shared.training.arena import aligned_zeros
from shared.training.communicator import Communicator, ReduceOp
from shared.training.world import World, connect, stop

comptime SHARDS = 7
comptime FLOATS = 100  # no multiple of any number of ranks here


def main():
    var word = String(argv()[1])
    try:
        run(word)
    except e:
        stop(e)


def run(word: String) raises:
    if word == "solo":
        var alone = connect("local")
        everything(alone)
        return
    var world = connect("mpi" if word == "forced" else "auto")
    if word == "everything" or word == "forced":
        everything(world)
    elif word == "tree":
        tree(world)
    elif word == "refused":  # MPI itself says no
        world.send(aligned_zeros(16), 4, 0, tag=-7)
    else:
        raise Error("[test] what is ", word)


def everything[C: Communicator](world: C) raises:
    """Every call, with results that each rank can check by itself."""
    var n = world.size()
    var r = world.rank()
    world.barrier()
    # broadcast, from the last rank
    var text = String("rank ", r, " speaks")
    if world.broadcast_text(text, n - 1) != String("rank ", n - 1, " speaks"):
        raise Error("[test] broadcast_text")
    if world.broadcast_text("") != "":
        raise Error("[test] broadcast_text of nothing")
    var floats = aligned_zeros(FLOATS)
    floats[unsafe_offset=FLOATS - 1] = Float32(r + 1)
    world.broadcast_floats(floats, FLOATS)
    if floats[unsafe_offset=FLOATS - 1] != 1:
        raise Error("[test] broadcast_floats")
    # numbers
    var values: List[Int64] = [Int64(r), Int64(-r), Int64(1) << 40]
    world.all_reduce(values, ReduceOp.SUM)
    if values[0] != Int64(n * (n - 1) // 2) or values[2] != Int64(n) << 40:
        raise Error("[test] all_reduce")
    if world.all_reduce_max(r) != n - 1 or world.all_reduce_min(-r) != 1 - n:
        raise Error("[test] all_reduce_max or _min")
    if world.all_reduce_sum(2) != 2 * n:
        raise Error("[test] all_reduce_sum")
    # rank r gives p + 1 floats of value 10 r + p to rank p
    var give = List[Int]()
    var take = List[Int]()
    var out = aligned_zeros(n * (n + 1))
    var into = aligned_zeros(n * (n + 1))
    var at = 0
    for p in range(n):
        give.append(p + 1)
        take.append(r + 1)
        for _ in range(p + 1):
            out[unsafe_offset=at] = Float32(10 * r + p)
            at += 1
    world.all_to_all_v(out, give, into, take)
    for p in range(n):
        for i in range(r + 1):
            if into[unsafe_offset=p * (r + 1) + i] != Float32(10 * p + r):
                raise Error("[test] all_to_all_v")
    # rank r has r floats: the first none
    var starts = List[Int]()
    for p in range(n + 1):
        starts.append(p * (p - 1) // 2)
    for i in range(starts[r], starts[r + 1]):
        out[unsafe_offset=i] = Float32(r)
    world.all_gather_v(out, starts)
    for p in range(n):
        for i in range(starts[p], starts[p + 1]):
            if out[unsafe_offset=i] != Float32(p):
                raise Error("[test] all_gather_v")
    # round the ring
    if n > 1:
        out[] = Float32(r)
        if r == 0:
            world.send(out, 1, 1, tag=5)
            world.receive(into, 1, n - 1, tag=5)
        else:
            world.receive(into, 1, r - 1, tag=5)
            world.send(out, 1, (r + 1) % n, tag=5)
        if into[] != Float32((r + n - 1) % n):
            raise Error("[test] send and receive")
    var wrong = give.copy()
    wrong.append(1)
    for k in range(4):
        try:
            if k == 0:
                world.all_to_all_v(out, wrong, into, take)
            elif k == 1:
                world.broadcast_floats(out, 1, n)
            elif k == 2:
                _ = wrong.pop()
                wrong[0] = 1 << 31
                world.all_to_all_v(out, wrong, into, take)
            else:
                world.all_gather_v(out, give)
        except e:
            if not String(e).startswith("[comm] "):
                raise e^
            continue
        raise Error("[test] call ", k, " was not refused")
    if r == 0:
        print(world.why())
    print("rank", r, "of", n, "on", world.local_rank(), world.local_size())


def tree[C: Communicator](world: C) raises:
    """Sums of shards along the tree of docs/determinism.md, completed between the ranks; prints their bits.
    """
    var n = world.size()
    var r = world.rank()
    var nodes = List[List[Int]]()  # of all ranks: first shard, shards
    var counts = List[Int]()
    for p in range(n):
        var before = len(nodes)
        inside(nodes, 0, SHARDS, SHARDS * p // n, SHARDS * (p + 1) // n)
        counts.append(len(nodes) - before)
    var starts = List[Int]()
    for p in range(n + 1):
        starts.append(FLOATS * p // n)
    var mine = counts[r]
    var first = 0
    for p in range(r):
        first += counts[p]
    var sums = aligned_zeros(mine * 112)
    for i in range(mine):
        partial(
            sums.unsafe_offset(112 * i),
            nodes[first + i][0],
            nodes[first + i][1],
        )
    var send = aligned_zeros(mine * FLOATS)
    var give = List[Int]()
    var take = List[Int]()
    var at = 0
    for p in range(n):
        give.append(mine * (starts[p + 1] - starts[p]))
        take.append(counts[p] * (starts[r + 1] - starts[r]))
        for i in range(mine):
            for f in range(starts[p], starts[p + 1]):
                send[unsafe_offset=at] = sums[unsafe_offset=112 * i + f]
                at += 1
    var own = starts[r + 1] - starts[r]
    var all = aligned_zeros(len(nodes) * own)
    world.all_to_all_v(send, give, all, take)
    var result = aligned_zeros(FLOATS)
    var done = complete(all, nodes, 0, SHARDS, own)
    for i in range(own):
        result[unsafe_offset=starts[r] + i] = all[unsafe_offset=done * own + i]
    world.all_gather_v(result, starts)
    if r == 0:
        for i in range(FLOATS):
            print(hex(result[unsafe_offset=i].to_bits()), end=" ")


def inside(mut found: List[List[Int]], lo: Int, n: Int, a: Int, b: Int):
    if b <= lo or lo + n <= a:
        return
    if a <= lo and lo + n <= b:
        found.append([lo, n])
        return
    inside(found, lo, split(n), a, b)
    inside(found, lo + split(n), n - split(n), a, b)


def partial(into: Ptr, lo: Int, n: Int):
    """The sum of shards lo .. lo+n-1, whose floats are of very different sizes.
    """
    if n == 1:
        for i in range(FLOATS):
            var x = (lo * 7919 + i * 104729) % 1000003
            into[unsafe_offset=i] = Float32(x) / Float32(
                3 ** (1 + (i + lo) % 9)
            )
        return
    partial(into, lo, split(n))
    var right = aligned_zeros(112)
    partial(right, lo + split(n), n - split(n))
    add(into, into, right, FLOATS)


def complete(
    all: Ptr, nodes: List[List[Int]], lo: Int, n: Int, own: Int
) -> Int:
    """Adds what the ranks gave; says which piece has the sum."""
    for i in range(len(nodes)):
        if nodes[i][0] == lo and nodes[i][1] == n:
            return i
    var a = complete(all, nodes, lo, split(n), own)
    var b = complete(all, nodes, lo + split(n), n - split(n), own)
    for i in range(own):
        all[unsafe_offset=a * own + i] += all[unsafe_offset=b * own + i]
    return a
