"""Root does not start runs where other people work (S14)."""

from __future__ import annotations

import os

import pytest

from odyssey.errors import ConfigError
from odyssey.run import users


@pytest.fixture
def shared(monkeypatch):
    """This is root, and user 1001 has a process here."""
    monkeypatch.delenv(users.ALLOW, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(users, "working", lambda: [1001, 1002])


def test_root_among_others_is_refused(shared, monkeypatch):
    with pytest.raises(ConfigError, match="this is root, and user 1001 works on this machine too.*--allow-root"):
        users.check(False)
    users.check(True)
    monkeypatch.setenv(users.ALLOW, "1")
    users.check(False)


def test_root_alone_and_ordinary_users_are_not(shared, monkeypatch):
    monkeypatch.setattr(users, "working", lambda: [])
    users.check(False)
    monkeypatch.setattr(users, "working", lambda: [1001])
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    users.check(False)


def test_working_finds_users_of_processes():
    assert all(users.FIRST <= user <= users.LAST for user in users.working())
    assert (os.geteuid() in users.working()) == (users.FIRST <= os.geteuid() <= users.LAST)
