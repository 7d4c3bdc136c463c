"""Compiles the Mojo kernels into shared libraries, once, and says where they are.

What it is: the way from `mojo/` and `shared/` (the sources) to `libodyssey.so`, and to `libodyssey-sm_90.so` for a kind
of GPU, in the user's cache. The cache key is the sources, the compiler's version, the target, the flags and the
platform, so a changed kernel is a new entry and nothing is ever out of date. Processes that start together compile
once. What it is not: the loader. Nothing here opens a library; see `odyssey.native`. How the compiler is run:
compiler.py; folders for machines without it: folder.py.

    <cache>/kernels/<key>/libodyssey.so     the library
    <cache>/kernels/<key>/build.json        what it was built from
    <cache>/kernels/<key>.lock              held while compiling; names the process that does
    <cache>/kernels/<key>.tmp-*             a build that is going on, or was killed: the next builder removes it

Environment: `ODYSSEY_KERNELS` (a prebuilt library, or the directory it is in), `ODYSSEY_CACHE_DIR`,
`ODYSSEY_TARGET_CPU`, `ODYSSEY_TARGET_ACCELERATOR`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from odyssey import compiler, folder, launcher
from odyssey.compiler import compiler_version, host_cpu, run_mojo, target_options
from odyssey.errors import BuildError, DeviceError
from odyssey.watch import slot

__all__ = [
    "cache_dir",
    "cached",
    "cached_library",
    "compiler_version",
    "gpu_library_path",
    "host_cpu",
    "library_path",
    "run_mojo",
    "runtime_libraries",
    "source_hash",
    "source_root",
    "target_options",
]

LIBRARY = folder.library_name(None)
ROOT_SOURCE = Path("mojo") / "capi.mojo"
GPU_ROOT_SOURCE = Path("mojo") / "gpu_capi.mojo"
SOURCE_DIRS = ("mojo", "shared")
FLAGS: tuple[str, ...] = ()  # more options for `mojo build`; part of the key

# What the kernels need at run time. A loader opens these with RTLD_GLOBAL; they find those that they need beside them.
_RUNTIME = ("KGENCompilerRTShared", "AsyncRTMojoBindings")

_WAIT_NOTICE_S = 2.0


def library_path() -> Path:
    """The compiled kernels: the prebuilt library that was named, the cached one, or a new one compiled now."""
    named = os.environ.get("ODYSSEY_KERNELS")
    if named:
        return _prebuilt(Path(named))
    return cached_library()


def gpu_library_path(accelerator: str | None = None) -> Path:
    """The kernels for a kind of GPU, found as `library_path` finds those for the CPU.

    Args:
        accelerator: such as "sm_90"; None: what gpus.accelerator() says of this machine.

    Raises:
        DeviceError: None, and there is no GPU; or no name. BuildError: they cannot be compiled, or the prebuilt ones
            are for other GPUs.
    """
    name = _accelerator(accelerator)
    named = os.environ.get("ODYSSEY_KERNELS")
    return _prebuilt(Path(named), name) if named else cached_library(accelerator=name)


def _accelerator(name: str | None) -> str:
    from odyssey import gpus

    found = gpus.accelerator() if name is None else gpus.canonical(name, "the accelerator")
    if found is None:
        raise DeviceError(
            "[build] this machine has no GPU to compile for; set ODYSSEY_TARGET_ACCELERATOR, say to sm_90"
        )
    return found


def runtime_libraries() -> list[Path]:
    """The run-time libraries of the compiler, in loading order, as absolute paths.

    They come with the compiler; with `ODYSSEY_KERNELS` the ones beside the prebuilt library go first.
    """
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    places = []
    named = os.environ.get("ODYSSEY_KERNELS")
    if named:
        path = Path(named).absolute()
        directory = path if path.is_dir() else path.parent
        places += [directory, directory / "lib"]
    places += [root / "lib" for root in compiler.sdk_roots()]
    found = []
    for stem in _RUNTIME:
        name = f"lib{stem}{suffix}"
        for place in places:
            if (place / name).is_file():
                found.append(place / name)
                break
        else:
            where = ", ".join(map(str, places)) or "no installed compiler"
            raise BuildError(
                f"[build] {name} is in none of: {where}; install the package `max`, or put it beside the library"
            )
    return found


# -- what is compiled -----------------------------------------------------------------------------------------------


def source_root() -> Path:
    """The directory that holds `mojo/` and `shared/`: inside an installed wheel, else the checkout."""
    package = Path(__file__).resolve().parent
    for root in (package / "_mojo", package.parents[1]):
        if (root / ROOT_SOURCE).is_file():
            return root
    raise BuildError(
        f"[build] the kernel sources ({ROOT_SOURCE}) are neither in {package / '_mojo'} nor in {package.parents[1]}; "
        "install odyssey again, or name a prebuilt library with ODYSSEY_KERNELS"
    )


def source_hash(root: Path, gpu: bool = True) -> str:
    """SHA-256 over the names and the bytes of every Mojo file under `mojo/` and `shared/`; gpu False: without those
    that are for GPUs alone, a folder `gpu` and files `gpu_*`, which the library for the CPU does not import."""
    digest = hashlib.sha256()
    for top in SOURCE_DIRS:
        for path in sorted((root / top).rglob("*.mojo")):
            relative = path.relative_to(root).as_posix()
            if not gpu and for_gpus(relative):
                continue
            name, data = relative.encode(), path.read_bytes()
            digest.update(b"%d %d\n" % (len(name), len(data)))
            digest.update(name)
            digest.update(data)
    return digest.hexdigest()


def for_gpus(name: str) -> bool:
    """Whether a source such as "mojo/kernels/gpu/pool.mojo" is for GPUs alone, by its name."""
    return re.search(r"/gpu[/_.]", f"/{name}") is not None


@dataclass(frozen=True)
class Plan:
    """Everything a library depends on."""

    sources: str  # source_hash
    compiler: str
    cpu: str
    flags: tuple[str, ...]
    system: str
    accelerator: str | None = None  # of the kernels for GPUs

    @property
    def key(self) -> str:
        """The name of the cache entry."""
        parts = [self.sources, self.compiler, self.cpu, self.flags, self.system]
        text = json.dumps([*parts, self.accelerator] if self.accelerator else parts)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def library(self) -> str:
        """The name of the file."""
        return folder.library_name(self.accelerator)


def plan(root: Path, target_cpu: str | None = None, accelerator: str | None = None) -> Plan:
    """What would be compiled from `root` on this machine. A library for GPUs only starts work on the CPU: unless told
    otherwise it is for all CPUs of this kind, and one file serves all."""
    own = compiler.portable_cpu() if accelerator else os.environ.get("ODYSSEY_TARGET_CPU") or host_cpu()
    return Plan(
        sources=source_hash(root, gpu=accelerator is not None),
        compiler=compiler_version(),
        cpu=target_cpu or own,
        flags=FLAGS,
        system=folder.system(),
        accelerator=accelerator,
    )


# -- the cache --------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """`$ODYSSEY_CACHE_DIR`, else `$XDG_CACHE_HOME/odyssey`, else `~/.cache/odyssey`."""
    own = os.environ.get("ODYSSEY_CACHE_DIR")
    if own:
        return Path(own).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "odyssey"
    return Path(os.path.expanduser("~")).absolute() / ".cache" / "odyssey"


def cached(accelerator: str | None = None) -> Path | None:
    """The library for this machine, or that of an accelerator, if it has been compiled already."""
    return _complete(cache_dir(), plan(source_root(), accelerator=accelerator))


def cached_library(target_cpu: str | None = None, accelerator: str | None = None) -> Path:
    """The library for this machine (or `target_cpu`), or that of an accelerator, from the cache; compiled first when it
    is not there."""
    root = source_root()
    what = plan(root, target_cpu, accelerator)
    cache = cache_dir()
    if (entry := _complete(cache, what)) is not None:
        return entry
    try:
        _make_writable(cache / "kernels")
    except OSError as problem:
        reason = problem.strerror or problem
        fallback = _temporary_cache(cache)
        if (entry := _complete(fallback, what)) is not None:
            return entry
        _say(f"{cache} cannot be written ({reason}); the kernels are kept in {fallback}")
        cache = fallback
        (cache / "kernels").mkdir(exist_ok=True)
    return _build_once(root, what, cache)


def _complete(cache: Path, what: Plan) -> Path | None:
    """The library of this entry, if it is there with the size that was recorded."""
    entry = cache / "kernels" / what.key
    try:
        recorded = json.loads((entry / "build.json").read_bytes())
        if recorded["bytes"] == os.stat(entry / what.library).st_size:
            return entry / what.library
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _make_writable(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def _temporary_cache(instead_of: Path) -> Path:
    """A directory of this user alone under the system's temporary one. Others can write there, so nothing that
    somebody else may have put in place is used: code is loaded from it."""
    path = Path(tempfile.gettempdir()) / f"odyssey-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise BuildError(
                f"[build] {instead_of} cannot be written, and {path} is not this user's alone (mode 0700); "
                "set ODYSSEY_CACHE_DIR to a directory that can be written"
            )
        _make_writable(path / "kernels")
    except OSError as problem:
        raise BuildError(
            f"[build] neither {instead_of} nor {path} can be written ({problem.strerror}); "
            "set ODYSSEY_CACHE_DIR to a directory that can be written"
        ) from problem
    return path


def _build_once(root: Path, what: Plan, cache: Path) -> Path:
    """Compile into the entry unless another process has just done so. Whoever waited for a build that failed gets
    the same error instead of compiling the same sources again."""
    before = slot.phase("compile")
    try:
        return _build_alone(root, what, cache)
    finally:
        slot.phase(before)


def _build_alone(root: Path, what: Plan, cache: Path) -> Path:
    kernels = cache / "kernels"
    with _locked(kernels / f"{what.key}.lock") as (lock, waited):
        if (entry := _complete(cache, what)) is not None:
            return entry
        failed = _read_lock(lock).get("failed") if waited else None
        if failed:
            raise BuildError(failed)
        for stale in kernels.glob(f"{what.key}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        _write_lock(lock, {"pid": os.getpid(), "host": platform.node()})
        try:
            return _build(root, what, kernels)
        except BuildError as error:
            _write_lock(lock, {"pid": os.getpid(), "host": platform.node(), "failed": str(error)})
            raise


def _build(root: Path, what: Plan, kernels: Path) -> Path:
    """Compile beside the entry, then rename: an entry is there whole or not at all."""
    directory = Path(tempfile.mkdtemp(prefix=f"{what.key}.tmp-", dir=kernels))
    entry = kernels / what.key
    try:
        os.chmod(directory, 0o777 & ~_umask())
        if what.accelerator:
            compiler.check_accelerator(what.accelerator)
        target, up_to = (what.accelerator, "some minutes") if what.accelerator else (what.cpu, "a minute")
        _say(f"compiling the kernels for {target}, once (up to {up_to}) ...")
        start = time.perf_counter()
        source, library = (GPU_ROOT_SOURCE if what.accelerator else ROOT_SOURCE), directory / what.library
        compiler.compile_kernels(root, source, library, what.cpu, accelerator=what.accelerator, flags=what.flags)
        seconds = time.perf_counter() - start
        record = {
            "compiler": what.compiler,
            "cpu": what.cpu,
            **({"accelerator": what.accelerator} if what.accelerator else {}),
            "flags": list(what.flags),
            "system": what.system,
            "source_sha256": what.sources,
            "bytes": library.stat().st_size,
            "seconds": round(seconds, 1),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        (directory / "build.json").write_text(json.dumps(record, indent=1) + "\n")
        for name in (what.library, "build.json"):
            _fsync(directory / name)
        if entry.exists():  # not complete, or it would have been used
            shutil.rmtree(entry, ignore_errors=True)
        try:
            os.rename(directory, entry)
        except OSError:
            if _complete(kernels.parent, what) is None:  # else, where locks do not work, another process was faster
                raise
        _say(f"compiling the kernels ... done in {seconds:.0f} s")
        return entry / what.library
    except OSError as problem:
        raise BuildError(f"[build] {entry} cannot be written: {problem}; set ODYSSEY_CACHE_DIR") from problem
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# -- the lock ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[int, bool]]:
    """Hold the lock file; yields it and whether another process had it first. The kernel lets go of the lock of a
    process that dies, so nothing stays locked. On a file system without locks everybody compiles for himself."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    waited = False
    try:
        start = time.monotonic()
        said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = True
            except OSError:
                break
            if not said and time.monotonic() - start > _WAIT_NOTICE_S:
                said = True
                owner = _read_lock(lock)
                if launcher.rank() in (None, 0):
                    _say(f"waiting for process {owner.get('pid', '?')} to compile the kernels")
            time.sleep(0.05)
        yield lock, waited
    finally:
        os.close(lock)


