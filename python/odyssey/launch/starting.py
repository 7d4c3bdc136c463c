"""The start of one attempt: its launcher, the argument list, and the environment of the ranks.

All functions are pure except `find_starter` and `resolve_program`, which look at files. A command
is a list of words, and no shell sees any of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from ..base import mpi_programs, runs
from ..base.launcher import OF_RANKS, free_port
from ..base.variables import DECIDE_BITS, OTHER_ARITHMETIC, is_named
from ..errors import ConfigError, LaunchError, printable
from .config import LaunchConfig

TOKEN = "ODYSSEY_LAUNCH"  # in the environment of every process of a launch, by which they are found
HERE = Path(__file__).parent

# What ranks get of the environment; a name that ends with "*" stands for all that begin so.
# Whatever else is in it (keys of clouds, tokens) stays here unless --env names it.
ALLOWED = (
    "PATH HOME USER LOGNAME SHELL TERM LANG LANGUAGE TZ TMPDIR LC_* VIRTUAL_ENV CONDA_PREFIX "
    "LD_LIBRARY_PATH PYTHONPATH PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX "
    "PYTHONHASHSEED PYTHONWARNINGS ODYSSEY_* MODULAR_* MOJO_PYTHON MOJO_PYTHON_LIBRARY "
    "XDG_CACHE_HOME CUDA_VISIBLE_DEVICES "
    "NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES OMPI_* PRTE_* PMIX_* PMI_* "
    "HYDRA_* MPICH_* MPIR_* MPIEXEC_* MPI4PY_* FI_* UCX_* I_MPI_* NCCL_* SLURM_* MUNGE_SOCKET "
    "SSH_AUTH_SOCK KRB5CCNAME"
).split() + DECIDE_BITS

SECRET = "SLURM_JWT SLURM_SACK_KEY SLURM_SACK_JWKS".split()  # credentials among what ALLOWED names

_INTERPRETERS = ("python", "python3")
_SSH = "-o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=yes"


class Starter(NamedTuple):
    """The program that starts ranks: `kind` "mpich", "openmpi" or "srun"; `mpi`: the library
    that srun starts.
    """

    kind: str
    path: str
    version: str
    mpi: str

    @property
    def has_orte(self) -> bool:
        """Returns whether this is Open MPI before 5, whose mpirun has other parameters."""
        return self.version.startswith(("Open MPI 3", "Open MPI 4"))


def find_starter(config: LaunchConfig, environment: Mapping[str, str]) -> Starter:
    """Returns the launcher to use.

    That is srun inside a SLURM allocation, otherwise the mpirun of the MPI library that mpi4py
    loads, or the one that `config` names.

    Raises:
        LaunchError: there is no launcher, it does not answer, it is of another MPI, or srun was
            requested outside of an allocation.
    """
    inside = bool(environment.get("SLURM_JOB_ID"))
    if config.launcher == "srun" and not inside:
        raise LaunchError(
            "[launch] --launcher srun outside of a SLURM allocation; use it in a job (sbatch, "
            "salloc)"
        )
    library = mpi_programs.loaded_library(environment)
    if config.launcher == "srun" or (config.launcher == "auto" and inside and not config.hosts):
        srun = shutil.which("srun", path=environment.get("PATH", os.defpath))
        if srun is None:
            problem = "this is a SLURM allocation, but there is no srun on PATH"
            raise LaunchError(f"[launch] {problem}; use --launcher mpirun")
        name, kind = (library.name, library.kind) if library else ("", "")
        return Starter("srun", srun, f"srun, {name or 'MPICH'}", kind or mpi_programs.MPICH)
    if os.sep in config.launcher:
        mpirun = mpi_programs.identify(config.launcher, environment)
        problem = describe_misfit(library, [mpirun])
        if not mpirun.kind or not mpirun.starts(library):
            raise LaunchError(f"[launch] {problem}; use --launcher mpirun, or another path")
        return Starter(mpirun.kind, mpirun.path, mpirun.version, mpirun.kind)
    chosen, unusable = mpi_programs.find_mpirun(library, environment)
    if chosen is None:
        raise LaunchError(f"[launch] {describe_misfit(library, unusable)}; {find_advice(library)}")
    return Starter(chosen.kind, chosen.path, chosen.version, chosen.kind)


def describe_misfit(
    library: mpi_programs.Library | None, programs: Sequence[mpi_programs.Mpirun]
) -> str:
    """Returns why none of these programs starts ranks with this library, in words."""
    if not programs:
        of = f" of {library.name}, which mpi4py loads" if library and library.kind else ""
        return f"there is no mpirun{of} beside this Python or on PATH"
    first = programs[0]
    if not first.kind:
        return (
            f"{first.path} is neither MPICH's nor Open MPI's mpirun; those are supported (and srun)"
        )
    name = library.name if library else "another MPI"
    place = f" ({library.path})" if library and library.path else ""
    return f"{first.path} is of {first.version}, and mpi4py loads {name}{place}"


def find_advice(library: mpi_programs.Library | None) -> str:
    """Returns what to do without an mpirun of this library."""
    if library is None or library.kind == mpi_programs.MPICH:
        return "pip install mpich, or load MPI"
    return f"put the mpirun of {library.name} on PATH, or use --launcher PATH"


def build_environment(
    config: LaunchConfig,
    given: Mapping[str, str],
    starter: Starter,
    run: runs.Run,
    ranks: int,
    token: str,
    layout: Sequence[tuple[str, int]] = (),
) -> dict[str, str]:
    """Returns the environment of the launcher and the ranks of an attempt.

    It is the allowed part of `given`, and the variables of the run.

    token: marks the processes of this attempt.
    layout: hosts and their ranks.
    """
    out = {name: value for name, value in given.items() if _is_allowed(name, config.env)}
    out |= {
        runs.RUN_DIR: str(run.path),
        runs.ATTEMPT: str(run.attempt),
        runs.EXPECTED_RANKS: str(ranks),
        TOKEN: token,
    }
    out.setdefault("MOJO_PYTHON", sys.executable)  # the Python that a Mojo program finds odyssey in
    if config.watchdog is not None:
        out["ODYSSEY_WATCHDOG"] = f"{config.watchdog:g}"
    if config.other_arithmetic:
        out[OTHER_ARITHMETIC] = "1"
    if starter.kind == "srun" and "SLURM_CPUS_PER_TASK" in out:
        # srun does not take it over by itself since SLURM 22.05
        out["SRUN_CPUS_PER_TASK"] = given.get("SRUN_CPUS_PER_TASK", out["SLURM_CPUS_PER_TASK"])
    if starter.mpi == "openmpi" and os.geteuid() == 0:
        # Open MPI asks root twice; `launch` has its own rule about root.
        out.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    if (
        starter.kind == "mpich"
        and "HYDRA_LAUNCHER_EXEC" not in out
        and out.get("HYDRA_LAUNCHER", "ssh") == "ssh"
    ):
        out.setdefault("HYDRA_LAUNCHER_EXTRA_ARGS", _SSH)
    if starter.kind == "openmpi" and not any(n.startswith("PRTE_MCA_plm_ssh") for n in out):
        out.setdefault("PRTE_MCA_plm_ssh_args", _SSH)
    if starter.has_orte:
        out.setdefault("OMPI_MCA_plm_rsh_args", _SSH)
    if config.bind_if is not None:
        out.setdefault("FI_TCP_IFACE", config.bind_if)
        out.setdefault("UCX_NET_DEVICES", config.bind_if)
    # What env:// looks for; the wrapper of a rank adds RANK and LOCAL_RANK.
    port = config.master_port or free_port()
    first = layout[0][0] if layout else "127.0.0.1"
    out.update(MASTER_ADDR=first, MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    return out


def _is_allowed(name: str, extra_names: Sequence[str]) -> bool:
    """Returns True if ranks get this variable. extra_names: those that --env allows."""
    if name in extra_names:
        return True
    return is_named(name, ALLOWED) and not is_named(name, OF_RANKS) and name not in SECRET


def build_command(
    config: LaunchConfig,
    starter: Starter,
    ranks: int,
    layout: Sequence[tuple[str, int]],
    exported: Sequence[str],
) -> list[str]:
    """Returns the launcher and its options; the caller appends the program.

    layout: hosts and their ranks; empty for this machine, or the allocation.
    exported: variables for ranks on other machines, because Open MPI sends none by itself.
    """
    hosts = ",".join(f"{name}:{count}" for name, count in layout)
    out = [starter.path]
    if starter.kind == "srun":
        # Not ended by a rank's death: SLURM would give the others a SIGTERM, and KillWait (30 s) to
        # follow it. The attempt has them killed at once (Attempt._end_step).
        out += [f"--mpi={'pmix' if starter.mpi == 'openmpi' else 'pmi2'}", "--kill-on-bad-exit=0"]
        out += ["--nodelist", ",".join(name for name, _ in layout)] if layout else []
        return [*out, "--ntasks", str(ranks)]
    if starter.kind == "openmpi":
        # More ranks than cores are allowed as with MPICH, and a rank's threads may use all cores:
        # Open MPI would bind a rank to one.
        out += ["--oversubscribe", "--bind-to", "none"]
        out += ["--host", hosts] if layout else []
        if config.bind_if is not None:
            control = ["--prtemca", "prte_if_include"]
            if starter.has_orte:
                control = ["--mca", "oob_tcp_if_include"]
            out += [*control, config.bind_if, "--mca", "btl_tcp_if_include", config.bind_if]
        for name in exported if layout else ():
            out += ["-x", name]
        return [*out, "-n", str(ranks)]
    out += ["-hosts", hosts] if layout else []
    out += ["-iface", config.bind_if] if config.bind_if is not None else []
    return [*out, "-n", str(ranks)]


def wrap_rank(program: Sequence[str]) -> list[str]:
    """Returns the command that runs `program` as a rank, under the wrapper of a rank."""
    return [sys.executable, "-I", "-S", str(HERE / "rank_wrapper.py"), *program]


def tie_to_parent(words: Sequence[str], parent: int) -> list[str]:
    """Returns a command that runs `words`, and that the kernel ends when process `parent` ends."""
    program = HERE.parent / "base" / "die_with_parent.py"
    return [sys.executable, "-I", "-S", str(program), str(parent), *words]


def normalize_command(words: Sequence[str]) -> list[str]:
    """Returns a command line in the one form in which `odyssey launch` keeps it.

    "python script.py" becomes "script.py", and "python -m module" becomes "-m module".
    "-m odyssey.train" and "odyssey train" become "train".
    """
    words = list(words)
    if (
        words[0] in _INTERPRETERS
        and len(words) > 1
        and (words[1] == "-m" or not words[1].startswith("-"))
    ):
        del words[0]
    if words[:2] in (["-m", "odyssey.train"], ["odyssey", "train"]):
        words[:2] = ["train"]
    return words


def resolve_program(words: Sequence[str]) -> list[str]:
    """Returns the command of a rank, for a command line of `odyssey launch`.

    The first word is "train" for odyssey's training, "-m" for a module, a Python script or another
    program.

    Raises:
        ConfigError: there is no such file, module or program.
    """
    first = words[0]
    if first == "train":
        # -P: a file of the current directory does not stand in for a module
        return [
            sys.executable,
            *(["-P"] if sys.version_info >= (3, 11) else []),
            "-m",
            "odyssey.train",
            *words[1:],
        ]
    if first == "-m":
        if len(words) == 1:
            raise ConfigError("[launch] -m has no module; write -m PACKAGE.MODULE")
        name = words[1].partition(".")[0]
        if not name.isidentifier() or PathFinder.find_spec(name, [os.getcwd(), *sys.path]) is None:
            raise ConfigError(
                f"[launch] there is no module {printable(words[1], limit=60)}; start in the folder "
                "that its package lies in, or name that in PYTHONPATH"
            )
        return [sys.executable, *words]
    if first in _INTERPRETERS:
        return [sys.executable, *words[1:]]
    if Path(first).is_file():
        if first.endswith(".py") or not os.access(first, os.X_OK):
            return [sys.executable, *words]
        return [os.path.join(os.curdir, first), *words[1:]]
    executable = shutil.which(first)
    if executable is None or os.sep in first:
        raise ConfigError(
            f"[launch] {printable(first, limit=200)} is no file and no program; give a Python "
            "script, -m MODULE, a program, or train"
        )
    return [executable, *words[1:]]
