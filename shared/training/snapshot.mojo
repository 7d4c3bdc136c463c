"""What one checkpoint holds, in memory, and how it is read: every byte is compared with the manifest before it is used.

What it is not: a directory of checkpoints; see checkpoint.mojo.
"""

from std.ffi import external_call
from std.os import stat

from kernels.lanes import Ptr

from .files import File
from .json import Json
from .manifest import (
    FileEntry,
    MANIFEST,
    MANIFEST_LIMIT,
    Manifest,
    SUFFIX,
    parse_manifest,
)
from .safetensors import TensorData, TensorFile, header_length, parse_header
from .sha256 import same_digest, sha256

comptime _ANYBODY = 0o002  # permission of everybody to write


struct Snapshot(Copyable, Movable):
    """The state of a training after `step` steps."""

    var step: Int
    """How many steps."""
    var stems: List[String]
    """What the files are called, without their suffix: parameters, optimizer."""
    var files: List[TensorFile]
    """The tensors of each."""
    var values: Json
    """Everything else: an object."""

    def __init__(out self, step: Int, var values: Json):
        """A state without tensors yet.

        Args:
            step: After how many steps.
            values: What is no tensor: an object.
        """
        self.step = step
        self.stems = List[String]()
        self.files = List[TensorFile]()
        self.values = values^

    def add(mut self, stem: String, name: String, shape: List[Int], data: Ptr):
        """Adds a copy of a tensor of floats.

        Args:
            stem: The file that it goes into: "parameters" or "optimizer".
            name: What it is called there, such as conv1.weight or momentum/conv1.weight.
            shape: Its sizes.
            data: Its floats, in C order.
        """
        self._file(stem).add(name, shape, data)

    def _file(mut self, stem: String) -> ref[self.files[0]] TensorFile:
        for i in range(len(self.stems)):
            if self.stems[i] == stem:
                return self.files[i]
        self.stems.append(stem)
        self.files.append(TensorFile())
        return self.files[len(self.files) - 1]

    def floats(
        self, stem: String, name: String, shape: List[Int], into: Ptr
    ) raises:
        """Copies a tensor of floats out.

        Args:
            stem: The file that it is in.
            name: What it is called there.
            shape: The sizes that it must have.
            into: Where its floats go.

        Raises:
            Error: it is missing, or of another dtype or shape.
        """
        for i in range(len(self.stems)):
            if self.stems[i] == stem:
                self.files[i].floats(name, shape, into)
                return
        TensorFile().floats(name, shape, into)


def step_name(step: Int) -> String:
    """The directory of a step.

    Args:
        step: The step.

    Returns:
        For 120 `step_00000120`.
    """
    var digits = String(step)
    return "step_" + "0" * max(0, 8 - digits.byte_length()) + digits


def step_of(name: String) -> Int:
    """The step that a directory's name says.

    Args:
        name: The name.

    Returns:
        The step, -1 for any other name.
    """
    if not name.startswith("step_") or not 13 <= name.byte_length() <= 23:
        return -1
    var step = 0
    for one in name.as_bytes()[5 : name.byte_length()]:
        if not 48 <= Int(one) <= 57:
            return -1
        step = 10 * step + Int(one) - 48
    return step if step_name(step) == name else -1


def _read_checkpoint(
    path: String, key: Optional[List[UInt8]], follow: Bool
) raises -> Tuple[Snapshot, Manifest]:
    var directory: File
    try:
        directory = File.directory(path, follow)
    except e:
        raise Error("the directory ", _cannot(e))
    _check_owner(path)
    var text: List[UInt8]
    try:
        text = _file(directory, MANIFEST).read(
            min(_file(directory, MANIFEST).size(), MANIFEST_LIMIT + 1)
        )
    except e:
        raise Error(MANIFEST, ": ", e)
    var made = parse_manifest(text, key)
    var named = step_of(String(path.split("/")[len(path.split("/")) - 1]))
    if named >= 0 and named != made.step:
        raise Error(MANIFEST, " is that of ", step_name(made.step))
    var snapshot = Snapshot(made.step, made.values.copy())
    for entry in made.files:
        try:
            snapshot.stems.append(String(entry.name.removesuffix(SUFFIX)))
            snapshot.files.append(
                _verified(_file(directory, entry.name), entry)
            )
        except e:
            raise Error(entry.name, ": ", e)
    return (snapshot^, made^)


def _verified(file: File, entry: FileEntry) raises -> TensorFile:
    """The tensors of a file, if it is what the manifest says."""
    var size = file.size()
    if size != entry.size:
        raise Error("it has ", size, " bytes, not ", entry.size)
    var start = 8 + header_length(file.read(min(8, size)), size)
    var header = file.read(start)
    if not same_digest(sha256(Span(header)), entry.header_sha256):
        raise Error("its header does not match its SHA-256")
    if parse_header(header, size) != entry.places:
        raise Error("its header has other tensors than the manifest")
    var found = TensorFile()
    for i in range(len(entry.places)):
        ref place = entry.places[i]
        var data = file.read(place.end - place.begin, start + place.begin)
        if not same_digest(sha256(Span(data)), entry.digests[i]):
            raise Error(place.name, " does not match its SHA-256")
        found.tensors.append(
            TensorData(place.name, place.dtype, place.shape.copy(), data^)
        )
    return found^


def _file(directory: File, name: String) raises -> File:
    try:
        return File.reading(name, directory.fd)
    except e:
        raise Error("it ", _cannot(e))


def _cannot(problem: Error) -> String:
    if "No such file" in String(problem):
        return "is missing"
    return String("cannot be opened: ", problem)


def _check_owner(path: String) raises:
    """Refuses a directory in which anybody could have put a file, or another one in its place.
    """
    var status = stat(path)
    if status.st_mode & _ANYBODY and status.st_uid != _user():
        raise Error(
            "it belongs to user ",
            status.st_uid,
            " and everybody may write to it",
        )


def _user() -> Int:
    return Int(external_call["geteuid", UInt32]())
