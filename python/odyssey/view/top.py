"""Table of `odyssey top`: finds the main watcher of a job, asks it, makes a table of the answer.

It only reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import time
from pathlib import Path
from typing import Any

from ..base import read_json, slot, stat
from ..errors import LaunchError, counted, printable
from ..watch import diagnosis, messages

WAIT_S = 3.0  # seconds for an answer


class Job:
    """A running job's main watcher, connected.

    Raises LaunchError: there is no such job, or it does not answer.
    """

    def __init__(self, lines: messages.Lines) -> None:
        self._lines = lines
        if isinstance(lines, messages.Sealed):
            try:
                self._until(lambda: lines.ready, [])
            except messages.Closed:
                raise LaunchError(
                    "[top] the job's watcher refuses the connection; the job may have ended"
                ) from None

    def look(self) -> dict[str, Any] | None:
        """Returns what its ranks do now; None when the job has ended."""
        try:
            snapshots: list[Any] = []
            self._lines.send({"look": True})
            self._until(lambda: bool(snapshots), snapshots)
        except messages.Closed:
            return None
        return checked(snapshots[-1])

    def _until(self, is_done: Any, snapshots: list[Any]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_done():
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise LaunchError(
                    f"[top] the job's watcher did not answer in {WAIT_S:g} s; it may be stopped"
                )
            select.select(
                [self._lines], [self._lines] if self._lines.pending else [], [], seconds_left
            )
            self._lines.flush()
            snapshots += [
                value
                for value in self._lines.receive()
                if isinstance(value, dict) and "ranks" in value
            ]

    def close(self) -> None:
        self._lines.close()


def checked(value: dict[str, Any]) -> dict[str, Any]:
    """A snapshot whose ranks are `Seen`; what else it says is made printable."""
    ranks = [
        diagnosis.parse_seen(item)
        for item in value.get("ranks", [])
        if isinstance(value.get("ranks"), list)
    ]
    slow = value.get("slow")
    numbers = {name: value.get(name) for name in ("pid", "world", "attempt")}
    return {
        "host": printable(str(value.get("host", "")), limit=100),
        **{name: number if isinstance(number, int) else 0 for name, number in numbers.items()},
        "run": printable(str(value.get("run", "")), limit=400),
        "ranks": [status for status in ranks if status is not None],
        "slow": {
            int(rank): (float(times), printable(str(phase), limit=40))
            for rank, (times, phase) in (slow.items() if isinstance(slow, dict) else ())
            if rank.isdigit()
        },
    }


def pids() -> list[int]:
    """Rank 0 of each job of this user on this machine, the newest first."""
    leaders = set()
    for pid, name in _names():
        with contextlib.suppress(OSError), _connect(name, 0.0):
            leaders.add(pid)
    return sorted(leaders, key=lambda pid: _field(pid, 19), reverse=True)


def _names() -> list[tuple[int, str]]:
    """Rank 0, and the name of a socket, of what seems to be a watcher of this user: anybody can
    take such a name.
    """
    try:
        text = Path("/proc/net/unix").read_text(errors="replace")
    except OSError:
        return []
    matches = re.findall(
        rf" @(odyssey-watch-{os.getuid()}-([0-9]{{1,10}})-[0-9a-f]{{16}})$", text, re.MULTILINE
    )
    return [(int(pid), name) for name, pid in sorted(set(matches))]


def _connect(name: str, seconds: float) -> socket.socket:
    """A connection to what listens at a name.

    OSError: nobody does, or a process of another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(f"\0{name}")
        if messages.user_of(connection) != os.getuid():
            raise PermissionError(errno.EPERM, "it is another user's")
    except BaseException:
        connection.close()
        raise
    return connection


