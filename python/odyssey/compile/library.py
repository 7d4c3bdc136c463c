"""Compiles the Mojo kernels into shared libraries, once, and returns their paths.

docs/kernels.md explains how a library is built from parts, what the key of a cache entry depends
on, and which entries are refused. Nothing here loads a library; see `odyssey.core.native`.

    <cache>/kernels/<key>/libodyssey.so     the library
    <cache>/kernels/<key>/part.o            or a part of one, which is a separate entry
    <cache>/kernels/<key>/build.json        the inputs of the build, and the SHA-256 of the library
    <cache>/kernels/<key>.lock              held while compiling; has the process that compiles
    <cache>/kernels/<key>.tmp-*             a build that is running, or was killed: the next
                                            builder removes it

A wheel may contain kernels for some CPUs (scripts/release). If it has them for this CPU, nothing is
compiled:

    odyssey/_kernels/<cpu>/libodyssey.so    a folder of folder.py, which has the sources and the
                                            compiler

Environment: `ODYSSEY_KERNELS` (a prebuilt library, or the directory it is in), `ODYSSEY_CACHE_DIR`,
`ODYSSEY_TARGET_CPU`, `ODYSSEY_TARGET_ACCELERATOR`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..base import files, launcher, slot
from ..base.paths import expand_path
from ..base.requirements import REINSTALL
from ..errors import BuildError, DeviceError
from . import compiler, folder, sources
from .compiler import compiler_version, host_cpu, run_mojo, source_root, target_options  # noqa: F401

LIBRARY = folder.library_name(None)
OWN = f"{sources.FOLDER}/own.mojo"  # the path of a user's own ops for the compiler
SHIPPED = Path(__file__).resolve().parents[1] / "_kernels"
FLAGS: tuple[str, ...] = ()  # more options for `mojo build`; part of the key

# The libraries that the kernels need at run time. A loader opens them with RTLD_GLOBAL. They find
# the libraries that they need in the same folder.
_RUNTIME_NAMES = ("KGENCompilerRTShared", "AsyncRTMojoBindings")

_WAIT_NOTICE_S = 2.0
LIVE_COLUMNS = 72  # of a line on the terminal that is overwritten each second
_MAX_RECORD_BYTES = 1 << 16  # bytes of build.json
# With O_PATH of Linux, the directory need not be readable.
_DIRECTORY_FLAGS = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class Opened(NamedTuple):
    """A library that was checked.

    descriptor: the open file whose bytes were checked. None for a prebuilt library.
    """

    path: Path
    descriptor: int | None = None

    def to_load(self) -> str:
        """Returns the path for a loader.

        It is a path of the open file, so another file with the library's path is not loaded. The
        file must stay open while it is loaded. Debuggers and profilers use the same path later.
        """
        if self.descriptor is None:
            return str(self.path)
        name = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return name if os.path.exists(name) else str(self.path)  # no /proc, as on macOS

    def close(self) -> Path:
        """Closes the file, and returns the path, for callers that don't load the library."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        return self.path


def open_library(accelerator: str | None = None) -> Opened:
    """Returns the compiled kernels for the CPU, or for an accelerator.

    They are the prebuilt library of ODYSSEY_KERNELS, the shipped or cached one, or one compiled
    now. Raises BuildError if they cannot be compiled, or the existing library is refused.
    """
    kernels_path = os.environ.get("ODYSSEY_KERNELS")
    if kernels_path:
        return Opened(_find_prebuilt(expand_path(kernels_path), accelerator))
    return _open_or_compile(accelerator=accelerator)


def library_path() -> Path:
    """Returns the path of the kernels for the CPU. See `open_library`."""
    return open_library().close()


def open_gpu_library(accelerator: str | None = None) -> Opened:
    """Returns the kernels for a kind of GPU.

    accelerator: the kind, such as "sm_90". None is the kind of this machine's GPUs.

    Raises:
        DeviceError: it is None and there is no GPU, or it is not the name of a kind.
        BuildError: see `open_library`.
    """
    return open_library(_resolve_accelerator(accelerator))


def gpu_library_path(accelerator: str | None = None) -> Path:
    """Returns the path of the kernels for a kind of GPU. See `open_gpu_library`."""
    return open_gpu_library(accelerator).close()


