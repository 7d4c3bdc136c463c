"""Four hosts in one machine: the bed itself, and trainings over them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beds import netns, outside


def test_same_bits_on_four_hosts_and_alone(four_hosts, job):
    options = ["--steps", 8, "--backend", "mpi"]
    alone = job([sys.executable, outside.JOB, *options[:2]])
    tree = four_hosts.job(four_hosts.mpirun(1, [sys.executable, outside.JOB, *options]))
    assert [alone.wait(), tree.wait()] == [0, 0], tree.output
    assert [sha for _, sha, _ in tree.steps()] == [sha for _, sha, _ in alone.steps()]
    assert len(tree.steps()) == 8
    assert tree.weights == alone.weights
    assert tree.left() == []


def test_sums_first_within_hosts_then_between_them(four_hosts, job):
    """LeNet-5 by the command line; two ranks on each of three hosts count as a node without
    being told.
    """
    options = [
        "-m",
        "odyssey.train",
        "--steps",
        4,
        "--global-batch-size",
        192,
        "--no-eval",
        "--no-progress",
    ]
    alone = job([sys.executable, *options])
    command = [sys.executable, *options, "--reduction", "hierarchical"]
    spread = four_hosts.job(four_hosts.mpirun(2, command, hosts=["h1", "h2", "h4"]))
    assert [alone.wait(), spread.wait()] == [0, 0], spread.output
    assert alone.output.split()[-1] == spread.output.split()[-1]
    assert len(alone.output.split()[-1]) == 16


def test_hosts_with_different_numbers_of_ranks(four_hosts):
    """More ranks than cores on one host, fewer on the other: all still wait in the same way."""
    cores = len(os.sched_getaffinity(0))
    ranks = [f"h1:{cores + 1}", "h2:1"]
    command = [sys.executable, outside.JOB, "--steps", 4, "--backend", "mpi"]
    one = four_hosts.job(four_hosts.mpirun(1, command, hosts=ranks))
    assert one.wait() == 0
    assert len(one.steps()) == 4


def test_a_process_is_on_its_host(four_hosts):
    command = [sys.executable, outside.JOB, "--steps", 100000, "--step-ms", 20, "--backend", "mpi"]
    one = four_hosts.job(four_hosts.mpirun(1, command))
    one.wait_for_step(2)
    ranks = one.outside.ranks()
    assert set(ranks) == {0, 1, 2, 3}
    for k in range(1, 5):
        assert ranks[k - 1].pid in {p.pid for p in four_hosts.processes(k, one)}
    one.end()
    assert one.outside.processes() == []


LISTEN = """
import socket, sys
server = socket.create_server(("", 7000))
print("listens", flush=True)
while True:
    peer, _ = server.accept()
    data = bytearray(1 << 20)
    total = 0
    while n := peer.recv_into(data):
        total += n
    print("got", total, flush=True)
    peer.close()
"""
SEND = """
import socket, sys, time
start = time.monotonic()
with socket.create_connection((sys.argv[1], 7000), timeout=2) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
print("seconds", time.monotonic() - start)
"""


def test_the_network_can_be_cut_and_made_slow(four_hosts):
    server = four_hosts.job(["ssh", "h2", f"exec {sys.executable} -c '{LISTEN}'"])
    server.wait_for("listens")

    def send(size=1):
        one = four_hosts.job(["ssh", "h3", f"{sys.executable} -c '{SEND}' h2 {size}"])
        return one.wait(), one.output

    def asked_anew():
        """What h2 knows of h0 after having asked for its address."""
        say = (
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', "
            "('10.77.0.254', 9))"
        )
        for words in (
            ("ip", "neigh", "flush", "all"),
            (sys.executable, "-c", say),
            ("sleep", "0.5"),
            ("ip", "neigh"),
        ):
            done = subprocess.run(
                four_hosts.on(2, *words), capture_output=True, text=True, timeout=20
            )
        return next(line for line in done.stdout.splitlines() if line.startswith("10.77.0.254 "))

    assert send()[0] == 0
    four_hosts.partition(2)
    code, said = send()
    assert code and "timed out" in said
    assert "lladdr" not in asked_anew()  # nor does the switch's own host hear of it
    four_hosts.heal(2)
    assert send()[0] == 0
    four_hosts.limit(2, "50mbit")
    code, said = send(4_000_000)  # 32 Mbit
    assert code == 0 and 0.4 < float(said.split()[-1]) < 5, said
    server.end()


PING = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), timeout=5) as peer:
    start = time.monotonic()
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    print("seconds", time.monotonic() - start)
"""


