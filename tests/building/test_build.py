"""The kernel build: what is compiled, what is cached, what a user reads. Several processes: test_concurrency.py."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odyssey import build
from odyssey.errors import BuildError, OutputError


def test_first_use_compiles_and_the_second_does_not(tree, entries, capfd):
    path = build.library_path()
    assert ctypes.CDLL(str(path)).od_answer() == 42
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"odyssey: compiling the kernels for {build.host_cpu()}, once")
    assert lines[1].startswith("odyssey: compiling the kernels ... done in ")
    assert build.library_path() == path
    assert capfd.readouterr().err == ""
    assert entries() == [path.parent.name]

    record = json.loads((path.parent / "build.json").read_text())
    assert record["cpu"] == build.host_cpu()
    assert record["compiler"] == build.compiler_version()
    assert record["source_sha256"] == build.source_hash(tree)
    assert record["bytes"] == path.stat().st_size


def test_warm_path_takes_less_than_10_ms(tree):
    for number in range(40):
        (tree / "shared" / f"part{number}.mojo").write_text("# a line of a source file\n" * 400)
    build.library_path()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        build.library_path()
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.010


def test_key_follows_everything_that_matters(tree, monkeypatch):
    keys = [build.plan(tree).key]
    (tree / "shared" / "extra.mojo").write_text("# nothing\n")
    keys.append(build.plan(tree).key)
    (tree / "shared" / "extra.mojo").rename(tree / "shared" / "other.mojo")
    keys.append(build.plan(tree).key)
    keys.append(build.plan(tree, "x86-64").key)
    monkeypatch.setattr(build, "FLAGS", ("-D", "FAST"))
    keys.append(build.plan(tree).key)
    monkeypatch.setattr(build, "compiler_version", lambda: "0.0")
    keys.append(build.plan(tree).key)
    assert len(set(keys)) == len(keys)
    (tree / "mojo" / "README.md").write_text("not a source\n")
    assert build.plan(tree).key == keys[-1]


def test_compiler_version_is_the_installed_one():
    from importlib import metadata

    assert build.compiler_version() == metadata.version("mojo-compiler")


def test_a_folder_called_mojo_in_the_current_directory_is_not_the_compiler(tree, monkeypatch):
    monkeypatch.syspath_prepend(str(tree))
    assert build._mojo_package() != tree / "mojo"
    assert build.compiler_version() != "none"


def test_changed_source_is_compiled_again_and_the_old_entry_stays(tree, entries):
    old = build.library_path()
    source = tree / "mojo" / "capi.mojo"
    source.write_text(source.read_text().replace("42", "43"))
    new = build.library_path()
    assert new != old
    assert ctypes.CDLL(str(new)).od_answer() == 43
    assert len(entries()) == 2


def test_a_truncated_library_is_compiled_again(tree):
    path = build.library_path()
    path.write_bytes(path.read_bytes()[:1000])
    assert build.library_path() == path
    assert path.stat().st_size > 1000


def test_failed_compile_leaves_no_entry_and_says_why(tree, entries):
    (tree / "mojo" / "capi.mojo").write_text('@export\ndef od_answer() abi("C") -> Int32:\n    return zork\n')
    with pytest.raises(BuildError) as caught:
        build.library_path()
    assert "zork" in str(caught.value)
    assert caught.value.exit_code == 69
    assert len(str(caught.value).splitlines()) <= 41
    assert entries() == []


def test_long_compiler_output_keeps_its_first_error_and_its_last_note():
    text = "a.mojo:1:1: warning: w\n" + "".join(f"a.mojo:{i}:1: error: e{i}\n" for i in range(500)) + "note: the reason"
    lines = build._trim(text).splitlines()
    assert len(lines) == 40
    assert lines[0].endswith("error: e0")
    assert lines[-1] == "note: the reason"


def test_unknown_cpu_names_a_near_one(tree, entries, monkeypatch):
    monkeypatch.setenv("ODYSSEY_TARGET_CPU", "x86-64-v5" if build.host_cpu().startswith("x86") else "generik")
    with pytest.raises(BuildError, match=r"did you mean .*(x86-64-v4|generic)") as caught:
        build.library_path()
    assert "\n" not in str(caught.value)
    assert entries() == []


def test_no_c_compiler(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "tmp"))
    with pytest.raises(BuildError, match=r"no C compiler \(cc, gcc or clang\).*apt-get install gcc"):
        build.library_path()


def test_no_mojo(tree, tmp_path, monkeypatch):
    for name in ("cc", "python"):
        (tmp_path / "tmp" / name).write_text("#!/bin/sh\n")
        (tmp_path / "tmp" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "tmp"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "tmp" / "python"))
    monkeypatch.setattr(build, "_mojo_package", lambda: None)
    with pytest.raises(BuildError, match=r"compiler is not installed.*`max`"):
        build.library_path()


def test_sources_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "__file__", str(tmp_path / "lib" / "site-packages" / "odyssey" / "build.py"))
    with pytest.raises(BuildError, match="install odyssey again"):
        build.source_root()


def test_sources_of_an_installed_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "python" / "odyssey"
    for root in (package / "_mojo", tmp_path):
        (root / "mojo").mkdir(parents=True)
        (root / "mojo" / "capi.mojo").touch()
    monkeypatch.setattr(build, "__file__", str(package / "build.py"))
    assert build.source_root() == package / "_mojo"
    (package / "_mojo" / "mojo" / "capi.mojo").unlink()
    assert build.source_root() == tmp_path


def test_read_only_sources_are_left_alone(tree):
    for path in [*tree.rglob("*"), tree]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(tree.rglob("*"))
    try:
        assert ctypes.CDLL(str(build.library_path())).od_answer() == 42
        assert sorted(tree.rglob("*")) == before
    finally:
        for path in [tree, *tree.rglob("*")]:
            path.chmod(0o755)


# -- where the cache is -----------------------------------------------------------------------------------------------


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("ODYSSEY_CACHE_DIR", str(tmp_path / "own"))
    assert build.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("ODYSSEY_CACHE_DIR")
    assert build.cache_dir() == tmp_path / "xdg" / "odyssey"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert build.cache_dir() == tmp_path / "home" / ".cache" / "odyssey"


@pytest.fixture
def unwritable(tmp_path, monkeypatch):
    """A cache directory that nobody, root neither, can make."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ODYSSEY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return tmp_path / "tmp" / f"odyssey-{os.getuid()}"


