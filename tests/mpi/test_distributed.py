"""distributed.py and ddp.py with processes: what tests/python/test_distributed.py shows with threads."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def results(launch, ranks: int) -> list[str]:
    done = launch.python(HERE / "ddp_ranks.py", max(ranks, 1), ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_loops_under_mpirun_have_the_bits_of_one_process(launch):
    one, two, three, four = (results(launch, ranks) for ranks in (0, 2, 3, 4))
    assert one[0] == one[1]  # buckets
    assert one[:2] == two[:2] == four[:2]  # eight passes of eight samples, wherever
    assert three[0] == three[1] != one[0]  # six passes


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
