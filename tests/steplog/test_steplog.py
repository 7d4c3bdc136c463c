"""The step log: what is written is read, torn ends, damage, what is superseded, and that no
input breaks the parser.
"""

from __future__ import annotations

import math
import os
import random
import struct
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from odyssey import steplog
from odyssey.audit.steplog import SIZE, StepLog, StepRecord
from odyssey.errors import DataError, OutputError


def record(at, attempt=0, **changes):
    base = StepRecord(at, at // 10, at % 10, 64, 2.5 / at, 7 * at, 2**64 - at, 0.1, True, attempt)
    return base._replace(**changes)


def write(path, records, attempt=0):
    with closing(StepLog(path, attempt)) as log:
        for r in records:
            log.append(r)
    return log


def history(path):
    return steplog.decoded(steplog.history(steplog.load(path)))


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "steps" / "steps.log"
    given = [
        record(1),
        record(2, loss=math.inf, gradients=None, weights=None, taken=False),
        record(3, loss=-0.0, gradients=0, weights=2**64 - 1, rate=5e-324),
        record(3, step=2**64 - 1, epoch=2**32 - 1, batch=2**32 - 1, samples=2**32 - 1),
    ]
    write(path, given)
    assert steplog.decoded(steplog.load(path)) == given
    assert path.stat().st_size == SIZE * 5
    assert math.copysign(1, steplog.decoded(steplog.load(path))[2].loss) == -1


def test_a_nan_keeps_its_bits(tmp_path):
    odd = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000001234))[0]
    write(tmp_path / "a", [record(1, loss=odd)])
    (found,) = steplog.decoded(steplog.load(tmp_path / "a"))
    assert struct.pack("<d", found.loss) == struct.pack("<d", odd)
    assert steplog.difference(found, record(1, loss=odd)) is None
    assert steplog.difference(found, record(1, loss=math.nan)) == "loss"


def test_a_record_is_64_bytes_as_documented():
    data = record(5, attempt=3).encoded()
    assert len(data) == SIZE
    assert struct.unpack_from("<QIIII", data) == (5, 0, 5, 64, 3)
    assert struct.unpack_from("<I", data, 60)[0] == zlib.crc32(data[:60])


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"step": 2**64},
        {"epoch": 2**32},
        {"samples": -1},
        {"weights": 2**64},
        {"loss": "x"},
    ],
)
def test_a_field_out_of_range(tmp_path, wrong):
    with closing(StepLog(tmp_path / "a")) as log, pytest.raises(DataError, match="out of range"):
        log.append(record(1, **wrong))
    assert steplog.decoded(steplog.load(tmp_path / "a")) == []


