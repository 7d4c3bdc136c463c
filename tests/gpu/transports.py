"""Run under mpirun by test_gpu_transport.py: short trainings whose sums between ranks take all
ways that there are.

Arguments: workers of each rank, then names of cases. Rank 0 prints a JSON object, case: what it
found; every rank asserts on its own. A case gives the hash of the weights, or None where the bits
need not be those of one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from odyssey import DistributedTrainer, comm, nn, optim
from odyssey.comm import device as devices
from odyssey.core.gpu_native import Gpu
from odyssey.engine.gpu import reduction
from odyssey.errors import CollectiveError

sys.path.append(str(Path(__file__).parents[1]))  # for `from gpu import peer`

CASES: dict[str, Callable[[], Any]] = {}
WORKERS = 1

X = np.random.default_rng(0).normal(size=(88, 1, 28, 28)).astype(np.float32)
Y = np.arange(88) % 10
# five shards, the last one partly filled; then one, which most ranks have no part of
BATCHES = [(X[:72], Y[:72]), (X[:72], Y[:72]), (X[72:], Y[72:])]


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


@contextlib.contextmanager
def asked(gpu_mpi: bool = True, piece: int = reduction.PIECE_FLOATS) -> Iterator[None]:
    """With ODYSSEY_GPU_MPI, and host-staged sums in pieces of so many floats."""
    before = reduction.PIECE_FLOATS
    os.environ[devices.GPU_MPI] = str(int(gpu_mpi))
    reduction.PIECE_FLOATS = piece
    try:
        yield
    finally:
        del os.environ[devices.GPU_MPI]
        reduction.PIECE_FLOATS = before


def make(backend: str, **settings: Any) -> DistributedTrainer:
    nn.manual_seed(3)
    return DistributedTrainer(
        nn.LeNet5(),
        optim.SGD(lr=0.05, momentum=0.9),
        num_gpus=WORKERS,
        comm=comm.world(backend),
        device="gpu",
        shard_size=16,
        threads=1,
        **settings,
    )


def train(
    backend: str, kind: type[reduction.GpuExchange] | None = None, **settings: Any
) -> tuple[str, DistributedTrainer]:
    """The weights after a training over this backend, whose sums went the way of `kind`."""
    trainer = make(backend, **settings)
    trainer.fit(BATCHES, epochs=1)
    found = trainer.evaluate([(X, Y)])
    seen = same(trainer)
    assert found.samples == len(X)
    if kind is not None:
        used = {
            type(r._exchange)
            for engine in (trainer.stepper.engine, trainer.stepper.evaluation_engine)
            for r in engine.runners
        }
        assert used == {kind}, used
        assert trainer.stepper.engine.bytes_sent > 0
    return seen, trainer


def same(trainer: DistributedTrainer) -> str:
    """The hash of the weights, which all ranks have."""
    seen = trainer.weights_sha256()
    everyone = trainer.comm.all_gather(np.frombuffer(bytes.fromhex(seen), np.uint8))
    assert (everyone == everyone[0]).all(), "the ranks differ"
    return seen


@case
def alone() -> str:
    return train("local")[0]


@case
def staged() -> dict[str, str]:
    """One piece and several, over MPI and shared memory, and every reduction with the bits of
    the tree.
    """
    found = {}
    for backend in ("mpi", "shm"):
        found[backend] = train(backend, reduction.StagedExchange)[0]
        for kind in ("tree", "hierarchical" if backend == "mpi" else "parameter_server"):
            with asked(False, 9000):
                found[f"{backend} {kind}"] = train(
                    backend, reduction.StagedExchange, reduction=kind
                )[0]
    return found


@case
def other_sums() -> None:
    """Reductions with bits of their own: all ranks have the same weights, near those of the
    tree.
    """
    _, plain = train("mpi")
    wanted = plain.state_dict()
    for backend, settings in (
        ("mpi", {"reduction": "mpi"}),
        ("shm", {"reduction": "ring"}),
        ("mpi", {"compression": "bf16"}),
        ("shm", {"compression": "topk", "compression_ratio": 0.5}),
    ):
        with asked(False, 9000):
            _, trainer = train(backend, reduction.StagedExchange, **settings)
        far = max(float(np.abs(a - wanted[k]).max()) for k, a in trainer.state_dict().items())
        assert far < (5e-2 if "compression" in settings else 1e-5), (settings, far)


@case
def nccl() -> dict[str, str]:
    found = {"direct": train("nccl", reduction.DirectExchange)[0]}
    with asked(False, 30_000):
        found["hierarchical"], trainer = train(
            "nccl", reduction.StagedExchange, reduction="hierarchical"
        )
    (said,) = trainer.stepper.engine.ownership.warnings
    assert (
        said
        == "reduction='hierarchical' goes through the host: only reduction='tree' goes from GPU "
        "to GPU"
    )
    return found


@case
def gpu_mpi() -> dict[str, str]:
    found = {}
    for backend in ("mpi", "shm"):
        with asked():
            found[backend], trainer = train(backend, reduction.DirectExchange)
        assert not trainer.stepper.engine.ownership.warnings
    return found


@case
def peers() -> dict[str, str]:
    """Ranks read each other's memory, on one GPU for all of them."""
    from gpu.peer import NativePeers

    def connect(group: comm.Communicator, gpus: Sequence[Gpu]) -> tuple[list[NativePeers], str]:
        return [NativePeers(group, gpu) for gpu in gpus], ""

    wanted = mock.patch.object(devices, "is_requested", lambda group: group.size > 1)
    with wanted, mock.patch.object(devices, "connect", connect):
        seen, trainer = train("auto", reduction.DirectExchange, oversubscribe=True)
    (links,) = reduction._links_by_group[trainer.stepper.engine.team].values()
    ready = links[0].numbers[: trainer.comm.size].tolist()
    assert ready == [links[0].exchanges] * trainer.comm.size
    assert links[0].exchanges > 0
    return {"ipc": seen}


