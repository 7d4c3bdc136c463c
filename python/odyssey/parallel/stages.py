"""A recorded program cut into pipeline stages: which rank runs which records, and which values
travel between them.

Pure functions over records. Every rank records the whole model (recording computes nothing) and
takes its own part from it, so all ranks agree on the cut without talking. A stage is a run of
forward records of one place; a later return to the same place is another stage (several stages per
rank: "interleaved"). Backward records belong to the stage of the op they are the gradient of.
Whatever a stage uses and another made is sent once, right after the part that made it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from ..core.arena import Arena
from ..core.fingerprint import hash_of
from ..core.native import GRADS, PARAMS
from ..core.program import Range, Record, Slot
from ..errors import ConfigError
from .buckets import padded, same_range, touched


@dataclasses.dataclass
class Transfer:
    """A value that goes from the rank of one part to that of another; one object, in both their
    lists.

    number tells it from all others of a micro-batch (a message tag is made of it).
    """

    number: int
    slot: Slot
    source: int  # position in the pipeline
    target: int

    @property
    def args(self) -> list[Slot]:
        """Returns what it uses, as a record's `args`."""
        return [self.slot]


@dataclasses.dataclass
class StageWork:
    """Work of one rank for one micro-batch and one stage in one direction."""

    stage: int
    phase: str  # "forward" or "backward"
    place: int  # position in the pipeline
    receives: list[Transfer] = dataclasses.field(default_factory=list)
    records: list[Record] = dataclasses.field(default_factory=list)
    sends: list[Transfer] = dataclasses.field(default_factory=list)


def partition(records: list[Record], place_of: Callable[[Record], int]) -> list[StageWork]:  # noqa: C901
    """The parts of a program in the order of one micro-batch: forward 0, 1, ..., then backward
    ..., 1, 0.

    place_of: the position in the pipeline of a record's device.

    Raises ConfigError: a value would be needed before it is made.
    """
    forward = [r for r in records if r.phase == "forward"]
    users: dict[int, Record] = {}
    for r in reversed(records):
        if r.op != "array":
            users.update((id(a), r) for a in r.args if isinstance(a, Slot))

    stage_of: dict[int, int] = {}
    places: list[int] = []
    stages: dict[int, int] = {}
    for r in (r for r in forward if r.op != "array"):
        if not places or places[-1] != place_of(r):
            places.append(place_of(r))
        stages[id(r)] = len(places) - 1
        stage_of.setdefault(r.tag, len(places) - 1)
    # every rank has the data set: whoever needs an array reads it
    for r in (r for r in forward if r.op == "array"):
        stages[id(r)] = stage_of.get(users[id(r.args[0])].tag, 0) if id(r.args[0]) in users else 0
    count = len(places)
    parts = [StageWork(s, "forward", places[s]) for s in range(count)]
    if len(forward) < len(records):
        parts += [StageWork(s, "backward", places[s]) for s in reversed(range(count))]
    index = {(p.phase, p.stage): i for i, p in enumerate(parts)}
    part_of_slot: dict[int, int] = {}  # slot -> part of the first record that uses it
    first: dict[int, int] = {}  # parameter (offset) -> the first stage that reads it
    for r in records:
        for a in r.args:
            if isinstance(a, Range) and a.space == PARAMS and r.tag in stage_of:
                first[a.offset] = min(first.get(a.offset, count), stage_of[r.tag])
    adds: dict[int, dict[int, Range]] = {}  # parameter -> parts that add to its gradient
    for r in records:
        gradients = (
            [a for a in r.args if isinstance(a, Range) and a.space == GRADS]
            if r.phase == "backward"
            else []
        )
        s = stages.get(id(r), stage_of.get(r.tag, count))
        if s < count:
            i = index[r.phase, s]
        # its op, a view, has a record in the backward pass alone: as soon as what it needs is there
        else:
            i = max((count, *(part_of_slot[id(a)] for a in r.args if id(a) in part_of_slot)))
        # what comes after another addition to the same gradient stays after it
        i = max((i, *(max(adds.get(a.offset, (0,))) for a in gradients)))
        for a in gradients:
            adds.setdefault(a.offset, {})[i] = a
        for a in r.args:
            if isinstance(a, Slot):
                part_of_slot.setdefault(id(a), i)
        if r.op == "array":
            parts[i].records.insert(0, r)
        else:
            parts[i].records.append(r)
    numbers = itertools.count()
    _transfers(parts, part_of_slot, numbers)
    for offset, range_of_part in adds.items():
        owner = index["backward", first.get(offset, count - 1)]
        _hand_on(
            parts,
            sorted({*range_of_part, max(owner, *range_of_part)}),
            range_of_part[max(range_of_part)],
            numbers,
        )
    return parts


