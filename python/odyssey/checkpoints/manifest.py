"""manifest.json: the contents of a checkpoint, with a SHA-256 for every part and one for itself.

There is exactly one text for some content, and only that text is accepted, so a changed byte
anywhere is detected. A checksum proves nothing about the writer. With a key, an HMAC-SHA256 also
proves that the writer had the key.
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
from ..base.paths import expand_path
from ..errors import CheckpointError, ConfigError, DataError, OutputError
from .header import (
    INTEGER_LIMIT,
    TENSORS_LIMIT,
    Entry,
    check_part,
    check_parts,
    check_tensor,
    check_tiling,
    decode_name,
)
from .snapshot import SUFFIX, is_file_name

NAME = "manifest.json"
FORMAT = "odyssey checkpoint"
# Versions of the format. 2 and 4 have files with parts of tensors. 3 and 4 have the values that the
# walk has captured (capture/), which older releases would ignore.
WHOLE, PARTS, CAPTURED_WHOLE, CAPTURED_PARTS = VERSIONS = (1, 2, 3, 4)
MAX_BYTES = 64 << 20
FILES_LIMIT = 1 << 14
KEY_FILE = "ODYSSEY_CHECKPOINT_KEY_FILE"  # names a key file where no option does
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS = ("format", "version", "step", "attempt", "values", "files", "sha256")
_FILE_KEYS = ("name", "size", "header_sha256", "tensors")
_TENSOR_KEYS = ("name", "dtype", "shape", "data_offsets", "sha256")
_PART_KEYS = (*_TENSOR_KEYS, "whole", "run")


class File(NamedTuple):
    """One safetensors file.

    size: bytes of the file.
    tensors, digests: its tensors in the order of the header, and the SHA-256 of each in hex.
    """

    name: str
    size: int
    header_sha256: str
    tensors: tuple[Entry, ...]
    digests: tuple[str, ...]


class Manifest(NamedTuple):
    """The contents of a checkpoint.

    signed: True if it has a MAC, which proves something only to a reader with the key.
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
        has_parts = any(entry.run is not None for file in self.files for entry in file.tensors)
        if "captured" in self.values:
            return CAPTURED_PARTS if has_parts else CAPTURED_WHOLE
        return PARTS if has_parts else WHOLE

    @property
    def tensors(self) -> dict[tuple[str, str], list[tuple[File, Entry, str]]]:
        """The parts of each tensor, by (stem, name).

        Each part is (file, its entry in that file, its SHA-256). A whole tensor has one part.
        """
        parts_by_tensor: dict[tuple[str, str], list[tuple[File, Entry, str]]] = {}
        for file in self.files:
            stem = file.name.removesuffix(SUFFIX)
            for entry, digest in zip(file.tensors, file.digests, strict=True):
                entry_stem, name = (stem, entry.name) if entry.run is None else entry.key
                key = entry_stem, decode_name(name)
                parts_by_tensor.setdefault(key, []).append((file, entry, digest))
        return parts_by_tensor

    def same_content(self, other: Manifest) -> bool:
        """Returns True if step, values and files are the same, whoever wrote them."""
        return (self.step, self.values, self.files) == (other.step, other.values, other.files)

    def encoded(self, key: bytes | None = None) -> bytes:
        """Returns the text of the file, signed if there is a key."""
        body = self._encode_body()
        mac = None if key is None else hmac.new(key, body, hashlib.sha256).hexdigest()
        return body + _encode_end(body, mac)

    def _encode_body(self) -> bytes:
        """Returns the text up to the digests at its end, which are computed of it.

        Each tensor has a line, so that people can read it and compare two with diff.
        """
        head: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "attempt": self.attempt,
        }
        head["values"] = self.values
        lines = [f'"{name}":{_encode_value(value)}' for name, value in head.items()]
        files = ",\n".join(encode_file(file) for file in self.files)
        return ("{\n" + ",\n".join([*lines, f'"files":[\n{files}\n]'])).encode()


