"""The IDX reader: what it accepts, and that every kind of damage is an error that names the
file.
"""

from __future__ import annotations

import gzip
import hashlib
import mmap
import struct
from pathlib import Path

import numpy as np
import pytest

from odyssey.data import read_idx
from odyssey.data.idx import read_unpacked
from odyssey.errors import DataError

VALUES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def idx_bytes(values: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()
    )


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["a", "a.gz"])
@pytest.mark.parametrize("packed", [False, True])
def test_reads_plain_and_gzip_whatever_the_name(tmp_path: Path, name: str, packed: bool) -> None:
    content = idx_bytes(VALUES)
    path = write(tmp_path / name, gzip.compress(content) if packed else content)
    result = read_idx(path, ndim=3, sha256=hashlib.sha256(content).hexdigest())
    np.testing.assert_array_equal(result, VALUES)
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous
    assert not result.flags.writeable


def test_reads_several_chunks(tmp_path: Path) -> None:
    values = (
        (np.arange(3 << 20, dtype=np.uint32) * 2654435761 >> 24)
        .astype(np.uint8)
        .reshape(3, 1 << 20)
    )
    path = write(tmp_path / "a.gz", gzip.compress(idx_bytes(values), 1))
    np.testing.assert_array_equal(read_idx(path), values)


def refused(path: Path, *parts: str, **options: object) -> None:
    with pytest.raises(DataError) as caught:
        read_idx(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "none", "does not exist")


def test_folder(tmp_path: Path) -> None:
    refused(tmp_path, "cannot be read")


@pytest.mark.parametrize("kept", [5, 15, 30, -9, -1])
def test_truncated_gzip(tmp_path: Path, kept: int) -> None:
    content = gzip.compress(idx_bytes(VALUES))
    refused(write(tmp_path / "a.gz", content[:kept]), "damaged gzip")


def test_a_flipped_bit_in_a_gzip_body_never_gives_other_values(tmp_path: Path) -> None:
    content = gzip.compress(idx_bytes(VALUES), mtime=0)
    noticed = 0
    for at in range(10, len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 0x40
        try:
            result = read_idx(write(tmp_path / "a.gz", bytes(damaged)))
        except DataError:
            noticed += 1
        else:
            np.testing.assert_array_equal(result, VALUES)
    # The bits that fill up the last byte of the compressed data mean nothing; every other one must
    # be noticed.
    assert noticed >= len(content) - 10 - 1


def test_garbage_after_gzip(tmp_path: Path) -> None:
    refused(write(tmp_path / "a.gz", gzip.compress(idx_bytes(VALUES)) + b"xyz"), "damaged gzip")


@pytest.mark.parametrize("content", [b"", b"\0\0\x08"])
def test_shorter_than_the_magic_number(tmp_path: Path, content: bytes) -> None:
    refused(write(tmp_path / "a", content), f"holds {len(content)} bytes")


@pytest.mark.parametrize(
    "magic", [b"\0\0\x09\x03", b"\0\0\x0d\x03", b"\0\1\x08\x03", b"\1\0\x08\x03", b"PK\3\4"]
)
def test_wrong_magic(tmp_path: Path, magic: bytes) -> None:
    refused(
        write(tmp_path / "a", magic + idx_bytes(VALUES)[4:]), f"0x{magic.hex()}", "unsigned bytes"
    )


def test_wrong_number_of_dimensions(tmp_path: Path) -> None:
    refused(write(tmp_path / "a", idx_bytes(VALUES)), "3 dimensions; 1 expected", "swapped", ndim=1)


@pytest.mark.parametrize("ndim", [0, 9, 255])
def test_impossible_number_of_dimensions(tmp_path: Path, ndim: int) -> None:
    refused(
        write(tmp_path / "a", bytes([0, 0, 8, ndim]) + bytes(4 * ndim)),
        f"{ndim} dimensions; 1 to 8 expected",
    )


def test_ends_inside_the_header(tmp_path: Path) -> None:
    refused(write(tmp_path / "a", idx_bytes(VALUES)[:9]), "16 bytes expected, 9 found")


def test_zero_size(tmp_path: Path) -> None:
    refused(write(tmp_path / "a", struct.pack(">BBBB2I", 0, 0, 8, 2, 0, 5)), "0 x 5", "at least 1")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(("change", "found"), [(-1, 39), (-24, 16), (1, 41), (100, 140)])
def test_length_must_be_exact(tmp_path: Path, pack: object, change: int, found: int) -> None:
    content = idx_bytes(VALUES)
    content = content[:change] if change < 0 else content + bytes(change)
    # a gzip file is not unpacked further than needed
    says = "more" if pack is gzip.compress and change > 0 else found
    refused(write(tmp_path / "a", pack(content)), f"40 bytes expected, {says} found")  # type: ignore[operator]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("shape", [(2**32 - 1, 1, 1), (2**32 - 1,) * 3])
def test_huge_claim_is_refused_before_allocating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: object, shape: tuple[int, ...]
) -> None:
    def no_allocation(*arguments: object) -> None:
        raise AssertionError(f"allocated {arguments}")

    path = write(tmp_path / "a", pack(struct.pack(">BBBB3I", 0, 0, 8, 3, *shape) + b"abc"))  # type: ignore[operator]
    monkeypatch.setattr("odyssey.data.idx.np.empty", no_allocation)
    refused(path, " x ".join(map(str, shape)))


