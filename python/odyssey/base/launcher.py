"""Launcher's variables in the environment of this process (MPI's, srun, torchrun and the like),
read in one place.

It imports nothing heavy, so that a message can be given to the right rank before MPI is loaded. The
rank that counts comes from `odyssey.comm`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import ConfigError, printable
from .proc import environment_of, mpi_file, stat
from .variables import is_named


class Launched(NamedTuple):
    """Ranks that a launcher announced.

    `local_rank` and `local_size` are those on this machine; where the launcher is silent about
    them, `local_size` is `size` and `local_rank` is `rank`. `mpi`: an MPI library that understands
    this launcher finds its ranks by it.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    mpi: bool


# launcher, rank, size, rank on this machine, ranks on this machine, MPI. Hydra (MPICH, Intel MPI)
# and `srun
# --mpi=pmi2`; Open MPI; MVAPICH; PMIx, which names no size itself; srun that offers no PMI.
# SLURM_NTASKS would not
# do: a batch script has it too, with SLURM_PROCID 0, and is no rank.
_COMM_WORLD = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_NAMES = (
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", True),
    ("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in _COMM_WORLD), True),
    ("MVAPICH", *(f"MV2_COMM_WORLD_{name}" for name in _COMM_WORLD), True),
    ("PMIx", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", True),
    (
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
        False,
    ),
)

#: Open MPI: more ranks than cores, and root in containers; others do not read these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

#: Variables that make a process a rank of a job; a name that ends with "*" stands for all that
#: begin so. They would mislead ranks of another job, and a process that a rank starts.
OF_RANKS = (
    "PMI_RANK PMI_SIZE PMI_FD PMI_PORT PMI_ID PMI_HOSTNAME HYDI_CONTROL_FD MPI_LOCALRANKID "
    "MPI_LOCALNRANKS PMIX_RANK PMIX_ID PMIX_NAMESPACE PMIX_SERVER_* OMPI_COMM_WORLD_* "
    "OMPI_MCA_ess OMPI_MCA_ess_* OMPI_MCA_orte_* OMPI_MCA_pmix OMPI_APP_CTX_NUM_PROCS "
    "OMPI_FIRST_RANKS OMPI_NUM_APP_CTX OMPI_FILE_LOCATION OMPI_UNIVERSE_SIZE MV2_COMM_WORLD_*"
).split()

#: What `torch.distributed` calls env://.
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: Every variable that is read here; tests clear them.
VARIABLES = tuple(
    sorted(
        {str(name) for row in _NAMES for name in row[1:5]}
        | {*RENDEZVOUS, "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    )
)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _announced(
    environment: Mapping[str, str], launcher: str, *names: str, mpi: bool
) -> Launched | None:
    """Returns what variables of these names (rank, size, both on this machine) say; None without
    the first two.
    """
    rank, size, local_rank, local_size = (_number(environment, name) for name in names)
    if rank is None or size is None:
        return None
    local_rank = rank if local_rank is None else local_rank
    return Launched(
        launcher, rank, size, local_rank, size if local_size is None else local_size, mpi
    )


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Returns what an MPI launcher or srun announced, or None where nothing started several
    processes.
    """
    return next(
        filter(None, (_announced(environment, *row[:-1], mpi=row[-1]) for row in _NAMES)), None
    )


def rendezvous(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Returns what the variables of env:// (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, all
    there) say, or None.
    """
    if not environment.get("MASTER_ADDR") or not environment.get("MASTER_PORT"):
        return None
    return _announced(
        environment, "env://", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", mpi=False
    )


def announce() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where mpirun or srun started this
    process and they are not set: other programs look for them.
    """
    job = launched()
    for name, value in zip(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), (job or ())[1:5], strict=False
    ):
        os.environ.setdefault(name, str(value))


def rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """The rank that a launcher gave this process, None without one.

    Only for deciding who speaks.
    """
    for _, name, *_ in _NAMES:
        if (number := _number(environment, name)) is not None:
            return number
    return getattr(rendezvous(environment), "rank", None)


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    import socket  # few processes need it, and all import this module

    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def mpi_library(text: str) -> str:
    """ "MPICH 5.0.2" from what an MPI library says about itself."""
    line = " ".join(text.split("\n", 1)[0].replace("\0", " ").replace(":", " ").split())
    for name in ("MPICH", "Open MPI"):
        if line.startswith(name):
            words = line.removeprefix(name).replace(",", " ").split()
            number = next(
                (word.lstrip("v") for word in words if word.lstrip("v")[:1].isdigit()), ""
            )
            return f"{name} {number}".rstrip()
    return printable(line, limit=60)


def variables_of(job: Launched, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the variables that announce a job, as "PMI_RANK=0, PMI_SIZE=2"."""
    names = next((row[1:3] for row in _NAMES if row[0] == job.launcher), RENDEZVOUS)
    return ", ".join(f"{name}={printable(environment.get(str(name), ''))}" for name in names)


def job_of(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    """Returns what is equal in the environments of all ranks of a job on one machine."""
    job = launched(environment) or rendezvous(environment)
    if job is None:
        return ()
    names = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "ODYSSEY_LAUNCH", *RENDEZVOUS[2:])
    return (job.launcher, str(job.size), *(environment.get(name) for name in names))


def leave_job_of_parent() -> str:
    """Removes the variables of a job from the environment of this process if it is no rank but a
    rank started it, and returns a sentence about it, "" if there is nothing to do.

    Such a process inherits all that its parent has: MPI would fail, or take the rank's place. A
    rank is known by the MPI library that it has loaded, which no launcher and no wrapper has.
    """
    job = launched()
    if job is None or mpi_file():
        return ""
    names = next(row[1:3] for row in _NAMES if row[0] == job.launcher)
    identity = [os.environ.get(str(name)) for name in names]
    if None in identity:
        return ""
    process = os.getppid()
    with contextlib.suppress(OSError, IndexError, ValueError):
        while process > 1:
            environment = environment_of(process)
            if [environment.get(str(name)) for name in names] != identity:
                return ""
            if mpi_file(process):
                break
            process = int(stat(process)[1])
        else:
            return ""
        line = (
            f"this process is not a rank, because rank {job.rank} of a job (process {process}) "
            f"started it: it runs alone, without {variables_of(job)}"
        )
        variables = {*VARIABLES, "ODYSSEY_RUN_DIR", "ODYSSEY_ATTEMPT", "ODYSSEY_RANKS"}
        for name in [name for name in os.environ if name in variables or is_named(name, OF_RANKS)]:
            del os.environ[name]
        return line
    return ""


def check_library(job: Launched | None, text: str, advice: Callable[[], str]) -> None:
    """Raises ConfigError where MPI would abort at its start, as the launcher is another MPI's.

    text: what the MPI library says about itself. advice: returns what to use instead.
    """
    library = mpi_library(text)
    if job is None or job.launcher not in ("Open MPI", "PMIx") or not library.startswith("MPICH"):
        return
    if "pmix" not in text.lower():  # else it was configured to understand this one
        starter = "srun --mpi=pmix" if job.launcher == "PMIx" else "Open MPI's mpirun"
        replacement = "use srun --mpi=pmi2" if job.launcher == "PMIx" else advice()
        raise ConfigError(
            f"[comm] {starter} started {job.size} processes ({variables_of(job)}), but the MPI "
            f"library of mpi4py is {library}, which it cannot start; {replacement}"
        ).on_all_ranks()
