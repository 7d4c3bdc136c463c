"""Agreement: what all ranks must have alike is compared, not trusted.

    settings    by their hashes                                when a trainer is made and when fit() begins  compare
    parameters  names and shapes                               when a trainer is made                        parameters
    programs    op by op                                       before the first step of each batch size      programs
    data sets   in memory: all their bytes                     when fit() or evaluate() begins               data_set
    batches     which samples, and what they are; rates ahead  at the first step, then every check_every     Watch

All ranks find the same, so all end with the same error, and rank 0 speaks. Rank 0 is what the
others are compared with.
"""  # noqa: E501 - a table

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm import Communicator
from ..core import fingerprint
from ..core.fingerprint import hash_of
from ..data import ArrayDataset, Batch
from ..engine.listing import Listed, said, watched
from ..errors import ConfigError, DataError, OdysseyError
from . import resume

if TYPE_CHECKING:
    from ..core.arena import Arena
    from ..engine.engine import Engine

CURE = (
    "make samples with one seed (torch.manual_seed), or draw random numbers from (seed, epoch, "
    "sample index), as transform= of DataLoader does and docs/determinism.md shows"
)
BLOCKS = 256  # of a data set, when a sample that differs is looked for
AHEAD = 1000  # steps whose rates, or samples, are compared at once at most
TEXT = 400  # bytes of what a rank says to the others
ALIKE = "give all ranks the same batches"


class Shown(str):
    """A string that messages show as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def first_other(comm: Communicator, numbers: Sequence[int]) -> tuple[int | None, np.ndarray]:
    """The first rank whose numbers (int64) are not those of rank 0, and all ranks' (ranks, n); a
    collective call.
    """
    everyone = comm.all_gather(np.array(numbers, np.int64))
    other = np.flatnonzero((everyone != everyone[0]).any(axis=1))
    return int(other[0]) if len(other) else None, everyone


def texts(comm: Communicator, mine: str, limit: int = TEXT) -> list[str]:
    """A text of each rank, of at most so many bytes, on all ranks; a collective call."""
    found = comm.all_gather_each(np.frombuffer(mine.encode()[:limit], np.uint8))
    return [row.tobytes().decode(errors="ignore") for row in found]


def differences(comm: Communicator, settings: Mapping[str, Any]) -> dict[str, int]:
    """Returns the settings in which ranks differ, by name; a collective call.

    The value is the first rank, as the group counts, that differs from the group's first.
    """
    _, everyone = first_other(comm, [hash_of(v) for v in settings.values()])
    return {
        name: int(np.argmax(column != column[0]))
        for name, column in zip(settings, everyone.T, strict=True)
        if (column != column[0]).any()
    }


def difference(comm: Communicator, settings: dict[str, Any]) -> str | None:
    """Returns what to say of the first setting that a rank has otherwise than a group's first; a
    collective call.
    """
    return next((told(comm, *found) for found in differences(comm, settings).items()), None)


def told(comm: Communicator, name: str, other: int) -> str:
    """Returns what to say of a setting that rank `other` has otherwise than the group's first."""
    return (
        f"the {name} of rank {comm.ranks[other]} differs from that of rank {comm.ranks[0]}; start "
        "all ranks alike"
    )


def compare(comm: Communicator, settings: dict[str, Any]) -> None:
    """Raises ConfigError, on all ranks, if one rank's settings are not those of rank 0; a
    collective call.
    """
    if comm.size > 1 and (said := difference(comm, settings)):
        raise ConfigError(f"[train] {said}").on_all_ranks()


def parameters(comm: Communicator, arena: Arena) -> None:
    """Raises ConfigError, on all ranks, if one rank's model has other parameters than that of
    rank 0; collective.
    """
    lines = [f"{name} {tuple(p.shape)}" for name, p in arena.named]
    if (found := _first_other_line(comm, lines)) is not None:
        other, at = found
        raise _other_model(
            comm, other, f"parameter {at + 1}", lines[at] if at < len(lines) else "none"
        )


def _other_model(comm: Communicator, other: int, what: str, mine: str) -> ConfigError:
    """Returns what to raise on all ranks where models differ; a collective call."""
    told = texts(comm, mine)
    return ConfigError(
        f"[train] the model of rank {other} differs from that of rank 0 in {what}: {told[other]}; "
        f"on rank 0 {told[0]}; start all ranks alike"
    ).on_all_ranks()