def _field(pid: int, number: int) -> int:
    """A field of process.stat; 0 for a process that is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(stat(pid)[number])
    return 0


def local(pid: int) -> Job:
    """The job whose rank 0 is this process, on this machine."""
    reason: OSError | str = "it has no watcher"
    for leader, name in _names():
        if leader == pid:
            try:
                return Job(messages.Lines(_connect(name, WAIT_S)))
            except OSError as problem:
                reason = problem.strerror or problem
    raise LaunchError(f"[top] the job of process {pid} cannot be asked: {reason}")


def of_process(pid: int) -> Job:
    """The job that a process belongs to: one of its ranks, or what started them."""
    for leader in pids():
        chain = set()
        ancestor = leader
        while ancestor > 1:
            chain.add(ancestor)
            ancestor = _field(ancestor, 1)
        if pid in chain:
            return local(leader)
    for leader in pids():
        job = local(leader)
        snapshot = job.look()
        if snapshot is not None and any(s.pid == pid for s in snapshot["ranks"]):
            return job
        job.close()
    raise LaunchError(f"[top] process {pid} belongs to no running job of this user on this machine")


def of_run(run: Path) -> Job:
    """The running job of a run directory, here or, of a job on several machines, from any of them.

    Raises LaunchError: it is not running, or it runs on one other machine. DataError:
    RUN/watch.json is not what a watcher writes.
    """
    path = run / "watch.json"
    if not path.exists():
        raise LaunchError(f"[top] {run} is not running, or not a run: there is no watch.json in it")
    value = read_json(path, limit=65536)
    fields = "host", "pid", "address", "secret"
    host, pid, address, secret = (value.get(k) if isinstance(value, dict) else None for k in fields)
    if host == os.uname().nodename and isinstance(pid, int) and pid in pids():
        return local(pid)
    if not (
        isinstance(address, list)
        and len(address) == 2
        and isinstance(secret, str)
        and len(secret) == 64
    ):
        raise LaunchError(
            f"[top] {run} runs, or ran, on {printable(str(host), limit=100)}; ask there"
        )
    try:
        connection = socket.create_connection((str(address[0]), int(address[1])), timeout=WAIT_S)
        return Job(messages.Sealed(connection, bytes.fromhex(secret), caller=True, role="top"))
    except (OSError, ValueError, messages.Closed) as problem:
        endpoint = printable(f"{host}, {address[0]}:{address[1]}", limit=120)
        raise LaunchError(
            f"[top] the watcher of {run} at {endpoint} cannot be reached: {problem}"
        ) from None


COLUMNS = ("rank", "host", "step", "samples/s", "memory", "data", "compute", "wait", "now")


def shares(status: diagnosis.Seen) -> tuple[float, float, float]:
    """Parts of this rank's time in data, in computing (evaluation as well) and in waiting."""
    times = dict(zip(slot.PHASES, status.times, strict=False))
    counted = ["data", "compute", "evaluate", "wait"]
    total = sum(times.get(name, 0.0) for name in counted)
    if total <= 0:
        return 0.0, 0.0, 0.0
    data, compute, evaluate, wait = (times.get(name, 0.0) / total for name in counted)
    return data, compute + evaluate, wait


def doing(status: diagnosis.Seen) -> str:
    """Returns what a rank does, in a few words."""
    if not status.alive:
        return "gone"
    if status.ended:
        return f"has ended ({status.code})"
    if status.state in ("T", "t"):
        return f"stopped, in {status.doing}"
    if not status.waits:
        return f"{status.phase}{f': {status.note}' if status.note else ''}"
    lacking = f", rank {status.missing} is missing" if status.missing else ""
    return f"waits {status.waited:.1f} s in {status.wait_text}{lacking}"


def rows(job: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of COLUMNS, per rank."""
    table = []
    for s in job["ranks"]:
        slow = job["slow"].get(s.rank)
        activity = doing(s) + (f"; {slow[0]:.1f}x the median, {slow[1]}" if slow else "")
        parts = (f"{100 * share:.0f} %" for share in shares(s))
        table.append(
            (
                str(s.rank),
                s.host,
                str(s.step),
                f"{s.rate:,.0f}",
                f"{s.rss / 2**20:,.0f} MB",
                *parts,
                activity,
            )
        )
    return table


def title(job: dict[str, Any]) -> str:
    rate = sum(s.rate for s in job["ranks"])
    step = max((s.step for s in job["ranks"]), default=0)
    run = f", {job['run']}, attempt {job['attempt']}" if job["run"] else ""
    leader = f"rank 0 is process {job['pid']} on {job['host']}"
    return f"{counted(job['world'])}, step {step}, {rate:,.0f} samples/s; {leader}{run}"


def plain(job: dict[str, Any]) -> str:
    table = [COLUMNS, *rows(job)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS) - 1)]
    form = "  ".join(f"{{:{'<' if i == 1 else '>'}{width}}}" for i, width in enumerate(widths))
    return "\n".join([title(job), *(f"{form.format(*row)}  {row[-1]}" for row in table)])
