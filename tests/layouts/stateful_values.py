"""Everything that a user's program may keep state in, one class for each kind.

Each class has `next()`, which changes the state and returns a number of it between 0 and 1.
stateful.py loads this file again for each run, so globals and class attributes start afresh, as
they do in a new process.
"""

import bisect
import collections
import dataclasses
import datetime
import decimal
import fractions
import functools
import heapq
import itertools
import pathlib
import random
import uuid

import numpy as np
from stateful_modes import Flags, Level, Mode

KINDS = {}


def kind(cls):
    """Adds a class to the kinds."""
    KINDS[cls.__name__] = cls
    return cls


def share(number, of):
    """Returns a number between 0 and 1, exactly the same on all machines."""
    return int(number) % of / of


# --- numbers, strings, enums ---


@kind
class Integer:
    def __init__(self, start):
        self.n = start

    def next(self):
        self.n = (self.n * 5 + 3) % 1009
        return share(self.n, 17)


@kind
class LongInteger:
    def __init__(self, start):
        self.n = 10**18 + start

    def next(self):
        self.n = self.n * 7 + 1
        return share(self.n, 19)


@kind
class Float:
    def __init__(self, start):
        self._x = start / 3

    def next(self):
        self._x = (self._x * 1.7 + 0.1) % 1.0
        return self._x


@kind
class Infinite:
    def __init__(self, start):
        self.best = float("inf")
        self.n = start

    def next(self):
        self.n = (self.n * 3 + 1) % 31
        self.best = float("-inf") if self.n % 7 == 0 else float(self.n)
        return 0.3 if self.best < 0 else share(self.best, 31)


@kind
class NumpyNumbers:
    def __init__(self, start):
        self.i, self.f, self.d, self.b = (
            np.int64(start),
            np.float32(0.1),
            np.float64(0.2),
            np.bool_(0),
        )

    def next(self):
        self.i = np.int64((self.i * 3 + 1) % 101)
        self.f = np.float32(self.f * np.float32(1.3) % np.float32(1))
        self.d = np.float64((self.d + self.f) % 1)
        self.b = np.bool_(self.d > 0.5)
        return float((self.d + 0.5 * self.b + share(self.i, 5)) % 1)


@kind
class SmallNumpyNumbers:
    def __init__(self, start):
        self.u, self.h = np.uint8(start % 7), np.float16(0.25)

    def next(self):
        self.u = np.uint8((int(self.u) * 5 + 3) % 251)
        self.h = np.float16(int(self.u) / 251)
        return float(self.h)


@kind
class Complex:
    def __init__(self, start):
        self.z, self.w = complex(1, 0), np.complex128(start)

    def next(self):
        self.z *= 0.6 + 0.8j
        self.w = np.complex128(self.w + self.z)
        return abs(self.z.real) % 1


@kind
class String:
    def __init__(self, start):
        self.text = "ä\0" + "x" * (start % 5)

    def next(self):
        self.text = self.text[-40:] + "abc"[len(self.text) % 3] + self.text[:1]
        return share(sum(map(ord, self.text)), 23)


@kind
class Bytes:
    def __init__(self, start):
        self.raw, self.buffer = bytes([start % 251]), bytearray(b"\0")

    def next(self):
        self.raw = bytes([(self.raw[-1] * 3 + 1) % 251]) + self.raw[:9]
        self.buffer.extend(self.raw[:1])
        return share(sum(self.buffer) + len(self.raw), 29)


@kind
class Enums:
    def __init__(self, start):
        self.mode, self.level, self.flags = Mode.SOFT, Level.LOW, Flags.A

    def next(self):
        self.mode = Mode.HARD if self.mode is Mode.SOFT else Mode.SOFT
        self.level = Level(self.level % 3 + 1)
        self.flags = Flags.A if Flags.B in self.flags else Flags.B
        return share(self.level * 3 + (self.mode is Mode.HARD) + 2 * self.flags.value, 16)


