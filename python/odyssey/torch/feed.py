"""How the batches of torch's and odyssey's loaders come to the steps of a torch module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .. import callbacks
from .. import data as datasets
from ..capture import Capture
from ..checkpoints import Mode
from ..train import (
    PROCESS_GENERATORS,
    BatchFeed,
    BatchSharing,
    ProcessGenerator,
    batch_of,
    own_steps,
)
from .data import DataLoader, batches, begin_epoch
from .generators import Orders
from .shard_draws import generator
from .shards import Shards, Share
from .worker_seeds import keeps_workers


class ModuleFeed(BatchFeed):
    """The batches of a fit() and of evaluations.

    Attributes:
        orders: the states of the generators that the loaders of the last fit() draw from.
    """

    process_generators = {
        **PROCESS_GENERATORS,
        "torch": ProcessGenerator(
            lambda: generator.get_state().numpy().copy(),
            lambda state: generator.set_state(torch.from_numpy(np.array(state))),
        ),
    }

    def __init__(
        self,
        mode: Mode,
        accumulation_steps: int,
        *,
        shards: Shards,
        sharing: BatchSharing,
        seed: int,
        capture: Capture,
    ) -> None:
        super().__init__(mode, accumulation_steps, seed, capture)
        self.shards = shards
        self.sharing = sharing
        self.orders = Orders()

    def take_size(self, loader: Any) -> None:
        """Takes the shard size of a loader that was given one, unless the trainer has another:
        then ConfigError.
        """
        if isinstance(loader, DataLoader) and loader.fixed_size:
            loader.follow(self.sharing.shard_size or loader.shard_size)
            self.sharing.shard_size = loader.shard_size

    def compare(self, loader: Any, val_loader: Any, context: callbacks.Context) -> Any:
        self.take_size(loader)
        self.take_size(val_loader)
        compared_data = super().compare(loader, val_loader, context)
        if not isinstance(loader, datasets.DataLoader):
            # the default shard size goes by the samples of a step
            context.batch_size = (context.batch_size or 0) * self.accumulation_steps
        self.orders = Orders(*(None if own_steps(one) else one for one in (loader, val_loader)))
        return compared_data

    def expect_sizes(self, sizes: set[int]) -> None:
        self.shards.coming_sizes = sizes

    def batches(self, loader: Any, epoch: int) -> Iterator[datasets.Batch]:
        started = self.started(loader, lambda: self.begin_epoch(loader, epoch))
        return batches(loader, epoch, self.seed, self.accumulation_steps, started=started)

    def begin_epoch(self, loader: Any, epoch: int) -> None:
        self.orders.begin(epoch)
        super().begin_epoch(loader, epoch)
        begin_epoch(loader, epoch, self.seed)

    def as_batch(self, item: Any) -> datasets.Batch:
        if isinstance(item, datasets.Batch):
            return item
        items = batch_of(item, (tuple, list, dict))
        return next(batches(items, epoch=0, seed=self.seed, steps=1, started=items))

    def order_states(self) -> dict[str, np.ndarray]:
        return self.orders.now()

    def put_order_states(self, states: dict[str, np.ndarray]) -> None:
        self.orders.put(states)

    def advice(self, loader: Any) -> str:
        if not keeps_workers(loader):
            return ""
        return (
            "; the loader's persistent workers keep what the data set changes in them from epoch "
            "to epoch, so try persistent_workers=False"
        )

    def part(self, training: bool) -> Callable[[int], tuple[int, int]] | None:
        return Share(self.shards, training)

    def loader_of(self, data: Any) -> Any:
        if isinstance(data, torch.utils.data.Dataset):
            return DataLoader(data, batch_size=256, comm=self.comm)
        return super().loader_of(data)

    def evaluated(
        self, loader: Any, context: callbacks.Context, targets: bool = True
    ) -> Iterator[datasets.Batch]:
        """The batches of a data set or loader, whose shards are decided; of odyssey's loaders
        this rank reads its samples alone.

        Args:
            context: of the training.
            targets: the batches have targets.
        """
        loader = self.loader_of(loader)
        if own_steps(loader) and len(loader.dataset):
            self.sharing.share_out(min(loader.batch_size, len(loader.dataset)), context.batch_size)
            yield from loader.steps(part=self.part(training=False))
            return
        epoch = context.cursor.loader_epoch if loader is context.loader else 0
        for batch in batches(loader, epoch, self.seed, 1, targets):
            self.sharing.share_out(len(batch.indices), context.batch_size)
            yield batch
