"""The step log: what each optimizer step did, 64 bytes a step, in RUN/steps/steps.log, appended
by rank 0 only.

docs/replay.md has the format. Records gather in memory and are written when half a second has
passed since the last write, and whenever somebody calls `flush` (at a checkpoint, at the end).
After a resume the steps since the checkpoint are taken again: their new records follow the old ones
(`history`), and `append` says if one differs.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..base.files import FILE_MODE, make_directories
from ..base.paths import expand_path
from ..errors import DataError, OutputError

NAME = "steps.log"
MAGIC = b"odysteps"
VERSION = 1
SIZE = 64  # bytes of a record, and of the header
LIMIT = 1 << 30  # bytes of a log that is read: 16 million steps
FLUSH_SECONDS = 0.5
UNKNOWN = "not known"  # a fingerprint that was not taken, in words

# name, type: the fields of a record. `flags`: 1 the step was taken, 2 and 4 the fingerprints are
# known.
LAYOUT = np.dtype(
    [("step", "<u8"), *((name, "<u4") for name in ("epoch", "batch", "samples", "attempt"))]
    + [
        ("loss", "<f8"),
        ("gradients", "<u8"),
        ("weights", "<u8"),
        ("rate", "<f8"),
        ("flags", "<u4"),
        ("crc", "<u4"),
    ]
)
TAKEN = 1
GRADIENTS = 2
WEIGHTS = 4
_FIELDS = struct.Struct("<QIIIIdQQdI")
_CRC = struct.Struct("<I")
_HEADER = struct.Struct("<8sII")


class StepRecord(NamedTuple):
    """One optimizer step.

    step: counted from 1. epoch, batch: the cursor, both from 0: which batch of which epoch it was
    of. samples: of the global batch. loss: the sum of losses as the step knew it. gradients:
    fingerprint of the summed gradients; None: not taken. weights: fingerprint of the weights after
    the step, likewise. rate: the learning rate. taken: False if the step was skipped. attempt: of
    the run (StepLog writes its own).
    """

    step: int
    epoch: int
    batch: int
    samples: int
    loss: float
    gradients: int | None
    weights: int | None
    rate: float
    taken: bool = True
    attempt: int = 0

    def encoded(self) -> bytes:
        """The 64 bytes of the record. Raises DataError: a field does not fit its type."""
        step, epoch, batch, samples, loss, gradients, weights, rate, taken, attempt = self
        flags = (
            TAKEN * taken | GRADIENTS * (gradients is not None) | WEIGHTS * (weights is not None)
        )
        fingerprints = gradients or 0, weights or 0
        try:
            body = _FIELDS.pack(
                step, epoch, batch, samples, attempt, loss, *fingerprints, rate, flags
            )
        except struct.error as problem:
            raise DataError(f"[steps] a field of {self} is out of range: {problem}") from None
        return body + _CRC.pack(zlib.crc32(body))


COMPARED = ("cursor", "rate", "loss", "gradients", "taken", "weights")


def differences(a: StepRecord, b: StepRecord) -> tuple[str, ...]:
    """In what of COMPARED two records of the same step part.

    In the order in which a step computes them, by bits; a fingerprint that one of them lacks is not
    compared.
    """
    differing = {
        "cursor": (a.epoch, a.batch, a.samples) != (b.epoch, b.batch, b.samples),
        "rate": _bits(a.rate) != _bits(b.rate),
        "loss": _bits(a.loss) != _bits(b.loss),
        "gradients": None not in (a.gradients, b.gradients) and a.gradients != b.gradients,
        "taken": a.taken != b.taken,
        "weights": None not in (a.weights, b.weights) and a.weights != b.weights,
    }
    return tuple(aspect for aspect, differs in differing.items() if differs)


def difference(a: StepRecord, b: StepRecord) -> str | None:
    """The first of `differences`."""
    return next(iter(differences(a, b)), None)


def shown(record: StepRecord, quantity: str) -> str:
    """One thing that `difference` names, as text that tells all bits; epochs and batches from 1,
    as people count.
    """
    if quantity == "cursor":
        return f"epoch {record.epoch + 1} batch {record.batch + 1} with {record.samples} samples"
    value = getattr(record, quantity)
    if quantity in ("gradients", "weights"):
        return UNKNOWN if value is None else f"{value:016x}"
    return repr(value)


class StepLog:
    """The log of a run, open for more records; for rank 0.

    Appending costs about 2 us (benchmarks/steplog.py).

    path: made if it is not there, and its directory. attempt: of this process; 0: that of the last
    record found. notice: what the user should know about the file that was found, or None. Raises
    OutputError: it cannot be written.
    """

    def __init__(self, path: str | Path, attempt: int = 0) -> None:
        self.path = Path(path)
        self.attempt = attempt
        self.notice: str | None = None
        # the newest of the steps that may be taken again
        self._earlier: dict[int, StepRecord] | None = None
        try:
            make_directories(self.path.parent)
            self._existing, length = self._read_existing()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(self.path, flags, FILE_MODE)
            os.ftruncate(self._file, length)
        except OSError as problem:
            raise OutputError(
                f"[steps] {self.path} cannot be written: {problem.strerror}; give a run "
                "directory that can be"
            ) from problem
        if not attempt and len(self._existing):
            self.attempt = int(self._existing["attempt"][-1])
        self._buffer = bytearray() if length else bytearray(header())
        self._last_flush = time.monotonic()

    def _read_existing(self) -> tuple[np.ndarray, int]:
        """The records that are there already, and how many bytes of the file are good."""
        nothing = np.zeros(0, LAYOUT), 0
        if not self.path.exists():
            return nothing
        try:
            data = _content(self.path)
            records = parse(data, str(self.path))
        except DataError as problem:
            aside = self.path.with_name(f"{self.path.name}.damaged-{self.attempt}-{os.getpid()}")
            os.replace(self.path, aside)
            self.notice = f"{problem}; it is kept as {aside.name}, and a new one begun"
            return nothing
        length = SIZE + SIZE * len(records) if len(data) >= SIZE else 0
        if length < len(data):
            self.notice = (
                f"[steps] {self.path}: a torn end of {len(data) - length} bytes was cut off"
            )
        return records, length

    def append(self, record: StepRecord) -> StepRecord | None:
        """Adds the record of a step, under this log's attempt.

        Returns the newest record of the same step from before this log was opened, if it differs;
        else None.

        Raises DataError: a field is out of range. OutputError: the file cannot be written.
        """
        if record.attempt != self.attempt:
            record = record._replace(attempt=self.attempt)
        self._buffer += record.encoded()
        if time.monotonic() - self._last_flush > FLUSH_SECONDS:
            self.flush()
        if self._earlier is None:
            old_records = decoded(self._existing[self._existing["step"] >= record.step])
            self._earlier = {r.step: r for r in old_records}
            del self._existing
        if not self._earlier:
            return None
        previous = self._earlier.pop(record.step, None)
        return None if previous is None or difference(previous, record) is None else previous

    def flush(self) -> None:
        """Gives all records to the operating system: the end of this process loses none of them
        any more. Raises OutputError: they cannot be written; what is left is kept for the
        next time.
        """
        try:
            while self._buffer:
                count = os.write(self._file, self._buffer)
                del self._buffer[:count]
        except OSError as problem:
            raise OutputError(
                f"[steps] {self.path} cannot be written: {problem.strerror}"
            ) from problem
        finally:
            self._last_flush = time.monotonic()

    def close(self) -> None:
        """Flushes and closes; a second time does nothing."""
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1


def header() -> bytes:
    """The 64 bytes that a log begins with."""
    text = _HEADER.pack(MAGIC, VERSION, SIZE)
    return (text + _CRC.pack(zlib.crc32(text))).ljust(SIZE, b"\0")


def parse(data: bytes, name: str = "the step log") -> np.ndarray:
    """The records of a log as an array of LAYOUT, in the order of the file; one that is torn at
    the end is left out.

    Torn is: fewer than 64 bytes, or records whose CRC is wrong with none behind them whose CRC is
    right (a power cut leaves zeros). Raises DataError: no step log, one of another version, or with
    a damaged record before others.
    """
    if len(data) < SIZE:
        if header().startswith(data):
            return np.zeros(0, LAYOUT)
        raise DataError(f"[steps] {name} is no step log")
    if data[:SIZE] != header():
        magic, version, size = _HEADER.unpack_from(data)
        if magic == MAGIC and version != VERSION:
            raise DataError(
                f"[steps] {name} is of version {version}; this odyssey reads version {VERSION}"
            )
        raise DataError(f"[steps] {name} is no step log, or its first {SIZE} bytes are damaged")
    records = np.frombuffer(data, LAYOUT, (len(data) - SIZE) // SIZE, SIZE)
    view = memoryview(data)
    good = np.zeros(len(records), bool)
    for i, crc in enumerate(records["crc"].tolist()):
        offset = SIZE + i * SIZE
        good[i] = zlib.crc32(view[offset : offset + SIZE - 4]) == crc
    count = int(np.flatnonzero(good)[-1]) + 1 if good.any() else 0
    if not good[:count].all():
        first = int(np.flatnonzero(~good)[0]) + 1
        raise DataError(
            f"[steps] {name}: record {first} of {len(records)} does not match its CRC-32"
        )
    records = records[:count]
    if (records["flags"] & ~np.uint32(TAKEN | GRADIENTS | WEIGHTS)).any():
        raise DataError(f"[steps] {name} has records with flags that this odyssey does not know")
    return records


def load(path: str | Path) -> np.ndarray:
    """All records of a log as `parse` gives them.

    Raises DataError: it is not there, too long, or no step log.
    """
    try:
        data = _content(expand_path(path))
    except OSError as problem:
        raise DataError(f"[steps] {path} cannot be read: {problem.strerror}") from problem
    return parse(data, str(path))


def history(records: np.ndarray) -> np.ndarray:
    """Returns what the run did in the end: the records that no later one has superseded, by
    ascending step.

    A record of step s supersedes all before it of steps >= s: whoever takes step s again has gone
    back to before it. Records of an attempt behind those of a later attempt are no part of the run:
    their writer had been replaced.
    """
    attempts = records["attempt"]
    records = records[attempts == np.maximum.accumulate(attempts)] if len(records) else records
    if len(records) < 2:
        return records
    steps = records["step"]
    lowest = np.minimum.accumulate(steps[::-1])[::-1]  # of this record and all behind it
    return records[np.append(steps[:-1] < lowest[1:], True)]


def decoded(records: np.ndarray) -> list[StepRecord]:
    """Records of an array of LAYOUT."""

    def one(step, epoch, batch, samples, attempt, loss, gradients, weights, rate, flags, _):  # type: ignore[no-untyped-def]
        gradients = gradients if flags & GRADIENTS else None
        weights = weights if flags & WEIGHTS else None
        return StepRecord(
            step,
            epoch,
            batch,
            samples,
            loss,
            gradients,
            weights,
            rate,
            bool(flags & TAKEN),
            attempt,
        )

    return [one(*fields) for fields in records.tolist()]


def _content(path: Path) -> bytes:
    """The bytes of a log; OSError, or DataError if it is longer than LIMIT."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise DataError(
            f"[steps] {path} is longer than {LIMIT} bytes; a step log of {LIMIT // SIZE} steps "
            "is not"
        )
    return data


def _bits(x: float) -> bytes:
    return struct.pack("<d", x)