@kind
class CombinedFlags:
    def __init__(self, start):
        self.flags = Flags(0)
        self.n = start

    def next(self):
        self.n += 1
        self.flags = Flags(self.n % 4)
        return 0.2 * self.flags.value


@kind
class Optional:
    def __init__(self, start):
        self.best = None
        self.n = start

    def next(self):
        self.n = (self.n * 3 + 2) % 41
        self.best = self.n if self.best is None or self.n < self.best else None
        return 0.1 if self.best is None else share(self.best, 41)


@kind
class SwitchingType:
    def __init__(self, start):
        self.value = start

    def next(self):
        order = {int: str, str: float, float: list, list: tuple, tuple: int}
        seen = len(str(self.value))
        wanted = order[type(self.value)]
        number = seen % 9 + 1
        self.value = (
            [number] if wanted is list else (number,) if wanted is tuple else wanted(number)
        )
        return share(seen * 5, 13)


# --- containers ---


@kind
class List:
    def __init__(self, start):
        self.items = [start, 0.5, "a", None]

    def next(self):
        self.items.append(len(self.items))
        self.items[0] = (self.items[0] * 3 + len(self.items)) % 37
        if len(self.items) > 6:
            del self.items[1:3]
        return share(self.items[0], 37)


@kind
class Dict:
    def __init__(self, start):
        self.table = {"a": start, 3: 0.5, (1, "b"): [1], None: 2, 2.5: "x"}

    def next(self):
        self.table[len(self.table) % 5] = self.table["a"]
        self.table["a"] = (self.table["a"] * 3 + len(self.table)) % 43
        self.table[(1, "b")].append(self.table["a"])
        self.table[Mode.HARD] = self.table.pop(None, 0)
        if self.table["a"] % 3 == 0:
            self.table.pop(3, None)
        order = list(self.table)
        return share(self.table["a"] + 7 * order.index("a") + len(self.table[(1, "b")]), 47)


@kind
class DictOrder:
    """The order of keys counts."""

    def __init__(self, start):
        self.table = {"x": 1, "y": 2, "z": 3}

    def next(self):
        first = next(iter(self.table))
        self.table[first] = self.table.pop(first)
        return share(self.table[first] * 3, 10)


@kind
class Sets:
    def __init__(self, start):
        self.seen, self.frozen = {start}, frozenset()

    def next(self):
        self.seen.add((len(self.seen) * 7 + max(self.seen)) % 61)
        if len(self.seen) > 5:
            self.seen.discard(min(self.seen))
        self.frozen = frozenset(sorted(self.seen)[:2])
        return share(sum(self.seen) + len(self.frozen), 53)


@kind
class Deque:
    def __init__(self, start):
        self.window = collections.deque([start], maxlen=3)
        self.free = collections.deque()

    def next(self):
        self.window.append((sum(self.window) * 3 + 1) % 71)
        self.free.appendleft(self.window[0])
        if len(self.free) > 4:
            self.free.pop()
        return share(sum(self.window) + sum(self.free), 59)


@kind
class Counted:
    def __init__(self, start):
        self.counts = collections.Counter({start: 1})

    def next(self):
        key, number = self.counts.most_common(1)[0]
        self.counts.update([(key * 2 + number) % 5])
        return share(sum(k * v for k, v in self.counts.items()), 31)


@kind
class Ordered:
    def __init__(self, start):
        self.table = collections.OrderedDict(a=1, b=2, c=start % 5)

    def next(self):
        self.table.move_to_end(next(iter(self.table)))
        self.table["a"] += next(iter(self.table.values()))
        return share(self.table["a"], 21)


@kind
class Default:
    def __init__(self, start):
        self.groups = collections.defaultdict(list)
        self.n = start

    def next(self):
        self.n = (self.n * 3 + 1) % 11
        self.groups[self.n % 3].append(self.n)
        return share(sum(map(sum, self.groups.values())) + len(self.groups), 33)


