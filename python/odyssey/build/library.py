"""Compiles the Mojo kernels into shared libraries, once, and says where they are.

docs/kernels.md says how a library is made from parts, what an entry of the cache is known by, and
what is refused. Nothing here opens a library; see `odyssey.core.native`.

    <cache>/kernels/<key>/libodyssey.so     the library
    <cache>/kernels/<key>/part.o            or a part of one, an entry like any other
    <cache>/kernels/<key>/build.json        what it was built from, and its SHA-256
    <cache>/kernels/<key>.lock              held while compiling; names the process that does
    <cache>/kernels/<key>.tmp-*             a build that is going on, or was killed: the next
                                            builder removes it

A wheel may bring kernels for some CPUs (scripts/release); where one is for this CPU, nothing is
compiled:

    odyssey/_kernels/<cpu>/libodyssey.so    a folder of folder.py, which says of what sources and by
                                            which compiler

Environment: `ODYSSEY_KERNELS` (a prebuilt library, or the directory it is in), `ODYSSEY_CACHE_DIR`,
`ODYSSEY_TARGET_CPU`, `ODYSSEY_TARGET_ACCELERATOR`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..base import files, launcher, slot
from ..base.requirements import REINSTALL
from ..errors import BuildError, DeviceError
from . import compiler, folder, sources
from .compiler import compiler_version, host_cpu, run_mojo, source_root, target_options  # noqa: F401

LIBRARY = folder.library_name(None)
OWN = f"{sources.FOLDER}/own.mojo"  # where a file of a user's own ops lies for the compiler
SHIPPED = Path(__file__).resolve().parents[1] / "_kernels"
FLAGS: tuple[str, ...] = ()  # more options for `mojo build`; part of the key

# What the kernels need at run time. A loader opens these with RTLD_GLOBAL; they find those that
# they need beside them.
_RUNTIME_NAMES = ("KGENCompilerRTShared", "AsyncRTMojoBindings")

_WAIT_NOTICE_S = 2.0
_MAX_RECORD_BYTES = 1 << 16  # bytes of build.json
# with Linux's O_PATH it need not be readable
_DIRECTORY_FLAGS = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class Opened(NamedTuple):
    """A library that was looked at. descriptor: of the file whose bytes these were, None for a
    prebuilt one.
    """

    path: Path
    descriptor: int | None = None

    def to_load(self) -> str:
        """Returns what a loader is to be given.

        It names the open file, whatever its path has come to mean since; for that the file stays
        open, and tools that look at this process from outside find it by the same name.
        """
        if self.descriptor is None:
            return str(self.path)
        name = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return name if os.path.exists(name) else str(self.path)  # no /proc, as on macOS

    def close(self) -> Path:
        """The path, for those who do not load it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        return self.path


def open_library(accelerator: str | None = None) -> Opened:
    """The compiled kernels, for the CPU or an accelerator: the prebuilt library that was named,
    the cached one, or one compiled now. Raises BuildError: they cannot be compiled, or what
    is there is refused.
    """
    kernels_path = os.environ.get("ODYSSEY_KERNELS")
    return (
        Opened(_prebuilt(Path(kernels_path), accelerator))
        if kernels_path
        else _cached_library(accelerator=accelerator)
    )


def library_path() -> Path:
    return open_library().close()


def open_gpu_library(accelerator: str | None = None) -> Opened:
    """The kernels for a kind of GPU.

    accelerator: such as "sm_90"; None: what gpus.accelerator() says of this machine.

    Raises DeviceError: None, and there is no GPU; or no name. BuildError: as open_library.
    """
    return open_library(_accelerator(accelerator))


def gpu_library_path(accelerator: str | None = None) -> Path:
    return open_gpu_library(accelerator).close()


def _accelerator(name: str | None) -> str:
    from . import gpus

    accelerator = gpus.accelerator() if name is None else gpus.canonical(name, "the accelerator")
    if accelerator is None:
        raise DeviceError(
            "[build] this machine has no GPU to compile for; set ODYSSEY_TARGET_ACCELERATOR, say "
            "to sm_90"
        )
    return accelerator