def _read_lock(lock: int) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        data = json.loads(os.pread(lock, 1 << 16, 0))
        if isinstance(data, dict):
            return data
    return {}


def _write_lock(lock: int, record: dict[str, object]) -> None:
    data = json.dumps(record).encode()
    os.ftruncate(lock, 0)
    os.pwrite(lock, data[: 1 << 16], 0)


# -- prebuilt libraries -----------------------------------------------------------------------------------------------


def _prebuilt(named: Path, accelerator: str | None = None) -> Path:
    """A library that ODYSSEY_KERNELS names. Of a folder that `odyssey build --output` made everything is checked; of
    a library by itself nothing is known."""
    path = named.absolute()
    home = path if path.is_dir() else path.parent
    if folder.is_folder(home):
        sources = None
        with contextlib.suppress(BuildError):
            sources = source_hash(source_root())
        return folder.library(home, accelerator, sources)
    if accelerator:
        path = home / folder.library_name(accelerator)
    elif path.is_dir():
        path = path / LIBRARY
    if not path.is_file():
        raise BuildError(
            f"[build] ODYSSEY_KERNELS={named}, but there is no file {path}; make it with `odyssey build --output DIR"
            f"{f' --target {accelerator}' if accelerator else ''}`, or unset ODYSSEY_KERNELS to compile the kernels"
        )
    return path


# -- small things -----------------------------------------------------------------------------------------------------


def _say(line: str) -> None:
    print(f"odyssey: {line}", file=sys.stderr, flush=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
