"""How many threads a process starts with: affinity masks and CPU quotas."""

from __future__ import annotations

import os

import pytest

from odyssey.comm import cores

V2 = "30 23 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1 = "33 25 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "34 25 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
PODS = "33 25 0:29 /kubepods/pod7/c1 /sys/fs/cgroup/cpu ro,nosuid - cgroup cgroup rw,cpu"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        ("0::/", V2, {}, None),
        ("0::/", V2, {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b", V2, {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        # the group around it allows less
        ("0::/a/b", V2,
         {"sys/fs/cgroup/a/b/cpu.max": "300000 100000\n", "sys/fs/cgroup/a/cpu.max": "50000 20000"}, 2.5),
        # in a container without a namespace of its own the path is the host's
        ("0::/docker/1", V2, {"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/\n3:memory:/x", f"{MEMORY}\n{V1}",
         {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,cpuacct:/a", V1,
         {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "400000",
          "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 4.0),
        ("4:cpu:/kubepods/pod7/c1\n0::/", PODS,
         {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "20000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "10000"}, 2.0),
        ("0::/", V2, {"sys/fs/cgroup/cpu.max": "rubbish"}, None),
        ("0::/", V2, {"sys/fs/cgroup/cpu.max": "0 0"}, None),
    ],
)  # fmt: skip
def test_quotas(tmp_path, groups, mounts, files, quota):
    put(tmp_path, {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files})
    assert cores.cpu_quota(tmp_path) == quota


def put(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "limit"),
    [
        ("0::/a", None),
        ("0::/a/b", 1048576),
        ("0::/a/b/c", 1048576),  # of the group around it
        ("4:memory:/c/d\n3:cpu:/\n0::/a", 4096),
        ("junk\n9:memory", None),
    ],
)
def test_limits_of_memory(tmp_path, groups, limit):
    put(tmp_path, {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": f"{MEMORY}\n{V2}",
        "sys/fs/cgroup/a/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.max": "1048576\n",
        "sys/fs/cgroup/a/b/c/other": "",
        "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "4096",
        "sys/fs/cgroup/memory/c/d/other": "",
    })  # fmt: skip
    assert cores.memory_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("meminfo", "groups", "available"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    7 kB\n", "0::/a", 7168),
        ("MemAvailable:    7 kB\n", "0::/a/b", 4096),
        ("MemAvailable:\n", "0::/a/b", 4096),
        ("MemAvailable: many\n", "0::/a", 1 << 60),
        ("", "0::/a", 1 << 60),
    ],
)
def test_memory_that_is_available(tmp_path, meminfo, groups, available):
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": groups, "proc/self/mountinfo": V2}
    put(tmp_path, {**files, "sys/fs/cgroup/a/b/memory.max": "4096\n"})
    assert cores.available_memory(tmp_path) == available


@pytest.mark.parametrize(
    ("groups", "kills"),
    [("0::/a", 0), ("0::/a/b", 2), ("0::/a/b/c", 2), ("4:memory:/d\n0::/a/b", 3), ("0::/x", 0)],
)
def test_processes_that_were_ended_for_lack_of_memory(tmp_path, groups, kills):
    put(tmp_path, {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": f"{MEMORY}\n{V2}",
        "sys/fs/cgroup/a/memory.events": "low 0\nhigh 9\nmax 9\noom 9\noom_kill " "0\noom_group_kill " "9\n",
        "sys/fs/cgroup/a/b/memory.events": "low 0\nhigh 9\nmax 9\noom 9\noom_kill " "2\noom_group_kill " "9\n",
        "sys/fs/cgroup/a/b/c/other": "",
        "sys/fs/cgroup/memory/d/memory.oom_control": "oom_kill_disable 0\nunder_oom " "0\noom_kill " "3\n",
    })  # fmt: skip
    assert cores.oom_kills(tmp_path) == kills


def test_no_proc(tmp_path):
    assert (
        cores.cpu_quota(tmp_path) is None
        and cores.memory_limit(tmp_path) is None
        and cores.oom_kills(tmp_path) == 0
    )


@pytest.mark.parametrize(
    ("quota", "ranks", "threads"), [(None, 1, 6), (2.9, 1, 2), (0.3, 1, 1), (64, 2, 3), (4, 8, 1)]
)
def test_threads_are_what_mask_and_quota_pay_for(monkeypatch, quota, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.default_threads(ranks) == threads
