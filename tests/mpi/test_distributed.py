"""distributed.py and ddp.py with processes: what tests/python/test_distributed.py shows with threads."""

from __future__ import annotations

from pathlib import Path

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
        assert results(launch, ranks, backend)[:2] == one[:2]  # eight passes of eight samples, wherever
    three = results(launch, 3, "mpi")  # six passes
    assert three[0] == three[1] != one[0] and results(launch, 3, "shm") == three


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
