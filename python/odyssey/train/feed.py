"""How the batches of a loader come to the steps of a training."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import data as datasets
from ..callbacks import Context
from ..capture import Capture
from ..checkpoints.trainable import Mode
from ..core import random_scopes
from ..core.tensor import layout_of
from ..engine.engine import Engine
from ..errors import ConfigError
from ..parallel.mesh import Mesh
from . import agreement, first_samples, resume, validation
from .batches import (
    batch_of,
    batches_of,
    check_batches,
    check_sampler,
    cut,
    in_batches,
    joined,
    last_step_samples,
    own_steps,
    shares_samples,
    step_sizes,
)
from .learning_rate import LearningRate
from .loader_state import PROCESS_GENERATORS, LoaderState, ProcessGenerator, is_stateful

if TYPE_CHECKING:
    from ..checkpoints import Snapshot

SAMPLER_ROOTS = ("sampler", "batch sampler")


class BatchFeed:
    """Compares the data of a fit() on all ranks, and gives the batches of its epochs.

    Args:
        mode: how ranks take steps; has their communicator.
        accumulation_steps: batches of a loader that make one step.
        seed: of the random numbers that loaders draw from the generators of the process.
        capture: of what samplers and loaders remember.

    Attributes:
        configuration: of the data of the last fit(), to compare with a checkpoint's.
        loader_state: the position of the last fit()'s loader, if it has a `state_dict()`.
        is_reading: True while an epoch of the training's loader is read.
        process_generators: random number generators of the process that a loader may draw from.
    """

    process_generators: dict[str, ProcessGenerator] = PROCESS_GENERATORS

    def __init__(self, mode: Mode, accumulation_steps: int, seed: int, capture: Capture) -> None:
        self.seed = seed
        self.is_reading = False
        self.capture = capture
        self.mode = mode
        self.comm = mode.comm
        self.accumulation_steps = accumulation_steps
        self.configuration: dict[str, Any] = {}
        self.loader_state: LoaderState | None = None
        self._val_loader: Any = None  # the validation data of the last fit()
        # loaders and data sets whose samples were checked, and whether these draw, by id
        self._checked: dict[int, tuple[weakref.ref[Any], bool | None]] = {}

    # --- what depends on the kind of trainer ---

    def check_loader(self, loader: datasets.DataLoader, size: int, steps: int | None) -> None:
        """Raises ConfigError for data that cannot be shared out; `size`: samples of a step."""

    def expect_sizes(self, sizes: set[int]) -> None:
        """Receives the numbers of samples of the steps that will be taken, as far as known."""

    def ahead(self, batches: Iterator[datasets.Batch]) -> Iterator[datasets.Batch]:
        """Returns the batches, the next one read while a step runs where that helps."""
        return batches

    def part(self, training: bool) -> Callable[[int], tuple[int, int]] | None:
        """Returns which samples of a batch this rank needs, as DataLoader.steps() asks for it;
        None: all.
        """
        return None

    def batches(self, loader: Any, epoch: int) -> Iterable[datasets.Batch]:
        """The batches of an epoch, from its first or from where the loader was told to start."""

        return batches_of(self.started(loader, lambda: self.begin_epoch(loader, epoch)))

    def as_batch(self, item: Any) -> datasets.Batch:
        """Returns what train_step() got as a batch: a batch stays, a pair of arrays becomes one.

        Raises ConfigError: it is neither.
        """
        if isinstance(item, datasets.Batch):
            return item
        return next(iter(batches_of(batch_of(item))))

    def order_states(self) -> dict[str, np.ndarray]:
        """Returns the states of the generators that the loader holds, by their places."""
        return {}

    def put_order_states(self, states: dict[str, np.ndarray]) -> None:
        """Sets the states that `order_states` returned."""

    def advice(self, loader: Any) -> str:
        """Returns what may be the reason, and a remedy, if a batch is not the same when it is read
        again; "" if nothing is known.
        """
        return ""

    # --- what is the same in all ---

    def begin_epoch(self, loader: Any, epoch: int) -> None:
        """Prepares an epoch of a loader that isn't told where to start, right before its iterator
        is created.
        """
        if self.loader_state is None:
            self.capture.begin_epoch(epoch)
        self._seed_order(epoch)

    def _seed_order(self, epoch: int) -> None:
        """Seeds the generators of the process for a sampler or loader that draws an epoch."""
        random_scopes.seed_all(random_scopes.number_of(self.seed, "epoch", epoch))

    def started(self, loader: Any, begin: Callable[[], None]) -> Any:
        """Returns an iterable over a loader, which keeps the loader's position if it has one.

        begin: prepares an epoch right before the iterator is created.
        """
        return _Started(loader, begin, self._state_of(loader))

    def _state_of(self, loader: Any) -> LoaderState | None:
        """Returns the position of a loader that is kept; None for other loaders."""
        state = self.loader_state
        return state if state is not None and state.loader is loader and state.active else None

    def compare(self, loader: Any, val_loader: Any, context: Context) -> Any:
        """Sees to it that all ranks have the same data, and notes the sizes in the context.

        Returns the data set whose bytes were compared, or None. Raises ConfigError or DataError.
        """
        size = getattr(loader, "batch_size", 0)
        compared_data = None
        if isinstance(loader, datasets.DataLoader):
            check_sampler(loader)
            size *= self.accumulation_steps // context.pieces
            self.check_loader(loader, size, context.limit)
            in_arrays = isinstance(loader.dataset, datasets.ArrayDataset)
            loader_settings = {
                "kind of data set": (in_arrays, loader.in_memory),
                "number of samples": len(loader.dataset),
                "batch size": size,
                "data order": (loader.seed, loader.shuffle, len(loader)),
            }
            agreement.compare(self.comm, loader_settings)
            if in_arrays:
                agreement.data_set(self.comm, loader.dataset)
                compared_data = loader.dataset if loader.in_memory else None
            self.configuration = resume.data_configuration(loader, size)
        check_batches(loader, "training data")
        if self.mode.together and context.pieces == 1:
            # A batch size of 0: it isn't known, or torch's loader has a sampler of batches.
            step = (getattr(loader, "batch_size", 0) or 0) * self.accumulation_steps
            self.expect_sizes(step_sizes(loader, step, self.accumulation_steps, context.limit))
        keeps_state = is_stateful(loader) and not self.mode.own_loop
        self.loader_state = LoaderState(loader, self) if keeps_state else None
        if val_loader is not None:
            check_batches(in_batches(val_loader), "validation data")
        has_sizes = val_loader is not None and self.mode.together
        samples, batches = validation.sizes_of(val_loader) if has_sizes else (None, None)
        plan = {
            "length": (context.epochs, context.limit),
            "validation set": None if val_loader is None else type(val_loader).__name__,
            "number of samples of the validation set": samples,
            "number of batches of the validation set": batches,
            "callbacks": list(context.named()),
        }
        agreement.compare(self.comm, plan)
        self._val_loader = val_loader
        context.batch_size = size
        try:
            context.steps_per_epoch = -(-len(loader) // self.accumulation_steps)
        except TypeError:  # a generator, or torch's loader of an IterableDataset
            context.steps_per_epoch = 0
        return compared_data

    def describe_validation(self, loader: Any) -> dict[str, Any] | None:
        """Returns what identifies the validation data of this fit() (validation.py), on rank 0.

        None on other ranks, without validation data, and if they are those of the training.

        loader: of the training.
        """
        if self._val_loader is None or self._val_loader is loader:
            return None
        val_loader = self.loader_of(self._val_loader)
        return validation.describe(val_loader) if self.comm.rank == 0 else None

    def loader_of(self, data: Any) -> Any:
        """Returns what is evaluated: a data set gets a loader, and a loader stays."""
        loader = in_batches(data)
        reference, draws = self._checked.get(id(data), (None, None))
        if loader is not data and reference is not None and reference() is data:
            loader.draws = draws
        return loader

    def check_samples(
        self, data: Any, name: str, context: Context, *, begins: bool = False
    ) -> None:
        """Checks the first samples of a loader or data set (first_samples.py); a collective call.

        It does nothing if it has checked them before, or if the training reads samples now.

        Args:
            data: what `fit()`, `evaluate()` or `predict()` received.
            name: of the data in messages, such as "training".
            begins: a fit() begins, so they are checked again.
        """
        reference, _ = self._checked.get(id(data), (None, None))
        is_known = reference is not None and reference() is data
        if self.is_reading or (is_known and not begins):
            return
        loader = self.loader_of(data)
        if not first_samples.is_checked(loader):
            return
        is_of_training = loader is context.loader
        epoch = context.cursor.loader_epoch if is_of_training else loader.next_epoch
        first_samples.check(
            self.comm,
            loader,
            name,
            epoch,
            together=self.mode.together,
            tell=context.trainer.say if context.saving.nondeterministic else None,
        )
        with contextlib.suppress(TypeError):  # a class with __slots__
            self._checked[id(data)] = weakref.ref(data), loader.draws

    def hash_samples(self, loader: Any, batch: datasets.Batch, epoch: int) -> dict[str, str]:
        """Returns hashes of the first samples of a batch by their numbers, for a checkpoint.

        They are read again. The dict is empty if the fingerprint of the batch includes them, or if
        they can't be read.
        """
        if self.comm.in_threads or not shares_samples(loader):
            return {}
        numbers = batch.numbers[: first_samples.COUNT].tolist()
        hashes = first_samples.hashes_of(loader, numbers, epoch)
        return dict(zip(map(str, numbers), hashes or (), strict=False))

    def find_changed_sample(self, loader: Any, saved: dict[str, str], epoch: int) -> int:
        """Returns the number of the first sample whose hash isn't that of a checkpoint; -1 if all
        are equal, or if they can't be compared.
        """
        numbers = list(map(int, saved))
        hashes = first_samples.hashes_of(loader, numbers, epoch)
        pairs = zip(numbers, hashes or (), strict=False)
        return next((number for number, one in pairs if saved[str(number)] != one), -1)

    @contextlib.contextmanager
    def without_trace(self, loader: Any, context: Context) -> Iterator[None]:
        """Restores, after the block, what an evaluation over `loader` changes of the training.

        These are the states of random number generators, the position of the loader, and what the
        training's loader, sampler and data set remember.

        Raises ConfigError: in the middle of an epoch, an iteration over this loader would end that
        of the training.
        """
        is_of_training = loader is context.loader
        if is_of_training and self.is_reading:
            self._check_second_iteration(loader)
        names = ("dataset", "sampler", "batch_sampler")
        pairs = [(getattr(loader, n, None), getattr(context.loader, n, None)) for n in names]
        pairs.append((loader, getattr(context.loader, "dataset", None)))
        is_shared = is_of_training or any(a is not None and a is b for a, b in pairs)
        with contextlib.ExitStack() as stack:
            if not self.comm.in_threads:
                stack.enter_context(random_scopes.scope(self.seed, "evaluate"))
            if is_shared:
                stack.enter_context(self.capture.restored())
                stack.callback(self.put_order_states, self.order_states())
            if isinstance(loader, datasets.DataLoader):
                # The training's loader may read ahead in a thread, so its data set keeps its epoch.
                epoch = context.cursor.loader_epoch if is_shared else loader.next_epoch
                stack.enter_context(loader.at_epoch(epoch))
            yield

    def _check_second_iteration(self, loader: Any) -> None:
        """Raises ConfigError: a loader can't be iterated while an epoch of it is read."""
        kind = type(loader).__name__
        if self._state_of(loader) is not None or isinstance(loader, Iterator):
            raise ConfigError(
                f"[evaluate] the training is in the middle of an epoch of this {kind}, which has "
                "one position; use another loader of the same data, or evaluate in on_epoch_end"
            )
        if getattr(loader, "persistent_workers", False):
            raise ConfigError(
                f"[evaluate] the training is in the middle of an epoch of this {kind}, whose "
                "persistent workers read one epoch at a time; use persistent_workers=False, or "
                "another loader of the same data"
            )

    def of_epoch(self, loader: Any, context: Context, first_batch: int) -> Iterable[datasets.Batch]:
        """Returns the batches of the steps of an epoch, of which each is `accumulation_steps` of
        the loader's.

        Args:
            first_batch: how many batches of a loader that cannot be told where to start are left
                out.
        """
        epoch = context.cursor.loader_epoch
        if own_steps(loader):
            part = self.part(training=True)
            remembers = loader.sampler is not None
            if remembers:
                self.capture.begin_epoch(epoch, SAMPLER_ROOTS)
            self._seed_order(epoch)
            # the sampler is iterated here, also if the first batches are left out
            steps = loader.steps(pieces=context.pieces, join=self.accumulation_steps, part=part)
            if remembers:
                self.capture.end_skip(SAMPLER_ROOTS)
            return steps
        state = self._state_of(loader)
        if state is not None:
            left = state.take_left(epoch)
            if left is not None:
                return left
        batches = self._skip(self.batches(loader, epoch), first_batch)
        steps = joined(cut(batches, context.pieces), self.accumulation_steps)
        return steps if state is None else state.tracked(steps)

    def _skip(self, batches: Iterable[datasets.Batch], count: int) -> Iterator[datasets.Batch]:
        """Yields the batches after the first ones, which a resumed run has used."""
        iterator = iter(batches)
        for _ in itertools.islice(iterator, count):
            pass
        if count:  # else the epoch starts with what callbacks have set just now
            self.capture.end_skip()
        yield from iterator

    def restore_state(
        self, snapshot: Snapshot, name: str, context: Context
    ) -> tuple[int, int, datasets.Batch | None, np.ndarray] | None:
        """Sets the loader to the position of a checkpoint; see LoaderState.restore."""
        state = self.loader_state
        if state is None:
            return None

        def steps_of_epoch(epoch: int) -> Iterable[datasets.Batch]:
            batches = self.batches(state.loader, epoch)
            return joined(cut(batches, context.pieces), self.accumulation_steps)

        in_epoch = context.cursor.step > 0
        return state.restore(snapshot, name, steps_of_epoch, self.comm, in_epoch)

    def read_again(self, loader: Any, epoch: int, step: int, begun: bool) -> datasets.Batch | None:
        """Returns the batch that step `step` of an epoch took, read once more; None where a
        loader would have to give an epoch.

        Args:
            epoch: as the loader counts.
            begun: a loader that only counts up has this epoch before it.
        """
        k = self.accumulation_steps
        if isinstance(loader, datasets.DataLoader):
            if step * k >= len(loader):
                return None
            if loader.sampler is None:
                return loader.read_again(epoch, step * k, k)
            with self.capture.as_at_start(epoch, SAMPLER_ROOTS), random_scopes.reading():
                # the sampler may draw, as it did when the epoch was read
                return loader.read_again(epoch, step * k, k, lambda: self._seed_order(epoch))
        if isinstance(loader, Sequence):
            batches: Iterable[datasets.Batch] = self.batches(
                loader[step * k : (step + 1) * k], epoch
            )
        # it gives them once
        elif begun and not hasattr(loader, "start_at") and not isinstance(loader, Iterator):
            batches = itertools.islice(self.batches(loader, epoch), step * k, (step + 1) * k)
        else:
            return None
        return next(iter(joined(batches, k)), None)


