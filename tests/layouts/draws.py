"""Random trainings, and random layouts for them: what `scripts/random-layouts` and its test are
made of.

A case is a function of (seed, index). Each thing that is drawn has a list of draws: functions with
a weight, added by `@draw(kind, weight)`; a new data set, loss, network, optimizer or layout is one
more such function. Each kind has random numbers of its own, so what is added to one does not change
what another draws of the same case.

What decides the bits of a training is drawn first (`Training`), then where it runs (`Layout`),
which may look at it: not everything goes together, and a case that is refused shows nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import changes
import kinds
from chance import Random, draw, drawn
from networks import Network
from samples import (
    Data,
    Joined,
    Loss,
    Parted,
    parted_loss,
    targets,
    token_ids,
    weigh_positive,
)

from odyssey import functional as F
from odyssey import nn, optim
from odyssey.parallel import default_shard_size
from odyssey.parallel.mesh import PARTS, Mesh
from odyssey.train.trainer import DistributedTrainer

RANKS = 4  # of the largest layout, unless --ranks says otherwise
# samples of a shard up to which it is computed in rows, which tensor parallelism does not split
ROWS = 4

# --- optimizers, schedules ------------------------------------------------------------------------

Make = tuple[str, Callable[[], optim.Optimizer]]


def _made(kind: type[optim.Optimizer], **settings: Any) -> Make:
    words = [f"{k}={v}" for k, v in settings.items() if v]
    return f"{kind.__name__}({', '.join(words)})", functools.partial(kind, **settings)


@draw("optimizer", 3)
def sgd(random: Random) -> Make:
    momentum = random.one([0.0, 0.5, 0.9])
    decay = random.one([0.0, 0.01, 0.3])
    nesterov = momentum > 0 and random.chance(0.4)
    return _made(
        optim.SGD,
        lr=random.number(0.01, 0.3),
        momentum=momentum,
        weight_decay=decay,
        nesterov=nesterov,
    )


@draw("optimizer", 2)
def adam(random: Random) -> Make:
    return _made(optim.Adam, lr=random.number(1e-3, 3e-2), weight_decay=random.one([0.0, 0.05]))


@draw("optimizer", 2)
def adamw(random: Random) -> Make:
    betas = random.one([(0.9, 0.999), (0.5, 0.9)])
    return _made(
        optim.AdamW,
        lr=random.number(1e-3, 3e-2),
        weight_decay=random.one([0.0, 0.01, 0.5]),
        betas=betas,
    )


@draw("optimizer", 1)
def rmsprop(random: Random) -> Make:
    settings = {"alpha": random.one([0.99, 0.7]), "weight_decay": random.one([0.0, 0.1])}
    return _made(optim.RMSprop, lr=random.number(1e-3, 1e-2), **settings)


class MadeUp(optim.Optimizer):
    """A rule of a user's own: three states, `steps`, a setting that is no number, a choice by
    one that is.
    """

    states = ("fast", "slow", "before")

    def __init__(
        self,
        params: Any = None,
        lr: float = 0.01,
        betas: Any = (0.9, 0.5),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, weight_decay=weight_decay, late=3, bounded=True
        )

    def rule(self, p: Any, g: Any, fast: Any, slow: Any, before: Any) -> Any:
        fast = self.betas[0] * fast + (1 - self.betas[0]) * g
        slow = F.maximum(self.betas[1] * slow, F.abs(g) ** 1.5)
        turn = fast / (1 - self.betas[0] ** self.steps) / (slow**0.5 + 1e-3) + 0.1 * F.tanh(
            g - before
        )
        if self.bounded:
            turn = F.clamp(turn, -1.5, 1.5)
        turn = F.where(
            self.steps < self.late, 0.5 * turn, turn + self.weight_decay * F.exp(-F.abs(p)) * p
        )
        return p - self.lr / F.sqrt(self.steps) * turn, fast, slow, g


class AdamRule(optim.Optimizer):
    """Adam as a rule."""

    states = ("m", "v")

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=1e-8, weight_decay=weight_decay)

    def rule(self, p: Any, g: Any, m: Any, v: Any) -> Any:
        b1, b2 = self.betas
        g = g + self.weight_decay * p
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        return (
            p
            - self.lr * (m / (1 - b1**self.steps)) / (F.sqrt(v / (1 - b2**self.steps)) + self.eps),
            m,
            v,
        )


@draw("optimizer", 2)
def rules(random: Random) -> Make:
    kind = random.one([optim.Lion, optim.Adagrad, MadeUp, MadeUp, AdamRule])
    settings = {} if kind is optim.Adagrad else {"betas": random.one([(0.9, 0.99), (0.5, 0.7)])}
    text, make = _made(
        kind, lr=random.number(1e-3, 1e-2), weight_decay=random.one([0.0, 0.1]), **settings
    )
    if random.chance(0.3):
        return f"{text} without vectors", functools.partial(_without_vectors, make)
    return text, make


@draw("optimizer", 1)
def undecayed(random: Random) -> Make:
    text, make = adamw(random)
    return f"{text} without vectors", functools.partial(_without_vectors, make)


def _without_vectors(make: Callable[[], optim.Optimizer]) -> optim.Optimizer:
    made = make()
    made.undecayed = optim.vectors
    return made


@draw("schedule", 3)
def none(random: Random) -> tuple[str, Callable[[int], float] | None]:
    return "", None


@draw("schedule", 2)
def named(random: Random) -> tuple[str, Callable[[int], float] | None]:
    name, warmup = random.one(["step", "cosine", "linear-warmup"]), random.integer(0, 2)
    return f"{name} after {warmup}", optim.schedule(name, 6, warmup)


@draw("schedule", 1)
def joined(random: Random) -> tuple[str, Callable[[int], float] | None]:
    first, turn = optim.linear(random.number(0.1, 0.9), 3), random.integer(1, 4)
    return f"a line, from {turn} on steps", optim.sequential(
        [first, optim.step_decay(2, 0.5)], [turn]
    )


# --- a training -----------------------------------------------------------------------------------

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
    changes: tuple[changes.Change, ...] = ()  # while it runs
    weight: Callable[[Any, Any], Any] | None = None  # of samples

    @functools.cached_property
    def shard(self) -> int:
        """Samples of a shard: as given, or the smallest that a loop's first batch may make the
        default.
        """
        if self.settings["shard_size"] is not None:
            return self.settings["shard_size"]
        first = next(iter(self.data.loader()))
        settings = {"loss": self.loss.build(), "backend": "local", "device": "cpu"}
        rows = DistributedTrainer(
            self.network.build(), optim.SGD(), **settings
        ).stepper.rows_of_sample(first.dataset.form)
        return min(
            default_shard_size(n, rows)
            for n in (self.step, min(self.data.batch, self.data.samples))
        )

    @property
    def shards(self) -> int:
        """Of a step over as many samples as there are."""
        return -(-self.step // self.shard)

    @property
    def step(self) -> int:
        """Samples of the largest step."""
        return min(self.data.batch * self.settings["accumulation_steps"], self.data.samples)

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.data.samples // (self.data.batch * self.settings["accumulation_steps"]))

    @property
    def at_checkpoints(self) -> bool:
        """Whether checkpoints change it, so that only trainings which make the same ones are
        alike.
        """
        return any(change.at_checkpoints for change in self.changes)

    @property
    def refused(self) -> bool:
        """Whether it must be refused, wherever it runs."""
        return any(change.refused for change in self.changes)

    @property
    def alone(self) -> Layout:
        """The layout of one process whose results are right."""
        return EAGER if self.changes else ALONE

    @property
    def rows(self) -> bool:
        """Whether a shard of some step is so small that it is computed in rows."""
        n, batch = self.data.samples, self.data.batch
        # these: of an evaluation
        sizes = self.step, n % (batch * self.settings["accumulation_steps"]), n % batch
        return self.shard <= ROWS or any(0 < size <= ROWS for size in sizes)

    def __str__(self) -> str:
        given = {
            k: v
            for k, v in self.settings.items()
            if v not in (None, "fp32", 1, "skip", "auto") or k == "shard_size"
        }
        words = [
            self.network.text,
            f"{self.data.samples} samples ({self.data.text}{self.data.order}) by {self.data.batch}",
            self.loss.text,
            self.optimizer[0],
            self.schedule[0],
            f"{self.epochs} epochs",
            *([self.loop] if self.loop != LOOPS[0] else []),
            *(f"{k}={v}" for k, v in given.items()),
            f"metrics {' '.join(self.metrics)}" if self.metrics else "",
            f"weights {self.weight.__name__}" if self.weight else "",
            *(f"change: {change.text}" for change in self.changes),
        ]
        return "; ".join(filter(None, words))


def training(seed: int, index: int, all_data: bool = False, changing: bool = False) -> Training:
    """The training of a case; `all_data`: its data set is of any kind (kinds.py); `changing`: it
    changes while it runs (changes.py).
    """
    kind = functools.partial(Random, seed, index)
    random = kind("training")
    network, chosen = drawn("network", kind("network")), ""
    if all_data:
        chosen = kind("kind").one(
            list(kinds.KINDS), [weight for weight, *_ in kinds.KINDS.values()]
        )
        tries = (drawn("network", kind(f"network {i}")) for i in itertools.count())
        network = next(
            made for made in tries if not made.vocabulary and kinds.KINDS[chosen][1](made)
        )
    shard = network.micro or (
        random.integer(1, ROWS) if random.chance(0.15) else random.integer(ROWS + 1, 33)
    )
    batch = shard * random.integer(1, 9) + random.one([0, 0, random.integer(0, shard - 1)])
    if random.chance(0.1):
        batch = random.integer(1, shard)
    samples = batch * random.integer(1, 2) + (random.integer(1, batch) if random.chance(0.8) else 0)
    text, build = drawn("data", kind("data"), network.shape, network.classes, samples)
    schedule = drawn("schedule", kind("schedule"))
    loss = drawn("loss", kind("loss"))
    task = kind("task")
    metrics = task.one([None, ("accuracy", "top5"), {"second": "top2"}], [4, 1, 1])
    transform = None
    if all_data:
        made = kinds.KINDS[chosen][2](kind("source"), network.shape, network.classes, samples)
        made = kinds.transformed(kind("transform"), made, network.shape)
        text, build, transform, network = (
            made.text,
            made.build,
            made.transform,
            kinds.fitted(network, made),
        )
        loss, metrics = kinds.loss_of(task, made.targets, network.classes)
    elif network.vocabulary:
        sizes = (*network.shape, network.vocabulary, network.classes, samples, network.each)
        text, build = "token ids", functools.partial(token_ids, *sizes)
        metrics = task.one([None, ("accuracy",)])
    elif task.chance(0.35):
        loss, mixed, metrics = drawn("task", task)
        inputs = "one" if network.micro or network.places > 1 else task.one(["one", "two", "dict"])
        text = f"{inputs} input{'s' * (inputs != 'one')}, targets that are {'also ' * mixed}numbers"
        build = functools.partial(targets, network.shape, network.classes, samples, inputs, mixed)
        if inputs != "one":
            whole = network.build
            network = dataclasses.replace(network, build=lambda: Joined(whole()))
        if loss.build() is parted_loss and (network.micro or network.places > 1):
            loss, metrics = Loss("MSELoss", nn.MSELoss), None
        elif loss.build() is parted_loss:
            single = network.build
            network = dataclasses.replace(network, build=lambda: Parted(single()))
    settings = {
        "shard_size": shard,
        "accumulation_steps": random.one([1, 2, 3], [6, 2, 1]),
        "clip_norm": random.one([None, 0.05, 1.0], [3, 1, 1]),
        "precision": random.one(["fp32", "bf16", "fp16"], [8, 1, 1]),
        "conv_algorithm": kind("convolutions").one(["auto", "direct"]),
        "seed": random.integer(0, 99),
        "nonfinite": random.one(["skip", "stop"], [3, 1]),
        "check_every": random.one([100, 1, 2]),
    }
    if network.micro is None and not all_data and kind("shard size").chance(0.25):
        settings["shard_size"] = None
    made = Training(
        network,
        Data(text, samples, batch, build, random.chance(0.5), random.one([0, 0, 2]), transform),
        loss,
        drawn("optimizer", kind("optimizer")),
        schedule,
        settings,
        random.integer(1, 2),
        metrics=metrics,
        weight=weigh_positive if kind("weight").chance(0.25) else None,
    )
    return changes.adapted(kind("changes"), made) if changing else made


# --- layouts --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a training runs: ranks, and settings of the trainer that change no bit."""

    ranks: int
    settings: dict[str, Any]
    readers: int = 0  # num_workers of the loaders
    run_length: int = 0  # shards that threads compute together (shard_runs.forced_length)

    @property
    def splits(self) -> bool:
        """Whether ranks have parts of the model or of its state."""
        mesh = self.settings.get("mesh", Mesh(1, 1, 1))
        return (mesh.pp or 1) * (mesh.tp or 1) > 1 or (
            self.settings.get("zero", 0) > 0 and self.ranks > 1
        )

    def __str__(self) -> str:
        words = (str(v) if k == "mesh" else f"{k}={v}" for k, v in self.settings.items())
        reading = f", num_workers={self.readers}" * (self.readers > 0)
        runs = f", runs of {self.run_length}" * (self.run_length > 0)
        return f"{self.ranks} rank{'s' * (self.ranks != 1)}: {', '.join(words)}{reading}{runs}"


