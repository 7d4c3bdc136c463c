"""Cores that this process may use, by its affinity mask and the CPU quota of its control groups (v1 and v2), and
memory, by their limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def cores() -> int:
    """Cores this process may use at a time, 1 or more: its affinity mask has so many and its quota pays for them.

    A quota of 1.5 cores counts as one: two threads would stop each other for a part of every period.
    """
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return mask if quota is None else max(1, min(mask, int(quota)))


def default_threads(ranks: int) -> int:
    """Threads of a process that shares its cores with so many ranks of this machine, itself among them."""
    return max(1, cores() // ranks)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU seconds per second that the control groups of this process allow, None without a limit.

    Docker's --cpus, Kubernetes' limits.cpu and systemd's CPUQuota= set one. Every group on the way to the root counts.

    root: where proc and sys are.
    """
    least: float | None = None
    for folder, version in _groups("cpu", root):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                share = int(quota) / int(period)
                least = share if least is None else min(least, share)
        except (OSError, ValueError):
            continue  # the root has no limit, nor a group without the controller
    return least


def memory_limit(root: Path = Path("/")) -> int | None:
    """The smallest memory limit of the control groups of this process in bytes; None: no limit."""
    found = []
    for folder, version in _groups("memory", root):
        with contextlib.suppress(OSError):
            text = (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text().strip()
            found += [int(text)] if text.isascii() and text.isdigit() and int(text) < 1 << 60 else []
    return min(found, default=None)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of a controller's groups that this process is in and of those around them, and their files' version."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {}  # by version
    for line in memberships:  # number:controllers:path, proc(5)
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    for line in mounts:  # ... root mount-point options [more] - type source options
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version not in paths or (version == 1 and controller not in options.split(",")):
            continue
        mount = root / fields[4].lstrip("/")
        inside = os.path.relpath(paths[version], fields[3])  # of the part of the hierarchy that is mounted
        # in a container the path may be the host's, which is not there: then the mount is the own group
        here = mount if inside.startswith("..") or not (mount / inside).is_dir() else mount / inside
        while True:
            yield here, version
            if here == mount:
                break
            here = here.parent