def test_every_torn_end_is_cut_off_and_the_log_goes_on(tmp_path):
    path = tmp_path / "a"
    write(path, [record(i) for i in range(1, 4)])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        kept = max(0, length // SIZE - 1)
        assert steplog.decoded(steplog.load(path)) == [record(i) for i in range(1, kept + 1)]
        log = write(path, [record(9)])
        assert steplog.decoded(steplog.load(path)) == [
            *(record(i) for i in range(1, kept + 1)),
            record(9),
        ]
        assert (log.notice is not None) == (length % SIZE != 0)


def test_zeros_at_the_end_are_a_torn_end(tmp_path):
    path = tmp_path / "a"
    write(path, [record(1)])
    with path.open("ab") as file:
        file.write(bytes(5 * SIZE + 7))
    assert steplog.decoded(steplog.load(path)) == [record(1)]
    log = write(path, [record(2)])
    assert "torn end of 327 bytes" in log.notice
    assert steplog.decoded(steplog.load(path)) == [record(1), record(2)]


def test_every_flipped_bit_before_the_last_record_is_found(tmp_path):
    path = tmp_path / "a"
    write(path, [record(i) for i in range(1, 4)])
    whole = path.read_bytes()
    for i in range(8 * SIZE * 3):
        data = bytearray(whole)
        data[i // 8] ^= 1 << i % 8
        with pytest.raises(DataError, match="step log|record|version"):
            steplog.parse(bytes(data))
    data = bytearray(whole)
    data[-1] ^= 1
    assert len(steplog.parse(bytes(data))) == 2


def test_a_damaged_log_is_set_aside(tmp_path):
    path = tmp_path / "steps.log"
    write(path, [record(i) for i in range(1, 4)])
    data = bytearray(path.read_bytes())
    data[SIZE + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="record 1 of 3 does not match its CRC-32"):
        steplog.decoded(steplog.load(path))
    log = write(path, [record(4)], attempt=2)
    (aside,) = tmp_path.glob("steps.log.damaged-2-*")
    assert aside.read_bytes() == data
    assert aside.name in log.notice and "record 1 of 3" in log.notice
    assert steplog.decoded(steplog.load(path)) == [record(4, 2)]


def test_later_attempts_supersede(tmp_path):
    path = tmp_path / "a"
    write(path, [record(i) for i in range(1, 8)], attempt=1)
    write(path, [record(i) for i in range(5, 7)], attempt=2)
    assert [(r.step, r.attempt) for r in history(path)] == [
        *((i, 1) for i in range(1, 5)),
        (5, 2),
        (6, 2),
    ]
    write(path, [record(3)], attempt=3)
    assert [(r.step, r.attempt) for r in history(path)] == [(1, 1), (2, 1), (3, 3)]
    assert len(steplog.decoded(steplog.load(path))) == 10


def test_without_attempts_a_step_taken_again_supersedes(tmp_path):
    path = tmp_path / "a"
    write(path, [record(i) for i in range(1, 8)], attempt=4)
    log = write(path, [record(i) for i in range(5, 7)])
    assert log.attempt == 4
    assert [r.step for r in history(path)] == [1, 2, 3, 4, 5, 6]


def test_a_writer_that_was_replaced_is_no_part_of_the_run(tmp_path):
    path = tmp_path / "a"
    old = StepLog(path, 1)
    old.append(record(1))
    old.flush()
    new = StepLog(path, 2)
    new.append(record(2, loss=1.0))
    new.flush()
    old.append(record(2, loss=9.0))
    old.append(record(3))
    old.close()
    new.append(record(3, loss=1.5))
    new.close()
    assert [(r.step, r.attempt) for r in history(path)] == [(1, 1), (2, 2), (3, 2)]


def test_a_step_that_comes_out_otherwise_is_reported(tmp_path):
    path = tmp_path / "a"
    write(path, [record(i) for i in range(1, 8)], attempt=1)
    with closing(StepLog(path, 2)) as log:
        assert log.append(record(4)) is None
        assert log.append(record(5, weights=1)) == record(5, 1)
        assert log.append(record(6, gradients=None)) is None  # nothing to compare with
        assert log.append(record(9)) is None
    # the newest is what the next attempt is compared with
    with closing(StepLog(path, 3)) as log:
        assert log.append(record(5)) == record(5, 2, weights=1)
        assert log.append(record(6)) is None
        assert log.append(record(7)) is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"epoch": 1}, "cursor"),
        ({"batch": 1, "loss": 0.0}, "cursor"),
        ({"samples": 1}, "cursor"),
        ({"rate": 0.2, "loss": 0.0}, "rate"),
        ({"loss": 0.0, "gradients": 0, "weights": 0}, "loss"),
        ({"gradients": 0, "weights": 0}, "gradients"),
        ({"taken": False, "weights": 0}, "taken"),
        ({"weights": 0}, "weights"),
        ({"weights": None, "gradients": None, "attempt": 9}, None),
    ],
)
def test_difference(changes, what):
    assert steplog.difference(record(5), record(5, **changes)) == what


def test_shown():
    r = record(5)
    assert steplog.shown(r, "cursor") == "epoch 1 batch 6 with 64 samples"
    assert steplog.shown(r, "loss") == "0.5"
    assert steplog.shown(r, "weights") == "fffffffffffffffb"
    assert steplog.shown(r._replace(gradients=None), "gradients") == "not known"


def test_history_keeps_one_record_a_step_in_order_whatever_was_written():
    rng = np.random.default_rng(0)
    for _ in range(300):
        records = np.zeros(rng.integers(0, 30), steplog.LAYOUT)
        records["step"] = rng.integers(1, 9, len(records))
        records["attempt"] = rng.integers(0, 3, len(records))
        expected: list[tuple[int, int]] = []
        newest = 0
        for i, (step, attempt) in enumerate(zip(records["step"], records["attempt"], strict=True)):
            if attempt < newest:
                continue
            newest = attempt
            expected = [e for e in expected if e[0] < step] + [(int(step), i)]
        records["loss"] = np.arange(len(records))
        found = steplog.history(records)
        assert [(int(r["step"]), int(r["loss"])) for r in found] == expected


