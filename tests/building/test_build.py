"""The kernel build: what is compiled, what is cached, what a user reads.

Several processes: test_concurrency.py.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest

from odyssey.compile import compiler, sources
from odyssey.compile import library as build
from odyssey.errors import BuildError, DeviceError


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
    assert record["source_sha256"] == build.plan(tree).sources
    assert record["bytes"] == path.stat().st_size


def test_a_terminal_counts_parts_and_seconds(tree, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    build.library_path()
    shown = stream.getvalue()
    assert re.search(r"\rodyssey: compiling the kernels \.\.\. 1 of 1 parts, \d+ s *\r", shown)
    # what was shown last is overwritten before the line of the end
    assert f"\r{' ' * build.LIVE_COLUMNS}\rodyssey: compiling the kernels ... done in" in shown


def test_key_follows_everything_that_matters(tree, monkeypatch):
    keys = [build.plan(tree).key]
    (tree / "mojo" / "extra.mojo").write_text("# nothing\n")
    keys.append(build.plan(tree).key)
    (tree / "mojo" / "extra.mojo").rename(tree / "mojo" / "other.mojo")
    keys.append(build.plan(tree).key)
    keys.append(build.plan(tree, "x86-64").key)
    monkeypatch.setattr(build, "FLAGS", ("-D", "FAST"))
    keys.append(build.plan(tree).key)
    monkeypatch.setattr(build, "compiler_version", lambda: "0.0")
    keys.append(build.plan(tree).key)
    assert len(set(keys)) == len(keys)
    (tree / "mojo" / "README.md").write_text("not a source\n")
    (tree / "shared" / "face.mojo").write_text("# of Mojo programs\n")
    assert build.plan(tree).key == keys[-1]


def test_compiler_version_is_the_installed_one():
    from importlib import metadata

    assert build.compiler_version() == metadata.version("mojo-compiler")


def test_a_folder_called_mojo_in_the_current_directory_is_not_the_compiler(tree, monkeypatch):
    monkeypatch.syspath_prepend(str(tree))
    assert compiler.mojo_package() != tree / "mojo"
    assert build.compiler_version() != "none"


def test_changed_source_is_compiled_again_and_the_old_entry_stays(tree, entries):
    old = build.library_path()
    source = tree / "mojo" / "capi.mojo"
    source.write_text(source.read_text().replace("42", "43"))
    new = build.library_path()
    assert new != old
    assert ctypes.CDLL(str(new)).od_answer() == 43
    assert len(entries()) == 2


@pytest.fixture
def compiles(monkeypatch):
    """The root files that were compiled, by their names."""
    found, compiled = [], compiler.compile_kernels

    def counted(root, source, *given, **named):
        found.append(source.stem)
        compiled(root, source, *given, **named)

    monkeypatch.setattr(compiler, "compile_kernels", counted)
    return found


def answers() -> tuple[int, int, int]:
    library = ctypes.CDLL(str(build.library_path()))
    return library.od_answer(), library.od_one(), library.od_two()


def test_an_edit_compiles_the_parts_that_import_it(family_tree, compiles, capfd):
    kernels = family_tree / "mojo" / "kernels"
    assert answers() == (42, 11, 12) and sorted(compiles) == ["capi", "one", "two"]
    compiles.clear()
    capfd.readouterr()
    (kernels / "two.mojo").write_text((kernels / "two.mojo").read_text().replace("+ 2", "+ 3"))
    assert answers() == (42, 11, 13) and compiles == ["two"]
    lines = capfd.readouterr().err.splitlines()
    assert f"for {build.host_cpu()}, 1 of 3 parts (two), once" in lines[0] and "done in" in lines[1]
    compiles.clear()
    (kernels / "both.mojo").write_text("comptime TEN: Int32 = 20\n")
    assert answers() == (42, 21, 23) and sorted(compiles) == ["one", "two"]
    compiles.clear()
    (kernels / "nobody.mojo").write_text("nonsense, which nobody imports\n")
    assert answers() == (42, 21, 23) and compiles == []
    (kernels / "two.mojo").write_text("def two() -> Int32:\n    return zork\n")
    with pytest.raises(
        BuildError, match=r"(?m)^mojo/kernels/two.mojo:2:12: error: .*zork"
    ) as caught:
        build.library_path()
    assert str(build.cache_dir()) not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("from .a import f", "a.mojo"),
        ("from kernels.a import f as g, h", "a.mojo"),
        ("from kernels import (\n    a,  # (one)\n    b as c,\n)", "a.mojo b.mojo"),
        ("from . import a, deep", "a.mojo deep/__init__.mojo"),
        ("import kernels.a, kernels.deep.c as d", "a.mojo deep/__init__.mojo deep/c.mojo"),
        ("from .deep.c import f", "deep/__init__.mojo deep/c.mojo ../other.mojo"),
        ("def f():\n    from .b import g", "b.mojo"),
        ("# from .a import f\nfrom std.math import exp", ""),
    ],
)
def test_what_a_file_imports(text, files):
    kernels = "mojo/kernels/"
    names = "__init__.mojo a.mojo b.mojo deep/__init__.mojo deep/c.mojo".split()
    texts = {kernels + name: b"" for name in names} | {
        "mojo/other.mojo": b"",
        kernels + "x.mojo": text.encode(),
    }
    texts[kernels + "deep/c.mojo"] = b"from ...other import z"
    wanted = {str(os.path.normpath(kernels + name)) for name in files.split()} | {
        kernels + "x.mojo"
    }
    if "deep/c.mojo" in files:
        wanted.add("mojo/other.mojo")
    assert set(sources.imported(texts, kernels + "x.mojo")) - {kernels + "__init__.mojo"} == wanted


def test_every_source_of_the_kernels_is_in_a_part():
    texts = sources.read(build.source_root(), gpu=False)
    parts = [sources.imported(texts, root) for root in sources.roots(texts)]
    assert set().union(*parts) == set(texts) and not any(map(sources.for_gpus, texts))
    table = texts["mojo/runtime/ops.mojo"].decode()
    for name in sources.roots(texts)[1:]:
        assert (
            f'"odyssey_{Path(name).stem}"' in table
            and f"def odyssey_{Path(name).stem}(" in texts[name].decode()
        )


def test_what_is_kept_under_a_key_is_of_the_sources_that_the_key_says(tree, monkeypatch):
    """Whatever becomes of the files while they are compiled."""
    source = tree / "mojo" / "capi.mojo"
    before, compiled = source.read_text(), compiler.compile_kernels

    def edited(*given, **named):
        source.write_text(before.replace("42", "43"))
        compiled(*given, **named)

    monkeypatch.setattr(compiler, "compile_kernels", edited)
    old = build.library_path()
    assert ctypes.CDLL(str(old)).od_answer() == 42
    new = build.library_path()
    assert new != old and ctypes.CDLL(str(new)).od_answer() == 43
    source.write_text(before)
    assert build.library_path() == old


def test_a_truncated_library_is_compiled_again(tree):
    path = build.library_path()
    path.write_bytes(path.read_bytes()[:1000])
    assert build.library_path() == path
    assert path.stat().st_size > 1000


def test_failed_compile_leaves_no_entry_and_says_why(tree, entries):
    (tree / "mojo" / "capi.mojo").write_text(
        '@export\ndef od_answer() abi("C") -> Int32:\n    return zork\n'
    )
    with pytest.raises(BuildError) as caught:
        build.library_path()
    assert "zork" in str(caught.value)
    assert caught.value.exit_code == 69
    assert len(str(caught.value).splitlines()) <= 41
    assert entries() == []


def test_long_compiler_output_keeps_its_first_error_and_its_last_note():
    text = (
        "a.mojo:1:1: warning: w\n"
        + "".join(f"a.mojo:{i}:1: error: e{i}\n" for i in range(500))
        + "note: the reason"
    )
    lines = compiler._trim(text).splitlines()
    assert len(lines) == 40
    assert lines[0].endswith("error: e0")
    assert lines[-1] == "note: the reason"


def test_unknown_cpu_names_a_near_one(tree, entries, monkeypatch):
    monkeypatch.setenv(
        "ODYSSEY_TARGET_CPU", "x86-64-v5" if build.host_cpu().startswith("x86") else "generik"
    )
    with pytest.raises(BuildError, match=r"did you mean .*(x86-64-v4|generic)") as caught:
        build.library_path()
    assert "\n" not in str(caught.value)
    assert entries() == []


def test_no_c_compiler(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "tmp"))
    with pytest.raises(
        BuildError, match=r"no C compiler \(cc, gcc or clang\).*apt-get install gcc"
    ):
        build.library_path()


def test_no_mojo(tree, tmp_path, monkeypatch):
    for name in ("cc", "python"):
        (tmp_path / "tmp" / name).write_text("#!/bin/sh\n")
        (tmp_path / "tmp" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "tmp"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "tmp" / "python"))
    monkeypatch.setattr(compiler, "mojo_package", lambda: None)
    with pytest.raises(BuildError, match=r"compiler is not installed.*`max`"):
        build.library_path()


def test_sources_missing(tmp_path, monkeypatch):
    home = tmp_path / "lib" / "site-packages" / "odyssey"
    monkeypatch.setattr(compiler, "__file__", str(home / "compile" / "compiler.py"))
    with pytest.raises(BuildError, match="install ml-odyssey again"):
        build.source_root()


def test_sources_of_an_installed_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "python" / "odyssey"
    for root in (package / "_mojo", tmp_path):
        (root / "mojo").mkdir(parents=True)
        (root / "mojo" / "capi.mojo").touch()
    monkeypatch.setattr(compiler, "__file__", str(package / "compile" / "compiler.py"))
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


# -- where the cache is ----------------------------------------------------------------------------


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
    assert "cannot be used" in capfd.readouterr().err.splitlines()[0]
    assert build.library_path() == path
    assert capfd.readouterr().err == ""


def test_a_cache_where_no_program_may_run_is_not_used(tree, tmp_path, monkeypatch, capfd):
    """A library on a file system with noexec can't be loaded, though it can be written."""
    monkeypatch.setenv("ODYSSEY_CACHE_DIR", str(tmp_path / "shared" / "cache"))
    mounted = [tmp_path / "shared"]
    (tmp_path / "shared").mkdir()
    statvfs = os.statvfs

    def with_noexec(path):
        inside = any(place in (Path(path), *Path(path).parents) for place in mounted)
        flag = os.ST_NOEXEC if inside else statvfs(path).f_flag & ~os.ST_NOEXEC
        return types.SimpleNamespace(f_flag=flag)

    monkeypatch.setattr(os, "statvfs", with_noexec)
    path = build.library_path()
    assert path.is_relative_to(tmp_path / "tmp" / f"odyssey-{os.getuid()}")
    assert "(its file system is mounted with noexec); the kernels are kept in" in (
        capfd.readouterr().err
    )
    mounted.append(tmp_path / "tmp")
    with pytest.raises(BuildError, match="can be used .its file system is mounted with noexec"):
        build.library_path()


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


