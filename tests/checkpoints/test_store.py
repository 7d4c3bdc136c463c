"""A directory of checkpoints in ordinary use: saved, found, kept, replaced, shared by several
processes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as library

from odyssey.base import files
from odyssey.checkpoints import CheckpointError, Refused, Snapshot, Store
from odyssey.checkpoints import lock as locks
from odyssey.checkpoints import store as stores
from odyssey.errors import ConfigError, NumericsError, OutputError


def snapshot(step: int = 1, **values) -> Snapshot:
    """A small state in which everything depends on the step."""
    random = np.random.default_rng(step)
    return Snapshot(
        step,
        {
            "parameters": {
                "conv1.weight": random.standard_normal((6, 1, 5, 5), dtype=np.float32),
                "conv1.bias": random.standard_normal(6, dtype=np.float32),
            },
            "optimizer": {
                "momentum/conv1.weight": random.standard_normal((6, 1, 5, 5), dtype=np.float32)
            },
        },
        {"cursor": 128 * step, "seed": 7, **values},
    )


def same(one: Snapshot, other: Snapshot) -> bool:
    """Whether two states have the same bytes, names and order of names aside."""
    return (
        one.step == other.step
        and one.values == other.values
        and one.arrays.keys() == other.arrays.keys()
        and all(one.arrays[stem].keys() == other.arrays[stem].keys() for stem in one.arrays)
        and all(
            a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            for stem in one.arrays
            for a, b in (
                (one.arrays[stem][name], other.arrays[stem][name]) for name in one.arrays[stem]
            )
        )
    )


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_what_is_saved_is_loaded(tmp_path):
    given = snapshot(120, history=[1.5, -0.0, 1e-300], nested={"ü\n": None})
    with Store(tmp_path / "c") as store:
        path = store.save(given)
        assert path == tmp_path / "c" / "step_00000120" == store.path_of(120)
        assert same(store.load(path), given)
        found, refused = store.newest()
    assert same(found, given) and refused == []
    assert list(found.values) == list(given.values)


DTYPES = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 1, 1, 1, 1, 1, 2)])
def test_every_dtype_and_shape_comes_back_and_the_library_of_the_format_reads_it(tmp_path, shape):
    arrays = {
        dtype: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype) for dtype in DTYPES
    }
    given = Snapshot(0, {"residuals": arrays})
    with Store(tmp_path) as store:
        path = store.save(given)
        assert same(store.load(path), given)
    read = library.load_file(path / "residuals.safetensors")
    assert all(
        read[name].tobytes() == arrays[name].tobytes() and read[name].dtype == name
        for name in DTYPES
    )


def test_arrays_that_are_not_contiguous_and_shared_memory_are_saved_as_they_look(tmp_path):
    arena = np.arange(24, dtype=np.float32).reshape(4, 6)
    given = Snapshot(
        3, {"parameters": {"turned": arena.T, "every-second": arena[::2, ::2], "whole": arena}}
    )
    with Store(tmp_path) as store:
        assert same(store.load(store.save(given)), given)
        store.save_later(Snapshot(4, given.arrays))
        store.wait()
        assert same(store.load(store.path_of(4)), Snapshot(4, given.arrays))


def test_nothing_there_is_no_error(tmp_path):
    store = Store(tmp_path / "nowhere", owner=False)
    assert store.newest() == (None, []) and store.names() == []
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(("mask", "file_mode", "mode"), [(0, 0o664, 0o775), (0o27, 0o640, 0o750)])
def test_files_and_directories_follow_the_umask(tmp_path, mask, file_mode, mode):
    old = os.umask(mask)
    try:
        with Store(tmp_path / "c") as store:
            path = store.save(snapshot())
    finally:
        os.umask(old)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in path.iterdir()}
    assert set(modes.values()) == {file_mode}
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == mode


# --- keep -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    with Store(tmp_path, keep=keep) as store:
        for step in range(1, 7):
            store.save(snapshot(step))
        assert store.names() == [f"step_{step:08d}" for step in range(7 - keep, 7)]
    assert entries(tmp_path) == [".lock", *store.names()]


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(snapshot(step))
    (tmp_path / "step_00000002" / "optimizer.safetensors").unlink()
    with Store(tmp_path) as store:
        store.save(snapshot(3))
        assert store.names() == ["step_00000001", "step_00000002", "step_00000003"]
        store.save(snapshot(4))
        assert store.names() == ["step_00000003", "step_00000004"]


def test_keeping_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep 2 or more"):
        Store(tmp_path, keep=1)


# --- the same step again --------------------------------------------------------------------------


def test_the_same_again_is_left(tmp_path):
    with Store(tmp_path) as store:
        before = (store.save(snapshot()) / "manifest.json").stat()
        after = (store.save(snapshot()) / "manifest.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("exchange", ["in one step", "in three"])
def test_another_state_of_the_same_step_replaces_it(tmp_path, exchange, monkeypatch):
    if exchange == "in three":
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    with Store(tmp_path, attempt=2) as store:
        store.save(snapshot(1))
        store.save(snapshot(1, ranks=3))
        assert same(store.newest()[0], snapshot(1, ranks=3))
    assert entries(tmp_path) == [".lock", "step_00000001"]


@pytest.mark.parametrize("what", ["directory", "file", "link"])
def test_a_damaged_one_is_replaced_whatever_it_is(tmp_path, what):
    with Store(tmp_path / "c") as store:
        if what == "directory":
            store.save(snapshot(1))
            (store.path_of(1) / "manifest.json").write_text("{}")
        elif what == "file":
            store.path_of(1).write_text("")
        else:
            store.path_of(1).symlink_to(tmp_path)
        store.save(snapshot(1))
        assert store.newest()[1] == []
    assert tmp_path.is_dir() and entries(tmp_path / "c") == [".lock", "step_00000001"]


def test_an_earlier_attempt_does_not_replace_what_a_later_one_wrote(tmp_path):
    with Store(tmp_path, attempt=2) as store:
        store.save(snapshot(1))
    with (
        Store(tmp_path, attempt=1) as store,
        pytest.raises(OutputError, match="attempt 2 has written it"),
    ):
        store.save(snapshot(1, ranks=3))
    assert same(Store(tmp_path, owner=False).newest()[0], snapshot(1))


# --- what is not saved ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stem", ["parameters", "optimizer"])
@pytest.mark.parametrize("later", [False, True])
def test_a_checkpoint_is_finite(tmp_path, value, stem, later):
    with Store(tmp_path) as store:
        store.save(snapshot(1))
        bad = snapshot(2)
        next(iter(bad.arrays[stem].values())).flat[3] = value
        with pytest.raises(NumericsError, match=f"step_00000002 is not saved: {stem}/"):
            (store.save_later if later else store.save)(bad)
        store.wait()
        assert store.names() == ["step_00000001"]


@pytest.mark.parametrize(
    "bad",
    [
        Snapshot(1, {}),
        Snapshot(1, {"../x": {}}),
        Snapshot(1, {"a b": {}}),
        Snapshot(1, {"p": {"/etc/passwd": np.zeros(1)}}),
        Snapshot(1, {"p": {"a/../b": np.zeros(1)}}),
        Snapshot(1, {"p": {"": np.zeros(1)}}),
        Snapshot(1, {"p": {"ü" * 100: np.zeros(1)}}),
        Snapshot(1, {"p": {"a" * 513: np.zeros(1)}}),
        Snapshot(1, {"p": {"a": np.zeros(1, ">f4")}}),
        Snapshot(1, {"p": {"a": np.zeros(1, "complex64")}}),
        Snapshot(1, {"p": {"a": np.array([object()])}}),
        Snapshot(1, {"p": {"a": np.zeros([1] * 9)}}),
        Snapshot(1, {"p": {}}, {"loss": float("nan")}),
        Snapshot(1, {"p": {}}, {"array": np.zeros(1)}),
        Snapshot(1, {"p": {}}, {"deep": json.loads("[" * 40 + "]" * 40)}),
        Snapshot(1, {"p": {}}, {"text": "[" * 40}),
        Snapshot(-1, {"p": {}}),
        Snapshot(10**18, {"p": {}}),
        Snapshot(True, {"p": {}}),
        Snapshot(1.0, {"p": {}}),
    ],
)
def test_what_cannot_be_read_back_is_not_written(tmp_path, bad):
    with Store(tmp_path) as store, pytest.raises(OutputError, match=r"^\[checkpoint\] "):
        store.save(bad)
    assert entries(tmp_path) == [".lock"]


def test_a_store_for_reading_does_not_write(tmp_path):
    for store in (Store(tmp_path, owner=False), Store(tmp_path)):
        store.close()
        with pytest.raises(OutputError, match="reading only, or closed"):
            store.save(snapshot())
        with pytest.raises(OutputError, match="reading only, or closed"):
            store.save_later(snapshot())


# --- in the background ----------------------------------------------------------------------------


def test_a_save_in_the_background_has_the_state_of_the_call(tmp_path, monkeypatch):
    go = threading.Event()
    write = stores.write_file
    monkeypatch.setattr(
        stores, "write_file", lambda *given, **more: go.wait(30) and write(*given, **more)
    )
    with Store(tmp_path) as store:
        given = snapshot(1)
        store.save_later(given)
        for some in given.arrays.values():
            for array in some.values():
                array += 1
        given.values["cursor"] = -1
        assert store.names() == []
        go.set()
        store.wait()
        assert same(store.newest()[0], snapshot(1))
        store.save_later(snapshot(2))
        store.save_later(snapshot(3))
    assert store.names() == ["step_00000002", "step_00000003"]
    assert same(Store(tmp_path, owner=False).newest()[0], snapshot(3))


@pytest.mark.parametrize("call", ["wait", "save", "save_later", "close"])
def test_what_went_wrong_in_the_background_is_raised_at_the_next_call_and_once(
    tmp_path, monkeypatch, call
):
    def fail(*_):
        raise OSError(28, "No space left on device", "parameters.safetensors")

    store = Store(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(stores, "place_checkpoint", fail)
        store.save_later(snapshot(1))
        with pytest.raises(
            OutputError,
            match="step_00000001 cannot be saved .*parameters.safetensors: No space left",
        ):
            getattr(store, call)(*([snapshot(2)] if "save" in call else []))
    if call != "close":
        store.save_later(snapshot(3))
        store.wait()
        assert store.names() == ["step_00000003"]
    store.close()


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise ValueError"])
def test_a_program_that_ends_while_a_save_is_under_way_ends_after_it(tmp_path, end):
    program = f"""
