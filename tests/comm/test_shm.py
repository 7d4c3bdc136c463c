"""The shared-memory backend beyond the contract (test_backends.py): bits, long messages, ranks
that do not come.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from odyssey.comm import shm
from odyssey.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
import clock  # noqa: E402

RANKS = Path(__file__).parent / "shm_ranks.py"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, 5])
@pytest.mark.parametrize("case", ["bits", "long", "memory", "window", "short_and_long_way", "ring"])
def test_on_ranks(launch, case, ranks):
    """5 ranks are more than this machine may have cores."""
    done = launch.python(RANKS, case, ranks=ranks)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert done.stdout.count(f"rank {rank}: {case} as expected") == 1


def test_the_slow_way_gives_the_same_bits(launch):
    done = launch.python(RANKS, "slow_way", ranks=2)
    assert done.returncode == 0, done.stderr


def test_many_ranks_on_few_cores_make_progress(launch):
    done = launch.python(RANKS, "short_and_long_way", ranks=8)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(launch, ranks):
    done = launch.python(RANKS, "missing", ranks=ranks)
    call = r"all_reduce float32 \(100,\) sum at \S+shm_ranks\.py:\d+"
    text = rf"{clock.PATTERN}\[comm\] waited 1 s in {call}: rank {ranks - 1} did not come"
    found = re.findall(text, done.stdout)
    assert len(found) == ranks - 1, done.stdout + done.stderr
    assert all(1 <= float(seconds) < 2 + float(starved) for seconds, starved in found), done.stdout
    # out of step: nothing more can be right
    assert done.stdout.count("again: [comm] waited 1 s") == ranks - 1


def test_a_rank_whose_process_is_gone_is_named_at_once(launch):
    done = launch.python(RANKS, "ended", ranks=3)
    found = re.findall(rf"{clock.PATTERN}\[comm\] rank 2 has ended; barrier at", done.stdout)
    assert len(found) == 2, done.stdout + done.stderr
    assert all(float(seconds) < 2 + float(starved) for seconds, starved in found), done.stdout


def test_a_killed_rank_leaves_no_process_and_no_memory(launch):
    """But for three files that Open MPI itself leaves whenever a rank is killed."""
    done = launch.python(RANKS, "killed", ranks=3)
    assert done.returncode != 0 and "as expected" not in done.stdout
    named = set(re.findall(r"named (\S+)", done.stdout))
    # two windows and more were there
    assert all(int(n) >= 3 for n in re.findall(r"maps (\d+)", done.stdout))
    library = [name for name in named if "sm_segment." in name]
    assert len(named) == len(library) <= 3, named  # of the windows none has a name
    for name in named:
        Path(name).unlink(missing_ok=True)


def test_ranks_of_several_machines_are_refused_with_their_number(monkeypatch):
    class Over:
        rank, size, ranks, local_rank, local_size = 1, 4, (0, 1, 2, 3), 1, 2

        def all_gather(self, array):
            return np.array([[0], [1], [0], [1]])

    with pytest.raises(ConfigError, match=r"4 ranks are on 2 machines; use backend 'mpi'"):
        shm.ShmCommunicator(Over())


def test_too_little_shared_memory_is_said_before_it_is_used(launch):
    code = (
        "from odyssey import comm\nfrom odyssey.comm import shared_memory\n"
        "shared_memory.shared_memory = lambda: (1 << 30, 1 << 20)\n"
        "w = comm.world()\ntext = f'{w.name} | {w.why}\\n'\n"
        "try: comm.world('shm')\nexcept comm.ConfigError as e: text += f'refused {e}\\n'\n"
        "for rank in range(w.size):  # whole texts, one after the other: launchers may cut lines "
        "of several ranks\n"
        "    w.barrier()\n"
        "    if rank == w.rank: print(text, end='', flush=True)\n"
        "    import time; time.sleep(0.2)"
    )
    done = launch.python("-c", code, ranks=2)
    assert done.returncode == 0, done.stderr
    assert (
        len(re.findall(r"mpi \| .*MiB of shared memory, but /dev/shm has 1 MiB left", done.stdout))
        == 2
    )
    assert done.stdout.count("refused [comm] 2 ranks need") == 2


def test_auto_is_shared_memory_on_one_machine(launch):
    code = (
        "from odyssey import comm\nw = comm.world()\nprint(w.name, '|', w.why, '|', "
        "comm.world('mpi').name)"
    )
    done = launch.python("-c", code, ranks=2)
    line = r"shm \| shm: 2 ranks on one machine; (PMI|Open MPI) started 2 processes \| mpi"
    assert len(re.findall(line, done.stdout)) == 2, done.stderr


def test_windows_are_given_back(launch):
    code = (
        "from odyssey import comm\nimport re\nw = comm.world('shm')\n"
        "count = lambda: sum('deleted' in line for line in open('/proc/self/maps'))\n"
        "part = w.split(0); part.close()\nbefore = count()\n"
        "for _ in range(5):\n    part = w.split(0)\n    part.shared(100)\n    part.close()\n"
        'print(f"{count() - before}\\n", end="")'
    )
    done = launch.python("-c", code, ranks=2)
    assert done.stdout.split() == ["0", "0"], done.stderr
