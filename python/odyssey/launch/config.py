"""Configuration of a launch, complete and checked: `LaunchConfig`.

Pure; nothing is started or written here.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..base.paths import expand_path
from ..base.registry import provided
from ..errors import ConfigError
from .hosts import Host, check_room

LAUNCHERS = ("auto", "mpirun", "srun")
BACKENDS = ("auto", "mpi", *provided("backends"))
MOST = 1 << 20  # ranks

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}", re.ASCII)
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How ranks are started and what happens when they end.

    Args:
        nproc_per_node, nnodes: ranks of each machine, and machines; their product is the number of
            ranks.
        max_restarts: restarts without progress in between after which the run is given up.
        monitor_interval: seconds between two looks at the running ranks.
        start_timeout: seconds in which all ranks must have been started.
        run_dir: the run's directory; default ./runs/DATE-TIME-NAME.
        hosts: machines; default this one, or those of the SLURM allocation.
        launcher: "mpirun": that of the MPI library which mpi4py loads; "srun"; the path of an
            mpirun; or "auto": srun inside a SLURM allocation, else mpirun.
        elastic: fewest and most ranks that the run may go on with when a host is lost, a rank fails
            again and again, or `odyssey scale` asks; None: always as many.
        backoff: seconds before the second restart without progress; doubled for each further one,
            at most 60.
        grace: seconds that ranks have to stop on request.
        watchdog: seconds without progress after which a rank counts as hung (ODYSSEY_WATCHDOG);
            None: its default.
        env: names of variables that ranks get besides those of the allow-list.
        bind_if: network interface that MPI uses.
        allow_root: start although this is root on a machine where others work.
        other_arithmetic: ranks may compute different results from the same numbers, because of
            their processors, libraries or variables (ODYSSEY_OTHER_ARITHMETIC).
        backend: how a script's ranks meet: "auto" and "mpi" by the launcher itself, "gloo": by the
            variables of env:// as well (MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK, LOCAL_RANK).
        master_port: for that; default a free one.

    Raises ConfigError: a value that is not allowed, alone or with another.
    """

    nproc_per_node: int = 1
    nnodes: int = 1
    max_restarts: int = 0
    monitor_interval: float = 0.05
    start_timeout: float = 600.0
    run_dir: Path | None = None
    hosts: tuple[Host, ...] = ()
    launcher: str = "auto"
    elastic: tuple[int, int] | None = None
    backoff: float = 1.0
    grace: float = 30.0
    watchdog: float | None = None
    env: tuple[str, ...] = ()
    bind_if: str | None = None
    allow_root: bool = False
    other_arithmetic: bool = False
    backend: str = "auto"
    master_port: int | None = None

    def __post_init__(self) -> None:  # noqa: C901
        for name, least in {"nproc_per_node": 1, "nnodes": 1, "max_restarts": 0}.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST:
                raise ConfigError(
                    f"[launch] {name} is {value!r}; a whole number from {least} is allowed"
                )
        times = {
            "monitor_interval": 0.001,
            "start_timeout": 1,
            "backoff": 0,
            "grace": 0,
            "watchdog": 0,
        }
        for name, least in times.items():
            value = least if name == "watchdog" and self.watchdog is None else getattr(self, name)
            if type(value) not in (int, float) or not (math.isfinite(value) and value >= least):
                raise ConfigError(
                    f"[launch] {name} is {value!r}; a number of seconds from {least} is allowed"
                )
        if self.master_port is not None and (
            type(self.master_port) is not int or not 0 < self.master_port < 65536
        ):
            raise ConfigError(
                f"[launch] master_port is {self.master_port!r}; a port from 1 to 65535 is allowed"
            )
        if os.sep in self.launcher:
            program = str(expand_path(self.launcher).absolute())
            object.__setattr__(self, "launcher", program)
        elif self.launcher not in LAUNCHERS:
            raise ConfigError(
                f"[launch] launcher {self.launcher!r} is unknown; choose from "
                f"{', '.join(LAUNCHERS)}, or use the path of an mpirun"
            )
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"[launch] backend {self.backend!r} is not one that ranks are started for; choose "
                f"from {', '.join(BACKENDS)}, and let the script choose the transport"
            )
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(
                    f"[launch] --env {ascii(name[:60])} is no name of a variable; give the name "
                    "alone"
                )
        if self.bind_if is not None and not _INTERFACE.fullmatch(self.bind_if):
            raise ConfigError(
                f"[launch] --bind-if {ascii(self.bind_if[:60])} is no name of a network interface"
            )
        check_room(self.hosts, self.ranks)
        if self.elastic is not None:
            least, most = self.elastic
            if not 1 <= least <= self.ranks <= most <= MOST:
                raise ConfigError(
                    f"[launch] --elastic {least}:{most} with {self.ranks} ranks; 1 <= MIN <= "
                    "ranks <= MAX is allowed"
                )

    @property
    def ranks(self) -> int:
        """How many ranks the run begins with."""
        return self.nproc_per_node * self.nnodes


def allowed(ranks: int, elastic: Sequence[int] | None, room: int | None) -> str | None:
    """Why a run cannot go on with so many ranks, or None if it can. room: slots that its hosts
    have, if any limit.
    """
    min_ranks, max_ranks = elastic or (1, MOST)
    if room is not None and ranks > room:
        return f"its hosts have {room} slots"
    if not min_ranks <= ranks <= max_ranks:
        return f"{min_ranks} to {max_ranks} are allowed" + (
            f" (--elastic {min_ranks}:{max_ranks})" if elastic else ""
        )
    return None


def parse_elastic(text: str) -> tuple[int, int]:
    """The fewest and the most ranks of a text such as "2:8".

    Raises ConfigError: it is not two numbers.
    """
    match = re.fullmatch(r"([0-9]{1,7}):([0-9]{1,7})", text, re.ASCII)
    if not match:
        raise ConfigError(f"[launch] --elastic {ascii(text[:60])}; write MIN:MAX, as 2:8")
    return int(match[1]), int(match[2])