def _resolve_accelerator(name: str | None) -> str:
    """Returns the canonical name of a kind of GPU. None is the kind of this machine's GPUs.

    Raises DeviceError if there is none, or the name is unknown.
    """
    from . import gpus

    accelerator = gpus.accelerator() if name is None else gpus.canonical(name, "the accelerator")
    if accelerator is None:
        raise DeviceError(
            "[build] this machine has no GPU to compile for; set ODYSSEY_TARGET_ACCELERATOR, say "
            "to sm_90"
        )
    return accelerator


def runtime_libraries() -> list[Path]:
    """Returns the paths of the run-time libraries of the compiler, in loading order.

    They come with the compiler. With `ODYSSEY_KERNELS`, those next to the prebuilt library go
    first. Raises BuildError if one is missing.
    """
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    places = [root / "lib" for root in compiler.sdk_roots()]
    if kernels_path := os.environ.get("ODYSSEY_KERNELS"):
        path = expand_path(kernels_path).absolute()
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
    """Returns the SHA-256 of the names and the bytes of every Mojo file under `mojo/`."""
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
        """Returns the inputs as build.json holds them."""
        fields: dict[str, object] = {"compiler": self.compiler, "cpu": self.cpu}
        if self.accelerator:
            fields["accelerator"] = self.accelerator
        if self.part:
            fields["part"] = self.part
        fields["flags"] = list(self.flags)
        fields["system"] = self.system
        fields["source_sha256"] = self.sources
        return fields

    def parts(self) -> list[BuildInputs]:
        """Returns the inputs of its parts. The one with the most source text comes first."""
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
    """Returns the inputs of the library that would be compiled from `root` on this machine.

    A library for GPUs uses the CPU only to start work. So without `target_cpu`, it is built for all
    CPUs of this architecture.
    """
    if accelerator:
        default_cpu = compiler.portable_cpu()
    else:
        default_cpu = os.environ.get("ODYSSEY_TARGET_CPU") or host_cpu()
    for_gpu = accelerator is not None
    texts = sources.read(root, gpu=for_gpu)
    return BuildInputs(
        sources=sources.digest(texts),
        compiler=compiler_version(),
        cpu=target_cpu or default_cpu,
        flags=FLAGS,
        system=folder.system(),
        accelerator=accelerator,
        texts=texts,
        roots=sources.roots(texts, gpu=for_gpu),
        library=folder.library_name(accelerator),
    )


# -- the cache -------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Returns `$ODYSSEY_CACHE_DIR`, else `$XDG_CACHE_HOME/odyssey`, else `~/.cache/odyssey`."""
    if directory := os.environ.get("ODYSSEY_CACHE_DIR"):
        return expand_path(directory).absolute()
    xdg_cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg_cache):
        return Path(xdg_cache) / "odyssey"
    return Path(os.path.expanduser("~")).absolute() / ".cache" / "odyssey"


def cached(accelerator: str | None = None) -> Path | None:
    """Returns the path of the library for this machine, or an accelerator, if it exists.

    It is None if the library is not compiled yet, or damaged. Raises BuildError if another user may
    have written it.
    """
    root = source_root()
    inputs = plan(root, accelerator=accelerator)
    library = _open_shipped(root, inputs) or _open_undamaged(cache_dir(), inputs)
    return library.close() if library else None


def cached_library(target_cpu: str | None = None, accelerator: str | None = None) -> Path:
    """Returns the path of the library for this machine, `target_cpu` or an accelerator.

    It is compiled now if it isn't in the cache. Raises BuildError as `open_library`.
    """
    return _open_or_compile(target_cpu, accelerator).close()


def open_own_library(source: bytes, exports: str, accelerator: str | None = None) -> Opened:
    """Returns the library of a user's own ops, from the cache or compiled now.

    Args:
        source: the content of the user's file.
        exports: the root file, which imports it as `own`.
        accelerator: the kind of GPU. None is the CPU.

    Raises:
        BuildError: it doesn't compile, or the existing library is refused.
    """
    if accelerator is not None:
        accelerator = _resolve_accelerator(accelerator)
    inputs = plan(source_root(), accelerator=accelerator)
    root_file = f"{sources.FOLDER}/root.mojo"
    texts = {**inputs.texts, OWN: source, root_file: exports.encode()}
    return _open_cached_or_compile(
        inputs._replace(
            sources=sources.digest(texts), texts=texts, roots=(root_file,), library="libown.so"
        )
    )