def test_records_wait_in_memory_until_they_are_flushed(tmp_path, monkeypatch):
    path, now = tmp_path / "a", [100.0]
    monkeypatch.setattr(steplog.time, "monotonic", lambda: now[0])
    log = StepLog(path)
    log.append(record(1))
    assert steplog.decoded(steplog.load(path)) == []
    now[0] += 1
    log.append(record(2))
    assert len(steplog.decoded(steplog.load(path))) == 2
    log.append(record(3))
    assert len(steplog.decoded(steplog.load(path))) == 2
    log.flush()
    assert len(steplog.decoded(steplog.load(path))) == 3
    log.close()
    log.close()


KILLED = """
import os, signal, sys
from odyssey.audit.steplog import StepLog, StepRecord
log = StepLog(sys.argv[1], 1)
for step in range(1, 100):
    log.append(StepRecord(step, 0, step, 64, 1.0, step, step, 0.1))
    if step == 60:
        log.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_only_what_was_not_flushed(tmp_path, launch):
    path = tmp_path / "steps.log"
    done = subprocess.run([sys.executable, "-c", KILLED, path], env=launch.environment, timeout=60)
    assert done.returncode == -9
    assert [r.step for r in steplog.decoded(steplog.load(path))][:60] == list(range(1, 61))


def test_a_full_disk_is_said_and_nothing_is_lost_when_it_has_room_again(tmp_path, monkeypatch):
    path, room = tmp_path / "a", [SIZE + 100]
    real = os.write

    def short(file, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        done = real(file, bytes(data[: room[0]]))
        room[0] -= done
        return done

    log = StepLog(path)
    for i in range(1, 4):
        log.append(record(i))
    monkeypatch.setattr(steplog.os, "write", short)
    with pytest.raises(OutputError, match="No space left"):
        log.flush()
    assert len(steplog.decoded(steplog.load(path))) == 1
    room[0] = 10**6
    log.append(record(4))
    log.close()
    assert [r.step for r in steplog.decoded(steplog.load(path))] == [1, 2, 3, 4]


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (
        tmp_path / "file" / "steps.log",
        tmp_path,
        tmp_path / "link",
        Path("/proc/steps/steps.log"),
    ):
        with pytest.raises(OutputError, match="cannot be written"):
            StepLog(path)
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_no_log(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="cannot be read"):
        steplog.decoded(steplog.load(tmp_path / "nothing"))
    with pytest.raises(DataError, match="no step log"):
        steplog.parse(b"x")
    with pytest.raises(DataError, match="no step log"):
        steplog.parse(bytes(1000))
    text = struct.pack("<8sII", steplog.MAGIC, 2, 64)
    with pytest.raises(DataError, match="of version 2; this odyssey reads version 1"):
        steplog.parse((text + struct.pack("<I", zlib.crc32(text))).ljust(64, b"\0"))
    body = record(1).encoded()[:56] + struct.pack("<I", 8)
    with pytest.raises(DataError, match="flags"):
        steplog.parse(steplog.header() + body + struct.pack("<I", zlib.crc32(body)))
    write(tmp_path / "a", [record(1)])
    monkeypatch.setattr(steplog, "LIMIT", 100)
    with pytest.raises(DataError, match="longer than 100 bytes"):
        steplog.decoded(steplog.load(tmp_path / "a"))


def mutated(rng: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.randrange(1, 4)):
        kind, at = rng.randrange(7), rng.randrange(len(data) + 1)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randrange(1, 130))
        elif kind == 2:
            data[at : at + rng.randrange(1, 130)] = b""
        elif kind == 3 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 4:  # a record of anything, with the right CRC
            body = rng.randbytes(60)
            place = at // SIZE * SIZE
            data[place : place + SIZE] = body + struct.pack("<I", zlib.crc32(body))
        elif kind == 5:
            data[at : at + SIZE] = bytes(SIZE)
        elif kind == 6:
            place = at // SIZE * SIZE
            data[place:place] = data[place : place + SIZE]
    return bytes(data)


def test_no_input_breaks_the_parser():
    rng = random.Random(5)
    whole = steplog.header() + b"".join(record(i).encoded() for i in range(1, 6))
    read = refused = 0
    for _ in range(100_000):
        data = mutated(rng, whole)
        try:
            records = steplog.parse(data)
        except DataError as problem:
            assert len(str(problem)) < 300
            refused += 1
            continue
        read += 1
        assert len(records) <= len(data) // SIZE
        for r in steplog.decoded(steplog.history(records)):
            assert 0 <= r.step < 2**64
    assert read > 10_000 and refused > 10_000
