"""What a shared library of Linux needs: other libraries, and versions of their symbols. A reader of ELF headers.

64-bit little-endian files only. Layout: the System V gABI, and for versions the Linux Standard Base.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import NamedTuple

_DYNAMIC, _VERNEED = 6, 0x6FFFFFFE  # types of sections
_NEEDED = 1  # tag of an entry in the dynamic section


class Elf(NamedTuple):
    """needed: names of libraries. versions: such as "GLIBC_2.34", by the library that has them."""

    needed: tuple[str, ...]
    versions: dict[str, tuple[str, ...]]


def is_elf(path: Path) -> bool:
    """Whether a file is one that `read` reads."""
    with open(path, "rb") as file:
        return file.read(6) == b"\x7fELF\x02\x01"


def read(path: Path) -> Elf:
    """Reads a library. Raises ValueError: not one of this kind, or torn. OSError: it cannot be read."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    try:
        start, size, number = struct.unpack_from("<Q", data, 0x28)[0], *struct.unpack_from("<HH", data, 0x3A)
        # of a section: type, offset, size, index of its strings, number of its entries
        sections = []
        for n in range(number):
            kind = struct.unpack_from("<I", data, start + n * size + 4)[0]
            offset, length = struct.unpack_from("<QQ", data, start + n * size + 24)
            sections.append((kind, offset, length, *struct.unpack_from("<II", data, start + n * size + 40)))
        needed: list[str] = []
        versions: dict[str, tuple[str, ...]] = {}
        for kind, offset, length, link, entries in sections:
            strings = sections[link][1] if link < len(sections) else 0
            if kind == _DYNAMIC:
                for tag, value in struct.iter_unpack("<QQ", data[offset : offset + length]):
                    if tag == _NEEDED:
                        needed.append(_string(data, strings + value))
            elif kind == _VERNEED:
                for _ in range(entries):
                    _, count, file, aux, following = struct.unpack_from("<HHIII", data, offset)
                    names, at = [], offset + aux
                    for _ in range(count):
                        _, _, _, name, step = struct.unpack_from("<IHHII", data, at)
                        names.append(_string(data, strings + name))
                        at += step
                    versions[_string(data, strings + file)] = tuple(sorted(names))
                    offset += following
    except (struct.error, IndexError) as problem:
        raise ValueError(f"{path} is a torn ELF file") from problem
    return Elf(tuple(needed), versions)


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def newest(versions: dict[str, tuple[str, ...]]) -> tuple[int, ...]:
    """The highest version of glibc that is asked of any library, such as (2, 34); () if none is."""
    found = [re.fullmatch(r"GLIBC_(\d+(?:\.\d+)*)", name) for names in versions.values() for name in names]
    return max((tuple(map(int, form[1].split("."))) for form in found if form), default=())
