"""Several hosts in one machine: network, host name, processes, /dev/shm and /tmp of their own,
and a switch.

    with Hosts(4, folder) as hosts:
        job = hosts.job(hosts.mpirun(1, [sys.executable, JOB]))
        hosts.kill_host(3)

The host h0 (10.77.0.254) holds the switch and runs what starts jobs; h1, h2, ... (10.77.0.1, ...)
run ranks. MPI launchers find an `ssh` in PATH (ssh.py). Files are shared, as over NFS, except
/dev/shm and /tmp; cores and memory are the machine's. Needs root, unshare, nsenter and iproute2.
All of it is namespaces that processes hold: when these end, also because the test is killed,
nothing is left. `limit` gives a host less bandwidth (tbf); `shape` gives all of them wires with a
rate, a delay and loss, which a program here makes (wire.c, with `cc`), since netem is not
everywhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .outside import LEFT, TOKEN, Job, Process, job_environment, open_mpi
from .ssh import Server

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")

# The first process of a host. $1 its name, $2 a folder of its own, $3 its shared memory, $4 the
# file of hosts.
_FIRST = r"""
set -e
hostname "$1"
mkdir -p "$2/sys" "$2/tmp" "$3"
mount --rbind /sys "$2/sys"
mount -t sysfs sysfs /sys
mount --rbind "$2/sys/fs/cgroup" /sys/fs/cgroup 2>/dev/null || true
umount -l "$2/sys"
mount --bind "$4" /etc/hosts
chmod 1777 "$2/tmp" "$3"
for folder in /tmp/*/; do
    case "$folder" in /tmp/ompi.*|/tmp/prte*|/tmp/odyssey*|"/tmp/*/") continue;; esac
    mkdir -p "$2/tmp/$(basename "$folder")"
    basename "$folder" >> "$2/shared"
    mount --rbind "$folder" "$2/tmp/$(basename "$folder")" 2>/dev/null || true  # somebody has just removed it
done
mount --bind "$3" /dev/shm
mount --rbind "$2/tmp" /tmp
ip link set lo up
echo ready
exec sleep infinity
"""


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "hosts in network namespaces need root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return (
            f"hosts in network namespaces need {', '.join(missing)} (packages iproute2 and "
            "util-linux)"
        )
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "--uts",
            "--ipc",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "sh",
            "-c",
        ]
        + [
            "ip link add name b type bridge && ip link add name p type veth peer name e && mount "
            "-t sysfs sysfs /sys"
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return f"no namespaces here: {tried.stderr.strip()[:200]}" if tried.returncode else None


class _Traces:
    """New files in /dev/shm and /tmp of all hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.before = self._names()

    def _names(self) -> set[Path]:
        folders = [
            f for k in range(self.hosts.count + 1) for f in (self.hosts.shm(k), self.hosts.tmp(k))
        ]
        return {
            Path(entry.path)
            for folder in folders
            if folder.is_dir()
            for entry in os.scandir(folder)
        }

    def new(self) -> list[Path]:
        lists = [self.hosts.tmp(k).with_name("shared") for k in range(self.hosts.count + 1)]
        shared = {
            file.with_name("tmp") / name for file in lists for name in file.read_text().splitlines()
        }
        shm = str(self.hosts.shm(0).parent)
        return sorted(
            p
            for p in self._names() - self.before - shared
            if str(p).startswith(shm) or LEFT.match(p.name)
        )


