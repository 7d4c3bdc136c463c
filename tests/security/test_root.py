"""Root does not start runs where other people work (S14)."""

from __future__ import annotations

import os

import pytest

from odyssey.errors import ConfigError
from odyssey.launch import root_user


@pytest.fixture
def shared(monkeypatch):
    """This is root, and user 1001 has a process here."""
    monkeypatch.delenv(root_user.ALLOW, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(root_user, "working", lambda: [1001, 1002])


def test_root_among_others_is_refused(shared, monkeypatch):
    with pytest.raises(
        ConfigError, match="this is root, and user 1001 works on this machine too.*--allow-root"
    ):
        root_user.check(False)
    root_user.check(True)
    monkeypatch.setenv(root_user.ALLOW, "1")
    root_user.check(False)


def test_root_alone_and_ordinary_users_are_not(shared, monkeypatch):
    monkeypatch.setattr(root_user, "working", lambda: [])
    root_user.check(False)
    monkeypatch.setattr(root_user, "working", lambda: [1001])
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    root_user.check(False)


def test_working_finds_users_of_processes():
    assert all(root_user.FIRST <= user <= root_user.LAST for user in root_user.working())
    assert (os.geteuid() in root_user.working()) == (
        root_user.FIRST <= os.geteuid() <= root_user.LAST
    )
