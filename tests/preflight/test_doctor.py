"""`odyssey doctor` finds what is missing and says what to do: each check with what it would find
on other machines.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from pathlib import Path

import pytest

from odyssey.cli import doctor
from odyssey.cli.doctor import FAIL, GIB, MIB, OK, WARN
from odyssey.errors import ConfigError
from odyssey.launch.starting import Starter


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


# -- the command -----------------------------------------------------------------------------------


def test_this_machine_is_fit_for_tests(launch):
    done = launch.python(
        "-m", "odyssey", "doctor", "--json", "--run-dir", launch.folder / "run", timeout=200
    )
    found = json.loads(done.stdout)
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert done.returncode == 0, done.stdout
    for name in ("python", "packages", "compiler", "kernels", "mpi", "mpirun", "run dir", "gpus"):
        assert states[name] in (OK, WARN), found
    assert states["mpi"] == OK and states["mpirun"] == OK
    assert found[OK] + found[WARN] == len(found["checks"]) and found[FAIL] == 0
    assert not (launch.folder / "run").exists()  # nothing is made


def test_under_mpirun_it_refuses(launch):
    done = launch.python("-m", "odyssey", "doctor", ranks=2)
    assert done.returncode == ConfigError.exit_code
    assert "it starts ranks itself; run it without mpirun" in done.stderr


@pytest.fixture
def quick(monkeypatch):
    """Checks that find nothing wrong and start nothing."""
    for name in ("python", "packages", "distributions", "cache", "gpus"):
        monkeypatch.setattr(doctor, name, lambda name=name: doctor.Check(name, OK, "x"))
    for name in ("mpi", "launchers", "kernels"):
        monkeypatch.setattr(doctor, name, lambda *_, name=name: doctor.Check(name, OK, "x"))
    monkeypatch.setattr(doctor, "probe", lambda words: doctor.Probed([{"MPI": "MPICH 5.0.2"}]))
    from odyssey.base.launcher import VARIABLES

    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def run(capsys, *arguments):
    from odyssey import cli

    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", *map(str, arguments)])
    return end.value.code, capsys.readouterr()


def test_a_failed_check_ends_with_69_and_a_warning_with_0(quick, capsys, monkeypatch, tmp_path):
    code, said = run(capsys, "-n", 1)
    assert code == 0 and said.out.splitlines()[-1].endswith(" 0 that stop a run")
    monkeypatch.setattr(doctor, "gpus", lambda: doctor.Check("gpus", WARN, "x", "do \x1b[2J this"))
    code, said = run(capsys, "-n", 1)
    assert code == 0 and "warn  gpus      x; do \\x1b[2J this" in said.out
    (tmp_path / "file").write_text("")
    code, said = run(capsys, "-n", 1, "--run-dir", tmp_path / "file")
    assert (
        code == 69
        and f"fail  run dir   {tmp_path / 'file'} is no directory; name another" in said.out
    )
    assert said.out.splitlines()[-1].endswith(" 1 that stop a run")


@pytest.mark.parametrize(
    "hosts", ["-oProxyCommand=touch x", "$(touch x)", "`touch x`", "a;touch x", "a\nb", "a,,b"]
)
def test_hosts_that_are_none_start_nothing(quick, capsys, monkeypatch, hosts):
    monkeypatch.setattr(doctor, "reach", lambda host: pytest.fail(f"looked for {host!r}"))
    code, said = run(capsys, f"--hosts={hosts}")
    assert code == ConfigError.exit_code and said.err.count("\n") == 1


# -- MPI -------------------------------------------------------------------------------------------

ALONE = """
import subprocess, sys
if "--version" in sys.argv:
    print("mpirun (Open MPI) 5.0.0")
else:
    for rank in "01":
        subprocess.run(sys.argv[sys.argv.index("-n") + 2 :])
