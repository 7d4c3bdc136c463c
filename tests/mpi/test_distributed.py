"""distributed/ and ddp.py with processes: what tests/python/test_distributed.py shows with
threads.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def results(launch, ranks: int, backend: str) -> list[str]:
    done = launch.python(HERE / "ddp_ranks.py", max(ranks, 1), backend, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_loops_under_mpirun_have_the_bits_of_one_process(launch):
    one = results(launch, 0, "local")
    assert one[0] == one[1]  # buckets
    for ranks, backend in ((2, "mpi"), (2, "shm"), (4, "shm")):
        # eight passes of eight samples, wherever
        assert results(launch, ranks, backend)[:2] == one[:2]
    three = results(launch, 3, "mpi")  # six passes
    assert three[0] == three[1] != one[0] and results(launch, 3, "shm") == three


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)
def test_loops_over_gloo_have_the_same_bits(launch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, HERE / "ddp_ranks.py", "2", "gloo"]
    ranks = [
        subprocess.Popen(
            command,
            env={**launch.environment, **meet, "RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    outputs = [p.communicate(timeout=100) for p in ranks]
    assert [p.returncode for p in ranks] == [0, 0], outputs
    assert outputs[0][0].split()[:2] == results(launch, 0, "local")[:2]


def test_a_rank_that_leaves_the_loop_ends_the_others(launch):
    code = (
        "import numpy as np\n"
        "from odyssey import Tensor, distributed as dist, functional as F, nn\n"
        "dist.init_process_group()\n"
        "net = dist.DDP(nn.Linear(4, 2))\n"
        "for _ in range(2 + dist.get_rank()):\n"
        "    F.cross_entropy(net(Tensor(np.ones((8, 4)))), np.zeros(8, int)).backward()\n"
    )
    done = launch.python("-c", code, ranks=2)
    assert done.returncode != 0
    assert "rank 0 has ended" in done.stderr
