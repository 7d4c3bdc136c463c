"""Run by test_device_links.py under a launcher: sums of ranks that are added on the pretended device.

device_links.py CASE ...

Gloo moves the bytes, in the place of NCCL. Each rank prints one line for each case.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from pytorch import pretend, pretend_streams

from odyssey.comm import Communicator
from odyssey.core import native
from odyssey.errors import CollectiveError
from odyssey.torch import DistributedTrainer, links, part_moves, rank_sums

TINY = 1e-3
rank_sums.PIECE_FLOATS = 100  # several pieces, the last one smaller


class GlooLinks(links.GroupLinks):
    """Links over Gloo, which moves the memory behind pretended tensors."""

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        pretend_streams.note_write(flat)
        return flat.raw


def connect(comm: Communicator, device: Any) -> links.Links:
    limit = datetime.timedelta(seconds=60)
    group = dist.ProcessGroupGloo(links.make_store(comm, limit), comm.rank, comm.size, limit)
    return GlooLinks(comm, group, device.torch_device)


def fail(comm: Communicator, device: Any) -> links.Links:
    comm.barrier()
    if comm.rank == comm.size - 1:
        raise RuntimeError("[test] the last rank has no such way")
    return None


class WrongLinks(GlooLinks):
    """Links that bring one wrong number to the last rank."""

    def all_gather(self, plan: Any, flat: torch.Tensor, ranges: Any) -> None:
        super().all_gather(plan, flat, ranges)
        if self._comm.rank == self._comm.size - 1:
            flat[5] += TINY


def connect_wrong(comm: Communicator, device: Any) -> links.Links:
    right = connect(comm, device)
    return WrongLinks(comm, right._group, device.torch_device)


class MessagePeers:
    """A PeerTransport that sends the memory at addresses of the pretended device as messages."""

    def __init__(self, comm: Communicator, stream: Any) -> None:
        self._comm = comm

    def route(self, sends: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self._comm.barrier()
        return sends

    def exchange(self, sends: Any, receives: Any, route: Any) -> None:
        assert [(q, size) for q, _, size in sends] == route
        works = [self._comm.send(_memory(at, size), q, 5, wait=False) for q, at, size in sends]
        works += [self._comm.recv(_memory(at, size), p, 5, wait=False) for p, at, size in receives]
        for work in works:
            work.wait()

    def mark(self) -> None:
        self.is_marked = True

    def is_complete(self) -> bool:
        return self.is_marked

    def abort(self) -> None:
        raise AssertionError("nothing fails")


def _memory(address: int, size: int) -> Any:
    assert address & pretend.ADDRESS_BIT
    return native.memory(address ^ pretend.ADDRESS_BIT, size)


def connect_peers(comm: Communicator, device: Any) -> links.Links:
    links.PeerTransport = MessagePeers
    return links.PeerLinks(comm, lambda: 0)


def make(**options: Any) -> DistributedTrainer:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 3)
    )
    net.to(pretend.NAME)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return DistributedTrainer(net, optimizer, clip_norm=0.5, seed=3, **options)


def batches(*samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 6, generator=draw), torch.arange(n) % 3) for n in samples]


def check_way(trainer: DistributedTrainer, is_direct: bool) -> None:
    if trainer.comm.size == 1:
        return
    trained = [p for p in trainer.shards._prepared.values() if p.gradients]
    assert trained
    for prepared in trained:
        assert isinstance(prepared.reduction, rank_sums.DeviceSums) == is_direct
    assert trainer.shards.traffic()[0] > 0


def train(is_direct: bool, **options: Any) -> str:
    trainer = make(**options)
    # nine shards, then one that most ranks have no part of, then five
    trainer.fit(batches(34, 3, 20), epochs=2, verbose=False)
    check_way(trainer, is_direct)
    return trainer.weights_sha256()


def direct() -> str:
    return train(True, shard_size=4)


def zero() -> str:
    return train(True, shard_size=4, zero=1)


def train_in_parts(stage: int) -> str:
    """Trains with ZeRO 2 or 3, whose parts may not go through the memory of the host."""
    trainer = make(shard_size=4, zero=stage)
    is_direct = trainer.comm.size > 1
    assert isinstance(trainer.shards.moves, part_moves.LinkedMoves) == is_direct
    trainer.fit(batches(34, 3, 20), epochs=2, verbose=False)
    # frozen parameters are in other buckets
    trainer.module[0].weight.requires_grad_(False)
    trainer.fit(batches(34), epochs=3, verbose=False)
    assert isinstance(trainer.shards.moves, part_moves.LinkedMoves) == is_direct
    return trainer.weights_sha256()


def zero2() -> str:
    return train_in_parts(2)


def zero3() -> str:
    return train_in_parts(3)


def peers_zero3() -> str:
    links.WAYS[pretend.NAME] = [("peers", connect_peers)]
    links._known_links.clear()
    return train_in_parts(3)


def streams_zero3() -> str:
    """ZeRO 3 on a device with streams, which finds operations that race."""
    pretend_streams.use(own_stream=False)
    result = train_in_parts(3)
    return result


def fp16() -> str:
    return train(True, shard_size=4, precision="fp16", scaler_init_scale=2.0**24)


def hierarchical() -> str:
    return train(False, shard_size=4, reduction="hierarchical")


def no_way() -> str:
    links.WAYS[pretend.NAME] = links.WAYS[pretend.NAME][:2]
    links._known_links.clear()
    return train(False, shard_size=4)


def peers() -> str:
    links.WAYS[pretend.NAME] = [("peers", connect_peers)]
    links._known_links.clear()
    return train(True, shard_size=4)


def frozen() -> str:
    """A parameter that is frozen and unfrozen, so buffers are made again."""
    trainer = make(shard_size=4)
    for requires_grad in (False, True):
        trainer.module[0].weight.requires_grad_(requires_grad)
        trainer.fit(batches(34), epochs=2, verbose=False)
    check_way(trainer, True)
    return trainer.weights_sha256()


def errors() -> str:
    """A rank that fails in its part of a step is named on all ranks, and the next step works."""
    trainer = make(shard_size=4)
    trainer.fit(batches(34), verbose=False)
    before = trainer.weights_sha256()
    module = trainer.module

    def fail_once(*_: Any) -> None:
        if trainer.comm.rank == trainer.comm.size - 1:
            raise ValueError("a forward pass that fails")

    handle = module.register_forward_pre_hook(fail_once)
    try:
        trainer.fit(batches(34), epochs=2, verbose=False)
    except (CollectiveError, ValueError) as error:
        assert "a forward pass that fails" in str(error)
    else:
        raise AssertionError("the step was taken")
    handle.remove()
    check_way(trainer, True)
    assert trainer.weights_sha256() == before
    return before


CASES = {
    case.__name__: case
    for case in (
        direct,
        zero,
        zero2,
        zero3,
        fp16,
        hierarchical,
        frozen,
        errors,
        no_way,
        peers,
        peers_zero3,
        streams_zero3,  # the last one, because streams stay
    )
}
links.WAYS[pretend.NAME] = [("nothing", fail), ("wrong", connect_wrong), ("Gloo", connect)]

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(name, CASES[name](), flush=True)
