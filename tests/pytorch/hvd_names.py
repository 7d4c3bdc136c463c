"""Run by test_horovod.py on ranks: Horovod's calls, with what they must give."""

from __future__ import annotations

import torch

import odyssey.horovod.torch as hvd
import odyssey.torch.horovod

assert hvd is odyssey.torch.horovod
hvd.init()
R, N = hvd.rank(), hvd.size()
assert (
    hvd.local_rank() == R
    and hvd.cross_size() == 1
    and hvd.cross_rank() == 0
    and hvd.is_homogeneous()
)

assert hvd.allreduce(torch.tensor(float(R))).item() == (N - 1) / 2
assert hvd.allreduce(torch.tensor([R]), op=hvd.Sum).tolist() == [N * (N - 1) // 2]
assert (
    hvd.allreduce(torch.full((2,), R + 1.0), op=hvd.Max, prescale_factor=2.0, postscale_factor=0.5)[
        0
    ]
    == N
)
assert hvd.allreduce(torch.ones(3), compression=hvd.Compression.fp16).dtype is torch.float32
handle = hvd.allreduce_async_(torch.ones(3))
assert hvd.synchronize(handle).tolist() == [1, 1, 1] and hvd.poll(handle)
assert [
    t.item() for t in hvd.grouped_allreduce([torch.tensor(1.0), torch.tensor(2.0)], op=hvd.Sum)
] == [N, 2 * N]

rows = hvd.allgather(torch.full((R + 1, 2), R))
assert rows[:, 0].tolist() == [r for r in range(N) for _ in range(r + 1)]
assert hvd.broadcast(torch.tensor([R]), N - 1).tolist() == [N - 1]
assert hvd.alltoall(torch.arange(N) + 10 * R).tolist() == [10 * r + R for r in range(N)]
got, counts = hvd.alltoall(torch.full((sum(range(1, N + 1)),), R), torch.arange(1, N + 1))
assert counts.tolist() == [R + 1] * N and got.tolist() == [
    r for r in range(N) for _ in range(R + 1)
]
part = hvd.reducescatter(torch.arange(N + 1), op=hvd.Sum)
assert part.tolist() == ([0, N] if R == 0 else [(R + 1) * N])
first = hvd.add_process_set([0])
if first.included():
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).item() == 1
hvd.remove_process_set(first)

given = {
    "a": [1, (2.5, None)],
    3: torch.arange(4).bfloat16(),
    "e": torch.empty(0, 2),
    "s": torch.tensor(7),
}
sent = hvd.broadcast_object(given if R == 0 else None)
assert (
    sent["a"] == [1, (2.5, None)] and sent[3].tolist() == [0, 1, 2, 3] and sent["e"].shape == (0, 2)
)
assert sent["s"].item() == 7 and sent[3].dtype is torch.bfloat16
assert hvd.allgather_object({"rank": R})[N - 1] == {"rank": N - 1}
assert hvd.broadcast_object({1, 2} if R == 0 else None, allow_pickle=True) == {1, 2}
for call, message in (
    (lambda: odyssey.torch.horovod.objects.packed({1}), "allow_pickle=True"),
    (
        lambda: odyssey.torch.horovod.objects.unpacked({"pickle": b""}),
        "allow_pickle=True on all ranks",
    ),
    (
        lambda: odyssey.torch.horovod.objects.unpacked({"tensor": [1]}),
        "no object as ranks send them",
    ),
    (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "op=Adasum is not there"),
):
    try:
        call()
        raise AssertionError(message)
    except odyssey.errors.OdysseyError as e:
        assert message in str(e)


def trained(**how) -> torch.nn.Module:
    torch.manual_seed(R)
    model = torch.nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **how)
    assert isinstance(optimizer, torch.optim.SGD)
    for k in range(3):
        optimizer.zero_grad()
        for _ in range(how.get("backward_passes_per_step", 1)):
            model(torch.full((2, 3), float(R + k))).square().mean().backward()
        if k == 1:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(p, hvd.broadcast(p, N - 1)) for p in model.parameters())
    return model