def parse_manifest(data: bytes, key: bytes | None = None) -> Manifest:  # noqa: C901
    """Returns the manifest in these bytes.

    The values are checked first. Then the manifest is encoded again and must result in the same
    bytes, because only that text is accepted.

    Raises:
        CheckpointError: the bytes are no manifest, were changed, or have no MAC of `key`.
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
            f"{NAME} has format version {ascii(version)[:40]}; versions {VERSIONS[0]} to "
            f"{VERSIONS[-1]} can be read"
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
    has_parts = version in (PARTS, CAPTURED_PARTS)
    parsed_files = tuple(parse_file(file, has_parts) for file in files)
    if len({file.name for file in parsed_files}) < len(parsed_files):
        raise CheckpointError(f"{NAME} names a file twice")
    manifest = Manifest(
        content["step"], content["attempt"], content["values"], parsed_files, signed=mac is not None
    )
    if has_parts:
        for parts in manifest.tensors.values():
            check_parts([entry for _, entry, _ in parts])
    try:
        body = manifest._encode_body()
    except ValueError:  # a number such as 1e999
        raise CheckpointError(f"{NAME} holds a number that is not finite") from None
    if data != body + _encode_end(body, mac):
        raise CheckpointError(f"{NAME} does not match its SHA-256")
    if key is not None:
        if mac is None:
            raise CheckpointError(f"{NAME} is not signed, and a key is given")
        if not hmac.compare_digest(mac, hmac.new(key, body, hashlib.sha256).hexdigest()):
            raise CheckpointError(f"{NAME} is not signed with the key that is given")
    return manifest


def read_key(path: Path) -> bytes:
    """Returns the key in a file: its bytes, without white space around them.

    Raises:
        ConfigError: the file cannot be read, its key is not 16 to 4096 bytes long, or other users
            may read it.
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
    """Returns the key in the file of ODYSSEY_CHECKPOINT_KEY_FILE; None if that is not set.

    Raises:
        ConfigError: as `read_key`.
    """
    path = os.environ.get(KEY_FILE)
    return read_key(expand_path(path)) if path else None


def encode_checked(manifest: Manifest, key: bytes | None) -> bytes:
    """Returns the text of a manifest, after a check that it can be read again.

    Raises:
        OutputError: reading the text fails, or results in another manifest.
    """
    text = manifest.encoded(key)
    try:
        readable = parse_manifest(text, key) == manifest
    except CheckpointError as problem:
        raise OutputError(f"it could not be read again: {problem}") from None
    if not readable:
        raise OutputError("it would not be read again as it is: its values change in JSON")
    return text


def parse_file(entry: Any, parts: bool = True) -> File:
    """Returns the file that an entry of a manifest describes.

    parts: its tensors are parts of tensors.

    Raises:
        CheckpointError: the entry does not describe such a file.
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
        parsed_tensors = tuple(_parse_tensor(tensor, size, parts) for tensor in tensors)
        check_tiling(list(parsed_tensors), sum(tensor.nbytes for tensor in parsed_tensors))
    except CheckpointError as problem:
        raise CheckpointError(f"{NAME}: {name}: {problem}") from None
    if len({tensor.name for tensor in parsed_tensors}) < len(parsed_tensors):
        raise CheckpointError(f"{NAME}: {name} names a tensor twice")
    digests = tuple(tensor["sha256"] for tensor in tensors)
    return File(name, size, entry["header_sha256"], parsed_tensors, digests)


def _parse_tensor(entry: Any, size: int, part: bool) -> Entry:
    """Returns the tensor of an entry, in a file of `size` bytes.

    Raises:
        CheckpointError: the entry does not describe a tensor, or a part if `part` is True.
    """
    keys = _PART_KEYS if part else _TENSOR_KEYS
    if type(entry) is not dict or tuple(entry) != keys or not _is_digest(entry["sha256"]):
        raise CheckpointError(f"a tensor has the entries {' '.join(keys)}")
    tensor = check_tensor(
        entry["name"], entry["dtype"], entry["shape"], entry["data_offsets"], size
    )
    return check_part(tensor, entry["whole"], entry["run"]) if part else tensor


def encode_file(file: File) -> str:
    """Returns a file as JSON; `parse_file` of its values returns the file again."""
    tensors = ",\n".join(
        f'{{"name":{_encode_value(entry.name)},"dtype":"{entry.dtype}",'
        f'"shape":{_encode_value(entry.shape)},"data_offsets":[{entry.begin},{entry.end}],'
        f'"sha256":"{digest}"{_encode_part(entry)}}}'
        for entry, digest in zip(file.tensors, file.digests, strict=True)
    )
    name = _encode_value(file.name)
    head = f'"name":{name},"size":{file.size},"header_sha256":"{file.header_sha256}"'
    return f'{{{head},"tensors":[\n{tensors}\n]}}'


def _encode_part(entry: Entry) -> str:
    """Returns the further values of a part as JSON; "" for a whole tensor."""
    if entry.run is None:
        return ""
    return f',"whole":{_encode_value(entry.whole)},"run":{_encode_value(entry.run)}'


def _encode_end(body: bytes, mac: str | None) -> bytes:
    """Returns the end of a manifest: the SHA-256 of the text before it, and the MAC if any."""
    signature = "" if mac is None else f',\n"hmac_sha256":"{mac}"'
    return f',\n"sha256":"{hashlib.sha256(body).hexdigest()}"{signature}\n}}\n'.encode()


def _encode_value(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < INTEGER_LIMIT


def _is_digest(value: Any) -> bool:
    return type(value) is str and _DIGEST.fullmatch(value) is not None
