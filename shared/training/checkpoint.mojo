"""Checkpoints in the project's format: the state of a training on disk, whole or not there, every byte checked before it
is used. The same directories as python/odyssey/checkpoints writes and reads; what is promised: docs/checkpoints.md.

    var store = Store(folder)
    var found = store.newest()  # a snapshot, and those that were refused on the way to it
    store.save(snapshot)

One rank writes. What it is not: a decision when to save, or what a training's state is (resume.mojo); it saves while
the training waits.
"""

from std.math import isfinite
from std.os import getenv, listdir, lstat

from .files import (
    exchange,
    host_name,
    is_alive,
    is_there,
    private_directory,
    process_id,
    read_file,
    remove,
    rename,
    sync_directory,
    write_new,
)
from .json import parse_json
from .lock import Lock
from .manifest import (
    FILES_LIMIT,
    FileEntry,
    MANIFEST,
    Manifest,
    SUFFIX,
    environment_key,
    is_stem,
    parse_manifest,
)
from .safetensors import Header, TensorData, TensorFile, write_tensors
from .sha256 import sha256
from .snapshot import (
    Snapshot,
    _check_owner,
    _read_checkpoint,
    step_name,
    step_of,
)

comptime _LOOKS = 5  # at checkpoints that are removed or replaced while they are read
comptime _LIMIT = 10**18  # of a step


@fieldwise_init
struct Found(Copyable, Movable):
    """What a directory of checkpoints has."""

    var snapshot: Optional[Snapshot]
    """The newest whose every byte is right."""
    var refused: List[String]
    """A line for each newer one, with what is wrong with it."""


def load(path: String) raises -> Snapshot:
    """One checkpoint, wherever it is.

    Args:
        path: Its directory.

    Returns:
        The state.

    Raises:
        Error: it is none, or was changed; names file and tensor.
    """
    try:
        return _read_checkpoint(path, environment_key(), follow=True)[0].copy()
    except e:
        if String(e).startswith("["):
            raise e^
        raise Error("[checkpoint] ", path, " is refused: ", e)


def load_newest(folder: String) raises -> Found:
    """The newest valid checkpoint of a directory that this process does not write to.

    Args:
        folder: The directory.

    Returns:
        It, and those that were refused.

    Raises:
        Error: the directory cannot be read.
    """
    var store = Store(folder, owner=False)
    return store.newest()


def save(folder: String, snapshot: Snapshot, keep: Int = 2) raises:
    """Writes one checkpoint; a training that writes several keeps a `Store`.

    Args:
        folder: The directory.
        snapshot: The state.
        keep: The newest so many stay.

    Raises:
        Error: it cannot be written, or holds NaN or infinity.
    """
    var store = Store(folder, keep)
    store.save(snapshot)