ALONE = Layout(1, {"threads": 1})
# what a step computes is what the program says then
EAGER = Layout(1, {"threads": 1, "execution": "eager"})


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


def _replicas(random: Random, training: Training, most: int | None = None) -> int:
    return random.integer(1, max(1, min(most or RANKS, training.shards)))


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
    return Layout(
        dp, {**_workers(random, training, dp), "mesh": Mesh(dp=dp, pp=1), "execution": "eager"}
    )


@draw("layout", 4)
def zero(random: Random, training: Training) -> Layout:
    dp = _several(random, training)
    stage = random.integer(1, 3)
    settings = {
        **_workers(random, training, dp),
        **_buckets(random),
        "mesh": Mesh(dp=dp, pp=1),
        "zero": stage,
    }
    if random.chance(0.2):
        settings["reduction"] = "hierarchical"
    return Layout(dp, settings)


@draw("layout", 4)
def shared_layers(random: Random, training: Training) -> Layout:
    """Tensor parallelism, also of replicas and of a pipeline's stages."""
    if training.rows or training.settings["precision"] != "fp32":
        return zero(random, training)
    tp = random.integer(2, min(RANKS, PARTS))
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
        allowed = [
            s
            for s in training.network.schedules
            if s != "interleaved" or 2 * pp <= _stages(training)
        ]
        settings["pipeline_schedule"] = random.one(allowed)
    if dp > 1 and not settings.get("zero") and random.chance(0.2):
        settings["reduction"] = random.one(["hierarchical", "parameter_server"])
    return Layout(dp * pp * tp, settings)


