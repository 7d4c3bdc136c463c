"""What a run checks before it begins: ranks that do not belong together are named, and so is a
machine too small.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from odyssey.base import limits
from odyssey.base.launcher import Launched, mpi_library
from odyssey.comm import mock
from odyssey.errors import ConfigError, OutputError
from odyssey.train import preflight

SETTINGS = {"lr": 0.1, "model": "mlp", "data_dir": None}


def together(ranks, start):
    """What `start(comm)` gave or raised on each rank."""

    def one(comm):
        try:
            return start(comm)
        except (ConfigError, OutputError) as error:
            return error

    return mock.run(ranks, one)


def test_ranks_that_fit_together_start_without_a_word(monkeypatch):
    monkeypatch.setattr(preflight, "core_mask", lambda: 0b1111)
    assert together(4, lambda comm: preflight.at_start(comm, SETTINGS, environment={})) == [[]] * 4
    assert together(1, lambda comm: preflight.at_start(comm, SETTINGS, environment={})) == [[]]


def test_what_belongs_to_a_host_may_differ(monkeypatch):
    monkeypatch.setattr(preflight, "core_mask", lambda: 0b1111)

    def start(comm):
        return preflight.at_start(comm, {**SETTINGS, "data_dir": f"/d{comm.rank}"}, environment={})

    assert together(3, start) == [[]] * 3


def test_another_configuration_is_named_with_rank_and_option():
    def start(comm):
        return preflight.at_start(
            comm, {**SETTINGS, "lr": 0.2 if comm.rank == 2 else 0.1}, environment={}
        )

    errors = together(4, start)
    assert {type(error) for error in errors} == {ConfigError} and len(
        {str(error) for error in errors}
    ) == 1
    assert "rank 2 has lr = 0.2, and rank 0 lr = 0.1" in str(errors[0])


def test_an_option_that_one_rank_alone_has_is_named():
    def start(comm):
        return preflight.at_start(
            comm, {**SETTINGS, **({"new": 1} if comm.rank == 0 else {})}, environment={}
        )

    assert "rank 0 has new = 1, and rank 1 new = null" in str(together(3, start)[0])


def test_a_configuration_too_long_to_be_shown_is_refused_all_the_same():
    def start(comm):
        return preflight.at_start(comm, {"a": "x" * 20_000, "b": comm.rank}, environment={})

    assert "rank 1 has another configuration than rank 0" in str(together(2, start)[1])


@pytest.mark.parametrize("field", ["odyssey", "Python", "numpy", "mpi4py", "MPI"])
def test_another_version_is_named(monkeypatch, field):
    rank = threading.local()
    real = preflight.versions()
    monkeypatch.setattr(
        preflight, "versions", lambda: {**real, field: "9.9" if rank.number == 1 else "1.2"}
    )

    def start(comm):
        rank.number = comm.rank
        return preflight.at_start(comm, SETTINGS, environment={})

    errors = together(3, start)
    assert all(
        f"rank 1 has {field} 9.9, rank 0 has 1.2; install the same" in str(error)
        for error in errors
    )


def test_a_rank_of_another_attempt_is_named():
    def start(comm):
        return preflight.at_start(comm, environment={"ODYSSEY_ATTEMPT": "12"[comm.rank == 0]})

    assert "rank 1 has attempt 1, rank 0 has 2" in str(together(2, start)[0])


def test_a_world_of_another_size_is_an_error_also_alone():
    for ranks in (1, 3):
        errors = together(
            ranks, lambda comm: preflight.at_start(comm, environment={"ODYSSEY_RANKS": "4"})
        )
        assert all(
            f"4 ranks were started, but this world has {ranks}" in str(error) for error in errors
        )
    assert isinstance(
        together(4, lambda comm: preflight.at_start(comm, environment={"ODYSSEY_RANKS": "4"}))[0],
        list,
    )


def test_the_odd_one_is_the_one_that_fewest_are_like():
    assert preflight.odd_one([[1, 2], [1, 2]]) is None
    assert preflight.odd_one([[7, 2], [1, 2], [1, 3]]) == (0, 0, 1)
    assert preflight.odd_one([[1, 2], [1, 3]]) == (1, 1, 0)  # of two, rank 0 counts as right


def test_more_threads_than_cores_of_a_machine():
    place = preflight.RankPlace
    assert preflight.crowded([place(1, 1, 0b01), place(1, 1, 0b10)]) == []  # bound to a core each
    assert preflight.crowded([place(1, 1, 0b11), place(2, 1, 0b11)]) == []
    assert preflight.crowded([place(1, 8, 0)]) == []  # not known
    (said,) = preflight.crowded([place(1, 2, 0b11)] * 4)
    assert said.startswith("4 ranks x 2 threads on this machine, which has 2 cores")
    assert said.endswith("they take turns; lower --threads, or start fewer ranks")
    (said,) = preflight.crowded([place(1, 1, 0b11)] * 3)
    assert (
        said
        == "3 ranks x 1 thread on this machine, which has 2 cores: they take turns; start fewer "
        "ranks"
    )
    (said,) = preflight.crowded([place(1, 9, 0b11)])
    assert (
        said
        == "1 rank x 9 threads on this machine, which has 2 cores: they take turns; lower --threads"
    )
    (said,) = preflight.crowded([place(1, 1, 0b11), place(2, 3, 0b1), place(2, 1, 0b1)])
    assert said.startswith("2 ranks with 4 threads on the machine of rank 1, which has 1 core:")


def test_a_crowded_machine_is_a_warning_on_all_ranks_alike(monkeypatch):
    monkeypatch.setattr(preflight, "core_mask", lambda: 0b11)
    warnings = together(3, lambda comm: preflight.at_start(comm, threads=2, environment={}))
    assert warnings[0] == warnings[2] and "3 ranks x 2 threads on this machine" in warnings[0][0]


def test_room_for_checkpoints(tmp_path):
    mib = limits.MIB
    assert preflight.check_space(22 * mib, 10 * mib, "d") == []
    assert (
        "d has 21.0 MiB left and a checkpoint takes 10.0"
        in preflight.check_space(21 * mib, 10 * mib, "d")[0]
    )
    with pytest.raises(OutputError, match="d has 9.0 MiB left"):
        preflight.check_space(9 * mib, 10 * mib, "d")
    with pytest.raises(OutputError, match="room"):
        preflight.check_space(preflight.free(tmp_path / "x" / "y"), 1 << 60, "d")


def test_names_of_mpi_libraries():
    assert mpi_library("MPICH Version:      5.0.2\nMPICH Release date: x\n") == "MPICH 5.0.2"
    assert mpi_library("Open MPI v5.0.11, package: Open MPI x\0") == "Open MPI 5.0.11"
    assert mpi_library("Intel(R) MPI Library 2021.9\x1b") == "Intel(R) MPI Library 2021.9\\x1b"


def test_shared_memory_is_looked_at_before_mpi_starts(monkeypatch):
    ranks = Launched("PMI", 0, 8, 0, 8, True)
    monkeypatch.setenv("MPI_LOCALNRANKS", "8")
    monkeypatch.setattr(limits, "shared_memory", lambda: (limits.MIB, limits.MIB))
    with pytest.raises(ConfigError, match="/dev/shm has 1 MiB, but MPICH needs 54 MiB for 8 ranks"):
        limits.before_mpi(ranks)
    monkeypatch.delenv("MPI_LOCALNRANKS")  # they may be on eight machines
    with pytest.raises(ConfigError, match="MPICH needs 22 MiB for 2 ranks"):
        limits.before_mpi(ranks)
    monkeypatch.setenv("MPI_LOCALNRANKS", "8")
    limits.before_mpi(None)
    limits.before_mpi(ranks._replace(local_size=1, size=1))
    limits.before_mpi(ranks._replace(launcher="Open MPI"))
    monkeypatch.setattr(limits, "shared_memory", lambda: (64 * limits.MIB, 5 * limits.MIB))
    with pytest.raises(
        ConfigError, match=r"/dev/shm has 5.0 MiB left, but MPICH needs 54 MiB for 8 ranks"
    ):
        limits.before_mpi(ranks)
    # no such place, ranks that are ahead, no limit
    for room in (None, (64 * limits.MIB, 6 * limits.MIB), (0, 0)):
        monkeypatch.setattr(limits, "shared_memory", lambda room=room: room)
        limits.before_mpi(ranks)


@pytest.mark.parametrize(
    ("name", "mib", "ranks", "says"),
    [
        (
            "NOFILE",
            40 / 2**20,
            2,
            "may have 40 files open (ulimit -n), but a rank needs 64; raise it (ulimit -n 1024)",
        ),
        (
            "AS",
            100,
            0,
            "address space is limited to 100 MiB (ulimit -v), but a process needs 2400 MiB",
        ),
        (
            "AS",
            2300,
            0,
            "address space is limited to 2300 MiB (ulimit -v), but a process needs 2400 MiB",
        ),
        (
            "AS",
            600,
            2,
            "address space is limited to 600 MiB (ulimit -v), but a rank needs 2816 MiB",
        ),
        (
            "AS",
            2500,
            2,
            "address space is limited to 2500 MiB (ulimit -v), but a rank needs 2816 MiB",
        ),
        (
            "FSIZE",
            1,
            2,
            "files are limited to 1.0 MiB (ulimit -f), but 2 ranks share one of 8 MiB in /dev/shm",
        ),
        (
            "FSIZE",
            7,
            2,
            "files are limited to 7.0 MiB (ulimit -f), but 2 ranks share one of 8 MiB in /dev/shm",
        ),
    ],
)
def test_a_limit_is_a_line_not_a_crash(launch, name, mib, ranks, says):
    if name == "FSIZE" and launch.open_mpi:
        pytest.skip("Open MPI has other files")
    limits = (
        f"import resource as r; r.setrlimit(r.RLIMIT_{name}, ({int(mib * 2**20)},) * "
        "2)\nfrom odyssey.cli import main"
    )
    done = launch(
        sys.executable, "-c", f"{limits}\nmain(['train', '--steps', '1', '--no-eval'])", ranks=ranks
    )
    assert done.returncode == ConfigError.exit_code, done.stderr
    assert done.stderr.count(says) == 1 and done.stderr.count("odyssey: ") == 1, done.stderr


def test_limits_are_looked_at_wherever_kernels_are_loaded():
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 30,) * 2)\n"
        "from odyssey.core import native; native.library()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 64
        and "ConfigError: [preflight] address space is limited to 1024 MiB" in done.stderr
    )


def test_a_place_that_cannot_be_seen_is_not_the_end(monkeypatch, tmp_path):
    def fails(_):
        raise PermissionError

    monkeypatch.setattr(os, "statvfs", fails)
    assert preflight.free(tmp_path) == 2**62


CHECK = """
import numpy as np
from odyssey import comm
from odyssey.train import preflight
world = comm.world()
print(world.rank, preflight.at_start(world, {"lr": 0.1}, threads=64), flush=True)
"""


def test_processes(launch):
    done = launch(sys.executable, "-c", CHECK, ranks=2)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2 and lines[0][1:] == lines[1][1:]
    cores = np.unique([*os.sched_getaffinity(0)]).size
    assert ("2 ranks x 64 threads on this machine" in lines[0]) == (cores < 128)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, to mount a small /dev/shm"
)
@pytest.mark.parametrize(
    ("mounted", "says"),
    [
        ("size=1m", "/dev/shm has 1 MiB, but MPICH needs 54 MiB for 8 ranks"),  # test 41
        ("ro", "no file can be made in /dev/shm (Read-only file system)"),
    ],
)
def test_a_small_or_read_only_dev_shm_is_a_line_not_a_bus_error(launch, mounted, says):
    if launch.open_mpi:
        pytest.skip("Open MPI runs with a small /dev/shm")
    script = f'mount -t tmpfs -o {mounted} tmpfs /dev/shm && exec "$@"'
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        script,
        "sh",
        launch.mpirun,
        "-n",
        "8",
        sys.executable,
        "-m",
    ]
    done = subprocess.run(
        [*command, "odyssey.train", "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        env=launch.environment,
    )
    assert done.returncode == ConfigError.exit_code, done.stderr
    assert done.stderr.count(says) == 1
    assert "signal" not in done.stderr + done.stdout
