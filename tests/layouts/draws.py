"""Random trainings, and random layouts for them: what `scripts/random-layouts` and its test are made of.

A case is a function of (seed, index). Each thing that is drawn has a list of draws: functions with a weight, added by
`@draw(kind, weight)`; a new data set, loss, network, optimizer or layout is one more such function. Each kind has
random numbers of its own, so what is added to one does not change what another draws of the same case.

What decides the bits of a training is drawn first (`Training`), then where it runs (`Layout`), which may look at it:
not everything goes together, and a case that is refused shows nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from odyssey import data, device, nn, optim
from odyssey import functional as F
from odyssey.core.tensor import Tensor
from odyssey.parallel.mesh import Mesh

RANKS = 4  # of the largest layout
ROWS = 4  # samples of a shard up to which it is computed in rows, which tensor parallelism does not split


class Random:
    """Numbers for one kind of draws of one case."""

    def __init__(self, seed: int, index: int, kind: str) -> None:
        self._generator = np.random.default_rng([seed, index, zlib.crc32(kind.encode())])

    def integer(self, low: int, high: int) -> int:
        """From low to high, both possible."""
        return int(self._generator.integers(low, high + 1))

    def size(self, high: int = 100) -> int:
        """From 1 to high: half of them up to 20, as small layers are where pieces are odd."""
        return self.integer(1, min(20, high)) if self.chance(0.5) else self.integer(1, high)

    def chance(self, share: float) -> bool:
        return bool(self._generator.random() < share)

    def one(self, values: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        total = None if weights is None else np.array(weights) / sum(weights)
        return values[int(self._generator.choice(len(values), p=total))]

    def number(self, low: float, high: float) -> float:
        """A number of three digits, its logarithm uniform."""
        return float(f"{math.exp(self._generator.uniform(math.log(low), math.log(high))):.3g}")


DRAWS: dict[str, list[tuple[float, Callable[..., Any]]]] = {}


def draw(kind: str, weight: float = 1.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: adds a function (random, ...) to the draws of a kind, chosen in proportion to its weight."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        DRAWS.setdefault(kind, []).append((weight, function))
        return function

    return add


def drawn(kind: str, random: Random, *given: Any) -> Any:
    """What one of the draws of a kind gives."""
    weights, functions = zip(*DRAWS[kind], strict=True)
    return random.one(functions, weights)(random, *given)


# --- networks --------------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]
Op = tuple[Any, ...]  # name, place, arguments


@dataclasses.dataclass(frozen=True)
class Network:
    """A model that can be made any number of times. `places`: devices that its layers are on."""

    text: str
    shape: Shape  # of a sample
    classes: int
    build: Callable[[], nn.Module]
    places: int = 1
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "interleaved")  # that its placement goes with
    micro: int | None = None  # samples of a micro-batch, where the model says so


GENERAL: dict[str, Callable[[Tensor], Tensor]] = {  # ops of tensors of any shape; each keeps it
    "center": lambda x: x - x.mean(1, True),
    "halves": lambda x: F.cat([x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1),
    "largest": lambda x: x / (x.abs().max(1, True) + 1),
    "where": lambda x: F.where(x > 0, x, 0.1 * x**2),
    "product": lambda x: x @ (x.transpose(-1, -2) @ x) * 0.01 if x.ndim > 2 else x,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
}


class Chain(nn.Module):
    """Ops one after the other, as `Draft` writes them down."""

    def __init__(self, ops: Sequence[Op], unused: Sequence[int] = (), frozen: Sequence[int] = ()) -> None:
        super().__init__()
        self.ops = tuple(ops)
        for i, (name, place, *given) in enumerate(ops):
            if name == "norm":
                layer = (nn.BatchNorm2d if given[1] else nn.BatchNorm1d)(given[0])
                setattr(self, f"layer{i}", layer @ device(place) if place else layer)
            make = {"linear": nn.Linear, "conv": nn.Conv2d, "add linear": nn.Linear, "from input": nn.Linear}.get(name)
            if make is not None:
                layer = make(*given[:-1], bias=given[-1])
                setattr(self, f"layer{i}", layer @ device(place) if place else layer)
            if name == "tied":  # the weight of another layer, a bias of its own
                other = getattr(self, f"layer{given[0]}")
                layer = nn.Linear(*other.weight.shape[::-1])
                layer.weight = other.weight
                setattr(self, f"layer{i}", layer @ device(place) if place else layer)
        for i in frozen:
            getattr(self, f"layer{i}").weight.requires_grad = False
        for i, size in enumerate(unused):
            setattr(self, f"unused{i}", nn.Linear(size, 3))

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        first, here = x, 0
        for i, (name, place, *given) in enumerate(self.ops):
            if place != here:
                x, here = x.to(place), place
            if name in ("linear", "conv", "tied", "norm"):
                x = getattr(self, f"layer{i}")(x)
            elif name == "add linear":
                x = x + getattr(self, f"layer{i}")(x)
            elif name == "again":
                x = getattr(self, f"layer{given[0]}")(x)
            elif name == "checkpoint":  # activations are computed again in the backward pass
                x = nn.checkpoint(getattr(self, f"layer{given[0]}"), x)
            elif name == "add":
                x = x + made[given[0]].to(place)
            elif name == "dropout":
                x = F.dropout(x, given[0], self.training)
            elif name == "gate":
                x = x * F.sigmoid(x)
            elif name == "general":
                x = GENERAL[given[0]](x)
            elif name == "from input":
                x = F.add(x, getattr(self, f"layer{i}")(F.flatten(first).to(place)))
            else:
                x = getattr(F, name)(x, *given)
            made.append(x)
        return x


@dataclasses.dataclass
class Draft:
    """Ops that fit one another; `shape` is what they give."""

    random: Random
    shape: Shape
    place: int = 0
    ops: list[Op] = dataclasses.field(default_factory=list)
    shapes: list[Shape] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = math.prod(self.shape)

    def put(self, name: str, *given: Any, shape: Shape | None = None) -> None:
        self.shape = shape or self.shape
        self.ops.append((name, self.place, *given))
        self.shapes.append(self.shape)

    def linear(self, outputs: int) -> None:
        if len(self.shape) > 1:
            self.put("flatten", shape=(math.prod(self.shape),))
        self.put("linear", self.shape[0], outputs, self.random.chance(0.8), shape=(outputs,))

    def activation(self) -> None:
        self.put(self.random.one(["relu", "tanh", "sigmoid", "gate"], [4, 3, 2, 1]))

    def extra(self) -> None:
        """Perhaps a residual addition, a layer used again, dropout."""
        random, (n, *more) = self.random, self.shape
        if random.chance(0.1):
            self.put("scale", random.one([0.5, -1.25]))
        if random.chance(0.05) and not more:
            self.put(random.one(["softmax", "log_softmax"]))
        if not more and n <= 60 and random.chance(0.2):
            self.put("add linear", n, n, random.chance(0.5))
        squares = [
            i for i, op in enumerate(self.ops) if op[0] == "linear" and op[1:4] == (self.place, n, n) and not more
        ]
        if squares and random.chance(0.6):
            self.put(random.one(["again", "checkpoint", "tied"]), random.one(squares))
        if not more and random.chance(0.08):
            self.put("from input", self.inputs, n, random.chance(0.5))
        same = [i for i, shape in enumerate(self.shapes[:-1]) if shape == self.shape]
        if same and random.chance(0.3):
            self.put("add", random.one(same))
        if random.chance(0.25):
            self.put("dropout", random.one([0.1, 0.5, 0.9]))
        if random.chance(0.12):
            self.put("general", random.one(list(GENERAL)))
        if random.chance(0.15):
            self.put("norm", n, len(more))

    def convolution(self) -> bool:
        """A convolution that fits, perhaps with pooling; False where none does."""
        random, (c, h, w) = self.random, self.shape
        kernel, stride, padding = (
            (random.integer(1, 4), random.integer(1, 4)),
            random.one([1, 1, 2]),
            random.one([0, 1]),
        )
        k = random.integer(1, 13)
        p, q = ((n + 2 * padding - r) // stride + 1 for n, r in zip((h, w), kernel, strict=True))
        if min(p, q) < 1 or kernel[0] > h + 2 * padding or kernel[1] > w + 2 * padding:
            return False
        self.put("conv", c, k, kernel, stride, padding, random.chance(0.8), shape=(k, p, q))
        self.activation()
        if min(p, q) >= 2 and random.chance(0.6):
            size = random.integer(2, min(3, p, q))
            step = random.one([None, 1, 2])
            by = step or size
            self.put(
                random.one(["max_pool2d", "avg_pool2d"]),
                size,
                step,
                shape=(k, (p - size) // by + 1, (q - size) // by + 1),
            )
        return True

    def network(self, classes: int, shape: Shape, unused: Sequence[int] = (), **more: Any) -> Network:
        """It, with a last layer."""
        self.linear(classes)
        ops, text = tuple(self.ops), _text(shape, self.ops)
        layers = [i for i, op in enumerate(ops[:-1]) if op[0] in ("linear", "conv")]
        frozen = (self.random.one(layers),) if layers and self.random.chance(0.07) else ()
        if unused:
            text += f", unused {' '.join(map(str, unused))}"
        if frozen:
            text += f", the weight of layer {frozen[0]} is fixed"
        return Network(text, shape, classes, functools.partial(Chain, ops, tuple(unused), frozen), **more)


def _text(shape: Shape, ops: Sequence[Op]) -> str:
    words = []
    for name, place, *given in ops:
        at = f"@{place}" if place else ""
        if name in ("linear", "add linear", "from input"):
            words.append(f"{name} {given[1]}{'' if given[-1] else ' without bias'}{at}")
        elif name == "conv":
            _, k, (r, t), stride, padding, bias = given
            words.append(f"conv {k}x{r}x{t}/{stride}+{padding}{'' if bias else ' without bias'}{at}")
        else:
            words.append(" ".join([name, *(str(g) for g in given if g is not None)]))
    return f"{'x'.join(map(str, shape))}: {', '.join(words)}"


def _unused(random: Random) -> list[int]:
    return [random.size(40)] if random.chance(0.1) else []


@draw("network", 4)
def multilayer(random: Random) -> Network:
    """Linear layers of any width; some of the same, so that there is something to share and to add."""
    shape = (random.size(),)
    draft = Draft(random, shape)
    width = random.size(60)
    for _ in range(random.integer(0, 4)):
        draft.linear(width if random.chance(0.4) else random.size())
        draft.activation()
        draft.extra()
    return draft.network(random.size(20), shape, _unused(random))


@draw("network", 3)
def convolutional(random: Random) -> Network:
    """Convolutions and pools, then linear layers."""
    shape = (random.integer(1, 4), random.integer(3, 13), random.integer(3, 13))
    draft = Draft(random, shape)
    for _ in range(random.integer(1, 3)):
        if not draft.convolution():
            break
        if random.chance(0.2):
            draft.put("dropout", 0.3)
    for _ in range(random.integer(0, 2)):
        draft.linear(random.size())
        draft.activation()
        draft.extra()
    return draft.network(random.size(20), shape, _unused(random))


@draw("network", 1.5)
def placed(random: Random) -> Network:
    """Layers with places of their own, in order, and sums of what was made on different ones."""
    places = random.integer(2, 4)
    shape = (random.size(),)
    draft = Draft(random, shape)
    width = random.size(50)
    for place in range(places):
        draft.place = place
        for _ in range(random.integer(1, 2)):
            draft.linear(width if random.chance(0.6) else random.size())
            draft.activation()
        draft.extra()
    schedules = ("gpipe", "1f1b")
    if random.chance(0.3):  # back where it began
        draft.place, schedules = 0, ("gpipe",)
    return draft.network(random.size(20), shape, places=places, schedules=schedules)


@draw("network", 1)
def staged(random: Random) -> Network:
    """A PipelineParallel of stages."""
    shape, classes = (random.size(),), random.size(20)
    widths = [random.size() for _ in range(random.integer(1, 3))]
    sizes = [shape[0], *widths, classes]
    kind = random.one([nn.Tanh, nn.ReLU, nn.Sigmoid])
    micro = random.integer(5, 20) if random.chance(0.8) else random.integer(1, 4)

    def build() -> nn.Module:
        stages = []
        for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False)):
            last = i == len(sizes) - 2
            stages.append(nn.Stage([nn.Linear(a, b), *([] if last else [kind()])]))
        return nn.PipelineParallel(stages, micro_batch_size=micro, schedule="1f1b")

    text = f"stages {'-'.join(map(str, sizes))} {kind.__name__}, micro-batches of {micro}"
    return Network(text, shape, classes, build, len(sizes) - 1, ("gpipe", "1f1b"), micro)


# --- data ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set, the same whenever it is made, and how it is cut into batches."""

    text: str
    samples: int
    batch: int
    build: Callable[[], Any]
    shuffle: bool = False
    prefetch: int = 0

    def loader(self, kind: type[data.DataLoader] = data.DataLoader) -> data.DataLoader:
        """A new one."""
        return kind(
            self.build(), batch_size=self.batch, shuffle=self.shuffle, seed=self.samples, prefetch=self.prefetch
        )


