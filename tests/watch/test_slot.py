"""The status slot: what is written is read, from another process as well, and garbage is no
harm.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from odyssey.base import slot
from odyssey.comm import mock


@pytest.fixture
def own(monkeypatch):
    """A slot of this test's own."""
    memory = bytearray(slot.SIZE)  # not a copy: other tests of this process have trained, and ended
    numbers = memoryview(memory).cast("q")
    numbers[slot._MAGIC] = slot.MAGIC
    numbers[slot._PHASE] = slot.CODES["start"]
    numbers[slot._SINCE] = slot._now_ns()
    numbers[slot._CALL] = -1
    monkeypatch.setattr(slot, "_memory", memory)
    monkeypatch.setattr(slot, "_numbers", numbers)
    monkeypatch.setattr(slot, "_descriptor", -1)
    slot.describe(1, 4, 3)


def test_what_is_written_is_read(own):
    slot.phase("compute")
    assert slot.phase("data") == "compute"
    slot.step(7, 64)
    slot.note_call(12, "all_reduce float32 (8,) sum at train.py:3", (5, "0-3"))
    found = slot.read_current()
    assert (found.rank, found.world, found.pid, found.attempt) == (1, 4, os.getpid(), 3)
    assert (found.step, found.samples, found.phase, found.doing) == (7, 64, "data", "data")
    assert (found.call, found.call_group, found.call_text) == (
        12,
        5,
        "all_reduce float32 (8,) sum at train.py:3",
    )
    assert found.whole and not found.ended and not found.waiting
    slot.begin_wait(13, "barrier at train.py:4", (5, "0-3"))
    slot.note_missing_ranks([2, 3])
    found = slot.read_current()
    assert found.doing == "wait" and found.phase == "data"
    assert (found.wait_sequence, found.wait_text, found.members, found.missing) == (
        13,
        "barrier at train.py:4",
        "0-3",
        "2-3",
    )
    slot.end_wait()
    slot.begin_wait(14, "barrier at train.py:5", (5, "0-3"))
    assert slot.read_current().missing == ""
    slot.end_wait()
    slot.note_end(3, "sys.exit(3) at train.py:9")
    slot.note_end(0, "later")
    found = slot.read_current()
    assert (found.ended, found.code, found.end, found.waiting) == (
        True,
        3,
        "sys.exit(3) at train.py:9",
        0,
    )


def test_every_sign_of_life_counts(own):
    seen = [slot.read_current().progress]
    for act in (
        lambda: slot.phase("evaluate"),
        lambda: slot.step(1),
        lambda: slot.note_call(0, "barrier"),
        lambda: (slot.begin_wait(0, "barrier"), slot.end_wait()),
        lambda: slot.note("file"),
    ):
        act()
        seen.append(slot.read_current().progress)
    assert seen == sorted(set(seen))


def test_time_goes_to_the_phase_it_was_spent_in_and_waiting_apart(own):
    slot.phase("compute")
    begun, start = time.monotonic(), slot.read_current()  # in this order: what is spent lies within
    time.sleep(0.02)
    slot.begin_wait(0, "barrier")
    waits = time.monotonic()
    time.sleep(0.05)
    waited = time.monotonic() - waits
    slot.end_wait()
    slot.phase("data")
    whole = time.monotonic() - begun
    end = slot.read_current()
    spent = [(b - a) / 1e9 for a, b in zip(start.times, end.times, strict=True)]
    assert 0.05 <= waited <= spent[slot.WAIT] <= whole - 0.02
    assert 0.02 <= spent[slot.CODES["compute"]] <= whole - waited
    assert spent[slot.CODES["data"]] == 0
    slot.count_wait(1000)
    assert slot.read_current().times[slot.WAIT] - end.times[slot.WAIT] == 1000


