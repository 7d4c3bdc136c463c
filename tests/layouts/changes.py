"""Random changes of a training while it runs: callbacks, and a model whose forward() reads what
they set.

Each is a function of epoch and step alone, or of what a callback keeps in checkpoints, so that a
training with it is one training wherever it runs and wherever it is stopped. A change is made anew
for every run of a case.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from chance import Random, draw, drawn

from odyssey import functional as F
from odyssey import nn, optim
from odyssey.callbacks import Callback, Context, EarlyStopping, LambdaCallback, ReduceLROnPlateau
from odyssey.core.tensor import Tensor

if TYPE_CHECKING:
    from draws import Training

MOST = 3  # changes of a training
Make = Callable[[nn.Module], list[Callback]]


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a training.

    make: called with the model before its trainer is made; gives callbacks for fit().
    at_checkpoints: it acts when a checkpoint is made, so trainings are alike only where they make
    the same ones. refused: no training may have it.
    """

    text: str
    make: Make
    at_checkpoints: bool = False
    refused: bool = False


# --- what forward() reads -------------------------------------------------------------------------


class Adapted(nn.Module):
    """A model and, behind it, what attributes and a function say: factors, dropout, so many
    further layers.
    """

    def __init__(self, model: nn.Module, outputs: int, layers: int) -> None:
        super().__init__()
        self.model, self.drop = model, nn.Dropout(0.0)
        self.gain, self.temperature, self.bent, self.depth, self.scales = (
            1.0,
            1.0,
            False,
            0,
            [1.0, 0.5],
        )
        self.more = nn.ModuleList(nn.Linear(outputs, outputs) for _ in range(layers))
        # no value of JSON: nobody saves what it knows
        self.outside: Callable[[], float] = lambda: 1.0
        self.leaves = False

    def forward(self, *given: Any) -> Any:
        y = self.model(*given)
        return {**y, "mean": self._behind(y["mean"])} if isinstance(y, dict) else self._behind(y)

    def _behind(self, y: Tensor) -> Tensor:
        y = self.drop(y * (self.gain * self.outside()) / self.temperature)
        y = F.tanh(y) * 3.0 if self.bent else y
        for layer in list(self.more)[: self.depth]:
            y = y + F.tanh(layer(y)) * self.scales[0]
        if self.leaves:
            self.seen = y
        return y * sum(self.scales)


def adapted(random: Random, training: Training) -> Training:
    """The training with a model that is Adapted, where its network can have anything behind it,
    and with changes.
    """
    network = training.network
    if network.micro is None:
        layers, whole = random.integer(1, 3) if network.places == 1 else 0, network.build
        outputs = network.classes
        network = dataclasses.replace(network, build=lambda: Adapted(whole(), outputs, layers))
    epochs, source = random.integer(2, 4), training.data
    if random.chance(0.2):
        source = dataclasses.replace(source, shuffle=False, sampler=random.one([Weighted, Fixed]))
    loop = random.one(["fit", "fit with a validation set"], [2, 1])
    made = dataclasses.replace(training, network=network, epochs=epochs, data=source, loop=loop)
    found = [drawn("change", random, made) for _ in range(random.integer(1, MOST))]
    found = [change for change in found if change.refused][:1] or found  # no other may undo it
    return dataclasses.replace(made, changes=tuple(found))


# --- when, and to what ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moment:
    """An event, and which of its calls count."""

    text: str
    event: str
    due: Callable[[Context], bool]


def moment(random: Random, training: Training, *events: str) -> Moment:
    """A moment of a training, at one of the events if some are named."""
    all_events = {
        "on_epoch_start": 3,
        "on_step_end": 4,
        "on_epoch_end": 2,
        "on_checkpoint": 1,
        "on_validation_end": 2,
    }
    if training.loop == "fit":
        del all_events["on_validation_end"]
    chosen = events or tuple(all_events)
    event = random.one(chosen, [all_events[name] for name in chosen])
    if event == "on_checkpoint" or random.chance(0.3):
        return Moment(f"at each {event}", event, lambda context: True)
    if event == "on_step_end":
        if random.chance(0.3):
            every = random.integer(2, 4)
            return Moment(f"every {every} steps", event, lambda context: context.steps % every == 0)
        step = random.integer(1, training.steps * training.epochs)
        return Moment(f"in {event} of step {step}", event, lambda context: context.steps == step)
    epoch = random.integer(1, training.epochs)
    return Moment(f"in {event} of epoch {epoch}", event, lambda context: context.epoch == epoch)