def _first_other_line(comm: Communicator, lines: list[str]) -> tuple[int, int] | None:
    """The first rank whose lines are not those of rank 0, and the first line that differs there;
    a collective call.
    """
    if comm.size == 1:
        return None
    other, _ = first_other(comm, [hash_of(lines)])
    if other is None:
        return None
    hashes = np.array([hash_of(line) for line in lines], np.int64)
    length = comm.broadcast(np.array([len(lines)], np.int64))[0]
    theirs = comm.broadcast(hashes if comm.rank == 0 else np.empty(length, np.int64))
    common = min(len(hashes), len(theirs))
    differ = np.flatnonzero(hashes[:common] != theirs[:common])
    first = comm.all_gather(np.array([differ[0] if len(differ) else common], np.int64))
    return other, int(first[other, 0])


def programs(comm: Communicator, engine: Engine, batch: Batch, step: int) -> None:
    """Compares what the ranks' models do with a shard of a batch, op by op; a collective call.

    Compared is what the model records, the same on all ranks whatever part of it they run; where
    nothing is recorded (execution="eager"), what it does with the first shard, which all ranks
    compute for that. Raises, on all ranks, ConfigError: naming the first op that differs, its layer
    and a user's line; OdysseyError: a model cannot be run.
    """
    error: Exception | None = None
    listed = Listed()
    try:
        recording = engine.programs.recording(
            engine.shard_size_of(len(batch.indices)), batch.dataset.form
        )
        if recording is None:
            engine.trace(batch, step, listed.listen)
        else:
            listed = Listed(recording.records)
    except Exception as problem:
        error = problem
    failed = comm.all_gather(np.array([error is not None], np.int32))[:, 0]
    if failed.any():
        known = isinstance(error, OdysseyError)
        text = texts(
            comm,
            "" if error is None else str(error) if known else f"{type(error).__name__}: {error}",
        )
        if isinstance(error, OdysseyError) and failed.all():
            raise error.on_all_ranks()
        if error is not None and not known:
            raise error  # a defect of the program, which a traceback shows
        raise ConfigError(
            f"[train] the model runs on rank {np.argmin(failed)}, but not on rank "
            f"{np.argmax(failed)}: {text[int(np.argmax(failed))]}"
        ).on_all_ranks()
    if (found := _first_other_line(comm, listed.lines())) is None:
        return
    other, at = found
    layers = Listed()
    # it has run before: its error is not news
    with contextlib.suppress(Exception), watched(engine.model) as here:
        engine.trace(batch, step, lambda executor: layers.listen(executor, here))
    raise _other_model(comm, other, f"op {at + 1}", said(listed.records, at, layers.where))


def standing(comm: Communicator, when: str, *groups: dict[str, Any]) -> None:
    """Raises ConfigError, on all ranks, naming the first of some settings that a rank has
    otherwise than rank 0; a collective call. groups: settings of an update, values of a
    model.
    """
    settings = {name: value for group in groups for name, value in group.items()}
    names = sorted(settings)
    if (found := _first_other_line(comm, [f"{name} {settings[name]!r}" for name in names])) is None:
        return
    other, at = found
    each = texts(comm, names[at] if at < len(names) else "")
    name = min(filter(None, (each[0], each[other])))  # one may have it, and the other not
    told = texts(comm, repr(settings[name]) if name in settings else "not there")
    raise ConfigError(
        f"[train] at {when} {name} is {told[other]} on rank {other}, and {told[0]} on rank 0; "
        "change it on all alike"
    ).on_all_ranks()


