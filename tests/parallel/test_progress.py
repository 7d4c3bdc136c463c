"""Polling while kernels run: engine/progress.py."""

from __future__ import annotations

import threading
import time

import pytest

from odyssey.engine.progress import Progress

pytestmark = pytest.mark.unit


def test_it_polls_while_kernels_run_and_only_then():
    polled, computing = threading.Event(), False
    beside = []

    def poll():
        beside.append(computing)
        polled.set()

    with Progress(poll) as progress:
        time.sleep(0.02)
        assert not beside
        computing = True
        with progress.computing():
            assert polled.wait(10)
        computing = False
        count = len(beside)
        time.sleep(0.02)
        assert len(beside) == count
    assert all(beside)
    time.sleep(0.02)
    assert len(beside) == count


def test_what_a_poll_raises_is_raised_where_its_owner_goes_on():
    failed = threading.Event()

    def poll():
        failed.set()
        raise ValueError("rank 1 has ended")

    with pytest.raises(ValueError, match="rank 1 has ended"), Progress(poll) as progress:
        with progress.computing():
            assert failed.wait(10)
        pytest.fail("computing() returned")


def test_its_thread_ends_with_an_error_of_its_owner():
    with pytest.raises(KeyError), Progress(lambda: None) as progress, progress.computing():
        raise KeyError("layer")
    assert not any(t.name == "odyssey progress" for t in threading.enumerate())
