"""Lines between machines: only who knows the secret is heard, and nothing can be changed,
repeated or made endless.
"""

from __future__ import annotations

import json
import select
import socket

import pytest

from odyssey.watch import messages

SECRET = b"s" * 32


def pair(theirs: bytes = SECRET) -> tuple[messages.Sealed, messages.Sealed]:
    a, b = socket.socketpair()
    return messages.Sealed(a, theirs, caller=True, role="node"), messages.Sealed(
        b, SECRET, caller=False
    )


def meet(caller: messages.Sealed, called: messages.Sealed) -> None:
    for _ in range(3):
        assert called.receive() == [] and caller.receive() == []
    assert caller.ready and called.ready


def test_two_that_know_the_secret():
    caller, called = pair()
    meet(caller, called)
    assert called.role == "node"
    caller.send({"a": [1, 2]})
    caller.send("b")
    assert called.receive() == [{"a": [1, 2]}, "b"]
    called.send(5)
    assert caller.receive() == [5]


def test_who_does_not_know_it_is_not_heard():
    caller, called = pair(b"x" * 32)
    called.receive()
    caller.receive()
    with pytest.raises(messages.Closed, match="secret"):
        called.receive()
    assert not called.ready and called.role == ""


def test_the_called_must_know_it_as_well():
    a, b = socket.socketpair()
    caller = messages.Sealed(a, SECRET, caller=True, role="node")
    fake = messages.Sealed(b, b"y" * 32, caller=False)
    caller.receive()
    fake.socket.send(b"0" * 64 + b' {"hello":true}\n')
    with pytest.raises(messages.Closed, match="secret"):
        caller.receive()
    assert not caller.ready


@pytest.mark.parametrize("change", ["repeat", "alter", "plain"])
def test_lines_on_the_way_cannot_be_changed(change):
    caller, called = pair()
    meet(caller, called)
    line = caller._sealed(json.dumps({"end": 1}).encode()) + b"\n"
    caller.socket.send(
        {"repeat": line + line, "alter": line.replace(b"1}", b"2}"), "plain": b'{"end":1}\n'}[
            change
        ]
    )
    with pytest.raises(messages.Closed, match="secret"):
        called.receive()


def test_a_mirror_does_not_pass():
    a, b = socket.socketpair()
    caller = messages.Sealed(a, SECRET, caller=True)
    b.send(b.recv(1000))
    with pytest.raises(messages.Closed, match="no watcher"):
        caller.receive()


@pytest.mark.parametrize(
    "data", [b"\n", b"GET / HTTP/1.1\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"]
)
def test_others_that_call(data):
    _, called = pair()
    stranger, b = socket.socketpair()
    called = messages.Sealed(b, SECRET, caller=False)
    stranger.send(data)
    with pytest.raises(messages.Closed):
        called.receive()


def test_a_line_has_an_end(monkeypatch):
    monkeypatch.setattr(messages, "LIMIT", 10_000)
    a, b = socket.socketpair()
    lines = messages.Lines(b)
    a.send(b"x" * 20_000)
    with pytest.raises(messages.Closed, match="too long"):
        lines.receive()
    slow = messages.Lines(a)
    with pytest.raises(messages.Closed, match="does not read"):
        for _ in range(1000):
            slow.send("y" * 5000)


def test_a_stranger_may_say_little():
    stranger, b = socket.socketpair()
    called = messages.Sealed(b, SECRET, caller=False)
    stranger.send(b"x" * 200)
    assert called.receive() == []
    stranger.send(b"x" * 100)
    with pytest.raises(messages.Closed, match="too long"):
        called.receive()
    caller, called = pair()
    meet(caller, called)
    caller.send("x" * 300_000)
    found = []
    for _ in range(100):
        found += called.receive()
        caller.flush()
    assert found == ["x" * 300_000]


def test_values_that_are_no_json():
    a, b = socket.socketpair()
    lines = messages.Lines(b)
    a.send(b'{"a":\n')
    with pytest.raises(messages.Closed, match="JSON"):
        lines.receive()


def test_it_never_waits():
    a, b = socket.socketpair()
    lines = messages.Lines(b)
    assert lines.receive() == []
    a.send(b'{"half"')
    assert lines.receive() == []
    a.send(b":1}\n")
    assert select.select([lines], [], [], 5)[0] and lines.receive() == [{"half": 1}]
    a.close()
    with pytest.raises(messages.Closed):
        lines.receive()
