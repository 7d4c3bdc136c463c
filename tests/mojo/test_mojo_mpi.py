"""Mojo programs under an MPI launcher: every call, the same bits on any number of ranks, and an end for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from odyssey import build
from odyssey.launcher import VARIABLES

HERE = Path(__file__).parent
ROOT = build.source_root()
LIBRARY = "ODYSSEY_MPI_LIBRARY"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory, "world")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory, "ends")


def built(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    out = tmp_path_factory.mktemp("mojo") / name
    source = ["--Werror", HERE / f"{name}.mojo", "-I", ROOT / "mojo", "-I", ROOT]
    done = build.run_mojo(
        ["build", *map(str, source), *build.target_options(build.host_cpu()), "-D", "ASSERT=all", "-o", str(out)]
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, LIBRARY, "VIRTUAL_ENV", "CONDA_PREFIX", "ODYSSEY_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def libraries(program: Path, environment: dict[str, str], word: str) -> str:
    """What the loader opened."""
    done = subprocess.run(
        [program, word], capture_output=True, text=True, timeout=60, env={**environment, "LD_DEBUG": "files"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def test_alone_no_mpi_is_loaded(launch, program):
    done = launch(program, "everything")
    assert done.stdout.splitlines() == ["local: one process; no launcher", "rank 0 of 1 on 0 1"], done.stderr
    assert launch(program, "solo").stdout.splitlines()[0] == "local: one process; as asked"
    launch.environment["ODYSSEY_BACKEND"] = "mpi"
    assert launch(program, "everything").stdout.startswith("mpi: 1 rank, ")
    launch.environment["ODYSSEY_BACKEND"] = "shm"  # one that is Python's
    assert launch(program, "everything").stdout.startswith("local: ")
    if sys.platform == "linux":
        assert "libmpi" not in libraries(program, launch.environment, "everything")
        assert "libmpi" in libraries(program, launch.environment, "forced")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_call(launch, program, ranks):
    done = launch(program, "everything", ranks=ranks)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(" on ")[0] for line in lines[-ranks:]] == [f"rank {r} of {ranks}" for r in range(ranks)]
    locals_ = sorted(line.split(" on ")[1] for line in lines[-ranks:])
    assert locals_ == [f"{r} {ranks}" for r in range(ranks)]
    if ranks > 1:
        assert lines[0].startswith(f"mpi: {ranks} ranks, ")
        assert ("Open MPI v" if launch.open_mpi else "MPICH ") in lines[0]


def test_the_tree_has_the_same_bits_on_any_number_of_ranks(launch, program):
    sums = [launch(program, "tree", ranks=ranks).stdout.split() for ranks in (0, 1, 2, 3, 4)]
    assert len(sums[0]) == 100 and len(set(sums[0])) > 90
    assert all(one == sums[0] for one in sums)


def test_the_standard_abi(launch, program):
    library = Path(sys.prefix) / "lib" / "libmpi_abi.so.1"
    if not library.exists() or launch.open_mpi:
        pytest.skip("this MPI has no library of the standard ABI")
    launch.environment[LIBRARY] = str(library)
    done = launch(program, "everything", ranks=3)
    assert done.returncode == 0, done.stderr
    assert str(library) in done.stdout
    assert launch(program, "tree", ranks=3).stdout == launch(program, "tree").stdout


@pytest.mark.parametrize(("word", "code", "says"), [
    ("caught", 65, "odyssey: [rank 1] [data] rank 1 found nothing\n"),
    ("uncaught", 1, "rank 1 found nothing"), ("exit", 3, ""),
    ("early", 65, "odyssey: [rank 1] [data] it found nothing\n"), ("alike", 65, "odyssey: [data] it found nothing\n"),
])  # fmt: skip
def test_the_end_of_one_rank_is_the_end_of_all(launch, ends, word, code, says):
    done = launch(ends, word, ranks=3, timeout=30)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and "not reached" not in done.stdout
    assert done.stderr.count("odyssey:") == says.count("odyssey:")


def test_what_mpi_refuses_is_an_error(launch, program):
    done = launch(program, "refused", ranks=2, timeout=30)
    assert done.returncode == 70 and done.stderr.count("odyssey:") == 1
    assert "odyssey: [mpi] MPI_Send failed on rank 0: " in done.stderr


@pytest.mark.parametrize("word", ["well", "caught", "uncaught"])
def test_under_mojo_run(launch, word):
    """Its code is gone when the process ends, and what MPI must do then is not."""
    mojo = [Path(sys.executable).with_name("mojo"), "run", "-I", ROOT / "mojo", "-I", ROOT, HERE / "ends.mojo"]
    done = launch(*mojo, word, ranks=2, timeout=200)
    assert (done.returncode == 0) == (word == "well"), done.stderr
    assert "not reached" not in done.stdout and "bug report" not in done.stderr
    if word == "well":
        assert done.stdout == "2\n2\n"


@pytest.mark.parametrize(("environment", "code", "says"), [
    ({LIBRARY: "/nowhere/libmpi.so"}, 69, f"[mpi] {LIBRARY} names /nowhere/libmpi.so, but: "),
    ({LIBRARY: "libc.so.6"}, 69, "it has no MPI_Init_thread"),
    ({"PATH": "/nowhere", "HOME": "/nowhere"}, 69, "no MPI library for it is found"),
])  # fmt: skip
def test_without_a_library_one_line_says_so(launch, program, environment, code, says):
    mpirun = launch.mpirun
    options = ["--oversubscribe"] if launch.open_mpi else []
    if "PATH" in environment and launch.open_mpi:
        pytest.skip("Open MPI's launcher puts its own directories into the environment of a rank")
    launch.environment.update(environment)
    done = launch(mpirun, *options, "-n", 2, program, "everything")
    assert done.returncode == code, done.stderr
    assert says in done.stderr and done.stderr.count("odyssey:") == 1, done.stderr


def test_a_world_of_one_is_not_silent(launch, program):
    """The launcher's variables say two, and MPI knows of one: as with another library's mpirun."""
    launch.environment["MV2_COMM_WORLD_RANK"] = "0"
    launch.environment["MV2_COMM_WORLD_SIZE"] = "2"
    done = launch(program, "everything")
    assert done.returncode == 69, done.stderr
    assert "MVAPICH started 2 processes, but each sees a world of one through " in done.stderr
    assert done.stderr.count("odyssey:") == 1


def test_torchruns_variables_are_not_a_world(launch, program):
    launch.environment.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    done = launch(program, "everything")
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert "WORLD_SIZE speaks of 2 processes, but Mojo programs are connected by MPI only" in done.stderr
    assert launch(program, "solo").returncode == 0


def test_it_starts_at_once(program):
    """Far from the 0.2 s that a program may take, even where other tests run."""
    times = []
    for _ in range(5):
        before = os.times()
        subprocess.run([program, "everything"], check=True, capture_output=True, timeout=60)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.2
