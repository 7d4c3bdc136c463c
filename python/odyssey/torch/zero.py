"""ZeRO 2 and 3 of a torch module (Rajbhandari et al. 2020): each rank keeps a part of the
gradients (stage 2), and of the parameters (stage 3).

A rank owns a run of the parameters. Parameters are not split, because torch's optimizers update
whole ones. A bucket is a run of parameters of one owner. With stage 3, before an operation reads a
parameter, in any module, forward or backward, the owner broadcasts the parameter's bucket. A
dispatch mode sees every operation for this. Each rank keeps the last SLOTS buckets that it used.

A step takes its shards in rounds: in each round, each rank runs one shard. The shards of a round
follow each other in the tree of parallel/plan.py, so a rank keeps sums of a few nodes of the tree
after a round, not one sum for each rank. As soon as the backward passes of all ranks have finished
a bucket, the ranks exchange its gradients, and each rank adds its range of them. The backward pass
continues meanwhile. After the last round the owners get the mean gradient.

A rank doesn't know the next operation of another rank's shard, because their branches may differ.
But broadcasts and sums are collective calls, which all ranks must make in the same order. So the
ranks exchange votes (`_exchange_votes`). A vote holds the bucket that a rank needs, or that it is
done, and the buckets whose gradients it has. From equal votes all ranks derive the same calls. They
exchange votes until all are done.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..comm import Communicator
from ..errors import ConfigError
from ..parallel import StepOutcome
from ..parallel import plan as planning
from .arena import ModuleArena
from .device import host_array
from .memory import ALIGN
from .shards import OpenBatch, Shards, lay_out_sums

SLOTS = 2  # buckets of parameters of other ranks that a rank has at a time
MAX_BUCKET_FLOATS = 25 << 18  # 25 MiB; at most a 32nd of the model, as for odyssey's own models
# Votes of a rank that needs no bucket; other votes are the number of the bucket that it needs.
DONE = -1  # the rank has run its shard
READY = -2  # the gradients of a bucket are complete, and the shard is still running
#: Operations of eval mode that round to bfloat16 inside, under autocast. A dispatch mode calls
#: operations with autocast off, so it is turned on for these.
FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
Nodes = list[tuple[int, torch.Tensor]]  # (number of shards, their sum), the largest number first


def _refuse_copy(memo: Any) -> Any:
    """Stands in for the copy of a parameter that this rank has only a part of."""
    raise ConfigError(
        "[torch] copy.deepcopy() of a module whose parameters are shared out over ranks (zero=3) "
        "would copy NaN; copy it inside `with trainer.gathered() as module:`"
    )


class Bucket:
    """The parameters of the arena with the numbers `run`. The rank `owner` keeps their values.

    at: the offset of the first of them in the arena, in floats. floats: of all of them. cut: for
    each rank the (first, one past the last) of the floats that it adds. nodes: this rank's sums of
    its floats. grads: the gradients of the shard that is being run, None before the first.
    waits: the numbers of trained parameters that the current backward pass has not reached.
    """

    def __init__(self, arena: ModuleArena, run: range, owner: int, ranks: int) -> None:
        self.run = run
        self.owner = owner
        self.at = arena.at[run.start]
        self.floats = arena.end(run.stop) - self.at
        self.cut = planning.ranges(self.floats, ranks)
        # (first, one past the last, shape, strides) of each parameter in memory of the bucket
        self._places: list[tuple[int, int, torch.Size, tuple[int, ...]]] = []
        for i in run:
            _, parameter = arena.named[i]
            start = arena.at[i] - self.at
            stop = start + parameter.numel()
            self._places.append((start, stop, parameter.shape, parameter.stride()))
        self._device = arena.device.torch_device
        self.nodes: Nodes = []
        self.grads: torch.Tensor | None = None
        self.waits: set[int] = set()

    def places(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the views of the parameters in `flat`, memory for all floats of the bucket."""
        return [
            flat[start:stop].as_strided(shape, stride)
            for start, stop, shape, stride in self._places
        ]

    def keep(self, params: torch.Tensor, is_owner: bool) -> None:
        """Copies the values from the arena if `is_owner`, else makes views without memory."""
        self.flat = params[self.at : self.at + self.floats].clone()
        self.views = self.places(self.flat)
        if not is_owner:
            self.free()

    def free(self) -> None:
        """Gives back the memory of the parameters.

        Raises ConfigError: a NumPy array shares it.
        """
        try:
            self.flat.untyped_storage().resize_(0)
        except RuntimeError as problem:
            raise ConfigError(
                "[torch] forward() makes NumPy arrays of parameters, whose memory zero=3 gives "
                "back; use zero=2, or torch's operations"
            ) from problem

    def gradient(self, i: int) -> torch.Tensor:
        """Returns the view of parameter i in the gradients of the shard that is being run.

        The first call for a shard makes the memory, filled with zeros.
        """
        if self.grads is None:
            self.grads = torch.zeros(self.floats, device=self._device)
        start, stop, shape, stride = self._places[i - self.run.start]
        return self.grads[start:stop].as_strided(shape, stride)


