"""Programs that keep state in places that are easy to overlook, for test_places.py.

Each kind changes its state at random in a step (`change`), and has a number that depends on all of
it (`number`). The number sets the learning rate, so the weights of a run depend on it.
"""

from __future__ import annotations

import collections
import enum
import io
import logging
import multiprocessing
import os
import random
import threading
from typing import Any

import numpy as np

from odyssey import DistributedTrainer, callbacks, data, errors, nn, optim

EPOCHS = 2
SAMPLES = 40
BATCH = 10
STEPS = EPOCHS * SAMPLES // BATCH


class Kind:
    """State in one place. A program creates it anew when it starts."""

    def start(self, context: Any) -> None:
        """Is called in on_fit_start."""

    def change(self, context: Any, rng: random.Random) -> None:
        """Changes the state at random."""
        raise NotImplementedError

    def number(self, context: Any) -> float:
        """Returns a number that depends on all of the state."""
        raise NotImplementedError


class OnTrainer(Kind):
    def change(self, context, rng):
        context.trainer.bad_steps = getattr(context.trainer, "bad_steps", 0) + rng.randrange(5)

    def number(self, context):
        return getattr(context.trainer, "bad_steps", 0)


class OnContext(Kind):
    def change(self, context, rng):
        best = getattr(context, "best", {"value": 0, "seen": []})
        best["seen"].append(rng.randrange(9))
        best["value"] += rng.random()
        context.best = best

    def number(self, context):
        best = getattr(context, "best", {"value": 0, "seen": []})
        return best["value"] + sum(best["seen"])


class OnLoader(Kind):
    def change(self, context, rng):
        context.loader.seen = [*getattr(context.loader, "seen", ()), rng.randrange(9)]

    def number(self, context):
        return sum(n * v for n, v in enumerate(getattr(context.loader, "seen", ())))


