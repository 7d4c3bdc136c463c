"""Global batches for torch, from odyssey's `DataLoader` and from any other loader.

Each rank reads its own fixed shards of the batches of a `DataLoader`. The order of the samples is
that of odyssey's own loaders. Random transforms, for example those of torchvision.transforms.v2,
draw the same numbers for a sample on each rank and worker (seeded.py). Each shard is collated
separately, so padding doesn't depend on the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data

from .. import comm as communication
from .. import data as own
from ..capture import edges_of_object, register_edges
from ..comm import Communicator
from ..core import random_scopes
from ..data import ArrayDataset, Batch, Part, Pieces, SampleTrial, leaves, mapped
from ..errors import ConfigError, DataError, check_integer
from ..parallel import plan
from ..train import check_batches, check_sampler
from .device import Device, default_shard_size, host_array
from .seeded import (
    GENERATOR_OF_WORKER,
    SamplesOfShard,
    Seeded,
    SeededCollate,
    TensorRows,
    WorkerStart,
)
from .shard_draws import generator
from .shards import Share
from .worker_seeds import seed_kept_workers

# torch keeps a running iterator and its workers in it, which no checkpoint holds
_UNCAPTURED = ("_iterator", "_IterableDataset_len_called")
register_edges(
    torch.utils.data.DataLoader, lambda loader, path: edges_of_object(loader, path, _UNCAPTURED)
)

ORDER = 1 << 62  # seeds the order of an epoch, instead of a step's number
_NONE = np.empty(0, np.float32)


def tree_of(value: Any) -> Any:
    """Returns the result of a collate function as a tree (data/nested.py): lists become tuples, and
    all mappings become dicts.
    """
    if isinstance(value, Mapping):
        return {name: tree_of(part) for name, part in value.items()}
    return tuple(map(tree_of, value)) if isinstance(value, (tuple, list)) else value


def _view_leaf(leaf: Any) -> np.ndarray | torch.Tensor:
    """Returns the memory of a tensor, or of an array or number, as an array.

    NumPy has no bfloat16, so that becomes float32. A tensor on a device stays a tensor there.
    """
    is_tensor = isinstance(leaf, torch.Tensor)
    tensor = leaf.detach() if is_tensor else torch.from_numpy(np.array(leaf))
    tensor = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _bring_to_host(leaf: np.ndarray | torch.Tensor) -> np.ndarray:
    return host_array(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else np.array(leaf)


class Samples(ArrayDataset):
    """The samples of one batch of tensors, of any dtype that NumPy has.

    Tensors on a device stay there. The host copies them if it looks at their numbers, for example
    for the fingerprint of a batch.
    """

    normalised = False

    def __init__(self, inputs: Any, targets: Any, name: str) -> None:
        try:
            x, y = (mapped(_view_leaf, tree_of(tree)) for tree in (inputs, targets))
        except TypeError as problem:
            raise DataError(
                f"{name}: {problem}; tensors or arrays, or tuples or dicts of them, are allowed"
            ) from None
        counts = [len(a) if a.ndim else 0 for a in (*leaves(x), *leaves(y))]
        if not counts or counts[0] < 1 or len(set(counts)) > 1:
            raise DataError(
                f"{name}: its tensors have {counts} samples; the same number, at least one, is "
                "needed"
            )
        self._set(samples=counts[0], stored=(x, y), name=name)

    def _set(self, **attributes: Any) -> None:
        """Sets attributes, which assignments to a frozen dataclass can't."""
        self.__dict__.update(classes=0, scale=_NONE, shift=_NONE, **attributes)

    @functools.cached_property
    def images(self) -> Any:
        x, _ = self.__dict__["stored"]
        return mapped(_bring_to_host, x)

    @functools.cached_property
    def labels(self) -> Any:
        _, y = self.__dict__["stored"]
        return mapped(_bring_to_host, y)

    def __len__(self) -> int:
        return self.__dict__["samples"]

    @classmethod
    def _built(cls, x: Any, y: Any, *, name: str, **about: Any) -> Samples:
        return cls(x, y, name)

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Returns inputs and targets at `indices` (B,), which follow each other, without copies."""
        return self.rows(slice(int(indices[0]), int(indices[-1]) + 1))

    def cut(self, lo: int, hi: int) -> tuple[Any, Any]:
        """Returns inputs and targets lo to hi - 1, as arrays or as tensors on their device."""
        x, y = self.__dict__["stored"]
        return mapped(lambda a: a[lo:hi], x), mapped(lambda a: a[lo:hi], y)


class Shared(Samples):
    """A global batch of which each rank has its own shards, so ranks compare only its length.

    Args:
        samples: of the global batch.
        shard_size: samples per shard; the last may have fewer.
        shards: this rank's shards by number, as the collate function returned them.
        read_shard: reads another shard, by its number and the shard size.
        loader: the loader that the batch comes from.
        name: for messages.
    """

    def __init__(
        self,
        samples: int,
        shard_size: int,
        shards: dict[int, Any],
        read_shard: Callable[[int, int], Any],
        loader: DataLoader,
        name: str,
    ) -> None:
        stored = np.zeros((samples, 1), np.uint8), ()
        self._set(samples=samples, stored=stored, name=name)
        self.__dict__.update(
            shard_size=shard_size, shards=shards, read_shard=read_shard, loader=loader
        )

    def follow(self, shard_size: int) -> None:
        """Uses another shard size, for this batch and the next ones of the loader.

        Shards that were read with the old size are read again.

        Raises ConfigError: the loader was created with the old size.
        """
        if shard_size == self.shard_size:
            return
        self.loader.follow(shard_size)
        self.__dict__.update(shard_size=shard_size, shards={})

    def shard(self, lo: int, hi: int) -> Any:
        """Returns the shard of samples lo to hi - 1.

        A loop around `train_step()` doesn't tell the loader which shards the trainer gives to this
        rank. With `zero=2` these are others than the loader has read, so they are read now.

        Raises ConfigError: the loader has another shard size.
        """
        size = self.shard_size
        if lo % size or hi - lo != min(size, len(self) - lo):
            raise _shard_size_error(size, hi - lo)
        shard = lo // size
        if shard not in self.shards:
            self.shards[shard] = self.read_shard(shard, size)
        return self.shards[shard]

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Raises ConfigError, because other ranks have the other samples."""
        raise ConfigError(
            "[torch] this is a global batch, shared out over ranks: `for x, y in net.shards(batch)`"
        )


