"""A user's program with state, of odyssey's modules: losses, schedules, optimizers, callbacks and
data sets that change while it runs.

stateful.py loads this file again for each run, as a new process would.
"""

import copy
import functools

import numpy as np
from stateful_modes import Mode

from odyssey import callbacks, nn, optim
from odyssey import functional as F
from odyssey.callbacks import Callback

EVENTS = ("on_epoch_start", "on_step_end", "on_epoch_end")


class Model(nn.Module):
    """A model, and behind it what attributes say."""

    def __init__(self, inner, outputs):
        super().__init__()
        self.inner = inner
        self.drop = nn.Dropout(0.1)
        self.gain = 1.0
        self._shift = np.float64(0.0)
        self.scales = [1.0, 0.5]
        self.table = {"a": 1.0, "b": [1.0]}
        self.steps = {3: [1.0]}
        self.noise = np.zeros(outputs, np.float32)
        self.outside = lambda: 1.0
        self.leaves = ""

    def forward(self, *inputs):
        y = self.inner(*inputs)
        factor = self.gain * sum(self.scales) * self.table["a"] * self.outside()
        factor = factor * self.table["b"][0] * self.steps[3][0]
        y = self.drop(y) * factor + float(self._shift)
        y = y * (1.0 + float(self.noise.sum()))
        if self.leaves == "tensor":
            self.seen = y
        elif self.leaves == "number":
            self._size = (y.shape[0],)
        elif self.leaves == "list":
            self.shapes = {"last": tuple(y.shape)}
        return y


# --- losses ---


class Smoothed:
    """The loss of odyssey, whose setting changes."""

    def __init__(self, outputs, numpy):
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.numpy = numpy

    def set(self, u):
        self.loss.label_smoothing = np.float64(u * 0.3) if self.numpy else u * 0.3


class ClassWeights:
    def __init__(self, outputs, in_place):
        self.loss = nn.CrossEntropyLoss(weight=np.ones(outputs))
        self.in_place = in_place

    def set(self, u):
        weight = np.linspace(0.5 + u, 1.5, len(self.loss.weight))
        if self.in_place:
            self.loss.weight[:] = weight
        else:
            self.loss.weight = weight


class Config:
    def __init__(self):
        self.gain = 1.0
        self.inner = {"smoothing": [0.0]}


class OwnLoss:
    """A class of the user's own: an enum, a nested object, a private number."""

    def __init__(self, outputs, part):
        self.mode = Mode.SOFT
        self.config = Config()
        self.__factor = np.float32(1)
        self.part = part
        self.loss = self

    def __call__(self, y, target):
        smoothing = self.config.inner["smoothing"][0] + (0.1 if self.mode is Mode.HARD else 0.0)
        value = F.cross_entropy(y, target, label_smoothing=smoothing)
        return value * (self.config.gain * float(self.__factor))

    def set(self, u):
        if self.part == "enum":
            self.mode = Mode.HARD if u < 0.5 else Mode.SOFT
        elif self.part == "nested object":
            self.config.gain = 0.5 + u
            self.config.inner["smoothing"][0] = u * 0.2
        else:
            self.__factor = np.float32(0.5 + u)


class ClosureLoss:
    def __init__(self, outputs, _):
        gain = 1.0

        def loss(y, target):
            return F.cross_entropy(y, target) * gain

        def change(u):
            nonlocal gain
            gain = 0.5 + u

        self.loss, self.set = loss, change


GAIN = 1.0


class GlobalLoss:
    def __init__(self, outputs, _):
        self.loss = global_loss

    def set(self, u):
        global GAIN
        GAIN = 0.5 + u


def global_loss(y, target):
    return F.cross_entropy(y, target) * GAIN


class FunctionLoss:
    """Attributes of a function, keywords of a partial, or a mutable default."""

    def __init__(self, outputs, part):
        def loss(y, target, smoothing=0.1, box=[1.0]):  # noqa: B006
            value = F.cross_entropy(y, target, label_smoothing=smoothing)
            return value * (loss.gain * box[0])

        loss.gain = 1.0
        self.part, self.function = part, loss
        self.loss = functools.partial(loss, smoothing=0.05) if part == "partial" else loss

    def set(self, u):
        if self.part == "partial":
            self.loss.keywords["smoothing"] = u * 0.3
        elif self.part == "attribute":
            self.function.gain = 0.5 + u
        else:
            self.function.__defaults__[1][0] = 0.5 + u


