"""Parts of the launcher around a rank: its wrapper, the records of its end, what a killed
attempt leaves.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import odyssey
from odyssey.launch import LaunchConfig, leftovers, rank_ends, restart_policy, starting

WRAPPER = Path(odyssey.__file__).parent / "launch" / "rank_wrapper.py"
MPICH = starting.Starter("mpich", "/x/mpirun", "MPICH 5", "mpich")
OPEN_MPI = starting.Starter("openmpi", "/x/mpirun", "Open MPI 5", "openmpi")
SRUN = starting.Starter("srun", "/x/srun", "srun", "mpich")

# --- wrapper --------------------------------------------------------------------------------------


def kept(folder: Path, *words: str, **environment: str) -> tuple[int, dict]:
    for name in ("ranks", "ends"):
        (folder / name).mkdir(exist_ok=True)
    own = {"ODYSSEY_RUN_DIR": str(folder), "ODYSSEY_ATTEMPT": "2", "PMI_RANK": "3", **environment}
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(WRAPPER), *words],
        env={**os.environ, **own},
        timeout=30,
        capture_output=True,
    )
    return done.returncode, json.loads((folder / "ends" / "3.json").read_text())


def test_a_rank_wrapper_says_how_its_program_ended_and_ends_the_same_way(tmp_path):
    code, record = kept(tmp_path, "sh", "-c", "exit 5")
    assert code == 5 and (record["rank"], record["attempt"], record["code"], record["signal"]) == (
        3,
        2,
        5,
        None,
    )
    code, record = kept(tmp_path, "sh", "-c", "kill -SEGV $$")
    assert code == -11 and (record["code"], record["signal"]) == (None, 11)
    code, record = kept(tmp_path, "no-such-program")
    assert code == 127 and record["code"] == 127


def test_a_rank_s_own_word_is_kept(tmp_path):
    said = {"attempt": 2, "reason": "why", "step": 9, "code": 65, "following": False}
    script = (
        f"mkdir -p ends; echo '{json.dumps(said)}' > {tmp_path}/ends/3.reason.json; kill -KILL $$"
    )
    code, record = kept(tmp_path, "sh", "-c", script)
    assert code == -9 and (record["signal"], record["own"], record["reason"], record["step"]) == (
        9,
        65,
        "why",
        9,
    )
    end = rank_ends.ended(tmp_path / "ends", 2)[3]
    # MPI_Abort killed it
    assert (end.code, end.signal, end.reason, end.step) == (65, None, "why", 9)
    assert rank_ends.ended(tmp_path / "ends", 1) == {}
    assert rank_ends.started(tmp_path / "ranks", 2)[3].pid == record["pid"]


def test_a_rank_wrapper_leaves_the_record_of_a_later_attempt(tmp_path):
    (tmp_path / "ends").mkdir()
    later = {"attempt": 3, "rank": 3, "code": 0}
    (tmp_path / "ends" / "3.json").write_text(json.dumps(later))
    assert kept(tmp_path, "sh", "-c", "exit 5") == (5, later)
    assert [path.name for path in (tmp_path / "ends").iterdir()] == ["3.json"]


def test_a_rank_wrapper_knows_the_end_where_signals_of_children_are_ignored(tmp_path):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ends").mkdir()
    script = (
        "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.execv(sys.executable, [sys.executable, '-I', '-S', *sys.argv[1:]])\n"
    )
    show = (
        "import signal, sys; sys.exit(6 if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL "
        "else 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(WRAPPER), sys.executable, "-c", show],
        env={
            **os.environ,
            "ODYSSEY_RUN_DIR": str(tmp_path),
            "ODYSSEY_ATTEMPT": "2",
            "PMI_RANK": "3",
        },
        timeout=30,
    )
    assert (
        done.returncode == 6 and json.loads((tmp_path / "ends" / "3.json").read_text())["code"] == 6
    )


def test_a_program_gets_signals_descriptors_and_default_dispositions(tmp_path):
    script = (
        "import os,signal,sys,time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(7))\n"
        "print(os.fstat(int(os.environ['FD'])).st_size, signal.getsignal(signal.SIGHUP), "
        "flush=True)\n"
        "time.sleep(30)\n"
    )
    file = tmp_path / "handed-on"
    file.write_text("12345")
    (tmp_path / "ends").mkdir()
    with open(file) as opened:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WRAPPER), sys.executable, "-c", script],
            env={**os.environ, "ODYSSEY_RUN_DIR": str(tmp_path), "FD": str(opened.fileno())},
            pass_fds=[opened.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            # the tests may have been started with nohup, which ignores it
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        assert process.stdout.readline().startswith("5 0")
        process.terminate()
        assert process.wait(10) == 7
        process.stdout.close()


def test_records_that_are_garbage_are_not_there(tmp_path):
    for name, text in {
        "0.json": "",
        "1.json": "[]",
        "2.json": '{"attempt": 9}',
        "x.json": "{}",
        "3.json": "{",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "4.json").write_text(
        json.dumps({"attempt": 1, "code": "x", "signal": [], "host": 5, "reason": {}})
    )
    found = rank_ends.ended(tmp_path, 1)
    assert set(found) == {4} and found[4].code is None and found[4].host == "?"


def test_a_signal_that_only_the_watcher_tells_is_no_exit_code(tmp_path):
    """Its wrapper was killed as well, by a launcher that had lost another host."""
    said = {
        "attempt": 1,
        "rank": 1,
        "host": "h2",
        "code": 137,
        "signal": 9,
        "step": 12,
        "reason": "was killed by SIGKILL",
    }
    (tmp_path / "1.reason.json").write_text(json.dumps(said))
    (end,) = rank_ends.ended(tmp_path, 1).values()
    assert (end.code, end.signal, end.step) == (
        None,
        9,
        12,
    ) and "was killed by SIGKILL at step 12" in str(end)
    lost = rank_ends.End(2, "h3", 69, None, 0.0)
    layout = (("h1", 1), ("h2", 1), ("h3", 1))
    assert restart_policy.in_doubt(restart_policy.Outcome(1, 3, layout, ended={1: end, 2: lost}))
    config, past = LaunchConfig(nproc_per_node=3, max_restarts=3), restart_policy.Past()
    for _ in range(2):  # a second time is no reason to give up: that is for exit codes
        action = restart_policy.decide(
            restart_policy.Outcome(
                1, 3, layout, {1: rank_ends.Started(1, "h2", 5)}, {1: end}, step=12
            ),
            past,
            config,
            (),
        )
        assert action.code is None and "restarting" in action.line
        past = action.past


# --- leftovers ------------------------------------------------------------------------------------


def test_only_what_is_proven_to_be_ours_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        leftovers,
        "places",
        lambda temporary=None: [(tmp_path, re.compile(r"mpich_shm_\w+|ompi\.\d+"))],
    )
    (tmp_path / "mpich_shm_before").touch()
    before = leftovers.snapshot()
    ours, held, other, late = (
        tmp_path / f"mpich_shm_{name}" for name in ("ours", "held", "x y", "late")
    )
    for path in (ours, held, other, late):
        path.touch()
    os.utime(late, (time.time() + 100,) * 2)
    session = tmp_path / "ompi.999999999"
    session.mkdir()
    (session / "x").touch()
    living = tmp_path / f"ompi.{os.getpid()}"
    living.mkdir()
    with open(held):
        for other_than_that in (None, [], {"names": 1, "time": 1.0}, {"names": [], "time": "now"}):
            assert leftovers.clean(other_than_that, time.time()) == []
        removed = leftovers.clean(json.loads(json.dumps(before)), time.time())
        monkeypatch.setattr(leftovers, "_held", lambda: open("/proc/none/uptime"))
        (tmp_path / "mpich_shm_unproven").touch()
        assert leftovers.clean(before, time.time()) == []
        (tmp_path / "mpich_shm_unproven").unlink()
    assert set(removed) == {str(ours), str(session)}
    assert {p.name for p in tmp_path.iterdir()} == {
        "mpich_shm_before",
        held.name,
        other.name,
        late.name,
        living.name,
    }


def test_processes_are_found_by_their_token_and_killed():
    token = "ODYSSEY_LAUNCH=0123456789abcdef"
    process = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "ODYSSEY_LAUNCH": token.partition("=")[2]}
    )
    until = time.monotonic() + 10
    while process.pid not in leftovers.processes(token):
        assert time.monotonic() < until
    assert leftovers.kill(token) == [] and process.wait(5) == -9


def test_a_process_that_has_just_begun_its_program_is_not_missed(monkeypatch):
    """Between execve and the new stack /proc shows neither environment nor arguments: seen once
    in 400 starts.
    """
    token, other = b"ODYSSEY_LAUNCH=0123456789abcdef", str(os.getppid())
    shown = {"1": [b"", b"A=1\0" + token + b"\0"], "2": [b""] * 9, "3": [b"B=1\0"] * 9}
    cmdline, stat_of = {"2": b"no\0environment\0"}, f"{other} (x) S 1 1 1 0 -1 4194304 0"

    def read(path: str) -> bytes:
        pid, what = path.split("/")[2:]
        if what == "environ":
            return shown[pid].pop(0)
        return cmdline.get(pid, b"")

    monkeypatch.setattr(leftovers, "pids", lambda: (1, 2, 3))
    monkeypatch.setattr(leftovers, "_read", read)
    monkeypatch.setattr(
        leftovers, "status", lambda pid: stat_of.encode().rpartition(b")")[2].split()
    )
    monkeypatch.setattr(os, "stat", lambda path: os.lstat("/proc/self"))
    assert leftovers.processes(token.decode(), 60.0) == [1]
    assert len(shown["3"]) == 7  # two looks

    shown["1"], stat_of = [b""] * 9, f"{other} (kworker) S 2 0 0 0 -1 {0x00200000 | 64} 0"
    shown["2"], shown["3"] = [b""] * 9, [b"B=1\0"] * 9
    assert leftovers.processes(token.decode(), 60.0) == []  # a thread of the kernel never shows any
    assert len(shown["3"]) == 8

    looks = [[], [7], [], []]  # what began while it was looked at is found by the second look
    monkeypatch.setattr(leftovers, "processes", lambda token: looks.pop(0))
    monkeypatch.setattr(leftovers, "_dead", lambda pid: False)
    ended = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append((pid, number)))
    assert leftovers.kill("A=1") == [] and ended == [(7, 9)] and looks == []