@kind
class Nested:
    def __init__(self, start):
        self.tree = {"a": [{"b": (1, {start})}], 7: collections.deque([[1]], 2)}

    def next(self):
        inner = self.tree["a"][0]
        number, members = inner["b"]
        members.add(number * 3 % 17)
        inner["b"] = ((number * 5 + 2) % 19, members)
        self.tree[7].append([number])
        return share(number + sum(members) + len(self.tree[7]), 23)


@kind
class Heap:
    def __init__(self, start):
        self.heap = [(start % 5, "a")]

    def next(self):
        low, name = self.heap[0]
        heapq.heappush(self.heap, ((low * 3 + 4) % 17, name + "b"))
        if len(self.heap) > 4:
            heapq.heappop(self.heap)
        bisect.insort(self.heap, (low, "c"))
        self.heap = self.heap[-4:]
        heapq.heapify(self.heap)
        return share(sum(number for number, _ in self.heap), 19)


# --- arrays ---


@kind
class Arrays:
    def __init__(self, start):
        self.a = np.arange(3.0) + start
        self.i = np.zeros((2, 2), np.int32)
        self.empty = np.zeros((0, 3))
        self.scalar = np.array(0.5)

    def next(self):
        self.a *= 1.1
        self.a %= 1.0
        self.i[0, 1] += 3
        self.scalar[...] = float(self.a[0])
        return float((self.scalar + self.a[2] + share(self.i[0, 1], 7)) % 1)


@kind
class ReplacedArrays:
    def __init__(self, start):
        self.a = np.full(2, start, np.float32)

    def next(self):
        self.a = np.concatenate([self.a[-3:], self.a[:1] * np.float32(0.7) % 1 + np.float32(0.01)])
        return float(self.a.sum() % 1)


@kind
class ArraysInContainers:
    def __init__(self, start):
        self.table = {"best": np.zeros(2), (0, 1): [np.ones(1, np.int64) * start]}

    def next(self):
        self.table["best"][0] += 0.3
        self.table[(0, 1)].append(self.table[(0, 1)][-1] * 3 % 17)
        del self.table[(0, 1)][:-3]
        return float((self.table["best"][0] + share(self.table[(0, 1)][0][0], 17)) % 1)


@kind
class UnusualArrays:
    def __init__(self, start):
        self.view = np.arange(12.0).reshape(3, 4).T[::2]
        self.words = np.array(["a", "bc"])
        self.days = np.array(["2024-01-01"], "datetime64[D]")
        self.record = np.zeros(2, [("x", "f4"), ("y", "i8")])
        self.big = np.array([start], ">i4")
        self.flags = np.zeros(3, bool)

    def next(self):
        self.view[0, 1] = (self.view[0, 1] * 3 + 1) % 11
        self.words[0] = "xy"[int(self.view[0, 1]) % 2]
        self.days += 1
        self.record["y"][1] += 2
        self.big[0] += 1
        self.flags[int(self.big[0]) % 3] ^= True
        parts = [self.view[0, 1], self.words[0] == "x", self.record["y"][1], self.big[0]]
        return share(
            sum(map(int, parts)) + int(self.flags.sum()) + int(self.days.astype(int)[0]), 37
        )


# Not drawn, as SharedGenerator.
class SharedArray:
    """Two names of one array, one of them within a list."""

    def __init__(self, start):
        self.first = np.array([float(start % 5)])
        self.others = [self.first]

    def next(self):
        self.others[0] *= 0.6
        self.first += 0.25
        return float(self.others[0][0] % 1)


@kind
class SharedList:
    def __init__(self, start):
        self.reader = self.writer = [start]

    def next(self):
        self.writer.append(self.reader[-1] * 3 % 29)
        del self.writer[:-3]
        return share(sum(self.reader), 29)


# --- generators ---


