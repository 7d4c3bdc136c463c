"""As contract.py: calls that differ between ranks, and groups of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from contract import case, neighbours

from odyssey.comm import bfloat16
from odyssey.errors import CollectiveError, ConfigError

# --- calls that differ ----------------------------------------------------------------------------


def different(c, mine, theirs, *, words=()):
    """`theirs` on the last rank, `mine` on the others: an error on all, naming both; and the
    group goes on.
    """
    if c.size == 1:
        return
    last = c.size - 1
    with pytest.raises(CollectiveError) as caught:
        (theirs if c.rank == last else mine)()
    text = str(caught.value)
    assert "\n" not in text and text.count("contract_groups.py:") == 2, text
    for word in (f"rank {c.ranks[0]} ", f"rank {c.ranks[last]} ", *words):
        assert word in text, (word, text)
    assert c.all_reduce(np.ones(2)).tolist() == [c.size] * 2


@case
def another_operation(c):
    a = np.ones(4)
    different(c, lambda: c.all_reduce(a), lambda: c.broadcast(a), words=("all_reduce", "broadcast"))
    different(c, lambda: c.barrier(), lambda: c.all_gather(a), words=("barrier", "all_gather"))
    different(
        c,
        lambda: c.gather(a),
        lambda: c.all_reduce(a, wait=False).wait(),
        words=("gather", "all_reduce"),
    )
    assert (a == 1).all()


@case
def another_dtype(c):
    different(
        c,
        lambda: c.all_reduce(np.ones(4, np.int64)),
        lambda: c.all_reduce(np.ones(4, np.float64)),
        words=("int64", "float64"),
    )
    different(
        c, lambda: c.broadcast(np.ones(4, np.uint16)), lambda: c.broadcast(np.zeros(4, bfloat16))
    )


@case
def another_shape(c):
    different(
        c,
        lambda: c.all_reduce(np.ones(4)),
        lambda: c.all_reduce(np.ones(5)),
        words=("(4,)", "(5,)"),
    )
    different(
        c,
        lambda: c.all_gather(np.ones((2, 3))),
        lambda: c.all_gather(np.ones((3, 2))),
        words=("(2,3)", "(3,2)"),
    )
    different(c, lambda: c.broadcast(np.ones(2)), lambda: c.broadcast(np.ones(200_000)))
    rows = c.size * 2
    different(
        c, lambda: c.reduce_scatter(np.ones(rows)), lambda: c.reduce_scatter(np.ones(2 * rows))
    )


@case
def another_op_or_root(c):
    a = np.ones(4)
    different(c, lambda: c.all_reduce(a), lambda: c.all_reduce(a, "max"), words=("sum", "max"))
    different(c, lambda: c.all_reduce(a), lambda: c.all_reduce(a, "mean"), words=("sum", "mean"))
    different(
        c,
        lambda: c.broadcast(a, 0),
        lambda: c.broadcast(a, c.size - 1),
        words=("root 0", f"root {c.size - 1}"),
    )
    different(
        c, lambda: c.reduce(a, root=0), lambda: c.reduce(a, root=1), words=("root 0", "root 1")
    )


@case
def counts_that_do_not_fit_each_other(c):
    n, receive = c.size, np.zeros(20)

    def exchange(extra):
        # what rank 0 gives to the last rank is one more than that expects
        give, take = [1] * n, [1] * n
        if c.rank == 0:
            give[-1] += extra
        c.all_to_all_v(np.ones(20), give, receive, take)

    different(c, lambda: exchange(1), lambda: exchange(0), words=("sends 2 elements", "expects 1"))
    assert not receive.any()
    mine, theirs = [(p, p + 1) for p in range(n)], [(p, p + 1) for p in reversed(range(n))]
    different(c, lambda: c.all_gather_v(receive, mine), lambda: c.all_gather_v(receive, theirs))
    different(
        c,
        lambda: c.scatter(np.ones((n, 3)) if c.rank == 0 else None),
        lambda: c.scatter(None, out=np.zeros(4)),
        words=("float64 (3,)", "float64 (4,)"),
    )


@case
def a_wrong_start_form_fails_when_waited_for(c):
    if c.size == 1:
        return
    a = np.ones(4)
    good = c.all_reduce(a, wait=False)
    bad = c.all_reduce(a, wait=False) if c.rank else c.all_gather(a, wait=False)
    after = c.all_reduce(a, wait=False)
    assert after.wait().tolist() == [c.size] * 4
    with pytest.raises(CollectiveError) as first:
        bad.wait()
    assert bad.test()
    with pytest.raises(CollectiveError) as second:
        bad.wait()
    assert first.value is second.value
    assert good.wait().tolist() == [c.size] * 4


# --- groups ---------------------------------------------------------------------------------------


@case
def split_by_color_and_key(c):
    part = c.split(c.rank % 2, key=-c.rank)
    wanted = [p for p in reversed(range(c.size)) if p % 2 == c.rank % 2]
    assert part.ranks == tuple(c.ranks[p] for p in wanted)
    assert (part.rank, part.size) == (wanted.index(c.rank), len(wanted))
    assert part.name == c.name and 0 <= part.local_rank < part.local_size <= part.size
    assert part.all_reduce(np.array([c.rank])).tolist() == [sum(wanted)]
    assert part.broadcast(np.array([c.rank]), part.size - 1).tolist() == [wanted[-1]]
    lonely = c.split(c.rank)
    assert lonely.size == 1 and lonely.ranks == (c.ranks[c.rank],)
    assert lonely.all_gather(np.array([c.rank])).tolist() == [[c.rank]]
    whole = c.split(3)
    assert whole.ranks == c.ranks and whole.rank == c.rank
    whole.barrier()
    for made in (part, lonely, whole):
        made.close()
    whole.close()  # nothing happens
    if c.name in ("mpi", "shm") and c.size > 1:
        for use in (
            whole.barrier,
            lambda: whole.all_reduce(np.ones(3, np.float32)),
            lambda: whole.send(np.ones(3), 0),
        ):
            with pytest.raises(CollectiveError, match="was closed; make a new one"):
                use()
    c.barrier()  # the others go on


@case
def split_without_some(c):
    part = c.split(None if c.rank == c.size - 1 else 0)
    assert (part is None) == (c.rank == c.size - 1)
    if part is not None:
        assert part.size == c.size - 1
        assert part.all_reduce(np.ones(1)).tolist() == [part.size]
    assert c.split(None) is None
    for color in (-1, 0.5, "a"):
        with pytest.raises(ConfigError, match="color"):
            c.split(color)


@case
def groups_of_groups(c):
    part = c.group(range(c.size))
    while part is not None and part.size > 1:
        smaller = part.group([p for p in reversed(range(1, part.size))])
        assert (smaller is None) == (part.rank == 0)
        if smaller is not None:
            assert smaller.ranks == tuple(reversed(part.ranks[1:]))
            gathered = smaller.all_gather(np.array(smaller.ranks[smaller.rank]))
            assert gathered.tolist() == list(smaller.ranks)
        part = smaller
    for wrong in ([], [0, 0], [c.size], [-1]):
        with pytest.raises(ConfigError, match="give different ranks"):
            c.group(wrong)
    if c.size > 1:
        different(c, lambda: c.group([0]), lambda: c.group([1]))


@case
def groups_work_at_the_same_time(c):
    """Each half makes calls of its own, of different kinds and numbers, mixed with calls of the
    whole.
    """
    half = c.split(c.rank % 2)
    pending = c.all_reduce(np.ones(3), wait=False)
    for i in range(3 if c.rank % 2 else 5):
        assert half.all_reduce(np.array([i])).tolist() == [i * half.size]
    mine = half.all_gather(np.array([c.rank]), wait=False)
    assert pending.wait().tolist() == [c.size] * 3
    assert len(mine.wait()) == half.size
    after, before = neighbours(half)
    request = half.send(np.array([c.ranks[c.rank]]), after, wait=False)
    assert half.recv(np.zeros(1, np.int64), before).tolist() == [half.ranks[before]]
    request.wait()
    c.barrier()


@case
def wrong_calls_in_a_group_are_named_with_world_ranks(c):
    if c.size < 3:
        return
    part = c.group(range(1, c.size))
    if part is not None:
        a = np.ones(2)
        different(part, lambda: part.all_reduce(a), lambda: part.all_reduce(a, "min"))
    c.barrier()