# -- prebuilt libraries ----------------------------------------------------------------------------


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


def test_runtime_libraries_are_the_installed_ones(monkeypatch):
    monkeypatch.delenv("ODYSSEY_KERNELS", raising=False)
    paths = build.runtime_libraries()
    assert [path.name.split(".")[0] for path in paths] == [
        "libKGENCompilerRTShared",
        "libAsyncRTMojoBindings",
    ]
    assert all(path.is_absolute() and path.is_file() for path in paths)


def test_runtime_libraries_missing(monkeypatch):
    monkeypatch.delenv("ODYSSEY_KERNELS", raising=False)
    monkeypatch.setattr(compiler, "mojo_package", lambda: None)
    with pytest.raises(BuildError, match="`max`"):
        build.runtime_libraries()


# -- the target ------------------------------------------------------------------------------------

AVX2 = set("fpu sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
AVX512 = AVX2 | set("avx512f avx512bw avx512cd avx512dq avx512vl".split())


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (AVX512, "x86-64-v4"),
        (AVX512 | {"amx_tile", "avx512_fp16"}, "x86-64-v4"),
        (AVX512 | {"avx512_bf16"}, "x86-64-v4+avx512bf16"),
        (AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "x86-64-v4+avx512bf16+amx-bf16"),
        (AVX512 | {"amx_tile", "amx_bf16"}, "x86-64-v4"),
        (AVX2 | {"avx512_bf16"}, "x86-64-v3"),
        (AVX512 - {"avx512vl"}, "x86-64-v3"),
        (AVX2, "x86-64-v3"),
        (AVX2 - {"fma"}, "x86-64"),
        (set(), "x86-64"),
    ],
)
def test_x86_level(features, level):
    assert compiler.x86_level(frozenset(features)) == level