def data_set(comm: Communicator, data: ArrayDataset, what: str = "training") -> None:
    """Compares all bytes of a data set, at the speed of memory; a collective call.

    Raises ConfigError, DataError: on all ranks, naming what differs and the first sample.
    """
    if comm.size == 1:
        return
    same = {
        f"number of samples of the {what} set": len(data),
        f"shape of the {what} samples": data.sample_shape,
        f"dtype of the {what} samples": [a.dtype.name for a in data.all_arrays],
        f"samples and targets of the {what} set": data.form,
        f"number of classes of the {what} set": data.classes,
        f"scale and shift of the {what} set": (data.scale.tobytes(), data.shift.tobytes()),
    }
    compare(comm, same)
    lo = 0
    hi = len(data)
    blocks = [(lo, hi)]
    while True:
        mine = [
            sum(fingerprint.of_bytes(x[a:b], k << 40) for k, x in enumerate(data.all_arrays))
            for a, b in blocks
        ]
        other, everyone = first_other(
            comm, [fingerprint.signed(m & fingerprint.MASK) for m in mine]
        )
        if other is None:
            return
        lo, hi = blocks[int(np.flatnonzero(everyone[other] != everyone[0])[0])]
        if hi - lo == 1:
            break
        edges = sorted(set(np.linspace(lo, hi, min(BLOCKS, hi - lo) + 1).astype(np.int64).tolist()))
        blocks = list(zip(edges, edges[1:], strict=False))
    raise DataError(
        f"[data] sample {lo} of the {what} set of rank {other} differs from that of rank 0: every "
        "rank must be given the whole set, the same; read the same files, and seed what is drawn "
        "alike on all ranks"
    ).on_all_ranks()


