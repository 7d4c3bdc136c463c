"""manifest.json: what a checkpoint consists of, with a SHA-256 for every part and one for itself.

There is exactly one text for given content, and only that text is accepted: a changed byte anywhere
is found. With a key, an HMAC-SHA256 says as well that somebody who has the key wrote it; a checksum
alone says nothing about who did.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

from ..base.files import parse_json
from ..errors import CheckpointError, ConfigError, DataError, OutputError
from .header import (
    INTEGER_LIMIT,
    TENSORS_LIMIT,
    Entry,
    check_part,
    check_parts,
    check_tensor,
    check_tiling,
)
from .snapshot import SUFFIX, is_file_name

NAME = "manifest.json"
FORMAT = "odyssey checkpoint"
WHOLE, PARTS = VERSIONS = (1, 2)  # of the format: whole tensors; parts of tensors
MAX_BYTES = 64 << 20
FILES_LIMIT = 1 << 14
KEY_FILE = "ODYSSEY_CHECKPOINT_KEY_FILE"  # names a key file where no option does
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS = ("format", "version", "step", "attempt", "values", "files", "sha256")
_FILE_KEYS = ("name", "size", "header_sha256", "tensors")
_TENSOR_KEYS = ("name", "dtype", "shape", "data_offsets", "sha256")
_PART_KEYS = (*_TENSOR_KEYS, "whole", "run")


class File(NamedTuple):
    """One safetensors file: its size in bytes, its tensors in the order of its header, and their
    digests (hex).
    """

    name: str
    size: int
    header_sha256: str
    tensors: tuple[Entry, ...]
    digests: tuple[str, ...]


class Manifest(NamedTuple):
    """Contents of a checkpoint.

    `signed` says that a MAC is there, which is worth something only where a key is.
    """

    step: int
    attempt: int
    values: dict[str, Any]
    files: tuple[File, ...]
    signed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size for file in self.files)

    @property
    def version(self) -> int:
        """Version of the format."""
        return (
            PARTS
            if any(one.run is not None for file in self.files for one in file.tensors)
            else WHOLE
        )

    @property
    def tensors(self) -> dict[tuple[str, str], list[tuple[File, Entry, str]]]:
        """Returns the parts of each tensor, by (stem, name): each a tensor of a file, and its
        digest.
        """
        parts_by_tensor: dict[tuple[str, str], list[tuple[File, Entry, str]]] = {}
        for file in self.files:
            for one, digest in zip(file.tensors, file.digests, strict=True):
                key = (file.name.removesuffix(SUFFIX), one.name) if one.run is None else one.key
                parts_by_tensor.setdefault(key, []).append((file, one, digest))
        return parts_by_tensor

    def same_content(self, other: Manifest) -> bool:
        """Returns whether the two say the same, whoever wrote them."""
        return (self.step, self.values, self.files) == (other.step, other.values, other.files)

    def encoded(self, key: bytes | None = None) -> bytes:
        """The text of the file; signed if there is a key."""
        body = self._body()
        mac = None if key is None else hmac.new(key, body, hashlib.sha256).hexdigest()
        return body + _end(body, mac)

    def _body(self) -> bytes:
        """Everything but the digests.

        One line per tensor: it can be read, and compared with diff.
        """
        head = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "attempt": self.attempt,
        }
        head["values"] = self.values
        lines = [f'"{name}":{_text(value)}' for name, value in head.items()]
        files = ",\n".join(file_text(file) for file in self.files)
        return ("{\n" + ",\n".join([*lines, f'"files":[\n{files}\n]'])).encode()


def parse_manifest(data: bytes, key: bytes | None = None) -> Manifest:  # noqa: C901
    """The manifest that these bytes are.

    Raises CheckpointError: they are none, or changed, or lack a MAC by `key`.
    """
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{NAME} is longer than {MAX_BYTES} bytes")
    try:
        content = parse_json(data, NAME)
    except DataError as problem:
        raise CheckpointError(str(problem)) from None
    if type(content) is not dict or content.get("format") != FORMAT:
        raise CheckpointError(f"{NAME} is not that of a checkpoint")
    version = content.get("version")
    if type(version) is not int or version not in VERSIONS:
        raise CheckpointError(
            f"{NAME} has format version {ascii(version)[:40]}; {WHOLE} and {PARTS} can be read"
        )
    mac = content.pop("hmac_sha256", None)
    if tuple(content) != _KEYS or not (mac is None or _is_digest(mac)):
        raise CheckpointError(f"{NAME} does not have the entries {' '.join(_KEYS)}, in this order")
    if (
        not _is_size(content["step"])
        or not _is_size(content["attempt"])
        or type(content["values"]) is not dict
    ):
        raise CheckpointError(f"{NAME}: step and attempt are whole numbers, values is an object")
    files = content["files"]
    if type(files) is not list or not 0 < len(files) <= FILES_LIMIT:
        raise CheckpointError(f"{NAME}: files is a list of 1 to {FILES_LIMIT}")
    parsed_files = tuple(file_of(file, version == PARTS) for file in files)
    if len({file.name for file in parsed_files}) < len(parsed_files):
        raise CheckpointError(f"{NAME} names a file twice")
    manifest = Manifest(
        content["step"], content["attempt"], content["values"], parsed_files, signed=mac is not None
    )
    if version == PARTS:
        for parts in manifest.tensors.values():
            check_parts([one for _, one, _ in parts])
    try:
        body = manifest._body()
    except ValueError:  # a number such as 1e999
        raise CheckpointError(f"{NAME} holds a number that is not finite") from None
    if data != body + _end(body, mac):
        raise CheckpointError(f"{NAME} does not match its SHA-256")
    if key is not None:
        if mac is None:
            raise CheckpointError(f"{NAME} is not signed, and a key is given")
        if not hmac.compare_digest(mac, hmac.new(key, body, hashlib.sha256).hexdigest()):
            raise CheckpointError(f"{NAME} is not signed with the key that is given")
    return manifest


def read_key(path: Path) -> bytes:
    """The key in a file: its bytes without spaces and line ends around them, at least 16; for
    its owner's eyes only. Raises ConfigError: the file cannot be a key.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            data = file.read(4097).strip() if stat.S_ISREG(status.st_mode) else b""
    except OSError as problem:
        raise ConfigError(
            f"[checkpoint] the key file {path} cannot be read: {problem.strerror}"
        ) from problem
    if not 16 <= len(data) <= 4096:
        raise ConfigError(
            f"[checkpoint] the key file {path} does not hold a key of 16 to 4096 bytes"
        )
    if status.st_mode & 0o077:
        raise ConfigError(f"[checkpoint] the key file {path} can be read by others; chmod 600 it")
    return data


