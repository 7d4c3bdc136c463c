"""ZeRO 2 and 3 of a torch module (Rajbhandari et al. 2020): gradients, and parameters, that
ranks have in parts.

A rank owns a run of the parameters, whole ones, as torch's optimizers go by parameter. Buckets are
runs of parameters of one owner. With stage 3 an operation that reads a parameter, in whatever
module, forward or backward, has its bucket sent by the owner first (a dispatch mode sees every
operation); the last SLOTS buckets stay.

The shards of a step are taken in rounds, one by each rank: they follow each other in the tree of
parallel/plan.py, so what is added after a round are sums of few nodes, not one of each rank. As
soon as all ranks' backward passes have a bucket it is sent, each rank adding its range of it (and
goes on meanwhile); after the last round owners get the mean.

No rank knows what the others' shards do next: their branches may differ. So they meet: each says
which bucket it needs, which it has gradients of, or that it is done, and all do what is said there,
until all are done.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..comm import Communicator
from ..core import fingerprint, native
from ..errors import ConfigError
from ..parallel import StepOutcome
from ..parallel import plan as planning
from .arena import ModuleArena
from .memory import ALIGN
from .shards import SUMS, Shards

SLOTS = 2  # buckets of parameters of other ranks that are there at a time
MAX_BUCKET_FLOATS = 25 << 18  # 25 MiB; at most a 32nd of the model, as for our own models
# said instead of a bucket that is needed
DONE = -1
READY = -2
#: Operations of eval mode inside of which autocast rounds: it is off where a dispatch mode calls
#: them.
FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
Nodes = list[tuple[int, np.ndarray]]  # sums of (number of shards), those of the most first


class Bucket:
    """Parameters `run` of the arena, of which `owner` keeps the values. cut: the range of its
    floats that each rank adds; nodes: sums of this rank's. waits: trained parameters that the
    backward pass under way has not reached.
    """

    def __init__(self, arena: ModuleArena, run: range, owner: int, ranks: int) -> None:
        self.run = run
        self.owner = owner
        self.at = arena.at[run.start]
        self.floats = arena.end(run.stop) - self.at
        self.cut = planning.ranges(self.floats, ranks)
        tensors = [(arena.at[i] - self.at, arena.named[i][1]) for i in run]
        self._places = [(offset, offset + p.numel(), p.shape, p.stride()) for offset, p in tensors]
        self.nodes: Nodes = []
        self.grads: torch.Tensor | None = None
        self.waits: set[int] = set()

    def places(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in `flat`."""
        return [flat[a:b].as_strided(shape, stride) for a, b, shape, stride in self._places]

    def keep(self, params: np.ndarray, is_owner: bool) -> None:
        """Takes the values, if `is_owner`; else has places for them, without memory."""
        self.flat = torch.from_numpy(params[self.at : self.at + self.floats]).clone()
        self.views = self.places(self.flat)
        if not is_owner:
            self.free()

    def free(self) -> None:
        """Gives the memory of the parameters back."""
        try:
            self.flat.untyped_storage().resize_(0)
        except RuntimeError as problem:
            raise ConfigError(
                "[torch] forward() makes NumPy arrays of parameters, whose memory zero=3 gives "
                "back; use zero=2, or "
                "torch's operations"
            ) from problem

    def gradient(self, i: int) -> torch.Tensor:
        """The place of parameter i in the gradients of the shard that is being run."""
        if self.grads is None:
            self.grads = torch.zeros(self.floats)
        start, end, shape, stride = self._places[i - self.run.start]
        return self.grads[start:end].as_strided(shape, stride)


def add(nodes: Nodes, leaf: np.ndarray) -> None:
    """Adds the next shard to the sums of those before it, along the tree; its memory is used."""
    size = 1
    while nodes and nodes[-1][0] == size:
        np.add(nodes.pop()[1], leaf, out=leaf)
        size *= 2
    nodes.append((size, leaf))


def folded(nodes: Nodes) -> np.ndarray:
    """The sum over all shards, which is the end of the tree."""
    total = nodes[-1][1]
    for _, node in reversed(nodes[:-1]):
        np.add(node, total, out=total)
    return total