def test_unwritable_cache_falls_back_to_a_private_directory_and_says_so(tree, unwritable, capfd):
    path = build.library_path()
    assert path.is_relative_to(unwritable)
    assert unwritable.stat().st_mode & 0o777 == 0o700
    assert "cannot be written" in capfd.readouterr().err.splitlines()[0]
    assert build.library_path() == path
    assert capfd.readouterr().err == ""


def test_a_fallback_that_others_can_write_is_refused(tree, unwritable):
    unwritable.mkdir()
    unwritable.chmod(0o777)
    with pytest.raises(BuildError, match="not this user's alone"):
        build.library_path()


def test_a_fallback_that_is_a_link_is_refused(tree, unwritable, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    unwritable.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match="not this user's alone"):
        build.library_path()


# -- prebuilt libraries and `odyssey build` ---------------------------------------------------------------------------


def test_prebuilt_directory_and_file(tree, tmp_path, monkeypatch, entries):
    (tmp_path / "pre").mkdir()
    library = tmp_path / "pre" / "libodyssey.so"
    monkeypatch.setenv("ODYSSEY_KERNELS", str(tmp_path / "pre"))
    with pytest.raises(BuildError, match="ODYSSEY_KERNELS"):
        build.library_path()
    library.touch()
    assert build.library_path() == library
    monkeypatch.setenv("ODYSSEY_KERNELS", str(library))
    assert build.library_path() == library
    assert entries() == []