class ModuleLoss(nn.Module):
    """A loss that is a module."""

    def __init__(self, outputs, _):
        super().__init__()
        self.gain = 1.0
        self._smoothing = [0.1]

    @property
    def loss(self):
        return self

    def forward(self, y, target):
        return F.cross_entropy(y, target, label_smoothing=self._smoothing[0]) * self.gain

    def set(self, u):
        self.gain = 0.5 + u
        self._smoothing[0] = u * 0.2


class CountingLoss:
    """It must be refused: how often a loss runs depends on the layout."""

    def __init__(self, outputs, _):
        self.calls = 0
        self.loss = self

    def __call__(self, y, target):
        self.calls += 1
        return F.cross_entropy(y, target) * (1.0 + self.calls % 7 / 10)

    def set(self, u):
        pass


LOSSES = {
    "smoothing": (Smoothed, False),
    "NumPy smoothing": (Smoothed, True),
    "class weights": (ClassWeights, False),
    "class weights in place": (ClassWeights, True),
    "enum": (OwnLoss, "enum"),
    "nested object": (OwnLoss, "nested object"),
    "private attribute": (OwnLoss, "private"),
    "closure": (ClosureLoss, None),
    "global": (GlobalLoss, None),
    "partial": (FunctionLoss, "partial"),
    "function attribute": (FunctionLoss, "attribute"),
    "mutable default": (FunctionLoss, "default"),
    "module": (ModuleLoss, None),
}
COUNTING_LOSS = {"counting": (CountingLoss, None)}


# --- schedules ---


class Factor:
    """A schedule that is an object."""

    def __init__(self, part):
        self.scale = np.float64(1)
        self._points = {0: 1.0, 3: 0.5, 6: 0.25}
        self.part = part

    def __call__(self, step):
        chosen = max(point for point in self._points if point <= step)
        return float(self.scale) * self._points[chosen]

    def set(self, u):
        if self.part == "dict":
            self._points[int(u * 5) + 1] = 0.3 + u
        else:
            self.scale = np.float64(self.scale * (0.8 + 0.4 * u))


class ClosureSchedule:
    def __init__(self, part):
        scale = [1.0]
        factor = 1.0

        def schedule(step):
            return scale[0] * factor / (1 + 0.1 * step)

        def change(u):
            nonlocal factor
            if part == "list":
                scale[0] = 0.5 + u
            else:
                factor = 0.5 + u

        self.set = change
        if part == "sequential":
            schedule = optim.sequential([schedule, optim.step_decay(2, 0.5)], [2])
        self.schedule = schedule

    def __call__(self, step):
        return self.schedule(step)


SCHEDULES = {
    "NumPy number": (Factor, "number"),
    "dict of steps": (Factor, "dict"),
    "closure": (ClosureSchedule, "nonlocal"),
    "list in a closure": (ClosureSchedule, "list"),
    "sequential closures": (ClosureSchedule, "sequential"),
}


# --- optimizers ---


class PrivateRule(optim.Optimizer):
    """A rule with private attributes."""

    states = ("m",)

    def __init__(self, params=None, lr=0.01, beta=0.9):
        super().__init__(params, lr=lr, beta=beta, weight_decay=0.0)
        self._factor = 1.0
        self._seen = []
        self.bounded = True

    def rule(self, p, g, m):
        m = self.beta * m + (1 - self.beta) * g
        turn = F.clamp(m, -1.0, 1.0) if self.bounded else m
        return p - self.lr * self._factor * turn, m

    def set(self, u):
        self._factor = 0.5 + u
        self._seen.append(u)
        self.bounded = u < 0.5


class CountingAdam(optim.Adam):
    """Adam that counts changes and keeps arrays, which decide its rate."""

    def __init__(self, lr):
        super().__init__(lr=lr)
        self._history = np.zeros(3)
        self._changes = {0: "start"}
        self._first = lr

    def set(self, u):
        self._history = np.roll(self._history, 1)
        self._history[0] = u
        self._changes[len(self._changes)] = f"{u:.3f}"
        self.lr = self._first * (0.5 + float(self._history.mean()))


OPTIMIZERS = {
    "rule with private attributes": lambda: PrivateRule(lr=0.02),
    "Adam with arrays": lambda: CountingAdam(lr=0.003),
}


# --- callbacks ---


class Acting(Callback):
    """Changes something, as a number of its state says."""

    def __init__(self, program, state, event, effect, every):
        self.state = state
        self.effect, self.every = effect, every
        self.program = program
        self.event = event

    _not_state = ("effect", "every", "event")

    def on_epoch_start(self, context):
        if self.event == "on_epoch_start":
            self.act(context)

    def on_step_end(self, context):
        if self.event == "on_step_end" and context.steps % self.every == 0:
            self.act(context)

    def on_epoch_end(self, context):
        if self.event == "on_epoch_end":
            self.act(context)

    def act(self, context):
        EFFECTS[self.effect](self.program, context.trainer, self.state.next())


