"""What the watcher does for itself: its files in a run, who may call it."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from odyssey.base import proc
from odyssey.watch import messages, watcher, watcher_output

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the watcher reads /proc"
)


@pytest.fixture
def make(tmp_path):
    """Makes a main watcher of no ranks, in a run."""

    def make(**settings) -> watcher.Watcher:
        base = {
            "watchdog": 0,
            "heartbeat": 5,
            "world": 1,
            "attempt": 2,
            "run": str(tmp_path),
            "main": True,
        }
        base |= {
            "secret": "00" * 32,
            "address": None,
            "files": [],
            "ranks": [],
            "nodes": [[0], [1]],
            "listen": -1,
        }
        return watcher.Watcher(base | settings)

    return make


def beat(w: watcher.Watcher) -> None:
    w._write_heartbeat()
    assert w.writer.drain(20)


def test_on_a_full_disk_the_heartbeat_is_renewed(make, tmp_path, monkeypatch):
    w, path = make(), tmp_path / "heartbeat.json"
    beat(w)
    text = path.read_text()
    os.utime(path, (1, 1))

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "replace", full)
    beat(w)
    assert path.read_text() == text and path.stat().st_mtime > 1e9
    assert [p.name for p in tmp_path.iterdir()] == ["heartbeat.json"]
    # an earlier attempt's: nobody is to take it for this one's
    path.write_text(json.dumps({"attempt": 1}))
    os.utime(path, (1, 1))
    beat(w)
    assert path.stat().st_mtime == 1


def test_its_files_go_with_it_and_no_others(make, tmp_path):
    w = make()
    w._write_address()
    beat(w)
    assert {p.name for p in tmp_path.iterdir()} == {"heartbeat.json", "watch.json"}
    w._finish()
    assert list(tmp_path.iterdir()) == []
    w, later = make(), make(attempt=3)
    beat(w)
    w._write_address()
    w.writer.drain(20)
    later._write_address()
    later.writer.drain(20)
    beat(later)
    w._finish()
    assert all(
        json.loads((tmp_path / f"{n}.json").read_text())["attempt"] == 3
        for n in ("heartbeat", "watch")
    )


def test_a_defect_of_the_watcher_leaves_no_heartbeat(make, tmp_path, monkeypatch):
    w = make()
    monkeypatch.setattr(w, "tick", lambda: (w._write_heartbeat(), 1 // 0))
    with pytest.raises(ZeroDivisionError):
        w.run()
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_blocks_blocks_nobody_else():
    w, gate, done = watcher_output.Writer(), threading.Event(), []
    w.put(gate.wait)
    for i in range(5):
        w.put(lambda i=i: done.append(i), "heartbeat")
    w.put(lambda: 1 // 0)
    w.put(lambda: done.append("words"))
    for _ in range(2 * watcher_output.QUEUE):
        w.put(lambda: done.append("more"))
    assert not w.drain(0.1) and not done
    gate.set()
    assert w.drain(20)
    # the latest of one name; not all of many
    assert done[:2] == [4, "words"] and 2 < len(done) <= watcher_output.QUEUE


def test_the_watcher_goes_on_when_nobody_reads_its_words(make, tmp_path):
    read, write = os.pipe()
    os.set_blocking(write, False)
    while True:
        try:
            os.write(write, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write, True)
    kept = os.dup(2)
    os.dup2(write, 2)
    try:
        w = make()
        w._say("a straggler")
        begun = time.monotonic()
        for _ in range(3):
            w.tick()
        assert time.monotonic() - begun < 5
        assert not w.writer.drain(0.2)
        os.read(read, 1 << 20)
        assert w.writer.drain(20)
        assert (tmp_path / "heartbeat.json").exists()
    finally:
        os.dup2(kept, 2)
        for number in (kept, read, write):
            os.close(number)


def test_who_calls_and_says_nothing_is_dropped(make, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    w = make(listen=listener.detach(), run="")
    address = w.listener.getsockname()
    monkeypatch.setattr(watcher, "UNAUTHENTICATED_LIMIT", 2)
    strangers = [socket.create_connection(address) for _ in range(3)]
    until = time.monotonic() + 10
    while len(w.peers) < 2 and time.monotonic() < until:
        w.pump(0.05)
    w.pump(0.1)
    assert len(w.peers) == len(w.unauthenticated) == 2  # the third is one too many
    w._tick_main(time.monotonic() + 3)
    assert not w.peers and not w.unauthenticated
    friend = messages.Sealed(socket.create_connection(address), bytes(32), caller=True, role="node")
    while not friend.ready and time.monotonic() < until:
        w.pump(0.05)
        friend.receive()
    w._tick_main(time.monotonic() + 3)
    assert len(w.peers) == 1 and not w.unauthenticated
    for s in (*strangers, friend):
        s.close()


@pytest.mark.parametrize("word", ["a defect of this rank", ""])
@pytest.mark.parametrize("collected", [True, False])
def test_a_rank_that_ended_before_the_watcher_ran_is_believed(
    make, launch, monkeypatch, word, collected
):
    words = [sys.executable, str(Path(__file__).with_name("rank.py"))]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": launch.environment,
    }
    with (
        subprocess.Popen([*words, "0", "2"], **pipes) as one,
        subprocess.Popen([*words, "1", "2"], **pipes) as other,
    ):
        ranks = []
        for rank, started in enumerate((one, other)):
            pid, descriptor = map(int, started.stdout.readline().split())
            ranks.append([rank, pid, *proc.attach(pid, descriptor)])
        other.stdin.write(f"70 {word}".strip() + "\n")
        other.stdin.flush()
        assert not other.stdout.read()  # it has ended
        if collected:
            other.wait(20)
        said = []
        monkeypatch.setattr(watcher.Watcher, "_say", lambda self, text: said.append(text))
        monkeypatch.setattr(watcher.Watcher, "_kill", lambda self: None)
        w = make(run="", world=2, nodes=[[0, 1]], ranks=ranks)
        w.tick()
        until = time.monotonic() + 20
        while w.ranks[1].alive and time.monotonic() < until:
            w.pump(0.05)
            w.tick()
        assert w.ranks[0].alive and not w.ranks[1].alive
        if word:
            assert not said and w.seen[1].end == word
        else:
            assert len(said) == 1 and "rank 1 (pid" in said[0] and ("os._exit" in said[0])
        one.stdin.close()


class Slow:
    """A rank that answers in pieces: (seconds after it was asked, bytes by then)."""

    alive = True

    def __init__(self, *pieces: tuple[float, int]) -> None:
        self.pieces, self.asked = pieces, time.monotonic()

    def answer(self, at: int) -> int:
        since = time.monotonic() - self.asked
        return (
            max([size for seconds, size in self.pieces if seconds <= since], default=0)
            if at >= 0
            else -1
        )

    def stacks(self, at: int) -> str:
        return max(self.answer(at), 0) * "x"


def test_stacks_are_waited_for_until_they_are_whole_and_no_longer(make):
    w = make()
    w.ranks = {0: Slow((0, 5)), 1: Slow((0.3, 2), (0.35, 9)), 2: Slow()}
    begun = time.monotonic()
    assert w._settled({0: 0, 1: 0, 2: -1}, 60, w.pump) == {0: 5 * "x", 1: 9 * "x", 2: ""}
    assert time.monotonic() - begun < 30
    w.ranks = {0: Slow((0, 5)), 1: Slow()}  # the second never answers
    assert w._settled({0: 0, 1: 0}, 0.4, w.pump) == {0: 5 * "x", 1: ""}
    w.ranks = {0: Slow((0, 5))}
    answers = iter([False] * 9 + [True] * 1000)  # of another machine
    assert w._settled({0: 0}, 60, w.pump, lambda: next(answers)) == {0: 5 * "x"}
    assert next(answers)