def test_wires_have_a_rate_a_delay_and_loss(four_hosts):
    four_hosts.shape(50e6, round_trip=0.1, loss=0.01)
    server = four_hosts.job(["ssh", "h2", f"exec {sys.executable} -c '{LISTEN}'"])
    server.wait_for("listens")

    def seconds(program, *words):
        one = four_hosts.job(["ssh", "h3", f"{sys.executable} -c '{program}' h2 {' '.join(words)}"])
        assert one.wait() == 0, one.output
        return float(one.output.split()[-1])

    assert 0.1 <= seconds(PING)
    assert 0.64 + 0.1 <= seconds(SEND, "4000000")  # 32 Mbit, and a round trip
    counted = [
        four_hosts.on(3, "sh", "-c", f"nstat -az {name} | tail -1")
        for name in ("TcpRetransSegs", "TcpOutSegs")
    ]
    again, sent = (
        float(subprocess.run(c, capture_output=True, text=True, timeout=20).stdout.split()[1])
        for c in counted
    )
    assert 1 <= again < sent / 5
    four_hosts.restore()
    assert four_hosts._port(2) == "p2"


def test_same_bits_over_slow_wires_with_loss(four_hosts, job):
    options = ["--steps", 4, "--hidden", 4000]
    alone = job([sys.executable, outside.JOB, *options])
    four_hosts.shape(100e6, round_trip=0.005, loss=0.001)
    command = [sys.executable, outside.JOB, *options, "--backend", "mpi"]
    spread = four_hosts.job(four_hosts.mpirun(2, command, hosts=["h1", "h3"]))
    assert [alone.wait(), spread.wait(120)] == [0, 0], spread.output
    assert spread.weights == alone.weights


LATE = """
import time
import numpy as np
from odyssey import comm

world = comm.world("mpi")
time.sleep(2 if world.rank == 0 else 0)  # the others look for it, and ask whether it has ended
print(f"sum {world.all_reduce(np.ones(1000, np.float32))[0]}", flush=True)
"""


def test_a_rank_that_others_asked_about_ends(four_hosts):
    """The question waits there for seconds.

    With MPICH 5.0.2 a receive from any rank takes it, and never returns.
    """
    late = four_hosts.job(four_hosts.mpirun(1, [sys.executable, "-c", LATE], hosts=["h1", "h2"]))
    assert late.wait(30) == 0, late.output
    assert late.output.count("sum 2.0") == 2


def test_a_slow_link_is_named(four_hosts):
    """1 MB of gradients; a host that gets and sends 8 Mbit/s.

    Its rank computes as fast as the others.
    """
    four_hosts.limit(3, "8mbit")
    options = ["--steps", 1000, "--backend", "mpi", "--hidden", 8000, "--quiet"]
    one = four_hosts.job(four_hosts.mpirun(1, [sys.executable, outside.JOB, *options]))
    one.wait_for(
        r"rank 2 on h3 is slow: of late [\d.]+ MB took [\d.]+ s to rank [013], \d+x as long as "
        r"from others",
        90,
    )
    one.end()


def test_a_host_dies_without_a_word_and_comes_back(four_hosts):
    def switch():
        asked = four_hosts.on(0, "cat", "/sys/class/net/switch/address")
        return subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout

    before = switch()
    one = four_hosts.job(["ssh", "h3", "hostname; exec sleep 1000"])
    one.wait_for("^h3$")
    four_hosts.kill_host(3)
    time.sleep(0.5)
    assert one.popen.poll() is None  # the connection hangs, as a real one does
    assert [p.words for p in one.outside.processes() if "1000" in p.words] == []
    later = four_hosts.job(["ssh", "h3", "true"])
    assert later.wait() == 255 and "timed out" in later.output
    unknown = four_hosts.job(["ssh", "h9", "true"])
    assert unknown.wait() == 255 and "Could not resolve" in unknown.output
    four_hosts.start_host(3)
    again = four_hosts.job(
        [
            "ssh",
            "h3",
            f"hostname; {sys.executable} -c 'import socket; socket.create_server((\"\", 7001))'",
        ]
    )
    assert again.wait() == 0 and again.output == "h3"
    assert switch() == before and before.startswith("02:00:")  # or who knows h0 by it would lose it
    reached = four_hosts.job(["ssh", "-o", "BatchMode=yes", "root@h3", "exit 7"])
    assert reached.wait() == 7


def test_hosts_leave_nothing(tmp_path):
    if why := netns.why_not():
        pytest.skip(why)
    mounts = Path("/proc/self/mounts").read_text()
    with netns.Hosts(2, tmp_path) as hosts:
        one = hosts.job(["ssh", "h1", "touch /dev/shm/mpich_shm_a /tmp/ompi.b"])
        assert one.wait() == 0
        assert [Path(line).name for line in map(str, one.left())] == ["mpich_shm_a", "ompi.b"]
        token, shm = hosts.token, hosts.shm(0).parent
        assert outside.Outside(token).processes()
    assert outside.Outside(token).processes() == []
    assert not shm.exists()
    assert Path("/proc/self/mounts").read_text() == mounts
