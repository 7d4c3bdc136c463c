"""How a process ends that believes to be a rank, without launcher and without the others:
quickly, and with a word.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time

import pytest

from odyssey.base import exits, launcher

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="names of sockets that are no files"
)


@pytest.fixture
def alone(monkeypatch):
    """As in a rank that has not said anything yet."""
    monkeypatch.setattr(exits, "_held", [])
    monkeypatch.setattr(exits, "_job", f"test-{os.getpid()}")
    yield
    for holder in exits._held:
        holder.close()


def test_the_first_of_a_machine_speaks(alone, monkeypatch):
    assert exits._first() and exits._first()
    held = exits._held
    monkeypatch.setattr(exits, "_held", [])
    assert not exits._first()
    held[0].close()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EINVAL, errno.EPERM])
def test_where_there_are_no_such_names_everybody_speaks(alone, monkeypatch, number):
    class Refuses(socket.socket):
        def bind(self, address):
            raise OSError(number, "no")

    monkeypatch.setattr(socket, "socket", Refuses)
    assert exits._first() and exits._held == []


def test_the_name_of_a_job_is_its_own_and_shows_no_secret(monkeypatch):
    names = set()
    for token, attempt in (("", ""), ("secret", "1"), ("secret", "2"), ("other", "1")):
        monkeypatch.setenv("ODYSSEY_LAUNCH", token)
        monkeypatch.setenv("ODYSSEY_ATTEMPT", attempt)
        names.add(exits._job_before_mpi())
        assert "secret" not in exits._job_before_mpi()
    assert len(names) == 4


def rank(code: str, **environment: str) -> tuple[subprocess.CompletedProcess, float]:
    """Runs this as rank 0 of two of a torchrun-like launcher, whose second rank does not exist."""
    given = {
        k: v
        for k, v in os.environ.items()
        if k not in (*launcher.VARIABLES, exits.MARK, "ODYSSEY_RUN_DIR")
    }
    met = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={**given, **met, **environment},
    )
    return done, time.monotonic() - begun


HOOKS = """
import resource, sys, threading
before = resource.getrlimit(resource.RLIMIT_CORE)
sys.excepthook = lambda kind, error, trace: print("mine:", kind.__name__, file=sys.stderr)
import odyssey
assert resource.getrlimit(resource.RLIMIT_CORE) == before
def fail():
    raise KeyError("in the background")
thread = threading.Thread(target=fail, name="helper", daemon=True)
thread.start()
thread.join()
print("goes on", flush=True)
raise ValueError("a defect")
"""


def test_hooks_daemon_threads_and_an_end_that_waits_for_nobody():
    done, seconds = rank(HOOKS)
    assert done.returncode == 70 and seconds < 60
    assert done.stdout == "goes on\n"
    lines = done.stderr.splitlines()
    said = [line for line in lines if line.startswith("odyssey: ")]
    assert said == [
        "odyssey: [rank 0] defect: KeyError: 'in the background' (in thread helper; the rank "
        "goes on)",
        "odyssey: [rank 0] defect: ValueError: a defect",
    ]
    assert lines.index("mine: ValueError") == lines.index(said[1]) - 1
    assert done.stderr.count("Traceback") == 1  # the thread's


LATE = """
import threading, time
import odyssey
def fail():
    threading.main_thread().join()
    raise KeyError("late")
threading.Thread(target=fail, name="late").start()
"""


def test_a_thread_that_fails_after_the_end_ends_nobody():
    done, _ = rank(LATE)
    assert (
        done.returncode == 0
        and "KeyError: 'late' (in thread late; the rank goes on)" in done.stderr
    )


def test_sys_exit_in_a_thread_ends_the_thread_silently():
    code = "import threading, sys, odyssey; threading.Thread(target=sys.exit, args=(4,)).start()"
    done, _ = rank(code)
    assert (done.returncode, done.stderr) == (0, "")


LEAVING = """
import atexit, sys
import odyssey
from odyssey.base import exits
atexit.register(lambda: print(exits.leaving()[0], flush=True))
"""
HELD = """
kept = []
try:
    sys.exit(4)
except SystemExit as error:
    kept.append(error)
    raise
"""
CHANGED = """
try:
    sys.exit(4)
except SystemExit as error:
    error.code = 9
    raise
"""
CAUGHT = """
import copy
try:
    sys.exit(4)
except SystemExit as error:
    assert (error.code, copy.copy(error).code, error.args) == (4, 4, (4,))
    assert type(error).__name__ == "SystemExit"
"""
HANDED_ON = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    pool.submit(sys.exit, 6).result()
"""
SIGNAL = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(11))
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit(256 + 7)", 7),
        ("sys.exit('why')", 1),
        (HELD, 4),
        (CHANGED, 9),
        (CAUGHT, 0),
        (HANDED_ON, 6),
        (SIGNAL, 11),
    ],
)
def test_exit_handlers_know_the_exit_code(code, exit_code):
    done, _ = rank(LEAVING + code)
    assert (done.returncode, done.stdout) == (exit_code, f"{exit_code}\n"), done.stderr


def test_a_rank_that_cannot_join_the_others_ends_all_the_same():
    code = "import time; from odyssey.base import exits; exits._end_in(0.2, 70); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], timeout=50)
    assert done.returncode == 70
