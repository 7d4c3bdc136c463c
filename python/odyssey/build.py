"""Compiles the Mojo kernels into one shared library, once, and says where it is.

What it is: the way from `mojo/` and `shared/` (the sources) to `libodyssey.so` in the user's cache. The cache key is
the sources, the compiler's version, the target CPU, the flags and the platform, so a changed kernel is a new entry and
nothing is ever out of date. Processes that start together compile once. What it is not: the loader. Nothing here opens
the library; see `odyssey.native`.

    <cache>/kernels/<key>/libodyssey.so     the library
    <cache>/kernels/<key>/build.json        what it was built from
    <cache>/kernels/<key>.lock              held while compiling; names the process that does
    <cache>/kernels/<key>.tmp-*             a build that is going on, or was killed: the next builder removes it

Environment: `ODYSSEY_KERNELS` (a prebuilt library, or the directory it is in), `ODYSSEY_CACHE_DIR`,
`ODYSSEY_TARGET_CPU`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from odyssey import launcher
from odyssey.errors import BuildError, OutputError
from odyssey.watch import slot

LIBRARY = "libodyssey.so"
ROOT_SOURCE = Path("mojo") / "capi.mojo"
SOURCE_DIRS = ("mojo", "shared")
FLAGS: tuple[str, ...] = ()  # more options for `mojo build`; part of the key

# What the kernels need at run time, and what those need in turn. A loader opens the first two with RTLD_GLOBAL;
# they find the others beside them.
_RUNTIME = ("KGENCompilerRTShared", "AsyncRTMojoBindings")
_RUNTIME_NEEDS = ("MSupportGlobals", "AsyncRTRuntimeGlobals")

# The kernels are checked against these: (triple or None for this machine's, CPU).
TARGETS: tuple[tuple[str, str], ...] = (
    ("x86_64-unknown-linux-gnu", "x86-64"),
    ("x86_64-unknown-linux-gnu", "x86-64-v3"),
    ("x86_64-unknown-linux-gnu", "x86-64-v4"),
    ("x86_64-unknown-linux-gnu", "x86-64-v4+avx512bf16"),
    ("aarch64-unknown-linux-gnu", "generic"),
)

_WAIT_NOTICE_S = 2.0
_STDERR_LINES = 40


def library_path() -> Path:
    """The compiled kernels: the prebuilt library that was named, the cached one, or a new one compiled now."""
    named = os.environ.get("ODYSSEY_KERNELS")
    if named:
        return _prebuilt(Path(named))
    return cached_library()


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
    places += [root / "lib" for root in _sdk_roots()]
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


def source_hash(root: Path) -> str:
    """SHA-256 over the names and the bytes of every Mojo file under `mojo/` and `shared/`."""
    digest = hashlib.sha256()
    for top in SOURCE_DIRS:
        for path in sorted((root / top).rglob("*.mojo")):
            name, data = path.relative_to(root).as_posix().encode(), path.read_bytes()
            digest.update(b"%d %d\n" % (len(name), len(data)))
            digest.update(name)
            digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Plan:
    """Everything the library depends on."""

    sources: str  # source_hash
    compiler: str
    cpu: str
    flags: tuple[str, ...]
    system: str

    @property
    def key(self) -> str:
        """The name of the cache entry."""
        text = json.dumps([self.sources, self.compiler, self.cpu, self.flags, self.system])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(root: Path, target_cpu: str | None = None) -> Plan:
    """What would be compiled from `root` on this machine."""
    return Plan(
        sources=source_hash(root),
        compiler=compiler_version(),
        cpu=target_cpu or os.environ.get("ODYSSEY_TARGET_CPU") or host_cpu(),
        flags=FLAGS,
        system=f"{sys.platform}-{platform.machine()}",
    )


# -- the target CPU ---------------------------------------------------------------------------------------------------

# The features of the x86-64 levels, as /proc/cpuinfo spells them (abm: lzcnt).
_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())


def host_cpu() -> str:
    """The target for this machine, from what the CPU can do. The compiler guesses from the model number instead,
    which is wrong on virtual machines. A target is a CPU of the compiler, and single features after it: `x86-64-v4`
    alone has no bf16 instructions."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return x86_level(_cpuinfo_flags())
    return "apple-m1" if sys.platform == "darwin" else "generic"


def x86_level(features: frozenset[str]) -> str:
    """The highest x86-64 level whose features are all there, and the bf16 products if they are."""
    if features >= _V4:
        return "x86-64-v4+avx512bf16" if "avx512_bf16" in features else "x86-64-v4"
    if features >= _V3:
        return "x86-64-v3"
    return "x86-64"