@draw("data", 3)
def numbers(random: Random, shape: Shape, classes: int, samples: int) -> tuple[str, Callable[[], Any]]:
    """Normal floats."""
    return "floats", functools.partial(_numbers, shape, classes, samples)


def _numbers(shape: Shape, classes: int, samples: int) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    return data.arrays(x, generator.integers(0, classes, samples), classes=classes)


@draw("data", 1)
def bytes_with_a_scale(random: Random, shape: Shape, classes: int, samples: int) -> tuple[str, Callable[[], Any]]:
    """uint8, scaled and shifted where they are read."""
    return "bytes", functools.partial(_bytes, shape, classes, samples)


def _bytes(shape: Shape, classes: int, samples: int) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.integers(0, 256, (samples, *shape), np.uint8)
    return data.arrays(x, generator.integers(0, classes, samples), classes=classes, scale=1 / 128, shift=-1.0)


@draw("data", 1)
def mostly_zeros(random: Random, shape: Shape, classes: int, samples: int) -> tuple[str, Callable[[], Any]]:
    """Floats of which one in ten is not 0, some of them -0: sums whose terms vanish."""
    return "mostly zeros", functools.partial(_zeros, shape, classes, samples)


def _zeros(shape: Shape, classes: int, samples: int) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    x *= generator.random(x.shape) < 0.1
    return data.arrays(x, generator.integers(0, classes, samples), classes=classes)


