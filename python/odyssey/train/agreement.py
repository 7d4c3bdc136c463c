"""What all ranks must have alike: compared, not trusted.

    settings    by their hashes                                when a trainer is made and when fit() begins  compare
    parameters  names and shapes                               when a trainer is made                        parameters
    programs    op by op                                       before the first step of each batch size      programs
    data sets   in memory: all their bytes                     when fit() or evaluate() begins               data_set
    batches     which samples, and what they are; rates ahead  at the first step, then every check_every     Watch

All ranks find the same, so all end with the same error, and rank 0 speaks. Rank 0 is what the others are compared with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm import Communicator
from ..core import fingerprint, native
from ..core.program import Block, Executor, Memory, Range, Record, Slot
from ..data import ArrayDataset, Batch
from ..errors import ConfigError, DataError, OdysseyError
from . import resume

if TYPE_CHECKING:
    from ..core.arena import Arena
    from ..engine.engine import Engine
    from ..nn import Module

CURE = (
    "draw random numbers from (seed, epoch, sample index), as transform= of DataLoader does and docs/determinism.md "
    "shows"
)
BLOCKS = 256  # of a data set, when a sample that differs is looked for
CHUNK = 1 << 20  # bytes that are copied at once where memory does not lie on words
PACKAGE = __name__.partition(".")[0]
AHEAD = 1000  # steps whose rates, or samples, are compared at once at most
TEXT = 400  # bytes of what a rank says to the others


def hash_of(value: Any) -> int:
    """63 bits of a hash over a value's repr."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def _first_other(everyone: np.ndarray) -> int | None:
    """The first rank whose row of (ranks, ...) is not that of rank 0."""
    other = np.flatnonzero((everyone != everyone[0]).reshape(len(everyone), -1).any(axis=1))
    return int(other[0]) if len(other) else None


def texts(comm: Communicator, mine: str, limit: int = TEXT) -> list[str]:
    """A text of each rank, of at most so many bytes, on all ranks; a collective call."""
    found = comm.all_gather_each(np.frombuffer(mine.encode()[:limit], np.uint8))
    return [row.tobytes().decode(errors="ignore") for row in found]


def difference(comm: Communicator, settings: dict[str, Any]) -> str | None:
    """What to say of the first setting that a rank has otherwise than the first one of a group; a collective call."""
    everyone = comm.all_gather(np.array([hash_of(v) for v in settings.values()], np.int64))
    for name, column in zip(settings, everyone.T, strict=True):
        if (other := _first_other(column)) is not None:
            ranks = comm.ranks
            return f"the {name} of rank {ranks[other]} differs from that of rank {ranks[0]}; start all ranks alike"
    return None


def compare(comm: Communicator, settings: dict[str, Any]) -> None:
    """Raises ConfigError, on all ranks, if one rank's settings are not those of rank 0; a collective call."""
    if comm.size > 1 and (said := difference(comm, settings)):
        raise ConfigError(f"[train] {said}").on_all_ranks()


def parameters(comm: Communicator, arena: Arena) -> None:
    """Raises ConfigError, on all ranks, if one rank's model has other parameters than that of rank 0; collective."""
    lines = [f"{name} {tuple(p.shape)}" for name, p in arena.named]
    found = _first_other_line(comm, lines)
    if found is not None:
        other, at = found
        said = texts(comm, lines[at] if at < len(lines) else "none")
        raise ConfigError(
            f"[train] the model of rank {other} differs from that of rank 0 in parameter {at + 1}: {said[other]}; "
            f"on rank 0 {said[0]}; start all ranks alike"
        ).on_all_ranks()


