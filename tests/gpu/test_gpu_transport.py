"""Sums between ranks that train on GPUs, here emulated ones: the same bits over every transport,
and what goes wrong.

The trainings are in transports.py, the NCCL in nccl/nccl.c. ODYSSEY_EMULATOR_LATE lets streams run
late, so that a missing wait would show as other bits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gpu import emulated, emulated_nccl

from odyssey.engine.gpu import reduction
from odyssey.parallel import plan as planning

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    emulated.compiler() is None, reason="no C compiler for the emulated GPU"
)


@pytest.fixture
def gpus(launch):
    """Starts a program under mpirun with emulated GPUs and NCCL."""

    def run(*arguments: object, ranks: int, gpus: int = 4, without: str = "", **settings: object):
        launch.environment = emulated_nccl.environment(gpus, base=launch.environment, **settings)
        launch.environment.pop(without, None)
        return launch.python(*arguments, ranks=ranks, timeout=300)

    return run


@pytest.fixture
def trained(gpus):
    """{case: what rank 0 found} of transports.py."""

    def run(*names: str, ranks: int, workers: int = 1, **settings: object) -> dict:
        done = gpus(HERE / "transports.py", workers, *names, ranks=ranks, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def one(launch_once) -> str:
    """The weights that one process on one GPU comes to."""
    launch_once.environment = emulated.environment(base=launch_once.environment)
    done = launch_once.python(HERE / "transports.py", 1, "alone")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["alone"]


@pytest.mark.parametrize(
    ("ranks", "workers", "late", "cases"),
    [
        (1, 2, 1, "alone"),
        (2, 2, 1, "staged nccl gpu_mpi"),
        (3, 1, 2, "staged other_sums nccl gpu_mpi wrong_bits ranks_without_shards"),
        (4, 1, 1, "nccl gpu_mpi"),
    ],
)
def test_every_way_gives_the_bits_of_one_process(trained, one, ranks, workers, late, cases):
    found = trained(*cases.split(), ranks=ranks, workers=workers, gpus=ranks * workers, late=late)
    hashes = {
        f"{case} {way}": seen
        for case, ways in found.items()
        for way, seen in (ways if isinstance(ways, dict) else {"": ways}).items()
        if seen is not None
    }
    assert len(hashes) >= len(cases.split()) - 1
    assert set(hashes.values()) == {one}, hashes


def test_staged_sums_do_not_need_streams_that_run_at_once(trained, one):
    """Without LATE everything is done when it is enqueued: another order of events on the host."""
    found = trained("gpu_mpi", ranks=2, late=0)
    assert {*found["gpu_mpi"].values()} == {one}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_share_a_gpu_read_each_others_memory(trained, one, ranks, late):
    """By CUDA IPC (odyssey/comm/peer.py)."""
    found = trained("peers", ranks=ranks, gpus=1, late=late)
    assert found["peers"] == {"ipc": one}


@pytest.mark.parametrize("ranks", [2, 3])
def test_peers_exchange_messages_of_any_sizes(gpus, ranks):
    done = gpus(HERE / "peers_alone.py", "exchanges", ranks=ranks, gpus=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["exchanged"] * ranks


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ("ends", r"rank 2 has ended; the exchange between GPUs waits for it"),
        ("late", r"waited 2 s in exchange of 100 bytes: ranks? .*2 did not come"),
    ],
)
def test_a_peer_that_is_gone_or_late_is_reported(gpus, launch, last, text):
    launch.environment["ODYSSEY_TIMEOUT"] = "2"
    done = gpus(HERE / "peers_alone.py", last, ranks=3, gpus=1)
    assert done.returncode != 0
    found = re.findall(r"after ([\d.]+) s: (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    assert all(float(seconds) < 30 for seconds, _ in found)
    # the first rank to notice ends the exchange of the other one
    assert any(re.search(text, line) for _, line in found), found


def test_arrays_of_the_host_take_the_ordinary_way(gpus):
    """A world of backend nccl, and its groups, are of shm or mpi by another name; these have the
    contract's tests.
    """
    code = """