@draw("data", 0.7)
def overflowing(random: Random, shape: Shape, classes: int, samples: int) -> tuple[str, Callable[[], Any]]:
    """A few samples are so large that gradients, or the loss, are not finite."""
    return "floats, some huge", functools.partial(_huge, shape, classes, samples)


def _huge(shape: Shape, classes: int, samples: int) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    x[generator.random(samples) < 1 / 30] *= np.float32(1e38)
    x = np.clip(x, -3e38, 3e38)
    return data.arrays(x, generator.integers(0, classes, samples), classes=classes)


@draw("data", 1)
def one_by_one(random: Random, shape: Shape, classes: int, samples: int) -> tuple[str, Callable[[], Any]]:
    """A data set of one's own that gives a sample at a time."""
    return "a sample at a time", functools.partial(_Samples, shape, classes, samples)


class _Samples:
    def __init__(self, shape: Shape, classes: int, samples: int) -> None:
        self.classes = classes
        self._all = _numbers(shape, classes, samples)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self._all.images[i], int(self._all.labels[i])


# --- losses, optimizers, schedules -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss and what a network needs behind its last layer for it."""

    text: str
    build: Callable[[], Any]


@draw("loss", 4)
def cross_entropy(random: Random) -> Loss:
    return Loss("cross entropy", nn.CrossEntropyLoss)


