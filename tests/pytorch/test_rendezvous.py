"""The group of init_process_group("odyssey") is made of what torch hands over: ways to meet,
restarts, who is late.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "rendezvous.py"
MET = r"rank (\d) of (\d) over shm; shm: \d ranks on one machine; they met in torch's store"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)


def ranks_that_met(text: str) -> list[tuple[str, str]]:
    return sorted(re.findall(MET, text))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_processes_of_torchs_own_start_meet_in_shared_memory(launch, ranks):
    """By MASTER_ADDR, as in PyTorch's tutorial, by tcp, by a file and by a store, one after the
    other.
    """
    done = launch.python("-W", "ignore", PROGRAM, "meet", ranks, launch.folder)
    assert done.returncode == 0, done.stderr
    assert ranks_that_met(done.stdout) == sorted(
        [(str(r), str(ranks)) for r in range(ranks)] * 4
    ), done.stdout


def test_a_rank_that_never_comes_is_named_within_the_timeout(launch):
    done = launch.python("-W", "ignore", PROGRAM, "late", 3, launch.folder)
    assert done.returncode == 0, done.stderr
    text = (
        r"after (\S+) s: \[comm\] waited 3 s for 3 ranks to meet: rank 2 did not come; start "
        r"all of them"
    )
    found = re.findall(text, done.stdout)
    assert len(found) == 2 and all(3 <= float(seconds) < 30 for seconds in found), done.stdout


def torchrun(launch, *words):
    return launch.python(
        "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node=2", *words
    )


def test_under_torchrun_and_over_gloo_where_that_is_asked_for(launch):
    done = torchrun(launch, PROGRAM, "launched", launch.folder)
    assert done.returncode == 0, done.stderr
    assert ranks_that_met(done.stdout) == [("0", "2"), ("1", "2")], done.stdout
    launch.environment["ODYSSEY_BACKEND"] = "gloo"
    done = torchrun(launch, PROGRAM, "launched", launch.folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("over gloo; gloo: 2 ranks") == 2, done.stdout


def test_a_restart_of_torchrun_meets_again_and_a_killed_rank_leaves_no_memory(launch):
    """PyTorch's own store outlives the ranks, with what they left in it."""
    memory = set(Path("/dev/shm").glob("*odyssey*"))
    done = torchrun(launch, "--max-restarts=1", PROGRAM, "launched", launch.folder, 1)
    assert done.returncode == 0, done.stderr
    assert ranks_that_met(done.stdout) == [("0", "2")] * 2 + [("1", "2")] * 2, done.stdout
    assert sorted(re.findall(r"ended in order \d", done.stdout)) == [
        "ended in order 0",
        "ended in order 1",
    ]
    # files without a name: there is nothing to clean
    assert set(Path("/dev/shm").glob("*odyssey*")) == memory


def test_import_odyssey_sets_the_ranks_variables_under_mpirun(launch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    code = f"import odyssey, os\nprint(*(os.environ.get(n) for n in {names}))"
    done = launch.python("-c", code, ranks=2)
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2", "1 2 1 2"], done.stderr
    code = (
        "from odyssey import distributed as dist\nimport numpy as "
        "np\ndist.init_process_group(backend='gloo')\n"
    )
    code += (
        "print(f'{dist.get_backend()} {dist.get_rank()} {dist.all_reduce(np.ones(1))}\\n', end='')"
    )
    done = launch.python("-c", code, ranks=2)
    assert sorted(done.stdout.splitlines()) == ["gloo 0 [2.]", "gloo 1 [2.]"], done.stderr


def test_a_process_that_nobody_launched_gets_no_variables(launch):
    code = "import odyssey, os\nassert not {'RANK', 'WORLD_SIZE', 'LOCAL_RANK'} & os.environ.keys()"
    assert launch(sys.executable, "-c", code).returncode == 0