struct Store(Movable):
    """Checkpoints of one training in a directory, as step_00000120 and so on.
    """

    var folder: String
    """The directory."""
    var keep: Int
    """The newest so many valid ones stay."""
    var _attempt: Int
    var _key: Optional[List[UInt8]]
    var _lock: Optional[Lock]
    var _valid: List[String]  # names that this process has written or verified

    def __init__(
        out self, folder: String, keep: Int = 2, owner: Bool = True
    ) raises:
        """Manifests are signed, and must be, where ODYSSEY_CHECKPOINT_KEY_FILE names a key.

        Args:
            folder: The directory.
            keep: The newest so many stay, at least 2.
            owner: Makes the directory, locks it and removes what dead writers left aside; else nothing is written.

        Raises:
            Error: the directory cannot be made, or another job writes there.
        """
        if keep < 2:
            raise Error(
                "[settings] keep ",
                keep,
                " leaves nothing to fall back to when the newest checkpoint is",
                " damaged; keep 2 or more",
            )
        self.folder = folder
        self.keep = keep
        self._attempt = _run_attempt()
        self._key = environment_key()
        self._lock = None
        self._valid = List[String]()
        if owner:
            try:
                private_directory(folder)
                _check_owner(folder)
                self._lock = Lock(folder, self._attempt)
            except e:
                if String(e).startswith("["):
                    raise e^
                raise Error("[checkpoint] ", folder, " cannot be used: ", e)
            self._sweep()

    # --- reading ---

    def names(self) raises -> List[String]:
        """The checkpoints that are there, valid or not.

        Returns:
            Their names, oldest first.

        Raises:
            Error: the directory cannot be read, or can be written by anybody and is somebody else's.
        """
        var found = List[String]()
        if not is_there(self.folder):
            return found^
        try:
            _check_owner(self.folder)
            for name in listdir(self.folder):
                if step_of(name) >= 0:
                    found.append(name)
        except e:
            raise Error(
                "[checkpoint] ",
                self.folder,
                " is refused: ",
                e,
                "; nothing is read from there",
            )

        def before(a: String, b: String) {} -> Bool:
            return step_of(a) < step_of(b)

        sort(found, before)
        return found^

    def newest(mut self) raises -> Found:
        """The newest checkpoint whose every byte is as it was written.

        Returns:
            It, and a line for each that was refused on the way to it.

        Raises:
            Error: the directory itself cannot be read.
        """
        var reasons = List[String]()
        for look in range(_LOOKS):
            reasons.clear()
            var again = False
            var names = self.names()
            for i in range(len(names)):
                ref name = names[len(names) - 1 - i]
                var path = String(self.folder, "/", name)
                var before = _identity(path)
                try:
                    var loaded = _read_checkpoint(path, self._key, follow=False)
                    self._valid.append(name)
                    return Found(loaded[0].copy(), _messages(reasons, name))
                except e:
                    if before != 0 and _identity(path) == before:
                        reasons.append(String(name, " is refused: ", e))
                    elif look + 1 < _LOOKS:
                        again = True  # its owner is at work: there is another by now
                        break
            if not again:
                break
        return Found(None, _messages(reasons, ""))

    # --- writing ---

    def save(mut self, snapshot: Snapshot) raises:
        """Writes a checkpoint, whole or not at all, then removes those that are too old.

        Args:
            snapshot: The state. One of the same step stays if it is valid and says the same; else it is replaced.

        Raises:
            Error: parameters or optimizer hold NaN or infinity; it cannot be written, and those before it are as they
                were.
        """
        var name = step_name(snapshot.step)
        var what = String("the snapshot")
        try:
            self._check(snapshot)
            var headers = List[Header]()
            var entries = List[FileEntry]()
            for i in range(len(snapshot.stems)):
                what = snapshot.stems[i] + SUFFIX
                headers.append(Header(snapshot.files[i]))
                entries.append(_entry(what, headers[i], snapshot.files[i]))
            what = MANIFEST
            var made = Manifest(
                snapshot.step, self._attempt, snapshot.values.copy(), entries^
            )
            var text = made.encoded(self._key)
            _ = parse_manifest(List[UInt8](text.as_bytes()), self._key)
            if not self._is_there(name, made):
                self._forget(name)
                self._write(name, text, headers, snapshot, what)
        except e:
            if String(e).startswith("["):
                raise e^
            raise Error(
                "[checkpoint] ",
                name,
                " cannot be saved in ",
                self.folder,
                ": ",
                what,
                ": ",
                e,
                "; those before it are as they were",
            )
        self._valid.append(name)
        self._remove_old(name)

    def _check(self, snapshot: Snapshot) raises:
        if not self._lock:
            raise Error("the directory is open for reading only")
        if not 0 <= snapshot.step < _LIMIT:
            raise Error("there is no step ", snapshot.step)
        if not snapshot.values.is_object():
            raise Error("its values are no object")
        if not 0 < len(snapshot.stems) <= FILES_LIMIT:
            raise Error("a checkpoint has 1 to ", FILES_LIMIT, " files")
        for i in range(len(snapshot.stems)):
            ref stem = snapshot.stems[i]
            if not is_stem(stem):
                raise Error("a file of a checkpoint is not called ", stem)
            if stem != "parameters" and stem != "optimizer":
                continue
            for one in snapshot.files[i].tensors:
                if one.dtype == "F32" and not _is_finite(one):
                    raise Error(
                        "[numbers] ",
                        step_name(snapshot.step),
                        " is not saved: ",
                        stem,
                        "/",
                        one.name,
                        (
                            " holds NaN or infinity; the checkpoint before it"
                            " is as it was"
                        ),
                    )

    def _write(
        self,
        name: String,
        text: String,
        headers: List[Header],
        snapshot: Snapshot,
        mut what: String,
    ) raises:
        var aside = self._aside(name, "tmp")
        var path = String(self.folder, "/", name)
        remove(aside)  # our own, of a save that could not clean up
        try:
            what = "its directory"
            private_directory(aside)
            for i in range(len(headers)):
                what = snapshot.stems[i] + SUFFIX
                write_tensors(
                    String(aside, "/", what), headers[i], snapshot.files[i]
                )
            what = MANIFEST
            write_new(String(aside, "/", MANIFEST), text.as_bytes())
            what = "its name"
            sync_directory(aside)
            self._check_fence()
            if is_there(path):
                exchange(aside, path, self._aside(name, "old"))
            else:
                rename(aside, path)
        except e:
            remove(aside)
            raise e^
        try:
            sync_directory(self.folder)
        except e:
            raise Error(
                "[checkpoint] ",
                name,
                " is in place, but ",
                self.folder,
                " cannot be flushed to the disk: ",
                e,
                "; a power failure may lose it",
            )
        remove(aside)  # what had the name before

    def _check_fence(self) raises:
        """Refuses to write when another process or a later attempt has taken over.
        """
        self._lock.value().check()
        var run = getenv("ODYSSEY_RUN_DIR")
        var path = run + "/attempt.json"
        if run == "" or not is_there(path):
            return
        var data = read_file(path, 1 << 20)
        var number = (
            parse_json(Span(data), "attempt.json").get("attempt").integer()
        )
        if number > self._attempt:
            raise Error(
                "attempt ",
                self._attempt,
                " is over, attempt ",
                number,
                " writes now",
            )

    def _is_there(self, name: String, made: Manifest) raises -> Bool:
        """Whether a valid checkpoint of this name says the same already."""
        var path = String(self.folder, "/", name)
        if not is_there(path):
            return False
        var other: Int
        try:
            var loaded = _read_checkpoint(path, self._key, follow=False)
            if loaded[1].same_content(made):
                return True
            other = loaded[1].attempt
        except:
            return False
        if other > self._attempt:
            raise Error(
                "attempt ",
                other,
                " has written it, and this is attempt ",
                self._attempt,
            )
        return False

    def _remove_old(mut self, saved: String) raises:
        """Removes what is older than the newest `keep` valid ones; `saved` is one of them.
        """
        var found = 1
        var names = self.names()
        for i in range(len(names)):
            ref name = names[len(names) - 1 - i]
            if name == saved:
                continue
            if found >= self.keep:
                var gone = self._aside(name, "old")
                remove(gone)
                try:
                    rename(String(self.folder, "/", name), gone)
                except e:
                    raise Error(
                        "[checkpoint] ",
                        saved,
                        " is saved, but ",
                        name,
                        " cannot be removed: ",
                        e,
                    )
                remove(gone)
                self._forget(name)
            elif self._is_valid(name):
                found += 1

    def _is_valid(mut self, name: String) -> Bool:
        if name in self._valid:
            return True
        try:
            _ = _read_checkpoint(
                String(self.folder, "/", name), self._key, follow=False
            )
        except:
            return False
        self._valid.append(name)
        return True

    def _forget(mut self, name: String):
        var rest = List[String]()
        for one in self._valid:
            if one != name:
                rest.append(one)
        self._valid = rest^

    def _aside(self, name: String, kind: String) -> String:
        return String(
            self.folder,
            "/.",
            name,
            ".",
            kind,
            ".",
            self._attempt,
            ".",
            host_name(),
            ".",
            process_id(),
        )

    def _sweep(self) raises:
        """Removes what writers left aside that are gone: of an earlier attempt, or dead processes of this machine.
        """
        for name in listdir(self.folder):
            var words = List[String]()  # the host may have dots
            for word in name.split("."):
                words.append(String(word))
            var n = len(words)
            if n < 6 or words[0] != "" or step_of(words[1]) < 0:
                continue
            if words[2] != "tmp" and words[2] != "old":
                continue
            var attempt: Int
            var pid: Int
            try:
                attempt = Int(words[3])
                pid = Int(words[n - 1])
            except:
                continue
            var host = words[4]
            for i in range(5, n - 1):
                host += "." + words[i]
            if attempt < self._attempt or (
                host == host_name()
                and (pid == process_id() or not is_alive(pid))
            ):
                remove(String(self.folder, "/", name))


