"""Base of trainers whose workers share out the shards of a batch: the engine's and torch
modules'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import data as datasets
from ..callbacks import Context
from ..checkpoints.trainable import Evaluation, Mode, Tally
from ..comm import Communicator
from ..core import setting_versions
from ..data.nested import Form
from ..errors import ConfigError
from ..parallel.plan import busy, default_shard_size, idle, shard_count
from ..settings.declarations import Training, declared
from . import agreement
from .fit import Trainer
from .numerics import NonFinite


class Sharing(Trainer):
    """A trainer whose workers share out the shards of a batch."""

    settings: Training
    # what an update reads, as it is now: ranks must have it alike
    standing: Callable[[], dict[str, Any]]
    # compares the weights that several ranks have; a collective call
    check_replicas: Callable[[], None]
    _train: Any  # what runs the shards
    _counted_idle = _looked_at_route = False
    _clip_norm: float | None = None

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of the mean gradient; may be set in the middle of a training.

        None: no limit.
        """
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, norm: float | None) -> None:
        if norm != self._clip_norm:
            setting_versions.updates.rise()
        self._clip_norm = norm

    @property
    def shard_size(self) -> int | None:
        """Samples per shard of a training step; None as long as neither it nor the global batch
        is known.
        """
        return self._train.shard_size

    @shard_size.setter
    def shard_size(self, size: int | None) -> None:
        self._train.shard_size = size

    def _set(self, settings: Training, comm: Communicator, progress: Any) -> None:
        """Sets what is alike in every trainer, from its settings."""
        self.settings = settings
        self.comm = comm
        self.mode = Mode(self)
        self.clip_norm = settings.clip_norm
        self.seed = settings.seed
        self.precision = settings.precision
        self.accumulation_steps = settings.accumulation_steps
        self.check_every = settings.check_every
        self.numerics = NonFinite(settings.nonfinite)
        self.progress = progress if comm.rank == 0 else None
        self._watch = agreement.Watch(comm, settings.check_every)
        self.saved_in: set[str] = set()  # directories of checkpoints of this trainer's fit()s
        self.data_configuration = {}
        self.context = Context(self, callbacks=self.callbacks)
        self.grad_norm: float | None = None  # of the last step, if clip_norm is given

    def check_alike(self) -> None:
        agreement.standing(self.comm, f"step {self.steps}", self.standing())
        self.check_replicas()

    def put_back(self, snapshot: Any, name: str) -> None:
        self._silent = True
        try:
            self.load(snapshot, name)
        finally:
            self._silent = False

    def _compare_settings(self, extra_settings: dict[str, Any]) -> None:
        """Raises ConfigError, on all ranks, if they differ in settings or in these; a collective
        call.
        """
        common_settings = {
            name: getattr(self.settings, name)
            for name, s in declared(Training).items()
            if s.same_on_ranks
        }
        agreement.compare(self.comm, {**common_settings, **extra_settings})

    def _end_epoch(self) -> None:
        self._watch.end()
        self.expect(None, "", False)  # the checkpoint was made after the epoch's last step
        if self.mode.together:
            self.stays()

    def _rows(self, form: Form | None) -> int | None:
        """Rows that a sample takes in kernels, alike on all ranks; None: the form of a sample is
        not known yet.
        """
        return 1

    def _share_out(self, samples: int, form: Form | None = None) -> None:
        """Once the global batch is known: decides its shards, and says if there are too few for
        all workers.
        """
        if self.shard_size is None:
            rows = self._rows(form)
            if rows is None:
                return  # the first batch says it
            self.shard_size = default_shard_size(self.context.batch_size or samples, rows)
        if self._counted_idle:
            return
        self._counted_idle = True
        sharing, parts = self.mode.shared_out(samples)
        without = sum(idle(sharing, part, self.shard_size) for part in parts)
        if without:
            workers = sharing * len(parts)
            shards = sum(shard_count(part, self.shard_size) for part in parts)
            if sharing > max(64, 4 * shards):  # of each process; more likely a slip than a wish
                raise ConfigError(
                    f"[train] num_gpus is {sharing}, and a batch of {samples} samples has "
                    f"{shards} shards of at most "
                    f"{self.shard_size}: more workers have no work; give at most {shards}, or a "
                    "smaller shard_size"
                ).on_all_ranks()
            self.say(
                f"{workers} workers but {shards} shard{'s' * (shards > 1)} (global batch "
                f"{samples}, shard size "
                f"{self.shard_size}): {without} {'is' if without == 1 else 'are'} idle; "
                + busy(sharing * len(parts), sharing, min(parts))
            )

    def _look_at_route(self, reductions: Sequence[Any], samples: int) -> None:
        """After the first step: says if other shards or places of ranks would send much less
        between machines.
        """
        if self._looked_at_route:
            return
        self._looked_at_route = True
        reduction = next(
            (r for r in reductions if r.comm.size == self.comm.size and hasattr(r, "advice")), None
        )
        if reduction is not None and (line := reduction.advice(samples, self.shard_size)):
            self.say(line)

    def _move_shards(self, samples: int) -> None:
        """A step of so many samples begins: with `rebalance`, shards may move to other ranks."""
        balance = self.layout.balance
        if balance is not None and (
            line := balance.before_step(shard_count(samples, self.shard_size))
        ):
            self.say(f"{line} (step {self.steps + 1})")

    def shards_moved(self, samples: int) -> tuple[int, ...]:
        balance = self.layout.balance
        return balance.counts(shard_count(samples, self.shard_size)) if balance and samples else ()

    def _evaluation(
        self,
        batches: Iterable[datasets.Batch],
        sums: Callable[[datasets.Batch, int], tuple[float, float, dict[str, float], float]],
        compared_data: datasets.ArrayDataset | None = None,
    ) -> Evaluation:
        """Means over some batches. sums: (loss, correct, metrics, samples) of a batch.
        compared_data: the data of the batches, or None.
        """
        total = Tally()
        watch = agreement.Watch(self.comm, self.check_every, "validation batch")
        watch.begin(compared_data, None if compared_data is not None else self._watch.tell)
        for number, batch in enumerate(batches):
            watch.batch(batch, number)
            total.add(*sums(batch, number))
        watch.end()
        if not total.counted:
            raise ConfigError("[evaluate] the data set is empty; give at least one sample")
        means = total.means()
        return Evaluation(means["loss"], means.get("accuracy"), int(total.counted), means)
