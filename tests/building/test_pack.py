"""Folders for machines without the compiler: what is in one, when it is refused, and that it
trains.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import emulated

import odyssey
from odyssey.compile import compiler, folder, gpus, pack
from odyssey.compile import library as build
from odyssey.errors import BuildError, DeviceError, OutputError

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import wheel_kernels  # noqa: E402

LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="run-time libraries as they are on Linux"
)


@pytest.fixture
def made(tree, tmp_path):
    pack.pack(tmp_path / "out")
    return tmp_path / "out"


def edit(home: Path, **changes: object) -> None:
    value = json.loads((home / folder.MANIFEST).read_text())
    (home / folder.MANIFEST).write_text(json.dumps({**value, **changes}))


# -- making one ------------------------------------------------------------------------------------


@LINUX
def test_what_is_in_a_folder(made, tree):
    home, manifest = made, folder.read(made)
    assert manifest.accelerators == () and manifest.cpu == compiler.portable_cpu()
    assert manifest.system == folder.system() and manifest.odyssey == odyssey.__version__
    assert manifest.sources == build.source_hash(tree)
    assert (2, 14) <= manifest.glibc < (3,)
    there = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
    assert there == {*manifest.files, folder.MANIFEST} and len(there) > 100
    assert {name for name in there if name.startswith("lib/")} == {
        f"lib/lib{stem}.so"
        for stem in (
            "KGENCompilerRTShared",
            "AsyncRTMojoBindings",
            "MSupportGlobals",
            "AsyncRTRuntimeGlobals",
        )
    }
    assert {
        "odyssey",
        "libodyssey.so",
        "python/odyssey/nn/layers.py",
        "python/odyssey/_mojo/mojo/capi.mojo",
    } <= there
    assert "python/odyssey/data/mnist/train-images-idx3-ubyte.gz" in there
    assert not [name for name in there if name.endswith(".pyc") or name.startswith("site/")]
    assert os.access(home / "odyssey", os.X_OK)
    folder.verify(home, manifest, manifest.files)
    assert sum(size for size, _ in manifest.files.values()) < 20 << 20


def test_one_is_made_again_and_nothing_is_left_beside_it(made, tree, tmp_path):
    before = (made / "libodyssey.so").stat().st_ino
    with open(made / "libodyssey.so", "rb") as kept:
        (tree / "mojo" / "capi.mojo").write_text(
            (tree / "mojo" / "capi.mojo").read_text().replace("42", "43")
        )
        again = pack.pack(tmp_path / "out")
        assert again == folder.read(made)
        assert kept.read(4) == b"\x7fELF"
    assert (made / "libodyssey.so").stat().st_ino != before
    assert again.sources == build.source_hash(tree)
    (made / "python" / "odyssey" / "__pycache__").mkdir()
    pack.pack(tmp_path / "out")  # what Python writes itself counts for nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out", "sources", "tmp"]


@pytest.mark.parametrize(
    "what", ["a file", "no folder of ours", "more in it", "no directory", "not to be made"]
)
def test_what_is_there_is_not_lost(tree, tmp_path, made, what):
    output = tmp_path / "out"
    if what == "a file":
        output = tmp_path / "file"
        output.write_text("x")
    elif what == "no folder of ours":
        output = tmp_path / "other"
        (output / "run").mkdir(parents=True)
        (output / "run" / "weights").write_text("x")
    elif what == "more in it":
        (output / "weights").write_text("x")
    elif what == "no directory":
        (tmp_path / "file").write_text("x")
        output = tmp_path / "file" / "out"
    else:
        (output / folder.MANIFEST).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        OutputError,
        match=r"\[build\] .* (is refused: .*|cannot be written: .*); choose another --output",
    ):
        pack.pack(output)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_is_used_and_a_failure_leaves_nothing(tree, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(
        pack, "_package", lambda target: (_ for _ in ()).throw(OSError(28, "no space left"))
    )
    with pytest.raises(OutputError, match="cannot be written: no space left"):
        pack.pack(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out", "sources", "tmp"]
    monkeypatch.undo()


def test_the_glibc_that_a_library_needs():
    assert pack.newest_glibc(
        b"x\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBCXX_3.4.30\0GLIBC_2.40"
    ) == (2, 34)
    assert pack.newest_glibc(b"NONE_2.14") == ()


# -- those of a wheel ------------------------------------------------------------------------------


@pytest.fixture
def shipped(tree, tmp_path, monkeypatch):
    """Kernels for this CPU, as a wheel brings them."""
    monkeypatch.setitem(wheel_kernels.SHIPPED, folder.system(), (compiler.host_cpu(),))
    wheel_kernels.ship(tmp_path / "shipped", folder.system())
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "shipped" / compiler.host_cpu() / build.LIBRARY


@LINUX
def test_kernels_of_a_wheel_are_used_and_nothing_is_compiled(
    shipped, entries, tmp_path, monkeypatch
):
    wheel_kernels.ship(tmp_path / "again", folder.system())
    assert (
        tmp_path / "again" / shipped.parent.name / build.LIBRARY
    ).read_bytes() == shipped.read_bytes()
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.library_path() == build.cached() == build.cached_library() == shipped
    assert ctypes.CDLL(str(shipped)).od_answer() == 42
    assert entries() == [] and not (tmp_path / "cache").exists()
    assert str(tmp_path).encode() not in shipped.read_bytes()


@LINUX
@pytest.mark.parametrize("what", ["other sources", "other CPU", "other compiler", "damaged"])
def test_kernels_of_a_wheel_that_are_not_for_this(shipped, tree, entries, monkeypatch, capfd, what):
    if what == "other sources":
        (tree / "mojo" / "capi.mojo").write_text(
            (tree / "mojo" / "capi.mojo").read_text().replace("42", "43")
        )
    elif what == "other CPU":
        monkeypatch.setenv(
            "ODYSSEY_TARGET_CPU", "cortex-a72" if shipped.parent.name == "generic" else "x86-64"
        )
    elif what == "other compiler":
        edit(shipped.parent, compiler="0.0.1")
    else:
        shipped.write_bytes(shipped.read_bytes()[:-1] + b"x")
    assert build.library_path() != shipped and len(entries()) == 1
    assert ctypes.CDLL(str(build.library_path())).od_answer() == (
        43 if what == "other sources" else 42
    )
    assert ("does not match its SHA-256" in capfd.readouterr().err) == (what == "damaged")


# -- using one -------------------------------------------------------------------------------------


def used(home: Path, accelerator: str | None = None) -> Path:
    return folder.library(home, accelerator, None)


def refusal(home: Path, accelerator: str | None = None, sources: str | None = None) -> str:
    with pytest.raises(BuildError) as caught:
        folder.library(home, accelerator, sources)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"[build] {home} is refused: ")
    return str(caught.value).partition("is refused: ")[2]


def test_the_environment_names_a_folder(made, monkeypatch, tree):
    for named in (made, made / "libodyssey.so"):
        monkeypatch.setenv("ODYSSEY_KERNELS", str(named))
        assert build.library_path() == made / "libodyssey.so"
        if sys.platform.startswith("linux"):
            assert [path.parent for path in build.runtime_libraries()] == [made / "lib"] * 2
    (tree / "mojo" / "more.mojo").write_text("# other sources\n")
    with pytest.raises(
        BuildError,
        match=r"other kernel sources than the odyssey that runs; start .*/out/odyssey, or",
    ):
        build.library_path()


def test_altered_files(made):
    name = next(name for name in folder.read(made).files if name.startswith("lib/"))
    whole = (made / name).read_bytes()
    (made / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert (
        refusal(made)
        == f"{name} does not match its SHA-256; copy the folder again, or build it again"
    )
    (made / name).write_bytes(whole[:-1])
    assert refusal(made).startswith(f"{name} has not the {len(whole)} bytes that it had; copy")
    (made / name).unlink()
    assert refusal(made).startswith(f"{name} cannot be read: No such file")
    (made / name).write_bytes(whole)
    assert used(made) == made / "libodyssey.so"


def test_the_wrong_machine(made, monkeypatch):
    assert refusal(made, sources="0" * 64).startswith(
        f"it is of odyssey {odyssey.__version__} with other kernel"
    )
    assert (
        refusal(made, "sm_90") == "it is for no GPU, not for sm_90; build one with --target sm_90"
    )
    cpu = folder.read(made).cpu
    monkeypatch.setattr(
        compiler, "lacking", lambda target: ["avx2", "fma"] if target == cpu else []
    )
    monkeypatch.setattr(compiler, "host_cpu", lambda: "x86-64")
    wrong = f"it is for {cpu}, and this CPU has no avx2, fma; build one with --target-cpu x86-64"
    assert refusal(made) == wrong
    monkeypatch.undo()
    edit(made, glibc="99.1")
    if sys.platform.startswith("linux"):
        assert re.match(
            r"it needs glibc 99.1 and this system has 2\.\d+; use a newer system", refusal(made)
        )
    edit(made, system="plan9-vax", glibc="2.1")
    assert refusal(made).startswith(
        f"it is for plan9-vax, and this is {folder.system()}; build one on such"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []},
        {"files": {"../x": {"bytes": 1, "sha256": ""}}},
        {"files": {"/x": {"bytes": 1, "sha256": ""}}},
        {"files": {"x": {"bytes": "many", "sha256": ""}}},
        {"cpu": 5},
        {"glibc": "2.x"},
        {"accelerators": "sm_90"},
        {"format": True},
        {"accelerators": [None]},
        {"sources": None},
    ],
)
def test_manifests_that_are_none(tmp_path, changes):
    whole = {
        "format": 1,
        **dict.fromkeys(("odyssey", "compiler", "system", "cpu", "sources"), "x"),
        "accelerators": [],
        "glibc": "",
        "files": {},
    }
    (tmp_path / folder.MANIFEST).write_text(json.dumps(whole))
    assert folder.read(tmp_path).json() == whole
    edit(tmp_path, **changes)
    assert refusal(tmp_path).startswith("manifest.json is not one that `odyssey build` writes")


@pytest.mark.parametrize("text", ["", "[", "[]", "\udc00", "[" * 100_000, '{"format": 2}'])
def test_manifests_that_cannot_be_read(tmp_path, text):
    (tmp_path / folder.MANIFEST).write_text(
        text, errors="surrogateescape", encoding="utf-8"
    ) if text != "\udc00" else (tmp_path / folder.MANIFEST).write_bytes(b"\xff\xfe\x00")
    assert re.match(
        "manifest.json (cannot be read|is not one)|it has format 2, and 1 is read; build it again",
        refusal(tmp_path),
    )


# -- kernels for GPUs ------------------------------------------------------------------------------


def test_a_folder_for_two_kinds_of_gpus(gpu_tree, tmp_path, monkeypatch):
    pack.pack(made := tmp_path / "out", accelerators=["nvidia:sm_90a", "sm_80", "sm_90"])
    assert folder.read(made).accelerators == ("sm_90", "sm_80")
    monkeypatch.setenv("ODYSSEY_KERNELS", str(made))
    assert build.library_path() == made / "libodyssey.so"
    for name in ("sm_90", "sm_80"):
        assert build.gpu_library_path(name) == made / f"libodyssey-{name}.so"
        text = re.search(rb"\.target (\w+)", (made / f"libodyssey-{name}.so").read_bytes())
        assert text and text[1].decode().startswith(name)
    monkeypatch.setattr(gpus, "found", lambda: (gpus.GpuModel("B200", "sm_100"),))
    monkeypatch.delenv("ODYSSEY_TARGET_ACCELERATOR", raising=False)
    with pytest.raises(
        BuildError, match="it is for sm_90, sm_80, not for sm_100; build one with --target sm_100"
    ):
        build.gpu_library_path()
    whole = (made / "libodyssey-sm_80.so").read_bytes()
    (made / "libodyssey-sm_80.so").write_bytes(whole.replace(b".target", b".Target"))
    assert build.gpu_library_path("sm_90").exists() and build.library_path().exists()
    with pytest.raises(BuildError, match="libodyssey-sm_80.so does not match its SHA-256"):
        build.gpu_library_path("sm_80")
    with pytest.raises(DeviceError, match="names no accelerator"):
        pack.pack(tmp_path / "out", accelerators=["../sm_90"])


# -- on a machine without the compiler -------------------------------------------------------------

STEPS = ("train", "--steps", 6, "--global-batch-size", 128, "--no-eval", "--no-progress")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python with numpy and mpi4py, without mojo, max, click, rich, safetensors: (its
    interpreter, its folder).
    """
    home = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    python = home / "venv" / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('platlib'))"
    to = Path(
        subprocess.run(
            [python, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    for name in ("numpy", "mpi4py"):
        place = Path(importlib.util.find_spec(name).origin).parent
        for path in (
            place,
            place.with_name(f"{name}.libs"),
            *place.parent.glob(f"{name}-*.dist-info"),
        ):
            if path.exists():
                (to / path.name).symlink_to(path)
    # where mpi4py looks for the one of the package mpich
    for library in Path(sys.prefix, "lib").glob("*mpi*"):
        (home / "venv" / "lib" / library.name).symlink_to(library)
    for name in ("mojo", "max", "click", "rich", "safetensors"):
        done = subprocess.run(
            [python, "-c", f"import {name}"], capture_output=True, text=True, cwd=home
        )
        assert "ModuleNotFoundError" in done.stderr, name
    return python, home


def real(home: Path, name: str, *options: str) -> Path:
    """A folder as the command makes it, at another place than where it was made."""
    words = [
        sys.executable,
        "-m",
        "odyssey",
        "build",
        "--output",
        str(home / "here"),
        "--with-dependencies",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(odyssey.__file__).parents[1])}
    environment.pop("ODYSSEY_KERNELS", None)
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{home / 'here'}\n"
    said = re.search(r"^odyssey: ([\d.]+) MiB in \d+ files$", done.stderr, re.MULTILINE)
    print(said[0])
    assert 15 < float(said[1]) < 64
    shutil.move(home / "here", home / name)
    return home / name


@pytest.fixture(scope="module")
def elsewhere(bare):
    return real(bare[1], "there")


def started(
    bare,
    folder: Path,
    *words: object,
    mpirun: str | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The folder's launcher, with a Python that has no compiler, and `environment` besides."""
    python, home = bare
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "ODYSSEY_PYTHON": str(python),
        **{
            name: value
            for name, value in os.environ.items()
            if name.startswith("OMPI_ALLOW") or name == "TMPDIR"
        },
        **(environment or {}),
    }
    command = [*([mpirun, "-n", "2"] if mpirun else []), folder / "odyssey", *words]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, cwd=home
    )


@LINUX
def test_it_trains_without_the_compiler_to_the_bits_of_the_ordinary_install(
    bare, elsewhere, launch
):
    launch.environment["ODYSSEY_TARGET_CPU"] = compiler.portable_cpu()
    launch.environment.pop("ODYSSEY_KERNELS", None)
    ordinary = launch.python("-m", "odyssey", *STEPS, timeout=300)
    weights = re.search(r"weights ([0-9a-f]{16})", ordinary.stdout)
    assert weights, ordinary.stderr
    for mpirun in [None, *([] if launch.open_mpi else [launch.mpirun])]:
        done = started(bare, elsewhere, *STEPS, mpirun=mpirun)
        assert done.returncode == 0, done.stderr
        assert f"weights {weights[1]}" in done.stdout
        assert "compiling" not in done.stderr
    assert not list((bare[1] / ".cache").rglob("libodyssey*"))


@LINUX
def test_it_says_its_version_writes_weights_and_can_be_altered(bare, elsewhere, tmp_path):
    assert odyssey.__version__ in started(bare, elsewhere, "--version").stdout
    done = started(bare, elsewhere, *STEPS, "--save-weights", tmp_path / "w.safetensors")
    assert done.returncode == 0 and (tmp_path / "w.safetensors").stat().st_size > 100_000, (
        done.stderr
    )
    copy = tmp_path / "copy"
    shutil.copytree(elsewhere, copy)
    with open(copy / "python" / "odyssey" / "optim" / "optimizers.py", "a") as source:
        source.write("\n")
    done = started(bare, copy, *STEPS)
    assert done.returncode == 69
    lines = done.stderr.splitlines()
    assert (
        len(lines) == 1 and "is refused: python/odyssey/optim/optimizers.py has not the" in lines[0]
    )


@LINUX
def test_the_doctor_looks_at_all_of_a_folder(bare, elsewhere, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(elsewhere, copy)
    assert re.search(
        rf"ok +kernels +named by ODYSSEY_KERNELS, {copy}", started(bare, copy, "doctor").stdout
    )
    site = next((copy / "site" / "click").glob("*.py"))
    site.write_text(site.read_text().replace("def ", "def  ", 1))
    said = started(bare, copy, "doctor").stdout
    assert re.search(rf"fail +kernels .*site/click/{site.name} (has not|does not match)", said), (
        said
    )


@LINUX
@pytest.mark.skipif(
    emulated.compiler() is None, reason="the emulated GPU is compiled with a C compiler"
)
def test_a_folder_for_gpus_trains_on_one_without_the_compiler(bare, launch):
    """On the emulated GPU, to the bits of the ordinary install there; on the CPU where there is
    none.
    """
    home = real(bare[1], "gpus", "--target", "sm_90")
    assert folder.read(home).accelerators == ("sm_90",)
    gpu = (*STEPS, "--device", "gpu", "--num-gpus", 1, "--steps", 2, "--global-batch-size", 32)
    launch.environment = emulated.environment(base=launch.environment)
    launch.environment.pop("ODYSSEY_KERNELS", None)
    ordinary = launch.python("-m", "odyssey", *gpu, timeout=300)
    weights = re.search(r"weights ([0-9a-f]{16})", ordinary.stdout)
    assert weights, ordinary.stderr
    done = started(bare, home, *gpu, environment=emulated.environment(base={}))
    assert done.returncode == 0, done.stderr
    assert f"weights {weights[1]}" in done.stdout and "compiling" not in done.stderr

    other = started(bare, home, *gpu, environment=emulated.environment(base={}, cc=80))
    assert other.returncode == 69
    assert (
        "is refused: it is for sm_90, not for sm_80; build one with --target sm_80" in other.stderr
    )
    none = started(bare, home, *gpu)
    assert (none.returncode, none.stdout) == (69, "")
    assert "device is 'gpu' but this machine has none" in none.stderr
    assert started(bare, home, *STEPS).returncode == 0