Value = Callable[[Any, Context], Any]  # of the value that is there, and where the training is


def value(random: Random, values: Sequence[Any]) -> tuple[str, Value]:
    """A function that gives one of the values, or another share of the number that is there."""
    numbers = all(isinstance(v, float) and v for v in values)
    kind = random.one(["one", "of the epoch", "of the step", "times"], [2, 2, 2, 2 * numbers])
    if kind == "times":
        factor = random.one([0.5, 0.9, 1.2])
        return f"times {factor}", lambda old, _: old * factor
    if kind == "one":
        one = random.one(values)
        return f"{_shown(one)}", lambda *_: one
    if kind == "of the epoch":
        return f"by epoch of {_shown(values)}", lambda _, context: values[
            context.epoch % len(values)
        ]
    return f"by step of {_shown(values)}", lambda _, context: values[context.steps % len(values)]


def _shown(given: Any) -> str:
    if isinstance(given, (list, tuple)):
        return f"[{', '.join(map(_shown, given))}]"
    return getattr(given, "__name__", repr(given))


def acting(
    text: str,
    at: Moment,
    act: Callable[[Context], None],
    prepare: Callable[[nn.Module], Any] | None = None,
):
    """The change of a callback that acts at a moment; `prepare` is called with the model before
    there is a trainer.
    """

    def hear(context: Context) -> None:
        if at.due(context):
            act(context)

    def make(model: nn.Module) -> list[Callback]:
        if prepare is not None:
            prepare(model)
        return [LambdaCallback(**{at.event: hear})]

    return Change(f"{text} {at.text}", make, at.event == "on_checkpoint")


def setting(
    random: Random,
    training: Training,
    of: Callable[[Context], Any],
    name: str,
    values: Sequence[Any],
    *events: str,
) -> Change:
    """The change of an attribute of an object that a context leads to."""
    at, (text, new) = moment(random, training, *events), value(random, values)

    def act(context: Context) -> None:
        owner = of(context)
        # ranks may be threads
        setattr(owner, name, copy.deepcopy(new(getattr(owner, name), context)))

    return acting(f"{name} {text}", at, act)


def optimizer_of(context: Context) -> Any:
    return context.trainer.optimizer


def model_of(context: Context) -> Any:
    return context.trainer.model


# --- the update -----------------------------------------------------------------------------------


@draw("change", 3)
def rate(random: Random, training: Training) -> Change:
    base = training.optimizer[1]().lr
    if random.chance(0.2):
        factor = random.one([0.5, 0.9])
        at = moment(random, training)
        return acting(
            f"scale_rate({factor})", at, lambda context: context.trainer.scale_rate(factor)
        )
    return setting(random, training, optimizer_of, "lr", [base, base / 2, base / 3])


SETTINGS: dict[str, Sequence[Any]] = {
    "momentum": (0.9, 0.5, 0.7),
    "weight_decay": (0.01, 0.1, 0.001),
    "betas": ((0.9, 0.999), (0.8, 0.99), (0.5, 0.9)),
    "eps": (1e-8, 1e-6),
    "undecayed": (None, optim.vectors),
}


@draw("change", 3)
def rule(random: Random, training: Training) -> Change:
    there = vars(training.optimizer[1]())
    names = [
        name
        for name in SETTINGS
        if (name in there or name == "undecayed") and there.get(name, 1) != 0.0
    ]
    name = random.one(names)
    return setting(random, training, optimizer_of, name, SETTINGS[name])


@draw("change", 1)
def clipping(random: Random, training: Training) -> Change:
    return setting(
        random, training, lambda context: context.trainer, "clip_norm", [0.05, None, 1.0]
    )


# --- the model ------------------------------------------------------------------------------------

ATTRIBUTES: dict[str, Sequence[Any]] = {
    "gain": (1.0, 0.5, 1.5),
    "temperature": (1.0, 2.0, 0.7),
    "bent": (False, True),
    "depth": (0, 1, 2),
    "scales": ([1.0, 0.5], [0.3], [0.5, 0.25, 0.25]),
}


@draw("change", 5)
def attribute(random: Random, training: Training) -> Change:
    if training.network.micro is not None:
        return layer(random, training)
    name = random.one(list(ATTRIBUTES))
    return setting(random, training, model_of, name, ATTRIBUTES[name])