def test_altered_file(tmp_path: Path) -> None:
    content = idx_bytes(VALUES)
    digest = hashlib.sha256(content).hexdigest()
    altered = bytearray(content)
    altered[20] ^= 1
    found = hashlib.sha256(altered).hexdigest()
    refused(
        write(tmp_path / "a", bytes(altered)), "altered", digest[:12], found[:12], sha256=digest
    )


def test_altered_header_of_the_same_length(tmp_path: Path) -> None:
    digest = hashlib.sha256(idx_bytes(VALUES)).hexdigest()
    refused(write(tmp_path / "a", idx_bytes(VALUES.reshape(2, 4, 3))), "altered", sha256=digest)


def test_digest_may_be_upper_case(tmp_path: Path) -> None:
    content = idx_bytes(VALUES)
    path = write(tmp_path / "a", content)
    assert read_idx(path, sha256=hashlib.sha256(content).hexdigest().upper()).shape == (2, 3, 4)


def test_what_was_unpacked_is_kept_and_checked(tmp_path):
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    raw = (
        bytes((0, 0, 8, 3))
        + b"".join(n.to_bytes(4, "big") for n in values.shape)
        + values.tobytes()
    )
    digest = hashlib.sha256(raw).hexdigest()
    path, cache = tmp_path / "x.gz", tmp_path / "cache"
    path.write_bytes(gzip.compress(raw))
    kept = cache / f"{digest}.idx"
    for damage in (
        None,
        lambda: kept.write_bytes(raw[:-1]),
        lambda: kept.write_bytes(raw[:-1] + b"\0"),
        kept.unlink,
    ):
        if damage is not None:
            damage()
        np.testing.assert_array_equal(read_unpacked(path, cache, ndim=3, sha256=digest), values)
        assert kept.read_bytes() == raw
    path.unlink()
    np.testing.assert_array_equal(read_unpacked(path, cache, ndim=3, sha256=digest), values)
    path.write_bytes(gzip.compress(raw))
    mapped = read_unpacked(path, cache, ndim=3, sha256=digest)
    base = mapped
    while isinstance(base, np.ndarray):
        base = base.base
    # not a copy of each rank
    assert isinstance(memoryview(base).obj, mmap.mmap) and not mapped.flags.writeable
    kept.chmod(0o666)
    read = read_unpacked(path, cache, ndim=3, sha256=digest)
    with open(kept, "r+b") as file:  # another user does that
        file.truncate(5)
    np.testing.assert_array_equal(read, values)
    assert not read.flags.writeable
    kept.write_bytes(raw)
    kept.chmod(0o600)
    mapped = read_unpacked(path, cache, ndim=3, sha256=digest)
    other = tmp_path / "other"
    other.write_bytes(b"another file")
    other.replace(kept)
    np.testing.assert_array_equal(mapped, values)
    np.testing.assert_array_equal(read_unpacked(path, cache, ndim=3, sha256=digest), values)
    full = tmp_path / "file"
    full.write_bytes(b"")
    np.testing.assert_array_equal(read_unpacked(path, full / "no", ndim=3, sha256=digest), values)