class _Started:
    """An iterable over a loader: it prepares an epoch, and then starts the loader's iterator."""

    def __init__(self, loader: Any, begin: Callable[[], None], state: LoaderState | None) -> None:
        self.loader = loader
        self.begin = begin
        self.state = state

    def __iter__(self) -> Iterator[Any]:
        if self.state is not None:
            return self.state.start(self.begin)
        self.begin()
        return iter(self.loader)


class EngineFeed(BatchFeed):
    """The same for steps of the engine, which reads its next batch while it computes."""

    def __init__(
        self,
        mode: Mode,
        accumulation_steps: int,
        *,
        engine: Engine,
        evaluation_engine: Engine,
        mesh: Mesh,
        learning_rate: LearningRate,
        say: Callable[[str], None],
        seed: int,
        capture: Capture,
    ) -> None:
        super().__init__(mode, accumulation_steps, seed, capture)
        self.engine = engine
        self.evaluation_engine = evaluation_engine
        self.mesh = mesh
        self.learning_rate = learning_rate
        self.say = say

    def check_loader(self, loader: datasets.DataLoader, size: int, steps: int | None) -> None:
        _check_reads_arrays(loader)
        self.scale_rate(size)
        check_last_step(self.mesh, loader, size, steps)

    def loader_of(self, data: Any) -> Any:
        _check_reads_arrays(data)
        return super().loader_of(data)

    def expect_sizes(self, sizes: set[int]) -> None:
        self.engine.coming_sizes = sizes

    def scale_rate(self, batch_size: int) -> None:
        """Sets, and tells, what `lr_scaling` makes of the rate once the batch size is known."""
        line = self.learning_rate.scale_to_batch(batch_size)
        if line is not None:
            self.say(line)

    def ahead(self, batches: Iterator[datasets.Batch]) -> Iterator[datasets.Batch]:
        return self.engine.ahead(batches)

    def part(self, training: bool) -> Callable[[int], tuple[int, int]] | None:
        if not self.mode.together:  # each rank has samples of its own, and evaluates them all
            return None
        return self.engine.part if training else self.evaluation_engine.part


def _check_reads_arrays(loader: Any) -> None:
    """Raises ConfigError: a loader reads shards of tensors, for PyTorch modules."""
    if shares_samples(loader):
        raise ConfigError(
            "[train] odyssey.torch.DataLoader is for modules of PyTorch; use odyssey.data."
            "DataLoader with the same data set"
        )


def check_last_step(mesh: Mesh, loader: datasets.DataLoader, step: int, limit: int | None) -> None:
    """Raises ConfigError, before the first step, if an epoch's last one has too few samples for
    layers that ranks share.

    Args:
        step: samples of the other steps.
        limit: steps that will be taken; None: all of the epoch.
    """
    last = last_step_samples(loader, step, limit)
    if mesh.tp > 1 and last and layout_of(last) == "rows":
        samples = len(loader.dataset if loader.sampler is None else loader.sampler)
        raise ConfigError(
            f"[tp] {samples:,} samples in steps of {step} leave {last} for an epoch's last step, "
            "and so few are computed in rows, which are not split; use another batch size, "
            "drop_last=True, or --tp 1"
        )