class LateState(Acting):
    """Its state is created when fit() starts."""

    def __init__(self, program, make, event, effect, every):
        super().__init__(program, None, event, effect, every)
        self.make = make

    def on_fit_start(self, context):
        self.state = self.make()


class Best(Callback):
    """Keeps the best weights so far, and goes halfway back to them after a bad epoch."""

    def __init__(self, form):
        self.best, self.weights, self.form = None, {}, form

    def on_epoch_end(self, context):
        loss = context.record["train_loss"]
        now = context.trainer.state_dict()
        if self.best is None or loss < self.best * 0.9:
            self.best = loss
            self.weights = {name: value.copy() for name, value in now.items()}
            return
        with context.trainer.writing():
            for name, p in context.trainer.model.named_parameters():
                if name in self.weights:
                    half = np.float32(0.5)
                    p.data[...] = p.data * half + self.weights[name].reshape(p.shape) * half


class Teacher(Callback):
    """A deep copy of the model, whose outputs decide the rate."""

    def __init__(self, sample, early):
        self.sample, self.early = sample, early
        self.teacher = None
        self.updates = 0

    def on_fit_start(self, context):
        self.teacher = copy.deepcopy(context.trainer.model)
        self.teacher.eval()

    def on_epoch_end(self, context):
        if self.updates % 2 == 0:
            self.teacher.load_state_dict(context.trainer.state_dict())
        self.updates += 1
        y = np.asarray(self.teacher(self.sample).numpy())
        context.trainer.optimizer.lr *= 0.8 + 0.4 * float(np.abs(y).sum() % 1)


class Raising(Callback):
    """Ends a run: by an error of the user's own, or by a stop."""

    _not_state = ("step", "how")

    def __init__(self, step, how):
        self.step, self.how = step, how

    def on_step_end(self, context):
        if self.step is not None and context.steps == self.step:
            if self.how == "stop":
                context.stop = "the test says so"
            else:
                raise Failure


class Failure(Exception):
    """The user's program fails."""


# --- effects ---

EFFECTS = {}


def effect(function):
    """Adds a function of (program, trainer, number between 0 and 1)."""
    EFFECTS[function.__name__] = function
    return function


@effect
def rate(program, trainer, u):
    trainer.optimizer.lr = program.first_rate * (0.5 + u)


@effect
def rate_times(program, trainer, u):
    trainer.optimizer.lr *= 0.9 + 0.2 * u


@effect
def scale_rate(program, trainer, u):
    trainer.scale_rate(0.9 + 0.2 * u)


@effect
def gain(program, trainer, u):
    trainer.model.gain = 0.5 + u


@effect
def numpy_gain(program, trainer, u):
    trainer.model.gain = np.float64(0.5 + u)


@effect
def private_shift(program, trainer, u):
    trainer.model._shift = np.float64(u)


@effect
def scales(program, trainer, u):
    trainer.model.scales[int(u * 2)] = 0.3 + u


@effect
def table_of_numbers(program, trainer, u):
    trainer.model.steps[3][0] = 0.5 + u


@effect
def table(program, trainer, u):
    trainer.model.table["b"][0] = 0.5 + u
    trainer.model.table["a"] = 1.0 - u / 3


@effect
def noise(program, trainer, u):
    trainer.model.noise = np.full_like(trainer.model.noise, u / 10)


@effect
def noise_in_place(program, trainer, u):
    trainer.model.noise[0] = u / 3


@effect
def clipping(program, trainer, u):
    trainer.clip_norm = None if u < 0.2 else 0.05 + u


@effect
def dropout(program, trainer, u):
    trainer.model.drop.p = u / 2


@effect
def frozen(program, trainer, u):
    first = list(trainer.model.parameters())
    if len(first) > 1:
        first[0].requires_grad = u < 0.6


@effect
def weights(program, trainer, u):
    with trainer.writing():
        for p in trainer.model.parameters():
            p.data[...] *= np.float32(0.98 + 0.04 * u)


@effect
def unread(program, trainer, u):
    trainer.model._unread = {"u": u, 3: [np.float32(u)]}


@effect
def loss(program, trainer, u):
    program.loss_member.set(u)


@effect
def schedule(program, trainer, u):
    program.schedule.set(u)


@effect
def optimizer(program, trainer, u):
    program.optimizer.set(u)


@effect
def transform(program, trainer, u):
    program.transform.set(u)


@effect
def closure(program, trainer, u):
    program.box[0] = 0.5 + u


