"""Two ranks of torch.distributed over Gloo call a collective that does not match; what each gets
is printed.

Started by torchrun. `TORCH_DISTRIBUTED_DEBUG=DETAIL` in the environment is PyTorch's own check of
such calls.
"""

from __future__ import annotations

import datetime
import sys
import time

import torch
import torch.distributed as dist


def call(kind: str, rank: int) -> torch.Tensor:
    """The collective of this rank: rank 1 differs in `kind`. Every number is 1 + rank."""
    other = rank == 1
    count = 1023 if kind == "count" and other else 1024
    mine = torch.full(
        (count,), 1 + rank, dtype=torch.int64 if kind == "dtype" and other else torch.float64
    )
    if kind == "op" and other:
        dist.broadcast(mine, 0)
    elif kind == "root":
        dist.broadcast(mine, rank)
    else:
        dist.all_reduce(mine)
    return mine


def main() -> None:
    kind, seconds = sys.argv[1], float(sys.argv[2])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    rank = dist.get_rank()
    dist.barrier()
    sys.stdout.write(f"rank {rank} calls {time.monotonic():.4f}\n")
    sys.stdout.flush()
    try:
        got = call(kind, rank)
    except Exception as problem:  # whatever it is, it is what the user sees
        text = " ".join(str(problem).split())
        sys.stdout.write(f"rank {rank} raised {type(problem).__name__}: {text[:3000]}\n")
    else:
        sys.stdout.write(f"rank {rank} got {got[0].item()} {got[-1].item()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