def add(nodes: Nodes, leaf: torch.Tensor) -> None:
    """Adds the next shard `leaf` to the sums of the shards before it, along the tree.

    Two sums of equally many shards become one, as in a binary counter. The memory of `leaf` is used
    for the result.
    """
    size = 1
    while nodes and nodes[-1][0] == size:
        torch.add(nodes.pop()[1], leaf, out=leaf)
        size *= 2
    nodes.append((size, leaf))


def folded(nodes: Nodes) -> torch.Tensor:
    """Returns the sum over all shards: it adds the remaining nodes, the smallest first."""
    total = nodes[-1][1]
    for _, node in reversed(nodes[:-1]):
        torch.add(node, total, out=total)
    return total


def _keep_alone(node: torch.Tensor) -> torch.Tensor:
    """Returns a node in memory that has nothing else."""
    return node if node.untyped_storage().nbytes() == 4 * node.numel() else node.clone()


class _FetchOnUse(TorchDispatchMode):
    """A dispatch mode that fetches the parameters of each operation before it runs."""

    def __init__(self, spread: Spread) -> None:
        super().__init__()
        self.spread = spread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.spread.need([*args, *kwargs.values()])
        operation, _, _ = func.__name__.partition(".")  # without the name of the overload
        if self.spread.autocast and operation in FUSED:
            key = self.spread.arena.device.autocast_key
            with torch._C._SetExcludeDispatchKeyGuard(key, False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class Spread(Shards):
    """The shards of a module of which each rank keeps a part of the gradients (zero=2), and of the
    parameters (zero=3).

    Args:
        module, comm, arguments, held: as for `Shards`.
        zero: the stage, 2 or 3.
        autocast: True if forward() runs in it.
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
        self.autocast = autocast
        self.zero = zero
        self._is_gathered = False  # this rank has all parameters
        # the numbers of buckets whose parameters this rank has, the one used last at the end
        self._live_buckets: list[int] = []
        # The sum of a bucket that is being sent: what waits for it, its bucket, the memory that
        # receives, and the memory that sends, which must not be freed before it is complete.
        self._sum_under_way: tuple[Callable[[], Any], Bucket, torch.Tensor, torch.Tensor] | None = (
            None
        )
        self._round_count = self._round = self._shard_count = 0
        super().__init__(module, comm, *arguments, **held)
        if comm.in_threads and not self.arena.device.is_host:
            # PyTorch runs the backward passes of a device in one thread, in which a rank would wait
            # for another one.
            raise ConfigError(
                f"[torch] zero={zero} of ranks that are threads (comm.mock), with a module on "
                f"{self.arena.device.torch_device}; use zero=1, or ranks that are processes"
            )
        if zero == 3:
            self._check_aliases()
            for part in module.modules():
                part.register_state_dict_pre_hook(lambda *_: self._require_gathered("state_dict()"))
                part._register_load_state_dict_pre_hook(
                    lambda *_: self._require_gathered("load_state_dict()")
                )

    def _check_aliases(self) -> None:
        """Checks that no buffer shares memory with a parameter, because that memory is given back.

        Raises ConfigError: one does.
        """
        buffers = {id(b) for _, b in self.arena.buffers}
        for alias in self.arena.aliases:
            if id(alias.tensor) in buffers:
                raise ConfigError(
                    f"[torch] the buffer {alias.name} shares memory with a parameter, which zero=3 "
                    "has in parts; use zero=2, or compute the buffer in forward()"
                )

    def _lay_out_memory(self) -> None:
        """Splits the parameters into buckets, and makes memory for this rank's mean gradient."""
        arena = self.arena
        ranks = self.comm.size
        trained_runs = arena.shares(0, arena.trained, ranks)
        frozen_runs = arena.shares(arena.trained, len(arena.named), ranks)
        arena.hold(trained_runs[self.comm.rank])
        self.gradient = arena.grads
        # the tail: all results of a shard but its gradients, which are in buckets
        self._layout = lay_out_sums(0, arena)
        self._tail = torch.zeros(self._layout.end, device=arena.device.torch_device)
        self._tail_nodes: Nodes = []
        self.owned = self._cut_into_buckets(trained_runs)
        self.summed = [b for buckets in self.owned for b in buckets]
        frozen = [b for buckets in self._cut_into_buckets(frozen_runs) for b in buckets]
        self.buckets = self.summed + frozen
        self._bucket_of_parameter = {i: n for n, b in enumerate(self.buckets) for i in b.run}
        # this rank's vote: the bucket that it needs, or DONE or READY; then for each bucket of
        # `summed` 1 if its gradients are complete, else 0
        self._votes = np.zeros(1 + len(self.summed), np.int32)
        self._sums_sent: set[int] = set()  # the buckets whose sums this round has started

    def _cut_into_buckets(self, runs: list[range]) -> list[list[Bucket]]:
        """Returns for each owner the buckets of its run of parameters."""
        max_floats = max(ALIGN, min(MAX_BUCKET_FLOATS, self.arena.extent // 32))
        return [self._cut_run(run, owner, max_floats) for owner, run in enumerate(runs)]

    def _cut_run(self, run: range, owner: int, max_floats: int) -> list[Bucket]:
        """Returns a run as buckets of at most so many floats; a larger parameter has its own."""
        arena = self.arena
        starts = list(run[:1])
        for i in run[1:]:
            if arena.end(i + 1) - arena.at[starts[-1]] > max_floats:
                starts.append(i)
        return [
            Bucket(arena, range(start, stop), owner, self.comm.size)
            for start, stop in itertools.pairwise([*starts, run.stop])
        ]

    # --- where parameters are, with stage 3 ---

    def agree(self, description: dict[str, Any]) -> None:
        super().agree(description)
        self._find_links()
        self._keep_local_parameters()

    def arrange(self, trained: Collection[str]) -> None:
        if self.zero == 3 and not self._is_gathered:
            self._gather_parameters()
        super().arrange(trained)
        vars(self).pop("moves", None)  # it has plans for the old buckets
        self._keep_local_parameters()

    def _keep_local_parameters(self) -> None:
        """With stage 3, keeps the parameters that this rank owns and gives back the others."""
        if self.zero == 3:
            for bucket in self.buckets:
                bucket.keep(self.arena.params, is_owner=bucket.owner == self.comm.rank)
            # It has this rank's own buckets too: a rank that waits for its own buckets as well
            # doesn't run ahead of ranks that ask for the same ones.
            self._bucket_of_storage = {
                bucket.flat.untyped_storage()._cdata: n
                for n, bucket in enumerate(self.buckets)
                if bucket.floats
            }
            self.arena.params = torch.empty(0)
            self._hide_parameters()

    def _hide_parameters(self) -> None:
        """Takes the parameters away: they read as NaN, and `_check_hidden` finds writes to them."""
        nan = torch.full((), float("nan"), device=self.arena.device.torch_device)
        for _, parameter in self.arena.named:
            parameter.data = nan.expand(parameter.shape)
            parameter.__deepcopy__ = _refuse_copy
        self._is_gathered = False
        self.arena.settle()
        self._versions = [parameter._version for _, parameter in self.arena.named]

    def _attach_parameters(
        self, buckets: list[Bucket], flats: list[torch.Tensor] | None = None
    ) -> None:
        """Makes the parameters of these buckets views of the buckets' memory.

        flats: for each bucket other memory to use instead.
        """
        for k, bucket in enumerate(buckets):
            places = bucket.views if flats is None else bucket.places(flats[k])
            for i, place in zip(bucket.run, places, strict=True):
                _, parameter = self.arena.named[i]
                parameter.data = place
                vars(parameter).pop("__deepcopy__", None)
        self.arena.settle()

    def _check_hidden(self) -> None:
        """Checks that nothing was written into the parameters since they were hidden.

        Raises ConfigError: something was, or another trainer has moved them.
        """
        self.arena.check()
        for (name, parameter), version in zip(self.arena.named, self._versions, strict=True):
            if parameter._version != version:
                raise ConfigError(
                    f"[torch] {name} was written while ranks had parts: do it in trainer.gathered()"
                )

    def _list_local_buckets(self) -> list[Bucket]:
        return [b for b in self.buckets if b.owner == self.comm.rank]

    @contextlib.contextmanager
    def holding(self) -> Iterator[set[int] | None]:
        if self.zero < 3 or self._is_gathered:
            yield None
            return
        self._check_hidden()
        self._attach_parameters(self._list_local_buckets())
        try:
            yield {id(self.arena.named[i][1]) for b in self._list_local_buckets() for i in b.run}
        finally:
            self._hide_parameters()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        if self.zero < 3 or self._is_gathered:
            yield
            return
        flats = self._gather_parameters()
        try:
            yield
        finally:
            # a later trainer of the module may have moved the parameters: then they are its own
            if self._is_gathered and not self.arena.moved():
                for bucket, flat in zip(self.buckets, flats, strict=True):
                    if bucket.owner == self.comm.rank:
                        bucket.flat.copy_(flat)
                self._hide_parameters()

    def _gather_parameters(self) -> list[torch.Tensor]:
        """Gives this rank all parameters, in separate memory; a collective call.

        Returns the memory of each bucket.
        """
        self._check_hidden()
        flats = []
        for bucket in self.buckets:
            is_owner = bucket.owner == self.comm.rank
            flat = bucket.flat.clone() if is_owner else self.arena.device.zeros(bucket.floats)
            flats.append(flat)
            if bucket.floats:
                self.moves.broadcast(flat, bucket.owner)
        self._attach_parameters(self.buckets, flats)
        self._is_gathered = True
        return flats

    def _require_gathered(self, call: str) -> None:
        """Raises ConfigError if this rank doesn't have all parameters, which `call` needs."""
        if self.zero == 3 and not self._is_gathered:
            raise ConfigError(
                f"[torch] {call} with zero=3: in `with trainer.gathered():`, which all ranks enter"
            )

    @contextlib.contextmanager
    def phase(self, run: bool = False) -> Iterator[None]:
        fetches = self.zero == 3 and not self._is_gathered
        with self._fetch_on_use() if fetches else contextlib.nullcontext():
            yield
        # Other ranks may still need this one: for the sums of the rounds that it has not run, or
        # for the parameters that it owns.
        while run and self._round < self._round_count:
            self._close_round()
        while fetches and not run and not self._exchange_votes(DONE):
            pass

    @contextlib.contextmanager
    def _fetch_on_use(self) -> Iterator[None]:
        """Fetches parameters in the block when an operation uses them, and hides them after it."""
        self._check_hidden()
        self._attach_parameters(self.buckets)
        try:
            with _FetchOnUse(self):
                yield
        finally:
            for n in list(self._live_buckets):
                # an operation in the block has raised this error already
                with contextlib.suppress(ConfigError):
                    self._release_buckets([n])
            self._hide_parameters()

    def _release_buckets(self, numbers: list[int]) -> None:
        """Gives back the memory of buckets that are not used now, except of this rank's own."""
        for n in numbers:
            self._live_buckets.remove(n)
            if self.buckets[n].owner != self.comm.rank:
                self.buckets[n].free()

    def need(self, values: list[Any]) -> None:
        """Fetches the parameters among these arguments of an operation, with their buckets.

        Other buckets are given back if this rank would have more than SLOTS of them.
        """
        needed: list[int] = []
        for value in values:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    n = self._bucket_of_storage.get(tensor.untyped_storage()._cdata)
                    if n is not None and n not in needed:
                        needed.append(n)
        for n in needed:
            if n in self._live_buckets:
                self._live_buckets.remove(n)
            else:
                idle = [other for other in self._live_buckets if other not in needed]
                surplus = max(0, len(self._live_buckets) + 1 - SLOTS)
                self._release_buckets(idle[:surplus])
                self._exchange_votes(n)
            self._live_buckets.append(n)

    def _broadcast_bucket(self, n: int, keep: bool) -> None:
        """Sends the parameters of bucket n from its owner to all ranks; a collective call.

        keep: False gives the memory back at once, because only other ranks need the bucket.
        """
        bucket = self.buckets[n]
        is_owner = bucket.owner == self.comm.rank
        storage = bucket.flat.untyped_storage()
        nbytes = 4 * bucket.floats
        if not is_owner and storage.nbytes() < nbytes:
            storage.resize_(nbytes)
        # copies to and from the host are operations too, which must not fetch the bucket
        with _disable_current_modes():
            self.moves.broadcast(bucket.flat, bucket.owner)
        self._uncounted_traffic[:2] += nbytes * (self.comm.size - 1) * is_owner
        if not is_owner and not keep and n not in self._live_buckets:
            with contextlib.suppress(ConfigError):
                bucket.free()

    def local_shards(self, samples: int, train: bool = True) -> range:
        if not train or self.shard_size is None:
            return super().local_shards(samples, train)
        return range(self.comm.rank, planning.shard_count(samples, self.shard_size), self.comm.size)

    def owner_of_first(self, samples: int) -> int:
        return 0

    def begin(self, samples: int, train: bool = True) -> StepOutcome:
        if not train:
            return super().begin(samples, train)
        if self._is_gathered:
            self.arena.check()
            raise ConfigError(
                "[torch] a step within trainer.gathered(); end the block first"
            ).on_all_ranks()
        assert self.shard_size is not None
        self._shard_count = planning.shard_count(samples, self.shard_size)
        self._round_count = -(-self._shard_count // self.comm.size)
        self._round = 0
        self._tail_nodes = []
        # only its communicator is used: a rank that fails sends NaN in `_close_round`
        outcome = StepOutcome(self, self._layout.sums)  # type: ignore[arg-type]
        self._open_batch = OpenBatch(None, train, outcome)  # type: ignore[arg-type]
        for bucket in self.summed:
            bucket.nodes = []
            bucket.grads = None
        with outcome.tried():
            self.norms.take_over()
        return outcome

    def run(self, samples: int, step: int) -> Iterator[tuple[int, int]]:
        if not self._open_batch.train:
            yield from super().run(samples, step)
            return
        shards = self.local_shards(samples)
        with (
            self.modes.held(),
            contextlib.ExitStack() as hooks,
            self._forbid_other_changes(True),
        ):
            for i, (_, parameter) in enumerate(self.arena.named[: self.arena.trained]):
                if parameter.requires_grad:
                    hook = self._make_gradient_hook(i)
                    handle = parameter.register_post_accumulate_grad_hook(hook)
                    hooks.callback(handle.remove)
            while self._round < self._round_count:
                if self._round < len(shards):
                    shard = shards[self._round]
                    yield from self._run_shard(shard, samples, step, self._tail, gradients=[])
                self._close_round()

    def _prepare_shard(self, gradients: list[torch.Tensor]) -> list[int]:
        self._reached_flags = [0.0] * self.arena.trained
        for bucket in self.summed:
            bucket.waits = set()
            for i in bucket.run:
                _, parameter = self.arena.named[i]
                parameter.grad = None
                if parameter.requires_grad:
                    bucket.waits.add(i)
        return super()._prepare_shard(gradients)

    def _find_reached(self, gradients: list[torch.Tensor], versions: list[int]) -> list[float]:
        return self._reached_flags

    def _make_gradient_hook(self, i: int) -> Callable[[torch.Tensor], None]:
        """Returns a hook that moves the gradient of parameter i into its bucket.

        With the last gradient of a bucket, the ranks exchange votes: its sum may start. The hook
        raises ConfigError if a backward pass reaches the parameter twice.
        """
        n = self._bucket_of_parameter[i]
        bucket = self.buckets[n]
        name, _ = self.arena.named[i]

        def move_gradient(parameter: torch.Tensor) -> None:
            if i not in bucket.waits:
                raise ConfigError(
                    f"[torch] backward() reaches {name} twice, as in "
                    "checkpoint(use_reentrant=True), and zero="
                    f"{self.zero} has sent its gradient; use_reentrant=False, or zero=1"
                )
            assert parameter.grad is not None
            self._scale_gradients(bucket.gradient(i).add_(parameter.grad))
            parameter.grad = None
            self._reached_flags[i] = 1.0
            bucket.waits.discard(i)
            if not bucket.waits:
                self._votes[1 + n] = 1
                self._exchange_votes(READY)

        return move_gradient

    def _exchange_votes(self, vote: int) -> bool:
        """Exchanges the votes of all ranks, and makes the collective calls that they ask for.

        All ranks see the same votes, so they make the same calls in the same order: first they
        broadcast each bucket that a rank needs. Then they start the sum of each bucket whose
        gradients all ranks have. A collective call.

        Args:
            vote: the bucket that this rank needs, DONE or READY.

        Returns:
            True if all ranks are done.
        """
        self._votes[0] = vote
        votes = self.comm.all_gather(self._votes)  # a row for each rank
        rank_votes = votes[:, 0]
        for n in sorted({*rank_votes.tolist()} - {DONE, READY}):
            self._broadcast_bucket(n, keep=n == vote)
        has_gradients = votes[:, 1:].all(axis=0)  # by bucket
        for n in np.flatnonzero(has_gradients).tolist():
            if n not in self._sums_sent:
                self._start_sum(n)
        return bool((rank_votes == DONE).all())

    def _start_sum(self, n: int) -> None:
        """Starts the exchange for the sum of bucket n over the shards of this round.

        Each rank sends each other rank the range of its gradients that the other one adds.
        """
        self._finish_sum()
        bucket = self.buckets[n]
        rank = self.comm.rank
        ranks = self.comm.size
        senders = min(ranks, self._shard_count - self._round * ranks)  # ranks that have a shard
        lo, hi = bucket.cut[rank]
        local_floats = hi - lo
        send_counts = [(hi - lo) * (rank < senders) for lo, hi in bucket.cut]
        sent_floats = sum(send_counts)
        device = self.arena.device
        receive_counts = [local_floats * (source < senders) for source in range(ranks)]
        with _disable_current_modes():
            # without gradients the bucket counts as zeros
            sent = device.zeros(sent_floats) if bucket.grads is None else bucket.grads
            received = torch.empty(senders * local_floats, device=device.torch_device)
            finish = self.moves.start_all_to_all(
                ("sum", n, senders), sent[:sent_floats], send_counts, received, receive_counts
            )
        self._sum_under_way = finish, bucket, received.view(senders, local_floats), sent
        self._uncounted_traffic[:2] += 4 * (sent_floats - send_counts[rank])
        self._sums_sent.add(n)
        bucket.grads = None

    def _finish_sum(self) -> None:
        """Waits for the exchange that was started last, and adds what this rank received."""
        if self._sum_under_way is not None:
            finish, bucket, received, _ = self._sum_under_way
            self._sum_under_way = None
            with _disable_current_modes():
                finish()
                for leaf in received:
                    add(bucket.nodes, leaf)
                # a node that is a view would keep all of `received` in memory
                bucket.nodes = [(shards, _keep_alone(node)) for shards, node in bucket.nodes]

    def _close_round(self) -> None:
        """Completes the sums of a round, in which this rank has run a shard, had none, or failed.

        A collective call. This rank answers the votes of the others until all are done.
        """
        if self._open_batch.outcome.error is not None:
            self._tail.fill_(float("nan"))  # reports the failure to all ranks
        self._votes[1:] = 1
        while not self._exchange_votes(DONE):
            pass
        self._finish_sum()
        remaining_shards = self._shard_count - self._round * self.comm.size
        tails = self.comm.all_gather(host_array(self._tail))
        for leaf in torch.from_numpy(tails[:remaining_shards]):
            add(self._tail_nodes, leaf)
        self._round += 1
        self._votes[1:] = 0
        self._sums_sent.clear()

    def _complete_sums(self) -> torch.Tensor:
        if not self._open_batch.train:
            return super()._complete_sums()
        return self.arena.device.put(folded(self._tail_nodes))

    def _store_mean(self, result: torch.Tensor, weight: float) -> None:
        """Sends each owner the sums of its buckets, and divides them into its mean gradient.

        A collective call for each bucket of the owner with the most: in call k, each owner gets its
        bucket k.
        """
        for k in range(max(map(len, self.owned))):
            bucket_of_rank = [buckets[k] if k < len(buckets) else None for buckets in self.owned]
            self._store_bucket_mean(k, bucket_of_rank, weight)

    def _store_bucket_mean(
        self, k: int, bucket_of_rank: list[Bucket | None], weight: float
    ) -> None:
        """Exchanges the sums of bucket k of each owner, and stores the mean of this rank's."""
        rank = self.comm.rank
        device = self.arena.device
        sums = [
            device.zeros(0) if bucket is None else folded(bucket.nodes) for bucket in bucket_of_rank
        ]
        send_counts = [len(total) for total in sums]
        local_bucket = bucket_of_rank[rank]
        floats = 0
        receive_counts = [0] * self.comm.size
        if local_bucket is not None:
            floats = local_bucket.floats
            receive_counts = [hi - lo for lo, hi in local_bucket.cut]
        received = torch.empty(floats, device=device.torch_device)
        finish = self.moves.start_all_to_all(
            ("mean", k), torch.cat(sums), send_counts, received, receive_counts
        )
        finish()
        self._uncounted_traffic[:2] += 4 * (sum(send_counts) - send_counts[rank])
        if local_bucket is not None:
            start = local_bucket.at - self.arena.end(self.arena.held.start)
            mean = self.gradient[start : start + floats]
            torch.div(received, device.number(weight), out=mean)
        for bucket in filter(None, bucket_of_rank):
            bucket.nodes = []

    def kept_parameters(self) -> list[tuple[torch.Tensor, int]]:
        if self.zero == 3:
            buckets = self._list_local_buckets()
            return [(b.flat, b.at) for b in buckets if b.floats]
        arena = self.arena
        runs = [arena.held]
        if self.comm.rank == 0:  # it counts the frozen parameters too
            runs.append(range(arena.trained, len(arena.at)))
        ends = [(arena.end(run.start), arena.end(run.stop)) for run in runs]
        return [(arena.params[lo:hi], lo) for lo, hi in ends]

    @property
    def nbytes(self) -> tuple[int, int]:
        rank = self.comm.rank
        ranks = self.comm.size
        bucket_floats = sorted((b.floats for b in self.buckets), reverse=True)
        parameter_floats = self.arena.extent
        if self.zero == 3:
            local_floats = sum(b.floats for b in self._list_local_buckets())
            parameter_floats = local_floats + sum(bucket_floats[:SLOTS])
        ranges = [b.cut[rank] for b in self.summed]
        node_floats = sum(hi - lo for lo, hi in ranges)  # of one node of each bucket
        # after n shards there are as many nodes as n has bits that are 1
        max_nodes = 1
        if self._shard_count:
            after_rounds = range(ranks, self._shard_count + ranks, ranks)
            max_nodes = max(min(n, self._shard_count).bit_count() for n in after_rounds)
        # an estimate for the bucket under way: its gradients, what is sent and what is received
        exchange_floats = 4 * bucket_floats[0]
        gradient_floats = self.gradient.numel() + max_nodes * node_floats + exchange_floats
        return 4 * parameter_floats, 4 * gradient_floats