class Hosts:
    """`count` hosts h1, h2, ... and h0 with the switch.

    Raises:
        RuntimeError: they cannot be made; `why_not()` says so beforehand in most cases.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder = count, Path(folder) / "bed"
        self.folder.mkdir(parents=True)
        self.token = f"bed-{os.getpid()}-{time.monotonic_ns():x}"
        self._first: dict[int, subprocess.Popen] = {}
        self._pids: dict[int, int] = {}  # of each host's first process
        self._cut: set[int] = set()  # nothing comes from there, and nobody says so
        self._jobs: list[Job] = []
        self._wire: subprocess.Popen | None = None  # between the hosts and the switch
        self._write_files()
        try:
            for k in range(count + 1):
                self._start(k)
            self._on(
                0, "ip", "link", "add", "name", "switch", "type", "bridge", "forward_delay", "0"
            )
            # Else it has the lowest address of its ports: one that goes takes it along, and all
            # lose h0 for seconds.
            self._on(0, "ip", "link", "set", "switch", "address", _hardware(254))
            self._on(0, "ip", "addr", "add", "10.77.0.254/24", "dev", "switch")
            self._on(0, "ip", "link", "set", "switch", "up")
            for k in range(1, count + 1):
                self._connect(k)
        except BaseException:
            self.close()
            raise

    # --- names and places ---

    @property
    def names(self) -> list[str]:
        """h1, h2, ..."""
        return [f"h{k}" for k in range(1, self.count + 1)]

    @property
    def alive(self) -> set[int]:
        """Numbers of the hosts that were not killed, without h0."""
        return set(self._pids) - {0}

    def shm(self, k: int) -> Path:
        """Where the /dev/shm of a host is seen from outside."""
        return Path("/dev/shm") / self.token / f"h{k}"

    def tmp(self, k: int) -> Path:
        """Where its /tmp is seen, without the folders that all share."""
        return self.folder / f"h{k}" / "tmp"

    def _write_files(self) -> None:
        lines = [
            "127.0.0.1 localhost",
            "10.77.0.254 h0",
            *(f"10.77.0.{k} h{k}" for k in range(1, self.count + 1)),
        ]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        self._ssh = Server(self.folder, self._enter, TOKEN)

    def _enter(self, name: str) -> list[str] | None:
        """For ssh: how to run a command on a host, None if it is dead or cut off."""
        number = name.removeprefix("10.77.0.") if name.startswith("10.") else name.removeprefix("h")
        k = int(number) % 254 if number.isdigit() else -1
        if not 0 <= k <= self.count:
            raise KeyError(name)
        return None if k in self._cut or k not in self._pids else self.on(k)

    # --- hosts ---

    def _start(self, k: int) -> None:
        kinds = "--net --uts --ipc --mount --pid --fork --kill-child --mount-proc"
        log = self.folder / f"h{k}.log"
        with log.open("ab") as errors:
            self._first[k] = process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    "unshare",
                    *kinds.split(),
                    "--propagation",
                    "private",
                ]
                + ["sh", "-c", _FIRST, "sh", f"h{k}", str(self.folder / f"h{k}"), str(self.shm(k))]
                + [str(self.folder / "hosts")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={"PATH": os.environ["PATH"], TOKEN: self.token},
                start_new_session=True,
            )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host h{k} did not start: {log.read_text(errors='replace')[-300:]}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._pids[k] = int(children[0])

    def _on(self, k: int, *words: str) -> None:
        """A command in the network of a host."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._pids[k]), "--net", *words],
            capture_output=True,
            text=True,
            timeout=20,
        )
        if done.returncode:
            raise RuntimeError(f"h{k}: {' '.join(words)}: {done.stderr.strip()}")

    def _connect(self, k: int) -> None:
        port, its, switch = f"p{k}", str(self._pids[k]), str(self._pids[0])
        made = [
            "ip",
            "link",
            "add",
            "name",
            port,
            "netns",
            switch,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            its,
        ]
        subprocess.run(made, check=True, capture_output=True, timeout=20)
        self._on(0, "ip", "link", "set", port, "master", "switch", "up")
        # the same when it comes back
        self._on(k, "ip", "link", "set", "eth0", "address", _hardware(k))
        self._on(k, "ip", "addr", "add", f"10.77.0.{k}/24", "dev", "eth0")
        self._on(k, "ip", "link", "set", "eth0", "up")

    def kill_host(self, k: int, silent: bool = True) -> None:
        """All processes of a host end at once. silent: its network went first, so nobody hears
        of it.
        """
        if silent:
            self.partition(k)
        pid = self._pids.pop(k)
        os.kill(pid, signal.SIGKILL)  # the first process: the kernel ends the others
        self._first.pop(k).wait(10)

    def start_host(self, k: int) -> None:
        """A host that was killed comes back, empty."""
        for folder in (self.shm(k), self.tmp(k)):
            shutil.rmtree(folder, ignore_errors=True)
        # the kernel removes it with the host's end, a little later
        with contextlib.suppress(RuntimeError):
            self._on(0, "ip", "link", "delete", f"p{k}")
        self._start(k)
        self._connect(k)
        self._cut.discard(k)

    def partition(self, k: int) -> None:
        """The switch forwards nothing to a host or from it; the host notices nothing but
        silence.
        """
        self._cut.add(k)
        # else h0 itself would answer there
        self._on(0, "ip", "link", "set", self._port(k), "nomaster", "arp", "off")

    def heal(self, k: int) -> None:
        """Undoes `partition`."""
        self._on(0, "ip", "link", "set", self._port(k), "master", "switch", "arp", "on")
        self._cut.discard(k)

    def _port(self, k: int) -> str:
        """The switch's device for a host."""
        return f"p{k}" if self._wire is None else f"s{k}"

    def shape(self, rate: float, round_trip: float = 0.0, loss: float = 0.0) -> None:
        """Gives every host a wire of so many bits a second each way, until `restore`; a packet
        to another host and its answer take so many seconds more, and this share of packets is
        lost on the way from host to host.
        """
        self.unshape()
        program = self.folder / "wire"
        if not program.exists():
            subprocess.run(
                ["cc", "-O2", "-o", program, Path(__file__).with_name("wire.c")],
                check=True,
                timeout=60,
            )
        pairs = []
        for k in sorted(self.alive):
            self._on(0, "ip", "link", "set", f"p{k}", "nomaster")
            self._on(
                0, "ip", "link", "add", "name", f"w{k}", "type", "veth", "peer", "name", f"s{k}"
            )
            self._on(0, "ip", "link", "set", f"s{k}", "master", "switch", "up")
            self._on(0, "ip", "link", "set", f"w{k}", "up")
            # packets are lost one by one, not with all of a chunk that the kernel has not yet cut
            if loss:
                self._on(k, "ip", "link", "set", "eth0", "gso_max_segs", "1")
            pairs.append(f"p{k}:w{k}")
        # of two wires on the way
        one_way = [str(rate), str(1e6 * round_trip / 4), str(1 - (1 - loss) ** 0.5)]
        command = [
            "nsenter",
            "--target",
            str(self._pids[0]),
            "--net",
            str(program),
            *one_way,
            *pairs,
        ]
        guarded = ["setpriv", "--pdeathsig", "KILL", *command]
        self._wire = subprocess.Popen(guarded, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != b"ready\n":
            raise RuntimeError(f"no wires: {self._wire.wait(5)}")

    def unshape(self) -> None:
        """Undoes `shape`."""
        if self._wire is None:
            return
        self._wire.kill()
        self._wire.wait(10)
        self._wire.stdout.close()
        for k in range(1, self.count + 1):
            with contextlib.suppress(RuntimeError):  # gone with a host that was killed
                self._on(0, "ip", "link", "delete", f"s{k}")
                self._on(0, "ip", "link", "set", f"p{k}", "master", "switch")
            if k in self._pids:
                self._on(k, "ip", "link", "set", "eth0", "gso_max_segs", "65535")
        self._wire = None

    def limit(self, k: int, rate: str) -> None:
        """Limits what a host sends and gets, as "50mbit"."""
        rule = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
        self._on(0, "tc", "qdisc", "replace", "dev", f"p{k}", *rule)
        self._on(k, "tc", "qdisc", "replace", "dev", "eth0", *rule)

    def processes(self, k: int, job: Job) -> list[Process]:
        """The job's processes on a host."""
        try:
            own = os.readlink(f"/proc/{self._pids[k]}/ns/net") if k in self._pids else None
        except OSError:
            own = None
        return [p for p in job.outside.processes() if own is not None and _net(p.pid) == own]

    # --- jobs ---

    def on(self, k: int, *command: Any) -> list[str]:
        """A command to be run on a host, as words; for this process, not for a job on h0, which
        uses ssh.
        """
        kinds = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", "--target", str(self._pids[k]), *kinds, *map(str, command)]

    def mpirun(
        self, per_host: int, command: Sequence[Any], hosts: Sequence[str] | None = None
    ) -> list[str]:
        """A command on `per_host` ranks of each host, or of those given as "h1", or "h1:3" for
        another number of ranks; under this environment's MPI.
        """
        slots = [h if ":" in h else f"{h}:{per_host}" for h in (hosts or self.names)]
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        ranks, words = (
            str(sum(int(slot.partition(":")[2]) for slot in slots)),
            [str(word) for word in command],
        )
        if not open_mpi():
            return [mpirun, "-hosts", ",".join(slots), "-n", ranks, *words]
        names = [
            "PYTHONPATH",
            *(
                name
                for name in sorted(job_environment())
                if name.startswith(("ODYSSEY_", "MODULAR_"))
            ),
        ]
        passed = [word for name in names for word in ("-x", name)]
        return [mpirun, "--host", ",".join(slots), "--map-by", "slot", *passed, "-n", ranks, *words]

    def job(self, command: Sequence[Any], **settings: Any) -> Job:
        """Starts a command on h0, or `host=` another; arguments of Job.

        Its `pid` is that of nsenter: signals go to `outside`'s roles.
        """
        environment = {
            "PATH": f"{self.folder / 'bin'}:{job_environment()['PATH']}",
            **settings.pop("environment", {}),
        }
        settings = {"own_folders": False, "traces": _Traces(self), **settings}
        job = Job(
            self.on(settings.pop("host", 0), *command),
            self.folder.parent,
            environment=environment,
            **settings,
        )
        self._jobs.append(job)
        return job

    def restore(self) -> list[int]:
        """Ends all jobs; afterwards every host is up, reachable and as fast as it was.

        Returns those that were dead.
        """
        self.end_jobs()
        self.unshape()
        dead = [k for k in range(1, self.count + 1) if k not in self._pids]
        for k in range(1, self.count + 1):
            if k in dead:
                self.start_host(k)
            self.heal(k)
            for host, device in ((0, f"p{k}"), (k, "eth0")):
                with contextlib.suppress(RuntimeError):  # there is no limit
                    self._on(host, "tc", "qdisc", "delete", "dev", device, "root")
        return dead

    def end_jobs(self) -> None:
        """Ends all jobs started here."""
        for job in self._jobs:
            job.end()
        self._jobs.clear()

    def close(self) -> None:
        """Ends all jobs and all hosts."""
        self.end_jobs()
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait(10)
        if hasattr(self, "_ssh"):
            self._ssh.close()
        for process in self._first.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._first.values():
            process.wait(10)
        shutil.rmtree(self.shm(0).parent, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hardware(k: int) -> str:
    """The hardware address of a host."""
    return f"02:00:0a:4d:00:{k:02x}"


def _net(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
