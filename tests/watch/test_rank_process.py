"""One rank as the watcher sees it, also where the system has no memfd and no pidfd; and what a
rank sees of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odyssey.base import proc, slot
from odyssey.watch import diagnosis, rank_process

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the watcher reads /proc"
)

WITHOUT = (
    "import os, sys, runpy; del os.memfd_create; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0])"
)


@pytest.fixture(params=["memfd and pidfd", "neither"])
def rank(request, launch, monkeypatch):
    """(a process with a slot, its descriptor), of a system that has this."""
    words = [sys.executable]
    if request.param == "neither":
        monkeypatch.delattr(os, "pidfd_open")
        words += ["-c", WITHOUT]
    started = subprocess.Popen(
        [*words, str(HERE / "rank.py"), "0", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=launch.environment,
    )
    yield started, int(started.stdout.readline().split()[1])
    with contextlib.suppress(OSError):
        started.kill()
    started.wait(20)


def until(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_rank_is_seen_signalled_and_its_end_noticed(rank):
    started, descriptor = rank
    link = os.readlink(f"/proc/{started.pid}/fd/{descriptor}")
    assert "odyssey-slot" in link and "(deleted)" in link  # nothing is left behind
    watched = rank_process.WatchedRank(0, started.pid, *proc.attach(started.pid, descriptor))
    assert watched.alive and watched.last is not None
    until(lambda: watched.look(time.monotonic(), 0.0).step > 3)
    at = watched.ask_for_stacks()
    assert at >= 0
    until(lambda: "rank.py" in watched.stacks(at))
    assert watched.signal(signal.SIGSTOP)
    until(lambda: watched.look(time.monotonic(), 0.0).state == "T")
    assert watched.signal(signal.SIGKILL)
    if watched.handle < 0:
        until(lambda: watched.look(time.monotonic(), 0.0).state == "gone")
        assert not watched.alive
        assert watched.code() == signal.SIGKILL  # not collected yet
        started.wait(20)
        assert not watched.signal(0)
    else:
        os.close(watched.handle)


def test_calls_are_signs_of_life(monkeypatch):
    """Also those of which nothing is counted but their number: `slot.note_short_call`."""
    watched = rank_process.WatchedRank(0, os.getpid(), -1, os.open(os.devnull, os.O_RDONLY))
    one = slot.read_current()._replace(waiting=0, call=4)
    monkeypatch.setattr(slot, "read", lambda descriptor: one)
    assert watched.look(100.0, 0.0).idle == 0 and watched.look(107.0, 0.0).idle == 7
    one = one._replace(call=5)
    assert watched.look(109.0, 0.0).idle == 0


def test_who_was_gone_before_anybody_could_look_is_waited_for_in_vain():
    """It shows no sign of life, so that a rank that waits for it is not left waiting."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    watched = rank_process.WatchedRank(1, gone.pid, -1, -1)
    begun = time.monotonic()
    waits = diagnosis.Seen(0, state="S", doing="wait", waited=70.0, wait_sequence=2, members="all")
    seen = watched.look(begun + 70, 0.0)
    assert seen.state == "gone" and seen.idle >= 70
    found = diagnosis.find_hang({0: waits, 1: seen}, 2, 60.0)
    assert found is not None and found.culprits == (1,)


def test_a_number_that_belongs_to_another_process_now_is_not_signalled(rank):
    started, descriptor = rank
    watched = rank_process.WatchedRank(0, started.pid, *proc.attach(started.pid, descriptor))
    if watched.handle >= 0:
        os.close(watched.handle)
        watched.handle = -1
    watched._start = b"1"
    assert not watched.signal(signal.SIGKILL)
    time.sleep(0.1)
    assert started.poll() is None


def test_time_used_since_the_last_sign_of_life():
    spin = [sys.executable, "-c", "sum(range(10**12))"]
    with (
        subprocess.Popen(spin) as busy,
        subprocess.Popen(
            [sys.executable, "-c", "import time; print(flush=True); time.sleep(99)"],
            stdout=subprocess.PIPE,
        ) as idle,
    ):
        try:
            idle.stdout.readline()  # the time that a start takes is not asked about
            seen = [rank_process.WatchedRank(0, started.pid, -1, -1) for started in (busy, idle)]
            for watched in seen:
                watched.last = slot.read_current()
            until(lambda: seen[0].look(time.monotonic(), 0.0).busy > 0.1, 60)
            assert seen[1].look(time.monotonic(), 0.0).busy < 0.1
        finally:
            busy.kill()
            idle.kill()


def test_no_file_that_others_can_open(monkeypatch):
    def refused(*_, **__):
        raise OSError(28, "no space left")

    import tempfile

    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(tempfile, "mkstemp", refused)
    monkeypatch.setattr(slot, "_descriptor", -1)
    assert slot.publish() == -1


CHILDREN = """
import os, time
import numpy as np
from odyssey import comm
world = comm.world()
world.all_reduce(np.ones(1))
until = time.monotonic() + 20
while (mine := open(f"/proc/self/task/{os.getpid()}/children").read().split()) and time.monotonic() < until:
    time.sleep(0.05)
print(f"children {len(mine)}\\n", end="", flush=True)
def watched():  # it leaves the rank before it listens
    names = [line.split("-")[-2] for line in open("/proc/net/unix") if "@odyssey-watch-" in line]
    return str(os.getpid()) in names
while world.rank == 0 and not watched() and time.monotonic() < until:
    time.sleep(0.05)
if world.rank == 0:
    print(f"watched {watched()}\\n", end="", flush=True)
world.barrier()
"""


def test_the_watcher_is_no_child_of_a_rank(launch):
    words = [
        launch.mpirun,
        *(["--oversubscribe"] if launch.open_mpi else []),
        "-n",
        "2",
        sys.executable,
        "-c",
        CHILDREN,
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=100, env=launch.environment
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["children 0", "children 0", "watched True"]
