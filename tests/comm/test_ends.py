"""Ranks that do not come, end early or never: an error that names them, and an end of the job,
never a hang.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from odyssey.comm import mock
from odyssey.errors import CollectiveError, ConfigError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import clock  # noqa: E402
from test_backends import together  # noqa: E402

SHM = pytest.mark.skipif(
    importlib.util.find_spec("odyssey.comm.shm") is None, reason="no shared-memory backend"
)
GLOO = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)
BACKENDS = [
    "mpi",
    pytest.param("shm", marks=SHM),
    pytest.param("gloo", marks=[GLOO, pytest.mark.long]),
]


@pytest.fixture
def ends(launch):
    """Runs one case on 3 ranks with a deadline of `limit` s; gives (what was printed, exit
    code).
    """

    def run(which: str, backend: str, ranks: int = 3, limit: float = 1.5):
        words = HERE / "ends.py", which, backend, limit
        if backend == "gloo":
            return together(launch, ranks, sys.executable, *words, timeout=90)
        return launch.python(*words, ranks=ranks, timeout=90)

    return run


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_does_not_come_is_named(ends, backend):
    done = ends("late", backend)
    assert done.returncode
    for rank in (0, 1):
        call = (
            r"\[comm\] waited 1.5 s in all_reduce float32 \(8,\) sum at comm/ends.py:\d+: "
            r"rank 2 did not come"
        )
        found = re.search(f"rank {rank} {clock.PATTERN}{call}", done.stdout)
        assert found, done.stdout + done.stderr
        assert 1.5 <= float(found[1]) < 2.5 + float(found[2]), done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_end_one_by_one(ends, backend):
    done = ends("one by one", backend, ranks=2)
    assert done.returncode == 0 and "odyssey" not in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_ends_is_noticed_before_the_deadline(ends, backend):
    done = ends("leaves", backend, limit=60)
    assert done.returncode
    found = re.findall(
        rf"{clock.PATTERN}\[comm\] (?:rank 2 has ended|a rank has ended)", done.stdout
    )
    assert found, done.stdout + done.stderr
    assert all(float(seconds) < 30 for seconds, _ in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_raises_ends_all(ends, backend):
    done = ends("raises", backend, limit=15)
    assert done.returncode
    lines = done.stderr.splitlines()
    # whose ranks nobody orders
    first = lines if backend != "gloo" else [line for line in lines if "[rank 2]" in line]
    assert first[0] == "[rank 2] Traceback (most recent call last):"
    assert "odyssey: [rank 2] defect: ValueError: a defect of this rank" in lines
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_that_is_never_sent(ends, backend):
    done = ends("waits for a message", backend, limit=3)
    assert done.returncode
    assert re.search(
        r"recv float32 \(8,\) from rank 2 tag 0 at comm/ends.py:\d+|a rank has ended", done.stdout
    )


def test_a_request_whose_partners_never_come_does_not_hold_up_the_end(ends):
    done = ends("unfinished", "mpi")
    assert done.returncode == CollectiveError.exit_code
    assert re.search(
        r"\[rank 2\] \[comm\] ends while all_reduce .*/ends.py:\d+ is unfinished", done.stderr
    )


def test_a_rank_that_exits_with_a_code_does_not_wait_for_its_calls(ends):
    done = ends("unfinished, and exits", "mpi", limit=60)
    assert done.returncode == 3, done.stderr
    line = (
        r"odyssey: \[rank 2\] sys.exit\(3\) at comm/ends.py:\d+, while all_reduce "
        r".*/ends.py:\d+ is unfinished; "
    )
    assert re.search(line + "all are ended", done.stderr), done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watcher reads /proc")
def test_ranks_that_wait_for_each_other_at_the_end_are_seen_by_the_watcher(ends, launch):
    launch.environment["ODYSSEY_WATCHDOG"] = "2"
    done = ends("unfinished in two groups", "mpi", limit=60)
    assert done.returncode
    assert "[watch] ranks 0-2 wait for each other" in done.stderr, done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_that_all_started_and_nobody_waited_for(ends, backend):
    done = ends("forgotten", backend)
    assert done.returncode == 0, done.stderr


def test_it_may_be_started_late(ends):
    done = ends("forgotten, and one is late", "mpi", limit=60)
    assert done.returncode == 0, done.stderr


def test_an_error_that_was_caught_still_ends_the_job(ends):
    done = ends("caught", "mpi", limit=1)
    assert done.returncode == CollectiveError.exit_code
    assert "rank 2 did not come" in done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_waits_in_another_group(ends, backend):
    done = ends("elsewhere", backend)
    assert done.returncode
    assert "rank 2 did not come" in done.stdout or "ranks 0, 1 did not come" in done.stdout, (
        done.stdout
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_uses_no_core(ends, backend):
    done = ends("cores", backend, limit=20)
    assert done.returncode == 0, done.stderr
    used = [float(s) for s in re.findall(r"used (\d\.\d+) s", done.stdout)]
    assert len(used) == 3 and max(used) < 0.5, used  # of 2 s


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("another call", r"rank 0 calls all_to_all_v float32 again 1 at .*rank 2 calls barrier at"),
        (
            "another order",
            r"rank 0 calls all_to_all_v .* but rank 2 calls all_gather_v float32 \(900000,\) "
            r"again 2",
        ),
        ("other counts", r"rank 0 sends 299999 elements to rank 2 in .* that expects 300000 in"),
    ],
)
def test_calls_made_again_and_again_that_differ(ends, which, words):
    """Their data are on their way before the headers are compared: an error on all ranks, and
    the group is over.
    """
    done = ends(f"again, {which}", "mpi", limit=15)
    assert done.returncode == CollectiveError.exit_code, done.stderr
    found = re.findall(r"rank \d after [^:]*: (.*)", done.stdout)
    assert len(found) == 3 and len(set(found)) == 1, done.stdout + done.stderr
    assert found[0].count("comm/ends.py:") == 2 and re.search(words, found[0]), found
    assert (
        which == "another call" or len(re.findall("^odyssey: ", done.stderr, re.MULTILINE)) == 1
    ), done.stderr
    assert which != "another call" or done.stdout.count("the same error True") == 3, done.stdout


def test_calls_made_again_and_again_that_are_not_waited_for(ends):
    done = ends("again, late", "mpi")
    assert done.returncode
    for rank in (0, 1):
        wanted = (
            rf"rank {rank} after [^:]*: \[comm\] waited 1.5 s in all_to_all_v float32 again "
            r"1 at comm/ends.py:\d+: "
        )
        assert re.search(wanted + "rank 2 did not come", done.stdout), done.stdout + done.stderr
    done = ends("again, unfinished", "mpi")
    assert done.returncode == CollectiveError.exit_code
    assert re.search(
        r"\[rank 2\] \[comm\] ends while all_to_all_v .*/ends.py:\d+ is unfinished", done.stderr
    )
    assert "is started again before it is complete; wait for it first" in done.stdout
    assert ends("again, forgotten", "mpi").returncode == 0


def test_a_killed_rank_ends_the_job(ends):
    assert ends("killed", "mpi").returncode


def test_threads_that_do_not_come_or_end(monkeypatch):
    monkeypatch.setenv("ODYSSEY_TIMEOUT", "0.3")
    gave_up = threading.Event()

    def late(c):
        if c.rank == 2:
            gave_up.wait(60)
        try:
            c.barrier()
        finally:
            gave_up.set()

    with pytest.raises(
        CollectiveError, match=r"waited 0.3 s in barrier at .*ranks? (\d, )?2 did not come"
    ):
        mock.run(3, late)
    monkeypatch.setenv("ODYSSEY_TIMEOUT", "60")

    def leaves(c):
        if c.rank:
            c.all_reduce(np.ones(2))

    with pytest.raises(CollectiveError, match="rank 0 has ended; all_reduce float64"):
        mock.run(3, leaves)

    def raises(c):
        if c.rank == 1:
            raise ZeroDivisionError
        c.recv(np.zeros(1), 1)

    with pytest.raises(ZeroDivisionError):
        mock.run(3, raises)

    def aborts(c):
        if c.rank == 1:
            c.abort(7)
        c.barrier()

    with pytest.raises(SystemExit) as caught:
        mock.run(2, aborts)
    assert caught.value.code == 7


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_deadline_must_be_seconds(monkeypatch, text):
    monkeypatch.setenv("ODYSSEY_TIMEOUT", text)
    with pytest.raises(ConfigError, match=f"ODYSSEY_TIMEOUT={text}"):
        mock.run(2, lambda c: c.barrier() if c.rank else (time.sleep(0.05), c.barrier()))