def _shard_size_error(loader_size: int, module_size: int) -> ConfigError:
    return ConfigError(
        f"[torch] the DataLoader's shard_size is {loader_size}, and the one of the "
        f"DistributedTrainer or DistributedDataParallel is {module_size}; set both the same, or "
        "only one"
    )


class _Order:
    """The sampler of torch's loader. It yields for each shard the (epoch, index) of its samples.

    next_shards: the shards that the next iteration yields.
    """

    next_shards: Iterator[list[tuple[int, int]]] = iter(())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.next_shards


class DataLoader(own.DataLoader):
    """Global batches of a map-style data set, the same on any number of ranks; a rank reads its
    shards alone.

    Args:
        dataset: with `len` and `[index]`.
        batch_size: samples of a global batch, over all ranks.
        shuffle: a new order each epoch; False keeps 0, 1, ...
        seed: of the order and of the samples' generators.
        shard_size: samples per shard; None: that of the trainer it is given to, else the default of
            a `DistributedTrainer` on CPUs for this batch size.
        drop_last: leave out a last batch that is smaller.
        num_workers: processes of this rank that read; 0 reads in the loop.
        collate_fn, options: as torch.utils.data.DataLoader has them (pin_memory, timeout,
        prefetch_factor, ...).

    Raises ConfigError: an argument is out of range, or belongs to the ranks' sharing (sampler,
    batch_sampler).
    """

    shares_samples = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        *,
        shard_size: int | None = None,
        drop_last: bool = False,
        comm: Communicator | None = None,
        **options: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler"):
            if options.get(name) is not None:
                raise ConfigError(
                    f"[torch] DataLoader({name}=...): the loader shares samples out itself; leave "
                    "it out, or give fit() a torch.utils.data.DataLoader with it"
                )
        super().__init__(dataset, batch_size, shuffle, seed=seed, drop_last=drop_last, prefetch=0)
        default = default_shard_size(self.batch_size)
        self.fixed_size = shard_size is not None
        self.shard_size = check_integer(
            "shard_size", default if shard_size is None else shard_size, 1
        )
        self.comm = communication.world() if comm is None else comm
        self._shard_order = _Order()
        self._row_reader = TensorRows(dataset) if TensorRows.fit(dataset, options) else None
        # With a generator of its own: its base seed would be drawn from the global one, at every
        # epoch.
        options = {"generator": torch.Generator(), **options}
        if options.get("num_workers"):
            options["worker_init_fn"] = WorkerStart(options.get("worker_init_fn"))
        samples: Any = Seeded(dataset, self.seed)
        self._loader = torch.utils.data.DataLoader(
            samples, batch_sampler=self._shard_order, **options
        )  # type: ignore[arg-type]
        if options.get("collate_fn") is not None:
            self._loader.collate_fn = SeededCollate(self._loader.collate_fn, self.seed)

    @property
    def collate_fn(self) -> Any:
        """The function that makes the samples of a shard one batch."""
        function = self._loader.collate_fn
        return function.function if isinstance(function, SeededCollate) else function

    def trial(self) -> ShardTrial:
        """Returns what reads samples and a batch of them, for a check before an iteration."""
        return ShardTrial(self)

    @property
    def reads_natively(self) -> bool:
        """False, because PyTorch's loader reads any data set."""
        return False

    def follow(self, shard_size: int) -> None:
        """Uses the shard size of a trainer or net, from the next batch on.

        Raises ConfigError: this loader was created with another one.
        """
        if self.fixed_size and shard_size != self.shard_size:
            raise _shard_size_error(self.shard_size, shard_size)
        self.shard_size = shard_size

    def _find_local_shards(self, part: Part | None, samples: int) -> range:
        """Returns the numbers of the shards that this rank reads of a batch.

        part: the share of a trainer; None for equal shares.
        """
        if isinstance(part, Share):
            return part.shards.local_shards(samples, part.train)
        shards = plan.shard_count(samples, self.shard_size)
        first, stop = plan.share(shards, self.comm.size, self.comm.rank)
        return range(first, stop)

    def _read_batches(
        self, cut: Pieces, epoch: int, part: Part | None, stopped: Callable[[], bool]
    ) -> Iterator[Batch]:
        """Yields batches with this rank's shards.

        Torch's loader gets the shards of the whole epoch at once, so that its workers read ahead.
        `cut` gives (number, indices of the samples) of each batch.
        """
        if isinstance(part, Share) and part.shards.shard_size is not None:
            self.follow(part.shards.shard_size)
        pieces = list(cut)
        size = self.shard_size
        runs = [self._find_local_shards(part, len(indices)) for _, indices in pieces]
        shard_indices = (
            indices[shard * size : (shard + 1) * size]
            for (_, indices), run in zip(pieces, runs, strict=True)
            for shard in run
        )
        self._shard_order.next_shards = (
            [(epoch, index) for index in indices.tolist()] for indices in shard_indices
        )
        if hasattr(self.dataset, "set_epoch"):
            # Workers that were kept from the last epoch would not know the new one.
            self._loader._iterator = None
        if self._row_reader is None:
            shards: Iterator[Any] = iter(self._loader)
        else:
            shards = map(self._row_reader, self._shard_order.next_shards)
        for position, ((number, indices), run) in enumerate(zip(pieces, runs, strict=True)):
            samples = len(indices)
            if self.shard_size != size:  # a net has set another one for the rest of the epoch
                yield from self._read_batches(iter(pieces[position:]), epoch, part, stopped)
                return

            def read_shard(shard: int, size: int, indices: np.ndarray = indices) -> Any:
                return self._read_shard(epoch, indices[shard * size : (shard + 1) * size])

            try:
                local_shards = {shard: next(shards) for shard in run}
            except DataError as problem:
                # PyTorch puts the traceback of the worker before the message.
                if GENERATOR_OF_WORKER in str(problem):
                    raise DataError(GENERATOR_OF_WORKER) from None
                raise
            name = f"batch {number} of epoch {epoch}"
            data = Shared(samples, size, local_shards, read_shard, self, name)
            yield Batch(data, np.arange(samples), epoch, number, indices)

    def _read_shard(self, epoch: int, indices: np.ndarray) -> Any:
        """Reads the samples of a shard in this process, and collates them."""
        keys = [(epoch, index) for index in indices.tolist()]
        if self._row_reader is not None:
            return self._row_reader(keys)
        return self._loader.collate_fn(self._loader.dataset.__getitems__(keys))