def _open_or_compile(target_cpu: str | None = None, accelerator: str | None = None) -> Opened:
    """Returns the shipped library, else the cached one, else one compiled now."""
    root = source_root()
    inputs = plan(root, target_cpu, accelerator)
    return _open_shipped(root, inputs) or _open_cached_or_compile(inputs)


def _open_shipped(root: Path, inputs: BuildInputs) -> Opened | None:
    """Returns the library that came with the package.

    It is None unless there is one of these sources, by this compiler, for this CPU. A damaged one
    is reported and not used.
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
        _print_line(f"{problem}; or {REINSTALL}. Other kernels are used")
        return None


def _open_cached_or_compile(inputs: BuildInputs) -> Opened:
    """Returns the library from the cache, or compiles it.

    If the cache directory cannot be written, or no program there may run, a temporary directory of
    the user is the cache.
    """
    cache = cache_dir()
    try:
        refuse_noexec(cache)
        if (library := _open_undamaged(cache, inputs)) is not None:
            return library
        _make_writable(cache / "kernels")
    except OSError as problem:
        reason = problem.strerror or problem
        fallback = _make_temporary_cache(cache)
        if (library := _open_undamaged(fallback, inputs)) is not None:
            return library
        _print_line(f"{cache} cannot be used ({reason}); the kernels are kept in {fallback}")
        cache = fallback
    previous_phase = slot.phase("compile")
    try:
        return _build_once(inputs, cache)
    finally:
        slot.phase(previous_phase)


class _Damaged(Exception):
    """An entry of the cache is not as it was written. The message is the reason."""


def _open_undamaged(cache: Path, inputs: BuildInputs) -> Opened | None:
    """Returns the library of this entry, or None if it is missing or damaged.

    Raises BuildError if another user may have written it.
    """
    with contextlib.suppress(_Damaged):
        return _open_entry(cache, inputs)
    return None


def _open_entry(cache: Path, inputs: BuildInputs) -> Opened | None:
    """Returns the library of this entry, or None if it is missing.

    Another user must not be able to exchange a file between its check and its use. So each
    directory is opened and checked, and the next one is opened relative to its descriptor. Below
    the directory of the cache no link is followed. The content of a file is checked through the
    descriptor that is returned.

    Raises:
        BuildError: another user may have written it.
        _Damaged: it is not as it was written.
    """
    entry = cache / "kernels" / inputs.key
    with contextlib.ExitStack() as cleanup:

        def open_checked(path: Path, flags: int, parent: int | None = None) -> int:
            """Opens a file or directory in the directory `parent`, and checks its owner."""
            try:
                descriptor = os.open(
                    path if parent is None else path.name, flags | os.O_CLOEXEC, dir_fd=parent
                )
            except OSError as problem:
                if parent is not None and path.is_symlink():
                    raise _foreign_error(path, "it is a link") from problem
                raise
            cleanup.callback(os.close, descriptor)
            if reason := files.foreign(os.fstat(descriptor)):
                raise _foreign_error(path, reason)
            return descriptor

        try:
            cache_fd = open_checked(cache, _DIRECTORY_FLAGS)
            kernels_fd = open_checked(cache / "kernels", _DIRECTORY_FLAGS | os.O_NOFOLLOW, cache_fd)
            entry_fd = open_checked(entry, _DIRECTORY_FLAGS | os.O_NOFOLLOW, kernels_fd)
        except OSError:
            # The entry is missing. If the cache cannot be used, writing to it raises the reason.
            return None
        try:
            record_fd = open_checked(entry / "build.json", _FILE_FLAGS, entry_fd)
            with open(record_fd, "rb", closefd=False) as file:
                record = json.loads(file.read(_MAX_RECORD_BYTES))
            if {name: record[name] for name in inputs.record()} != inputs.record():
                raise _Damaged("build.json is of another library")
            library = open_checked(entry / inputs.library, _FILE_FLAGS, entry_fd)
            if not stat.S_ISREG(os.fstat(library).st_mode):
                raise _Damaged(f"{inputs.library} is no file")
            with open(library, "rb", closefd=False) as file:
                if fault := folder.damage(file, record["bytes"], record["sha256"]):
                    raise _Damaged(f"{inputs.library} {fault}")
            # The copy stays open when `cleanup` closes the others.
            return Opened(entry / inputs.library, os.dup(library))
        except OSError as problem:
            raise _Damaged(
                f"{problem.filename or 'build.json'} cannot be read ({problem.strerror})"
            ) from problem
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise _Damaged("build.json is not one that this version writes") from problem


def _foreign_error(path: Path, reason: str) -> BuildError:
    """Returns the error for a file or directory that another user may have written."""
    return BuildError(
        f"[build] {path} is refused: {reason}, and compiled kernels are code that runs; "
        "set ODYSSEY_CACHE_DIR to a directory that only you can write to"
    )


def refuse_noexec(directory: Path) -> None:
    """Raises OSError if the file system of a directory, or of where it would be, is mounted with
    noexec: a library there can't be loaded.
    """
    place = files.nearest(directory)
    with contextlib.suppress(FileNotFoundError):  # a link to nowhere
        if os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise OSError(errno.EACCES, "its file system is mounted with noexec")


def _make_writable(directory: Path) -> None:
    """Creates a directory and its parents if they are missing, writable only for this user.

    Raises OSError if no file can be written in it.
    """
    for place in (*reversed(directory.parents), directory):
        if not place.is_dir():
            place.mkdir(0o755, exist_ok=True)
    import tempfile

    # Writing a file is the only reliable check.
    with tempfile.TemporaryFile(dir=directory):
        pass


def _make_temporary_cache(instead_of: Path) -> Path:
    """Creates a cache directory for this user in the system's temporary directory.

    Others can write to the temporary directory, and code is loaded from the cache. So a directory
    that belongs to somebody else, or that others can use, raises BuildError.

    instead_of: the cache directory that cannot be written, for messages.
    """
    import tempfile

    path = Path(tempfile.gettempdir()) / f"odyssey-{os.getuid()}"
    advice = "set ODYSSEY_CACHE_DIR to a directory that can be written, where programs may run"
    try:
        refuse_noexec(path)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        others_have_access = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or others_have_access:
            reason = f"{instead_of} cannot be used, and {path} is not this user's alone (mode 0700)"
            raise BuildError(f"[build] {reason}; {advice}")
        _make_writable(path / "kernels")
    except OSError as problem:
        reason = f"neither {instead_of} nor {path} can be used ({problem.strerror})"
        raise BuildError(f"[build] {reason}; {advice}") from problem
    return path


def _build_once(inputs: BuildInputs, cache: Path) -> Opened:
    """Compiles into the entry, unless another process has just done so.

    The lock file makes one process compile, and the others wait. If the build fails, the processes
    that waited raise the same error. They don't compile the same sources again.
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
            _print_line(
                f"{kernels / inputs.key} is damaged: {damage}; the kernels are compiled anew"
            )
        for stale in kernels.glob(f"{inputs.key}.tmp-*"):
            import shutil

            shutil.rmtree(stale, ignore_errors=True)
        builder = {"pid": os.getpid(), "host": platform.node()}
        lock.write(builder)
        try:
            return _build(inputs, kernels)
        except BuildError as error:
            lock.write({**builder, "failed": str(error)})
            raise