import sys
import numpy as np
from odyssey.checkpoints import Snapshot, Store
store = Store(sys.argv[1])
store.save_later(Snapshot(1, {{"parameters": {{str(i): np.full(1_000_000, i, np.float32) for i in range(4)}}}}))
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == {"pass": 0, "sys.exit(3)": 3, "raise ValueError": 1}[end]
    assert done.stderr == "" or end.startswith("raise")
    found, refused = Store(tmp_path, owner=False).newest()
    assert refused == [] and found is not None and found.arrays["parameters"]["3"][-1] == 3


# --- who may write --------------------------------------------------------------------------------


def test_a_second_job_is_refused_and_told_who_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    with Store(tmp_path, attempt=3) as store:
        with pytest.raises(
            OutputError, match=rf"is in use by pid {os.getpid()} on \S+ \(attempt 3\); wait"
        ):
            Store(tmp_path, attempt=3)
        store.save(snapshot(1))
        assert same(Store(tmp_path, owner=False).newest()[0], snapshot(1))
    Store(tmp_path).close()


def test_another_process_is_refused_while_one_lives_and_not_after_it_was_killed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Store(tmp_path)
            os.write(writing, b"held")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 4) == b"held"
        with pytest.raises(OutputError, match=rf"is in use by pid {child} on "):
            Store(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == child
    Store(tmp_path).close()
    assert (tmp_path / ".lock").read_text() == ""


def test_a_later_attempt_takes_over_from_one_that_hangs(tmp_path):
    hanging = Store(tmp_path, attempt=1)
    hanging.save(snapshot(1))
    with Store(tmp_path, attempt=2) as store:
        store.save(snapshot(2))
        with pytest.raises(
            OutputError,
            match=r"is held by pid \d+ on \S+ \(attempt 2\) now, not by .*\(attempt 1\)",
        ):
            hanging.save(snapshot(3))
        hanging.close()
        store.save(snapshot(4))
    assert store.names() == ["step_00000002", "step_00000004"]
    assert entries(tmp_path) == [".lock", *store.names()]


def test_an_attempt_that_is_over_does_not_write(tmp_path, monkeypatch):
    monkeypatch.setenv("ODYSSEY_RUN_DIR", str(tmp_path))
    with Store(tmp_path / "checkpoints", attempt=1) as store:
        store.save(snapshot(1))
        (tmp_path / "attempt.json").write_text('{"attempt": 1}')
        store.save(snapshot(2))
        (tmp_path / "attempt.json").write_text('{"attempt": 2}')
        with pytest.raises(OutputError, match="attempt 1 is over, attempt 2 writes now"):
            store.save(snapshot(3))
        (tmp_path / "attempt.json").write_text("{")
        with pytest.raises(OutputError, match="does not say which attempt may write"):
            store.save(snapshot(3))
    assert entries(store.folder) == [".lock", "step_00000001", "step_00000002"]


class _NoFlock:
    LOCK_EX = LOCK_NB = LOCK_UN = 0

    @staticmethod
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("held", "attempt", "free"),
    [
        ({"host": "elsewhere", "pid": 1, "attempt": 0}, 0, False),
        ({"host": "elsewhere", "pid": 1, "attempt": 1}, 2, True),
        ({"host": stores.host_name(), "pid": os.getppid(), "attempt": 0}, 0, False),
        ({"host": stores.host_name(), "pid": 2**22 + 1, "attempt": 0}, 0, True),
    ],
)
def test_without_flock_the_file_decides(tmp_path, monkeypatch, held, attempt, free):
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    monkeypatch.setattr(files, "fcntl", _NoFlock)
    (tmp_path / ".lock").write_text(json.dumps(held))
    if free:
        Store(tmp_path, attempt=attempt).close()
    else:
        with pytest.raises(OutputError, match=f"in use by pid {held['pid']}"):
            Store(tmp_path, attempt=attempt)


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        (f".step_00000003.tmp.0.{stores.host_name()}.{2**22 + 1}", True),
        (f".step_00000003.old.0.{stores.host_name()}.{2**22 + 1}", True),
        (f".step_00000003.tmp.0.{stores.host_name()}.{os.getpid()}", True),
        (f".step_00000003.tmp.5.{stores.host_name()}.{os.getppid()}", False),
        (".step_00000003.tmp.4.elsewhere.1", True),
        (".step_00000003.tmp.5.elsewhere.1", False),
        (".step_00000003.tmp", False),
        ("mine", False),
    ],
    ids=list("abcdefgh"),  # the names hold process numbers
)
def test_only_what_is_certainly_left_over_is_removed(tmp_path, name, gone):
    (tmp_path / name).mkdir()
    (tmp_path / name / "parameters.safetensors").write_text("half")
    Store(tmp_path, attempt=5).close()
    assert (tmp_path / name).exists() is not gone


