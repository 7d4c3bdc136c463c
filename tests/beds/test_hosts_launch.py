"""Runs of `odyssey launch` over four hosts that die, are cut off, are asked to stop, or are not
there.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beds import faults, outside

HOSTS = ["--hosts", "h1:1,h2:1,h3:1,h4:1"]
SLOW = pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)


@pytest.fixture
def clean(job):
    """What an undisturbed run of so many steps gives."""

    def weights(steps):
        one = job([sys.executable, outside.JOB, "--steps", steps, "--quiet"])
        assert one.wait() == 0
        return one.weights

    return weights


def start(four_hosts, run, steps=40, settings=(), what=None, ms=100):
    options = ["--steps", steps, "--step-ms", ms, "--checkpoint-every", 5]
    return four_hosts.job(
        outside.launch_command(4, run, *options, settings=[*HOSTS, *settings]), faults=what
    )


def attempts(one):
    """Which attempt wrote which lines of steps: the numbers of steps, one list for each time
    that they began anew.
    """
    runs = [[]]
    for step, _, _ in one.steps():
        if runs[-1] and step <= runs[-1][-1]:
            runs.append([])
        runs[-1].append(step)
    return runs


def lost(one, four_hosts, tmp_path, act, clean):
    run = tmp_path / "run"
    one.wait_for_step(12)
    began = time.monotonic()
    act(3)
    one.wait_for(r"restarting from step \d+ on 3 ranks without h3")
    # detected within 10 s, asked whether it is there within another 10 s
    assert time.monotonic() - began < 25
    noticed = [
        at for at, line in one.lines if re.search("no sign of life from h3|h3 was cut off", line)
    ]
    assert noticed and noticed[0] - began < 10
    assert one.wait(90) == 0, one.output
    assert one.weights == clean(40)
    first, second = attempts(one)
    assert second[0] <= first[-1] + 1 and second == list(range(second[0], 41))
    assert json.loads((run / "DONE.json").read_text())["weights_sha256"] == one.weights
    assert json.loads((run / "attempt.json").read_text())["attempt"] == 2, one.output
    return one


def test_a_host_that_is_cut_off_neither_writes_nor_lives_on(four_hosts, tmp_path, clean):
    one = start(four_hosts, tmp_path / "run", settings=["--elastic", "2:4"])
    lost(one, four_hosts, tmp_path, four_hosts.partition, clean)
    assert [p for p in four_hosts.processes(3, one) if p.role in ("rank", "watcher")] == []
    four_hosts.heal(3)
    left = [line for line in one.left(10) if line.startswith("process")]
    # its daemon there has lost the others, and nothing to say that would tell it so
    if outside.open_mpi():
        assert {p.role for p in one.outside.processes()} <= {"proxy", "other"}
    else:
        assert left == []
    manifests = sorted((tmp_path / "run" / "checkpoints").glob("step_*/manifest.json"))
    assert manifests
    assert {json.loads(path.read_text()).get("attempt", 2) for path in manifests} == {2}


@SLOW
def test_a_host_that_dies(four_hosts, tmp_path, clean):
    one = start(four_hosts, tmp_path / "run", settings=["--elastic", "2:4"])
    lost(one, four_hosts, tmp_path, four_hosts.kill_host, clean)
    assert [line for line in one.left(10) if "/h3/" not in line] == []


@SLOW
def test_a_request_to_stop_reaches_all_hosts(four_hosts, tmp_path, clean):
    run = tmp_path / "run"
    one = start(four_hosts, run, steps=20, settings=["--grace", "10"])
    one.wait_for_step(7)
    began = time.monotonic()
    one.outside.signal(15, role="launcher")
    assert one.wait(20) == 75, one.output
    assert time.monotonic() - began < 10
    assert one.left() == []
    stopped = one.steps()[-1][0]
    assert f"stopped by SIGTERM at step {stopped}" in one.output
    three = start(four_hosts, run, steps=20, settings=["--grace", "10"])
    assert three.wait() == 0, three.output
    assert three.steps()[0][0] == stopped + 1
    assert three.weights == clean(20)
    assert three.left() == []


@SLOW
def test_a_rank_is_killed_on_its_host(four_hosts, tmp_path, clean):
    one = start(four_hosts, tmp_path / "run", steps=20, what=faults.kill(rank=2, at_step=8), ms=20)
    assert one.wait(60) == 0, one.output
    assert re.search(
        r"rank 2 on host h3 was killed by SIGKILL.*; restarting from step 5 on 4 ranks", one.output
    )
    assert one.weights == clean(20)
    assert one.left() == []


@SLOW
@pytest.mark.parametrize("host", ["h9", "h3"])
def test_a_host_that_is_not_there_is_named_in_time(four_hosts, tmp_path, host):
    if host == "h3":
        four_hosts.kill_host(3)
    words = outside.launch_command(
        2, tmp_path / "run", "--steps", 5, settings=["--hosts", f"h1:1,{host}:1"]
    )
    one = four_hosts.job(words)
    began = time.monotonic()
    one.wait_for(f"attempt 1: host .*{host}.* does not answer")
    assert time.monotonic() - began < 15
    if host == "h9":  # nothing was ever started there
        assert one.wait(20) == 69
        assert [line for line in one.left() if line.startswith("process")] == []


PAGE = Path(__file__).resolve().parents[2] / "docs" / "clusters.md"


@pytest.fixture(params=[None, "50000-50999"])
def ports(request, four_hosts, tmp_path):
    """The firewall of docs/clusters.md, on h1 and h2, also with fewer ports: the first and the
    last.
    """
    if shutil.which("nft") is None:
        pytest.skip("needs nft (package nftables)")

    def on(*words, ok=True):
        said = []
        for host in (1, 2):
            done = subprocess.run(
                four_hosts.on(host, *words), capture_output=True, text=True, timeout=30
            )
            if "Operation not supported" in done.stderr:
                pytest.skip("this kernel has no nftables")
            assert done.returncode == 0 or not ok, done.stderr
            said.append(done.stdout)
        return said

    (rules,) = re.findall(r"^```nft\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (written,) = re.findall(r"dport (\d+-\d+)", rules)
    if request.param:
        assert (
            f'sysctl -w net.ipv4.ip_local_port_range="{request.param.replace("-", " ")}"'
            in PAGE.read_text()
        )
    used = request.param or written
    file = tmp_path / "odyssey.nft"
    file.write_text(
        rules.replace("10.0.0.11", "10.77.0.1")
        .replace("10.0.0.12", "10.77.0.2")
        .replace(written, used)
    )
    picked = "/proc/sys/net/ipv4/ip_local_port_range"
    assert on("cat", picked) == [f"{written.replace('-', chr(9))}\n"] * 2
    on("sh", "-c", f"echo {used.replace('-', ' ')} > {picked}")
    try:
        on("nft", "-f", file)
        yield tuple(map(int, used.split("-")))
    finally:
        on("nft", "delete", "table", "inet", "odyssey", ok=False)
        on("sh", "-c", f"echo {written.replace('-', ' ')} > {picked}")


def test_the_page_of_two_plain_machines_behind_its_firewall(four_hosts, ports, tmp_path, launch):
    def reached(source, port):
        """Whether one who listens on a port of h2 hears from a host."""
        code = (
            f"import socket; s = socket.create_server(('', {port})); s.settimeout(3); "
            "print('on', flush=True); "
        )
        code += "s.accept()"
        listens = four_hosts.job([sys.executable, "-c", code], host=2)
        listens.wait_for("^on$")
        code = f"import socket; socket.create_connection(('h2', {port}), 2)"
        asks = four_hosts.job([sys.executable, "-c", code], host=source)
        return asks.wait() == 0, listens.wait() == 0

    first, last = ports
    for source, port, open_ in (
        (1, 22, True),
        (1, last, True),
        (1, last + 1, False),
        (1, 8080, False),
        (3, first, False),
    ):
        assert reached(source, port) == (open_, open_), (source, port)

    (block,) = re.findall(r"^(printf .*?)^```$", PAGE.read_text(), re.M | re.S)
    assert " -n 8 " in block and block.count("slots=4") == 2 and "--epochs 8" in block
    said = block.replace("vm", "h").replace(" -n 8 ", " -n 4 ").replace("slots=4", "slots=2")
    train = ["--steps", "20", "--no-eval", "--no-progress"]
    said = said.replace("--epochs 8", shlex.join(train)).replace("/shared/", f"{tmp_path}/")
    one = four_hosts.job(["sh", "-ec", said], host=1)
    assert one.wait(120) == 0, one.output
    alone = launch.train(*train)
    assert (
        re.search("weights [0-9a-f]{16}", one.output)[0]
        == re.search("weights [0-9a-f]{16}", alone.stdout)[0]
    )
    assert "on 4 ranks" in one.output
    assert "watched" not in one.output and one.left() == []