def _first_other_line(comm: Communicator, lines: list[str]) -> tuple[int, int] | None:
    """The first rank whose lines are not those of rank 0, and the first line that differs there; a collective call."""
    if comm.size == 1:
        return None
    other = _first_other(comm.all_gather(np.array([hash_of(lines)], np.int64)))
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

    Compared is what the model records, the same on all ranks whatever part of it they run; where nothing is recorded
    (execution="eager"), what it does with the first shard, which all ranks compute for that. Raises ConfigError: on all
    ranks, naming the first op that differs, its layer and, where it is the user's, its line. OdysseyError: on all
    ranks: a model cannot be run.
    """
    error, listed = None, Listed()
    try:
        if engine.layout.execution == "replay":
            listed.records = engine.recorded(engine.shard_size_of(len(batch.indices)), batch.dataset.form)
        else:
            engine.trace(batch, step, listed.listen)
    except OdysseyError as problem:
        error = problem
    lines = listed.lines()
    failed = comm.all_gather(np.array([error is not None], np.int32))[:, 0]
    if failed.any():
        text = texts(comm, str(error or ""))[int(np.argmax(failed))]
        if error is not None and failed.all():
            raise error.on_all_ranks()
        raise ConfigError(
            f"[train] the model runs on rank {np.argmin(failed)}, but not on rank {np.argmax(failed)}: {text}"
        ).on_all_ranks()
    found = _first_other_line(comm, lines)
    if found is None:
        return
    other, at = found
    mine = f"no op: it has {len(lines)}"
    if at < len(lines):
        r, layers = listed.records[at], Listed()
        with contextlib.suppress(Exception), watched(engine.model) as here:  # it has run before: its error is not news
            engine.trace(batch, step, lambda executor: layers.listen(executor, here))
        numbers = [f"{a:.9g}" if isinstance(a, float) else str(a) for a in r.args if isinstance(a, (int, float))]
        rounded = "" if r.dtype == "fp32" else f" in {r.dtype}"
        mine = f"{r.op}{rounded} ({', '.join(numbers)}){layers.where.get(r.tag, '')}"
    said = texts(comm, mine)
    raise ConfigError(
        f"[train] the model of rank {other} differs from that of rank 0 in op {at + 1}: {said[other]}; on rank 0 "
        f"{said[0]}; start all ranks alike"
    ).on_all_ranks()


class Listed:
    """The records that go through an executor, and where each forward op comes from.

    Attributes:
        records: in their order.
        where: number of a forward op -> its layer and, where it is not odyssey's, its source line.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.where: dict[int, str] = {}
        self._made: set[int] = set()  # memory of values; other blocks are constants
        self._kept: list[Memory] = []  # so that no two have one id

    def listen(self, executor: Executor, layers: Sequence[str] = ()) -> None:
        """Writes down what an executor is given from now on; `layers`: those being computed, the innermost last."""
        alloc, emit, close = executor.alloc, executor.emit, executor.close

        def note_alloc(nbytes: int) -> Memory:
            memory = alloc(nbytes)
            self._made.add(id(memory))
            self._kept.append(memory)
            return memory

        def note_emit(op: str, *args: Any, layout: str = "lanes", dtype: str = "fp32") -> None:
            scope = executor.scope
            tag = scope.ops if scope.tag is None else scope.tag
            self.records.append(
                Record(op, list(args), layout, scope.device.slot, tag, scope.phase, scope.recompute, dtype)
            )
            emit(op, *args, layout=layout, dtype=dtype)

        def note_close(device: Any) -> int:
            number = close(device)
            self.where.setdefault(number, (f" in layer {layers[-1]}" if layers else "") + _site())
            return number

        executor.alloc, executor.emit, executor.close = note_alloc, note_emit, note_close  # type: ignore[method-assign]

    def lines(self) -> list[str]:
        """A line per record: the op, its numbers as they are, its memory by its use; the same for equal programs."""
        order: dict[int, int] = {}
        return [self._line(r, order) for r in self.records]

    def _line(self, r: Record, order: dict[int, int]) -> str:
        words = [r.op, r.layout, r.dtype, f"{r.device}.{r.tag}.{r.phase}.{r.recompute:d}"]
        for a in r.args:
            if isinstance(a, Range):
                words.append(f"{a.space}:{a.offset}")
            elif isinstance(a, Block) and id(a) not in self._made and hasattr(a, "array"):
                words.append(hashlib.sha256(a.array.tobytes()).hexdigest()[:16])
            elif isinstance(a, (Block, Slot)):
                words.append(f"value {order.setdefault(id(a), len(order))} {getattr(a, 'nbytes', '')}")
            else:
                words.append(f"{native.float_bits(a):x} f" if isinstance(a, float) else repr(a))
        return " ".join(words)