def layout(seed: int, index: int, of: Training, number: int = 0, all_data: bool = False) -> Layout:
    """The layout of a case, or number so and so of several."""
    made = drawn("layout", Random(seed, index, f"layout {number}"), of)
    mesh = made.settings.get("mesh", Mesh(1, 1, 1))
    one = (mesh.pp, mesh.tp or 1) == (1, 1)
    if (one or mesh.dp > 1) and Random(seed, index, f"rebalance {number}").chance(0.4):
        made.settings["rebalance"] = True  # cases.Anywhere
    if one and "execution" not in made.settings:
        if Random(seed, index, f"offload {number}").chance(0.3):
            made.settings["offload"] = tempfile.gettempdir()
    readers = Random(seed, index, f"readers {number}").one([0, 1, 2], [6, 1, 1]) if all_data else 0
    run_length = Random(seed, index, f"runs {number}").one([0, 1, 2, 3, 5, 8, 16])
    return dataclasses.replace(made, readers=readers, run_length=run_length)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and the layout on which it is run beside one process."""

    training: Training
    layout: Layout

    def __str__(self) -> str:
        return f"{self.training} | {self.layout}"


def case(seed: int, index: int, all_data: bool = False, changing: bool = False) -> Case:
    """Case number `index` of a seed; only what is stopped and resumed, or changes, is always one
    fit().
    """
    random, made = Random(seed, index, "loop"), training(seed, index, all_data, changing)
    if not changing and (loop := random.one(LOOPS, [5, 1, 1, 1])) != LOOPS[0]:
        made = dataclasses.replace(made, loop=loop, epochs=random.integer(2, 4))
    return Case(made, layout(seed, index, made, 0, all_data))


# --- stops and resumes ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stop:
    """A training runs on a layout until so many steps are taken, of all; None: to its end.

    kind: "limit" ends with a checkpoint of that step, "failure" in the middle of the next step,
    with what there is.
    """

    layout: Layout
    after: int | None
    kind: str = "limit"

    def __str__(self) -> str:
        return f"{self.layout}" + (
            "" if self.after is None else f", {self.kind} after step {self.after}"
        )


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """A training with stops, and the layout whose undisturbed run it must equal."""

    training: Training
    undisturbed: Layout
    stops: tuple[Stop, ...]
    every: int | None  # steps from one checkpoint to the next

    def __str__(self) -> str:
        return (
            f"{self.training} | checkpoint every {self.every or 'epoch'} | "
            f"{' | '.join(map(str, self.stops))}"
        )


def interrupted(
    seed: int, index: int, all_data: bool = False, changing: bool = False
) -> Interrupted:
    """The interrupted training of a case: on other layouts, or with sums that only such a layout
    gives.
    """
    random, made = Random(seed, index, "stops"), training(seed, index, all_data, changing)
    while made.steps * made.epochs < 2:
        made = dataclasses.replace(made, epochs=made.epochs + 1)
    alike = made.shards > 1 and random.chance(0.2)
    first = of_its_own(random, made) if alike else layout(seed, index, made, 0, all_data)
    points = sorted(
        random.integer(1, made.steps * made.epochs - 1) for _ in range(random.integer(1, 3))
    )
    stops = []
    for number, after in enumerate([*dict.fromkeys(points), None]):
        where = (
            _alike(random, made, first) if alike else layout(seed, index, made, number, all_data)
        )
        kind = random.one(["limit", "failure"])  # the first makes a checkpoint more
        stops.append(Stop(where, after, "failure" if made.at_checkpoints else kind))
    every = random.one([None, 1, 2, 3])
    return Interrupted(made, first if alike else made.alone, tuple(stops), every)


def of_its_own(random: Random, training: Training) -> Layout:
    """Replicas, perhaps of a pipeline, whose sums are those of this layout only: in fewer bytes,
    or around a ring.
    """
    fp16 = training.settings["precision"] == "fp16"
    # refused with parts of gradients
    running = " norm " in training.network.text or "batch" in training.network.text
    kind = random.one(["fp16", "bf16", "ring"] + ["topk", "powersgd"] * (not fp16 and not running))
    settings: dict[str, Any] = {"reduction": "ring"} if kind == "ring" else {"compression": kind}
    if kind == "topk":
        settings |= {
            "compression_ratio": random.one([0.01, 0.3]),
            "compression_warmup_steps": random.one([0, 3]),
        }
    if kind == "powersgd":
        settings["powersgd_rank"] = random.integer(1, 3)
    if random.chance(0.3) and _stages(training) > 1:
        return Layout(
            4,
            {
                **settings,
                "mesh": Mesh(dp=2, pp=2),
                "pipeline_schedule": training.network.schedules[0],
            },
        )
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