def environment_key() -> bytes | None:
    """The key that ODYSSEY_CHECKPOINT_KEY_FILE names, None without it.

    Raises ConfigError as `read_key`.
    """
    path = os.environ.get(KEY_FILE)
    return read_key(Path(path)) if path else None


def sealed(found: Manifest, key: bytes | None) -> bytes:
    """The text of a manifest. Raises OutputError: it could not be read again as it is."""
    text = found.encoded(key)
    try:
        readable = parse_manifest(text, key) == found
    except CheckpointError as problem:
        raise OutputError(f"it could not be read again: {problem}") from None
    if not readable:
        raise OutputError("it would not be read again as it is: its values change in JSON")
    return text


def file_of(entry: Any, parts: bool = True) -> File:
    """A file with parts of tensors, or with whole ones.

    Raises CheckpointError: the entry is of none.
    """
    if type(entry) is not dict or tuple(entry) != _FILE_KEYS:
        raise CheckpointError(f"{NAME}: a file has the entries {' '.join(_FILE_KEYS)}")
    name = entry["name"]
    size = entry["size"]
    tensors = entry["tensors"]
    if type(name) is not str or not is_file_name(name):
        raise CheckpointError(f"{NAME}: a file of a checkpoint is not called {ascii(name)[:80]}")
    if not _is_size(size) or not _is_digest(entry["header_sha256"]) or type(tensors) is not list:
        raise CheckpointError(f"{NAME}: {name}: size, header_sha256 or tensors is not of its kind")
    if len(tensors) > TENSORS_LIMIT:
        raise CheckpointError(
            f"{NAME}: {name}: {len(tensors)} tensors are more than {TENSORS_LIMIT}"
        )
    try:
        parsed_tensors = tuple(_parse_tensor(one, size, parts) for one in tensors)
        check_tiling(list(parsed_tensors), sum(one.nbytes for one in parsed_tensors))
    except CheckpointError as problem:
        raise CheckpointError(f"{NAME}: {name}: {problem}") from None
    if len({one.name for one in parsed_tensors}) < len(parsed_tensors):
        raise CheckpointError(f"{NAME}: {name} names a tensor twice")
    return File(
        name, size, entry["header_sha256"], parsed_tensors, tuple(one["sha256"] for one in tensors)
    )


def _parse_tensor(entry: Any, size: int, part: bool) -> Entry:
    keys = _PART_KEYS if part else _TENSOR_KEYS
    if type(entry) is not dict or tuple(entry) != keys or not _is_digest(entry["sha256"]):
        raise CheckpointError(f"a tensor has the entries {' '.join(keys)}")
    tensor = check_tensor(
        entry["name"], entry["dtype"], entry["shape"], entry["data_offsets"], size
    )
    return check_part(tensor, entry["whole"], entry["run"]) if part else tensor


def file_text(file: File) -> str:
    """A file as JSON, of whose values `file_of` makes it again."""
    tensors = ",\n".join(
        f'{{"name":{_text(one.name)},"dtype":"{one.dtype}","shape":{_text(one.shape)},'
        f'"data_offsets":[{one.begin},{one.end}],"sha256":"{digest}"{_part_text(one)}}}'
        for one, digest in zip(file.tensors, file.digests, strict=True)
    )
    head = f'"name":{_text(file.name)},"size":{file.size},"header_sha256":"{file.header_sha256}"'
    return f'{{{head},"tensors":[\n{tensors}\n]}}'


def _part_text(one: Entry) -> str:
    return "" if one.run is None else f',"whole":{_text(one.whole)},"run":{_text(one.run)}'


def _end(body: bytes, mac: str | None) -> bytes:
    signature = "" if mac is None else f',\n"hmac_sha256":"{mac}"'
    return f',\n"sha256":"{hashlib.sha256(body).hexdigest()}"{signature}\n}}\n'.encode()


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < INTEGER_LIMIT


def _is_digest(value: Any) -> bool:
    return type(value) is str and _DIGEST.fullmatch(value) is not None