import numpy as np
from odyssey import comm
world = comm.world("nccl")
assert world is comm.world("nccl") is not comm.world("shm")
half = world.split(0)
assert {c.name for c in (world, half)} == {"nccl"} and type(world) is type(half) is type(comm.world("shm"))
assert world.all_reduce(np.ones(3)).tolist() == half.all_reduce(np.ones(3)).tolist() == [2.0] * 3
half.close()
world.close()
world.barrier()
"""
    done = gpus("-c", code, ranks=2)
    assert done.returncode == 0, done.stderr


def test_a_group_of_one_calls_everything(gpus):
    done = gpus(HERE / "nccl_alone.py", ranks=0, gpus=1, late=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"version": "2.21.5"}


def test_a_rank_that_is_gone_ends_the_others(gpus):
    done = gpus(HERE / "transports.py", 1, "a_rank_is_gone", ranks=3)
    assert done.returncode == 76, done.stdout + done.stderr
    line = (
        "[comm] a rank has ended, or cannot be reached: NCCL says remote process exited or "
        "there was a network error"
    )
    assert re.search(f"rank [01]: {re.escape(line)}", done.stdout)  # the first to see it ends all


def test_a_rank_that_does_not_come_is_named(gpus):
    done = gpus(HERE / "transports.py", 1, "a_rank_does_not_come", ranks=2)
    assert done.returncode == 76, done.stdout + done.stderr
    seconds, text = re.search(r"rank 0 after ([\d.]+) s: (.*)", done.stdout).groups()
    assert 2 <= float(seconds) < 30  # how exactly a deadline is kept: tests/comm/test_ends.py
    assert text.startswith(
        "[comm] waited 2 s in exchange of 61792 float32 on GPUs: rank 1 did not come"
    )


WORLD = "from odyssey import comm\nprint(comm.world('nccl').why)"


@pytest.mark.parametrize(
    ("ranks", "settings", "code", "text"),
    [
        (2, {}, 0, "nccl: 2 ranks, NCCL 2.21.5"),
        (
            3,
            {"gpus": 2},
            64,
            "[comm] backend nccl: ranks 0 and 2 share GPU 0 of one machine, which NCCL does not "
            "allow; start at most one rank per GPU, or use backend mpi",
        ),
        (
            2,
            {"gpus": 0},
            69,
            "[comm] backend nccl: no GPU on this machine that can be used; use backend mpi",
        ),
        (
            2,
            {"version": 21000},
            64,
            "is NCCL 2.10.0, and 2.13.0 is the oldest that will do; pip install -U "
            "nvidia-nccl-cu12",
        ),
        (
            2,
            {"without": emulated_nccl.LIBRARY},
            64,
            "[comm] backend nccl finds no NCCL (libnccl.so.2: ",
        ),
    ],
)
def test_what_nccl_needs_is_said_in_one_line(gpus, ranks, settings, code, text):
    done = gpus("-c", WORLD, ranks=ranks, **settings)
    assert done.returncode == code, done.stdout + done.stderr
    said = (done.stderr if code else done.stdout).strip().splitlines()
    assert all(text in line for line in said), said
    assert len(said) == (1 if code else ranks)


def test_one_rank_needs_no_nccl():
    from odyssey import comm
    from odyssey.errors import ConfigError

    with pytest.raises(
        ConfigError,
        match="backend nccl connects several ranks, and this one is alone; use backend local",
    ):
        comm.world("nccl")


def test_versions_that_differ_are_refused(gpus):
    code = (
        "import os\nfrom odyssey import comm\nmpi = comm.world('mpi')\n"
        "os.environ['ODYSSEY_EMULATED_NCCL_VERSION'] = str(22105 + 100 * mpi.rank)\n" + WORLD
    )
    done = gpus("-c", code, ranks=2)
    assert done.returncode == 64
    assert (
        "[comm] backend nccl: rank 1 has NCCL 2.22.5, rank 0 2.21.5; install the same on all "
        "machines" in done.stderr
    )


def test_gpu_mpi_is_asked_for_by_1():
    from odyssey.comm import device
    from odyssey.errors import ConfigError

    for text, wanted in (("", False), ("0", False), ("auto", False), ("1", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(device.GPU_MPI, text)
            assert device.gpu_mpi() is wanted
            patch.setenv(device.GPU_MPI, "yes")
            with pytest.raises(ConfigError, match="ODYSSEY_GPU_MPI=yes; it must be 1"):
                device.gpu_mpi()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8, 16, 21])
def test_one_launch_adds_along_the_tree_where_the_nodes_allow(shards, ranks):
    """`tree_adds` are the additions of a tree over buffers side by side, which may be those of
    the plan.
    """
    plan = planning.exchange(shards, ranks, 1, 1000)
    nodes = [node for own in plan.nodes for node in own]
    adds = [(a.a, a.b) for a in plan.adds]
    assert len(reduction.tree_adds(len(nodes))) == len(adds) == len(nodes) - 1
    if shards % ranks == 0 and ranks & (ranks - 1) == 0 and shards & (shards - 1) == 0:
        assert adds == reduction.tree_adds(len(nodes))
    sums = {i: {i} for i in range(len(nodes))}
    for a, b in reduction.tree_adds(len(nodes)):
        assert a < b
        sums[a] |= sums.pop(b)
    assert sums == {0: set(range(len(nodes)))}


def test_where_a_part_has_its_floats():
    part = reduction.GpuRange(1 << 20, 32, (0, 2, 3), 64, 96)
    assert part.address_of(0, 64) == 1 << 20
    assert part.address_of(1, 70) == (1 << 20) + 4 * (64 + 6)
    assert part.address_of(2, 95) == (1 << 20) + 4 * (96 + 31)
