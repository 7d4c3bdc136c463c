"""Which mpirun starts ranks: that of the MPI library which mpi4py loads, with programs that stand
in for several MPIs, and with Debian's where they are installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from odyssey.base import mpi_programs
from odyssey.base.mpi_programs import Library, Mpirun, find_mpirun, identify, loaded_library
from odyssey.errors import ConfigError, LaunchError
from odyssey.launch import LaunchConfig, starting

SAYS = {
    "MPICH 5.0.2": "HYDRA build details:\n    Version:     5.0.2",
    "MPICH 4.0.2": "HYDRA build details:\n    Version:     4.0.2",
    "Open MPI 4.1.4": "mpirun.openmpi (OpenRTE) 4.1.4",
    "Open MPI 5.0.8": "mpirun (Open MPI) 5.0.8",
    "": "something else",
}
DEBIAN = Path("/usr/lib/x86_64-linux-gnu")
TRAIN = ("train", "--steps", "2", "--no-eval", "-q")


def mpirun(path: Path, version: str) -> str:
    """A program that answers as the mpirun of this version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{SAYS[version]}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An environment whose Python has no mpirun beside it, and with nothing on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    return tmp_path, {"PATH": str(tmp_path / "path")}


@pytest.mark.parametrize("version", SAYS)
def test_programs_are_told_apart_by_what_they_print(tmp_path, version):
    found = identify(mpirun(tmp_path / "mpirun", version), {})
    assert found.version == version
    assert found.kind == ("mpich" if "MPICH" in version else "openmpi" if version else "")
    assert identify(str(tmp_path / "none"), {}).kind == ""


def test_the_library_s_own_folder_comes_first(place):
    folder, environment = place
    mpirun(folder / "venv/bin/mpirun", "MPICH 5.0.2")
    on_path = mpirun(folder / "path/mpirun", "Open MPI 5.0.8")
    own = mpirun(folder / "opt/bin/mpirun", "Open MPI 5.0.8")
    library = Library("Open MPI 5.0.8", str(folder / "opt/lib/libmpi.so.40"))
    assert find_mpirun(library, environment) == (Mpirun("openmpi", own, library.name), [])
    found, others = find_mpirun(library._replace(path=""), environment)
    assert found.path == on_path and [one.version for one in others] == ["MPICH 5.0.2"]


def test_several_libraries_may_share_a_folder(place):
    """Debian has mpirun.mpich and mpirun.openmpi, and one of them is mpirun."""
    folder, environment = place
    mpirun(folder / "usr/bin/mpirun", "Open MPI 4.1.4")
    own = mpirun(folder / "usr/bin/mpirun.mpich", "MPICH 4.0.2")
    library = Library("MPICH 4.0.2", str(folder / "usr/lib/x86_64/libmpich.so.12"))
    assert find_mpirun(library, environment)[0].path == own


def test_another_version_of_the_same_mpi_is_used_where_there_is_no_better(place):
    folder, environment = place
    other = mpirun(folder / "venv/bin/mpirun", "MPICH 5.0.2")
    library = Library("MPICH 4.0.2", str(folder / "opt/lib/libmpi.so.12"))
    assert find_mpirun(library, environment)[0].path == other
    own = mpirun(folder / "path/mpirun", "MPICH 4.0.2")
    assert find_mpirun(library, environment)[0].path == own


def test_without_mpi4py_the_first_mpirun_is_used(place):
    folder, environment = place
    mpirun(folder / "venv/bin/mpirun", "")
    own = mpirun(folder / "path/mpirun", "Open MPI 4.1.4")
    assert find_mpirun(None, environment)[0].path == own


def test_the_launcher_refuses_what_starts_no_ranks(place, monkeypatch):
    folder, environment = place
    library = Library("Open MPI 4.1.4", "/opt/lib/libmpi.so.40")
    monkeypatch.setattr(mpi_programs, "loaded_library", lambda environment: library)
    with pytest.raises(LaunchError, match="no mpirun of Open MPI 4.1.4, which mpi4py loads"):
        starting.find_starter(LaunchConfig(), environment)
    other = mpirun(folder / "path/mpirun", "MPICH 5.0.2")
    text = r"is of MPICH 5.0.2, and mpi4py loads Open MPI 4.1.4 \(/opt/lib/libmpi.so.40\); put"
    with pytest.raises(LaunchError, match=text):
        starting.find_starter(LaunchConfig(), environment)
    with pytest.raises(LaunchError, match="use --launcher mpirun, or another path"):
        starting.find_starter(LaunchConfig(launcher=other), environment)
    own = mpirun(folder / "else/where", "Open MPI 4.1.4")
    assert starting.find_starter(LaunchConfig(launcher=own), environment).path == own
    with pytest.raises(ConfigError, match="or use the path of an mpirun"):
        LaunchConfig(launcher="mpirn")


