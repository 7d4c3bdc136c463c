"""An error of odyssey that a program with torch.distributed does not catch is printed, once,
however its ranks were started.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from odyssey.base.launcher import free_port

pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
    ),
]
PROGRAM = Path(__file__).with_name("failing_rank.py")
LAST_LINE = "\nodyssey.errors.ConfigError: [user] I must be seen\n"  # of a traceback
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def start(launch, how: str, ranks: str):
    launch.environment["OMP_NUM_THREADS"] = "1"
    if how == "torchrun":
        return launch.python("-W", "ignore", *TORCHRUN, PROGRAM, ranks)
    if how == "mpirun":
        return launch.python(PROGRAM, ranks, ranks=2)
    if how == "launch":
        command = ("-m", "odyssey", "launch", "-n", 2, PROGRAM, ranks)
        return launch.python(*command)
    if how == "popen":
        launch.environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        return launch.python(PROGRAM, ranks, "popen")
    return launch.python(PROGRAM, ranks)


@pytest.mark.parametrize("ranks", ["all", "1"])
@pytest.mark.parametrize("how", ["mpirun", "launch", "torchrun", "popen"])
def test_an_error_is_printed_once(launch, how, ranks):
    done = start(launch, how, ranks)
    assert done.returncode != 0
    name = "" if ranks == "all" else "[rank 1] "
    lines = [line for line in done.stderr.splitlines() if "I must be seen" in line]
    said = [line for line in lines if line.startswith("odyssey: ") and "attempt" not in line]
    # odyssey launch repeats it in its own line on the job
    assert len(lines) == (2 if how == "launch" else 1), done.stderr
    assert len(said) == 1 and said[0].endswith(f"{name}error: [user] I must be seen"), done.stderr


def test_an_error_of_a_process_that_is_alone_is_printed(launch):
    done = start(launch, "alone", "all")
    assert done.returncode == 64
    assert done.stderr.count(LAST_LINE) == 1, done.stderr


def test_an_error_beside_another_backend_is_printed(launch):
    """The hook of torch.distributed collects what hooks print, and one that ends the process
    takes it along.
    """
    (launch.folder / "program.py").write_text(
        "import odyssey, torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
        "raise odyssey.errors.ConfigError('[user] I must be seen')\n"
    )
    done = launch(sys.executable, "program.py")
    assert done.returncode == 64
    assert done.stderr.count(LAST_LINE) == 1, done.stderr