@draw("loss", 1)
def likelihood(random: Random) -> Loss:
    return Loss("log-likelihood", lambda: lambda y, labels: nn.NLLLoss()(F.log_softmax(y), labels))


# --- other tasks: targets that are no classes, inputs that are several arrays ----------------------------------------


class Joined(nn.Module):
    """A model on the sum of its inputs, given one by one or in a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Any) -> Tensor:
        a, b = (given[0]["a"], given[0]["b"]) if len(given) == 1 else given
        return self.model(a + b.float())


def _targets(shape: Shape, outputs: int, samples: int, inputs: str, mixed: bool) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    y: Any = generator.random((samples, outputs))
    b = generator.integers(-2, 3, (samples, *shape))
    given = {"one": x, "two": (x, b), "dict": {"b": b, "a": x}}[inputs]
    return data.arrays(given, (y, generator.integers(0, outputs, samples)) if mixed else y)


def mixed_loss(y: Tensor, target: Any) -> Tensor:
    """Of numbers and classes."""
    return F.mse_loss(y, target[0]) * 0.5 + F.cross_entropy(y, target[1])


def of_one_s_own(y: Tensor, target: Any) -> Tensor:
    """A loss written with ops."""
    d = F.tanh(y) - target
    return F.mean(d * d * d * d)


@draw("task", 2)
def numbers_as_targets(random: Random) -> tuple[Loss, bool, tuple[str, ...] | dict[str, Any] | None]:
    kinds = [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss]
    made = random.one([*(Loss(k.__name__, k) for k in kinds), Loss("a loss of one's own", lambda: of_one_s_own)])
    return made, False, random.one([None, ("mae",), {"mse": "mse", "own": of_one_s_own}])


@draw("task", 1)
def numbers_and_classes(random: Random) -> tuple[Loss, bool, tuple[str, ...] | dict[str, Any] | None]:
    return Loss("squares and classes", lambda: mixed_loss), True, random.one([None, {"both": mixed_loss}])


Make = tuple[str, Callable[[], optim.Optimizer]]


def _made(kind: type[optim.Optimizer], **settings: Any) -> Make:
    words = [f"{k}={v}" for k, v in settings.items() if v]
    return f"{kind.__name__}({', '.join(words)})", functools.partial(kind, **settings)


@draw("optimizer", 3)
def sgd(random: Random) -> Make:
    momentum = random.one([0.0, 0.5, 0.9])
    decay = random.one([0.0, 0.01, 0.3])
    nesterov = momentum > 0 and random.chance(0.4)
    return _made(optim.SGD, lr=random.number(0.01, 0.3), momentum=momentum, weight_decay=decay, nesterov=nesterov)


@draw("optimizer", 2)
def adam(random: Random) -> Make:
    return _made(optim.Adam, lr=random.number(1e-3, 3e-2), weight_decay=random.one([0.0, 0.05]))


@draw("optimizer", 2)
def adamw(random: Random) -> Make:
    betas = random.one([(0.9, 0.999), (0.5, 0.9)])
    return _made(optim.AdamW, lr=random.number(1e-3, 3e-2), weight_decay=random.one([0.0, 0.01, 0.5]), betas=betas)


@draw("schedule", 3)
def none(random: Random) -> tuple[str, Callable[[int], float] | None]:
    return "", None


@draw("schedule", 2)
def named(random: Random) -> tuple[str, Callable[[int], float] | None]:
    name, warmup = random.one(["step", "cosine", "linear-warmup"]), random.integer(0, 2)
    return f"{name} after {warmup}", optim.schedule(name, 6, warmup)


# --- a training ------------------------------------------------------------------------------------------------------

LOOPS = ("fit", "fit with a validation set", "train_step", "fit and train_step in turns")


@dataclasses.dataclass(frozen=True)
class Training:
    """What decides the bits: nothing of where it runs."""

    network: Network
    data: Data
    loss: Loss
    optimizer: Make
    schedule: tuple[str, Callable[[int], float] | None]
    settings: dict[str, Any]  # of the trainer
    epochs: int
    loop: str = "fit"  # one of LOOPS
    metrics: Any = None

    @property
    def shards(self) -> int:
        """Of a step over as many samples as there are."""
        return -(-self.step // self.settings["shard_size"])

    @property
    def step(self) -> int:
        """Samples of the largest step."""
        return min(self.data.batch * self.settings["accumulation_steps"], self.data.samples)

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.data.samples // (self.data.batch * self.settings["accumulation_steps"]))

    @property
    def rows(self) -> bool:
        """Whether a shard of some step is so small that it is computed in rows."""
        n, batch = self.data.samples, self.data.batch
        sizes = self.step, n % (batch * self.settings["accumulation_steps"]), n % batch  # these: of an evaluation
        return self.settings["shard_size"] <= ROWS or any(0 < size <= ROWS for size in sizes)

    def __str__(self) -> str:
        given = {k: v for k, v in self.settings.items() if v not in (None, "fp32", 1, "skip") or k == "shard_size"}
        words = [
            self.network.text,
            f"{self.data.samples} samples ({self.data.text}{', shuffled' * self.data.shuffle}) by {self.data.batch}",
            self.loss.text,
            self.optimizer[0],
            self.schedule[0],
            f"{self.epochs} epochs",
            *([self.loop] if self.loop != LOOPS[0] else []),
            *(f"{k}={v}" for k, v in given.items()),
            f"metrics {' '.join(self.metrics)}" if self.metrics else "",
        ]
        return "; ".join(filter(None, words))


def training(seed: int, index: int) -> Training:
    """The training of a case."""
    kind = functools.partial(Random, seed, index)
    random = kind("training")
    network = drawn("network", kind("network"))
    shard = network.micro or (random.integer(1, ROWS) if random.chance(0.15) else random.integer(ROWS + 1, 33))
    batch = shard * random.integer(1, 9) + random.one([0, 0, random.integer(0, shard - 1)])
    if random.chance(0.1):
        batch = random.integer(1, shard)
    samples = batch * random.integer(1, 2) + (random.integer(1, batch) if random.chance(0.8) else 0)
    text, build = drawn("data", kind("data"), network.shape, network.classes, samples)
    schedule = drawn("schedule", kind("schedule"))
    loss = drawn("loss", kind("loss"))
    task = kind("task")
    metrics = task.one([None, ("accuracy", "top5"), {"second": "top2"}], [4, 1, 1])
    if task.chance(0.35):
        loss, mixed, metrics = drawn("task", task)
        inputs = "one" if network.micro or network.places > 1 else task.one(["one", "two", "dict"])
        text = f"{inputs} input{'s' * (inputs != 'one')}, targets that are {'also ' * mixed}numbers"
        build = functools.partial(_targets, network.shape, network.classes, samples, inputs, mixed)
        if inputs != "one":
            whole = network.build
            network = dataclasses.replace(network, build=lambda: Joined(whole()))
    settings = {
        "shard_size": shard,
        "accumulation_steps": random.one([1, 2, 3], [6, 2, 1]),
        "clip_norm": random.one([None, 0.05, 1.0], [3, 1, 1]),
        "precision": random.one(["fp32", "bf16", "fp16"], [8, 1, 1]),
        "seed": random.integer(0, 99),
        "nonfinite": random.one(["skip", "stop"], [3, 1]),
        "check_every": random.one([100, 1, 2]),
    }
    return Training(
        network,
        Data(text, samples, batch, build, random.chance(0.5), random.one([0, 0, 2])),
        loss,
        drawn("optimizer", kind("optimizer")),
        schedule,
        settings,
        random.integer(1, 2),
        metrics=metrics,
    )


# --- layouts ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a training runs: ranks, and settings of the trainer that change no bit."""

    ranks: int
    settings: dict[str, Any]

    @property
    def splits(self) -> bool:
        """Whether ranks have parts of the model or of its state."""
        mesh = self.settings.get("mesh", Mesh(1, 1, 1))
        return (mesh.pp or 1) * (mesh.tp or 1) > 1 or (self.settings.get("zero", 0) > 0 and self.ranks > 1)

    def __str__(self) -> str:
        words = (str(v) if k == "mesh" else f"{k}={v}" for k, v in self.settings.items())
        return f"{self.ranks} rank{'s' * (self.ranks != 1)}: {', '.join(words)}"


