"""Data files that lie (S2, S8, S9): refused by name, with code 65, before memory is taken.

RELIABILITY's test 36.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from odyssey.data import read_idx
from odyssey.data.datasets import _SHIPPED
from odyssey.errors import DataError

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
GROWTH_MB = 100

MEASURE = """
import json, resource, sys
from pathlib import Path
import numpy
from odyssey import data
from odyssey.errors import DataError

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, found = peak(), {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    said = None
    try:
        data.load("cifar10" if folder.name.startswith("cifar") else "mnist", train=True, data_dir=folder)
    except DataError as error:
        said = str(error)
    found[folder.name] = {"said": said, "growth": peak() - before}
print(json.dumps(found))
"""


def idx_bytes(*shape: int, values: bytes = b"") -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + values


def stored(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def bomb() -> bytes:
    """1 GiB of zeros in about 1 MB, behind the header of two images."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = packer.compress(idx_bytes(2, 28, 28)) + packer.flush(zlib.Z_FULL_FLUSH)
    return start + 64 * (packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH))


GOOD_IMAGES = idx_bytes(2, 28, 28, values=bytes(2 * 784))
GOOD_LABELS = idx_bytes(2, values=b"\x03\x09")

FILES = {  # images, labels, whose name the message has, and what it says
    "flipped byte in gzip": (
        stored(GOOD_IMAGES)[:-9] + b"\xff" + stored(GOOD_IMAGES)[-8:],
        GOOD_LABELS,
        IMAGES,
        "gzip",
    ),
    "truncated gzip": (stored(GOOD_IMAGES)[:-20], GOOD_LABELS, IMAGES, "damaged gzip"),
    "checksum of gzip": (stored(GOOD_IMAGES)[:-8] + bytes(8), GOOD_LABELS, IMAGES, "damaged gzip"),
    "wrong magic": (b"\x89PNG" + GOOD_IMAGES[4:], GOOD_LABELS, IMAGES, "magic number 0x89504e47"),
    "other type": (b"\0\0\x0d\x03" + GOOD_IMAGES[4:], GOOD_LABELS, IMAGES, "magic number"),
    "2^40 values in 90 bytes": (
        idx_bytes(2**20, 2**10, 2**10, values=bytes(74)),
        GOOD_LABELS,
        IMAGES,
        "1099511627792",
    ),
    "2^40 values in gzip": (
        stored(idx_bytes(2**20, 2**10, 2**10)),
        GOOD_LABELS,
        IMAGES,
        "more than",
    ),
    "2^96 values": (
        idx_bytes(2**32 - 1, 2**32 - 1, 2**32 - 1),
        GOOD_LABELS,
        IMAGES,
        "bytes expected",
    ),
    "a gzip that unpacks to 1 GiB": (bomb(), GOOD_LABELS, IMAGES, "not as long as its header says"),
    "label out of range": (
        GOOD_IMAGES,
        idx_bytes(2, values=b"\x03\x0a"),
        LABELS,
        "label 10 at index 1",
    ),
    "empty images": (b"", GOOD_LABELS, IMAGES, "holds 0 bytes"),
    "empty labels": (GOOD_IMAGES, b"", LABELS, "holds 0 bytes"),
    "no sample": (idx_bytes(0, 28, 28), idx_bytes(0), IMAGES, "at least 1"),
    "header alone": (GOOD_IMAGES[:10], GOOD_LABELS, IMAGES, "ends inside its header"),
    "swapped": (GOOD_LABELS, GOOD_IMAGES, IMAGES, "images and labels are not swapped"),
    "more labels": (GOOD_IMAGES, idx_bytes(3, values=b"\1\2\3"), LABELS, "3 labels"),
}


CIFAR = {  # bytes of each file -> what is said
    "cifar of 0 bytes": (0, "holds 0 bytes"),
    "cifar of 1 byte": (1, "holds 1 bytes"),
    "cifar of a record less a byte": (3072, "holds 3072 bytes"),
    # sparse; no multiple of a record
    "cifar of a terabyte": ((1 << 40) + 1, "holds 1099511627777 bytes"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What one process says to all of them, one after the other, and how far its memory had
    grown by then.
    """
    root = tmp_path_factory.mktemp("data")
    for kind, (images, labels, *_) in FILES.items():
        (root / kind).mkdir()
        (root / kind / IMAGES).write_bytes(images)
        (root / kind / LABELS).write_bytes(labels)
    for kind, (size, _) in CIFAR.items():
        (root / kind).mkdir()
        for number in range(1, 6):
            with open(root / kind / f"data_batch_{number}.bin", "wb") as file:
                os.truncate(file.fileno(), size)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, root], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", [*FILES, *CIFAR])
def test_a_file_that_lies_is_refused_before_memory_is_taken(said, kind):
    found = said[kind]
    named, says = FILES[kind][2:] if kind in FILES else ("data_batch_1.bin", CIFAR[kind][1])
    assert found["said"] and f"{kind}/{named}" in found["said"] and says in found["said"]
    assert found["growth"] < GROWTH_MB


def test_a_flipped_bit_in_the_shipped_files_is_found(tmp_path, monkeypatch):
    """Also where the length, the header and the labels' range stay right."""
    from odyssey.data import datasets, load

    for path in _SHIPPED.glob("train-*"):
        shutil.copy(path, tmp_path)
    labels = tmp_path / f"{LABELS}.gz"
    data = bytearray(gzip.decompress(labels.read_bytes()))
    data[5000] ^= 1
    labels.write_bytes(stored(bytes(data)))
    monkeypatch.setattr(datasets, "_SHIPPED", tmp_path)
    with pytest.raises(DataError, match=f"{LABELS}.gz was altered"):
        load("mnist", train=True)


def test_the_command_ends_with_65_and_names_the_file(tmp_path, launch):
    for name, data in ((IMAGES, stored(GOOD_IMAGES)[:-20]), (LABELS, GOOD_LABELS)):
        (tmp_path / name).write_bytes(data)
    for ranks in (0, 2):
        done = launch.train(
            "--data-dir", tmp_path, "--steps", "1", "--global-batch-size", "64", ranks=ranks
        )
        assert done.returncode == DataError.exit_code == 65, done.stderr
        assert (
            f"{tmp_path / IMAGES} is a damaged gzip file" in done.stderr
            and "Traceback" not in done.stderr
        )


def test_what_is_no_file_does_not_keep_the_reader_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DataError, match="not a regular file"):
            read_idx(path)


def test_what_does_not_fit_into_memory_is_said(tmp_path, monkeypatch):
    read = gzip.GzipFile.read

    def full(stream, count):
        if count > 100:
            raise MemoryError
        return read(stream, count)

    (tmp_path / "a").write_bytes(gzip.compress(GOOD_IMAGES))
    monkeypatch.setattr(gzip.GzipFile, "read", full)
    with pytest.raises(DataError, match="does not fit into memory"):
        read_idx(tmp_path / "a")
    monkeypatch.undo()
    np.testing.assert_array_equal(read_idx(tmp_path / "a"), np.zeros((2, 28, 28)))