def runtime_libraries() -> list[Path]:
    """The run-time libraries of the compiler, in loading order, as absolute paths.

    They come with the compiler; with `ODYSSEY_KERNELS` the ones beside the prebuilt library go
    first.
    """
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    places = [root / "lib" for root in compiler.sdk_roots()]
    if kernels_path := os.environ.get("ODYSSEY_KERNELS"):
        path = Path(kernels_path).absolute()
        directory = path if path.is_dir() else path.parent
        places = [directory, directory / "lib", *places]
    libraries = []
    for name in (f"lib{stem}{suffix}" for stem in _RUNTIME_NAMES):
        library = next((place / name for place in places if (place / name).is_file()), None)
        if library is None:
            place_list = ", ".join(map(str, places)) or "no installed compiler"
            raise BuildError(
                f"[build] {name} is in none of: {place_list}; install the package `max`, or put it "
                "beside the library"
            )
        libraries.append(library)
    return libraries


# -- what is compiled ------------------------------------------------------------------------------


def source_hash(root: Path) -> str:
    """SHA-256 over the names and the bytes of every Mojo file under `mojo/`."""
    return sources.digest(sources.read(root))


class BuildInputs(NamedTuple):
    """Everything that a library, or a part of one, depends on."""

    sources: str  # sources.digest of the texts
    compiler: str
    cpu: str
    flags: tuple[str, ...]
    system: str
    accelerator: str | None = None  # of the kernels for GPUs
    texts: Mapping[str, bytes] = {}  # what may be imported
    roots: tuple[str, ...] = ()  # root files of its parts
    part: str = ""  # the root file, if it is a part
    library: str = LIBRARY  # the name of the file

    @property
    def key(self) -> str:
        """The name of the cache entry."""
        parts = [self.sources, self.compiler, self.cpu, self.flags, self.system]
        text = json.dumps([*parts, *(field for field in (self.accelerator, self.part) if field)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def record(self) -> dict[str, object]:
        """The same for build.json."""
        optional_fields = {"accelerator": self.accelerator, "part": self.part}
        other_fields = {
            "flags": list(self.flags),
            "system": self.system,
            "source_sha256": self.sources,
        }
        present_fields = {name: value for name, value in optional_fields.items() if value}
        return {"compiler": self.compiler, "cpu": self.cpu, **present_fields, **other_fields}

    def parts(self) -> list[BuildInputs]:
        """Its parts, those first of which the most is to be compiled."""
        parts = []
        for root in self.roots:
            texts = sources.imported(self.texts, root)
            parts.append(
                self._replace(
                    sources=sources.digest(texts), texts=texts, part=root, library="part.o"
                )
            )
        return sorted(parts, key=lambda part: -sum(map(len, part.texts.values())))


def plan(root: Path, target_cpu: str | None = None, accelerator: str | None = None) -> BuildInputs:
    """Returns what would be compiled from `root` on this machine.

    A library for GPUs only starts work on the CPU: unless told otherwise it is for all CPUs of this
    kind, and one file serves all.
    """
    default_cpu = (
        compiler.portable_cpu()
        if accelerator
        else os.environ.get("ODYSSEY_TARGET_CPU") or host_cpu()
    )
    texts = sources.read(root, gpu=accelerator is not None)
    version = compiler_version()
    system = folder.system()
    roots = sources.roots(texts, gpu=accelerator is not None)
    inputs = BuildInputs(
        sources.digest(texts),
        version,
        target_cpu or default_cpu,
        FLAGS,
        system,
        accelerator,
        texts,
        roots,
    )
    return inputs._replace(library=folder.library_name(accelerator))


# -- the cache -------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """`$ODYSSEY_CACHE_DIR`, else `$XDG_CACHE_HOME/odyssey`, else `~/.cache/odyssey`."""
    if directory := os.environ.get("ODYSSEY_CACHE_DIR"):
        return Path(directory).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (
        Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~")).absolute() / ".cache"
    ) / "odyssey"


def cached(accelerator: str | None = None) -> Path | None:
    """The library for this machine, or that of an accelerator, if it has been compiled already
    and is as it was. Raises BuildError: there is one that somebody else may have put there.
    """
    inputs = plan(root := source_root(), accelerator=accelerator)
    library = _shipped(root, inputs) or _open_undamaged(cache_dir(), inputs)
    return library.close() if library else None


def cached_library(target_cpu: str | None = None, accelerator: str | None = None) -> Path:
    """The library for this machine, `target_cpu` or an accelerator, from the cache, or compiled
    now.
    """
    return _cached_library(target_cpu, accelerator).close()


def open_own_library(source: bytes, exports: str, accelerator: str | None = None) -> Opened:
    """The library of a user's own ops, from the cache or compiled now.

    source: the user's file. exports: the root file, which imports it as `own`.

    Raises BuildError: it does not compile, or what is there is refused.
    """
    inputs = plan(
        source_root(), accelerator=_accelerator(accelerator) if accelerator is not None else None
    )
    texts = {**inputs.texts, OWN: source, f"{sources.FOLDER}/root.mojo": exports.encode()}
    roots = (f"{sources.FOLDER}/root.mojo",)
    return _from_cache(
        inputs._replace(
            sources=sources.digest(texts), texts=texts, roots=roots, library="libown.so"
        )
    )


def _cached_library(target_cpu: str | None = None, accelerator: str | None = None) -> Opened:
    root = source_root()
    inputs = plan(root, target_cpu, accelerator)
    return _shipped(root, inputs) or _from_cache(inputs)


def _shipped(root: Path, inputs: BuildInputs) -> Opened | None:
    """The library that came with the package, if there is one of these sources, by this
    compiler, for this CPU.
    """
    home = SHIPPED / inputs.cpu
    if inputs.accelerator or inputs.flags or not folder.is_folder(home):
        return None
    try:
        manifest = folder.read(home)
        source_digest = source_hash(root)
        if (manifest.compiler, manifest.sources) != (inputs.compiler, source_digest):
            return None
        return Opened(folder.library(home, None, source_digest))
    except BuildError as problem:
        _say(f"{problem}; or {REINSTALL}. Other kernels are used")
        return None


def _from_cache(inputs: BuildInputs) -> Opened:
    cache = cache_dir()
    if (library := _open_undamaged(cache, inputs)) is not None:
        return library
    try:
        _make_writable(cache / "kernels")
    except OSError as problem:
        reason = problem.strerror or problem
        fallback = _temporary_cache(cache)
        if (library := _open_undamaged(fallback, inputs)) is not None:
            return library
        _say(f"{cache} cannot be written ({reason}); the kernels are kept in {fallback}")
        cache = fallback
    previous_phase = slot.phase("compile")
    try:
        return _build_once(inputs, cache)
    finally:
        slot.phase(previous_phase)


class _Damaged(Exception):
    """An entry is there and is not what was compiled. The text says what is wrong with it."""


def _open_undamaged(cache: Path, inputs: BuildInputs) -> Opened | None:
    """The library of this entry, if it is there undamaged.

    Raises BuildError: somebody else may have put it there.
    """
    with contextlib.suppress(_Damaged):
        return _open_entry(cache, inputs)
    return None


def _open_entry(cache: Path, inputs: BuildInputs) -> Opened | None:
    """The library of this entry if it is there.

    Each directory is looked at and then opened from, no link is followed below the cache's
    directory, and what is checked of a file is what is behind the descriptor.

    Raises BuildError: somebody else may have put it there. _Damaged: it is not as it was written.
    """
    entry = cache / "kernels" / inputs.key
    with contextlib.ExitStack() as cleanup:

        def look(path: Path, flags: int, within: int | None = None) -> int:
            try:
                descriptor = os.open(
                    path if within is None else path.name, flags | os.O_CLOEXEC, dir_fd=within
                )
            except OSError as problem:
                if within is not None and path.is_symlink():
                    raise _foreign(path, "it is a link") from problem
                raise
            cleanup.callback(os.close, descriptor)
            if reason := files.foreign(os.fstat(descriptor)):
                raise _foreign(path, reason)
            return descriptor

        try:
            place = look(cache, _DIRECTORY_FLAGS)
            place = look(cache / "kernels", _DIRECTORY_FLAGS | os.O_NOFOLLOW, place)
            place = look(entry, _DIRECTORY_FLAGS | os.O_NOFOLLOW, place)
        except OSError:
            return None  # where it cannot be used, writing to it says why
        try:
            with open(look(entry / "build.json", _FILE_FLAGS, place), "rb", closefd=False) as file:
                record = json.loads(file.read(_MAX_RECORD_BYTES))
            if {name: record[name] for name in inputs.record()} != inputs.record():
                raise _Damaged("build.json is of another library")
            library = look(entry / inputs.library, _FILE_FLAGS, place)
            if not stat.S_ISREG(os.fstat(library).st_mode):
                raise _Damaged(f"{inputs.library} is no file")
            with open(library, "rb", closefd=False) as file:
                if fault := folder.damage(file, record["bytes"], record["sha256"]):
                    raise _Damaged(f"{inputs.library} {fault}")
            return Opened(entry / inputs.library, os.dup(library))
        except OSError as problem:
            raise _Damaged(
                f"{problem.filename or 'build.json'} cannot be read ({problem.strerror})"
            ) from problem
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise _Damaged("build.json is not one that this version writes") from problem


def _foreign(path: Path, reason: str) -> BuildError:
    return BuildError(
        f"[build] {path} is refused: {reason}, and compiled kernels are code that runs; "
        "set ODYSSEY_CACHE_DIR to a directory that only you can write to"
    )


def _make_writable(directory: Path) -> None:
    """Makes it where it is not there, and those above it, for nobody else to write to."""
    for place in (*reversed(directory.parents), directory):
        if not place.is_dir():
            place.mkdir(0o755, exist_ok=True)
    import tempfile

    with tempfile.TemporaryFile(dir=directory):
        pass


def _temporary_cache(instead_of: Path) -> Path:
    """A directory of this user alone under the system's temporary one.

    Others can write there, so nothing that somebody else may have put in place is used: code is
    loaded from it.
    """
    import tempfile

    path = Path(tempfile.gettempdir()) / f"odyssey-{os.getuid()}"
    advice = "set ODYSSEY_CACHE_DIR to a directory that can be written"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            reason = (
                f"{instead_of} cannot be written, and {path} is not this user's alone (mode 0700)"
            )
            raise BuildError(f"[build] {reason}; {advice}")
        _make_writable(path / "kernels")
    except OSError as problem:
        reason = f"neither {instead_of} nor {path} can be written ({problem.strerror})"
        raise BuildError(f"[build] {reason}; {advice}") from problem
    return path


def _build_once(inputs: BuildInputs, cache: Path) -> Opened:
    """Compile into the entry unless another process has just done so.

    Whoever waited for a build that failed gets the same error instead of compiling the same sources
    again.
    """
    kernels = cache / "kernels"
    with _locked(kernels / f"{inputs.key}.lock") as (lock, waited):
        damage = None
        try:
            if (library := _open_entry(cache, inputs)) is not None:
                return library
        except _Damaged as problem:
            damage = problem
        failure = lock.read().get("failed") if waited else None
        if failure:
            raise BuildError(failure)
        if damage is not None:
            _say(f"{kernels / inputs.key} is damaged: {damage}; the kernels are compiled anew")
        for stale in kernels.glob(f"{inputs.key}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        builder = {"pid": os.getpid(), "host": platform.node()}
        lock.write(builder)
        try:
            return _build(inputs, kernels)
        except BuildError as error:
            lock.write({**builder, "failed": str(error)})
            raise


def _build(inputs: BuildInputs, kernels: Path) -> Opened:
    """Compile, or link, beside the entry, where nobody else looks, then rename: it is there
    whole or not at all.
    """
    import tempfile

    entry = kernels / inputs.key
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(
            prefix=f"{entry.name}.tmp-", dir=kernels, ignore_cleanup_errors=True
        ) as aside:
            work = Path(aside)
            new_entry = Path(aside) / "entry"
            new_entry.mkdir(0o755)
            if inputs.part:
                _compile(inputs, work / "sources", new_entry / inputs.library)
            else:
                _compile_and_link(inputs, kernels.parent, new_entry / inputs.library)
            code = (new_entry / inputs.library).read_bytes()
            seconds = time.perf_counter() - start
            record = {
                **inputs.record(),
                "bytes": len(code),
                "sha256": hashlib.sha256(code).hexdigest(),
            }
            record |= {
                "seconds": round(seconds, 1),
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            (new_entry / "build.json").write_text(json.dumps(record, indent=1) + "\n")
            for path in new_entry.iterdir():
                # for nobody else to write to, whatever the umask is
                path.chmod(path.stat().st_mode & 0o755)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            if os.path.lexists(entry):  # damaged, or it would have been used
                files.exchange(new_entry, entry, work / "damaged")
            else:
                # where locks do not work, another process may have been faster
                with contextlib.suppress(OSError):
                    os.rename(new_entry, entry)
        library = _open_undamaged(kernels.parent, inputs)
        if library is None:
            raise BuildError(
                f"[build] {entry} cannot be written, or is damaged at once; set ODYSSEY_CACHE_DIR"
            )
        return library
    except OSError as problem:
        raise BuildError(
            f"[build] {entry} cannot be written: {problem}; set ODYSSEY_CACHE_DIR"
        ) from problem


def _compile(part: BuildInputs, root: Path, output: Path) -> None:
    """Compiles a part, of the sources that it imports alone, which are put below `root`."""
    for name, text in part.texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    options = {"accelerator": part.accelerator, "flags": part.flags}
    compiler.compile_kernels(root, Path(part.part), output, part.cpu, **options)


def _compile_and_link(inputs: BuildInputs, cache: Path, library: Path) -> None:
    """Compiles the parts that are not in the cache, as many at a time as this process has cores,
    and links all.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    if inputs.accelerator:
        compiler.check_accelerator(inputs.accelerator)
    parts = inputs.parts()
    start = time.perf_counter()
    objects_by_key = {part.key: _open_undamaged(cache, part) for part in parts}
    missing = [part for part in parts if objects_by_key[part.key] is None]
    target, up_to = (
        (inputs.accelerator, "some minutes") if inputs.accelerator else (inputs.cpu, "a minute")
    )
    if loud := bool(missing) and OWN not in inputs.texts:  # own ops take seconds
        names = ", ".join(sorted(Path(part.part).stem for part in missing))
        scope = (
            ""
            if len(missing) == len(parts)
            else f", {len(missing)} of {len(parts)} parts ({names})"
        )
        _say(f"compiling the kernels for {target}{scope}, once (up to {up_to}) ...")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    pool = ThreadPoolExecutor(cores)

    def make(part: BuildInputs) -> None:
        objects_by_key[part.key] = _build_once(part, cache)

    try:
        for number, future in enumerate(
            as_completed([pool.submit(make, part) for part in missing]), 1
        ):
            future.result()
            if loud and sys.stderr.isatty():  # shorter than the line that follows
                line = f"odyssey: compiling the kernels ... {number} of {len(missing)}"
                print(line, end="\r", file=sys.stderr, flush=True)
        objects = [objects_by_key[part.key] for part in parts]
        compiler.link([Path(part.to_load()) for part in objects if part], library)
    finally:
        pool.shutdown(cancel_futures=True)
        for part in objects_by_key.values():
            if part:
                part.close()
    if loud:
        _say(f"compiling the kernels ... done in {time.perf_counter() - start:.0f} s")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[files.LockFile, bool]]:
    """Hold the lock file; yields it and whether another process had it first.

    Without locks everybody compiles.
    """
    lock = files.LockFile(path)
    # one of several ranks speaks
    waited = False
    quiet = launcher.rank() not in (None, 0)
    try:
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while lock.take() is False:
                waited = True
                if not quiet and time.monotonic() - start > _WAIT_NOTICE_S:
                    quiet = True
                    _say(
                        f"waiting for process {lock.read().get('pid', '?')} to compile the kernels"
                    )
                time.sleep(0.05)
        yield lock, waited
    finally:
        lock.release(empty=False)  # who waits reads it


def _prebuilt(kernels_path: Path, accelerator: str | None = None) -> Path:
    """A library that ODYSSEY_KERNELS names; of a folder that `odyssey build --output` made
    everything is checked.
    """
    path = kernels_path.absolute()
    home = path if path.is_dir() else path.parent
    if folder.is_folder(home):
        source_digest = None
        with contextlib.suppress(BuildError):
            source_digest = source_hash(source_root())
        return folder.library(home, accelerator, source_digest)
    if accelerator:
        path = home / folder.library_name(accelerator)
    elif path.is_dir():
        path = path / LIBRARY
    if not path.is_file():
        raise BuildError(
            f"[build] ODYSSEY_KERNELS={kernels_path}, but there is no file {path}; make it with "
            "`odyssey build --output DIR"
            f"{f' --target {accelerator}' if accelerator else ''}`, or unset ODYSSEY_KERNELS to "
            "compile the kernels"
        )
    return path


def _say(line: str) -> None:
    print(f"odyssey: {line}", file=sys.stderr, flush=True)