@kind
class PythonRandom:
    def __init__(self, start):
        self.rng = random.Random(start)

    def next(self):
        self.rng.gauss(0, 1)
        return self.rng.random()


@kind
class NumpyGenerator:
    def __init__(self, start):
        self._rng = np.random.default_rng(start)

    def next(self):
        self._rng.integers(0, 5, dtype=np.uint32)
        return float(self._rng.random())


@kind
class OtherGenerators:
    def __init__(self, start):
        self.all = [
            np.random.Generator(b(start))
            for b in (np.random.Philox, np.random.MT19937, np.random.SFC64, np.random.PCG64DXSM)
        ]

    def next(self):
        self.all.append(self.all.pop(0)) if len(self.all) < 0 else None
        return float(sum(g.random() for g in self.all) % 1)


@kind
class OldRandomState:
    def __init__(self, start):
        self.rng = np.random.RandomState(start)

    def next(self):
        self.rng.randn()
        return float(self.rng.rand())


@kind
class ReseededGenerator:
    """The generator is replaced by another one."""

    def __init__(self, start):
        self.rng, self.start = np.random.default_rng(start), start

    def next(self):
        self.start += 1
        if self.start % 3 == 0:
            self.rng = np.random.default_rng(self.start)
        return float(self.rng.random())


# Not drawn: after a resume the two names are two generators.
class SharedGenerator:
    """A generator that is an attribute, and also in a dict."""

    def __init__(self, start):
        self.one = random.Random(start)
        self.two = {"rng": self.one}

    def next(self):
        self.two["rng"].random()
        return self.one.random()


# --- iterators ---


@kind
class CountIterator:
    def __init__(self, start):
        self.ids = itertools.count(start, 3)

    def next(self):
        return share(next(self.ids), 31)


@kind
class ListIterator:
    def __init__(self, start):
        self.items = iter([(start * i * 7) % 23 for i in range(400)])
        self.range = iter(range(1000))

    def next(self):
        return share(next(self.items) + next(self.range), 23)


# --- other values of the standard library ---


@kind
class Dates:
    def __init__(self, start):
        self.at = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)
        self.day, self.gap = datetime.date(2024, 2, 28), datetime.timedelta(hours=start)
        self.time = datetime.time(1, 2, 3)

    def next(self):
        self.gap += datetime.timedelta(seconds=7)
        self.at += self.gap
        self.day += datetime.timedelta(days=1)
        self.time = self.time.replace(second=(self.time.second + 1) % 60)
        return share(self.at.second + self.day.day + self.time.second, 61)


@kind
class Paths:
    def __init__(self, start):
        self.path = pathlib.Path("best") / str(start)

    def next(self):
        self.path = self.path.parent.parent / self.path.name / f"{len(str(self.path)) % 7}a"
        return share(sum(map(ord, str(self.path))), 23)


@kind
class ExactNumbers:
    def __init__(self, start):
        self.d, self.f = decimal.Decimal(start) / 3, fractions.Fraction(start + 1, 7)

    def next(self):
        self.d = (self.d * 3 + 1) % 5
        self.f = (self.f * 2 + fractions.Fraction(1, 3)) % 3
        return float((fractions.Fraction(self.d) + self.f) % 1)


@kind
class Ranges:
    def __init__(self, start):
        self.range, self.slice, self.id = range(start), slice(None, 3), uuid.UUID(int=start)

    def next(self):
        self.range = range(len(self.range), len(self.range) * 2 % 31 + 3, 1)
        self.slice = slice(self.slice.stop, (self.slice.stop * 3 + 1) % 13)
        self.id = uuid.UUID(int=self.id.int * 5 + 1 & (1 << 64) - 1)
        return share(self.range.stop + self.slice.stop + self.id.int, 41)


# --- objects ---


class _Slots:
    __slots__ = ("__hidden", "count", "inner")

    def __init__(self, start):
        self.count, self.__hidden = start, 1

    def more(self):
        self.__hidden = (self.__hidden * 3 + self.count) % 97
        self.count += 1
        return self.__hidden