def test_texts_of_any_length(own):
    slot.note("ä" * 300)
    assert (
        slot.read_current().note.endswith("ä...") and len(slot.read_current().note.encode()) <= 112
    )
    slot.note("a\x1b[2J\nb")
    assert slot.read_current().note == "a?[2J?b"  # it will be shown on terminals


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3, 8, 9, 5], "0-3,5,8-9"), (range(0, 80, 2), None)],
)
def test_ranks_as_text(ranks, text):
    said = slot.format_ranks(ranks)
    if text is None:
        assert len(said) <= 63 and said.endswith(",?") and slot.parse_ranks(said, 100) is None
    else:
        assert said == text and slot.parse_ranks(said, 100) == sorted(ranks)


def test_ranks_from_any_text():
    assert slot.parse_ranks("all", 3) == [0, 1, 2]
    for text in ("0-99999999", "3", "2-1", "-", "x", "1,,2", "²"):
        assert slot.parse_ranks(text, 3) is None


READER = """
import os, sys
from odyssey.base import slot
found = slot.read(os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDONLY))
print(found.rank, found.step, found.doing, found.wait_text)
"""


def test_another_process_reads_it(own):
    descriptor = slot.publish()
    slot.step(5)
    slot.begin_wait(3, "barrier at train.py:1")
    code = [sys.executable, "-c", READER, str(os.getpid()), str(descriptor)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=30)
    assert done.stdout == "1 5 wait barrier at train.py:1\n", done.stderr
    os.close(descriptor)


def test_a_reader_never_sees_half_of_a_write(own):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    descriptor = slot.publish()
    stop = threading.Event()

    def write():
        i = 0
        while not stop.is_set():
            i += 1
            slot.begin_wait(i, f"call {i}")
            slot.end_wait()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        whole = 0
        until = time.monotonic() + 20
        while whole < 50 and time.monotonic() < until:
            found = slot.read(descriptor)
            if found.whole and found.waiting:
                whole += 1
                assert found.wait_text == f"call {found.wait_sequence}"
    finally:
        stop.set()
        writer.join()
        sys.setswitchinterval(interval)
        os.close(descriptor)
    assert whole


def test_a_writer_that_stopped_half_way(own):
    descriptor = slot.publish()
    slot.step(3)
    slot._begin_write()
    found = slot.read(descriptor)
    assert found.step == 3 and not found.whole
    os.close(descriptor)


def test_garbage_is_no_slot_or_a_harmless_one(own):
    random.seed(0)
    good = bytes(slot._memory[:])
    assert (
        slot.parse(b"") is None
        and slot.parse(bytes(slot.SIZE)) is None
        and slot.parse(good[:-1]) is None
    )
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(random.choice((1, 8, 400))):
            data[random.randrange(8, slot.SIZE)] = random.randrange(256)
        found = slot.parse(bytes(data))
        if found is not None:
            assert 0 <= found.rank < found.world
            slot.parse_ranks(found.missing, found.world)
            assert all(c.isprintable() for c in found.note + found.end + found.host)


def test_a_child_process_has_a_slot_of_its_own(own):
    descriptor = slot.publish()
    before = slot.read(descriptor).step
    child = os.fork()
    if not child:
        slot.step(before + 99)
        os._exit(0)
    os.waitpid(child, 0)
    assert slot.read(descriptor).step == before
    os.close(descriptor)


def test_calls_and_groups_are_said(monkeypatch):
    said = []
    monkeypatch.setattr(
        slot, "note_call", lambda sequence, text, group: said.append((sequence, text, group))
    )

    def work(c):
        half = c.split(c.rank % 2)
        half.all_reduce(np.ones(3))

    mock.run(4, work)
    sums = [
        (sequence, group)
        for sequence, text, group in said
        if text.startswith("all_reduce float64 (3,) sum at ")
    ]
    assert len(sums) == 4 and {sequence for sequence, _ in sums} == {0}
    assert {text for _, (_, text) in sums} == {"0,2", "1,3"}
    assert len({number for _, (number, _) in sums}) == 2