class ShardTrial(SampleTrial):
    """Reads samples of a `DataLoader`, and collates a shard of them, for a check."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader._reader)
        self._loader = loader
        self._samples = Seeded(loader.dataset, loader.seed)

    @property
    def draws(self) -> bool:
        return bool(self._samples.scopes.draws)

    def read(self, epoch: int, number: int) -> Any:
        (sample,) = self._samples.__getitems__([(epoch, number)])
        return sample

    def collate(self, samples: list[Any], epoch: int, number: int) -> Any:
        """Returns what the collate function makes of samples; None for the one of PyTorch, which
        can't differ.
        """
        function = self._loader._loader.collate_fn
        if not isinstance(function, SeededCollate):
            return None
        shard = SamplesOfShard(samples[: self._loader.shard_size])
        shard.key = epoch, number
        return function(shard)


def begin_epoch(loader: Any, epoch: int, seed: int) -> None:
    """Prepares a loader for an epoch.

    The generators of torch, NumPy and Python are seeded by the epoch. So a loader that draws from
    them has the same order on all ranks, and again when a training run resumes within the epoch.
    Workers that are kept from epoch to epoch are seeded as new workers are.
    """
    with random_scopes.hold_generators():
        random_scopes.seed_all(random_scopes.number_of(seed, "epoch", epoch))
        generator.manual_seed(random_scopes.seed_of(seed, ORDER, epoch))
    # odyssey's own loaders count epochs themselves; others are told.
    if not hasattr(loader, "start_at"):
        for source in (loader, getattr(loader, "sampler", None)):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
    seed_kept_workers(loader)


def batches(
    loader: Any,
    epoch: int,
    seed: int,
    steps: int,
    targets: bool = True,
    started: Iterable[Any] | None = None,
) -> Iterator[Batch]:
    """Yields the batches of an epoch of any loader; pairs of tensors or arrays become batches.

    Args:
        loader: yields batches of odyssey's, or pairs (inputs, targets) or dicts of tensors.
        epoch: its number.
        seed: of the order.
        steps: batches that the caller joins for one step. Of more than one, tensors are copied,
            because a loader may fill the same memory again.
        targets: False if batches may consist of inputs only.
        started: an iterable over the loader that prepares the epoch; None: `begin_epoch` does.

    Raises:
        ConfigError: A batch is of another kind.
    """
    check_batches(loader)
    check_sampler(loader)
    if started is None:
        begin_epoch(loader, epoch, seed)
        started = loader
    for index, item in enumerate(_look_ahead(loader, started)):
        if isinstance(item, Batch):
            yield item
            continue
        inputs, target_values = _split_batch(item, targets)
        if steps > 1:
            inputs, target_values = (
                mapped(_copy_leaf, tree_of(tree)) for tree in (inputs, target_values)
            )
        data = Samples(inputs, target_values, f"batch {index} of epoch {epoch}")
        yield Batch(data, np.arange(len(data)), epoch, index)


def _look_ahead(loader: Any, started: Iterable[Any]) -> Iterator[Any]:
    """Yields the items of a loader, and exhausts the loader before it yields the last item.

    At their end, samplers such as RandomSampler draw random numbers again. So a checkpoint of the
    last step holds the generator states with which the next epoch starts.
    """
    items = iter(started)
    length = 0
    with contextlib.suppress(TypeError, NotImplementedError):  # a stream has no length
        length = len(loader)
    end = object()
    for number in itertools.count(1):
        try:
            item = next(items)
        except StopIteration:
            return
        following = next(items, end) if number == length else end
        yield item
        if following is not end:  # the loader is longer than its length
            yield following


def _split_batch(item: Any, targets: bool) -> tuple[Any, Any]:
    """Returns the inputs and targets of a batch (x, y).

    A dict holds both: it becomes the inputs, and the targets are (). If targets aren't needed, x
    and (x,) are batches too, and the targets are ().

    Raises ConfigError: the batch has another form.
    """
    if isinstance(item, Mapping):
        return item, ()
    is_sequence = isinstance(item, (tuple, list))
    if not targets:
        return (item[0] if is_sequence and len(item) in (1, 2) else item), ()
    if not is_sequence or len(item) != 2:
        kind = f"{type(item).__name__} of {len(item)}" if is_sequence else type(item).__name__
        raise ConfigError(
            f"[train] the loader gave a {kind}; give batches of (x, y) or dicts for module(**batch)"
        )
    return item[0], item[1]


def part(
    batch: Batch, lo: int, hi: int, targets: bool = True, device: Device | None = None
) -> tuple[Any, Any]:
    """Returns the inputs and targets of samples lo to hi - 1 of a batch, as tensors.

    Integer targets of odyssey's own data sets become int64. Tensors on the device are copies
    because a forward pass may write into its inputs, and because the last bits of a product of
    matrices may depend on where in a cache line a matrix starts.

    targets: False if they aren't needed. device: the device that they are needed on; None for the
        CPU. If it isn't the CPU, tensors of the CPU stay there, and are copied to it next.
    """
    is_host = device is None or device.is_host
    place = torch.device("cpu") if device is None else device.torch_device

    def copy(leaf: Any) -> Any:
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
        if not isinstance(tensor, torch.Tensor) or (tensor.device.type == "cpu" and not is_host):
            return tensor
        return tensor.clone() if tensor.device == place else tensor.to(place)

    if isinstance(batch.dataset, Shared):
        return mapped(copy, tree_of(_split_batch(batch.dataset.shard(lo, hi), targets)))
    indices = batch.indices[lo:hi]
    if isinstance(batch.dataset, Samples):
        return mapped(copy, batch.dataset.cut(int(indices[0]), int(indices[-1]) + 1))
    x, y = batch.dataset.gather(indices)
    y = mapped(lambda a: a.astype(np.int64) if a.dtype == np.int32 else a, y)
    return mapped(copy, (x, y))
