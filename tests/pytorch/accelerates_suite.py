"""One of Accelerate's own test scripts, as its wheel brings them, over a process group that is
there already.

torchrun ... accelerates_suite.py odyssey|gloo SCRIPT
"""

from __future__ import annotations

import os
import runpy
import sys

import torch
import torch.distributed as dist

BACKEND, SCRIPT = sys.argv[1:]
os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
torch.set_num_threads(1)
# Accelerate knows no other name than gloo on CPUs, and takes a group that is there
dist.init_process_group(BACKEND)
sys.argv = [SCRIPT]
runpy.run_module(f"accelerate.test_utils.scripts.{SCRIPT}", run_name="__main__")
print(
    f"rank {dist.get_rank() if dist.is_initialized() else os.environ['RANK']} completed {SCRIPT}",
    flush=True,
)