def _entry(name: String, header: Header, file: TensorFile) raises -> FileEntry:
    var digests = List[String]()
    var size = len(header.bytes)
    for i in header.order:
        digests.append(sha256(Span(file.tensors[i].data)))
        size += len(file.tensors[i].data)
    return FileEntry(
        name,
        size,
        sha256(Span(header.bytes)),
        header.places.copy(),
        digests^,
    )


def _identity(path: String) -> Int:
    """Which directory has this name now; 0 if none has."""
    try:
        return Int(lstat(path).st_ino)
    except:
        return 0


def _messages(reasons: List[String], used: String) -> List[String]:
    var lines = List[String]()
    for reason in reasons:
        lines.append(
            String(
                "[checkpoint] ",
                reason,
                "; ",
                "no other is there" if used == "" else used + " is used",
            )
        )
    return lines^


def _is_finite(one: TensorData) -> Bool:
    var data = one.data.unsafe_ptr().unsafe_bitcast[Float32]()
    for i in range(len(one.data) // 4):
        if not isfinite(data[unsafe_offset=i]):
            return False
    return True


def _run_attempt() -> Int:
    """The attempt of the run that this process belongs to, 0 outside one."""
    if getenv("ODYSSEY_RUN_DIR") == "":
        return 0
    try:
        return max(0, Int(getenv("ODYSSEY_ATTEMPT")))
    except:
        return 0
