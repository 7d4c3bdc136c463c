"""The file manifest.json: what a checkpoint consists of, with a SHA-256 for every part and one for itself (docs/checkpoints.md).

The same text as python/odyssey/checkpoints/manifest.py makes, and no other is accepted. With a key, an HMAC-SHA256 says
as well that somebody who has the key wrote it. What it is not: a reader of the files that it names.
"""

from std.collections import Set
from std.os import getenv, stat

from .files import read_file
from .json import Json, JsonList, json, parse_json
from .safetensors import Place, TENSORS_LIMIT, check_place, check_tiling
from .sha256 import hmac_sha256, same_digest, sha256

comptime MANIFEST = "manifest.json"
"""The name of the file."""
comptime MANIFEST_LIMIT = 64 << 20
"""Bytes of it."""
comptime FILES_LIMIT = 64
"""Files of a checkpoint."""
comptime SUFFIX = ".safetensors"
"""The end of their names."""
comptime KEY_FILE = "ODYSSEY_CHECKPOINT_KEY_FILE"
"""Names a file with the key that manifests are signed with."""

comptime _FORMAT = "odyssey checkpoint"
comptime _VERSION = 1
comptime _OTHERS = 0o077  # permissions of others than the owner


@fieldwise_init
struct FileEntry(Copyable, Movable):
    """One safetensors file of a checkpoint."""

    var name: String
    """What it is called."""
    var size: Int
    """Its bytes."""
    var header_sha256: String
    """The digest of its header, in hex."""
    var places: List[Place]
    """Its tensors, in the order of its header."""
    var digests: List[String]
    """The digests of their bytes, in hex."""

    def text(self) -> String:
        """It as the manifest says it, a line for each tensor.

        Returns:
            The text.
        """
        var out = String('{"name":', json(self.name), ',"size":', self.size)
        out += String(
            ',"header_sha256":"', self.header_sha256, '","tensors":[\n'
        )
        for i in range(len(self.places)):
            var entry = self.places[i].json()
            entry.set("sha256", self.digests[i])
            var rest = entry.json().text
            out += String(
                ",\n" if i else "",
                '{"name":',
                json(self.places[i].name),
                ",",
                rest[byte = 1 : rest.byte_length()],
            )
        return out + "\n]}"


@fieldwise_init
struct Manifest(Copyable, Movable):
    """What a checkpoint holds."""

    var step: Int
    """After which step."""
    var attempt: Int
    """Which attempt of a run wrote it, 0 outside one."""
    var values: Json
    """Everything that is no tensor: an object."""
    var files: List[FileEntry]
    """Its files."""

    def same_content(self, other: Self) -> Bool:
        """Whether two say the same, whoever wrote them.

        Args:
            other: The other.

        Returns:
            True if they do.
        """
        return (
            self.step == other.step
            and self.values == other.values
            and self._files() == other._files()
        )

    def encoded(self, key: Optional[List[UInt8]]) -> String:
        """The text of the file.

        Args:
            key: Signs it.

        Returns:
            The text.
        """
        var body = self._body()
        var end = String(',\n"sha256":"', sha256(body.as_bytes()), '"')
        if key:
            var mac = hmac_sha256(Span(key.value()), body.as_bytes())
            end += String(',\n"hmac_sha256":"', mac, '"')
        return body + end + "\n}\n"

    def _body(self) -> String:
        """Everything but the digests."""
        return String(
            '{\n"format":',
            json(_FORMAT),
            ',\n"version":',
            _VERSION,
            ',\n"step":',
            self.step,
            ',\n"attempt":',
            self.attempt,
            ',\n"values":',
            self.values,
            ',\n"files":[\n',
            self._files(),
            "\n]",
        )

    def _files(self) -> String:
        var out = String()
        for i in range(len(self.files)):
            out += (",\n" if i else "") + self.files[i].text()
        return out


def parse_manifest(
    data: List[UInt8], key: Optional[List[UInt8]]
) raises -> Manifest:
    """The manifest that these bytes are.

    Args:
        data: The bytes.
        key: Has signed it.

    Returns:
        The manifest.

    Raises:
        Error: they are none; they were changed; or there is a key, and no signature made with it.
    """
    if len(data) > MANIFEST_LIMIT:
        raise Error(MANIFEST, " is longer than ", MANIFEST_LIMIT, " bytes")
    var found = parse_json(Span(data), MANIFEST)
    if not found.is_object() or not found.has("format"):
        raise Error(MANIFEST, " is not that of a checkpoint")
    if found.get("format") != json(_FORMAT):
        raise Error(MANIFEST, " is not that of a checkpoint")
    if not found.has("version") or found.get("version") != json(_VERSION):
        raise Error(
            MANIFEST, " has another format version; ", _VERSION, " can be read"
        )
    var wanted: List[String] = [
        "format",
        "version",
        "step",
        "attempt",
        "values",
        "files",
        "sha256",
    ]
    var keys = found.keys()
    var mac = String()
    if len(keys) == len(wanted) + 1 and keys[len(wanted)] == "hmac_sha256":
        mac = _digest(found.get("hmac_sha256"))
        _ = keys.pop()
    if keys != wanted:
        raise Error(
            MANIFEST,
            " does not have the entries ",
            String(" ").join(wanted),
            ", in this order",
        )
    if not found.get("values").is_object():
        raise Error(MANIFEST, ": values is an object")
    var files = List[FileEntry]()
    var names = Set[String]()
    for entry in found.get("files").items():
        files.append(_parse_file(entry))
        names.add(files[len(files) - 1].name)
    if not 0 < len(files) <= FILES_LIMIT:
        raise Error(MANIFEST, ": files is a list of 1 to ", FILES_LIMIT)
    if len(names) < len(files):
        raise Error(MANIFEST, " names a file twice")
    var made = Manifest(
        _size(found.get("step")),
        _size(found.get("attempt")),
        found.get("values"),
        files^,
    )
    var body = made._body()
    var end = String(',\n"sha256":"', sha256(body.as_bytes()), '"')
    if mac != "":
        end += String(',\n"hmac_sha256":"', mac, '"')
    if body + end + "\n}\n" != StringSpan(unsafe_from_utf8=Span(data)):
        raise Error(MANIFEST, " does not match its SHA-256")
    if key:
        if mac == "":
            raise Error(MANIFEST, " is not signed, and a key is given")
        if not same_digest(
            mac, hmac_sha256(Span(key.value()), body.as_bytes())
        ):
            raise Error(MANIFEST, " is not signed with the key that is given")
    return made^


