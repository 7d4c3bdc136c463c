"""Random values of every kind that a checkpoint can hold, and a strict comparison of two values."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Right(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()
    RUN = enum.auto()


class Bit(enum.IntFlag):
    ONE = 1
    TWO = 2


class Holder:
    class Inner(enum.Enum):
        A = 1


STRINGS = (
    "",
    "a",
    "\0",
    "\0int",
    "\0array",
    "\ud800",
    "\udfff x",
    "ä",
    "\U0001f600",
    "'\"\\",
    "\n",
    "a" * 500,
)
FLOATS = (0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.1)
INTEGERS = (0, 1, -1, 10**15 - 1, 10**15, -(10**15), 2**63, 10**100, -(10**100), 3**20_000)
DTYPES = (
    *("?", "b", "B", "<i2", ">i2", "<u4", ">u4", "<i8", ">i8", "<u8", "<f2", ">f2", "<f4", ">f4"),
    *("<f8", ">f8", "<c8", ">c8", "<c16", ">c16", "g", "G", "S3", "<U2", ">U2", "V5", "S0", "U0"),
    *("<M8[D]", ">M8[ns]", "<m8[s]", "<M8[25us]"),
    [("a", "<f4"), ("b", ">i2", (2, 3)), ("c", "U2")],
    {"names": ["x", "y"], "formats": ["<f8", "u1"], "offsets": [8, 0], "itemsize": 24},
    [("inner", [("z", "<c8"), ("flag", "?")]), ("t", "<M8[D]")],
)
SHAPES = ((), (0,), (1,), (3,), (2, 3), (0, 4), (4, 0, 2), (2, 1, 3))
SCALARS = (
    *(np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
)


def random_array(rng: random.Random) -> np.ndarray:
    """Returns an array of a random dtype, shape and memory layout."""
    dtype = np.dtype(rng.choice(DTYPES))
    shape = rng.choice(SHAPES)
    count = math.prod(shape) * 2
    size = count * dtype.itemsize
    if "U" in str(dtype):
        array = np.zeros(count, dtype)
        if dtype.names is None and dtype.itemsize and count:
            array[0] = rng.choice(["a", "äö", ""])
    elif dtype == np.dtype("?") or dtype.names:
        array = np.frombuffer(bytes(rng.randrange(2) for _ in range(size)), dtype) if size else None
        array = np.zeros(count, dtype) if array is None else array.copy()
    elif dtype.itemsize == 16 and dtype.kind == "f":
        array = np.array([rng.random() for _ in range(count)], dtype)
    elif dtype.itemsize == 32:
        array = np.array([complex(rng.random(), 1) for _ in range(count)], dtype)
    else:
        array = np.zeros(count, dtype)
        if size:
            array.view(np.uint8)[:] = list(rng.randbytes(size))
    layout = rng.randrange(4)
    half = array[: count // 2]
    if layout == 0:
        return half.reshape(shape)
    if layout == 1:
        return array[::2].reshape(shape)
    if layout == 2:
        return np.asfortranarray(half.reshape(shape))
    return half[::-1].reshape(shape)


def random_number(rng: random.Random) -> np.generic:
    """Returns a number of NumPy."""
    kind = rng.randrange(5)
    if kind == 0:
        return np.datetime64(rng.randrange(10**6), rng.choice(["D", "ns", "s"]))
    if kind == 1:
        return np.timedelta64(rng.randrange(10**6), rng.choice(["D", "ms"]))
    if kind == 2:
        return rng.choice(
            [np.str_("äb"), np.bytes_(b"ab\0c"), np.str_(""), np.bytes_(b""), np.void(b"abc")]
        )
    if kind == 3:
        return np.zeros(1, [("a", "<f4"), ("b", "i2")])[0]
    scalar = rng.choice(SCALARS)
    return scalar(rng.choice([0, 1, 100]))


def random_generator(rng: random.Random) -> Any:
    """Returns a random number generator of Python or NumPy in the middle of its numbers."""
    seed = rng.randrange(1000)
    kind = rng.randrange(4)
    if kind == 0:
        generator: Any = random.Random(seed)
        generator.gauss(0, 1)
        return generator
    if kind == 1:
        generator = np.random.RandomState(seed)
        generator.normal()
        return generator
    names = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    generator = np.random.Generator(getattr(np.random, rng.choice(names))(seed))
    generator.integers(10, dtype=np.uint32)
    return generator


def _date(rng: random.Random) -> Any:
    zone = rng.choice(
        [None, datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=-3))]
    )
    day = datetime.date(rng.randrange(1, 9999), 2, 3)
    time = datetime.time(1, 2, 3, rng.randrange(10**6), tzinfo=zone)
    return rng.choice(
        [day, time, datetime.datetime.combine(day, time), datetime.timedelta(-1, 3, 5)]
    )


def _other(rng: random.Random) -> Any:
    number = rng.randrange(100)
    return rng.choice(
        [
            complex(rng.choice(FLOATS), rng.choice(FLOATS)),
            rng.randbytes(number),
            b"",
            bytearray(rng.randbytes(3)),
            range(number, 200, 3),
            slice(None, number, 2),
            slice("a", None),
            pathlib.Path("a/b") / str(number),
            pathlib.PurePosixPath("a"),
            pathlib.PureWindowsPath("c:/a"),
            decimal.Decimal(number) / 7,
            decimal.Decimal("NaN"),
            decimal.Decimal("1.00"),
            fractions.Fraction(number, 7),
            uuid.UUID(int=number),
            ...,
            np.dtype(rng.choice(DTYPES)),
        ]
    )


def random_enum(rng: random.Random) -> enum.Enum:
    """Returns a member of an enum; flags may be combined or empty."""
    members = (
        *Color,
        *Level,
        *Holder.Inner,
        Right.READ | Right.RUN,
        Right(0),
        Bit.TWO,
        Bit(3),
        Bit(8),
    )
    return rng.choice(members)


def random_immutable(rng: random.Random) -> Any:
    """Returns a value that can be a key of a dict."""
    choices: list[Callable[[], Any]] = [
        lambda: rng.choice(STRINGS),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice([None, True, False]),
        lambda: random_enum(rng),
        lambda: _date(rng),
        lambda: rng.choice([b"a", 2j, pathlib.Path("x"), decimal.Decimal(3), np.float32(0.5)]),
        lambda: (rng.choice(INTEGERS), rng.choice(STRINGS)),
        lambda: frozenset([rng.choice(INTEGERS), rng.choice(STRINGS)]),
    ]
    return rng.choice(choices)()


def random_value(rng: random.Random, depth: int = 3) -> Any:
    """Returns a value of any kind, with containers up to a depth."""
    leaves: list[Callable[[], Any]] = [
        lambda: random_immutable(rng),
        lambda: random_array(rng),
        lambda: random_number(rng),
        lambda: random_generator(rng),
        lambda: _other(rng),
        lambda: _date(rng),
    ]
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(leaves)()
    items = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = [random_immutable(rng) for _ in range(len(items))]
    pairs = list(zip(keys, items, strict=True))
    counts = {key: rng.randrange(5) for key in keys}
    containers: list[Callable[[], Any]] = [
        lambda: items,
        lambda: tuple(items),
        lambda: dict(pairs),
        lambda: {str(number): item for number, item in enumerate(items)},
        lambda: collections.OrderedDict(pairs),
        lambda: collections.Counter(counts),
        lambda: collections.defaultdict(rng.choice([None, int, float, list, dict, set]), pairs),
        lambda: collections.deque(items, rng.choice([None, 4, 7])),
        lambda: set(keys),
        lambda: frozenset(keys),
    ]
    return rng.choice(containers)()


def same(one: Any, two: Any) -> bool:
    """Tells whether two values have the same types and contents, in the same order."""
    if type(one) is not type(two):
        return False
    if isinstance(one, enum.Enum):
        return one is two or (isinstance(one, enum.Flag) and one == two)
    if isinstance(one, float):
        return repr(one) == repr(two)
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, (np.ndarray, np.generic)):
        if one.dtype != two.dtype or one.shape != two.shape:
            return False
        if one.dtype.kind == "V" and one.dtype.names:
            return all(same(np.asarray(one[n]), np.asarray(two[n])) for n in one.dtype.names)
        if one.dtype.char in "gG":
            return bool(np.array_equal(one, two))
        return one.tobytes() == two.tobytes()
    if isinstance(one, random.Random):
        return one.getstate() == two.getstate()
    if isinstance(one, np.random.Generator):
        return _same_state(one.bit_generator.state, two.bit_generator.state)
    if isinstance(one, np.random.RandomState):
        return _same_state(one.get_state(legacy=False), two.get_state(legacy=False))
    if isinstance(one, (set, frozenset)):
        rest = list(two)
        for item in one:
            match = next((i for i, other in enumerate(rest) if same(item, other)), None)
            if match is None:
                return False
            rest.pop(match)
        return not rest
    if isinstance(one, dict):
        factory = getattr(one, "default_factory", None)
        if factory is not getattr(two, "default_factory", None) or len(one) != len(two):
            return False
        return all(
            same(a, c) and same(b, d)
            for (a, b), (c, d) in zip(one.items(), two.items(), strict=True)
        )
    if isinstance(one, collections.deque) and one.maxlen != two.maxlen:
        return False
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, decimal.Decimal):
        return str(one) == str(two)
    return bool(one == two)


def _same_state(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same_state(one[k], two[k]) for k in one)
    return bool(np.array_equal(one, two))
