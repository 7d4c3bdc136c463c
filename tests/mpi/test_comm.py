"""The communicator under mpirun and without it; ranks that were not started alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odyssey import comm, nn, optim
from odyssey.comm import Communicator
from odyssey.errors import ConfigError

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_every_method(launch, ranks):
    done = launch.python(HERE / "communicate.py", ranks=ranks)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert done.stdout.count(f"rank {rank} of {ranks}: all as expected") == 1


def test_a_world_of_one_does_nothing_and_copies_what_is_moved():
    world = Communicator()
    a = np.arange(4, dtype=np.float32)
    assert world.broadcast(a) is a and world.all_reduce(a, "max", out=a) is a
    assert np.array_equal(world.all_gather(a), [[0, 1, 2, 3]])
    b = np.zeros(4, np.float32)
    world.all_to_all_v(a, [3], b, [3])
    assert np.array_equal(b, [0, 1, 2, 0])
    world.all_gather_v(a, [(0, 4)])
    world.barrier()
    with pytest.raises(ConfigError, match="'median'.*sum, mean, max, min"):
        world.all_reduce(a, "median")
    with pytest.raises(ConfigError, match="'tcp'.*auto, mpi, shm, local"):
        comm.world("tcp")


@pytest.mark.parametrize("ranks", [0, 1])
def test_one_process_imports_no_mpi(launch, ranks):
    code = (
        "import sys\nfrom odyssey import comm\nw = comm.world()\nprint(w.name, w.size, "
        "'mpi4py' in sys.modules)"
    )
    assert launch.python("-c", code, ranks=ranks).stdout == "local 1 False\n"


def test_mpi_of_one_process_if_asked_for(launch):
    code = "from odyssey import comm\nw = comm.world('mpi')\nprint(w.name, w.rank, w.size)"
    assert launch.python("-c", code).stdout == "mpi 0 1\n"


def test_a_launcher_that_mpi_knows_nothing_of(launch):
    """The mpirun of one MPI with the library of another: worlds of one, which would train apart;
    or MPICH aborts.
    """
    theirs = "PMI" if launch.open_mpi else "OMPI_COMM_WORLD"
    launch.environment |= {f"{theirs}_RANK": "0", f"{theirs}_SIZE": "2"}
    started, reason = "started 2 processes", "but each sees a world of one"
    if not launch.open_mpi:
        launch.environment |= {
            "PMIX_RANK": "0",
            "PMIX_NAMESPACE": "prterun-x@1",
            "PMIX_SERVER_URI41": "prterun-x@0.0",
        }
        started = "Open MPI's mpirun started 2 processes (OMPI_COMM_WORLD_RANK=0, "
        reason = "but the MPI library of mpi4py is MPICH"
    done = launch.train("--steps", 1)
    assert done.returncode == 64
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]  # mpi4py warns before
    assert started in line and reason in line


DIFFERENT = {
    "workers": "num_gpus",
    "shard": "shard_size",
    "reduction": "reduction",
    "seed": "seed",
    "rate": "optimizer",
    "schedule": "schedule",
    "batch": "batch size",
    "order": "data order",
    "length": "length",
}


def test_ranks_that_differ_are_refused_by_name(launch):
    """One training after the other in the same processes."""
    done = launch.python(HERE / "different.py", *DIFFERENT, ranks=3)
    assert done.returncode == 0, done.stderr
    for which, name in DIFFERENT.items():
        text = f"[train] the {name} of rank 1 differs from that of rank 0; start all ranks alike"
        for rank in range(3):
            assert done.stdout.count(f"{which}: rank {rank}: {text}") == 1, which
    assert done.stdout.count("rank 0: ") == len(DIFFERENT)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("which", "code", "line"),
    [
        (
            "activation",
            64,
            "[train] the model of rank 1 differs from that of rank 0 in op 3: tanh_forward (24) in "
            "layer 1 (Tanh); on rank 0 relu_forward (24) in layer 1 (ReLU); start all ranks alike",
        ),
        (
            "size",
            64,
            "[train] the model of rank 1 differs from that of rank 0 in parameter 1: 0.weight (7, "
            "8); on rank 0 0.weight (6, 8); start all ranks alike",
        ),
        (
            "data",
            65,
            "[data] sample 0 of the training set of rank 1 differs from that of rank 0: every "
            "rank must be given the "
            "whole set, the same; read the same files, and seed what is drawn alike on all ranks",
        ),
        (
            "scale",
            65,
            "[data] sample 0 of the training set of rank 1 differs from that of rank 0: ",
        ),
        (
            "augmented",
            65,
            "[data] sample 0 of the training data has other values when it is read again: it draws "
            "from __main__:Augmented.draw",
        ),
    ],
)
def test_ranks_that_would_train_apart_end_with_one_line(launch, which, code, line, ranks):
    done = launch.python(HERE / "unlike.py", which, ranks=ranks)
    assert (done.returncode, done.stdout) == (code, "")
    # Open MPI adds lines of its own
    ours = [text for text in done.stderr.splitlines() if text.startswith("odyssey: ")]
    assert len(ours) == 1 and ours[0].startswith(f"odyssey: error: {line}"), done.stderr
    assert "Traceback" not in done.stderr


def test_all_ranks_start_with_the_weights_of_the_first(launch):
    done = launch.python(HERE / "start_values.py", ranks=3)
    nn.manual_seed(0)
    wanted = optim.SGD(nn.Linear(4, 3).parameters()).arena.sha256()
    assert "".join(done.stdout.split()) == wanted * 3