def together(records: list[Record]) -> set[int]:
    """The numbers of ops between which and the op before no cut can be: a checkpoint's, which
    are repeated in order.
    """
    first_tag: dict[int, int] = {}
    uncuttable: set[int] = set()
    for r in (r for r in records if r.phase == "backward"):
        for a in r.args:
            if isinstance(a, Slot):
                uncuttable.update(range(first_tag.setdefault(id(a), r.tag) + 1, r.tag + 1))
    return uncuttable


def placed_like(
    records: list[Record], arena: Arena, used: dict[int, list[int]]
) -> Callable[[Record], int]:
    """From records to positions in the pipeline, by those of the ops of another program that
    read each parameter.

    The k-th op with some parameters is where it was there, and what follows it as well.
    """
    of_tag: dict[int, int] = {}
    readers: dict[int, list[int]] = {}  # parameter -> ops so far that read it
    reads = [(r.tag, touched(r, arena, PARAMS)) for r in records if r.phase == "forward"]
    place = next((used[offsets[0]][0] for _, offsets in reads if offsets and offsets[0] in used), 0)
    for tag, offsets in reads:
        for o in offsets:
            readers.setdefault(o, []).extend([tag] * (tag not in readers.get(o, ())))
        if offsets:
            places = used.get(offsets[0], [place])
            place = places[min(len(readers[offsets[0]]), len(places)) - 1]
        of_tag[tag] = place

    def place_of(number: int) -> int:
        return of_tag[max((tag for tag in of_tag if tag <= number), default=min(of_tag))]

    for tag in sorted(together(records), reverse=True):
        of_tag[tag - 1] = place_of(tag)
    return lambda r: place_of(r.tag)


def ops_of(records: list[Record]) -> int:
    """A hash of the ops of a program: those of equal ones have the same numbers, and so the same
    places.
    """
    return hash_of([(r.op, r.tag, r.phase) for r in records])


def check_used(
    records: list[Record],
    arena: Arena,
    place_of: Callable[[Record], int],
    used: dict[int, list[int]],
) -> None:
    """Raises ConfigError: a parameter is used where it was not in the first program, so no rank
    there trains it.
    """
    for r in records:
        for o in touched(r, arena, PARAMS):
            if place_of(r) not in used.get(o, ()):
                name = next(name for name, offset in arena.offsets.items() if offset == o)
                raise ConfigError(
                    f"[pipeline] {name} is used on stage {place_of(r) + 1} now, where it was not "
                    "in the first step, so "
                    "it is not trained there; use it from the first step on, or --pp 1"
                )


def _transfers(
    parts: list[StageWork], part_of_slot: dict[int, int], numbers: Iterator[int]
) -> None:
    """Fills in what the parts send each other. part_of_slot: slot -> its maker. numbers: of
    transfers to come.
    """
    have = {(slot, parts[i].place) for slot, i in part_of_slot.items()}
    for i, part in enumerate(parts):
        for r in part.records:
            for a in r.args:
                if not isinstance(a, Slot):
                    continue
                source = parts[part_of_slot[id(a)]]
                if part_of_slot[id(a)] > i:
                    raise ConfigError(
                        f"[pipeline] {r.op} of stage {part.stage} needs a value that is made later"
                    )
                if (id(a), part.place) not in have:
                    _send(source, part, a, numbers)
                    have.add((id(a), part.place))


def _send(source: StageWork, target: StageWork, slot: Slot, numbers: Iterator[int]) -> None:
    t = Transfer(next(numbers), slot, source.place, target.place)
    source.sends.append(t)
    target.receives.append(t)


def _hand_on(
    parts: list[StageWork], part_indices: list[int], gradient: Range, numbers: Iterator[int]
) -> None:
    """Makes a gradient to which parts on several places add a value that each hands on to the
    next, up to the last.
    """
    if len({parts[i].place for i in part_indices}) == 1:
        return
    floats = padded(gradient.arena)[gradient.offset // 4]
    slot = Slot(4 * floats)
    for part in (parts[i] for i in part_indices):
        for j, r in enumerate(part.records):
            if any(same_range(a, gradient) for a in r.args):
                part.records[j] = r.changed(
                    args=[slot if same_range(a, gradient) else a for a in r.args]
                )
    parts[part_indices[0]].records.insert(0, Record("fill", [slot, 0.0, floats], phase="backward"))
    parts[part_indices[-1]].records.append(
        Record("copy", [gradient, slot, floats], phase="backward")
    )
    for a, b in itertools.pairwise(part_indices):
        if parts[a].place != parts[b].place:
            _send(parts[a], parts[b], slot, numbers)


def edges(parts: list[StageWork]) -> set[tuple[int, int]]:
    """The pairs (r, s), r < s, of stages of which r hands something to s; neighbours in the
    order always count.
    """
    to = {t.number: p.stage for p in parts for t in p.receives}
    forward = [p for p in parts if p.phase == "forward"]
    pairs = {(p.stage, to[t.number]) for p in forward for t in p.sends if to[t.number] > p.stage}
    return pairs | {(s, s + 1) for s in range(len(forward) - 1)}
