"""The launcher's parts by themselves: argument lists, environment, output, lock, wrapper,
leftovers, option orders.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import random
import secrets
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

import odyssey
from odyssey.base import runs
from odyssey.base.variables import DECIDE_BITS, OTHER_ARITHMETIC
from odyssey.errors import ConfigError, LaunchError, OutputError
from odyssey.launch import (
    LaunchConfig,
    attempt,
    leftovers,
    output,
    parse,
    restart_policy,
    root_user,
    starting,
    supervisor,
)
from odyssey.launch import lock as lock_file
from odyssey.launch.hosts import parse_hosts, place
from odyssey.launch.lock import RunLock, holder
from odyssey.launch.output import LINE_LIMIT, LiveLine, Pump, WithoutHydra
from odyssey.launch.supervisor import (
    DistributedLauncher,
    _exported,
    default_run_dir,
    launch_distributed_training,
)

WRAPPER = Path(odyssey.__file__).parent / "launch" / "rank_wrapper.py"
MPICH = starting.Starter("mpich", "/x/mpirun", "MPICH 5", "mpich")
OPEN_MPI = starting.Starter("openmpi", "/x/mpirun", "Open MPI 5", "openmpi")
SRUN = starting.Starter("srun", "/x/srun", "srun", "mpich")


# --- argument lists and environment ---------------------------------------------------------------


def test_argument_lists():
    config = LaunchConfig(nproc_per_node=4, hosts=parse_hosts("h1,h2"), bind_if="eth1")
    layout = place(config.hosts, 4)
    words = starting.build_command(config, MPICH, 4, layout, ["ODYSSEY_X"]) + starting.wrap_rank(
        ["python", "a b;c"]
    )
    assert words[:7] == ["/x/mpirun", "-hosts", "h1:2,h2:2", "-iface", "eth1", "-n", "4"]
    assert words[-3].endswith("rank_wrapper.py") and words[-2:] == ["python", "a b;c"]
    words = starting.build_command(config, OPEN_MPI, 4, layout, ["ODYSSEY_X"])
    assert (
        words[words.index("--host") + 1] == "h1:2,h2:2"
        and words[words.index("-x") + 1] == "ODYSSEY_X"
    )
    assert "--oversubscribe" in words and words[words.index("btl_tcp_if_include") + 1] == "eth1"
    words = starting.build_command(LaunchConfig(nproc_per_node=4), SRUN, 4, (), [])
    assert words[:5] == ["/x/srun", "--mpi=pmi2", "--kill-on-bad-exit=0", "--ntasks", "4"]


def test_the_environment_of_ranks(tmp_path):
    given = {
        "HOME": "/h",
        "LC_ALL": "C",
        "AWS_SECRET_ACCESS_KEY": "s",
        "PMI_RANK": "3",
        "FI_PROVIDER": "tcp",
        "X": "1",
    }
    given["SLURM_JWT"] = "s"
    config = LaunchConfig(nproc_per_node=2, env=("X",), backend="gloo", watchdog=5)
    out = starting.build_environment(config, given, MPICH, runs.Run(tmp_path, 3), 2, "t" * 16)
    assert {"HOME", "LC_ALL", "FI_PROVIDER", "X"} <= set(out) and not (
        {"AWS_SECRET_ACCESS_KEY", "PMI_RANK", "SLURM_JWT"} & set(out)
    )
    assert (out["ODYSSEY_RUN_DIR"], out["ODYSSEY_ATTEMPT"], out["ODYSSEY_RANKS"]) == (
        str(tmp_path),
        "3",
        "2",
    )
    assert (out["ODYSSEY_WATCHDOG"], out["WORLD_SIZE"], out["MASTER_ADDR"]) == (
        "5",
        "2",
        "127.0.0.1",
    )
    assert "StrictHostKeyChecking=yes" in out["HYDRA_LAUNCHER_EXTRA_ARGS"]


def test_ranks_get_what_decides_bits(tmp_path):
    """All variables of the reviewed list, also on other machines, where Open MPI sends none."""
    given = {name.replace("*", "X"): "1" for name in DECIDE_BITS} | {"ATEN": "1", "AWS_KEY": "s"}
    config = LaunchConfig(other_arithmetic=True)
    out = starting.build_environment(config, given, MPICH, runs.Run(tmp_path, 1), 2, "t" * 16)
    passed = {name for name in given if name in out}
    assert passed == set(given) - {"ATEN", "AWS_KEY"}
    assert {"ATEN_X", "ONEDNN_X", "DNNL_X", "MKL_X", "OMP_X", "ODYSSEY_TARGET_CPU"} <= passed
    assert out[OTHER_ARITHMETIC] == "1"
    assert passed | {OTHER_ARITHMETIC} <= set(_exported(out, config))
    config = LaunchConfig()
    out = starting.build_environment(config, given, MPICH, runs.Run(tmp_path, 1), 2, "t" * 16)
    assert OTHER_ARITHMETIC not in out


def test_srun_gives_ranks_the_cores_that_the_job_asked_for(tmp_path):
    """srun reads SRUN_CPUS_PER_TASK, and since SLURM 22.05 no longer SLURM_CPUS_PER_TASK, which
    sbatch sets.
    """
    srun, run = starting.Starter("srun", "srun", "srun", "mpich"), runs.Run(tmp_path, 1)
    for given, wanted in (
        ({"SLURM_CPUS_PER_TASK": "8"}, "8"),
        ({"SRUN_CPUS_PER_TASK": "2"}, "2"),
        ({}, None),
    ):
        given = {"SLURM_CPUS_PER_TASK": "8", **given} if given else {}
        out = starting.build_environment(LaunchConfig(), given, srun, run, 2, "t" * 16)
        assert out.get("SRUN_CPUS_PER_TASK") == wanted


def test_a_launcher_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(LaunchError, match="outside of a SLURM allocation"):
        starting.find_starter(LaunchConfig(launcher="srun"), {})
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho something else\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match="neither MPICH's nor Open MPI's"):
        starting.find_starter(LaunchConfig(), {"PATH": str(tmp_path)})
    fake.unlink()
    with pytest.raises(LaunchError, match="no mpirun"):
        starting.find_starter(LaunchConfig(), {"PATH": str(tmp_path)})


BAR = "=" * 83
BOX = f"""
{BAR}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 29394 RUNNING AT vm
=   EXIT CODE: 15
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
{BAR}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Terminated (signal 15)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
SOURCE = "[mpiexec@vm] main (/mpich-5.0.2/src/pm/hydra/mpiexec/mpiexec.c:270): error waiting\n"
EXECVP = "[proxy:0@vm] HYDU_create_process (lib/utils/launch.c:24): execvp error on file ssh (x)\n"


