"""Calls of backend "odyssey" that are under way, over each transport: c10d_pending.py says what
is asked.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "c10d_pending.py"
CASES = (
    "pending order mixed groups threads anybody bits sparse device again timeout".split()
)  # after the last its group is over
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)


def as_expected(done, ranks: int, code: int = 0) -> None:
    assert done.returncode == code, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{case} as expected" for case in CASES * ranks
    ), done.stdout


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        pytest.param(2, "", marks=pytest.mark.long),
        (3, ""),
        (4, ""),
        pytest.param(2, "mpi", marks=pytest.mark.long),
        (4, "mpi"),
    ],
)
def test_works_under_mpirun(launch, ranks, backend):
    """A rank that gave up waiting for another does not end MPI in order: the job's code is that
    of the error.
    """
    launch.environment["ODYSSEY_BACKEND"] = backend
    as_expected(
        launch.python("-W", "ignore", PROGRAM, launch.folder, *CASES, ranks=ranks), ranks, 76
    )


@pytest.mark.parametrize("backend", ["gloo", pytest.param("", marks=pytest.mark.long)])
def test_works_under_torchrun(launch, backend):
    launch.environment |= {"ODYSSEY_BACKEND": backend, "PYTHONWARNINGS": "ignore"}
    words = "-m", "torch.distributed.run", "--nproc_per_node=2", PROGRAM, launch.folder, *CASES
    as_expected(launch.python(*words), 2)


LATE = """
import odyssey.torch, torch, torch.distributed as dist, time
dist.init_process_group('odyssey')
work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
work.wait()
"""


def test_calls_under_way_that_differ_are_named_with_the_line_that_made_them(launch):
    (launch.folder / "user.py").write_text(LATE)
    done = launch.python("-W", "ignore", "user.py", ranks=2)
    assert done.returncode == 76
    assert "rank 0 calls all_reduce float32 (3,) sum at" in done.stderr
    assert "user.py:4, but rank 1 calls all_reduce float32 (4,) sum at" in done.stderr
    assert "Traceback" not in done.stderr
