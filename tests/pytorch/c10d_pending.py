"""Run by test_pending.py under a launcher: calls of backend "odyssey" that are under way.

Argument: the cases.

Ranks tell each other by files when to go on, so that nothing is measured by the clock.
"""

from __future__ import annotations

import datetime
import random
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import odyssey.torch  # noqa: F401  registers the backend

FOLDER = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("odyssey")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
EVERYONE = list(range(SIZE))


def tell(word: str) -> None:
    (FOLDER / word).touch()


def hear(word: str) -> None:
    until = time.monotonic() + 120
    while not (FOLDER / word).exists():
        assert time.monotonic() < until, word
        time.sleep(0.01)


def pending() -> None:
    """Works are made at once and complete when the others come, within a group in the order of
    the calls.
    """
    if RANK == 0:
        tensors = [torch.full((n,), 1.0) for n in (3, 70_000, 5)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        rows = [torch.empty(2) for _ in EVERYONE]
        works.append(dist.all_gather(rows, torch.zeros(2), async_op=True))
        future = works[1].get_future().then(lambda f: f.value()[0].sum().item())
        assert not any(work.is_completed() for work in works)
        assert not future.done()
        tell("made")
        for work in draw.sample(works, len(works)):
            assert work.wait()
            assert work.is_completed() and work.is_success()
        assert future.wait() == 70_000 * SIZE * (SIZE + 1) / 2
        assert works[0].result() == [tensors[0]]
    else:
        hear("made")
        tensors = [torch.full((n,), RANK + 1.0) for n in (3, 70_000, 5)]
        for t in tensors:
            dist.all_reduce(t)
        rows = [torch.empty(2) for _ in EVERYONE]
        dist.all_gather(rows, torch.full((2,), float(RANK)))
    assert all((t == SIZE * (SIZE + 1) / 2).all() for t in tensors)
    assert [row[0].item() for row in rows] == EVERYONE


def order() -> None:
    """Two groups, whose calls ranks start in opposite orders, and wait for in random ones."""
    groups = [dist.new_group(EVERYONE) for _ in range(3)]
    own = random.Random(RANK)
    for n in (1, 9_000, 300_000):
        tensors, works = [torch.full((n,), float(i + RANK)) for i in range(3)], []
        for i in [0, 1, 2] if RANK % 2 else [2, 1, 0]:
            works.append(dist.all_reduce(tensors[i], group=groups[i], async_op=True))
        for work in own.sample(works, 3):
            work.wait()
        for i, t in enumerate(tensors):
            assert (t == sum(i + r for r in EVERYONE)).all()
    # a call that its own thread waits for, behind and between those that nobody waits for yet
    works = []
    for i in [0, 1] if RANK % 2 else [1, 0]:
        works.append(dist.barrier(group=groups[2], async_op=True))
        works.append(dist.all_reduce(torch.ones(1), group=groups[1 - i], async_op=True))
        dist.all_reduce(torch.ones(1), group=groups[2])
    for work in works:
        work.wait()


def mixed() -> None:
    """Calls that are waited for and calls that are not, in one group and several, random,
    checked by hand.
    """
    groups = [None, *(dist.new_group(EVERYONE) for _ in range(2))]
    open_works = []
    for k in range(150):
        i, n, later, kind = (
            draw.randrange(3),
            draw.choice([1, 1_000, 40_000]),
            draw.random() < 0.6,
            draw.random(),
        )
        t = torch.full((n,), float(RANK + k))
        if kind < 0.7:
            work = dist.all_reduce(t, group=groups[i], async_op=later)
            wanted = sum(r + k for r in EVERYONE)
        else:
            work = dist.broadcast(t, k % SIZE, group=groups[i], async_op=later)
            wanted = k % SIZE + k
        open_works.append((work, t, wanted))
        while len(open_works) > 8 or (open_works and draw.random() < 0.2):
            work, t, wanted = open_works.pop(random.randrange(len(open_works)))
            if work is not None:
                work.wait()
            assert (t == wanted).all()
    for work, t, wanted in open_works:
        assert (work is None or work.wait()) and (t == wanted).all()


def some_groups() -> list[list[int]]:
    """Ranks of groups: all, and pairs and trios that overlap, some of them again."""
    found = [EVERYONE, EVERYONE]
    for n in draw.choices([2, 3], k=5):
        first = draw.randrange(SIZE)
        found.append(sorted({(first + i) % SIZE for i in range(min(n, SIZE))}))
    return draw.sample(found, len(found)) + [found[2], EVERYONE]


def groups() -> None:
    """Groups of the same and of overlapping ranks, made while calls of those before are under
    way.
    """
    own = random.Random(RANK)
    for _ in range(4):
        made, open_works = [(None, EVERYONE)], []
        for k, ranks in enumerate(some_groups()):
            n = draw.choice([1, 700, 60_000])
            for group, members in own.sample(made, len(made)):
                if RANK in members:
                    t = torch.full((n,), float(RANK + k))
                    work = dist.all_reduce(t, group=group, async_op=True)
                    open_works.append((work, t, sum(r + k for r in members)))
            made.append((dist.new_group(ranks), ranks))
        for work, t, wanted in own.sample(open_works, len(open_works)):
            work.wait()
            assert (t == wanted).all()


def threads() -> None:
    """Threads of a program that each make calls in a group of their own, while another makes
    groups.
    """
    own, failed = [dist.new_group(EVERYONE) for _ in range(2)], []

    def calls(group: dist.ProcessGroup) -> None:
        try:
            for k in range(300):
                t = torch.full((1 + 90 * k,), float(RANK + k))
                dist.all_reduce(t, group=group)
                assert (t == sum(r + k for r in EVERYONE)).all()
        except BaseException as error:
            failed.append(error)
            raise

    running = [threading.Thread(target=calls, args=(group,)) for group in own]
    for thread in running:
        thread.start()
    for ranks in some_groups() + some_groups():
        group, t = dist.new_group(ranks), torch.ones(3)
        if RANK in ranks:
            dist.all_reduce(t, group=group)
            assert (t == len(ranks)).all()
    for thread in running:
        thread.join()
    assert not failed


def again() -> None:
    """The default group left and made again, while rank 0 is late to leave the one of before."""
    for k in range(3):
        dist.all_reduce(t := torch.full((3,), float(RANK)))
        assert (t == sum(EVERYONE)).all()
        if RANK == 0:
            for rank in EVERYONE[1:]:
                hear(f"left {rank} {k}")
            time.sleep(0.3)  # they look for the next group's store meanwhile
        dist.destroy_process_group()
        tell(f"left {RANK} {k}")
        dist.init_process_group("odyssey")


def timeout() -> None:
    """Kept by group, and by wait; the error names who is missing, and the call's place."""
    patient, hasty = (
        dist.new_group(EVERYONE),
        dist.new_group(EVERYONE, timeout=datetime.timedelta(seconds=1)),
    )
    again = dist.new_group(EVERYONE)
    if RANK < SIZE - 1:
        work = dist.all_reduce(torch.ones(3), group=patient, async_op=True)
        for call, named in (
            (lambda: dist.all_reduce(torch.ones(2), group=hasty), "all_reduce float32 (2,) sum"),
            (
                dist.all_reduce(torch.ones(4), group=again, async_op=True),
                "all_reduce float32 (4,) sum",
            ),
        ):
            begun = time.monotonic()
            try:
                call() if callable(call) else call.wait(datetime.timedelta(seconds=1.5))
            except RuntimeError as e:
                assert f"s in {named} at " in str(e) and "c10d_pending.py:" in str(e), e
                assert f"rank {SIZE - 1} did not come" in str(e), e
                assert time.monotonic() - begun >= 0.9
            else:
                raise AssertionError("nothing was missing")
        assert not work.is_completed()
        tell(f"over {RANK}")
        work.wait()
    else:
        for rank in range(SIZE - 1):
            hear(f"over {rank}")
        dist.all_reduce(torch.ones(3), group=patient)


def anybody() -> None:
    """Messages from whoever has sent, with the place of the sender."""
    if RANK == 0:
        seen = []
        for _ in range(2 * (SIZE - 1)):
            t = torch.empty(4)
            seen.append(dist.recv(t))
            assert (t == 10 * seen[-1] + seen.count(seen[-1])).all()  # of one sender in their order
        assert sorted(seen) == sorted(EVERYONE[1:] * 2)
    else:
        dist.send(torch.full((4,), 10.0 * RANK + 1), 0)
        dist.send(torch.full((4,), 10.0 * RANK + 2), 0)


def bits() -> None:
    own = torch.Generator().manual_seed(RANK)
    for dtype in (torch.int32, torch.int64, torch.uint8):
        mine = torch.randint(0, 200, (SIZE, 5), generator=own).to(dtype)
        rows = [torch.empty_like(mine) for _ in EVERYONE]
        dist.all_gather(rows, mine)
        for op, call in (
            (dist.ReduceOp.BAND, torch.bitwise_and),
            (dist.ReduceOp.BOR, torch.bitwise_or),
            (dist.ReduceOp.BXOR, torch.bitwise_xor),
        ):
            wanted = rows[0]
            for row in rows[1:]:
                wanted = call(wanted, row)
            t, to_root, part = mine.clone(), mine.clone(), torch.empty(5, dtype=dtype)
            dist.all_reduce(t, op=op)
            dist.reduce(to_root, SIZE - 1, op=op)
            dist.reduce_scatter_tensor(part, mine.reshape(-1), op=op)
            assert torch.equal(t, wanted) and torch.equal(part, wanted[RANK])
            assert torch.equal(to_root, wanted if RANK == SIZE - 1 else mine)


def sparse() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        dense = torch.zeros(6, 3)
        dense[RANK], dense[5] = RANK + 1.0, 2.0
        t = dense.to(dtype).to_sparse(1)
        dist.all_reduce(t)
        wanted = torch.zeros(6, 3)
        wanted[:SIZE] = torch.arange(1.0, SIZE + 1)[:, None]
        wanted[5] += 2.0 * SIZE
        assert torch.equal(t.to_dense(), wanted.to(dtype)), dtype
    table = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(10, 2, sparse=True))
    table(torch.tensor([RANK, 9])).sum().backward()
    grad = table.module.weight.grad.to_dense()
    assert torch.allclose(grad[9], torch.ones(2)) and torch.allclose(
        grad[0], torch.full((2,), 1.0 / SIZE)
    )


def device() -> None:
    """What torch asks of the group beside calls: its device, and a checkpoint that is written
    behind the training.
    """
    import torch.distributed.checkpoint as dcp

    assert dist.distributed_c10d._get_pg_default_device() == torch.device("cpu")
    model = torch.nn.Linear(4, 4)
    dist.broadcast(model.weight.data, 0)
    saved = dcp.async_save({"model": model.state_dict()}, checkpoint_id=str(FOLDER / "saved"))
    saved.result()
    other = {"model": torch.nn.Linear(4, 4).state_dict()}
    dcp.load(other, checkpoint_id=str(FOLDER / "saved"))
    assert torch.equal(other["model"]["weight"], model.weight)


for case in sys.argv[2:]:
    draw = random.Random(case)
    globals()[case]()
    print(f"{case} as expected\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
