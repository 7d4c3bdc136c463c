"""Run by test_c10d.py under a launcher: torch's DDP over backend "odyssey", with a module on a device.

c10d_device.py DEVICE

Prints the hash of the weights.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import odyssey.torch  # noqa: F401  registers the backend

sys.path.append(str(Path(__file__).parents[1]))
from pytorch import pretend_streams

DEVICE = sys.argv[1]
torch.set_num_threads(1)
pretend_streams.use(own_stream=False)  # PyTorch gives backward passes the stream of forward()
dist.init_process_group("odyssey")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
digest = hashlib.sha256()
for bucket_view in (False, True):
    torch.manual_seed(RANK)  # DDP sends the weights of rank 0
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 3)
    )
    model = DistributedDataParallel(net.to(DEVICE), gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(RANK)
    for _ in range(3):
        inputs = torch.randn(8, 6, generator=draw).to(DEVICE)
        targets = torch.randint(0, 3, (8,), generator=draw).to(DEVICE)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
print(digest.hexdigest(), flush=True)
dist.destroy_process_group()