def is_stem(name: String) -> Bool:
    """Whether a file of a checkpoint can be called so, without its suffix.

    Args:
        name: The name.

    Returns:
        True for 1 to 64 characters of A-Z a-z 0-9 _ -, the first of which is no -.
    """
    if not 1 <= name.byte_length() <= 64 or name.startswith("-"):
        return False
    for one in name.as_bytes():
        var c = Int(one)
        if not (
            48 <= c <= 57
            or 65 <= c <= 90
            or 97 <= c <= 122
            or c == 45
            or c == 95
        ):
            return False
    return True


def read_key(path: String) raises -> List[UInt8]:
    """The key in a file: its bytes without spaces and line ends around them, for its owner's eyes only.

    Args:
        path: Its name.

    Returns:
        16 to 4096 bytes.

    Raises:
        Error: the file cannot be a key.
    """
    var data: List[UInt8]
    var mode: Int
    try:
        data = read_file(path, 1 << 20)
        mode = Int(stat(path).st_mode)
    except e:
        raise Error("[key] the key file ", path, " cannot be read: ", e)
    var start = 0
    var end = len(data)
    while end > start and _is_space(data[end - 1]):
        end -= 1
    while start < end and _is_space(data[start]):
        start += 1
    if not 16 <= end - start <= 4096:
        raise Error(
            "[key] the key file ",
            path,
            " does not hold a key of 16 to 4096 bytes",
        )
    if mode & _OTHERS:
        raise Error(
            "[key] the key file ",
            path,
            " can be read by others; chmod 600 it",
        )
    return List[UInt8](Span(data)[start:end])


def environment_key() raises -> Optional[List[UInt8]]:
    """The key that ODYSSEY_CHECKPOINT_KEY_FILE names.

    Returns:
        The key, or nothing where the variable is not set.

    Raises:
        Error: the file cannot be a key.
    """
    var path = getenv(KEY_FILE)
    if path == "":
        return None
    return read_key(path)


def _parse_file(entry: Json) raises -> FileEntry:
    if not entry.is_object() or entry.keys() != [
        String("name"),
        "size",
        "header_sha256",
        "tensors",
    ]:
        raise Error(
            MANIFEST, ": a file has the entries name size header_sha256 tensors"
        )
    var name = String()
    if entry.get("name").is_string():
        name = entry.get("name").string()
    if not name.endswith(SUFFIX) or not is_stem(
        String(name.removesuffix(SUFFIX))
    ):
        raise Error(
            MANIFEST,
            ": a file of a checkpoint is not called ",
            json(name).text[byte = 0 : min(80, json(name).text.byte_length())],
        )
    var size = _size(entry.get("size"))
    var places = List[Place]()
    var digests = List[String]()
    var names = Set[String]()
    var bytes = 0
    for one in entry.get("tensors").items():
        if len(places) == TENSORS_LIMIT:
            raise Error(
                MANIFEST, ": ", name, ": more than ", TENSORS_LIMIT, " tensors"
            )
        if not one.is_object() or one.keys() != [
            String("name"),
            "dtype",
            "shape",
            "data_offsets",
            "sha256",
        ]:
            raise Error(
                MANIFEST,
                ": ",
                name,
                ": a tensor has the entries name dtype shape data_offsets",
                " sha256",
            )
        try:
            places.append(check_place(one.get("name").string(), one, size))
        except e:
            raise Error(MANIFEST, ": ", name, ": ", e)
        digests.append(_digest(one.get("sha256")))
        names.add(places[len(places) - 1].name)
        bytes += places[len(places) - 1].end - places[len(places) - 1].begin
    if len(names) < len(places):
        raise Error(MANIFEST, ": ", name, " names a tensor twice")
    try:
        check_tiling(places, bytes)
    except e:
        raise Error(MANIFEST, ": ", name, ": ", e)
    return FileEntry(
        name, size, _digest(entry.get("header_sha256")), places^, digests^
    )


def _size(value: Json) raises -> Int:
    if not value.is_integer() or value.integer() < 0 or value.text == "-0":
        raise Error(MANIFEST, ": ", value, " is no whole number from 0")
    return value.integer()


def _digest(value: Json) raises -> String:
    var text = value.string() if value.is_string() else String()
    var right = text.byte_length() == 64
    for one in text.as_bytes():
        var c = Int(one)
        right = right and (48 <= c <= 57 or 97 <= c <= 102)
    if not right:
        raise Error(MANIFEST, ": a digest is 64 characters of 0-9 a-f")
    return text


def _is_space(c: UInt8) -> Bool:
    return c == 32 or (c >= 9 and c <= 13)