def test_srun_starts_the_library_that_mpi4py_loads(place, monkeypatch):
    folder, environment = place
    mpirun(folder / "path/srun", "")
    mpirun(folder / "venv/bin/mpirun", "MPICH 5.0.2")
    library = Library("Open MPI 4.1.4", "/opt/lib/libmpi.so.40")
    monkeypatch.setattr(mpi_programs, "loaded_library", lambda environment: library)
    starter = starting.find_starter(LaunchConfig(), {**environment, "SLURM_JOB_ID": "1"})
    assert (starter.kind, starter.mpi) == ("srun", "openmpi")


def test_open_mpi_4_has_other_parameters_than_5(tmp_path):
    config = LaunchConfig(bind_if="eth0")
    for version, parameter in (("4.1.4", "oob_tcp_if_include"), ("5.0.8", "prte_if_include")):
        starter = starting.Starter("openmpi", "mpirun", f"Open MPI {version}", "openmpi")
        words = starting.build_command(config, starter, 2, (), ())
        assert words[words.index("eth0") - 1] == parameter


# -- this machine's ------------------------------------------------------------------------------


def debian_library(kind: str, tmp_path: Path) -> str:
    """The file of Debian's library, by a name that mpi4py's wheel takes."""
    name = "openmpi/lib/libmpi.so" if kind == "openmpi" else "libmpich.so.12"
    if not (DEBIAN / name).exists() or shutil.which(f"mpirun.{kind}") is None:
        pytest.skip(f"needs Debian's {kind} (apt-get install openmpi-bin libopenmpi-dev mpich)")
    if kind == "openmpi":
        return str(DEBIAN / name)
    (tmp_path / "libmpi.so.12").symlink_to(DEBIAN / name)
    return str(tmp_path / "libmpi.so.12")


def doctor(launch) -> dict[str, list[str]]:
    """State and finding of the checks of an mpirun."""
    done = launch.python("-m", "odyssey", "doctor", "--json")
    checks = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "mpirun"]
    return {check["state"]: f"{check['found']}; {check['advice']}" for check in checks}


def test_this_environment_s_mpirun_is_of_its_library():
    library = loaded_library()
    if library is None:
        pytest.skip("mpi4py finds no MPI library")
    assert library.kind and os.path.exists(library.path)
    assert find_mpirun(library)[0].starts(library)


def test_the_wheel_s_library_with_another_mpirun_first_on_path(launch):
    """`launch` and `doctor` agree, and the advice of a rank under the wrong mpirun works."""
    debian_library("openmpi", launch.folder)
    if loaded_library().kind != "mpich":
        pytest.skip("mpi4py loads no MPICH here")
    launch.environment["PATH"] = f"/usr/bin{os.pathsep}{launch.environment['PATH']}"
    if identify("/usr/bin/mpirun").kind != "openmpi":
        pytest.skip("/usr/bin/mpirun is not Open MPI's")
    started = launch.python("-m", "odyssey", "launch", "-n", 2, *TRAIN)
    assert started.returncode == 0 and "2 ranks (MPICH" in started.stderr, started.stderr
    found = doctor(launch)
    assert (
        "2 ranks see each other" in found["ok"]
        and "/usr/bin/mpirun is the first on PATH" in (found["warn"])
    )
    program = [sys.executable, "-m", "odyssey", *TRAIN]
    wrong = launch("/usr/bin/mpirun", "--oversubscribe", "-n", 2, *program)
    advice = re.search(r"OMPI_COMM_WORLD_SIZE=2\), but .* cannot start; use (\S+)", wrong.stderr)
    assert wrong.returncode and advice, wrong.stderr
    right = launch(advice[1], "-n", 2, *program)
    assert right.returncode == 0 and right.stdout == started.stdout.replace(
        *(
            re.search(r"[\d,]+ samples/s  [\d.]+ s", text)[0]
            for text in (started.stdout, right.stdout)
        )
    )


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_the_system_s_library_beside_the_wheel_s_mpirun(launch, kind):
    launch.environment["MPI4PY_LIBMPI"] = library = debian_library(kind, launch.folder)
    launch.environment["LD_LIBRARY_PATH"] = str(Path(library).parent)
    started = launch.python("-m", "odyssey", "launch", "-n", 2, *TRAIN)
    assert started.returncode == 0, started.stderr
    found = doctor(launch)
    assert f"/usr/bin/mpirun.{kind}" in found["ok"]
    assert found["ok"].split(", ")[1].split(":")[0] in started.stderr  # the same version
    wrong = Path(sys.executable).with_name("mpirun")
    if kind == "openmpi" and wrong.exists() and identify(str(wrong)).kind == "mpich":
        named = launch.python("-m", "odyssey", "launch", "--launcher", wrong, "-n", 2, *TRAIN)
        assert named.returncode == 69 and "and mpi4py loads Open MPI" in named.stderr
        alone = launch(wrong, "-n", 2, sys.executable, "-m", "odyssey", *TRAIN)
        advice = re.search(r"each sees a world of one: .*; use (\S+), or unset", alone.stderr)
        assert alone.returncode and advice, alone.stderr
        words = [advice[1], "--oversubscribe", "-n", 2, sys.executable, "-m", "odyssey", *TRAIN]
        assert launch(*words).returncode == 0
