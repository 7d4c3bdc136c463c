"""What is in the kernels' cache is used only if nobody else can have put it there, and every
byte is as compiled.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import stat
import subprocess
import sys

import pytest

from odyssey.base import files
from odyssey.compile import compiler
from odyssey.compile import library as build
from odyssey.errors import BuildError

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
NOBODY = 65534

# A compiler that makes what the tree's sources say, and counts: the real one takes two seconds a
# time.
FAKE = """
import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_bytes(bytes(range(256)) * 40)
"""
SLOW = """lambda objects, library: (
    __import__("time").sleep(1), open({log!r}, "a").write("x"), library.write_bytes(objects[0].read_bytes())
)"""
CODE = bytes(range(256)) * 40


@pytest.fixture
def fake(tree, tmp_path, monkeypatch):
    """How often the library of the tree was made."""
    log = tmp_path / "calls"
    log.touch()
    monkeypatch.setattr(compiler, "mojo_command", lambda: [sys.executable, "-c", FAKE])

    def link(objects, library):
        library.write_bytes(objects[0].read_bytes())
        with open(log, "a") as file:
            file.write("x")

    monkeypatch.setattr(compiler, "link", link)
    return lambda: log.stat().st_size


def bytes_loaded() -> bytes:
    """Those behind the name that a loader is given."""
    found = build.open_library()
    try:
        with open(found.to_load(), "rb") as file:
            return file.read()
    finally:
        found.close()


def mutate(path, rng) -> None:
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "truncate", "append", "replace", "empty", "remove", "directory"])
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del data[rng.randrange(len(data)) :]
    elif kind == "append":
        data += rng.randbytes(rng.randrange(1, 100))
    elif kind == "replace":
        first = rng.randrange(len(data))
        data[first : first + 20] = rng.randbytes(min(20, len(data) - first))
    elif kind == "empty":
        data.clear()
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind != "remove":
        path.write_bytes(data)


def test_any_damage_is_compiled_anew_or_changes_nothing(fake, capfd):
    path = build.library_path()
    good, record = path.read_bytes(), path.parent / "build.json"
    assert good == CODE
    rng = random.Random(5)
    for case in range(60):
        capfd.readouterr()
        before, record_before = fake(), record.read_bytes()
        for target in rng.choice([[path], [record], [path, record]]):
            mutate(target, rng)
        harmless = record.is_file() and path.is_file() and path.read_bytes() == good
        assert bytes_loaded() == CODE, case
        lines = capfd.readouterr().err.splitlines()
        if fake() == before:  # a bit of what nobody reads, such as the date
            assert harmless and record.read_bytes() != record_before and lines == [], case
        else:
            assert fake() == before + 1
            assert (
                lines[0].startswith(f"odyssey: {path.parent} is damaged: ") and len(lines) == 1
            ), lines
        assert sorted(entry.name for entry in path.parent.iterdir()) == [
            "build.json",
            "libodyssey.so",
        ]


def test_another_entry_s_library_is_not_taken(fake, tree, capfd):
    old = build.library_path().parent
    (tree / "mojo" / "more.mojo").write_text("# changed\n")
    new = build.library_path().parent
    shutil.rmtree(new)
    shutil.copytree(old, new)
    capfd.readouterr()
    assert build.cached() is None
    build.library_path()
    assert (
        "build.json is of another library; the kernels are compiled anew" in capfd.readouterr().err
    )
    assert fake() == 3


def test_processes_that_meet_a_damaged_entry_compile_once(start, tree, tmp_path):
    log = tmp_path / "calls"
    slow = SLOW.format(log=str(log))
    path = start(FAKE, slow).communicate(timeout=60)[0].strip()
    with open(path, "r+b") as file:
        file.write(b"\xff")
    done = [process.communicate(timeout=60) for process in [start(FAKE, slow) for _ in range(4)]]
    assert {out.strip() for out, _ in done} == {path}
    assert log.read_text() == "xx"
    assert sum("is damaged" in err for _, err in done) == 1


def test_a_damaged_part_is_compiled_anew_and_a_foreign_one_refused(tree, fake, monkeypatch, capfd):
    """Parts are code that will run, and are looked at as libraries are."""
    calls, compiled = [], compiler.compile_kernels
    monkeypatch.setattr(
        compiler,
        "compile_kernels",
        lambda *given, **named: (calls.append(1), compiled(*given, **named)),
    )
    entry = build.library_path().parent
    (part,) = entry.parent.glob("*/part.o")
    for damage in (
        lambda: part.write_bytes(CODE[:-1]),
        lambda: part.write_bytes(CODE[1:] + b"x"),
        part.unlink,
    ):
        shutil.rmtree(entry)
        damage()
        assert bytes_loaded() == part.read_bytes() == CODE
        assert f"{part.parent} is damaged: " in capfd.readouterr().err
    assert (len(calls), fake()) == (4, 4)
    shutil.rmtree(entry)
    part.chmod(0o777)
    with pytest.raises(
        BuildError,
        match=f"{part} is refused: everybody may write to it, and compiled kernels are code",
    ):
        build.open_library()
    assert not entry.exists()


def refused(path, why: str) -> None:
    with pytest.raises(BuildError) as caught:
        build.open_library()
    said = str(caught.value)
    assert said.startswith(
        f"[build] {path} is refused: {why}, and compiled kernels are code that runs; "
    )
    assert (
        said.endswith("set ODYSSEY_CACHE_DIR to a directory that only you can write to")
        and "\n" not in said
    )
    with pytest.raises(BuildError):
        build.cached()


LEVELS = {"library": 0, "entry": 1, "kernels": 2, "cache": 3, "record": None}


def at(path, level):
    place = LEVELS[level]
    return path.parent / "build.json" if place is None else [path, *path.parents][place]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_what_others_may_write_is_refused(fake, level, mode):
    path = build.library_path()
    place = at(path, level)
    if mode == 0o775:
        if os.geteuid() != 0:
            pytest.skip("only root gives a file to any group")
        os.chown(place, -1, NOBODY)
    place.chmod(mode)
    refused(
        place, "everybody may write to it" if mode == 0o777 else f"group {NOBODY} may write to it"
    )
    assert fake() == 1


@ROOT
@pytest.mark.parametrize("level", LEVELS)
def test_another_user_s_is_refused(fake, level):
    path = build.library_path()
    place = at(path, level)
    os.chown(place, NOBODY, NOBODY)
    refused(place, f"it belongs to user {NOBODY}")
    assert fake() == 1


@pytest.mark.parametrize("level", ["library", "record", "entry", "kernels"])
def test_links_are_refused(fake, level, tmp_path):
    path = build.library_path()
    place = at(path, level)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    refused(place, "it is a link")
    assert fake() == 1


@ROOT
def test_the_cache_may_be_a_link_and_where_it_leads_is_looked_at(fake, tmp_path):
    build.library_path()
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    assert bytes_loaded() == CODE and fake() == 1
    os.chown(tmp_path / "elsewhere", NOBODY, NOBODY)
    refused(tmp_path / "cache", f"it belongs to user {NOBODY}")


def test_one_s_own_is_used_whatever_the_umask(fake):
    mask = os.umask(0)
    try:
        path = build.library_path()
        assert bytes_loaded() == CODE and fake() == 1
    finally:
        assert os.umask(mask) == 0
    assert not any(
        place.stat().st_mode & 0o022 for place in (path, *[path.parents[i] for i in range(3)])
    )


def test_whom_a_mode_lets_in(monkeypatch):
    def found(mode, uid=None, gid=1):
        return os.stat_result(
            (mode, 0, 0, 1, os.geteuid() if uid is None else uid, gid, 0, 0, 0, 0)
        )

    regular, directory = stat.S_IFREG, stat.S_IFDIR
    assert (
        files.foreign(found(regular | 0o755))
        is files.foreign(found(regular | 0o755, uid=0))
        is None
    )
    assert files.foreign(found(directory | 0o1777, uid=0)) is None  # /tmp
    assert files.foreign(found(regular | 0o1777)) == "everybody may write to it"
    assert files.foreign(found(directory | 0o1777, uid=NOBODY)) == f"it belongs to user {NOBODY}"
    monkeypatch.setattr(files, "_own_group", lambda gid: gid == 1)
    assert files.foreign(found(regular | 0o775)) is None
    assert files.foreign(found(regular | 0o775, gid=2)) == "group 2 may write to it"


def test_what_was_looked_at_is_what_is_loaded(tree):
    """Also when the path means something else by then."""
    found = build.open_library()
    entry = found.path.parent
    entry.rename(entry.with_name("moved"))
    entry.mkdir()
    found.path.write_bytes(b"not a library")
    library = ctypes.CDLL(found.to_load())
    assert library.od_answer() == 42
    named = [line.split()[-1] for line in open("/proc/self/maps") if "libodyssey" in line]
    # as debuggers and profilers see it
    assert set(named) >= {str(entry.with_name("moved") / "libodyssey.so")}
    found.close()


def test_the_name_that_is_loaded_can_be_opened_from_outside(fake):
    """dladdr gives it to whoever writes a stack trace, and symbolizers are processes of their
    own.
    """
    found = build.open_library()
    script = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    assert subprocess.check_output([sys.executable, "-c", script, found.to_load()]) == CODE
    found.close()
