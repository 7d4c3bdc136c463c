"""PyTorch's side of the comparison: the training of tests/beds/job.py with
DistributedDataParallel over Gloo.

Same net, data, optimizer, global batch and checkpoint interval; the checkpoint is the careful way:
torch.save to a file aside, fsync, os.replace. Started by torchrun. Rank 0 prints `step N HASH TIME`
after each step as job.py does, every rank `rank R pid P` at the start and `rank R weights SHA256`
at the end. Not meant for anything but comparing.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument(
        "--samples", type=int, default=480, help="samples of the data set, a multiple of the batch"
    )
    parser.add_argument(
        "--batch", type=int, default=48, help="samples of a step, a multiple of the ranks"
    )
    parser.add_argument(
        "--step-ms", type=float, default=0, help="rank 0 waits so long after each step"
    )
    parser.add_argument("--checkpoint", type=Path, help="the checkpoint file")
    parser.add_argument("--checkpoint-every", type=int, default=5, help="steps")
    parser.add_argument(
        "--timeout", type=float, help="seconds of the process group's timeout (PyTorch's own: 1800)"
    )
    parser.add_argument(
        "--find-unused", action="store_true", help="DDP with find_unused_parameters: buckets stay"
    )
    parser.add_argument("--fault", choices=["raises", "exits", "flips_weight"], help="what happens")
    parser.add_argument("--fault-rank", type=int, default=1, help="to which rank")
    parser.add_argument("--fault-step", type=int, default=8, help="just before which step")
    return parser.parse_args()


def fingerprint(model: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()


def say(text: str) -> None:
    """One write, or the lines of several ranks mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    aside = path.with_suffix(".tmp")
    with open(aside, "wb") as file:
        torch.save(
            {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def happen(fault: str, model: nn.Module, rank: int, step: int) -> None:
    if fault == "raises":
        raise RuntimeError(f"a defect of rank {rank} at step {step}")
    if fault == "exits":
        sys.exit(3)
    first = next(model.parameters()).detach().view(-1)
    first.numpy().view(np.uint32)[0] ^= np.uint32(1 << 20)


def main() -> None:
    o = options()
    torch.set_num_threads(1)
    timeout = {} if o.timeout is None else {"timeout": datetime.timedelta(seconds=o.timeout)}
    dist.init_process_group("gloo", **timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    say(f"rank {rank} pid {os.getpid()}")

    rng = np.random.default_rng(3)
    x = rng.standard_normal((o.samples, 24), np.float32)
    y = (x @ rng.standard_normal((24, 5), np.float32)).argmax(1)
    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.01)
    step = 0
    if o.checkpoint is not None and o.checkpoint.exists():
        state = torch.load(o.checkpoint, weights_only=True)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    net = nn.parallel.DistributedDataParallel(inner, find_unused_parameters=o.find_unused)

    each = o.samples // o.batch  # steps of an epoch
    mine = slice(rank * o.batch // size, (rank + 1) * o.batch // size)
    while step < o.steps:
        if o.fault and first_attempt and rank == o.fault_rank and step + 1 == o.fault_step:
            happen(o.fault, inner, rank, step + 1)
        order = np.random.default_rng((1, step // each)).permutation(o.samples)
        chosen = torch.from_numpy(order[step % each * o.batch :][: o.batch][mine])
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            say(f"step {step} {fingerprint(inner)[:16]} {time.monotonic():.4f}")
            if o.checkpoint is not None and step % o.checkpoint_every == 0:
                save(o.checkpoint, step, inner, optimizer)
            if o.step_ms:
                time.sleep(o.step_ms / 1000)
    sha = fingerprint(inner)
    say(f"rank {rank} weights {sha}")
    if rank == 0:
        say(f"weights {sha}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