def _site() -> str:
    """The line of the user's forward() that is running; nothing where only odyssey's own code is."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_pass":
        if frame.f_globals.get("__name__", "").partition(".")[0] != PACKAGE:
            return f" at {'/'.join(frame.f_code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def watched(model: Module) -> Iterator[list[str]]:
    """While it lasts, the list holds the layers of a model that are being computed, the innermost last."""
    here: list[str] = []
    changed: dict[int, tuple[Module, Any]] = {}  # with the forward() that is the object's own, if it has one

    def watch(module: Module, name: str) -> None:
        if id(module) in changed:
            return
        changed[id(module)] = module, vars(module).get("forward")
        forward = module.forward
        title = f"{name} ({type(module).__name__})" if name else type(module).__name__

        def noted(*args: Any, **named: Any) -> Any:
            here.append(title)
            try:
                return forward(*args, **named)
            finally:
                here.pop()

        vars(module)["forward"] = noted
        for child, inner in module.named_children():
            watch(inner, f"{name}.{child}" if name else child)

    try:
        watch(model, "")
        yield here
    finally:
        for module, own in changed.values():
            vars(module).pop("forward")
            if own is not None:
                vars(module)["forward"] = own


def data_set(comm: Communicator, data: ArrayDataset, what: str = "training") -> None:
    """Compares all bytes of a data set, at the speed of memory; a collective call. Raises ConfigError, DataError: on
    all ranks, naming what differs and the first sample."""
    if comm.size == 1:
        return
    compare(
        comm,
        {
            f"number of samples of the {what} set": len(data),
            f"shape of the {what} samples": data.sample_shape,
            f"dtype of the {what} samples": [a.dtype.name for a in data.all_arrays],
            f"samples and targets of the {what} set": data.form,
            f"number of classes of the {what} set": data.classes,
            f"scale and shift of the {what} set": (data.scale.tobytes(), data.shift.tobytes()),
        },
    )
    lo, hi = 0, len(data)
    blocks = [(lo, hi)]
    while True:
        mine = [sum(_of_words(x[a:b], k << 40) for k, x in enumerate(data.all_arrays)) for a, b in blocks]
        everyone = comm.all_gather(np.array([fingerprint.signed(m & fingerprint.MASK) for m in mine], np.int64))
        other = _first_other(everyone)
        if other is None:
            return
        lo, hi = blocks[int(np.flatnonzero(everyone[other] != everyone[0])[0])]
        if hi - lo == 1:
            break
        edges = sorted(set(np.linspace(lo, hi, min(BLOCKS, hi - lo) + 1).astype(np.int64).tolist()))
        blocks = list(zip(edges, edges[1:], strict=False))
    raise DataError(
        f"[data] sample {lo} of the {what} set of rank {other} differs from that of rank 0: every rank must be "
        "given the whole set, the same; read the same files, and seed what is drawn alike on all ranks"
    ).on_all_ranks()


def _of_words(array: np.ndarray, start: int = 0) -> int:
    """The fingerprint of a C-contiguous array's bytes, as words of 4 of which the first is number `start`.

    One changed byte changes it, for certain (fingerprint.py). Bytes of zero count nothing: compare sizes as well.
    """
    flat = array.reshape(-1).view(np.uint8)
    whole = flat.size // 4 * 4
    parts = []
    if flat.ctypes.data % 4:  # such as a column of bytes out of a file
        for at in range(0, whole, CHUNK):
            piece = flat[at : min(at + CHUNK, whole)].copy()
            parts.append(fingerprint.of(piece.view(np.float32), start + at // 4))
    elif whole:
        parts.append(fingerprint.of(flat[:whole].view(np.float32), start))
    if flat.size > whole:
        rest = np.zeros(4, np.uint8)
        rest[: flat.size - whole] = flat[whole:]
        parts.append(fingerprint.of(rest.view(np.float32), start + whole // 4))
    return fingerprint.add(parts)


def of_batch(batch: Batch) -> int:
    """The fingerprint of the samples and labels of a global batch, in their order, and of shape and type; 64 bits.

    It is a sum over samples and a hash of shape and type, so whoever has some of the samples can take their share.
    """
    n, data = len(batch.indices), batch.dataset
    kind = data.images.dtype.name if data.normalised else data.form
    about = (n, data.sample_shape, kind, data.scale.tobytes(), data.shift.tobytes())
    parts, at, step = [hash_of(about)], 0, max(1, CHUNK // max(a[0].nbytes for a in data.all_arrays))
    for lo in range(0, n, step):
        rows = _rows(data, batch.indices[lo : lo + step])
        parts.append(_of_words(rows, at))
        at += rows.size
    return fingerprint.add(parts)


def _rows(data: ArrayDataset, indices: np.ndarray) -> np.ndarray:
    """Samples as they are in their data set: int32 (samples, words), each array filled up to whole words."""
    n, parts = len(indices), []
    for a in data.all_arrays:
        rows = np.zeros((n, -(-a[0].nbytes // 4)), np.int32)
        rows.view(np.uint8)[:, : a[0].nbytes] = a[indices].reshape(n, -1).view(np.uint8)
        parts.append(rows)
    return np.concatenate(parts, axis=1)


class Watch:
    """Compares what the ranks are given, now and then: at the first step, and every `every` steps.

    Compared are which samples the batches since the last time had, the samples of this batch unless the whole data set
    was compared, and the learning rates of the steps until the next time. `every` is 0: at the first step only.
    `unit`: what a message calls a step; those of an evaluation have no rates.

    Attributes:
        whole: the data set that `data_set` compared, if there is one.
        tell: where it is allowed that samples differ, this is called with a line about it, once.
    """

    def __init__(self, comm: Communicator, every: int, unit: str = "step") -> None:
        self.comm, self.every, self.unit = comm, every, unit
        self.whole: ArrayDataset | None = None
        self.tell: Callable[[str], None] | None = None
        self._first = True
        self._programs: set[tuple[Any, ...]] = set()
        self._orders: list[np.ndarray] = []

    def begin(self, whole: ArrayDataset | None = None, tell: Callable[[str], None] | None = None) -> None:
        """A fit() begins: its first step is looked at."""
        self.whole, self.tell, self._first = whole, tell, True
        self._orders.clear()

    def batch(self, batch: Batch, step: int, rate: Callable[[int], float] | None = None) -> None:
        """Before step `step` (from 0); a collective call where something is due. Raises ConfigError, DataError: on all
        ranks: they differ."""
        if self.comm.size == 1:
            return
        if self._first or self.every:
            self._orders.append(batch.indices if batch.numbers is None else batch.numbers)
        if not (self._first or (self.every and step % self.every == 0) or len(self._orders) > AHEAD):
            return
        self._first = False
        ahead = range(step, step + min(self.every or 1, AHEAD))
        rates = [] if rate is None else resume.probed(rate, ahead)  # one that fails says so where it is needed
        order = self._order()
        known = self.whole is not None and batch.dataset is self.whole
        batch = batch if known else batch.whole()
        mine = [
            hash_of((len(order), batch.dataset.form)),
            fingerprint.signed(_of_words(order)),
            0 if known else fingerprint.signed(of_batch(batch)),
            hash_of(rates),
        ]
        everyone = self.comm.all_gather(np.array(mine, np.int64))
        other = _first_other(everyone)
        if other is None:
            return
        shapes, orders, data, _ = (everyone[other] != everyone[0]).tolist()
        if shapes:
            said = texts(self.comm, f"{len(batch.indices)} samples of {batch.dataset.sample_shape}")
            raise DataError(
                f"[data] {self._at(step)} has {said[other]} on rank {other}, {said[0]} on rank 0; {_ALIKE}"
            ).on_all_ranks()
        if orders:
            self._differ_in_order(order, other, step)
        if data:
            self._differ_in_samples(batch, other, step)
            return
        everyone = self.comm.all_gather(np.array([-np.inf if r is None else r for r in rates], np.float64))
        at = int(np.flatnonzero(everyone[other].view(np.int64) != everyone[0].view(np.int64))[0])
        raise ConfigError(
            f"[train] the learning rate of step {step + at + 1} is {everyone[other, at]:g} on rank {other}, and "
            f"{everyone[0, at]:g} on rank 0; give all ranks the same schedule"
        ).on_all_ranks()

    def end(self) -> None:
        """After the last step of an epoch: compares which samples the steps had that were not compared yet."""
        if self.comm.size == 1 or not self.every:
            return
        order = self._order()
        everyone = self.comm.all_gather(np.array([len(order), fingerprint.signed(_of_words(order))], np.int64))
        other = _first_other(everyone)
        if other is not None:
            raise DataError(
                f"[data] the last batches of rank {other} have other samples than those of rank 0; {_ALIKE}"
            ).on_all_ranks()

    def program(self, key: tuple[Any, ...]) -> bool:
        """Whether the program of this kind of batch was not compared yet; from now on it is."""
        new = self.comm.size > 1 and key not in self._programs
        self._programs.add(key)
        return new

    def _at(self, step: int) -> str:
        return f"{self.unit} {step + 1}"

    def _order(self) -> np.ndarray:
        """The numbers of the samples since the last time, int64."""
        order = np.concatenate([np.asarray(o, np.int64) for o in self._orders] or [np.empty(0, np.int64)])
        self._orders.clear()
        return order

    def _differ_in_order(self, order: np.ndarray, other: int, step: int) -> None:
        everyone = self.comm.all_gather(order)
        at = int(np.flatnonzero(everyone[other] != everyone[0])[0])
        raise DataError(
            f"[data] by {self._at(step)} rank {other} is given sample {everyone[other, at]} where rank 0 is given "
            f"sample {everyone[0, at]}; {_ALIKE}, such as a sampler with one seed"
        ).on_all_ranks()

    def _differ_in_samples(self, batch: Batch, other: int, step: int) -> None:
        own = [fingerprint.signed(_of_words(_rows(batch.dataset, i[None]))) for i in batch.indices]
        found = self.comm.all_gather(np.array(own, np.int64))
        wrong = np.flatnonzero(found[other] != found[0])
        at = int(wrong[0]) if len(wrong) else 0
        number = f"sample {at} of the batch" if batch.numbers is None else f"sample {batch.numbers[at]}"
        text = f"[data] at {self._at(step)} {number} of {_name(batch)} is not on rank {other} what it is on rank 0"
        if self.tell is None:
            raise DataError(f"{text}: every rank must be given the same samples; {CURE}").on_all_ranks()
        self.tell(f"{text}; training goes on, as data may be nondeterministic, and its bits will not come again")
        self.tell = _silent


_ALIKE = "give all ranks the same batches"


def _silent(line: str) -> None:
    """What has been told once is not told again."""


def _name(batch: Batch) -> str:
    return batch.dataset.name.partition(",")[0]