"""


def test_a_launcher_of_another_mpi_is_found(tmp_path, monkeypatch):
    """The silent world of one: each process starts, and sees itself only."""
    for variable in ("PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    alone = doctor.probe([sys.executable])
    starter = Starter("openmpi", str(program(tmp_path / "mpirun", ALONE)), "Open MPI 5", "openmpi")
    check = doctor.launching(starter, lambda: alone)
    assert check.state == FAIL and "starts 2 processes and each is a world of one" in check.found
    library = doctor.mpi_of(alone)
    assert ("it is of Open MPI, mpi4py uses MPICH" in check.found) == library.startswith("MPICH")
    assert check.advice


def test_a_launcher_that_fails_or_is_not_there(tmp_path):
    def alone():
        return doctor.Probed([{"MPI": "MPICH 5.0.2"}])

    wrong = program(
        tmp_path / "mpirun", "import sys; print('no \x1b slots', file=sys.stderr); sys.exit(3)"
    )
    starter = Starter("mpich", str(wrong), "MPICH 5.0.2", "mpich")
    check = doctor.launching(starter, alone)
    assert check.state == FAIL and r"-n 2: no \x1b slots" in check.found
    missing = starter._replace(path=str(tmp_path / "none"))
    assert "cannot be started" in doctor.launching(missing, alone).found


def test_mpi_that_cannot_be_loaded_or_knows_one_thread():
    assert doctor.mpi(doctor.Probed([], "ImportError: libmpi.so.12")).state == FAIL
    assert doctor.mpi(doctor.Probed([{"MPI": "MPICH 5.0.2", "level": "single"}])).state == WARN
    assert (
        doctor.mpi(doctor.Probed([{"MPI": "MPICH 5.0.2", "level": "multiple"}]))
        .line()
        .startswith("ok    mpi ")
    )


# -- hosts -----------------------------------------------------------------------------------------

SSH = """
import json, shlex, subprocess, sys
assert sys.argv[-3] == "--" and "StrictHostKeyChecking=yes" in sys.argv and "BatchMode=yes" in sys.argv, sys.argv
host, remote = sys.argv[-2:]
if host == "away":
    print("ssh: connect to host away port 22: No route to host", file=sys.stderr)
    sys.exit(255)
if host == "bare":
    print("bash: python: No such file or directory", file=sys.stderr)
    sys.exit(127)
said = json.loads(subprocess.run(shlex.split(remote), capture_output=True, text=True).stdout)
if host == "old":
    said["numpy"] = "1.26.0\\x1b"