def test_who_reads_while_another_process_writes_sees_whole_checkpoints_only(tmp_path):
    """Saved, replaced and removed as fast as it goes."""
    Store(tmp_path).close()
    child = os.fork()
    if child == 0:
        try:
            with Store(tmp_path) as store:
                for step in range(1, 10**6):
                    store.save(snapshot(step))
                    store.save(snapshot(step, again=True))
        finally:
            os._exit(1)
    try:
        # each save is flushed
        reader, seen, until = Store(tmp_path, owner=False), [0], time.monotonic() + 300
        while len(set(seen)) < 30 and time.monotonic() < until:
            found, refused = reader.newest()
            assert refused == []
            if found is not None:
                assert found.step >= seen[-1] and same(found, snapshot(found.step, **_again(found)))
                seen.append(found.step)
            assert not any(isinstance(one, Refused) for one in reader.verified())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(set(seen)) == 30


def _again(found: Snapshot) -> dict:
    return {"again": True} if "again" in found.values else {}


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["with space", "ünïcode ☃", "new\nline", "-dash", "quote'\"$(x)"])
def test_any_directory_name_works_and_an_error_stays_one_line(tmp_path, name):
    with Store(tmp_path / name) as store:
        store.save(snapshot(1))
        with pytest.raises(OutputError) as raised:
            store.save(Snapshot(2, {"bad name": {}}))
    assert same(Store(tmp_path / name, owner=False).newest()[0], snapshot(1))
    assert "\n" not in str(raised.value)
    with pytest.raises(CheckpointError) as raised:
        Store(tmp_path / name, owner=False).load(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_links_to_directories_work_and_links_inside_do_not(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with Store(tmp_path / "link") as store:
        store.save(snapshot(1))
        store.save(snapshot(2))
        (tmp_path / "latest").symlink_to(store.path_of(2))
        assert same(store.load(tmp_path / "latest"), snapshot(2))
        file = store.path_of(2) / "parameters.safetensors"
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        found, [refused] = store.newest()
        assert found.step == 1
        assert (
            "parameters.safetensors cannot be opened: Too many levels of symbolic links"
            in refused.reason
        )
        (tmp_path / "real" / "step_00000003").symlink_to(store.path_of(1))
        assert store.newest()[1][0].path.name == "step_00000003"


def test_a_directory_that_moves_with_its_process_elsewhere_is_still_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store("c") as store:
        (tmp_path / "d").mkdir()
        monkeypatch.chdir(tmp_path / "d")
        store.save(snapshot(1))
    assert (tmp_path / "c" / "step_00000001").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_somebody_else_that_all_can_write_is_refused(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    Store(folder).close()
    folder.chmod(0o777)
    with pytest.raises(OutputError, match="belongs to user 12345 and everybody may write"):
        Store(folder)
    with pytest.raises(CheckpointError, match="belongs to user 12345 and everybody may write"):
        Store(folder, owner=False).newest()
    folder.chmod(0o755)
    with Store(folder) as store:
        store.save(snapshot(1))
        path = store.save(snapshot(2))
        os.chown(path, 12345, -1)
        path.chmod(0o777)
        found, [refused] = store.newest()
        assert (
            found.step == 1
            and refused.reason == "it belongs to user 12345 and everybody may write to it"
        )
        with pytest.raises(CheckpointError, match="belongs to user 12345"):
            store.load(path)


def _as_nobody(folder: Path, action) -> str:
    """What the error of `action` says in a process without root's rights; they pass every
    permission.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            action()
            said = "nothing"
        except OutputError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o755)
    for above in tmp_path.parents[:3]:  # pytest-xdist adds one
        above.chmod(0o755)
    folder = tmp_path / "c"
    folder.mkdir(0o555)
    said = _as_nobody(folder, lambda: Store(folder))
    assert said == f"[files] {folder} cannot be written to; name another, or change its permissions"
    said = _as_nobody(folder, lambda: Store(folder / "deeper"))
    assert (
        said
        == f"[files] {folder}/deeper cannot be used as a directory: Permission denied; name another"
    )


@pytest.mark.parametrize("gone", ["directory", "all above it", "lock"])
@pytest.mark.parametrize("later", [False, True])
def test_what_somebody_removed_is_made_anew(tmp_path, monkeypatch, gone, later):
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    told: list[str] = []
    folder = tmp_path / "a" / "b"
    with Store(folder, tell=told.append) as store:
        save = store.save_later if later else store.save
        save(snapshot(1))
        store.wait()
        if gone == "lock":
            (folder / ".lock").unlink()
        else:
            shutil.rmtree(folder if gone == "directory" else folder.parent)
        save(snapshot(2))
        store.wait()
        assert len(told) == 1 and "made anew" in told[0]
        save(snapshot(3))
        store.wait()
        with pytest.raises(OutputError, match="is in use by pid"):
            Store(folder)
    assert [path.name for path in sorted(folder.glob("step_*"))] == [
        "step_00000002",
        "step_00000003",
    ]
    assert len(told) == 1


def test_a_directory_that_is_removed_at_the_start_is_one_line(tmp_path, monkeypatch):
    take = locks.DirectoryLock._acquire_lock

    def taken(lock):
        descriptor = take(lock)
        shutil.rmtree(lock.path.parent)
        return descriptor

    monkeypatch.setattr(locks.DirectoryLock, "_acquire_lock", taken)
    with pytest.raises(OutputError, match="cannot be used: No such file"):
        Store(tmp_path / "a")


def test_a_directory_that_was_removed_and_is_held_by_another_now_is_left_to_it(tmp_path):
    with Store(tmp_path / "a") as store:
        shutil.rmtree(tmp_path / "a")
        with Store(tmp_path / "a"), pytest.raises(OutputError, match="is held by|is not saved"):
            store.save(snapshot(1))


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "c").write_text("")
    with pytest.raises(OutputError, match="Not a directory"):
        Store(tmp_path / "c")
    with pytest.raises(OutputError, match="Not a directory"):
        Store(tmp_path / "c" / "d")