class Watcher(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0


class LastRecords(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records = collections.deque(maxlen=3)


class Meter(io.RawIOBase):
    def __init__(self) -> None:
        self.written = 0


class Job(multiprocessing.Process):
    def __init__(self) -> None:
        super().__init__()
        self.results = {}


class OnResources(Kind):
    def __init__(self):
        self.thread = Watcher()
        self.handler = LastRecords()
        self.file = Meter()
        self.job = Job()

    def change(self, context, rng):
        which = rng.randrange(4)
        if which == 0:
            self.thread.count += rng.randrange(5)
            self.thread.late = [rng.randrange(5)]
        elif which == 1:
            self.handler.records.append(rng.random())
        elif which == 2:
            self.file.written += rng.randrange(9)
        else:
            self.job.results[rng.randrange(4)] = rng.random()

    def number(self, context):
        late = sum(getattr(self.thread, "late", ()))
        jobs = sum(key * value for key, value in self.job.results.items())
        return self.thread.count + late + sum(self.handler.records) + self.file.written + jobs


class Phase(enum.Enum):
    WARM = 1
    HOT = 2


class OnEnumMembers(Kind):
    def __init__(self):
        for phase in Phase:
            vars(phase).pop("visits", None)
        self.phase = Phase.WARM

    def change(self, context, rng):
        self.phase = rng.choice(list(Phase))
        self.phase.visits = getattr(self.phase, "visits", 0) + rng.randrange(4)

    def number(self, context):
        visits = [getattr(phase, "visits", 0) for phase in Phase]
        return visits[0] + 2 * visits[1] + self.phase.value


class Counting(type):
    created = 0


class Counted(metaclass=Counting):
    pass


class Remembering:
    """A descriptor that remembers what was assigned."""

    def __init__(self) -> None:
        self.last = 0.0
        self.times = 0

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else self.last

    def __set__(self, owner: Any, value: float) -> None:
        self.last = value
        self.times += 1


class Described:
    rate = Remembering()


class OnClasses(Kind):
    def __init__(self):
        Counting.created = 0
        descriptor = vars(Described)["rate"]
        descriptor.last, descriptor.times = 0.0, 0
        self.described = Described()
        self.counted = Counted()

    def change(self, context, rng):
        if rng.random() < 0.5:
            Counting.created += rng.randrange(4)
        else:
            self.described.rate = rng.random()

    def number(self, context):
        return Counting.created + self.described.rate + vars(Described)["rate"].times


class InEnvironment(Kind):
    def __init__(self):
        os.environ.pop("PLACES_MODE", None)

    def change(self, context, rng):
        os.environ["PLACES_MODE"] = str(self.number(context) + rng.randrange(9))

    def number(self, context):
        return int(os.environ.get("PLACES_MODE", 0))


def warm(x: float) -> float:
    return x + 1.0


def decay(x: float) -> float:
    return 0.5 * x


RULES = {"double": lambda x: 2 * x, "flat": lambda x: 3.0}


class Base:
    scale = 1.0


class Other(Base):
    scale = 3.0


class Functions(Kind):
    """Functions and classes that are switched."""

    def __init__(self):
        self.rule = warm
        self.named = RULES["double"]
        self.kind = Base
        self.phase = self.early

    def early(self, x):
        return x

    def late(self, x):
        return x + 0.25

    def change(self, context, rng):
        which = rng.randrange(4)
        if which == 0:
            self.rule = decay if self.rule is warm else warm
        elif which == 1:
            self.named = RULES[rng.choice(["double", "flat"])]
        elif which == 2:
            self.kind = Other if self.kind is Base else Base
        else:
            self.phase = rng.choice([self.early, self.late])

    def number(self, context):
        return self.phase(self.rule(self.named(self.kind.scale)))


class Rate:
    """An object whose method counts its calls."""

    step = 1

    def __init__(self, size: float) -> None:
        self.size = size

    def rate(self) -> float:
        self.size += self.step
        return self.size

    def __private(self) -> float:
        return -self.size

    def choose(self) -> Any:
        return self.__private

    @classmethod
    def of_class(cls) -> float:
        return cls.step


class Faster(Rate):
    step = 3


class Methods(Kind):
    """Methods of other objects of the same class, of classes, and of lists."""

    def __init__(self):
        self.first, self.second = Rate(1), Rate(2)
        self.rates = [Rate(3), Rate(4), Faster(5)]
        self.rule = self.first.rate
        self.rules = {"a": self.rates[0].rate, "b": [self.second.rate, 1]}
        self.made = Rate.of_class
        self.short, self.long = [1], [2]
        self.push = self.short.append
        self.late = None

    def change(self, context, rng):
        some = [self.first, self.second, *self.rates]
        which = rng.randrange(7)
        if which == 0:
            self.rule = rng.choice(some).rate
        elif which == 1:
            self.rules["a"] = rng.choice(some).rate
        elif which == 2:
            self.rules["b"][0] = rng.choice(some).choose()
        elif which == 3:
            self.made = rng.choice([Rate, Faster]).of_class
        elif which == 4:
            self.push = rng.choice([self.short, self.long]).append
        elif which == 5:
            self.late = rng.choice([None, rng.choice(some).rate])
        else:
            self.rules["b"] = [rng.choice(some).rate, rng.randrange(3)]
        self.push(rng.randrange(5))

    def number(self, context):
        called = [self.rule, self.rules["a"], self.rules["b"][0], self.made]
        numbers = [one() for one in called] + [self.late() if self.late else 0]
        sizes = [one.size for one in (self.first, self.second, *self.rates)]
        numbers += [sum(self.short), sum(self.long), self.rules["b"][1], *sizes]
        return sum((n + 1) * number for n, number in enumerate(numbers))


class ReplacedLists(Kind):
    """Lists that two places share when the program starts."""

    def __init__(self):
        shared = [1, 2]
        self.first, self.second = shared, shared
        self.rows = [[1], [2], [3]]
        self.row = self.rows[0]
        self.nested = {"a": shared, "b": [shared]}

    def change(self, context, rng):
        which = rng.randrange(9)
        if which == 0:
            self.first = list(self.first)
        elif which == 1:
            self.second = [rng.randrange(5)]
        elif which == 2:
            self.second = self.first
        elif which == 3:
            self.row = rng.choice(self.rows)
        elif which == 4:
            self.rows[rng.randrange(3)] = self.row
        elif which == 5:
            self.row = [rng.randrange(5)]
        elif which == 6:
            self.nested["b"].append(rng.choice([self.first, self.second, [4]]))
        elif which == 7:
            self.rows.append(self.rows[rng.randrange(len(self.rows))])
        else:
            self.nested["a"] = rng.choice([self.row, self.first])
        for one in (self.first, self.second, self.row, self.nested["a"], rng.choice(self.rows)):
            if rng.random() < 0.5:
                one.append(rng.randrange(5))

    def number(self, context):
        lists = [self.first, self.second, self.row, self.nested["a"], *self.nested["b"], *self.rows]
        return sum((n + 1) * sum(one) for n, one in enumerate(lists)) % 1000


class Item:
    def __init__(self, size: int) -> None:
        self.size = size


class OrderedDicts(Kind):
    """Dicts whose items are moved to the end."""

    def __init__(self):
        self.values = {"a": 1, "b": 2, "c": 3}
        self.objects = {name: Item(n) for n, name in enumerate("abcd")}

    def change(self, context, rng):
        one = rng.choice([self.values, self.objects])
        key = rng.choice(list(one))
        one[key] = one.pop(key)
        next(iter(self.objects.values())).size += 1

    def number(self, context):
        words = "".join(self.values) + "".join(self.objects)
        sizes = sum((n + 1) * item.size for n, item in enumerate(self.objects.values()))
        return sum(n * ord(c) for n, c in enumerate(words)) % 97 + sizes


class Tuples(Kind):
    """Objects that are put into new tuples, lists and dicts, or are swapped."""

    def __init__(self):
        self.first, self.second = Item(1), Item(2)
        self.pair = (self.first, self.second)
        self.order = (self.first, 3)
        self.queue = None

    def change(self, context, rng):
        which = rng.randrange(7)
        some = [self.first, self.second, *self.pair]
        if which == 0:
            self.first, self.second = self.second, self.first
        elif which == 1:
            self.pair = (rng.choice(some), rng.choice(some))
        elif which == 2:
            self.order = (rng.choice(some), rng.randrange(5))
        elif which == 3:
            self.queue = [rng.choice([self.first, self.second]), rng.randrange(3)]
        elif which == 4:
            self.queue = {"a": self.first, "b": [self.second, [rng.randrange(3)]]}
        elif which == 5:
            self.queue = None
        else:
            self.queue = rng.choice([(), (self.first,), (1, self.second, [2])])
        self.first.size += 1
        self.pair[0].size += rng.randrange(3)

    def number(self, context):
        sizes = [one.size for one in (self.first, self.second, *self.pair, self.order[0])]
        return sum((n + 1) * s for n, s in enumerate(sizes)) + self.order[1] + flat(self.queue)


def flat(value: Any) -> float:
    """Returns a number that depends on all items of lists, tuples and dicts of objects."""
    if isinstance(value, dict):
        return flat(list(value.values()))
    if isinstance(value, (list, tuple)):
        return sum((n + 1) * flat(item) for n, item in enumerate(value))
    return value.size if isinstance(value, Item) else float(value or 0)


class Arrays(Kind):
    """Slices of arrays, and arrays in lists, that steps store."""

    def __init__(self):
        self.table = np.arange(12.0).reshape(4, 3)
        self.row = self.table[0]
        self.window = None
        self.kept = []

    def change(self, context, rng):
        which = rng.randrange(5)
        if which == 0:
            self.row = self.table[rng.randrange(4)]
        elif which == 1:
            self.window = self.table[1:3, rng.randrange(3) :]
        elif which == 2:
            self.kept.append(rng.choice([self.table, self.table[rng.randrange(4)], np.ones(3)]))
        elif which == 3:
            self.table = np.arange(12.0).reshape(4, 3) + rng.randrange(3)
        else:
            self.row = self.row.copy()
        self.table += 1
        self.row *= 0.5
        if self.window is not None:
            self.window -= 1

    def number(self, context):
        arrays = [self.table, self.row, *self.kept]
        if self.window is not None:
            arrays.append(self.window)
        return sum((n + 1) * float(one.sum()) for n, one in enumerate(arrays)) % 1000


class Parameters(Kind):
    """Parameters of the model that are held elsewhere too."""

    def start(self, context):
        self.all = list(context.trainer.model.parameters())
        self.target = self.all[0]

    def change(self, context, rng):
        if len(self.all) > 1 and rng.random() < 0.4:
            self.all.pop(rng.randrange(len(self.all)))
        else:
            self.target = rng.choice(self.all)

    def number(self, context):
        return float(np.asarray(self.target.data).sum()) + sum(p.data.size for p in self.all)


KINDS = (
    OnTrainer,
    OnContext,
    OnLoader,
    OnResources,
    OnEnumMembers,
    OnClasses,
    InEnvironment,
    Functions,
    Methods,
    ReplacedLists,
    OrderedDicts,
    Tuples,
    Arrays,
    Parameters,
)


class Places(callbacks.Callback):
    """Changes kinds of state at random after each step."""

    _not_state = ("seed", "stop")

    def __init__(self, seed: int, kinds: list[type[Kind]], stop: int | None) -> None:
        self.seed = seed
        self.stop = stop
        self.held = {kind.__name__: kind() for kind in kinds}
        self.numbers: list[float] = []

    def on_fit_start(self, context: callbacks.Context) -> None:
        for kind in self.held.values():
            kind.start(context)

    def on_step_end(self, context: callbacks.Context) -> None:
        total = 0.0
        for name, kind in self.held.items():
            rng = random.Random(f"{self.seed} {context.steps} {name}")
            kind.change(context, rng)
            total += kind.number(context)
        self.numbers.append(round(total, 6))
        context.trainer.optimizer.lr = 0.01 * (1 + total % 7)
        if context.steps == self.stop:
            context.stop = "the test"


def train(
    seed: int,
    kinds: list[type[Kind]],
    folder: Any = None,
    stop: int | None = None,
    make: Any = Places,
    **fit: Any,
) -> tuple[str, list[float]]:
    """Trains a program, and returns the hash of the weights and the numbers of all steps.

    make: the class of its callback. fit: further arguments of fit().
    """
    nn.manual_seed(0)
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(SAMPLES, 4)).astype(np.float32)
    loader = data.DataLoader(data.arrays(inputs, draw.integers(0, 3, SAMPLES)), batch_size=BATCH)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    trainer = DistributedTrainer(net, optim.SGD(lr=0.1), shard_size=5, threads=1)
    places = make(seed, kinds, stop)
    if folder is not None:
        fit.update(checkpoint_dir=folder, checkpoint_every=1)
    try:
        trainer.fit(loader, epochs=EPOCHS, callbacks=[places], verbose=False, **fit)
    except errors.Stopped:
        pass
    return trainer.weights_sha256(), places.numbers