def test_target_options():
    assert build.target_options("x86-64-v3") == ["--target-cpu", "x86-64-v3"]
    assert build.target_options("x86-64-v4+avx512bf16") == [
        "--target-cpu",
        "x86-64-v4",
        "--target-features",
        "+avx512bf16",
    ]
    assert build.target_options("x86-64-v4+avx512bf16+amx-bf16")[-1] == "+avx512bf16,+amx-bf16"


@pytest.mark.parametrize(
    ("system", "machine", "cpu"), [("linux", "aarch64", "generic"), ("darwin", "arm64", "apple-m1")]
)
def test_arm_cpu(monkeypatch, system, machine, cpu):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(compiler.platform, "machine", lambda: machine)
    assert build.host_cpu() == cpu


def test_target_cpu_from_the_environment_and_the_argument(tree, monkeypatch):
    monkeypatch.setenv("ODYSSEY_TARGET_CPU", "haswell")
    assert build.plan(tree).cpu == "haswell"
    assert build.plan(tree, "x86-64").cpu == "x86-64"


@pytest.mark.parametrize(
    ("cpu", "lacks"),
    [
        ("x86-64", []),
        ("x86-64-v3", []),
        ("x86-64-v4", ["avx512f"]),
        ("x86-64-v4+avx512bf16", ["avx512_bf16", "avx512f"]),
        ("x86-64-v4+avx512bf16+amx-bf16", ["amx_bf16", "avx512_bf16", "avx512f"]),
        ("haswell", []),  # what it needs is not known here
    ],
)
def test_what_a_cpu_lacks(monkeypatch, cpu, lacks):
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiler, "cpu_features", lambda: frozenset(AVX512 - {"avx512f"}))
    assert compiler.lacking(cpu) == lacks
    monkeypatch.setattr(compiler, "cpu_features", frozenset)
    assert compiler.lacking(cpu) == []