def of_batch(batch: Batch) -> int:
    """The fingerprint of the samples and labels of a global batch, in their order, and of shape
    and type; 64 bits. It is a sum over samples and a hash of shape and type, so whoever has
    some of the samples can take their share.
    """
    n = len(batch.indices)
    data = batch.dataset
    kind = data.images.dtype.name if data.normalised else data.form
    about = (n, data.sample_shape, kind, data.scale.tobytes(), data.shift.tobytes())
    parts = [hash_of(about)]
    at = 0
    step = max(1, fingerprint.CHUNK // max(a[0].nbytes for a in data.all_arrays))
    for lo in range(0, n, step):
        rows = _rows(data, batch.indices[lo : lo + step])
        parts.append(fingerprint.of_bytes(rows, at))
        at += rows.size
    return fingerprint.add(parts)


def last_batch(comm: Communicator, batch_print: int, step: int) -> None:
    """Compares the fingerprint of the batch of step `step`, read once more; a collective call.

    Raises DataError on all ranks.
    """
    other, _ = first_other(comm, [fingerprint.signed(batch_print)])
    if other is not None:
        raise DataError(
            f"[data] the samples of step {step}, read again, are not on rank {other} what they are "
            f"on rank 0: every rank must be given the same samples; {CURE}"
        ).on_all_ranks()


def _rows(data: ArrayDataset, indices: np.ndarray) -> np.ndarray:
    """Samples as they are in their data set: int32 (samples, words), each array filled up to
    whole words.
    """
    n = len(indices)
    parts = []
    for a in data.all_arrays:
        rows = np.zeros((n, -(-a[0].nbytes // 4)), np.int32)
        rows.view(np.uint8)[:, : a[0].nbytes] = a[indices].reshape(n, -1).view(np.uint8)
        parts.append(rows)
    return np.concatenate(parts, axis=1)


class Watch:
    """Compares what the ranks are given, now and then: at the first step, and every `every` steps.

    Compared are which samples the batches since the last time had, the samples of this batch unless
    the whole data set was compared, and the learning rates of the steps until the next time.
    `every` is 0: at the first step only. `unit`: what a message calls a step; those of an
    evaluation have no rates. whole: the data set that `data_set` compared, if there is one. tell:
    where it is allowed that samples differ, this is called with a line about it, once. programs:
    kinds of batches whose programs were compared.
    """

    def __init__(self, comm: Communicator, every: int, unit: str = "step") -> None:
        self.comm = comm
        self.every = every
        self.unit = unit
        self.whole: ArrayDataset | None = None
        self.tell: Callable[[str], None] | None = None
        self._first = True
        self.programs: set[tuple[Any, ...]] = set()
        self._orders: list[np.ndarray] = []

    def begin(
        self, whole: ArrayDataset | None = None, tell: Callable[[str], None] | None = None
    ) -> None:
        """A fit() begins: its first step is looked at."""
        self.whole = whole
        self.tell = tell
        self._first = True
        self._orders.clear()

    def batch(self, batch: Batch, step: int, rate: Callable[[int], float] | None = None) -> None:
        """Before step `step` (from 0); a collective call where something is due.

        Raises ConfigError, DataError: on all ranks: they differ.
        """
        if self.comm.size == 1:
            return
        if self._first or self.every:
            self._orders.append(batch.indices if batch.numbers is None else batch.numbers)
        if not (
            self._first or (self.every and step % self.every == 0) or len(self._orders) > AHEAD
        ):
            return
        self._first = False
        ahead = range(step, step + min(self.every or 1, AHEAD))
        # one that fails says so where it is needed
        rates = [] if rate is None else resume.probed(rate, ahead)
        order = self._order()
        known = self.whole is not None and batch.dataset is self.whole
        batch = batch if known else batch.whole()
        mine = [
            hash_of((len(order), batch.dataset.form)),
            fingerprint.signed(fingerprint.of_bytes(order)),
            0 if known else fingerprint.signed(of_batch(batch)),
            hash_of(rates),
        ]
        other, everyone = first_other(self.comm, mine)
        if other is None:
            return
        shapes, orders, data, _ = (everyone[other] != everyone[0]).tolist()
        if shapes:
            said = texts(self.comm, f"{len(batch.indices)} samples of {batch.dataset.sample_shape}")
            raise DataError(
                f"[data] {self._at(step)} has {said[other]} on rank {other}, {said[0]} on rank "
                f"0; {ALIKE}"
            ).on_all_ranks()
        if orders:
            self._differ_in_order(order, other, step)
        if data:
            self._differ_in_samples(batch, other, step)
            return
        everyone = self.comm.all_gather(
            np.array([-np.inf if r is None else r for r in rates], np.float64)
        )
        at = int(np.flatnonzero(everyone[other].view(np.int64) != everyone[0].view(np.int64))[0])
        raise ConfigError(
            f"[train] the learning rate of step {step + at + 1} is {everyone[other, at]:g} on rank "
            f"{other}, and {everyone[0, at]:g} on rank 0; give all ranks the same schedule"
        ).on_all_ranks()

    def end(self) -> None:
        """After the last step of an epoch: compares which samples the steps had that were not
        compared yet.
        """
        if self.comm.size == 1 or not self.every:
            return
        order = self._order()
        other, _ = first_other(
            self.comm, [len(order), fingerprint.signed(fingerprint.of_bytes(order))]
        )
        if other is not None:
            raise DataError(
                f"[data] the last batches of rank {other} have other samples than those of rank "
                f"0; {ALIKE}"
            ).on_all_ranks()

    def _at(self, step: int) -> str:
        return f"{self.unit} {step + 1}"

    def _order(self) -> np.ndarray:
        """The numbers of the samples since the last time, int64."""
        order = np.concatenate(
            [np.asarray(o, np.int64) for o in self._orders] or [np.empty(0, np.int64)]
        )
        self._orders.clear()
        return order

    def _differ_in_order(self, order: np.ndarray, other: int, step: int) -> None:
        everyone = self.comm.all_gather(order)
        at = int(np.flatnonzero(everyone[other] != everyone[0])[0])
        raise DataError(
            f"[data] by {self._at(step)} rank {other} is given sample {everyone[other, at]} where "
            f"rank 0 is given sample {everyone[0, at]}; {ALIKE}, such as a sampler with one seed"
        ).on_all_ranks()

    def _differ_in_samples(self, batch: Batch, other: int, step: int) -> None:
        own = [
            fingerprint.signed(fingerprint.of_bytes(_rows(batch.dataset, i[None])))
            for i in batch.indices
        ]
        found = self.comm.all_gather(np.array(own, np.int64))
        wrong = np.flatnonzero(found[other] != found[0])
        at = int(wrong[0]) if len(wrong) else 0
        number = (
            f"sample {at} of the batch" if batch.numbers is None else f"sample {batch.numbers[at]}"
        )
        name = batch.dataset.name.partition(",")[0]
        text = (
            f"[data] at {self._at(step)} {number} of {name} is not on rank {other} what it is "
            "on rank 0"
        )
        if self.tell is None:
            raise DataError(
                f"{text}: every rank must be given the same samples; {CURE}"
            ).on_all_ranks()
        self.tell(
            f"{text}; training goes on, as data may be nondeterministic, and its bits will not "
            "come again"
        )
        self.tell = lambda line: None  # it has been told
