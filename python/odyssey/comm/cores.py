"""Cores and memory that this process may use, by its affinity mask and its control groups'
limits (v1 and v2).

It imports nothing that takes time: the wrapper of a rank (launch/rank_wrapper.py) uses it at each
start.
"""

import os

MASK_BITS = 1024  # the number of cores that `core_mask` distinguishes

# limit, events
_MEMORY = {1: ("memory.limit_in_bytes", "memory.oom_control"), 2: ("memory.max", "memory.events")}


def cores() -> int:
    """Cores this process may use at a time, 1 or more: its affinity mask has so many and its
    quota pays for them. A quota of 1.5 cores counts as one: two threads would stop each other
    for a part of every period.
    """
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return mask if quota is None else max(1, min(mask, int(quota)))


def core_mask() -> int:
    """Returns the cores of this process as bits; 0 if they are not known."""
    indices = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 0)
    )
    return sum(1 << core for core in indices) if max(indices, default=0) < MASK_BITS else 0


def default_threads(ranks: int) -> int:
    """Threads of a process that shares its cores with so many ranks of this machine, itself
    among them.
    """
    return max(1, cores() // ranks)


def cpu_quota(root: str | os.PathLike[str] = "/") -> float | None:
    """CPU seconds per second that the control groups of this process allow, None without a limit.

    Docker's --cpus, Kubernetes' limits.cpu and systemd's CPUQuota= set one. Every group on the way
    to the root counts. root: where proc and sys are.
    """
    shares = []
    for folder, version in _groups("cpu", root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in _read(folder, name).split()]
        if len(words) == 2 and all(
            word.isascii() and word.isdigit() and int(word) for word in words
        ):
            # else no limit: "max", -1, or no such controller
            shares.append(int(words[0]) / int(words[1]))
    return min(shares, default=None)


def memory_limit(root: str | os.PathLike[str] = "/") -> int | None:
    """The smallest memory limit of the control groups of this process in bytes; None: no limit."""
    texts = [
        _read(folder, _MEMORY[version][0]).strip() for folder, version in _groups("memory", root)
    ]
    return min(
        (int(t) for t in texts if t.isascii() and t.isdigit() and int(t) < 1 << 60), default=None
    )


def available_memory(root: str | os.PathLike[str] = "/") -> int:
    """Returns the bytes of memory that this process can still get, within the limits of its
    control groups; a very large number if the machine doesn't say.
    """
    free = 1 << 60
    for line in _read(root, "proc/meminfo").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "MemAvailable:" and words[1].isdigit():
            free = int(words[1]) * 1024
    return min(free, memory_limit(root) or free)


def oom_kills(root: str | os.PathLike[str] = "/") -> int:
    """How many processes of this one's memory group the kernel has ended for lack of memory."""
    texts = [_read(folder, _MEMORY[version][1]) for folder, version in _groups("memory", root)]
    # names, each with its number; the group's own come first
    words = next(filter(None, texts), "").split()
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _read(folder: str | os.PathLike[str], name: str) -> str:
    """The text of a file; "" where it cannot be read."""
    try:
        with open(os.path.join(folder, name), errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _groups(controller: str, root: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """Folders of a controller's groups that this process is in and of those around them, and
    their files' version.
    """
    # paths by version
    paths = {}
    folders = []
    for line in _read(root, "proc/self/cgroup").splitlines():  # number:controllers:path, proc(5)
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    # ... root mount-point ... - type source options
    for line in _read(root, "proc/self/mountinfo").splitlines():
        mount_text, _, filesystem_text = line.partition(" - ")
        fields = mount_text.split()
        (kind, _, options) = filesystem_text.split(maxsplit=2)
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version not in paths or (version == 1 and controller not in options.split(",")):
            continue
        mount = os.path.join(root, fields[4].lstrip("/"))
        # of the part of the hierarchy that is mounted
        inside = os.path.relpath(paths[version], fields[3])
        # in a container the path may be the host's, which is not there: then the mount is the own
        # group
        path_exists = not inside.startswith("..") and os.path.isdir(os.path.join(mount, inside))
        names = inside.split(os.sep) if path_exists and inside != os.curdir else []
        folders += [(os.path.join(mount, *names[:n]), version) for n in range(len(names), -1, -1)]
    return folders