REFUSED = """
import ctypes, mmap, sys
from odyssey.compile import compiler, sources
small = mmap.mmap(-1, 4096)  # a stack for signals that does not hold tiles: for such a process Linux has none
class Stack(ctypes.Structure):
    _fields_ = [("p", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
at = ctypes.addressof(ctypes.c_char.from_buffer(small))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(at, 0, 4096)), None) == 0
print(compiler.host_cpu(), compiler.lacking("x86-64-v4+avx512bf16+amx-bf16"))
from odyssey.compile import library
from odyssey.core import native
native.Library(sys.argv[1], [str(path) for path in library.runtime_libraries()])
"""


@pytest.mark.skipif(
    "amx" not in build.host_cpu(), reason="this machine has no AMX that may be used"
)
def test_a_process_that_is_refused_tiles_multiplies_pairs(launch):
    refused = launch.python("-c", REFUSED, build.cached_library(build.host_cpu()))
    assert refused.stdout.strip() == "x86-64-v4+avx512bf16 ['amx_bf16']", refused.stderr
    assert (
        "which Linux does not let this process use; set ODYSSEY_TARGET_CPU=x86-64-v4"
        in refused.stderr
    )


# -- kernels for GPUs ------------------------------------------------------------------------------


def test_a_library_for_a_gpu(gpu_tree, entries, capfd, monkeypatch):
    path = build.gpu_library_path("nvidia:sm_90a")
    assert path.name == "libodyssey-sm_90.so"
    assert capfd.readouterr().err.startswith("odyssey: compiling the kernels for sm_90, once")
    record = json.loads((path.parent / "build.json").read_text())
    assert (record["accelerator"], record["cpu"]) == ("sm_90", compiler.portable_cpu())
    monkeypatch.setenv("ODYSSEY_TARGET_ACCELERATOR", "sm_90")
    assert build.gpu_library_path() == path == build.cached("sm_90")
    assert capfd.readouterr().err == ""
    assert build.cached() is None and build.cached("sm_80") is None
    assert len(entries()) == 1
    assert b".visible .entry kernels_gpu_numbers__double" in path.read_bytes()


def test_gpu_sources_are_not_the_cpu_librarys(gpu_tree):
    before = build.plan(gpu_tree).key, build.plan(gpu_tree, accelerator="sm_90").key
    assert build.plan(gpu_tree, accelerator="sm_80").key not in before
    source = gpu_tree / "mojo" / "kernels" / "gpu" / "numbers.mojo"
    source.write_text(source.read_text().replace("2 *", "3 *"))
    root = gpu_tree / "mojo" / "gpu_capi.mojo"
    root.write_text(root.read_text() + "# changed")
    after = build.plan(gpu_tree).key, build.plan(gpu_tree, accelerator="sm_90").key
    assert before[0] == after[0] and before[1] != after[1]


def test_no_gpu_and_none_named(tree, no_gpus):
    with pytest.raises(
        DeviceError, match="no GPU to compile for; set ODYSSEY_TARGET_ACCELERATOR, say to sm_90"
    ):
        build.gpu_library_path()


def test_an_unknown_accelerator_names_a_near_one(gpu_tree, entries):
    with pytest.raises(
        BuildError, match=r"knows no accelerator 'sm_91' .*did you mean .*sm_90"
    ) as caught:
        build.gpu_library_path("sm_91")
    assert "\n" not in str(caught.value)
    assert entries() == []


def test_a_prebuilt_library_without_one_for_gpus(tree, tmp_path, monkeypatch):
    (tmp_path / "libodyssey.so").touch()
    monkeypatch.setenv("ODYSSEY_KERNELS", str(tmp_path / "libodyssey.so"))
    with pytest.raises(
        BuildError, match=r"no file .*libodyssey-sm_90.so; make it with .* --target sm_90`"
    ):
        build.gpu_library_path("sm_90")
