"""Run by test_c10d.py under a launcher: torch's own wrappers over backend odyssey, beside the
same over Gloo.

c10d_wrappers.py [plain]       plain: without `import odyssey.torch`, as a script that only names the backend
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

if "plain" not in sys.argv:
    import odyssey.torch  # noqa: F401

torch.set_num_threads(1)
dist.init_process_group("odyssey")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
assert (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) == (RANK, SIZE)
assert int(os.environ["LOCAL_RANK"]) == RANK
GLOO = dist.new_group(list(range(SIZE)), backend="gloo")


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(1, 4, 3)
    return torch.nn.Sequential(
        conv, torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 10)
    )


torch.manual_seed(1)
X, Y = torch.randn(4 * SIZE, 1, 8, 8), torch.randint(0, 10, (4 * SIZE,))
X, Y = X[4 * RANK : 4 * RANK + 4], Y[4 * RANK : 4 * RANK + 4]


def train(model, optimizer, steps: int = 3) -> float:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
    return loss.item()


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def alike(values: torch.Tensor) -> None:
    rows = [torch.zeros_like(values) for _ in range(SIZE)]
    dist.all_gather(rows, values)
    assert all(torch.equal(row, values) for row in rows)


found = {}
for group in (None, GLOO):
    for how in (
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ):
        model = DistributedDataParallel(net(), process_group=group, **how)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        alike(weights(model))
        found.setdefault(str(how), []).append(weights(model))
for how, (mine, gloos) in found.items():
    torch.testing.assert_close(mine, gloos, msg=how)

model = DistributedDataParallel(net())
with model.no_sync():
    torch.nn.functional.cross_entropy(model(X), Y).backward()
with model.join():
    for _ in range(1 + RANK):
        torch.nn.functional.cross_entropy(model(X), Y).backward()

model = DistributedDataParallel(net())
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
train(model, optimizer)
alike(weights(model))
plain = DistributedDataParallel(net())
train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
torch.testing.assert_close(weights(model), weights(plain))

if hasattr(torch.distributed, "fsdp"):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (SIZE,))
    model = net()[-1]
    whole = DistributedDataParallel(net()[-1])
    fully_shard(model, mesh=mesh)
    X = X.repeat(1, 4, 1, 1)[:, :, :6, :6].reshape(4, -1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    full = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(full, weights(whole))

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

mesh = init_device_mesh(
    "cpu", (SIZE // 2, 2) if SIZE % 2 == 0 else (1, SIZE), mesh_dim_names=("data", "layers")
)
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
alone = layers(torch.ones(4, 8))
split = parallelize_module(layers, mesh["layers"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
out = split(torch.ones(4, 8))
out.sum().backward()
torch.testing.assert_close(out, alone)
half = torch.ones(2)
dist.all_reduce(half, group=mesh["layers"].get_group())
assert half[0] == mesh["layers"].size()
print("trained", flush=True)
dist.destroy_process_group()