class _OnUse(TorchDispatchMode):
    """Has the parameters of each operation there before it runs."""

    def __init__(self, spread: Spread) -> None:
        super().__init__()
        self.spread = spread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.spread.need([*args, *kwargs.values()])
        if self.spread.autocast and func.__name__.partition(".")[0] in FUSED:
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCPU, False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class Spread(Shards):
    """Shards of a module whose gradients (zero=2), and parameters (zero=3), the ranks have in
    parts.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Communicator,
        *arguments: Any,
        zero: int,
        autocast: bool,
        **held: Any,
    ) -> None:
        self.autocast = autocast  # forward() runs in it
        # together: all parameters are there
        self.zero = zero
        self._together = False
        # buckets that are there on all that asked, the one used last behind
        self._live: list[int] = []
        self._under_way: tuple[Any, Bucket, np.ndarray, np.ndarray] | None = None
        self._rounds = self._round = self._count = 0
        super().__init__(module, comm, *arguments, **held)
        if zero == 3:
            self._check_aliases()
            for part in module.modules():
                part.register_state_dict_pre_hook(lambda *_: self._refuse("state_dict()"))
                part._register_load_state_dict_pre_hook(
                    lambda *_: self._refuse("load_state_dict()")
                )

    def _check_aliases(self) -> None:
        """Raises ConfigError: a buffer shares memory with a parameter, whose memory comes and
        goes.
        """
        buffers = {id(b) for _, b in self.arena.buffers}
        for alias in self.arena.aliases:
            if id(alias.tensor) in buffers:
                raise ConfigError(
                    f"[torch] the buffer {alias.name} shares memory with a parameter, which "
                    "zero=3 has in parts; use "
                    "zero=2, or compute the buffer in forward()"
                )

    def _lay_out(self) -> None:
        arena = self.arena
        ranks = self.comm.size
        runs = arena.shares(0, arena.trained, ranks)
        arena.hold(runs[self.comm.rank])
        self.gradient = torch.from_numpy(arena.grads)
        norms = arena.norms
        self._places = np.cumsum(
            [0, norms.floats, norms.floats, SUMS, arena.trained, len(norms.counters)]
        ).tolist()
        self._tails = list[tuple[int, np.ndarray]]()
        self._tail = torch.zeros(self._places[-1])
        max_floats = max(ALIGN, min(MAX_BUCKET_FLOATS, arena.extent // 32))
        # trained, by owner
        self.owned = [self._cut(run, owner, max_floats) for owner, run in enumerate(runs)]
        frozen = arena.shares(arena.trained, len(arena.named), ranks)
        self.summed = [b for buckets in self.owned for b in buckets]
        self.buckets = self.summed + [
            b for owner, run in enumerate(frozen) for b in self._cut(run, owner, max_floats)
        ]
        self._number = {i: n for n, b in enumerate(self.buckets) for i in b.run}
        self._votes = np.zeros(1 + len(self.summed), np.int32)
        self._sums_sent: set[int] = set()

    def _cut(self, run: range, owner: int, max_floats: int) -> list[Bucket]:
        """An owner's parameters as buckets of at most so many floats, or of one parameter."""
        arena = self.arena
        starts = list(run[:1])
        for i in run[1:]:
            if arena.end(i + 1) - arena.at[starts[-1]] > max_floats:
                starts.append(i)
        return [
            Bucket(arena, range(a, b), owner, self.comm.size)
            for a, b in itertools.pairwise([*starts, run.stop])
        ]

    # --- where parameters are, with stage 3 ---

    def agree(self, description: dict[str, Any]) -> None:
        super().agree(description)
        self._part()

    def arrange(self, trained: Collection[str]) -> None:
        if self.zero == 3 and not self._together:
            self._gather()
        super().arrange(trained)
        self._part()

    def _part(self) -> None:
        """Each rank keeps the parameters that it owns, and no others."""
        if self.zero == 3:
            for b in self.buckets:
                b.keep(self.arena.params, b.owner == self.comm.rank)
            # those of this rank too: ranks that ask for the same, one after the other, do not run
            # ahead of each other
            self._stored = {
                b.flat.untyped_storage()._cdata: n for n, b in enumerate(self.buckets) if b.floats
            }
            self.arena.params = np.empty(0, np.float32)
            self._hide_parameters()

    def _hide_parameters(self) -> None:
        """Parameters are away: they read as NaN, and what is written into them is refused."""
        nothing = torch.full((), float("nan"))
        for _, p in self.arena.named:
            p.data = nothing.expand(p.shape)
        self._together = False
        self.arena.settle()
        self._versions = [p._version for _, p in self.arena.named]

    def _set(self, buckets: list[Bucket], flats: list[torch.Tensor] | None = None) -> None:
        """The parameters of these buckets are in their memory, or in `flats`."""
        for k, b in enumerate(buckets):
            places = b.views if flats is None else b.places(flats[k])
            for i, place in zip(b.run, places, strict=True):
                self.arena.named[i][1].data = place
        self.arena.settle()

    def _check_hidden(self) -> None:
        self.arena.check()
        for (name, p), version in zip(self.arena.named, self._versions, strict=True):
            if p._version != version:
                raise ConfigError(
                    f"[torch] {name} was written while ranks had parts: do it in trainer.gathered()"
                )

    def _local_buckets(self) -> list[Bucket]:
        return [b for b in self.buckets if b.owner == self.comm.rank]

    @contextlib.contextmanager
    def holding(self) -> Iterator[set[int] | None]:
        if self.zero < 3 or self._together:
            yield None
            return
        self._check_hidden()
        self._set(self._local_buckets())
        try:
            yield {id(self.arena.named[i][1]) for b in self._local_buckets() for i in b.run}
        finally:
            self._hide_parameters()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        if self.zero < 3 or self._together:
            yield
            return
        flats = self._gather()
        try:
            yield
        finally:
            if self._together and not self.arena.moved():  # by a later trainer of the module
                for b, flat in zip(self.buckets, flats, strict=True):
                    if b.owner == self.comm.rank:
                        b.flat.copy_(flat)
                self._hide_parameters()

    def _gather(self) -> list[torch.Tensor]:
        """All parameters in memory of their own, by bucket; a collective call."""
        self._check_hidden()
        flats = []
        for b in self.buckets:
            flats.append(b.flat.clone() if b.owner == self.comm.rank else torch.empty(b.floats))
            if b.floats:
                self.comm.broadcast(flats[-1].numpy(), root=b.owner)
        self._set(self.buckets, flats)
        self._together = True
        return flats

    def _refuse(self, call: str) -> None:
        if self.zero == 3 and not self._together:
            raise ConfigError(
                f"[torch] {call} with zero=3: in `with trainer.gathered():`, which all ranks enter"
            )

    @contextlib.contextmanager
    def phase(self, run: bool = False) -> Iterator[None]:
        comes = self.zero == 3 and not self._together
        with self._in_use() if comes else contextlib.nullcontext():
            yield
        while run and self._round < self._rounds:
            self._close_round()
        while comes and not run and not self._meet(DONE):
            pass

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        self._check_hidden()
        self._set(self.buckets)
        try:
            with _OnUse(self):
                yield
        finally:
            for n in list(self._live):
                with contextlib.suppress(ConfigError):  # it was raised where an operation asked
                    self._forget([n])
            self._hide_parameters()

    def _forget(self, buckets: list[int]) -> None:
        """These are not used for now: what is another's is given back."""
        for n in buckets:
            self._live.remove(n)
            if self.buckets[n].owner != self.comm.rank:
                self.buckets[n].free()

    def need(self, values: list[Any]) -> None:
        """The parameters among these are there when it returns."""
        numbers: list[int] = []
        for value in values:
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                    n = self._stored.get(t.untyped_storage()._cdata)
                    if n is not None and n not in numbers:
                        numbers.append(n)
        for n in numbers:
            if n in self._live:
                self._live.remove(n)
            else:
                idle = [old for old in self._live if old not in numbers]
                self._forget(idle[: max(0, len(self._live) + 1 - SLOTS)])
                self._meet(n)
            self._live.append(n)

    def _fetch(self, n: int, keep: bool) -> None:
        b = self.buckets[n]
        is_owner = b.owner == self.comm.rank
        if not is_owner and b.flat.untyped_storage().nbytes() < 4 * b.floats:
            b.flat.untyped_storage().resize_(4 * b.floats)
        # with Tensor.numpy() it would be memory that cannot be given back
        self.comm.broadcast(
            native.memory(b.flat.data_ptr(), 4 * b.floats).view(np.float32), root=b.owner
        )
        self._sent[:2] += 4 * b.floats * (self.comm.size - 1) * is_owner
        if not is_owner and not keep and n not in self._live:
            with contextlib.suppress(ConfigError):
                b.free()

    def local_shards(self, samples: int, train: bool = True) -> range:
        if not train or self.shard_size is None:
            return super().local_shards(samples, train)
        return range(self.comm.rank, planning.shard_count(samples, self.shard_size), self.comm.size)

    def begin(self, samples: int, train: bool = True) -> StepOutcome:
        if not train:
            return super().begin(samples, train)
        if self._together:
            self.arena.check()
            raise ConfigError(
                "[torch] a step within trainer.gathered(); end the block first"
            ).on_all_ranks()
        assert self.shard_size is not None
        self._count = planning.shard_count(samples, self.shard_size)
        self._rounds = -(-self._count // self.comm.size)
        self._round = 0
        self._tails = []
        part = StepOutcome(self, self._places[2])  # type: ignore[arg-type]
        self._batch = None, train, part  # type: ignore[assignment]
        for b in self.summed:
            b.nodes = []
            b.grads = None
        with part.tried():
            self.norms.take_over()
        return part

    def run(self, samples: int, step: int) -> Iterator[tuple[int, int]]:
        if not self._batch[1]:
            yield from super().run(samples, step)
            return
        shards = self.local_shards(samples)
        with contextlib.ExitStack() as hooks, self._forbid_other_changes(True):
            for i, (_, p) in enumerate(self.arena.named[: self.arena.trained]):
                if p.requires_grad:
                    hooks.callback(p.register_post_accumulate_grad_hook(self._taker(i)).remove)
            while self._round < self._rounds:
                if self._round < len(shards):
                    yield from self._shard(shards[self._round], samples, step, self._tail, [])
                self._close_round()

    def _enter(self, gradients: list[torch.Tensor]) -> list[int]:
        self._reach = [0.0] * self.arena.trained
        for b in self.summed:
            parameters = {i: self.arena.named[i][1] for i in b.run}
            b.waits = {i for i, p in parameters.items() if p.requires_grad}
            for p in parameters.values():
                p.grad = None
        return super()._enter(gradients)

    def _reached(self, gradients: list[torch.Tensor], versions: list[int]) -> list[float]:
        return self._reach

    def _taker(self, i: int) -> Callable[[torch.Tensor], None]:
        """Returns what takes the gradient of parameter i from a backward pass; a bucket that is
        whole may be sent.
        """
        n = self._number[i]
        b = self.buckets[n]
        name = self.arena.named[i][0]

        def take(p: torch.Tensor) -> None:
            if i not in b.waits:
                raise ConfigError(
                    f"[torch] backward() reaches {name} twice, as in "
                    "checkpoint(use_reentrant=True), and zero="
                    f"{self.zero} has sent its gradient; use_reentrant=False, or zero=1"
                )
            assert p.grad is not None
            b.gradient(i).add_(p.grad)
            p.grad = None
            self._reach[i] = 1.0
            b.waits.discard(i)
            if not b.waits:
                self._votes[1 + n] = 1
                self._meet(READY)

        return take

    def _meet(self, says: int) -> bool:
        """Ranks say what they need; all of it is done.

        Returns whether all are done. See the head of this file.
        """
        self._votes[0] = says
        votes = self.comm.all_gather(self._votes)
        for n in sorted({*votes[:, 0].tolist()} - {DONE, READY}):
            self._fetch(n, n == says)
        for n in np.flatnonzero(votes[:, 1:].all(axis=0)).tolist():
            if n not in self._sums_sent:
                self._send(n)
        return bool((votes[:, 0] == DONE).all())

    def _send(self, n: int) -> None:
        """Starts the sum of a bucket over the shards of this round."""
        self._finish()
        b = self.buckets[n]
        (rank, ranks) = (self.comm.rank, self.comm.size)
        sharing = min(ranks, self._count - self._round * ranks)
        local_floats = b.cut[rank][1] - b.cut[rank][0]
        counts = [(hi - lo) * (rank < sharing) for lo, hi in b.cut]
        send = np.zeros(sum(counts), np.float32) if b.grads is None else b.grads.numpy()
        received = np.empty((sharing, local_floats), np.float32)
        takes = [local_floats * (r < sharing) for r in range(ranks)]
        request = self.comm.all_to_all_v(
            send[: sum(counts)], counts, received.reshape(-1), takes, wait=False
        )
        self._under_way = request, b, received, send
        self._sent[:2] += 4 * (sum(counts) - counts[rank])
        self._sums_sent.add(n)
        b.grads = None

    def _finish(self) -> None:
        """Ends the sum that was started last."""
        if self._under_way is not None:
            request, b, received, _ = self._under_way
            self._under_way = None
            request.wait()
            for leaf in received:
                add(b.nodes, leaf)
            b.nodes = [
                (size, node.copy() if node.base is not None else node) for size, node in b.nodes
            ]

    def _close_round(self) -> None:
        """Ends a round, in which this rank has run its shard, had none, or failed."""
        if self._batch[2].error is not None:
            self._tail.fill_(float("nan"))
        self._votes[1:] = 1
        while not self._meet(DONE):
            pass
        self._finish()
        for leaf in self.comm.all_gather(self._tail.numpy())[
            : self._count - self._round * self.comm.size
        ]:
            add(self._tails, leaf)
        self._round += 1
        self._votes[1:] = 0
        self._sums_sent.clear()

    def _complete(self) -> torch.Tensor:
        return torch.from_numpy(folded(self._tails)) if self._batch[1] else super()._complete()

    def _divide(self, result: torch.Tensor, samples: float) -> None:
        """Each owner gets the mean of its parameters, a bucket at a time."""
        rank = self.comm.rank
        lo = self.arena.end(self.arena.held.start)
        for j in range(max(map(len, self.owned))):
            buckets = [
                owner_buckets[j] if j < len(owner_buckets) else None for owner_buckets in self.owned
            ]
            sums = [np.empty(0, np.float32) if b is None else folded(b.nodes) for b in buckets]
            local_bucket = buckets[rank]
            received = np.empty(0 if local_bucket is None else local_bucket.floats, np.float32)
            takes = (
                [0] * self.comm.size
                if local_bucket is None
                else [b - a for a, b in local_bucket.cut]
            )
            self.comm.all_to_all_v(np.concatenate(sums), [len(s) for s in sums], received, takes)
            self._sent[:2] += 4 * (sum(map(len, sums)) - len(sums[rank]))
            if local_bucket is not None:
                start = local_bucket.at - lo
                torch.div(
                    torch.from_numpy(received),
                    samples,
                    out=self.gradient[start : start + local_bucket.floats],
                )
            for b in filter(None, buckets):
                b.nodes = []

    def kept_parameters(self) -> list[fingerprint.Run]:
        if self.zero == 3:
            return [(b.flat.data_ptr(), b.floats, b.at) for b in self._local_buckets() if b.floats]
        arena = self.arena
        address = self.arena.params.ctypes.data
        runs = [arena.held, range(arena.trained, len(arena.at))][: 1 + (self.comm.rank == 0)]
        ends = [(arena.end(run.start), arena.end(run.stop)) for run in runs]
        return [(address + 4 * lo, hi - lo, lo) for lo, hi in ends]

    @property
    def nbytes(self) -> tuple[int, int]:
        largest = sorted((b.floats for b in self.buckets), reverse=True)
        rank = self.comm.rank
        params = (
            sum(b.floats for b in self._local_buckets()) + sum(largest[:SLOTS])
            if self.zero == 3
            else self.arena.extent
        )
        ranges = sum(b.cut[rank][1] - b.cut[rank][0] for b in self.summed)
        shard_counts = range(self.comm.size, self._count + self.comm.size, self.comm.size)
        max_nodes = (
            max(min(shards, self._count).bit_count() for shards in shard_counts)
            if self._count
            else 1
        )
        return 4 * params, 4 * (self.gradient.numel() + max_nodes * ranges + 4 * largest[0])
