"""What the watcher does for itself: its files in a run, who may call it."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time

import pytest

from odyssey.watch import link, watcher

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watcher reads /proc")


@pytest.fixture
def make(tmp_path):
    """Makes a main watcher of no ranks, in a run."""

    def make(**settings) -> watcher.Watcher:
        base = {"watchdog": 0, "heartbeat": 5, "world": 1, "attempt": 2, "run": str(tmp_path), "main": True}
        base |= {"secret": "00" * 32, "address": None, "files": [], "ranks": [], "nodes": [[0], [1]], "listen": -1}
        return watcher.Watcher(base | settings)

    return make


def test_on_a_full_disk_the_heartbeat_is_renewed(make, tmp_path, monkeypatch):
    w, path = make(), tmp_path / "heartbeat.json"
    w._write_heartbeat()
    text = path.read_text()
    os.utime(path, (1, 1))

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "replace", full)
    w._write_heartbeat()
    assert path.read_text() == text and path.stat().st_mtime > 1e9
    assert [p.name for p in tmp_path.iterdir()] == ["heartbeat.json"]
    path.write_text(json.dumps({"attempt": 1}))  # an earlier attempt's: nobody is to take it for this one's
    os.utime(path, (1, 1))
    w._write_heartbeat()
    assert path.stat().st_mtime == 1


def test_its_files_go_with_it_and_no_others(make, tmp_path):
    w = make()
    w._write_heartbeat()
    w._write_address()
    assert {p.name for p in tmp_path.iterdir()} == {"heartbeat.json", "watch.json"}
    w._finish()
    assert list(tmp_path.iterdir()) == []
    w, later = make(), make(attempt=3)
    w._write_address()
    later._write_address()
    later._write_heartbeat()
    w._remove("watch.json")
    w._remove("heartbeat.json")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_defect_of_the_watcher_leaves_no_heartbeat(make, tmp_path, monkeypatch):
    w = make()
    monkeypatch.setattr(w, "tick", lambda: (w._write_heartbeat(), 1 // 0))
    with pytest.raises(ZeroDivisionError):
        w.run()
    assert list(tmp_path.iterdir()) == []


def test_who_calls_and_says_nothing_is_dropped(make, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    w = make(listen=listener.detach(), run="")
    address = w.listener.getsockname()
    monkeypatch.setattr(watcher, "SHY", (2.0, 2))
    strangers = [socket.create_connection(address) for _ in range(3)]
    until = time.monotonic() + 10
    while len(w.peers) < 2 and time.monotonic() < until:
        w.pump(0.05)
    w.pump(0.1)
    assert len(w.peers) == len(w.shy) == 2  # the third is one too many
    w._tick_main(time.monotonic() + 3)
    assert not w.peers and not w.shy
    friend = link.Sealed(socket.create_connection(address), bytes(32), caller=True, role="node")
    while not friend.ready and time.monotonic() < until:
        w.pump(0.05)
        friend.receive()
    w._tick_main(time.monotonic() + 3)
    assert len(w.peers) == 1 and not w.shy
    for s in (*strangers, friend):
        s.close()