class _Outer(_Slots):
    __slots__ = ("late",)


@kind
class Slots:
    def __init__(self, start):
        self.object = _Outer(start)
        self.object.inner = _Slots(start + 1)

    def next(self):
        number = self.object.more() + self.object.inner.more()
        self.object.late = (getattr(self.object, "late", 0) + number) % 101
        return share(self.object.late, 101)


@dataclasses.dataclass
class _Data:
    n: int
    seen: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _SlottedData:
    n: int
    x: float = 0.5


@kind
class Dataclasses:
    def __init__(self, start):
        self.data, self.slotted = _Data(start), _SlottedData(start)

    def next(self):
        self.data.n = (self.data.n * 3 + 1) % 83
        self.data.seen.append(self.data.n)
        self.slotted.x = (self.slotted.x + self.data.n / 7) % 1
        return (self.slotted.x + share(len(self.data.seen), 5)) % 1


class _Leaf:
    def __init__(self, n):
        self.n = n

    def more(self):
        self.n = (self.n * 3 + 2) % 79
        return self.n


@kind
class ObjectsInContainers:
    def __init__(self, start):
        self.leaves = [_Leaf(start), _Leaf(2)]
        self.by_name = {"a": _Leaf(3), 5: (_Leaf(4), 1)}

    def next(self):
        every = [*self.leaves, self.by_name["a"], self.by_name[5][0]]
        return share(sum(leaf.more() for leaf in every), 89)


@kind
class LinkedObjects:
    """Objects that hold each other."""

    def __init__(self, start):
        self.left, self.right = _Leaf(start), _Leaf(1)
        self.left.other, self.right.other = self.right, self.left
        self.left.owner = self

    def next(self):
        return share(self.left.other.more() + self.right.other.more(), 73)


@kind
class BoundMethod:
    def __init__(self, start):
        self.more = _Leaf(start).more

    def next(self):
        return share(self.more(), 79)


def _step(table, key, factor):
    table[key] = (table[key] * factor + 1) % 67
    return table[key]


@kind
class Partial:
    def __init__(self, start):
        self.more = functools.partial(_step, {"n": start}, "n", factor=5)

    def next(self):
        return share(self.more(), 67)


@kind
class NonlocalCell:
    def __init__(self, start):
        n = start
        seen = []

        def more():
            nonlocal n
            n = (n * 3 + len(seen)) % 61
            seen.append(n)
            return n

        self.more = more

    def next(self):
        return share(self.more(), 61)


@kind
class FunctionAttribute:
    def __init__(self, start):
        def more():
            more.calls = (more.calls * 5 + 1) % 59
            return more.calls

        more.calls = start
        self.more = more

    def next(self):
        return share(self.more(), 59)


@kind
class MutableDefault:
    def __init__(self, start):
        def more(kept=[start], *, table={"n": 1}):  # noqa: B006
            kept.append((kept[-1] * 3 + table["n"]) % 53)
            table["n"] += 1
            return kept[-1]

        self.more = more

    def next(self):
        return share(self.more(), 53)


@kind
class ClassAttribute:
    calls = 1
    table = {"n": 2}  # noqa: RUF012

    def __init__(self, start):
        type(self).calls = start

    def next(self):
        cls = type(self)
        cls.calls = (cls.calls * 3 + cls.table["n"]) % 101
        cls.table["n"] += 1
        return share(cls.calls, 101)


class _Base:
    shared = [1]  # noqa: RUF012


@kind
class InheritedClassAttribute(_Base):
    def __init__(self, start):
        self.start = start

    def next(self):
        self.shared.append((self.shared[-1] * 3 + self.start) % 47)
        return share(self.shared[-1], 47)


COUNT = 1
TABLE = {"n": 0, "seen": []}