@draw("change", 1)
def in_place(random: Random, training: Training) -> Change:
    """A list that is changed where it is."""
    if training.network.micro is not None:
        return layer(random, training)
    text, new = value(random, [1.0, 0.6, 1.4])
    at = moment(random, training)

    def act(context: Context) -> None:
        scales = context.trainer.model.scales
        scales[0] = new(scales[0], context)

    return acting(f"scales[0] {text}", at, act)


@draw("change", 3)
def layer(random: Random, training: Training) -> Change:
    """A setting of a layer that has one."""
    modules = list(training.network.build().modules())
    places = [
        (i, name) for i, m in enumerate(modules) for name in ("p", "momentum") if name in vars(m)
    ]
    if not places:
        return rate(random, training)
    at, name = random.one(places)
    values = {"p": (0.5, 0.1, 0.25), "momentum": (0.1, 0.5, 0.9)}[name]
    return setting(
        random, training, lambda context: list(context.trainer.model.modules())[at], name, values
    )


@draw("change", 3)
def mode(random: Random, training: Training) -> Change:
    """eval() of a module, from the start or later, perhaps train() again."""
    modules = list(training.network.build().modules())
    moved = [
        i
        for i, m in enumerate(modules)
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout))
    ]
    number = random.one(moved if moved and random.chance(0.8) else range(len(modules)))
    text, new = value(random, [False, True])
    at, begins = moment(random, training), random.chance(0.5)

    def act(context: Context) -> None:
        module = list(context.trainer.model.modules())[number]
        module.train(new(module.training, context))

    what = f"train({text}) of module {number}{' that begins in eval()' * begins}"
    return acting(what, at, act, lambda model: list(model.modules())[number].train(not begins))


@draw("change", 5)
def frozen(random: Random, training: Training) -> Change:
    """The first parameters are frozen, from the start or later, at once or one more each epoch."""
    made = training.network.build()
    # without those that may have no effect
    count = sum(1 for _ in getattr(made, "model", made).parameters())
    if count < 2:
        return rate(random, training)
    first = max(1, int(count * random.one([0.2, 0.5, 0.8])))
    begins, gradual = random.chance(0.6), random.chance(0.3)
    text, new = value(random, [True, False])
    at = moment(random, training)

    def prepare(model: nn.Module) -> None:
        for p in list(model.parameters())[: first * begins]:
            p.requires_grad = False

    def act(context: Context) -> None:
        parameters = list(context.trainer.model.parameters())[:first]
        for i, p in enumerate(parameters):
            p.requires_grad = (
                i >= first - context.epoch if gradual else new(p.requires_grad, context)
            )

    how = "one more is trained each epoch" if gradual else f"requires_grad {text}"
    return acting(
        f"the first {first} of {count} parameters{', frozen' * begins}: {how}", at, act, prepare
    )


# --- what no module knows -------------------------------------------------------------------------


@draw("change", 3)
def outside(random: Random, training: Training) -> Change:
    """A closure, or an attribute of another object, that forward() reads: set when epochs begin,
    or (which is to be noticed) elsewhere.
    """
    if training.network.micro is not None:
        return rate(random, training)
    closure, late = random.chance(0.5), random.chance(0.25)
    at = moment(
        random, training, *(["on_step_end", "on_epoch_end"] if late else ["on_epoch_start"])
    )
    if not late:
        at = Moment("at each on_epoch_start", "on_epoch_start", lambda context: True)
    values = [1.0, 0.5, 1.5]

    def make(model: nn.Module) -> list[Callback]:
        box, other = [1.0], types.SimpleNamespace(gain=1.0)
        model.outside = (lambda: box[0]) if closure else (lambda: other.gain)  # type: ignore[attr-defined]

        def hear(context: Context) -> None:
            if at.due(context):
                box[0] = other.gain = values[context.epoch % 3]

        return [LambdaCallback(**{at.event: hear})]

    return Change(f"{'a closure' if closure else 'an object'} by epoch of {values} {at.text}", make)


