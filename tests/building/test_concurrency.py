"""Several processes want the kernels at the same time: one compiles, the others use what it
made.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import pytest

REAL = "import sys; sys.argv[0] = 'mojo'; from mojo._entrypoints import exec_mojo; exec_mojo()"
STUCK = "import time; time.sleep(300)"


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_four_processes_compile_once(start, entries):
    done = [process.communicate(timeout=120) for process in [start() for _ in range(4)]]
    paths = {out for out, _ in done}
    assert len(paths) == 1 and next(iter(paths)).endswith("libodyssey.so\n")
    assert sum("compiling the kernels for" in err for _, err in done) == 1
    assert len(entries()) == 1


COUNTING = """
import os, sys
with open({log!r}, "a") as file:
    file.write(os.path.basename(sys.argv[4]) + "\\n")
"""


def test_processes_compile_each_part_once(start, family_tree, tmp_path):
    log = tmp_path / "calls"
    processes = [start(COUNTING.format(log=str(log)) + REAL) for _ in range(4)]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(paths) == 1
    assert sorted(log.read_text().split()) == ["capi.mojo", "one.mojo", "two.mojo"]
    library = ctypes.CDLL(paths.pop())
    assert (library.od_answer(), library.od_one(), library.od_two()) == (42, 11, 12)


def test_killed_builder_is_taken_over(start, entries):
    """A builder stops in the middle; the one that waits says for whom, and goes on when it is
    killed.
    """
    stuck = start(STUCK)
    wait_for(lambda: any(".tmp-" in name for name in entries()))
    left = entries()
    heir = start()
    assert (
        heir.stderr.readline()
        == f"odyssey: waiting for process {stuck.pid} to compile the kernels\n"
    )
    stuck.kill()
    out, err = heir.communicate(timeout=120)
    assert out.endswith("libodyssey.so\n"), err
    assert entries() != left and len(entries()) == 1 and ".tmp-" not in entries()[0]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="looks into /proc; the kernel ends it on Linux only",
)
def test_a_killed_builder_takes_its_compiler_along(start, entries):
    stuck = start(STUCK)
    wait_for(lambda: any(".tmp-" in name for name in entries()) and children(stuck.pid))
    compiler = children(stuck.pid)
    stuck.kill()
    stuck.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in compiler), 10)


def children(pid: int) -> list[str]:
    return " ".join(
        path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")
    ).split()


def test_ranks_other_than_the_first_wait_in_silence(start, entries):
    stuck = start(STUCK)
    wait_for(lambda: any(".tmp-" in name for name in entries()))
    heir = start(PMI_RANK="3")
    time.sleep(3)
    stuck.kill()
    out, err = heir.communicate(timeout=120)
    assert out.endswith("libodyssey.so\n")
    assert "waiting" not in err


def test_who_waited_for_a_failure_does_not_repeat_it(start, entries, tmp_path):
    log, go = tmp_path / "calls", tmp_path / "go"
    fail = f"""
import os, sys, time
open({str(log)!r}, "a").write("x")
while not os.path.exists({str(go)!r}):
    time.sleep(0.02)
sys.exit("capi.mojo:1:1: error: zork")
"""
    first = start(fail)
    wait_for(log.exists)
    second = start(fail)
    assert "waiting for process" in second.stderr.readline()
    go.touch()
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "BuildError" in err and "error: zork" in err
    assert log.read_text() == "x"
    assert entries() == []
    third = start(REAL)
    assert third.communicate(timeout=120)[0].endswith("libodyssey.so\n")