# --- data ---


class Curriculum:
    """Samples that grow with the epoch."""

    def __init__(self, dataset):
        self.dataset, self.epoch = dataset, 0
        self.classes = dataset.classes

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        x, y = self.dataset[i]
        return np.asarray(x, np.float32) * np.float32(1 + self.epoch / 4), int(y)


class Growing(Curriculum):
    """A data set with more samples in each epoch."""

    def __len__(self):
        return max(1, len(self.dataset) * (self.epoch + 2) // (self.epoch + 3))


class Scaled:
    """A transform with a strength that a callback sets."""

    def __init__(self, kind):
        self.kind, self.strength, self._list = kind, 1.0, [1.0]

    def __call__(self, sample, rng):
        strength = self._list[0] if self.kind == "list" else self.strength
        return sample * np.float32(strength * (0.9 + 0.2 * rng.random()))

    def set(self, u):
        self.strength = self._list[0] = 0.5 + u


class Drawn:
    """A sampler that draws from a generator of its own, which each epoch continues."""

    def __init__(self, samples, kind):
        self.samples, self.kind, self.epoch = samples, kind, 0
        self.rng = np.random.default_rng(samples)
        self.weights = np.ones(samples)

    def __len__(self):
        return self.samples

    def set_epoch(self, epoch):
        self.epoch = epoch
        if self.kind == "by epoch":
            self.rng = np.random.default_rng([self.samples, epoch])

    def __iter__(self):
        share = self.weights / self.weights.sum()
        return iter(self.rng.choice(self.samples, self.samples, p=share).tolist())


# --- the program ---


class Program:
    """What a run trains with.

    Args:
        values: stateful_values.py, loaded for this run.
        members: pairs of (kind, settings).
        wanted: the number of outputs, the optimizer, loss and schedule without members.
    """

    def __init__(self, values, members, outputs, make_optimizer, make_loss, schedule):
        self.values, self.members, self.outputs = values, members, outputs
        self.states = []
        self.box = [1.0]
        self.loss_member = None
        self.transform = None
        self.loss = None
        self.schedule = schedule
        self.optimizer = None
        for kind, settings in members:
            if kind == "loss":
                make, part = {**LOSSES, **COUNTING_LOSS}[settings["loss"]]
                self.loss_member = make(outputs, part)
                self.loss = self.loss_member.loss
            elif kind == "schedule":
                make, part = SCHEDULES[settings["schedule"]]
                self.schedule = make(part)
            elif kind == "optimizer":
                self.optimizer = OPTIMIZERS[settings["optimizer"]]()
            elif kind == "transform":
                self.transform = Scaled(settings["form"])
        if self.loss is None:
            self.loss = make_loss()
        if self.optimizer is None:
            self.optimizer = make_optimizer()
        self.first_rate = self.optimizer.lr

    def model(self, inner):
        made = Model(inner, self.outputs)
        for kind, settings in self.members:
            if kind == "leaves":
                made.leaves = settings["form"]
            elif kind == "counting":
                calls = [0]

                def outside(calls=calls):
                    calls[0] += 1
                    return 1.0 + calls[0] % 7 / 10

                made.outside = outside
            elif kind == "state" and settings["effect"] == "closure":
                made.outside = lambda: self.box[0]
        return made

    def callbacks(self, sample):
        made = []
        for kind, settings in self.members:
            if "state" in settings:
                make = functools.partial(self.values.KINDS[settings["state"]], settings["start"])
                where = settings["event"], settings["effect"], settings["every"]
                if settings["late"]:
                    made.append(LateState(self, make, *where))
                else:
                    made.append(Acting(self, make(), *where))
                self.states.append(made[-1])
            elif kind == "average":
                made.append(
                    callbacks.EMA(
                        0.9, settings["warmup"], settings["every"], evaluate=settings["evaluate"]
                    )
                    if settings["form"] == "EMA"
                    else callbacks.SWA(1, settings["every"], evaluate=settings["evaluate"])
                )
            elif kind == "best":
                made.append(Best(settings["form"]))
            elif kind == "teacher":
                made.append(Teacher(sample, True))
        return made

    def dataset(self, dataset):
        for kind, settings in self.members:
            if kind == "data":
                return (Growing if settings["form"] == "growing" else Curriculum)(dataset)
        return dataset

    def sampler(self, samples):
        for kind, settings in self.members:
            if kind == "sampler":
                return Drawn(samples, settings["form"])
        return None

    def ends(self):
        """Returns numbers that the states would give next."""
        states = [one.state for one in self.states if not hasattr(one.state, "is_scoped")]
        return [state.next() for state in states for _ in range(3)]
