"""Which backend a process gets: what launchers say, what "auto" makes of it, and what is
refused.
"""

from __future__ import annotations

import importlib.util

import pytest

from odyssey import comm
from odyssey.base import launcher
from odyssey.comm import mock
from odyssey.errors import ConfigError

HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS_PER_NODE": "2",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
    "LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, None),
        (HYDRA, ("PMI", 3, 8, 1, 4, True)),
        ({"PMI_RANK": "3", "PMI_SIZE": "8"}, ("PMI", 3, 8, 3, 8, True)),
        (OPEN_MPI, ("Open MPI", 1, 2, 0, 1, True)),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, ("MVAPICH", 0, 2, 0, 2, True)),
        ({"PMIX_RANK": "1", **SRUN}, ("PMIx", 1, 6, 0, 2, True)),
        (SRUN, ("srun", 2, 6, 0, 2, False)),
        ({**SRUN, **HYDRA}, ("PMI", 3, 8, 1, 4, True)),  # mpirun inside a job
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "2(x3)"}, ("srun", 2, 6, 0, 6, False)),
        ({"SLURM_NTASKS": "6"}, None),  # a shell of salloc
        ({"PMI_RANK": "one", "PMI_SIZE": "2"}, None),
        (TORCHRUN, None),
    ],
)
def test_what_launchers_say(environment, wanted):
    assert launcher.launched(environment) == wanted
    assert launcher.rank(environment) == (
        wanted[1] if wanted else 1 if environment is TORCHRUN else None
    )


def test_a_batch_script_is_no_rank():
    assert (
        launcher.launched({"SLURM_NTASKS": "6", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) is None
    )


def test_what_env_says():
    assert launcher.rendezvous(TORCHRUN) == ("env://", 1, 4, 0, 4, False)
    assert launcher.rendezvous({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}).local_size == 2
    for name in launcher.RENDEZVOUS:
        assert launcher.rendezvous({k: v for k, v in TORCHRUN.items() if k != name}) is None
    assert launcher.rank({"PMIX_RANK": "5"}) == 5  # without a size: enough to know who speaks


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, "local"),
        (HYDRA, "mpi"),
        (OPEN_MPI, "mpi"),
        (SRUN, "mpi"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, "local"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "local"),
        (TORCHRUN, "gloo"),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, "local"),
        ({**TORCHRUN, **HYDRA}, "mpi"),
        ({**HYDRA, "ODYSSEY_BACKEND": "nccl"}, "nccl"),
        ({**TORCHRUN, "ODYSSEY_BACKEND": "local"}, "local"),
    ],
)
def test_what_auto_stands_for(environment, wanted, monkeypatch):
    for name in launcher.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    backend, why = comm._pick()
    assert backend == wanted and why


def test_a_backend_that_is_asked_for_must_be_one(monkeypatch):
    monkeypatch.setenv("ODYSSEY_BACKEND", "auto")
    with pytest.raises(
        ConfigError, match="ODYSSEY_BACKEND=auto; choose from mpi, shm, local, nccl, gloo, or leave"
    ):
        comm._pick()


def test_a_world_is_one_object_and_says_why():
    world = comm.world()
    assert world is comm.world("auto") is comm.world(backend="auto")
    assert comm.world("local") is comm.world("local")
    assert world.why == "local: one process; no launcher"


def test_threads_of_a_mock_world_have_a_world_of_their_own():
    worlds = mock.run(3, lambda c: (c, comm.world(), comm.world("local").size))
    assert [(c is w, w.rank, w.size, alone) for c, w, alone in worlds] == [
        (True, r, 3, 1) for r in range(3)
    ]
    assert comm.world().size == 1
    with pytest.raises(ConfigError, match="mock world of 0 ranks"):
        mock.run(0, lambda c: None)


def test_srun_without_pmi_is_no_world_of_one(launch):
    """srun starts n processes; an MPI that does not understand it would train n times alone."""
    launch.environment |= {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    done = launch.train("--steps", 1)
    assert done.returncode == 64
    last = done.stderr.splitlines()[-1]
    assert (
        "started 2 processes but each sees a world of one: srun offers no PMI" in last
        and "--mpi=pmi2" in last
    )


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_gloo_without_torch_says_what_to_install():
    with pytest.raises(ConfigError, match=r"needs PyTorch .*pip install 'torch>=2\.4'"):
        comm.world("gloo")


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)
def test_gloo_without_its_variables_says_which(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(
        ConfigError, match="finds its processes by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    ):
        comm.world("gloo")


def test_training_on_threads_as_on_one():
    """DistributedTrainer over the mock backend: the same bits as alone, without MPI."""
    import numpy as np

    from odyssey import DistributedTrainer, nn, optim

    x, y = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32), np.arange(96) % 3

    def train(c):
        # parameters are numbered as a process makes them: one thread after the other
        for rank in range(c.size):
            if c.rank == rank:
                nn.manual_seed(3)
                model = nn.Linear(4, 3)
            c.barrier()
        trainer = DistributedTrainer(model, optim.SGD(lr=0.1), comm=c, device="cpu", threads=1)
        trainer.fit([(x, y)], epochs=2)
        return trainer.weights_sha256()

    assert mock.run(3, train) == [train(comm.world("local"))] * 3