@case
def wrong_bits() -> dict[str, str]:
    """MPI brings wrong bits to one rank: all ranks go through the host, and say so."""
    right = devices.MpiTransport.exchange

    def wrong(self, sends, receives):
        right(self, sends, receives)
        if len(receives) and comm.world("mpi").rank == 1:
            _, at, size = receives[-1]
            self._gpu.clear(at + size // 2, 1)

    devices.MpiTransport.exchange = wrong
    try:
        with asked():
            found, trainer = train("mpi", reduction.StagedExchange)
    finally:
        devices.MpiTransport.exchange = right
    (said,) = trainer.stepper.engine.ownership.warnings
    assert said.startswith("ODYSSEY_GPU_MPI=1, but the probe failed on rank 1"), said
    assert said.endswith(": gradients go through the host")
    assert ("1 of 64 bytes are wrong" in said) == (trainer.comm.rank == 1), said
    return {"staged": found}


@case
def ranks_without_shards() -> None:
    """A rank that has no part of a batch, not even of its first, takes the step of the others:
    also after an overflow, when all have left a step out.
    """
    trainer = make("mpi", precision="fp16", scaler_init_scale=2.0**40)
    before = same(trainer)
    trainer.fit(BATCHES[:1], epochs=1)
    assert trainer.scaler.value == 2.0**39 and same(trainer) == before
    trainer.scaler.value = 2.0**8
    trainer.fit(BATCHES[2:], epochs=2)
    assert same(trainer) != before
    assert make("mpi").evaluate([(X[:8], Y[:8])]).samples == 8


def stops_in_its_next_step(trainer: DistributedTrainer, first: Callable[[], Any]) -> None:
    """This rank compares what it trains on, and its settings, with the others, and comes no
    further.
    """

    def run(*_: Any) -> None:
        engine = trainer.stepper.engine
        engine.layout.comm.all_gather(np.array([engine._code], np.int64))  # as Engine._mark_step
        first()
        sys.stdout.flush()
        time.sleep(60)  # the others end it
        os._exit(76)

    trainer.stepper.engine.run = run


@case
def a_rank_is_gone() -> None:
    """NCCL of one rank ends in a step: the others say so, with exit code 76, and nobody waits
    for ever.
    """
    world = comm.world("nccl")
    _, trainer = train("nccl")
    (links,) = reduction._links_by_group[trainer.stepper.engine.team].values()
    if world.rank == world.size - 1:
        stops_in_its_next_step(trainer, links[0].abort)
    try:
        trainer.fit(BATCHES, epochs=2)
    except CollectiveError as error:
        print(f"rank {world.rank}: {error}", flush=True)
        raise
    raise AssertionError("the step went on")


@case
def a_rank_does_not_come() -> None:
    """A rank takes no step: the others name it at the deadline."""
    world = comm.world("nccl")
    _, trainer = train("nccl")
    if world.rank == world.size - 1:
        stops_in_its_next_step(trainer, lambda: None)
    else:
        # only now: a busy machine starts the ranks seconds apart
        os.environ["ODYSSEY_TIMEOUT"] = "2"
    begun = time.monotonic()
    try:
        trainer.fit(BATCHES, epochs=2)
    except CollectiveError as error:
        print(f"rank {world.rank} after {time.monotonic() - begun:.1f} s: {error}", flush=True)
        raise
    raise AssertionError("the step went on")


if __name__ == "__main__":
    WORKERS = int(sys.argv[1])
    results = {name: CASES[name]() for name in sys.argv[2:]}
    if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == 0:
        print(json.dumps(results), flush=True)