@pytest.mark.parametrize("seed", range(20))
def test_what_mpich_adds_is_left_out_however_it_is_cut(seed):
    """A blank line before the box goes with it; all else comes through, byte by byte."""
    dice = random.Random(seed)
    own_texts = ["hello\n", "\n", "==\n", f"{BAR}\n", "[mpi", "part", "[mpiexec] mine\n", EXECVP]
    for _ in range(300):
        data = expected = ""
        for _ in range(dice.randrange(8)):
            piece = dice.choice([BOX, SOURCE, *own_texts])
            is_own = piece in own_texts
            if is_own or not data or data.endswith("\n"):
                data += piece
                expected += piece if is_own else ""
        without, passed, place = WithoutHydra(), b"", 0
        while place < len(data):
            size = dice.choice([1, 5, 40, 300])
            passed += without(data[place : place + size].encode())
            place += size
        assert (passed + without.end()).decode() == expected, data


def test_the_live_line_is_for_terminals(monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        line = LiveLine(stream)
        line.clear()  # nothing is shown
        line.show("step 7 \x1b and more that does not fit")
        line.clear()
        line.clear()
        shown = os.read(main, 999)
        monkeypatch.setenv("TERM", "dumb")
        LiveLine(stream).show("x")
    os.close(main)
    assert shown == b"\rstep 7 \\x1b and mor\x1b[K\r\x1b[K"
    with open(tmp_path / "file", "w+") as file:
        LiveLine(file).show("x")
        assert file.read() == ""
    LiveLine(None).show("x")


# --- output ---------------------------------------------------------------------------------------


def through(data: bytes, target: int, log=None) -> None:
    source, into = os.pipe()
    os.write(into, data)
    os.close(into)
    pump = Pump(source, target, log)
    until = time.monotonic() + 5
    while not pump.done and time.monotonic() < until:
        pump()
    os.close(source)
    assert pump.done


def test_control_characters_do_not_reach_a_terminal_but_the_log(tmp_path):
    text = b"plain \xc3\xa4\ttext\r\n\x1b[2J\x07 \xc2\x9b1m\n"
    master, terminal = pty.openpty()
    with open(tmp_path / "log", "wb") as log:
        through(text, terminal, log)
    shown = os.read(master, 4096)
    assert (
        b"\\x1b[2J\\x07 \\xc2\\x9b1m" in shown
        and b"plain \xc3\xa4" in shown
        and b"\x1b" not in shown
    )
    assert (tmp_path / "log").read_bytes() == text
    os.close(master)
    os.close(terminal)
    with open(tmp_path / "file", "wb") as file:
        through(text, file.fileno())
    assert (tmp_path / "file").read_bytes() == text


def test_a_long_line_is_cut(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        through(b"x" * (LINE_LIMIT // 2), file.fileno())
        pump = Pump(os.open("/dev/null", os.O_RDONLY), file.fileno(), None)
        shown = b"".join(pump.shown(b"y" * 10000) for _ in range(20)) + pump.shown(b"end\nnext\n")
    assert (
        len(shown) < LINE_LIMIT + 100
        and shown.endswith(b" ... (cut)\nnext\n")
        and b"end" not in shown
    )


def test_a_reader_that_is_slow_or_gone_stops_nobody():
    source, into = os.pipe()
    target, out = os.pipe()
    pump = Pump(source, out, None)
    start = time.monotonic()
    for _ in range(100):  # nobody reads; the pipe holds 64 KiB
        os.set_blocking(into, False)
        try:
            os.write(into, b"z" * 4096)
        except BlockingIOError:
            pass
        pump()
    assert time.monotonic() - start < 5 and not pump.done
    os.close(target)
    os.close(into)
    while not pump.closed:
        pump()
    assert pump.done
    os.close(source)
    os.close(out)


def test_a_reader_that_takes_nothing_is_told_what_it_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "STALLED", 0.05)
    monkeypatch.setattr(output, "BACKLOG", 100_000)
    source, into = os.pipe()
    target, out = os.pipe()
    os.set_blocking(into, False)
    written, until = 0, time.monotonic() + 10
    with open(tmp_path / "log", "wb") as log:
        pump = Pump(source, out, log)
        while written < 500_000 and time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                written += os.write(into, b"z" * 4095 + b"\n")
            pump()
        os.close(into)
        while not pump.closed and time.monotonic() < until:
            pump()
        assert (tmp_path / "log").stat().st_size == written and pump.unshown > 0
        got = b""
        while not pump.done and time.monotonic() < until:
            got += os.read(target, 1 << 16)
        os.set_blocking(target, False)
        with contextlib.suppress(BlockingIOError):
            got += os.read(target, 1 << 16)
        pump.close()
    shown, _, said = got.partition(b"\nodyssey: ")
    assert said == b"%d bytes of the ranks' output not shown, see %s\n" % (
        written - len(shown),
        os.fsencode(log.name),
    )
    assert pump.unshown == 0
    for descriptor in (source, target, out):
        os.close(descriptor)


def test_a_stopped_terminal_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "STALLED", 0.05)
    monkeypatch.setattr(output, "BACKLOG", 10_000)
    master, terminal = pty.openpty()
    source, into = os.pipe()
    with open(tmp_path / "log", "wb") as log:
        pump = Pump(source, terminal, log)
        written, until = 0, time.monotonic() + 10
        while written < 200_000 and time.monotonic() < until:
            if len(pump._pending) < 10_000 or pump.reading:
                written += os.write(into, b"z" * 1000)
            pump()
        os.close(into)
        while not pump.closed and time.monotonic() < until:
            pump()
        pump.close()
    assert (tmp_path / "log").stat().st_size == written >= 200_000 and pump.unshown > 0
    for descriptor in (source, master, terminal):
        os.close(descriptor)


# --- lock -----------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock_file.os, "pwrite", full)
    with pytest.raises(
        OutputError, match="cannot be written: No space left on device; name another --run-dir"
    ):
        RunLock(tmp_path / "launch.lock")


def test_the_lock_is_recovered_from_a_launcher_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_file, "FRESH", 2.0)
    path = tmp_path / "launch.lock"
    lock = RunLock(path)
    assert holder(path)["pid"] == os.getpid()
    with pytest.raises(LaunchError, match=f"process {os.getpid()} on host"):
        RunLock(path)
    lock.close()
    assert holder(path) is None
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "held": True}))
    over = threading.Event()

    def renew():
        while not over.wait(0.05):
            os.utime(path, ns=(0, time.monotonic_ns()))  # the clock of that host is decades behind

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(LaunchError, match="process 7 on host elsewhere"):
            RunLock(path)
        assert holder(path)["pid"] == 7
    finally:
        over.set()
        thread.join()
    monkeypatch.setattr(lock_file, "FRESH", 0.3)
    assert holder(path) is None and holder(path, sure=False)["pid"] == 7
    RunLock(path).close()
    path.write_bytes(b"\xff[[[")
    RunLock(path).close()


