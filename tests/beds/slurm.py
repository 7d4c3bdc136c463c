"""A SLURM of four nodes on the hosts of netns.py: slurmctld on h0, slurmd on h1 ... h4, its own
munge, no accounts.

    with Hosts(4, folder) as hosts, Slurm(hosts) as slurm:
        job = slurm.job(["srun", "-N4", "-n4", "--mpi=pmi2", sys.executable, JOB])

Real daemons of the packages slurm-wlm and munge; their configuration, key and sockets are in the
folder of the bed, and others on this machine are not touched. Times after which a node counts as
dead, or a job that was requeued may start, are shortened (`_CONFIGURATION`). What it is not: a test
of accounting, cgroups or several users.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from .netns import Hosts
from .netns import why_not as why_no_hosts
from .outside import TOKEN, Job

DAEMONS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")

_CONFIGURATION = """
ClusterName=bed
SlurmctldHost=h0(10.77.0.254)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
MpiDefault=none
SlurmdTimeout=6
KillWait=10
MinJobAge=60
SchedulerParameters=sched_interval=1,sched_min_interval=200000
NodeName=h[1-{count}] NodeAddr=10.77.0.[1-{count}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no SLURM here; None if there can."""
    if why := why_no_hosts():
        return why
    missing = [name for name in DAEMONS if _tool(name) is None]
    return f"SLURM needs {', '.join(missing)} (packages slurm-wlm and munge)" if missing else None


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Slurm:
    """The daemons; `hosts` must be whole, and is closed after this.

    Raises:
        RuntimeError: nodes are not idle within 30 s; the message has the end of the logs.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.folder = hosts, hosts.folder / "slurm"
        for folder in (self.folder, self.folder / "state"):
            folder.mkdir()
        self._daemons: dict[int, subprocess.Popen] = {}
        self.configuration = self.folder / "slurm.conf"
        self.configuration.write_text(_CONFIGURATION.format(folder=self.folder, count=hosts.count))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {
            f"--{name}-file": self.folder / f"munge.{name}"
            for name in ("key", "pid", "log", "seed")
        }
        options = [f"{name}={path}" for name, path in files.items()]
        try:
            self._munge = self._start(
                [
                    _tool("munged"),
                    "--foreground",
                    "--force",
                    f"--socket={self.folder}/munge.socket",
                    *options,
                ]
            )
            self._controller = self._start(
                hosts.on(0, _tool("slurmctld"), "-D", "-f", self.configuration)
            )
            for k in range(1, hosts.count + 1):
                self.start_node(k)
            self.wait_for_nodes("idle", hosts.count, 30)
        except BaseException:
            self.close()
            raise

    def _start(self, command: Sequence[Any]) -> subprocess.Popen:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", TOKEN: self.hosts.token},
            start_new_session=True,
        )

    def start_node(self, k: int) -> None:
        """slurmd of a host, at the start or after `hosts.start_host`."""
        self._daemons[k] = self._start(
            self.hosts.on(k, _tool("slurmd"), "-D", "-f", self.configuration)
        )

    # --- questions ---

    def ask(self, *command: str) -> str:
        """What sinfo, squeue or scontrol print."""
        done = subprocess.run(
            self.hosts.on(0, *command),
            env={"PATH": os.environ["PATH"], "SLURM_CONF": str(self.configuration)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.stdout.strip() + done.stderr.strip()

    def nodes(self) -> dict[str, str]:
        """State of each node: idle, alloc, down, ..."""
        return dict(
            line.split()
            for line in self.ask("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
            if " " in line
        )

    def wait_for_nodes(self, state: str, count: int, timeout: float) -> None:
        """Waits until `count` nodes are in a state."""
        deadline = time.monotonic() + timeout
        while list(self.nodes().values()).count(state) < count:
            if time.monotonic() > deadline:
                logs = "\n".join(
                    p.read_text(errors="replace")[-800:] for p in sorted(self.folder.glob("*.log"))
                )
                raise RuntimeError(
                    f"SLURM: {count} nodes are not {state}: {self.ask('sinfo')}\n{logs}"
                )
            time.sleep(0.1)

    def state(self, number: int) -> str:
        """PENDING, RUNNING, ... of a job."""
        words = self.ask("scontrol", "show", "job", str(number)).split()
        return next((w.partition("=")[2] for w in words if w.startswith("JobState=")), "UNKNOWN")

    # --- jobs ---

    def job(self, command: Sequence[Any], **settings: Any) -> Job:
        """Runs srun, salloc or sbatch on h0; arguments of Job."""
        environment = {"SLURM_CONF": str(self.configuration), **settings.pop("environment", {})}
        return self.hosts.job(command, environment=environment, **settings)

    def submit(self, script: str, *options: str, **settings: Any) -> tuple[int, Job]:
        """sbatch of a script, written aside; (number of the job, what sbatch said).

        Its output: `output(number)`.
        """
        file = self.folder / f"{secrets.token_hex(4)}.sh"
        file.write_text(f"#!/bin/sh\n{script}\n")
        where = ["--parsable", f"--output={self.folder}/%j.out", "--open-mode=append"]
        said = self.job(["sbatch", *where, *options, file], **settings)
        if said.wait(20):
            raise RuntimeError(f"sbatch: {said.output}")
        return int(said.output.split()[-1]), said

    def output(self, number: int) -> str:
        """What a submitted job has printed, in all its runs."""
        file = self.folder / f"{number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, holds: Callable[[], Any], timeout: float, what: str) -> float:
        """Waits for a condition; returns the seconds it took."""
        start = time.monotonic()
        while not holds():
            if time.monotonic() - start > timeout:
                raise AssertionError(
                    f"no {what} within {timeout} s: {self.ask('squeue')} {self.ask('sinfo')}"
                )
            time.sleep(0.1)
        return time.monotonic() - start

    def restore(self) -> None:
        """Cancels all jobs; afterwards every host is up and every node idle."""
        self.ask("scancel", "--user=root")
        self.hosts.end_jobs()
        deadline = time.monotonic() + 20
        while self.ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.1)
        lost = self.hosts.restore()
        for k in lost:
            self._daemons.pop(k).wait(10)
            self.start_node(k)
        if lost:
            self.ask("scontrol", "update", f"NodeName=h[1-{self.hosts.count}]", "State=RESUME")
        self.wait_for_nodes("idle", self.hosts.count, 30)

    def close(self) -> None:
        """Ends the daemons and what they started."""
        daemons = [
            *self._daemons.values(),
            *(getattr(self, name, None) for name in ("_controller", "_munge")),
        ]
        for daemon in filter(None, daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait(10)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
