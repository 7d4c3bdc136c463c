"""Saves that go wrong: calls of the system that fail, a full disk, and SIGKILL at any moment.

Whatever happens, a checkpoint is there whole or not at all, the one before it is as it was, and
nothing stays aside.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def injected(tmp_path_factory) -> dict[str, Any]:
    """What injected.py saw."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("injecting faults needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("injected")
    library = folder / "inject.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, HERE / "inject.c", "-ldl"],
        check=True,
        timeout=60,
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, HERE / "injected.py", library, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SAVES = ("new", "replaced", "later")


def good(state: dict[str, Any], *steps: int) -> bool:
    """Whether these checkpoints are there and nothing else, and the last is found."""
    names = [".lock", *(f"step_{step:08d}" for step in steps)]
    return (
        state["entries"] == names
        and state["step"] == steps[-1]
        and state["whole"]
        and not state["refused"]
    )


@pytest.mark.parametrize("save", SAVES)
def test_the_calls_of_a_save_are_those_that_are_known(injected, save):
    file = ["open", "write", "write", "fsync", "close"]
    manifest = ["open", "write", "fsync", "close"]
    end = ["renameat2", "fsync"] if save == "replaced" else ["rename", "fsync", "rename"]
    assert injected[save]["calls"] == ["mkdir", *file, *file, *manifest, "fsync", *end]


@pytest.mark.parametrize("save", SAVES)
def test_each_call_that_fails_is_reported_and_nothing_is_torn(injected, save):
    cases = injected[save]["failed"]
    assert len(cases) == (4 if save == "new" else 1) * len(injected[save]["calls"])
    new = 2 if save == "replaced" else 3
    kept = (1, 2) if save == "replaced" else (1, 2, 3)
    # the call after which the name is there
    in_place = len(injected[save]["calls"]) - (1 if save == "replaced" else 2)
    for case in cases:
        where = (
            f"{case['error']} in {case['name']} {case['call']}: {case['raised']}, {case['entries']}"
        )
        assert case["raised"] is not None and case["raised"]["kind"] == "OutputError", where
        text = case["raised"]["text"]
        strerror = {
            "EIO": "Input/output",
            "ENOSPC": "No space left",
            "EROFS": "Read-only",
            "EDQUOT": "quota exceeded",
        }
        assert (
            text.startswith(f"[checkpoint] step_0000000{new} ") and strerror[case["error"]] in text
        ), where
        if case["call"] < in_place:
            assert good(case, 1, 2) and case["change"] == 0, where
            assert "cannot be saved in " in text and "those before it are as they were" in text, (
                where
            )
        elif case["name"] == "fsync":
            assert "a power failure may lose it" in text, where
            # the one that was replaced
            left = [name for name in case["entries"] if name.startswith(".step")]
            assert case["step"] == new and case["whole"] and len(left) == (save == "replaced"), (
                where
            )
        else:
            assert good(case, *kept) and "is saved, but an older one cannot be removed" in text, (
                where
            )
        follow = [name for name in case["next"]["entries"] if not name.startswith(".step")]
        assert case["next"]["step"] == 4 and case["next"]["whole"] and len(follow) == 3, where


@pytest.mark.parametrize("save", SAVES)
def test_a_disk_that_takes_half_of_a_write_gets_the_other_half(injected, save):
    cases = injected[save]["short"]
    assert len(cases) == 5
    assert all(
        case["raised"] is None and good(case, *((1, 2) if save == "replaced" else (2, 3)))
        for case in cases
    )


@pytest.mark.parametrize("save", SAVES)
def test_a_disk_that_is_full_after_half_of_a_write_is_reported(injected, save):
    cases = injected[save]["full"]
    assert len(cases) == 5
    for case in cases:
        assert good(case, 1, 2) and case["change"] == 0
        assert "No space left on device" in case["raised"]["text"]


@pytest.mark.parametrize("save", SAVES)
def test_sigkill_before_and_after_every_call_leaves_a_whole_checkpoint(injected, save):
    cases = injected[save]["killed"]
    assert len(cases) >= 2 * len(injected[save]["calls"])  # opening the directory has calls as well
    found = set()
    for case in cases:
        where = f"call {case['call']} {'after' if case['after'] else 'before'}: {case['entries']}"
        assert case["refused"] == [] and case["whole"], where
        assert not any(name.startswith(".step") for name in case["swept"]), where
        assert len(case["swept"]) >= 3 and good(case["next"], case["step"], 4), where
        found.add((case["step"], case["change"]))
    assert found == ({(2, 0), (2, 1)} if save == "replaced" else {(2, 0), (3, 0)})


def test_sigkill_at_random_moments_leaves_a_whole_checkpoint(tmp_path):
    """The same as `scripts/kill-saves`, with few kills."""
    command = [sys.executable, HERE / "kills.py", "--count", "12", "--json", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (
        result["kills"] == result["resumable"] == 12
        and result["lost"] == []
        and sum(result["moments"].values()) == 12
    )


def test_sigkill_of_any_rank_while_a_checkpoint_is_written_in_parts(tmp_path):
    words = [
        sys.executable,
        HERE / "kills.py",
        "--ranks",
        "3",
        "--count",
        "3",
        "--json",
        "--folder",
        tmp_path,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["resumable"] == 3 and not found["left"], found


FULL_DISK = """
import json, os, sys
import numpy as np
from odyssey.checkpoints import Snapshot, Store
from odyssey.errors import OutputError

def snapshot(step, floats):
    return Snapshot(step, {"parameters": {"w": np.full(floats, step, np.float32)}})

said = []
with Store(sys.argv[1]) as store:
    store.save(snapshot(1, 1000))
    store.save(snapshot(2, 1000))
    for save in (store.save, lambda one: (store.save_later(one), store.wait())):
        try:
            save(snapshot(3, 1000_000))
        except OutputError as problem:
            said.append(str(problem))
    entries = sorted(os.listdir(store.folder))
    found, refused = store.newest()
    store.save(snapshot(4, 1000))
    print(json.dumps([said, entries, found.step, len(refused), store.names()]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount a small disk"
)
def test_a_full_disk_is_reported_and_the_next_save_that_fits_works(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = 'mount -t tmpfs -o size=256k none "$1" && exec "$2" -c "$3" "$1/checkpoints"'
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", disk, sys.executable, FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    said, entries, step, refused, names = json.loads(done.stdout)
    assert (
        said
        == [
            f"[checkpoint] step_00000003 cannot be saved in {disk}/checkpoints: "
            "parameters.safetensors: No space left on device; those before it are as they were"
        ]
        * 2
    )
    assert entries == [".lock", "step_00000001", "step_00000002"]
    assert (step, refused, names) == (2, 0, ["step_00000002", "step_00000004"])
