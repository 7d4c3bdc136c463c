"""Protocol of a trainer: what fit(), checkpoints, step log, replay and verify ask of it; where
it is, what it did.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import ConfigError, check_integer, counted

if TYPE_CHECKING:
    import numpy as np

    from ..comm import Communicator
    from ..data import Batch
    from . import Snapshot

KEEP = 2
# of an epoch's record
SENT = ("bytes_per_step", "bytes_per_step_uncompressed", "wire_bytes_per_step")


def _last(key: str, text: str) -> Any:
    """A figure of the last epoch's record; None without one."""
    return property(
        lambda history: history.records[-1].get(key) if history.records else None, doc=text
    )


@dataclasses.dataclass
class History:
    """History of a training.

    `records` has one dict per epoch; the last epoch's figures are attributes too.
    """

    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0  # in training steps, without evaluation
    total_time: float = 0.0  # with it

    train_loss = _last("train_loss", "Mean training loss over the samples of the last epoch.")
    test_loss = _last("test_loss", "Mean loss on the validation set after the last epoch.")
    test_accuracy = _last(
        "test_accuracy", "Share of the validation set that is right after the last epoch."
    )
    bytes_per_step = _last(
        "bytes_per_step", "Bytes that a rank sent per step of the last epoch, of all kinds."
    )
    bytes_per_step_uncompressed = _last(
        "bytes_per_step_uncompressed", "The same along the tree, uncompressed."
    )
    wire_bytes_per_step = _last(
        "wire_bytes_per_step", "Bytes of them to other machines, where it is the tree's sum."
    )

    def __repr__(self) -> str:
        last = (self.records or [{}])[-1].items()
        figures = "".join(
            f", {k}={v:.6g}" for k, v in last if k.startswith(("train_", "test_")) and v is not None
        )
        return (
            f"History({counted(len(self.records), 'epoch')}, {counted(self.steps, 'step')}"
            f"{figures}, {self.seconds:.1f} s)"
        )

    @property
    def best_accuracy(self) -> float | None:
        """The best test_accuracy of all epochs."""
        return max(
            (r["test_accuracy"] for r in self.records if r.get("test_accuracy") is not None),
            default=None,
        )

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks per second of training."""
        return self.samples / self.seconds if self.seconds else 0.0


class Evaluation(NamedTuple):
    """Means over a data set and metrics of the whole set, by name as well; `accuracy` is None where
    it is no metric.
    """

    loss: float
    accuracy: float | None
    samples: int
    metrics: dict[str, float] = {}  # noqa: RUF012

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        return f"Evaluation({figures}, samples={self.samples})"


@dataclasses.dataclass(eq=False, repr=False)
class Tally:
    """Sums over some steps and all ranks, and numbers for the record of an epoch."""

    loss: float = 0.0
    correct: float = 0.0
    counted: float = 0.0  # samples whose loss is known
    samples: int = 0
    steps: int = 0
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    # sums by name; None: of accuracy alone, which is `correct`
    metrics: dict[str, float] | None = None

    @property
    def named(self) -> dict[str, float]:
        """The sums of the metrics."""
        return {"accuracy": self.correct} if self.metrics is None else self.metrics

    def put(self, loss: float, correct: float, metrics: dict[str, float]) -> Tally:
        """Sets the sums; returns itself."""
        self.loss = loss
        self.correct = correct
        self.metrics = None if metrics == {"accuracy": correct} else metrics
        return self

    def add(self, loss: float, correct: float, metrics: dict[str, float], samples: float) -> None:
        """Adds sums over some samples; what was not summed from the start on, before a
        checkpoint, is left out.
        """
        previous_sums = self.named
        has_samples = self.counted > 0
        both = {
            k: previous_sums.get(k, 0.0) + v
            for k, v in metrics.items()
            if k in previous_sums or not has_samples
        }
        self.put(self.loss + loss, self.correct + correct, both)
        self.counted += samples

    def means(self) -> dict[str, float]:
        """Means of the loss and the metrics."""
        loss = self.loss / self.counted if self.counted else math.nan
        return {"loss": loss, **{name: v / max(self.counted, 1) for name, v in self.named.items()}}


@dataclasses.dataclass
class Cursor:
    """Where a training is in its data: the next step is number `step` of epoch `epoch` (both
    from 0) of a fit().
    """

    epoch: int = 0
    step: int = 0
    loader_epoch: int = 0  # that epoch as the loader counts them
    samples: int = 0  # that steps have consumed so far, in all epochs

    def check(self) -> None:
        """TypeError if it is not made of numbers from 0."""
        if any(type(n) is not int or n < 0 for n in dataclasses.astuple(self)):
            raise TypeError(f"its cursor is {self}")


class Step(NamedTuple):
    """A step: sums of loss and correct predictions over its samples, learning rate, whether it
    changed the weights.
    """

    loss: float
    correct: float
    rate: float
    taken: bool
    updates: Any  # the trainer's own: what its fingerprints() are of
    metrics: dict[str, float]  # sums by name
    #: What metrics of the whole set add of this step's samples, by name.
    values: dict[str, Any] = {}  # noqa: RUF012

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):  # would be False for ever
            raise ConfigError(
                "[callback] context.step has a step's sums and rate; its number is context.steps"
            )
        return tuple.__eq__(self, other)

    __hash__ = tuple.__hash__


@dataclasses.dataclass(eq=False, repr=False)
class Saving:
    """Where and when checkpoints are made: the arguments of fit(). resume: a path is that of a
    checkpoint, or of a directory which must have some; once `folder` has checkpoints that
    come from there, training goes on from the newest of them. off: nothing is written,
    whatever run the process belongs to; `resume` may still name where to start.
    """

    folder: Path | None = None
    # optimizer steps from one to the next; None: at the end of every `epochs`-th epoch
    every: int | None = None
    keep: int = KEEP
    resume: str | Path = "auto"
    epochs: int = 1
    nondeterministic: bool = False
    off: bool = False

    def __post_init__(self) -> None:
        if self.every is not None:
            check_integer("[checkpoint] checkpoint_every", self.every, 1)
        check_integer("[checkpoint] keep", self.keep, 2)
        check_integer("[checkpoint] checkpoint_epochs", self.epochs, 1)
        if not isinstance(self.nondeterministic, bool):
            raise ConfigError(
                f"[train] allow_nondeterministic_data is {self.nondeterministic!r}; give True or "
                "False"
            )


class Mode:
    """How ranks take steps: all of them together. The others are in inexact/asynchronous.py."""

    together = True
    settled = True  # weights and the optimizer's state are the same on all ranks now
    # it takes the steps of an epoch itself: only the end of one is the same moment on all ranks
    own_loop = False

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.comm = trainer.comm

    def part(self, batch: Batch) -> Batch | None:
        """Returns what the engine of this rank is given of a batch; None: nothing."""
        return batch

    def shared_out(self, samples: int) -> tuple[int, list[int]]:
        """Workers that share a part of a batch of so many samples, and the parts' numbers of
        samples.
        """
        layout = self.trainer.layout
        return layout.workers * layout.mesh.dp, [samples]

    def stepped(self) -> None:
        """After a step of all ranks."""

    def epoch(self, batches: Iterable[Batch], limit: int | None) -> Tally:
        """Steps over the batches, at most `limit`; the same number on all ranks."""
        self.trainer.take_steps(batches, limit)
        return self.trainer.context.tally

    def summary(self, record: dict[str, Any]) -> str:
        """One line about a training, from the record of its last epoch."""
        return ""

    def settle(self) -> None:
        """Makes weights and state the same on all ranks, if they are not; a collective call."""

    def whole_tally(self, tally: Tally) -> Tally:
        """A tally with the sums of all ranks; a collective call."""
        return tally


class Trainable(Protocol):
    """A trainer, whatever it trains with.

    All methods are collective calls unless they say otherwise.
    """

    comm: Communicator
    mode: Mode
    seed: int  # of the random numbers
    steps: int  # optimizer steps so far, over all fit()s
    accumulation_steps: int  # batches of a loader that make one of them
    check_every: int  # steps from one check_alike() to the next; 0: never
    saved_in: set[str]  # directories of checkpoints of its fit()s
    numerics: Any  # numerics.NonFinite
    last: Step | None
    workers: int  # that share out a batch
    feed: Any  # train.feed.BatchFeed

    @property
    def base_rate(self) -> float:
        """The learning rate, without what a schedule makes of it."""

    @property
    def in_parts(self) -> bool:
        """True if ranks have parts of the state that no other rank has."""

    @property
    def partial(self) -> bool:
        """True if fingerprints() are of this rank's part, to be added up over all ranks."""

    @property
    def state_bytes(self) -> int:
        """About how large a checkpoint is, in bytes."""

    def say(self, line: str) -> None:
        """One line to the user, from rank 0, without tearing a progress bar; not collective."""

    def take_step(self, batch: Batch) -> Step:
        """One optimizer step over a global batch."""

    def gradient_norm(self) -> float | None:
        """The norm of the mean gradient of the last step, before clipping; None: it is not known.

        Not collective.
        """

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rate from here on; on all ranks alike, not collective."""

    def configuration(self) -> dict[str, Any]:
        """Returns what decides the bits of the training, as JSON values by users' names for it;
        not collective.
        """

    def state(self, values: dict[str, Any], parts: bool = False) -> Snapshot | None:
        """All that training goes on from, not copied, and `values`, on rank 0; with `parts` each
        rank's.
        """

    def load(self, snapshot: Snapshot, name: str) -> None:
        """Takes back what state() gave, on whatever layout; `name` is for messages.

        Raises ConfigError: it is of another training. CheckpointError: something is missing.
        Nothing was changed.
        """

    def load_weights(self, snapshot: Snapshot, name: str) -> None:
        """Takes weights and buffers alone.

        Raises CheckpointError: one is missing or of another shape; none changed.
        """

    def shards_moved(self, samples: int) -> tuple[int, ...]:
        """Returns how many shards of a step of so many samples each rank computes, once some
        have moved; else none.
        """

    def fingerprints(self) -> tuple[int, int]:
        """Fingerprints of the gradients of the last step, and of the weights (fingerprint.py)."""

    def put_back(self, snapshot: Snapshot, name: str) -> None:
        """Takes the same snapshot back once more, in silence."""

    def expect(self, snapshot: Snapshot, name: str, exactly: bool) -> None:
        """The next step must compute what the snapshot says, if `exactly` and it can be known;
        not collective.
        """

    def stays(self) -> None:
        """Raises ConfigError: what a step computes has changed though no setting has, where that
        can be known.
        """

    def check_alike(self) -> None:
        """Compares what ranks hold alike: settings, weights. Raises ConfigError, NumericsError."""

    def named_state(self) -> Mapping[str, np.ndarray]:
        """Weights ("weight NAME") and the optimizer's arrays ("optimizer STATE of NAME"), whole,
        on every rank.
        """

    def state_dict(self) -> dict[str, np.ndarray]:
        """The weights by name, whole, on every rank."""

    def last_gradients(self) -> dict[str, np.ndarray]:
        """The summed gradients of the last step by the weights' names."""

    def weights_sha256(self) -> str:
        """SHA-256 of all weights."""

    def read_again(self, loader: Any, epoch: int, step: int, begun: bool) -> Batch | None:
        """The batch of an earlier step; see feed.BatchFeed."""
