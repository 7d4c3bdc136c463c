"""DistributedDataParallel: a model whose gradients are the mean over all ranks when
`loss.backward()` returns.

For custom training loops: every rank computes its own batch, and the gradients are reduced inside
the backward pass, bucket by bucket, while it goes on. A DistributedTrainer does all that by itself
and is faster; it takes the bare model.

How gradients are added, which decides about the bits: every backward pass is a leaf. The leaves of
a rank are added along the tree of parallel/plan.py as they come, like a binary counter (nodes of
equal size merge), then the ranks' sums along the tree over ranks. So R ranks with k passes each
give the bits of one rank with R * k passes, for k a power of two. With average="ranks" the mean is
exact only if the number of ranks is one too; average="samples" divides once, by the number of all
samples.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.uncopied import uncopied
from ..comm import Communicator, Request
from ..core import tape
from ..core.arena import Arena, Buffer
from ..core.program import current
from ..core.tensor import BackwardWatcher, Tensor
from ..data import DataLoader
from ..errors import ConfigError, check_number
from ..nn import Module
from ..nn.module import Parameter
from ..parallel import plan as planning
from ..parallel import strategy as strategies
from ..parallel.buckets import FLOATS_PER_MB, Bucket, from_the_end
from ..parallel.mesh import Mesh
from ..parallel.reduction import RunningTreeSum
from ..train.resume import spread
from . import loop_checkpoints
from .groups import ProcessGroup, joined, state_here

if TYPE_CHECKING:
    from ..core.precision import GradScaler
    from ..optim import LambdaLR, Optimizer

AVERAGES = ("ranks", "samples")


@uncopied("copy the model, ddp.module, and wrap the copy")
class DistributedDataParallel(Module):
    """A model with a copy on every rank, whose gradients are averaged inside every backward pass.

        net = DDP(net)
        opt = optim.SGD(net.parameters(), lr=0.1)
        for x, y in loader:                       # each rank its own samples
            opt.zero_grad()
            F.cross_entropy(net(Tensor(x)), y).backward()
            opt.step()                            # p.grad is the mean over ranks, the same bits on
                                                  # all

    All ranks construct it, and make the same number of synchronizing backward passes (`join` for
    uneven data). Parameters of all ranks become those of rank 0. A parameter that a pass does not
    reach counts as zero. Dropout draws other masks on every rank, so a model with dropout does not
    give the same bits on another number of ranks here (in a DistributedTrainer it does).

    Args:
        module: the model. Its names stay as they are in state_dict().
        process_group: a `World` or `ProcessGroup`; default the initialized world.
        bucket_size_mb: gradients are reduced in pieces of at least this many MB (2^20 bytes of
            float32).
        broadcast_buffers: tensors and floating-point arrays that modules keep beside their
            parameters (running means) become rank 0's: at construction, and before each forward
            pass in training that is to be synchronized.
        find_unused_parameters: name parameters that no rank's first synchronized pass reached,
            once, on standard error. They count as zero whatever is given here.
        device_ids: as PyTorch has it, the one device of this process; which one that is, ranks
            decide here.
        average: "ranks": the sum of the ranks' gradients divided by the number of ranks, as in
            PyTorch; right if all ranks have batches of one size. "samples": each pass weighs as
            many samples as the first argument of forward() had; for losses that are means over a
            batch. Right for any sizes.
        reduction: how sums travel: a name of parallel.strategy.REDUCTIONS, or a Strategy with its
            settings, compression among them. Those that keep the tree give the bits that the head
            of this file promises.

    Attributes:
        module: the model. reductions: synchronized backward passes so far. bytes_sent: by this
            rank, in those.
        active: False while `join` fills in for a rank without data.

    Raises ConfigError: the ranks' models differ, a setting is not allowed, or there is no process
    group.
    """

    def __init__(
        self,
        module: Module,
        process_group: ProcessGroup | None = None,
        bucket_size_mb: float = 25.0,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = True,
        *,
        device_ids: Sequence[Any] | None = None,
        average: str = "ranks",
        reduction: strategies.Strategy | str = "tree",
    ) -> None:
        super().__init__()
        if not isinstance(module, Module) or isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"[ddp] a {type(module).__name__} was given; give the model, a nn.Module"
            )
        if device_ids is not None and len(device_ids) != 1:
            raise ConfigError(
                f"[ddp] device_ids is {list(device_ids)}, and a process has one replica; start "
                "more ranks (odyssey launch -n), and leave it out"
            )
        check_number("[ddp] bucket_size_mb", bucket_size_mb, 0, open_low=True)
        if average not in AVERAGES:
            raise ConfigError(f"[ddp] average is {average!r}; choose from {', '.join(AVERAGES)}")
        strategy = strategies.Strategy.of(reduction)
        if strategy.reduction in strategies.MODES:
            raise ConfigError(
                f"[ddp] reduction={strategy.reduction!r} takes steps of its own; use "
                f"DistributedTrainer, or one of {', '.join(strategies.REDUCTIONS)}"
            )
        self.module = module
        object.__setattr__(module, "_wrapped", True)
        self.average = average
        self.broadcast_buffers = bool(broadcast_buffers)
        self.find_unused_parameters = bool(find_unused_parameters)
        self.reductions = 0
        self.active = True
        self._group = joined(process_group)
        self._comm = comm = self._group._member("DistributedDataParallel")
        self._arena = arena = Arena.of(module.named_parameters())
        self._strategy = strategy
        # epoch and number of the next batch, by the loader that `join` has counted
        self._positions: weakref.WeakKeyDictionary[Any, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        strategy.check(Mesh(dp=comm.size, pp=1, tp=1), 0)
        if strategy.compression in ("topk", "powersgd") and average == "samples":
            raise ConfigError(
                f"[ddp] compression={strategy.compression!r} adds what it did not send to a "
                "later step, which may "
                "be of another number of samples; use average='ranks', or compression='bf16'"
            )
        self._same_everywhere(average, strategy, bucket_size_mb)
        self._sync = _Sync(
            comm, arena, from_the_end(arena, max(1, int(bucket_size_mb * FLOATS_PER_MB))), strategy
        )
        comm.broadcast(arena.params)
        self._broadcast_buffers()
        self._enabled = True  # whether the next backward pass communicates
        # between which ops, of how many samples
        self._forwards: deque[tuple[int, int, int]] = deque(maxlen=4096)
        self._replaced = False
        self._pass = _Pass(self)
        # The k-th sample of a batch is another one on every rank: it must not get the same dropout
        # mask on all.
        current().context.first = comm.rank * (2**32 // comm.size)
        if isinstance(arena.watcher, _Pass) and (old := arena.watcher.ddp()) is not None:
            old._replaced = True
        arena.watcher = self._pass
        BackwardWatcher.exist = True
        state_here().models.add(self)

    @classmethod
    def builder(cls, module: Module) -> Builder:
        """`DDP.builder(model).world(world).bucket_size_mb(25.0).broadcast_buffers(True).build()`."""
        return Builder(module)

    def _same_everywhere(self, *settings: Any) -> None:
        """Raises ConfigError on all ranks if one has another model or other settings than rank
        0.
        """
        from ..train import agreement

        local_setup = {
            "model": self._arena.layout_hash(),
            "buffers": [(name, b.shape) for name, b in self._buffers()],
            "average, reduction or bucket size": settings,
        }
        if message := agreement.difference(self._comm, local_setup):
            raise ConfigError(f"[ddp] {message}")

    def forward(self, *args: Any) -> Any:
        if self._replaced:
            raise ConfigError(
                "[ddp] this model was wrapped again; use the newer DistributedDataParallel"
            )
        if current().shard:
            raise ConfigError(
                "[ddp] a DistributedTrainer synchronizes by itself; give it the model, ddp.module"
            )
        if not tape._tape.enabled:
            return self.module(*args)
        if self.broadcast_buffers and self.training and self._enabled:
            self._broadcast_buffers()
        shape = getattr(args[0], "shape", ()) if args else ()
        start = tape.tick()
        out = self.module(*args)
        self._forwards.append((start, tape.tick(), shape[0] if shape else 0))
        return out

    def _samples_of(self, ops: set[int]) -> int:
        """Samples of the forward passes that these ops belong to."""
        order = sorted(ops)
        samples = 0
        for start, end, n in reversed(self._forwards):
            if end < order[0]:
                break
            if bisect(order, end) > bisect(order, start):
                samples += n
        return samples

    def _walk_parameters(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        return self.module._walk_parameters(prefix)

    def _buffers(self) -> Iterator[tuple[str, np.ndarray]]:
        """Tensors and floating-point arrays that modules keep beside their parameters."""
        for i, m in enumerate(self.module.modules()):
            for name, value in vars(m).items():
                is_buffer = isinstance(value, Tensor) and (
                    not isinstance(value, Parameter) or isinstance(value, Buffer)
                )
                if is_buffer and value.layout == "rows":
                    yield f"{i}.{name}", value.data
                elif (
                    isinstance(value, np.ndarray)
                    and value.dtype.kind == "f"
                    and value.flags.c_contiguous
                ):
                    yield f"{i}.{name}", value

    def _broadcast_buffers(self) -> None:
        if self._comm.size > 1 and self.broadcast_buffers:
            for _, b in self._buffers():
                self._comm.broadcast(b)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to this rank's gradients and do not communicate.

        The next one outside reduces what has come together. Until then p.grad is this rank's sum
        (with average="samples" each pass times its samples).
        """
        was_enabled = self._enabled
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = was_enabled

    def sync_gradients(self) -> None:
        """Reduces what passes under no_sync() have left in p.grad; all ranks call it.

        Nothing happens on any rank after a backward pass that has synchronized by itself.
        """
        self._pass.flush()

    def save_checkpoint(
        self,
        folder: str | Path,
        optimizer: Optimizer,
        *,
        loader: DataLoader | None = None,
        scheduler: LambdaLR | None = None,
        scaler: GradScaler | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        """Writes everything that this loop resumes from, as the next step of a directory of
        checkpoints; all ranks call it after optimizer.step().

            for epoch in range(loader.next_epoch, 10):
                for x, y in ddp.join(loader):
                    ...
                ddp.save_checkpoint("runs/mine", optimizer, loader=loader)

        It holds the model, the optimizer with its settings and steps, the number of dropouts, and
        the parts that you pass. Pass all of them that the loop uses. The last two checkpoints stay.

        Args:
            folder: a directory, created if it is missing.
            optimizer: of this model's parameters.
            loader: the `DataLoader` that the loop joins; its epoch and batch are saved.
            scheduler: a `LambdaLR` or another of `lr_scheduler`, of this optimizer.
            scaler: a `GradScaler`.
            values: your own, as JSON has them.

        Raises ConfigError: a part is missing or of another model, gradients wait for a step, ranks
        have different buffers, or a compression keeps state. OutputError: the checkpoint could not
        be written; older ones stay.
        """
        parts = loop_checkpoints.Parts(optimizer, loader, scheduler, scaler)
        loop_checkpoints.save(self, folder, parts, {} if values is None else values)

    def load_checkpoint(
        self,
        path: str | Path,
        optimizer: Optimizer,
        *,
        loader: DataLoader | None = None,
        scheduler: LambdaLR | None = None,
        scaler: GradScaler | None = None,
    ) -> dict[str, Any] | None:
        """Takes back what `save_checkpoint` wrote; all ranks call it before the first step.

            ddp.load_checkpoint("runs/mine", optimizer, loader=loader)
            for epoch in range(loader.next_epoch, 10): ...

        The loop ends with the bits of one that never stopped. On another number of ranks, this
        needs the same samples in each batch of all ranks, and no dropout: its masks belong to a
        rank.

        path: a checkpoint, or a directory of them: then the newest that is valid. The other
        arguments: as they were saved.

        Returns the values that were saved, or None if there is no checkpoint. Raises
        CheckpointError: checkpoints are there, and none is valid. ConfigError: the checkpoint is of
        another model, optimizer or loader; nothing was changed.
        """
        parts = loop_checkpoints.Parts(optimizer, loader, scheduler, scaler)
        return loop_checkpoints.load(self, path, parts)

    def _tell(self, line: str) -> None:
        """Prints a line on standard error, on rank 0."""
        if self._comm.rank == 0:
            print(f"odyssey: {line}", file=sys.stderr)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank's reductions have sent so far."""
        return self._sync.bytes_sent

    def join(self, loader: Any) -> JoinedLoader:
        """The loader's batches, on all ranks as many as the longest loader has; all ranks call
        it, once per epoch.

            for x, y in ddp.join(loader): ...     # forward, backward, step on all ranks

        A rank that runs out gets its first batch again (one without data that of another rank),
        with `active` False: the loop goes on in step, the batch's gradients are left out, and it
        counts no samples. With average="ranks" the divisor stays the number of ranks, as in
        PyTorch; with "samples" the mean is over the samples there are. Use each batch before the
        next is taken: `active` is that of the newest.

        loader: has a length, and gives tuples of arrays, or data.Batch.

        Raises ConfigError: the loader has no length, or gives another number of batches; no rank
        has data.
        """
        return JoinedLoader(self, loader)


DDP = DistributedDataParallel


class JoinedLoader:
    """Iterable of as many batches on all ranks, which `DistributedDataParallel.join` gives;
    len() is how many.
    """

    def __init__(self, ddp: DistributedDataParallel, loader: Any) -> None:
        if not hasattr(loader, "__len__"):
            raise ConfigError(
                f"[ddp] join of a {type(loader).__name__}, which has no length; give a "
                "DataLoader or a list of batches"
            )
        self._ddp = ddp
        self._loader = loader
        # that of a loader that starts within its epoch
        self._first_batch = getattr(loader, "_first_batch", 0)
        remaining = len(loader) - self._first_batch
        self._lengths = ddp._comm.all_gather(np.array([remaining], np.int64))[:, 0]
        if not self._lengths.any():
            raise ConfigError("[ddp] join: no rank has a batch; give at least one of them data")

    def __len__(self) -> int:
        return int(self._lengths.max())

    def __iter__(self) -> Iterator[Any]:
        ddp = self._ddp
        expected_batches = int(self._lengths[self._ddp._comm.rank])
        first = None
        epoch = None
        batches_given = 0
        for item in self._loader:
            if batches_given == expected_batches:
                raise ConfigError(
                    f"[ddp] join: the loader said {expected_batches} batches and gives more; "
                    "correct its length"
                )
            if not batches_given:
                first = self._lend(item)
                epoch = getattr(item, "epoch", None)
            batches_given += 1
            self._note_position(epoch, batches_given)
            yield item
        if batches_given != expected_batches:
            raise ConfigError(
                f"[ddp] join: the loader said {expected_batches} batches and gave "
                f"{batches_given}; correct its length"
            )
        if not batches_given:
            first = self._lend(None)
        ddp.active = False
        try:
            for number in range(expected_batches, len(self)):
                self._note_position(epoch, number + 1)
                yield first
        finally:
            ddp.active = True

    def _note_position(self, epoch: int | None, batches: int) -> None:
        """Notes the batch that follows the first so many batches, for checkpoints.

        epoch: None if this rank has no batch that says it.
        """
        if not isinstance(self._loader, DataLoader):
            return
        is_last = batches == len(self)
        known_epoch = -1 if epoch is None else epoch + is_last
        self._ddp._positions[self._loader] = (
            known_epoch,
            0 if is_last else self._first_batch + batches,
        )

    def _lend(self, batch: Any) -> Any:
        """Brings a batch to the ranks that have none; they get it as a tuple of arrays."""
        if self._lengths.all():
            return batch
        root = int(np.flatnonzero(self._lengths)[0])
        comm = self._ddp._comm
        arrays = spread(comm, [np.asarray(a) for a in batch] if comm.rank == root else None, root)
        return tuple(arrays) if batch is None else batch


class _Pass(BackwardWatcher):
    """Hooks around a backward pass; the arena holds them, and they hold the model weakly."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = weakref.ref(ddp)
        self._arena = ddp._arena
        self._sync = ddp._sync
        self._grads = ddp._arena.grads[: ddp._arena.size]
        self._partial = RunningTreeSum()  # passes that are not reduced yet
        self._samples = 0  # of those
        # gradients that are reduced already and were not set to zero
        self._mean: np.ndarray | None = None
        self._shown_grads: np.ndarray | None = (
            None  # what p.grad was left as, if that is not all zero
        )
        self._reduced = False  # whether that was after a reduction
        self._syncing = False  # in this pass
        self._weight: float | None = None  # of this pass; None: it does not matter to this object
        self._reached: set[int] = set()  # parameters

    def begin(self, ops: set[int]) -> None:
        ddp = self.ddp()
        if ddp is None:  # the wrapper is gone, the module lives on alone
            self._syncing = False
            self._weight = None
            return
        self._take_in()
        self._syncing = ddp._enabled
        by_samples = ddp.average == "samples"
        self._weight = 0
        if ddp.active:
            self._weight = ddp._samples_of(ops) if by_samples else 1
            if not self._weight:
                raise ConfigError(
                    "[ddp] average='samples', but no forward pass of the wrapped model is behind "
                    "this loss; call ddp(x), with the batch as its first argument"
                )
        self._samples += self._weight
        self._reached = set()
        if self._syncing:
            self._sync.begin(self._samples if by_samples else None, self._fill)

    def ready(self, p: Parameter) -> None:
        if self._weight is None:
            return
        self._reached.add(id(p))
        if self._syncing:
            self._sync.ready(p.memory.offset // 4)

    def end(self) -> None:
        if self._weight is None:
            return
        if self._syncing:
            self._complete()
        else:
            self._weigh(self._grads)
            self._partial.push(self._grads)
            self._show()

    def flush(self) -> None:
        """Reduces passes that are not reduced yet."""
        ddp = self.ddp()
        self._take_in()
        pending = bool(self._partial.nodes)
        if ddp._comm.all_reduce(np.array([pending], np.int32), "max")[0] == 0:
            if self._mean is not None:
                self._grads[:] = self._mean
                self._mean = None
                self._shown_grads = None
                self._reduced = True
            return
        by_samples = ddp.average == "samples"
        self._weight = 0
        self._reached = set()
        self._sync.begin(self._samples if by_samples else None, self._fill)
        self._complete()

    @property
    def is_pending(self) -> bool:
        """True if passes of this rank wait for a reduction and a step."""
        return bool(self._partial.nodes) and bool(self._grads.any())

    def _take_in(self) -> None:
        """Looks at what p.grad holds before a pass, and sets it to zero: the pass is to be a
        leaf of its own. All zero: the user has begun anew. What was left there: nothing
        happened. Else it was changed: the sum from here on.
        """
        g = self._grads
        if not g.view(np.uint32).max():
            self._forget()
            return
        if self._shown_grads is None or not np.array_equal(
            g.view(np.int32), self._shown_grads.view(np.int32)
        ):
            samples = self._samples
            reduced = self._reduced
            self._forget()
            if reduced:
                self._mean = g.copy()
            elif self.ddp().average == "samples" and not samples:
                raise ConfigError(
                    "[ddp] p.grad holds a gradient of an unknown number of samples, which the "
                    "wrapped model did not make; call zero_grad() first"
                )
            else:
                self._partial.push(g)
                self._samples = samples
        g[:] = 0

    def _forget(self) -> None:
        self._partial.clear()
        self._samples = 0
        self._mean = None
        self._shown_grads = None
        self._reduced = False

    def _weigh(self, array: np.ndarray) -> None:
        """Multiplies the newest pass by what it counts."""
        if not self._weight:
            array[:] = 0
        elif self._weight != 1:
            np.multiply(array, np.float32(self._weight), out=array)

    def _fill(self, out: np.ndarray, lo: int, hi: int) -> None:
        """This rank's sum of a range of the gradients."""
        out[:] = self._grads[lo:hi]
        self._weigh(out)
        self._partial.add_to(out, lo, hi)

    def _show(self) -> None:
        """Puts the sum so far into p.grad."""
        g = self._grads
        g[:] = 0
        self._partial.add_to(g, 0, len(g))
        if self._mean is not None:
            g += self._mean
        if len(self._partial.nodes) == 1 and self._mean is None:
            self._shown_grads = self._partial.nodes[0][1]
        else:
            self._shown_grads = g.copy()
        self._reduced = False

    def _complete(self) -> None:
        """Ends the reduction of all buckets."""
        ddp = self.ddp()
        g = self._grads
        for lo, hi, total, divisor in self._sync.finish():
            np.divide(total, np.float32(divisor), out=g[lo:hi])
        mean = self._mean
        self._forget()
        if mean is not None:
            g += mean
        self._reduced = True
        ddp.reductions += 1
        if ddp.reductions == 1:
            self._name_unused(ddp)

    def _name_unused(self, ddp: DistributedDataParallel) -> None:
        """Says once which parameters no rank has reached."""
        named_parameters = self._arena.named
        reached = np.array([id(p) in self._reached for _, p in named_parameters], np.int32)
        reached = ddp._comm.all_reduce(reached, "max")
        names = [
            name
            for (name, p), r in zip(named_parameters, reached, strict=True)
            if not r and p.requires_grad
        ]
        if names and ddp.find_unused_parameters and ddp._comm.rank == 0:
            print(
                f"odyssey: no gradient reaches {', '.join(names)}: counted as zero",
                file=sys.stderr,
                flush=True,
            )


class _Sync:
    """Reduces the buckets of an arena's gradients, in their order, each as soon as it is
    complete.
    """

    def __init__(
        self, comm: Communicator, arena: Arena, buckets: list[Bucket], strategy: strategies.Strategy
    ) -> None:
        self.comm = comm
        self.cut = [(b.pieces[0].lo, b.pieces[0].lo + b.floats) for b in buckets]
        plan = planning.make(comm.size, comm.rank, comm.size, 1, 1)  # one shard per rank
        shapes = {name: p.shape for name, p in arena.named}
        self.reductions = []
        for b in buckets:
            offsets_and_shapes = tuple(
                (b.locate(arena.offsets[name]), shapes[name]) for name in b.names
            )
            # of one sample: means do not change their scale
            content = strategies.Content(b.floats, offsets_and_shapes, 1, {})
            self.reductions.append(
                strategies.make(strategy, comm, plan, b.floats, 1, content=content)
            )
        # offset of a parameter -> its bucket
        self.bucket = {arena.offsets[name]: i for i, b in enumerate(buckets) for name in b.names}
        self.wanted = [len(b.names) for b in buckets]  # parameters of each bucket

    @property
    def bytes_sent(self) -> int:
        return sum(r.bytes_sent for r in self.reductions)

    def begin(self, samples: int | None, fill: Any) -> None:
        """samples: of this rank, if the mean is over samples. fill(out, lo, hi) gives this
        rank's sum of a range.
        """
        self._missing = list(self.wanted)
        self._started = 0
        self._fill = fill
        self._count: Request | None = None
        if samples is not None:
            self._count = self.comm.all_reduce(np.array([samples], np.int64), wait=False)

    def ready(self, offset: int) -> None:
        """The gradient of the parameter at an offset is complete."""
        self._missing[self.bucket[offset]] -= 1
        while self._started < len(self.cut) and not self._missing[self._started]:
            self._start()
        if self._started:
            self.reductions[self._started - 1].poll()

    def _start(self) -> None:
        r = self.reductions[self._started]
        self._fill(r.buffers[0], *self.cut[self._started])
        r.start()
        self._started += 1

    def finish(self) -> Iterator[tuple[int, int, np.ndarray, float]]:
        """Starts what is left and waits; gives (lo, hi, sum over ranks, divisor) of each bucket."""
        while self._started < len(self.cut):
            self._start()
        divisor = self.comm.size if self._count is None else int(self._count.wait()[0])
        for (lo, hi), r in zip(self.cut, self.reductions, strict=True):
            yield lo, hi, r.finish(), max(divisor, 1)


class Builder:
    """Collects arguments of a DistributedDataParallel, each by a method of its name; `build()`
    makes it.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._settings: dict[str, Any] = {}

    def _give(self, name: str, value: Any) -> Builder:
        self._settings[name] = value
        return self

    world = partialmethod(_give, "process_group")
    bucket_size_mb = partialmethod(_give, "bucket_size_mb")
    broadcast_buffers = partialmethod(_give, "broadcast_buffers")
    find_unused_parameters = partialmethod(_give, "find_unused_parameters")
    average = partialmethod(_give, "average")

    def build(self) -> DistributedDataParallel:
        """The wrapped model; all ranks build."""
        return DistributedDataParallel(self._module, **self._settings)