def _build(inputs: BuildInputs, kernels: Path) -> Opened:
    """Compiles and links in a temporary directory, then renames it to the entry.

    So the entry is complete or missing, but never half written. Raises BuildError if it cannot be
    written.
    """
    import tempfile

    entry = kernels / inputs.key
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(
            prefix=f"{entry.name}.tmp-", dir=kernels, ignore_cleanup_errors=True
        ) as temporary:
            work = Path(temporary)
            new_entry = work / "entry"
            new_entry.mkdir(0o755)
            if inputs.part:
                _compile_part(inputs, work / "sources", new_entry / inputs.library)
            else:
                _compile_and_link(inputs, kernels.parent, new_entry / inputs.library)
            code = (new_entry / inputs.library).read_bytes()
            seconds = time.perf_counter() - start
            record = {
                **inputs.record(),
                "bytes": len(code),
                "sha256": hashlib.sha256(code).hexdigest(),
                "seconds": round(seconds, 1),
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            (new_entry / "build.json").write_text(json.dumps(record, indent=1) + "\n")
            for path in new_entry.iterdir():
                # Nobody else may write to it, whatever the umask is.
                path.chmod(path.stat().st_mode & 0o755)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            if os.path.lexists(entry):  # it is damaged, otherwise it would have been used
                files.exchange(new_entry, entry, work / "damaged")
            else:
                # On a file system without locks, another process may have been faster.
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


def _compile_part(part: BuildInputs, root: Path, output: Path) -> None:
    """Compiles a part. Only the sources that it imports are written below `root`."""
    for name, text in part.texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    options = {"accelerator": part.accelerator, "flags": part.flags}
    compiler.compile_kernels(root, Path(part.part), output, part.cpu, **options)


def _compile_and_link(inputs: BuildInputs, cache: Path, library: Path) -> None:
    """Compiles the parts that are not in the cache, and links all parts.

    As many parts are compiled at a time as this process has cores.
    """
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    if inputs.accelerator:
        compiler.check_accelerator(inputs.accelerator)
    parts = inputs.parts()
    start = time.perf_counter()
    objects_by_key = {part.key: _open_undamaged(cache, part) for part in parts}
    missing = [part for part in parts if objects_by_key[part.key] is None]
    target = inputs.accelerator or inputs.cpu
    duration = "some minutes" if inputs.accelerator else "a minute or two; more if others compute"
    # A user's own ops take seconds, so nothing is printed for them.
    shows_progress = bool(missing) and OWN not in inputs.texts
    if shows_progress:
        scope = f", {len(parts)} parts" if len(parts) > 1 else ""
        if len(missing) < len(parts):
            names = ", ".join(sorted(Path(part.part).stem for part in missing))
            scope = f", {len(missing)} of {len(parts)} parts ({names})"
        _print_line(f"compiling the kernels for {target}{scope}, once ({duration}) ...")
    is_live = shows_progress and sys.stderr.isatty()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    pool = ThreadPoolExecutor(cores)

    def build_part(part: BuildInputs) -> None:
        objects_by_key[part.key] = _build_once(part, cache)

    try:
        running = {pool.submit(build_part, part) for part in missing}
        while running:
            completed, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
            for future in completed:
                future.result()
            if is_live:
                _print_live(
                    f"odyssey: compiling the kernels ... {len(missing) - len(running)} of "
                    f"{len(missing)} parts, {time.perf_counter() - start:.0f} s"
                )
        objects = [objects_by_key[part.key] for part in parts]
        compiler.link([Path(part.to_load()) for part in objects if part], library)
    finally:
        if is_live:
            _print_live("")  # an error, or the line of the end, starts at the left
        pool.shutdown(cancel_futures=True)
        for part in objects_by_key.values():
            if part:
                part.close()
    if shows_progress:
        _print_line(f"compiling the kernels ... done in {time.perf_counter() - start:.0f} s")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[files.LockFile, bool]]:
    """Holds the lock file, and yields it with True if another process had it first.

    On a file system without locks, every process compiles.
    """
    lock = files.LockFile(path)
    waited = False
    # Only the first of several ranks prints the notice, and it prints it once.
    quiet = launcher.rank() not in (None, 0)
    try:
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while lock.take() is False:
                waited = True
                if not quiet and time.monotonic() - start > _WAIT_NOTICE_S:
                    quiet = True
                    _print_line(
                        f"waiting for process {lock.read().get('pid', '?')} to compile the kernels"
                    )
                time.sleep(0.05)
        yield lock, waited
    finally:
        lock.release(empty=False)  # processes that wait read its content


def _find_prebuilt(kernels_path: Path, accelerator: str | None = None) -> Path:
    """Returns the library at the path of ODYSSEY_KERNELS.

    The path is a library, or a folder with one. A folder of `odyssey build --output` is checked
    against its manifest. Raises BuildError if there is no library, or the check fails.
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
            f"`odyssey build --output DIR{f' --target {accelerator}' if accelerator else ''}`, or "
            "unset ODYSSEY_KERNELS to compile the kernels"
        )
    return path


def _print_live(line: str) -> None:
    """Prints a line on the terminal that the next line overwrites."""
    print(f"\r{line:<{LIVE_COLUMNS}}", end="\r", file=sys.stderr, flush=True)


def _print_line(line: str) -> None:
    """Prints a line for the user on standard error."""
    print(f"odyssey: {line}", file=sys.stderr, flush=True)
