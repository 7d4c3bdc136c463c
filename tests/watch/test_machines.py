"""Watchers of several machines, started by hand on this one: they meet, and who loses the other
ends its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odyssey.base.proc import attach
from odyssey.view import top as view
from odyssey.watch import messages, watcher

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the watcher reads /proc"
)
PATIENCE = 2.0  # of those that are to lose each other; a busy machine must not part the others


class Machines:
    """Two machines of one rank each; the second calls the first."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        run: Path | None = None,
        patience: float = 60,
    ) -> None:
        self.secret = os.urandom(32)
        self.processes: list[subprocess.Popen] = []
        self.ranks = []
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, str(HERE / "rank.py"), str(rank), "2"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            self.processes.append(process)
            assert process.stdout is not None
            pid, descriptor = map(int, process.stdout.readline().split())
            self.ranks.append((process, [rank, pid, *attach(pid, descriptor)]))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.address = ["127.0.0.1", listener.getsockname()[1]]
        self.watchers, self.said = [], []
        for n in range(2):
            settings = {
                "watchdog": 0.0,
                "heartbeat": patience,
                "world": 2,
                "attempt": 1,
                "run": str(run) if run else "",
                "ranks": [self.ranks[n][1]],
                "nodes": [[0], [1]],
                "secret": self.secret.hex(),
                "main": n == 0,
                "listen": listener.fileno() if n == 0 else -1,
                "address": self.address,
                "files": [],
            }
            files = [number for number in self.ranks[n][1][2:] if number >= 0]
            path = folder / f"said-{n}"
            self.said.append(path)
            with path.open("w") as said:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", watcher.__file__],
                    stdin=subprocess.PIPE,
                    stderr=said,
                    pass_fds=[*files, *([listener.fileno()] if n == 0 else [])],
                    env=environment,
                    cwd=folder,
                )
            self.processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.close()
            for number in files:
                os.close(number)
            self.watchers.append(process)
        listener.close()

    def top(self) -> view.Job:
        connection = socket.create_connection(tuple(self.address), timeout=5)
        return view.Job(messages.Sealed(connection, self.secret, caller=True, role="top"))

    def together(self) -> dict:
        """What the main watcher shows when it has heard from both."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                job = self.top()
                now = job.look()
                job.close()
                if now and len(now["ranks"]) == 2 and all(s.step > 5 for s in now["ranks"]):
                    return now
            time.sleep(0.1)
        raise AssertionError("the watchers did not meet")


def heartbeat(run: Path) -> dict:
    try:
        return json.loads((run / "heartbeat.json").read_text())
    except FileNotFoundError:
        return {"ranks": []}


@pytest.fixture
def machines(tmp_path, launch):
    made = []

    def make(**settings) -> Machines:
        made.append(Machines(tmp_path, launch.environment, **settings))
        return made[-1]

    yield make
    for process in [p for m in made for p in m.processes]:
        with contextlib.suppress(OSError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(20)


def ended(process: subprocess.Popen, seconds: float = 60) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def silence(path: Path, text: str) -> int:
    """Seconds of it in what a watcher has said."""
    found = re.search(text.replace("SECONDS", r"(\d+)"), path.read_text())
    assert found, path.read_text()
    return int(found[1])


def test_two_machines_are_shown_together_and_end_in_order(machines, tmp_path):
    m = machines(run=tmp_path)
    now = m.together()
    assert [s.rank for s in now["ranks"]] == [0, 1] and all(s.rate > 0 for s in now["ranks"])
    assert oct((tmp_path / "watch.json").stat().st_mode & 0o777) == "0o600"
    until = time.monotonic() + 60
    beat = heartbeat(tmp_path)
    while sum(r["step"] > 0 for r in beat["ranks"]) < 2 and time.monotonic() < until:
        time.sleep(0.1)
        beat = heartbeat(tmp_path)
    assert beat["attempt"] == 1 and time.time() - beat["time"] < 60
    assert [r["rank"] for r in beat["ranks"]] == [0, 1]
    for process, _ in m.ranks:
        assert process.stdin is not None
        process.stdin.close()
    assert [ended(w) for w in m.watchers] == [0, 0]
    assert [path.read_text() for path in m.said] == ["", ""]
    assert not (tmp_path / "watch.json").exists()


def test_a_machine_that_is_dead_is_named_and_the_rest_is_ended(machines):
    m = machines(patience=PATIENCE)
    m.together()
    m.watchers[1].kill()
    m.ranks[1][0].kill()
    assert ended(m.ranks[0][0]) is not None
    assert ended(m.watchers[0]) == 0
    host = re.escape(os.uname().nodename)
    assert (
        silence(
            m.said[0], rf"odyssey: \[watch\] no sign of life from {host} \(rank 1\) for SECONDS s"
        )
        >= PATIENCE
    )
    assert m.ranks[0][0].returncode == 69  # by an order, which it could follow


def test_a_machine_that_is_cut_off_ends_its_own_ranks(machines):
    m = machines(patience=PATIENCE)
    m.together()
    m.watchers[0].kill()  # the connection is gone, and nobody answers a call
    assert ended(m.ranks[1][0]) == -signal.SIGKILL
    assert ended(m.watchers[1]) == 0
    assert (
        silence(m.said[1], "is cut off from rank 0's machine for SECONDS s; rank 1 is ended")
        >= PATIENCE
    )


def test_a_main_watcher_that_is_late_ends_nobody(machines):
    m = machines(patience=PATIENCE)
    m.together()
    m.watchers[0].send_signal(signal.SIGSTOP)  # its machine answers as before: the connection stays
    time.sleep(3 * PATIENCE)
    m.watchers[0].send_signal(signal.SIGCONT)
    m.together()
    assert all(process.poll() is None for process in (*m.watchers, *(rank for rank, _ in m.ranks)))
    assert [path.read_text() for path in m.said] == ["", ""]


def test_strangers_are_not_heard(machines):
    m = machines()
    m.together()
    with socket.create_connection(tuple(m.address), timeout=5) as stranger:
        stranger.sendall(
            b"odyssey watch 1 " + b"0" * 64 + b'\n{"look":true}\n{"node":1,"bye":true}\n'
        )
        data = b""
        with contextlib.suppress(OSError):
            while piece := stranger.recv(4096):
                data += piece
        assert data.count(b"\n") <= 1 and b"ranks" not in data  # its greeting, and no more
    assert m.together()
