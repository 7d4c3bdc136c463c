"""Run by test_c10d.py under a launcher: random collectives over backend odyssey, beside Gloo in
the same processes.

    c10d_random.py SEED COUNT [pretend]

pretend: tensors of backend odyssey are on the pretended device, whose streams are checked.

Numbers are small integers, so that every sum is exact in every dtype and the results must be equal.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import odyssey.torch  # noqa: F401  registers the backend

SEED, COUNT = int(sys.argv[1]), int(sys.argv[2])
DEVICE = "cpu"
if "pretend" in sys.argv:
    sys.path.append(str(Path(__file__).parents[1]))
    from pytorch import pretend_streams

    DEVICE = pretend_streams.use()
dist.init_process_group("odyssey")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
]
OPS = [
    dist.ReduceOp.SUM,
    dist.ReduceOp.MAX,
    dist.ReduceOp.MIN,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.AVG,
]
KINDS = """all_reduce broadcast reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor gather
scatter all_to_all all_to_all_single uneven send objects scatter_objects""".split()
draw = random.Random(SEED)  # the same on all ranks
own = torch.Generator().manual_seed(SEED * 100 + RANK)

groups = [(list(range(SIZE)), None, dist.new_group(list(range(SIZE)), backend="gloo"))]
for _ in range(4):
    members = sorted(draw.sample(range(SIZE), draw.randint(1, SIZE)))
    groups.append((members, dist.new_group(members), dist.new_group(members, backend="gloo")))


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers, now and then not contiguous."""
    values = torch.randint(0, 4, shape, generator=own).to(dtype)
    return values.t().contiguous().t() if values.dim() == 2 and draw.random() < 0.3 else values


def place(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to(DEVICE) for t in tensors]


def expected(op, rows: list[torch.Tensor]) -> torch.Tensor:
    """By hand, of what Gloo has no reduction for; the mean of integers as NCCL rounds it."""
    stacked = torch.stack([r.double() for r in rows])
    if op == dist.ReduceOp.AVG and not rows[0].dtype.is_floating_point:
        total = torch.stack(rows).sum(0, dtype=rows[0].dtype)
        return total.div(len(rows), rounding_mode="trunc")
    how = {
        dist.ReduceOp.SUM: lambda: stacked.sum(0),
        dist.ReduceOp.AVG: lambda: stacked.sum(0).float().double() / len(rows),
        dist.ReduceOp.MAX: lambda: stacked.amax(0),
        dist.ReduceOp.MIN: lambda: stacked.amin(0),
        dist.ReduceOp.PRODUCT: lambda: stacked.prod(0),
    }
    return how[op]().to(rows[0].dtype)


def same(mine: object, other: object, what: str) -> None:
    mine, other = (list(x) if isinstance(x, (list, tuple)) else [x] for x in (mine, other))
    assert len(mine) == len(other), what
    for a, b in zip(mine, other, strict=True):
        if isinstance(a, torch.Tensor):
            a, b = a.cpu().double(), b.cpu().double()
            assert (
                torch.allclose(a, b, rtol=2e-7, atol=0) if "AVG" in what else torch.equal(a, b)
            ), (what, a, b)
        else:
            assert a == b, (what, a, b)


def gathered(t: torch.Tensor, n: int, group) -> list[torch.Tensor]:
    rows = [None] * n
    dist.all_gather_object(rows, t.cpu().contiguous(), group=group)
    return rows