# --- the launcher ---------------------------------------------------------------------------------


def test_what_cannot_be_launched_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(ConfigError, match="is no file"):
        DistributedLauncher().launch("none.py")
    with pytest.raises(ConfigError, match="2 nodes, but no hosts"):
        launch_distributed_training("script.py", nnodes=2, launcher="mpirun")
    with pytest.raises(ConfigError, match="'nproc' is no setting"):
        launch_distributed_training("script.py", nproc=2)
    with pytest.raises(ConfigError, match="NUL"):
        DistributedLauncher().launch("script.py", "a\0b")
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(ConfigError, match="without mpirun or srun"):
        DistributedLauncher().launch("script.py")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_root_where_others_work(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(root_user, "working", lambda: [1001])
    monkeypatch.delenv(root_user.ALLOW, raising=False)
    with pytest.raises(ConfigError, match="user 1001 works on this machine too"):
        root_user.check(False)
    root_user.check(True)
    monkeypatch.setenv(root_user.ALLOW, "1")
    root_user.check(False)


def test_names_of_run_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import datetime

    now = datetime.datetime(2026, 11, 21, 9, 30)
    first = default_run_dir("my train$.py", now)
    assert first == Path("runs/20261121-093000-my_train_")
    first.mkdir(parents=True)
    assert default_run_dir("my train$.py", now).name == "20261121-093000-my_train_-2"


def test_a_run_directory_that_makes_no_sense(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.touch()
    run = tmp_path / "run"
    run.mkdir()
    launcher = DistributedLauncher(LaunchConfig(run_dir=run), say=lambda line: None)
    (run / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="run.json is not JSON"):
        launcher.launch(str(script))
    (run / "run.json").write_text(json.dumps({"command": [str(script)]}))
    (run / "attempt.json").write_text('{"attempt": "x"}')
    for damaged in ('{"attempt": "x"}', '{"attempt": -1}', '{"attempt": true}', "{}", "[]", "null"):
        (run / "attempt.json").write_text(damaged)
        with pytest.raises(
            ConfigError,
            match=r"attempt.json is damaged \(no attempt number\); use another --run-dir",
        ):
            launcher.launch(str(script))
    assert (run / "attempt.json").read_text() == "null"


@pytest.mark.parametrize("file", ["run.json", "attempt.json"])
def test_a_damaged_file_of_a_run_leads_to_its_checkpoints(tmp_path, monkeypatch, file):
    """They are in the same directory, so the error must not advise to delete it."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my run"
    Path("script.py").touch()
    (run / "checkpoints" / "step_00000120").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"command": ["script.py"]}))
    (run / file).write_text("{")
    with pytest.raises(ConfigError) as problem:
        DistributedLauncher(LaunchConfig(run_dir=run), say=lambda line: None).launch("script.py")
    text = str(problem.value)
    assert f"{file} is not JSON" in text
    assert (
        "Checkpoints are in my run/checkpoints; resume in another --run-dir with --resume 'my "
        "run/checkpoints'" in text
    )
    assert (run / "checkpoints" / "step_00000120").is_dir()


def test_from_python(tmp_path, monkeypatch):
    """In this process, with the names of other platforms."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # a line in one piece
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'], "
        "flush=True)\n"
    )
    from odyssey import distributed as dist

    config = dist.LaunchConfig(
        nproc_per_node=2, nnodes=1, max_restarts=0, monitor_interval=0.1, backend="gloo"
    )
    assert dist.DistributedLauncher(config).launch("script.py", "--epochs", "100") == 0
    (run,) = (tmp_path / "runs").iterdir()
    lines = (run / "logs" / "attempt-1" / "output.log").read_text().splitlines()
    assert sorted(lines) == ["['--epochs', '100'] 0 2", "['--epochs', '100'] 1 2"]
    assert dist.launch_distributed_training is launch_distributed_training


def test_options_before_and_behind_the_script():
    expected = (
        {"nproc_per_node": 4, "nnodes": 1, "master_port": 29500, "backend": "gloo"},
        ["train.py", "--epochs", "1"],
    )
    options = [
        "--nproc_per_node=4",
        "--nnodes=1",
        "--master_addr=localhost",
        "--master_port=29500",
        "--backend",
        "gloo",
    ]
    assert parse([*options, "train.py", "--epochs", "1"]) == expected
    assert parse(["train.py", *options, "--epochs", "1"]) == expected
    assert parse(["--nnodes=1", "-m", "pkg.module", "-x"])[1] == ["-m", "pkg.module", "-x"]
    assert parse(["train.py", "--hosts=x", "--", "--nnodes=2"])[1] == [
        "train.py",
        "--hosts=x",
        "--nnodes=2",
    ]
    for words in (
        ["--nope", "train.py"],
        ["--nnodes"],
        [],
        ["--nnodes=x", "t.py"],
        ["--node_rank=1", "t.py"],
    ):
        with pytest.raises(ConfigError):
            parse(words)
    with pytest.raises(ConfigError, match="--hosts"):
        parse(["--master_addr=10.0.0.1", "t.py"])


FORMS = {
    "s.py a": "s.py a",
    "python s.py a": "s.py a",
    "python3 -m pkg.module a": "-m pkg.module a",
    "-m pkg.module a": "-m pkg.module a",
    "-m odyssey.train --lr 1": "train --lr 1",
    "python -m odyssey.train": "train",
    "odyssey train": "train",
    "python -u s.py": "python -u s.py",
    "./program a": "./program a",
}


@pytest.mark.parametrize(("words", "kept"), FORMS.items())
def test_what_torchrun_and_mpirun_take_is_one_thing(tmp_path, monkeypatch, words, kept):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    for name in ("s.py", "pkg/__init__.py", "pkg/module.py", "program"):
        (tmp_path / name).touch()
    (tmp_path / "program").chmod(0o755)
    assert starting.normalize_command(words.split()) == kept.split()
    started = starting.resolve_program(kept.split())
    if kept.startswith("train"):
        assert started[0] == sys.executable and "odyssey.train" in started
    elif "program" in kept:
        assert started == ["././program", "a"]
    else:
        assert started == [sys.executable, *kept.removeprefix("python ").split()]


@pytest.mark.parametrize(
    "words", ["nothing.py", "./nothing", "-m", "-m nothing.at_all", "-m ../x", "no-such-program"]
)
def test_what_cannot_be_started_is_refused(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"is no file and no program|there is no module|has no module"
    ):
        starting.resolve_program(words.split())


def test_newest_step(tmp_path):
    assert attempt.newest_step(tmp_path / "none") is None
    for name in ("step_00000005", "step_00000020", ".step_00000030.tmp.1.2", "step_x", "other"):
        (tmp_path / name).mkdir()
    assert attempt.newest_step(tmp_path) == 20


def test_ranks_that_write_a_checkpoint_have_longer(tmp_path):
    run = runs.Run(tmp_path, 1)
    words = LaunchConfig(grace=10), run, [], {starting.TOKEN: "x"}, 2, (), []
    for phase, step, forced_at in (("checkpoint", 7, 41.0), ("compute", 7, 11.0)):
        one = attempt.Attempt(*words, print)
        one._begun, one._stop, one._stop_at, one._beat_at = 0.0, 15, 1000.0, 1000.0
        one._beats = {
            "ranks": [
                {"rank": 0, "step": step, "phase": phase},
                {"rank": 1, "step": 7, "phase": "wait"},
            ]
        }
        assert not one._asked(1000.0 + forced_at - 2) and not one._forced
        assert one._asked(1000.0 + forced_at) and one._forced and not one._told


@pytest.mark.parametrize(("watchdog", "limit"), [(None, 60), (5.0, 5), (0.0, None)])
def test_ranks_that_do_not_meet_are_told_once(tmp_path, watchdog, limit):
    run, said = runs.Run(tmp_path, 2), []
    run.ranks.mkdir(parents=True)
    words = LaunchConfig(watchdog=watchdog), run, [], {starting.TOKEN: "x"}, 3, (), [], said.append
    one, other, third = (attempt.Attempt(*words) for _ in range(3))
    (run.ranks / "1.json").write_text("{}")
    for seconds in (0.0, 4.0, 61.0, 62.0):
        one._tell_who_is_late(seconds)
    for rank in (0, 2):
        (run.ranks / f"{rank}.json").write_text("{}")
    other._tell_who_is_late(61.0)
    third._beat_at = 1.0  # they have met
    third._tell_who_is_late(61.0)
    third._beat_at = None  # and end
    third._tell_who_is_late(70.0)
    if limit is None:
        assert not said
    else:
        assert said[0] == "attempt 2: after 61 s ranks 0,2 have not been started"
        assert len(said) == 2 and said[1].startswith(
            "attempt 2: after 61 s the ranks have not met: they are in MPI_Init"
        )


@pytest.mark.parametrize(
    ("said", "meets"), [("slurmstepd: error: mpi/pmi2: invalid client request", False), ("", True)]
)
def test_a_start_of_srun_that_cannot_meet_is_made_again(tmp_path, monkeypatch, said, meets):
    """What SLURM's PMI daemon has spoiled; and odyssey's own training, whose ranks are known to
    meet.
    """
    monkeypatch.setattr(attempt, "MEETING", 0.5)
    monkeypatch.setattr(attempt, "LOST", 0.2)
    run, lines = runs.Run(tmp_path, 1), []
    run.ranks.mkdir(parents=True)
    for rank in (0, 1):
        record = {"rank": rank, "host": "h", "pid": 1, "attempt": 1}
        (run.ranks / f"{rank}.json").write_text(json.dumps(record))
    config, environment = (
        LaunchConfig(nproc_per_node=2, max_restarts=3),
        {**os.environ, starting.TOKEN: secrets.token_hex(8)},
    )
    words = ["sh", "-c", f"echo '{said}' >&2; exec sleep 60"]
    outcome = attempt.Attempt(
        config,
        run,
        words,
        environment,
        2,
        (),
        [],
        lines.append,
        scancel=shutil.which("true"),
        meets=meets,
    )()
    assert outcome.unmet
    action = restart_policy.decide(outcome, restart_policy.Past(), config, ())
    assert action.code is None and action.delay == 0
    assert "the ranks that srun started have not met; restarting" in action.line
    outcome = attempt.Attempt(
        config, run, words[:2] + ["sleep 1"], environment, 2, (), [], print, scancel="true"
    )()
    assert not outcome.unmet  # a script may not use odyssey


def test_who_has_read_a_request():
    assert attempt.unread({}) and attempt.unread({0: "compute", 1: "wait"})
    assert not any(attempt.unread({0: "wait", 1: phase}) for phase in ("", "checkpoint", "compile"))


def test_silence_counts_on_several_machines_only(tmp_path, monkeypatch):
    here = os.uname().nodename
    assert not attempt.elsewhere((), {here}, here) and not attempt.elsewhere(
        (("h1", 2),), {here}, here
    )
    assert attempt.elsewhere((("h1", 1), ("h2", 1)), set(), here) and attempt.elsewhere(
        (("h2", 2),), {"h2"}, here
    )
    run = runs.Run(tmp_path, 1)
    run.heartbeat.write_text('{"attempt": 1, "ranks": []}')
    words = LaunchConfig(), run, [], {starting.TOKEN: "x"}, 2
    for layout, silent in (((), 0.0), ((("h1", 1), ("h2", 1)), 20.0)):
        one = attempt.Attempt(*words, layout, [], print)
        assert one._silence(100.0) == 0.0
        assert one._silence(120.0) == silent
    run.heartbeat.unlink()
    assert one._silence(121.0) == one._silence(200.0) == 0.0  # nobody watches
    assert list(tmp_path.iterdir()) == []


def test_a_lost_host_is_found_by_asking(monkeypatch, tmp_path):
    """mpirun stands in for a launcher that cannot reach h2."""
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/sh\ncase "$*" in *h2*) exit 255;; *h3*) sleep 60;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setattr(supervisor, "PROBE", 4.0)  # h1 answers by then, on a busy machine too
    starter = starting.Starter("mpich", str(fake), "", "mpich")
    environment = {**os.environ, starting.TOKEN: "fedcba9876543210"}
    assert supervisor.probe(LaunchConfig(), starter, ["h1", "h2", "h3"], environment) == (
        "h2",
        "h3",
    )
    assert leftovers.processes(f"{starting.TOKEN}=fedcba9876543210") == []


def test_seconds_that_a_host_has(monkeypatch):
    assert supervisor.probe_seconds() == supervisor.PROBE
    monkeypatch.setenv("ODYSSEY_HOST_PROBE", "5")
    assert supervisor.probe_seconds() == 5
    for text in ("0", "x", "-1", "1e9", "nan", "9999"):
        monkeypatch.setenv("ODYSSEY_HOST_PROBE", text)
        with pytest.raises(ConfigError, match="ODYSSEY_HOST_PROBE"):
            supervisor.probe_seconds()