print("welcome to", host)
print(json.dumps(said))
"""


def test_hosts_are_asked_for_their_versions(tmp_path, monkeypatch):
    program(tmp_path / "ssh", SSH)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert doctor.reach("node-1")[1:3] == (OK, "the same versions")
    away = doctor.reach("away")
    assert away.state == FAIL and "No route to host" in away.found and "known_hosts" in away.advice
    assert "does not run there: bash: python: No such file" in doctor.reach("bare").found
    old = doctor.reach("old")
    assert old.state == FAIL and r"numpy 1.26.0\x1b there, " in old.found
    assert doctor.reach("localhost").state == OK
    (tmp_path / "ssh").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no ssh" in doctor.reach("node-1").found


# -- room ------------------------------------------------------------------------------------------


def test_cores():
    assert doctor.cores(2, None, 0b11).state == OK
    assert doctor.cores(2, 2, 0b11).state == WARN
    assert "8 ranks x 1 thread on" in doctor.cores(8, None, 0b11).found


@pytest.mark.parametrize(
    ("room", "state"),
    [(None, WARN), ((MIB, MIB), FAIL), ((64 * MIB, 10 * MIB), FAIL), ((64 * MIB, 40 * MIB), WARN)]
    + [((64 * MIB, 64 * MIB), OK), ((0, 0), OK)],
)
def test_shared_memory(room, state):
    assert doctor.shared_memory(4, room, "MPICH 5.0.2").state == state
    assert doctor.shared_memory(4, room, "Open MPI 5.0.11").state == (
        WARN if state == FAIL else state
    )


def test_memory():
    assert doctor.memory(2, None, GIB).state == OK
    assert doctor.memory(8, GIB, GIB).state == WARN


def test_limits():
    free = dict.fromkeys(("nofile", "nproc", "fsize", "as"), math.inf)
    assert doctor.limits(4, free).state == OK
    low = doctor.limits(4, {**free, "nofile": 64, "fsize": 1})
    assert low.state == WARN and low.advice == "raise `ulimit -n` and `ulimit -f`"


def test_user():
    assert doctor.user(0, []).state == OK and doctor.user(1000, [1001]).state == OK
    assert doctor.user(0, [1001]).found == "root, and user 1001 works on this machine too"


def test_run_directories(tmp_path, monkeypatch):
    assert doctor.run_directory(None).state == OK
    assert doctor.run_directory(tmp_path / "new" / "run").state == OK
    step = tmp_path / "checkpoints" / "step_00000010"
    step.mkdir(parents=True)
    (step / "weights.safetensors").write_bytes(bytes(3 * MIB))
    assert "a checkpoint takes 3.0 MiB" in doctor.run_directory(tmp_path).found
    for free, state in ((5 * MIB, WARN), (MIB, FAIL)):
        room = os.statvfs_result((4096, 4096, 0, free // 4096, free // 4096, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _, room=room: room)
        assert doctor.run_directory(tmp_path).state == state


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another user")
def test_a_run_directory_of_another_user_that_all_may_write_to(tmp_path):
    os.chown(tmp_path, 12345, -1)
    tmp_path.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    assert doctor.run_directory(tmp_path).state == FAIL
    assert doctor.run_directory(tmp_path / "mine").state == OK


# -- what is installed -----------------------------------------------------------------------------


def test_packages_that_are_missing(monkeypatch):
    check = doctor.packages(("numpy", "no-such-package-here"))
    assert check.state == FAIL and check.advice == "pip install no-such-package-here"
    monkeypatch.setattr(doctor, "version", lambda name: "none" if name == "max" else "1")
    monkeypatch.delenv("ODYSSEY_KERNELS", raising=False)
    check = doctor.packages()
    # another compiler would be refused
    assert check.state == FAIL and check.advice.startswith("pip install max==")
    monkeypatch.setenv("ODYSSEY_KERNELS", "/somewhere")
    assert doctor.packages().state == OK


def installed(place: Path, name: str, version: str) -> None:
    """Puts a distribution's metadata in a folder, as an installation does."""
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_another_distribution_called_odyssey_is_found(tmp_path, monkeypatch):
    """The package index has another project's; an environment may have this one under its old
    name.
    """
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed(tmp_path, "ml-odyssey", "0.2.0")
    assert doctor.distributions() == []
    installed(tmp_path, "odyssey", "1.0.2")
    (check,) = doctor.distributions()
    assert check.state == WARN and check.found.startswith("odyssey 1.0.2 is installed")
    assert check.advice.startswith("pip uninstall odyssey, then install ml-odyssey again")


def test_kernels_that_are_not_there_or_cannot_be_loaded(tmp_path, monkeypatch):
    monkeypatch.delenv("ODYSSEY_KERNELS", raising=False)
    monkeypatch.setenv("ODYSSEY_CACHE_DIR", str(tmp_path))
    assert [check.state for check in doctor.kernels()] == [OK, WARN]
    assert list(tmp_path.iterdir()) == []  # nothing is compiled
    monkeypatch.setenv("PATH", "")
    assert [check.state for check in doctor.kernels()] == [OK, FAIL]
    (tmp_path / "libodyssey.so").write_bytes(b"\x7fELF")
    monkeypatch.setenv("ODYSSEY_KERNELS", str(tmp_path))
    check = doctor.kernels()[1]
    assert (
        "cannot be loaded" in check.found
        and check.advice == "set ODYSSEY_KERNELS to another folder, or unset it"
    )
    monkeypatch.setenv("ODYSSEY_KERNELS", str(tmp_path / "none"))
    assert doctor.kernels()[1].state == FAIL