def test_output_works_alone(tree, tmp_path, monkeypatch):
    """What `build --output` leaves is used by a process that has no compiler package."""
    library = build.build(output=tmp_path / "out")
    assert library == tmp_path / "out" / "libodyssey.so"
    monkeypatch.setenv("ODYSSEY_KERNELS", str(tmp_path / "out"))
    assert [path.parent for path in build.runtime_libraries()] == [tmp_path / "out" / "lib"] * 2
    script = f"""
import ctypes, sys
from odyssey import build
build._mojo_package = lambda: None
for path in build.runtime_libraries(): ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
print(ctypes.CDLL(str(build.library_path())).od_answer())
used = [line.split()[-1] for line in open("/proc/self/maps") if "AsyncRT" in line] if sys.platform == "linux" else []
assert all(name.startswith({str(tmp_path)!r}) for name in used), used
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_output_that_cannot_be_written(tree, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        build.build(output=tmp_path / "file" / "out")


def test_runtime_libraries_are_the_installed_ones(monkeypatch):
    monkeypatch.delenv("ODYSSEY_KERNELS", raising=False)
    paths = build.runtime_libraries()
    assert [path.name.split(".")[0] for path in paths] == ["libKGENCompilerRTShared", "libAsyncRTMojoBindings"]
    assert all(path.is_absolute() and path.is_file() for path in paths)


def test_runtime_libraries_missing(monkeypatch):
    monkeypatch.delenv("ODYSSEY_KERNELS", raising=False)
    monkeypatch.setattr(build, "_mojo_package", lambda: None)
    with pytest.raises(BuildError, match="`max`"):
        build.runtime_libraries()


def test_check_targets(tree, entries):
    lines = []
    assert build.check_targets(lines.append) == 0
    names = [line.split("  ")[0] for line in lines]
    assert names == ["x86-64", "x86-64-v3", "x86-64-v4", "x86-64-v4+avx512bf16", "aarch64 generic"]
    assert entries() == []


def test_check_targets_counts_failures(tree, monkeypatch):
    monkeypatch.setattr(build, "TARGETS", build.TARGETS[:1])
    (tree / "mojo" / "capi.mojo").write_text("nonsense\n")
    lines = []
    assert build.check_targets(lines.append) == 1
    assert "failed" in lines[0]


# -- the target -------------------------------------------------------------------------------------------------------

AVX2 = set("fpu sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
AVX512 = AVX2 | set("avx512f avx512bw avx512cd avx512dq avx512vl".split())


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (AVX512, "x86-64-v4"),
        (AVX512 | {"amx_tile", "avx512_fp16"}, "x86-64-v4"),
        (AVX512 | {"avx512_bf16"}, "x86-64-v4+avx512bf16"),
        (AVX2 | {"avx512_bf16"}, "x86-64-v3"),
        (AVX512 - {"avx512vl"}, "x86-64-v3"),
        (AVX2, "x86-64-v3"),
        (AVX2 - {"fma"}, "x86-64"),
        (set(), "x86-64"),
    ],
)
def test_x86_level(features, level):
    assert build.x86_level(frozenset(features)) == level


def test_target_options():
    assert build.target_options("x86-64-v3") == ["--target-cpu", "x86-64-v3"]
    assert build.target_options("x86-64-v4+avx512bf16") == [
        "--target-cpu",
        "x86-64-v4",
        "--target-features",
        "+avx512bf16",
    ]


@pytest.mark.parametrize(
    ("system", "machine", "cpu"), [("linux", "aarch64", "generic"), ("darwin", "arm64", "apple-m1")]
)
def test_arm_cpu(monkeypatch, system, machine, cpu):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    assert build.host_cpu() == cpu


def test_target_cpu_from_the_environment_and_the_argument(tree, monkeypatch):
    monkeypatch.setenv("ODYSSEY_TARGET_CPU", "haswell")
    assert build.plan(tree).cpu == "haswell"
    assert build.plan(tree, "x86-64").cpu == "x86-64"