ALONE = Layout(1, {"threads": 1})


def _workers(random: Random, training: Training, dp: int) -> dict[str, Any]:
    """Threads, and no more workers than there are shards."""
    settings: dict[str, Any] = {"threads": random.integer(1, 3)}
    most = min(3, training.shards // dp)
    if most > 1 and random.chance(0.5):
        settings["num_gpus"] = random.integer(2, most)
    return settings


def _buckets(random: Random) -> dict[str, Any]:
    """How gradients are cut and when they are reduced."""
    settings: dict[str, Any] = {}
    if random.chance(0.6):
        settings["bucket_size_mb"] = random.one([1e-6, 1e-4, 1e-3, 1e-2])
    if random.chance(0.3):
        settings["overlap"] = False
    return settings


def _replicas(random: Random, training: Training, most: int = RANKS) -> int:
    return random.integer(1, max(1, min(most, training.shards)))


def _several(random: Random, training: Training) -> int:
    """As many ranks as there are shards for, two at least if there are."""
    return max(_replicas(random, training), min(2, training.shards))


@draw("layout", 2)
def replicas(random: Random, training: Training) -> Layout:
    dp = _several(random, training)
    settings = {**_workers(random, training, dp), **_buckets(random), "mesh": Mesh(dp=dp, pp=1)}
    reduction = random.one(["tree", "hierarchical", "parameter_server"], [3, 1, 1])
    if reduction != "tree":
        settings["reduction"] = reduction
    if reduction == "parameter_server" and dp > 1:
        settings["servers"] = random.integer(1, dp)
    if reduction == "hierarchical":
        settings["ranks_per_node"] = random.integer(1, dp)
    return Layout(dp, settings)


@draw("layout", 1)
def eager(random: Random, training: Training) -> Layout:
    dp = _replicas(random, training)
    return Layout(dp, {**_workers(random, training, dp), "mesh": Mesh(dp=dp, pp=1), "execution": "eager"})


@draw("layout", 4)
def zero(random: Random, training: Training) -> Layout:
    dp = _several(random, training)
    stage = random.integer(1, 3)
    settings = {**_workers(random, training, dp), **_buckets(random), "mesh": Mesh(dp=dp, pp=1), "zero": stage}
    if random.chance(0.2):
        settings["reduction"] = "hierarchical"
    return Layout(dp, settings)


@draw("layout", 4)
def shared_layers(random: Random, training: Training) -> Layout:
    """Tensor parallelism, also of replicas and of a pipeline's stages."""
    if training.rows or training.settings["precision"] != "fp32":
        return zero(random, training)
    tp = random.integer(2, RANKS)
    pp = random.integer(1, min(RANKS // tp, _stages(training)))
    return _mesh(random, training, pp, tp)


@draw("layout", 4)
def pipeline(random: Random, training: Training) -> Layout:
    if _stages(training) < 2:
        return zero(random, training)
    return _mesh(random, training, random.integer(2, min(RANKS, _stages(training))), 1)


def _stages(training: Training) -> int:
    """Into how many stages the network can be cut: by its own places, or between its ops."""
    if training.network.places > 1:
        return training.network.places
    return training.network.text.count(",") + 1


def _mesh(random: Random, training: Training, pp: int, tp: int) -> Layout:
    dp = _replicas(random, training, RANKS // (pp * tp))
    settings = {**_workers(random, training, dp), "mesh": Mesh(dp=dp, pp=pp, tp=tp)}
    if dp > 1 and random.chance(0.5):
        settings["zero"] = 1
    if pp > 1:
        allowed = [s for s in training.network.schedules if s != "interleaved" or 2 * pp <= _stages(training)]
        settings["pipeline_schedule"] = random.one(allowed)
    if dp > 1 and not settings.get("zero") and random.chance(0.2):
        settings["reduction"] = random.one(["hierarchical", "parameter_server"])
    return Layout(dp * pp * tp, settings)


def layout(seed: int, index: int, of: Training, number: int = 0) -> Layout:
    """The layout of a case, or number so and so of several."""
    random = Random(seed, index, f"layout {number}")
    return drawn("layout", random, of)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and the layout on which it is run beside one process."""

    training: Training
    layout: Layout

    def __str__(self) -> str:
        return f"{self.training} | {self.layout}"


def case(seed: int, index: int) -> Case:
    """Case number `index` of a seed; only what is stopped and resumed is always one fit()."""
    random, made = Random(seed, index, "loop"), training(seed, index)
    if (loop := random.one(LOOPS, [5, 1, 1, 1])) != LOOPS[0]:
        made = dataclasses.replace(made, loop=loop, epochs=random.integer(2, 4))
    return Case(made, layout(seed, index, made))


# --- stops and resumes -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stop:
    """A training runs on a layout until so many steps are taken, of all; None: to its end.

    kind: "limit" ends with a checkpoint of that step, "failure" in the middle of the next step, with what there is.
    """

    layout: Layout
    after: int | None
    kind: str = "limit"

    def __str__(self) -> str:
        return f"{self.layout}" + ("" if self.after is None else f", {self.kind} after step {self.after}")


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """A training with stops, and the layout whose undisturbed run it must equal."""

    training: Training
    undisturbed: Layout
    stops: tuple[Stop, ...]
    every: int | None  # steps from one checkpoint to the next

    def __str__(self) -> str:
        return f"{self.training} | checkpoint every {self.every or 'epoch'} | {' | '.join(map(str, self.stops))}"


def interrupted(seed: int, index: int) -> Interrupted:
    """The interrupted training of a case: on other layouts, or with sums that only such a layout gives."""
    random, made = Random(seed, index, "stops"), training(seed, index)
    while made.steps * made.epochs < 2:
        made = dataclasses.replace(made, epochs=made.epochs + 1)
    alike = made.shards > 1 and random.chance(0.2)
    first = of_its_own(random, made) if alike else layout(seed, index, made)
    points = sorted(random.integer(1, made.steps * made.epochs - 1) for _ in range(random.integer(1, 3)))
    stops = []
    for number, after in enumerate([*dict.fromkeys(points), None]):
        where = _alike(random, made, first) if alike else layout(seed, index, made, number)
        stops.append(Stop(where, after, random.one(["limit", "failure"])))
    every = random.one([None, 1, 2, 3])
    return Interrupted(made, first if alike else ALONE, tuple(stops), every)


def of_its_own(random: Random, training: Training) -> Layout:
    """Replicas, perhaps of a pipeline, whose sums are those of this layout only: in fewer bytes, or around a ring."""
    fp16 = training.settings["precision"] == "fp16"
    kind = random.one(["fp16", "bf16", "ring"] if fp16 else ["fp16", "bf16", "topk", "powersgd", "ring"])
    settings: dict[str, Any] = {"reduction": "ring"} if kind == "ring" else {"compression": kind}
    if kind == "topk":
        settings |= {"compression_ratio": random.one([0.01, 0.3]), "compression_warmup_steps": random.one([0, 3])}
    if kind == "powersgd":
        settings["powersgd_rank"] = random.integer(1, 3)
    if random.chance(0.3) and _stages(training) > 1:
        return Layout(4, {**settings, "mesh": Mesh(dp=2, pp=2), "pipeline_schedule": training.network.schedules[0]})
    dp = _several(random, training)
    if random.chance(0.4):
        settings["bucket_size_mb"] = random.one([1e-4, 1e-3])
    if random.chance(0.4):
        settings["zero"] = random.integer(1, 1 if kind in ("topk", "powersgd") else 3)
    return Layout(dp, {**settings, "mesh": Mesh(dp=dp, pp=1)})


def _alike(random: Random, training: Training, first: Layout) -> Layout:
    """The same ranks and buckets; other threads and workers, perhaps eager."""
    mesh, settings = first.settings["mesh"], dict(first.settings)
    if mesh.pp == 1 and not {"zero", "bucket_size_mb"} & settings.keys() and random.chance(0.2):
        settings["execution"] = "eager"
    return Layout(first.ranks, {**settings, **_workers(random, training, mesh.dp)})