@kind
class Globals:
    def __init__(self, start):
        self.start = start

    def next(self):
        global COUNT
        COUNT = (COUNT * 3 + self.start) % 103
        TABLE["n"] += COUNT
        TABLE["seen"] = [*TABLE["seen"][-2:], COUNT]
        return share(TABLE["n"] + sum(TABLE["seen"]), 103)


_RNG = random.Random(3)


def _draw():
    return _RNG.random()


@kind
class GlobalGenerator:
    def __init__(self, start):
        _RNG.seed(start)

    def next(self):
        return _draw()


@kind
class LateAttributes:
    """Attributes that are added and deleted while the program runs."""

    def __init__(self, start):
        self.n = start
        self.gone = 5

    def next(self):
        self.n = (self.n * 3 + 1) % 107
        setattr(self, f"late_{self.n % 3}", self.n)
        if hasattr(self, "gone"):
            del self.gone
        return share(sum(v for k, v in sorted(vars(self).items()) if k != "n"), 107)


@kind
class Property:
    def __init__(self, start):
        self._n = start

    @property
    def n(self):
        return self._n * 2

    @n.setter
    def n(self, value):
        self._n = value % 109

    def next(self):
        self.n = self.n * 3 + 1
        return share(self._n, 109)


@kind
class ReadOnly:
    """A class that does not let its attributes be set."""

    def __init__(self, start):
        object.__setattr__(self, "table", [start])

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def next(self):
        self.table.append((self.table[-1] * 3 + 1) % 113)
        return share(self.table[-1], 113)


@kind
class Mapping(dict):
    """A dict of the user's own class."""

    def __init__(self, start):
        super().__init__(n=start)
        self.calls = 0

    def next(self):
        self.calls += 1
        self["n"] = (self["n"] * 3 + self.calls) % 127
        self[self.calls % 4] = self["n"]
        return share(sum(self.values()), 127)


@kind
class Sequence(list):
    """A list of the user's own class."""

    def __init__(self, start):
        super().__init__([start])

    def next(self):
        self[0] = (self[0] * 3 + 1) % 131
        return share(self[0], 131)


@kind
class SequenceThatGrows(list):
    def __init__(self, start):
        super().__init__([start])

    def next(self):
        self.append((self[-1] * 3 + 1) % 137)
        return share(sum(self[-3:]), 137)


Pair = collections.namedtuple("Pair", "n seen")


@kind
class NamedTuple:
    def __init__(self, start):
        self.pair = Pair(start, [])

    def next(self):
        self.pair.seen.append((len(self.pair.seen) * 7 + self.pair.n) % 139)
        return share(sum(self.pair.seen), 139)


@kind
class StateDict:
    """An object with `state_dict()`, which returns only a part."""

    def __init__(self, start):
        self.n, self.more = start, [1]

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]

    def next(self):
        self.n = (self.n * 3 + sum(self.more)) % 149
        self.more.append(self.n % 5)
        return share(self.n, 149)


@kind
class CallableObject:
    def __init__(self, start):
        self.leaf = _Leaf(start)

    def __call__(self):
        return self.leaf.more()

    def next(self):
        return share(self(), 79)


@kind
class Cached:
    """A value that is computed once, and one that a cache holds."""

    def __init__(self, start):
        self.start, self.n = start, 0

    @functools.cached_property
    def base(self):
        return self.start * 3 + 1

    def next(self):
        self.n = (self.n * 3 + self.base) % 151
        return share(self.n, 151)


# --- generators of the process ---


@kind
class GeneratorOfPython:
    """A state that draws from `random`. odyssey seeds it before each event of a callback."""

    is_scoped = True

    def __init__(self, start):
        self.start = start

    def next(self):
        return (random.random() + self.start / 10) % 1


@kind
class GeneratorOfNumpy(GeneratorOfPython):
    """Draws from `numpy.random`."""

    def next(self):
        return float((np.random.standard_normal() + self.start / 10) % 1)