@draw("change", 0.4)
def counting_calls(random: Random, training: Training) -> Change:
    """A forward() whose result depends on how often it was called, or on NumPy's or Python's
    generator.
    """
    if training.network.micro is not None:
        return rate(random, training)
    kind = random.one(["counts its calls", "draws from NumPy"])

    def make(model: nn.Module) -> list[Callback]:
        calls, rng = [0], np.random.default_rng()

        def number() -> float:
            calls[0] += 1
            return 1.0 + (calls[0] % 7 / 10 if kind == "counts its calls" else float(rng.random()))

        model.outside = number  # type: ignore[attr-defined]
        return []

    return Change(f"forward() {kind}", make, refused=True)


@draw("change", 0.5)
def looked_at(random: Random, training: Training) -> Change:
    """A forward() that leaves a tensor on its module, to look at: this is allowed."""

    def make(model: nn.Module) -> list[Callback]:
        if isinstance(model, Adapted):
            model.leaves = True
        return []

    return Change("a tensor is left on the module", make)


# --- callbacks with a state -----------------------------------------------------------------------


class Averaged(Callback):
    """Means of the weights over steps; `kept`: in checkpoints."""

    def __init__(self, decay: float, event: str, kept: bool) -> None:
        self.decay, self.kept = np.float32(decay), kept
        self.mean: dict[str, np.ndarray] = {}
        setattr(self, event, self.take)

    def take(self, context: Context) -> None:
        for name, now in context.trainer.state_dict().items():
            before = self.mean.get(name, now)
            self.mean[name] = (before * self.decay + now * (1 - self.decay)).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {name: a.tolist() for name, a in self.mean.items()} if self.kept else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = {name: np.array(a, np.float32) for name, a in state.items()}


@draw("change", 1.5)
def averaged(random: Random, training: Training) -> Change:
    decay, event, kept = (
        random.one([0.5, 0.9]),
        random.one(["on_step_end", "on_epoch_end"]),
        random.chance(0.7),
    )
    return Change(
        f"weights averaged by {decay} in {event}{', in checkpoints' * kept}",
        lambda model: [Averaged(decay, event, kept)],
    )


class Driven(Callback):
    """Lowers the rate, and the model's gain, when a figure is no better than the best before."""

    def __init__(self, event: str) -> None:
        self.best = 1e9
        setattr(self, event, self.hear)

    def hear(self, context: Context) -> None:
        loss = context.record["train_loss"]
        if not loss < self.best * 0.97:
            context.trainer.optimizer.lr *= 0.7
            context.trainer.model.gain = getattr(context.trainer.model, "gain", 1.0) * 0.9
        self.best = min(self.best, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


@draw("change", 2)
def metric_driven(random: Random, training: Training) -> Change:
    kind = random.one(["plateau", "own", "stopping"])
    if kind == "own":
        event = (
            "on_epoch_end"
            if training.loop == "fit"
            else random.one(["on_epoch_end", "on_validation_end"])
        )
        return Change(f"rate and gain by the loss, {event}", lambda model: [Driven(event)])
    delta = random.one([0.0, 0.1])
    if kind == "stopping":
        return Change(
            f"EarlyStopping by {delta}", lambda model: [EarlyStopping("train_loss", 1, delta)]
        )
    return Change(
        f"ReduceLROnPlateau by {delta}",
        lambda model: [ReduceLROnPlateau("train_loss", 0.5, 1, delta)],
    )


class Counting(Callback):
    """Counts steps, and at each so many-th changes rate and dropout by its count."""

    def __init__(self, every: int) -> None:
        self.every, self.count = every, 0

    def on_step_end(self, context: Context) -> None:
        self.count += 1
        if self.count % self.every == 0:
            context.trainer.optimizer.lr *= 0.9
            if isinstance(context.trainer.model, Adapted):
                context.trainer.model.drop.p = 0.1 * (self.count // self.every % 4)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@draw("change", 2)
def counting(random: Random, training: Training) -> Change:
    every = random.integer(1, 3)
    return Change(f"rate and dropout by a count of {every}", lambda model: [Counting(every)])


# --- the order of samples -------------------------------------------------------------------------


class Fixed:
    """The same order in every epoch."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        return iter(
            np.random.default_rng([self.samples, self.epoch]).permutation(self.samples).tolist()
        )


class Weighted(Fixed):
    """Samples drawn by weights, others in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        share = np.arange(1, self.samples + 1) / (self.samples * (self.samples + 1) / 2)
        drawn_ones = np.random.default_rng([self.samples, self.epoch, 1]).choice(
            self.samples, self.samples, p=share
        )
        return iter(drawn_ones.tolist())