def once(kind: str, members: list[int], group, gloo) -> None:
    n, me, root = len(members), members.index(RANK), draw.choice(members)
    dtype, op, later = draw.choice(DTYPES), draw.choice(OPS), draw.random() < 0.5
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
    what = f"seed {SEED} rank {RANK} {kind} {dtype} {op} {shape} of {members}, root {root}"
    t = numbers(shape, dtype)

    def wait(work):
        if later:
            work.wait()

    more = {"group": group, "async_op": later}
    if kind in ("all_reduce", "reduce"):
        result = t.to(DEVICE, copy=True)
        target = {"dst": root} if kind == "reduce" else {}
        wait(getattr(dist, kind)(result, **target, op=op, **more))
        if kind == "all_reduce" or RANK == root:
            rows = gathered(t, n, gloo)
            same(result, expected(op, rows), what)
        else:
            gathered(t, n, gloo)
    elif kind == "broadcast":
        a, b = t.to(DEVICE, copy=True), t.clone()
        wait(dist.broadcast(a, root, **more))
        dist.broadcast(b, root, group=gloo)
        same(a, b, what)
    elif kind == "all_gather":
        a, b = ([torch.zeros(shape, dtype=dtype) for _ in members] for _ in range(2))
        a = place(a)
        wait(dist.all_gather(a, t.to(DEVICE), **more))
        dist.all_gather(b, t.contiguous(), group=gloo)
        same(a, b, what)
    elif kind == "all_gather_into_tensor":
        a, b = (torch.zeros((n * shape[0], *shape[1:]), dtype=dtype) for _ in range(2))
        a = a.to(DEVICE)
        wait(dist.all_gather_into_tensor(a, t.to(DEVICE), **more))
        dist.all_gather_into_tensor(b, t.contiguous(), group=gloo)
        same(a, b, what)
    elif kind in ("reduce_scatter", "reduce_scatter_tensor"):
        full = numbers((n * shape[0], *shape[1:]), dtype)
        a = torch.zeros(shape, dtype=dtype, device=DEVICE)
        there = full.to(DEVICE)
        given = list(there.contiguous().chunk(n)) if kind == "reduce_scatter" else there
        wait(getattr(dist, kind)(a, given, op=op, **more))
        same(a, expected(op, gathered(full, n, gloo)).chunk(n)[me], what)
    elif kind == "gather":
        a, b = (
            [torch.zeros(shape, dtype=dtype) for _ in members] if RANK == root else None
            for _ in range(2)
        )
        a = a and place(a)
        wait(dist.gather(t.to(DEVICE), a, dst=root, **more))
        dist.gather(t.contiguous(), b, dst=root, group=gloo)
        same(a or [], b or [], what)
    elif kind == "scatter":
        rows = [numbers(shape, dtype) for _ in members]
        a, b = torch.zeros(shape, dtype=dtype, device=DEVICE), torch.zeros(shape, dtype=dtype)
        wait(dist.scatter(a, place(rows) if RANK == root else None, src=root, **more))
        dist.scatter(
            b, [r.contiguous() for r in rows] if RANK == root else None, src=root, group=gloo
        )
        same(a, b, what)
    elif kind == "all_to_all":
        rows = [numbers(shape, dtype) for _ in members]
        a = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in members]
        wait(dist.all_to_all(a, place(rows), **more))
        same(a, [sent[me] for sent in gathered(torch.stack(rows), n, gloo)], what)
    elif kind == "all_to_all_single":
        full = numbers((n * shape[0], *shape[1:]), dtype).contiguous()
        a, b = torch.zeros_like(full).to(DEVICE), torch.zeros_like(full)
        wait(dist.all_to_all_single(a, full.to(DEVICE), **more))
        dist.all_to_all_single(b, full, group=gloo)
        same(a, b, what)
    elif kind == "uneven":
        counts = [[draw.randint(0, 3) for _ in members] for _ in members]  # [from][to]
        send, receive = counts[me], [row[me] for row in counts]
        full = numbers((sum(send), *shape[1:]), dtype).contiguous()
        a, b = (torch.zeros((sum(receive), *shape[1:]), dtype=dtype) for _ in range(2))
        a = a.to(DEVICE)
        wait(dist.all_to_all_single(a, full.to(DEVICE), receive, send, **more))
        dist.all_to_all_single(b, full, receive, send, group=gloo)
        same(a, b, what)
    elif kind == "send" and n > 1:
        to, source = members[(me + 1) % n], members[me - 1]
        a = torch.zeros(shape, dtype=dtype, device=DEVICE)
        large = numbers((draw.randint(1, 40000),), dtype).to(DEVICE)
        b = torch.zeros_like(large)
        works = [
            dist.isend(t.to(DEVICE), to, group=group),
            dist.isend(large, to, group=group, tag=3),
        ]
        works += [dist.irecv(b, source, group=group, tag=3), dist.irecv(a, source, group=group)]
        for work in works:
            work.wait()
        same(a, gathered(t, n, gloo)[me - 1], what)
        same(b.sum(), gathered(large.sum(), n, gloo)[me - 1], what)
    elif kind == "objects":
        a, b = [None] * n, [None] * n
        dist.all_gather_object(a, {"rank": RANK, "shape": shape}, group=group)
        dist.all_gather_object(b, {"rank": RANK, "shape": shape}, group=gloo)
        same(a, b, what)
        one = [("of", root) if RANK == root else None]
        dist.broadcast_object_list(one, root, group=group)
        assert one == [("of", root)], what
    elif kind == "scatter_objects":
        out = [None]
        dist.scatter_object_list(
            out, [f"to {m}" for m in members] if RANK == root else None, root, group=group
        )
        assert out == [f"to {RANK}"], what


for _ in range(COUNT):
    kind, (members, group, gloo) = draw.choice(KINDS), draw.choice(groups)
    state = draw.getstate()
    if RANK in members:
        once(kind, members, group, gloo)
        dist.barrier(group)
    draw.setstate(state)
    draw.random()
with dist._coalescing_manager(async_ops=True, device=torch.device(DEVICE)) as coalesced:
    several = place([torch.full((n,), RANK + 1.0) for n in (3, 1, 9)])
    for tensor in several:
        dist.all_reduce(tensor)
coalesced.wait()
assert all((tensor.cpu() == SIZE * (SIZE + 1) / 2).all() for tensor in several)
scalar = torch.tensor(float(RANK), device=DEVICE)
dist.all_reduce(scalar)
assert scalar.item() == sum(range(SIZE)) and math.isfinite(scalar.item())
flag = torch.tensor([RANK == 0, False, True]).to(DEVICE)
dist.all_reduce(flag, op=dist.ReduceOp.MAX)
assert flag.tolist() == [True, False, True]
if DEVICE != "cpu":
    assert pretend_streams.checked.reads > COUNT, pretend_streams.checked.reads
print("compared", flush=True)
dist.destroy_process_group()