plain, divided = trained(), trained(gradient_predivide_factor=2.0)
torch.testing.assert_close(plain.weight, divided.weight)
trained(backward_passes_per_step=2, compression=hvd.Compression.bf16)

model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(1 + R):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
assert hvd.join() == N - 1

for dense in (False, True):
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), sparse_as_dense=dense
    )
    table(torch.tensor([R])).sum().backward()
    optimizer.step()
    assert table.weight.grad.is_sparse != dense
    assert torch.equal(
        table.weight.grad.to_dense().sum(1), torch.tensor([2 / N] * N + [0.0] * (4 - N))
    )

# Gradients, against a loss that is written out: of all ranks' losses the sum for a reduction, the
# mean for the others.
torch.manual_seed(5)
every, weights = (
    torch.randn(N, 3, 2, dtype=torch.float64),
    torch.randn(N, 3 * N, 2, dtype=torch.float64),
)


def gradient_of(call, rows: int = 3) -> torch.Tensor:
    x = every[R].clone().requires_grad_()
    y = call(x)
    (y * weights[R, : len(y)]).sum().backward()
    return x.grad


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted)


total = weights.sum(0)
close(gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)), 2 * total[:3])
close(gradient_of(hvd.allreduce), total[:3] / N)
close(gradient_of(lambda x: torch.cat(hvd.grouped_allreduce([x[:1], x[1:]]))), total[:3] / N)
close(gradient_of(hvd.allgather), total[3 * R : 3 * R + 3] / N)
close(gradient_of(lambda x: hvd.broadcast(x, N - 1)), total[:3] / N * (R == N - 1))
splits = torch.zeros(N, dtype=torch.int64)
splits[(R + 1) % N] = 3
close(gradient_of(lambda x: hvd.alltoall(x, splits)[0]), weights[(R + 1) % N, :3])
rows = torch.cat([weights[r, : 3 // N + (r < 3 % N)] for r in range(N)])
close(gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum)), rows * N)
close(gradient_of(hvd.reducescatter), rows)
found = gradient_of(lambda x: hvd.allreduce(x.float(), compression=hvd.Compression.bf16).double())
torch.testing.assert_close(found, total[:3] / N, rtol=0.03, atol=0.03)
assert not hvd.allreduce(torch.ones(2)).requires_grad

assert hvd.allreduce(torch.tensor([-7 * (R == 0), 2**60 + R])).tolist() == [
    -(7 // N),
    2**60 + (N - 1) // 2,
]
assert hvd.allreduce(
    torch.tensor([5]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=0.3
).item() == int(2 * N * 0.3)
shapes = [(2, 3), (3, 2)]
for call, message in (
    (lambda: gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max)), "op=MAX has no gradient"),
    (lambda: hvd.allreduce(torch.ones(shapes[R == 0])), "or other shapes"),
    (lambda: hvd.alltoall(torch.ones(N, 1 + (R == 0))), "give rows of one shape"),
    (lambda: hvd.alltoall(torch.ones(N), torch.ones(N)), "integers that add up"),
    (
        lambda: hvd.alltoall(torch.ones(N), torch.ones(N, 1, dtype=torch.int64)),
        "integers that add up",
    ),
    (lambda: hvd.allgather(torch.tensor(1.0)), "allgather of a number"),
    (lambda: hvd.reducescatter(torch.tensor(1.0)), "reducescatter of a number"),
    (lambda: hvd.broadcast(None, 0), "broadcast of a NoneType"),
    (lambda: hvd.sparse_allreduce_async(torch.ones(2)), "adds sparse tensors"),
):
    if N > 1 or "shape" not in message:
        try:
            call()
            raise AssertionError(message)
        except odyssey.errors.OdysseyError as e:
            assert message in str(e), e
print("same", flush=True)