def target_options(target: str) -> list[str]:
    """The compiler's options for a target such as "x86-64-v4+avx512bf16"."""
    cpu, *features = target.split("+")
    options = ["--target-cpu", cpu]
    return [*options, "--target-features", ",".join(f"+{name}" for name in features)] if features else options


def _cpuinfo_flags() -> frozenset[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


# -- the compiler -----------------------------------------------------------------------------------------------------


def _mojo_package() -> Path | None:
    """The directory of the installed `mojo` package. It has no `__init__`, so a folder called `mojo` in the current
    directory may stand before it on the path: only the one with the entry points counts."""
    spec = importlib.util.find_spec("mojo")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if os.path.isfile(os.path.join(place, "_entrypoints.py")):
            return Path(place)
    return None


def _sdk_roots() -> list[Path]:
    """Where the compiler's `bin/` and `lib/` may be: in the wheel, or in a conda environment."""
    package = _mojo_package()
    if package is None:
        return []
    site = package.resolve().parent
    return [site / "modular", *site.parents[2:3]]


def compiler_version() -> str:
    """The version of the installed compiler, from the name of its metadata directory: importing
    `importlib.metadata` would take longer than all the rest of a start with a warm cache."""
    package = _mojo_package()
    if package is not None:
        for path in package.parent.glob("mojo_compiler-*.dist-info"):
            return path.name[len("mojo_compiler-") : -len(".dist-info")]
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("mojo-compiler")
    found = shutil.which("mojo")
    if found is None:
        return "none"
    info = os.stat(found)
    return f"{found}-{info.st_size}-{info.st_mtime_ns}"


def _mojo_command() -> list[str]:
    """How to start the compiler: the one of this Python environment, else the one on PATH."""
    if _mojo_package() is not None:
        start = "import sys; sys.argv[0] = 'mojo'; from mojo._entrypoints import exec_mojo; exec_mojo()"
        return [sys.executable, "-c", start]
    beside = Path(sys.executable).parent / "mojo"
    found = str(beside) if beside.is_file() else shutil.which("mojo")
    if found is None:
        raise BuildError(
            "[build] the Mojo compiler is not installed in this environment; install the package `max`, "
            "or name a prebuilt library with ODYSSEY_KERNELS"
        )
    return [found]


def run_mojo(arguments: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the Mojo compiler with these arguments and captures what it prints. Raises BuildError if there is none."""
    quiet = {"MODULAR_CRASH_REPORTING_ENABLED": "false", "MODULAR_TELEMETRY_ENABLED": "false"}
    return subprocess.run(
        [*_mojo_command(), *arguments],
        cwd=cwd,
        env={**os.environ, **quiet},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )


def _compile(root: Path, output: Path, cpu: str, emit: str = "shared-lib", triple: str | None = None) -> None:
    """One call of the compiler; BuildError with what it said when it fails."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise BuildError(
            "[build] no C compiler (cc, gcc or clang) is on PATH, and the kernels are linked with one; install it "
            "(`apt-get install gcc`, `dnf install gcc`, `conda install c-compiler`, `xcode-select --install`), "
            "or name a prebuilt library with ODYSSEY_KERNELS"
        )
    command = ["build", "--emit", emit, str(root / ROOT_SOURCE), "-I", str(root / "mojo"), "-I", str(root)]
    command += [*target_options(cpu), *(["--target-triple", triple] if triple else []), *FLAGS, "-o", str(output)]
    done = run_mojo(command, cwd=output.parent)
    if done.returncode == 0 and output.is_file():
        return
    said = done.stderr.strip() or done.stdout.strip() or f"nothing, exit code {done.returncode}"
    if "unknown target CPU" in said:
        raise BuildError(_unknown_cpu(cpu, triple))
    raise BuildError(f"[build] the kernels did not compile for {cpu} (mojo {compiler_version()}):\n{_trim(said)}")


def _trim(text: str) -> str:
    """From the first error on, at most 40 lines; the last line of a long list of notes is kept, it has the reason."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if "error:" in line), 0)
    lines = lines[first:]
    if len(lines) > _STDERR_LINES:
        tail = 9
        head = _STDERR_LINES - tail - 1
        lines = [*lines[:head], f"... {len(lines) - head - tail} lines left out ...", *lines[-tail:]]
    return "\n".join(lines)


def _unknown_cpu(cpu: str, triple: str | None) -> str:
    import difflib

    native = "arm64-apple-darwin" if sys.platform == "darwin" else f"{platform.machine()}-unknown-linux-gnu"
    listed = run_mojo(["build", "--print-supported-cpus", "--target-triple", triple or native])
    names = [line.strip() for line in listed.stdout.splitlines() if line.startswith("  ")]
    near = difflib.get_close_matches(cpu, names, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names[:12])}, ..."
    source = "ODYSSEY_TARGET_CPU or --target-cpu"
    return f"[build] the compiler knows no target CPU '{cpu}' ({source}); {hint}"


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


def cached() -> Path | None:
    """The library for this machine if it has been compiled already."""
    return _complete(cache_dir(), plan(source_root()))


def cached_library(target_cpu: str | None = None) -> Path:
    """The library for this machine (or `target_cpu`) from the cache; compiled first when it is not there."""
    root = source_root()
    what = plan(root, target_cpu)
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
        if recorded["bytes"] == os.stat(entry / LIBRARY).st_size:
            return entry / LIBRARY
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
        _say(f"compiling the kernels for {what.cpu}, once (up to a minute) ...")
        start = time.perf_counter()
        _compile(root, directory / LIBRARY, what.cpu)
        seconds = time.perf_counter() - start
        record = {
            "compiler": what.compiler,
            "cpu": what.cpu,
            "flags": list(what.flags),
            "system": what.system,
            "source_sha256": what.sources,
            "bytes": (directory / LIBRARY).stat().st_size,
            "seconds": round(seconds, 1),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        (directory / "build.json").write_text(json.dumps(record, indent=1) + "\n")
        for name in (LIBRARY, "build.json"):
            _fsync(directory / name)
        if entry.exists():  # not complete, or it would have been used
            shutil.rmtree(entry, ignore_errors=True)
        try:
            os.rename(directory, entry)
        except OSError:
            if _complete(kernels.parent, what) is None:  # else, where locks do not work, another process was faster
                raise
        _say(f"compiling the kernels ... done in {seconds:.0f} s")
        return entry / LIBRARY
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


# -- prebuilt libraries and `odyssey build` ---------------------------------------------------------------------------


def _prebuilt(named: Path) -> Path:
    path = named.absolute()
    if path.is_dir():
        path = path / LIBRARY
    if not path.is_file():
        raise BuildError(
            f"[build] ODYSSEY_KERNELS={named}, but there is no file {path}; "
            "make it with `odyssey build --output DIR`, or unset ODYSSEY_KERNELS to compile the kernels here"
        )
    return path


def build(output: Path | None = None, target_cpu: str | None = None) -> Path:
    """Compile into the cache unless it is there; with `output`, put a copy and the run-time libraries there, so that
    `ODYSSEY_KERNELS=output` works on a machine without the compiler. Returns the library's path."""
    library = cached_library(target_cpu)
    if output is None:
        return library
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    runtime = runtime_libraries()
    needs = [runtime[0].parent / f"lib{stem}{suffix}" for stem in _RUNTIME_NEEDS]
    try:
        (output / "lib").mkdir(parents=True, exist_ok=True)
        for path in [*runtime, *(path for path in needs if path.is_file())]:
            _copy(path, output / "lib" / path.name)
        _copy(library.parent / "build.json", output / "build.json")
        _copy(library, output / LIBRARY)
    except OSError as problem:
        raise OutputError(
            f"[build] {output} cannot be written: {problem.strerror}; choose another --output"
        ) from problem
    return output / LIBRARY


def check_targets(report: Callable[[str], None]) -> int:
    """Compile the kernels to object files for every CPU of `TARGETS`, one reported line each; how many failed."""
    root = source_root()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="odyssey-targets-") as directory:
        for number, (triple, cpu) in enumerate(TARGETS):
            architecture = triple.partition("-")[0]
            name = cpu if cpu.startswith("x86") else f"{architecture} {cpu}"
            output = Path(directory) / f"{number}.o"
            start = time.perf_counter()
            try:
                _compile(root, output, cpu, emit="object", triple=triple)
            except BuildError as error:
                failures += 1
                report(f"{name:<22} failed: {error}")
            else:
                seconds, size = time.perf_counter() - start, output.stat().st_size
                report(f"{name:<22} {seconds:6.1f} s  {size / 1024:8.0f} KiB")
    return failures


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


def _copy(source: Path, target: Path) -> None:
    """Copy aside, then rename, so that a process that has the old file open keeps it."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(source, aside)
        os.chmod(aside, 0o777 & ~_umask())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
