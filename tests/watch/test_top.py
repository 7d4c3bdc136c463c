"""`odyssey top`: a running job is found, shown and left alone; what is wrong with a request is
said in one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from odyssey.errors import DataError, LaunchError
from odyssey.view import top as view
from odyssey.watch import diagnosis

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the watcher reads /proc"
)

JOB = """
import sys, time
import numpy as np
from odyssey import comm
from odyssey.base import slot
world = comm.world()
slot.note("a file")
for i in range(100000):
    slot.phase("data")
    time.sleep(0.06 if world.rank == 1 else 0.01)
    slot.phase("compute")
    world.all_reduce(np.ones(8, np.float32))
    slot.step(i + 1, 64)
"""


def test_the_first_line_is_as_wide_as_the_terminal(capsys):
    from rich.console import Console

    from odyssey.view.commands.top import _table

    snapshot = {"ranks": [], "slow": {}, "world": 1, "run": "r" * 60, "attempt": 1}
    snapshot |= {"pid": 1, "host": "a"}
    console = Console(width=150)
    console.print(_table(snapshot))
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("1 rank, step 0") and first.rstrip().endswith("attempt 1")


@pytest.fixture(scope="module")
def job(launch_once):
    """A job of two ranks whose second one is slow in loading data, in a run; (its mpirun's pid,
    RUN, its stderr).
    """
    run = launch_once.folder / "run"
    run.mkdir()
    launch_once.environment |= {"ODYSSEY_RUN_DIR": str(run), "ODYSSEY_ATTEMPT": "3"}
    said = launch_once.folder / "said"
    words = [launch_once.mpirun, *(["--oversubscribe"] if launch_once.open_mpi else []), "-n", "2"]
    with said.open("w") as stderr:
        process = subprocess.Popen(
            [*words, sys.executable, "-c", JOB],
            stderr=stderr,
            env=launch_once.environment,
            start_new_session=True,
        )
    yield process.pid, run, said
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def shown(job, wanted, seconds: float = 40) -> dict:
    """What is shown of the job when it is as wanted."""
    until = time.monotonic() + seconds
    now = None
    while time.monotonic() < until:
        with contextlib.suppress(LaunchError):
            connected = view.of_run(job[1])
            now = connected.look()
            connected.close()
            if now and len(now["ranks"]) == 2 and wanted(now):
                return now
        time.sleep(0.2)
    raise AssertionError(now)


def test_where_the_time_goes_and_who_is_slow(job):
    now = shown(job, lambda now: now["slow"] and now["ranks"][0].step > 60)
    (rank, (times, where)) = now["slow"].popitem()
    assert rank == 1 and times > 1.8 and where == "in data loading"
    fast, slow = now["ranks"]
    assert view.shares(fast)[2] > 0.4 > view.shares(slow)[2]  # the one waits for the other
    assert view.shares(slow)[0] > 0.5
    assert fast.rate > 0 and fast.rss > 1 << 20 and fast.note == "a file"
    until = time.monotonic() + 60
    while "data loading" not in job[2].read_text() and time.monotonic() < until:
        time.sleep(0.2)
    assert job[2].read_text().count("x the median, in data loading (step ") == 1


def test_the_heartbeat_of_a_run(job):
    shown(job, lambda now: now["ranks"][1].step > 5)
    time.sleep(1.5)
    beat = json.loads((job[1] / "heartbeat.json").read_text())
    assert beat["attempt"] == 3 and abs(time.time() - beat["time"]) < 20
    assert [r["rank"] for r in beat["ranks"]] == [0, 1] and beat["ranks"][1]["step"] > 0


@pytest.mark.parametrize("by", ["run", "mpirun", "rank"])
def test_the_command(job, launch_once, by):
    now = shown(job, lambda now: now["ranks"][0].step > 5)
    name = {"run": job[1], "mpirun": job[0], "rank": now["ranks"][1].pid}[by]
    done = launch_once.python("-m", "odyssey", "top", name, "--once")
    assert done.returncode == 0, done.stderr
    title, head, *rows = done.stdout.splitlines()
    assert title.startswith("2 ranks, step ") and title.endswith(f"{job[1]}, attempt 3")
    assert head.split() == list(view.COLUMNS)
    assert [row.split()[0] for row in rows] == ["0", "1"]


def test_as_json(job, launch_once):
    shown(job, lambda now: now["ranks"][0].step > 5)
    done = launch_once.python("-m", "odyssey", "top", job[1], "--once", "--json")
    value = json.loads(done.stdout)
    assert [diagnosis.parse_seen(item).rank for item in value["ranks"]] == [0, 1]


SYSTEM = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")  # one that any user can run
OTHER = """
import socket, sys
held = []
for name in sys.argv[1:]:
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    held[-1].bind("\\0" + name)
    held[-1].listen()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or SYSTEM is None, reason="root can be another user, who has another Python"
)
def test_names_that_another_user_has_taken_are_passed_over(job):
    pid = shown(job, lambda now: now["ranks"][0].step > 5)["ranks"][0].pid
    names = [
        "odyssey-watch-0-1",
        f"odyssey-watch-0-1-{'0' * 16}",
        f"odyssey-watch-0-{pid}-{'0' * 16}",
    ]
    other = subprocess.Popen(
        [SYSTEM, "-c", OTHER, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=65534,
        text=True,
        cwd="/",
    )
    try:
        assert other.stdout.readline() == "ready\n"
        assert pid in view.pids() and 1 not in view.pids()
        assert view.local(pid).look()["pid"] == pid
    finally:
        other.communicate("")


def test_runs_that_cannot_be_shown(tmp_path, monkeypatch):
    with pytest.raises(LaunchError, match="is not running, or not a run"):
        view.of_run(tmp_path)
    path = tmp_path / "watch.json"
    path.write_text('{"host": "elsewhere", "pid": 1, "address": null, "secret": ""}')
    with pytest.raises(LaunchError, match="runs, or ran, on elsewhere; ask there"):
        view.of_run(tmp_path)
    path.write_text(
        '{"host": "elsewhere", "pid": 1, "address": ["127.0.0.1", 9], "secret": "' + "0" * 64 + '"}'
    )
    with pytest.raises(LaunchError, match="cannot be reached"):
        view.of_run(tmp_path)
    path.write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        view.of_run(tmp_path)
    with pytest.raises(LaunchError, match="process 1 belongs to no running job|cannot be asked"):
        monkeypatch.setattr(view, "pids", list)
        view.of_process(1)


def test_a_table_of_anything_that_ranks_can_do():
    seen = [
        diagnosis.Seen(
            0,
            "a",
            state="R",
            phase="compute",
            doing="compute",
            times=(0, 0, 1, 2, 1, 0, 0, 0),
            note="x",
        ),
        diagnosis.Seen(
            1, "a", state="S", doing="wait", waited=3.21, wait_text="barrier at t.py:1", missing="0"
        ),
        diagnosis.Seen(2, "b", state="T", doing="compute"),
        diagnosis.Seen(3, "b", state="gone"),
        diagnosis.Seen(4, "b", state="S", ended=True, code=3),
    ]
    now = {
        "ranks": seen,
        "slow": {0: (2.0, "in computing")},
        "world": 5,
        "pid": 7,
        "host": "a",
        "run": "",
        "attempt": 0,
    }
    lines = view.plain(now).splitlines()
    assert lines[2].endswith("25 %     50 %  25 %  compute: x; 2.0x the median, in computing")
    assert lines[3].endswith("waits 3.2 s in barrier at t.py:1, rank 0 is missing")
    assert [line.rpartition("%  ")[2] for line in lines[4:]] == [
        "stopped, in compute",
        "gone",
        "has ended (3)",
    ]
