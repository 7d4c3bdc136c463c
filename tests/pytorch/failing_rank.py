"""Ranks that raise an error of odyssey: failing_rank.py RANKS(all, 0 or 1) [popen].

popen: the first process starts the second one, as Lightning's launcher does, without RANK.
"""

import os
import subprocess
import sys

children = []
if "popen" in sys.argv:
    os.environ["WORLD_SIZE"] = "2"
    if "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = "0"
        environment = {**os.environ, "LOCAL_RANK": "1"}
        children.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import odyssey.torch  # noqa: E402

if "popen" in sys.argv:
    dist.init_process_group("odyssey", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
else:
    dist.init_process_group("odyssey")
dist.barrier()
if sys.argv[1] in ("all", str(dist.get_rank())):
    raise odyssey.errors.ConfigError("[user] I must be seen")
dist.all_reduce(torch.ones(3))
