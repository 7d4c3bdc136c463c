"""A user's program with state, of PyTorch's modules: losses, schedulers, optimizers, callbacks and
data sets that change while it runs.

stateful.py loads this file again for each run, as a new process would.
"""

import copy
import functools

import numpy as np
import torch
from stateful_modes import Mode
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils import data

from odyssey import callbacks
from odyssey.callbacks import Callback

EVENTS = ("on_epoch_start", "on_step_end", "on_epoch_end")
KINDS = {}


def kind(cls):
    """Adds a class to the kinds of states, in addition to those of stateful_values.py."""
    KINDS[cls.__name__] = cls
    return cls


# --- states ---


@kind
class Tensors:
    def __init__(self, start):
        self.x = torch.full((2, 2), start / 10, dtype=torch.float64)
        self.i, self.flag = torch.tensor(start), torch.zeros(2, dtype=torch.bool)
        self.low = torch.tensor([0.5], dtype=torch.bfloat16)

    def next(self):
        self.x.mul_(1.25).remainder_(1)
        self.i += 3
        self.flag[int(self.i) % 2] ^= True
        self.low = (self.low * 3) % 1
        number = self.x[0, 1] + int(self.i) % 7 / 7 + self.flag.sum() / 3 + self.low[0].double()
        return float(number % 1)


@kind
class TensorsInContainers:
    def __init__(self, start):
        self.table = {"best": torch.tensor(float(start)), 3: [torch.zeros(1, dtype=torch.float64)]}

    def next(self):
        self.table[3].append(self.table[3][-1] * 0.5 + 0.3)
        del self.table[3][:-3]
        self.table["best"] = self.table["best"] * 1.5 % 1
        return float((self.table["best"].double() + self.table[3][0][0]) % 1)


@kind
class TorchGenerator:
    def __init__(self, start):
        self.generator = torch.Generator().manual_seed(start)

    def next(self):
        torch.randn(3, generator=self.generator)
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


@kind
class GeneratorOfTorch:
    """A state that draws from torch's generator. odyssey seeds it before each callback event."""

    is_scoped = True

    def __init__(self, start):
        self.start = start

    def next(self):
        return (float(torch.randn((), dtype=torch.float64)) + self.start / 10) % 1


@kind
class SmallModule:
    """A module of the callback's own."""

    def __init__(self, start):
        generator = torch.Generator().manual_seed(start)
        self.layer = nn.Linear(2, 1).double()
        with torch.no_grad():
            self.layer.weight.copy_(torch.rand(1, 2, generator=generator))
            self.layer.bias.fill_(0.1)
        self.layer.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def next(self):
        with torch.no_grad():
            self.layer.weight.mul_(1.5).remainder_(1)
            self.layer.count += 1
            y = self.layer(torch.ones(2, dtype=torch.float64))
        return float((y[0] + int(self.layer.count) / 7) % 1)


@kind
class OptimizerOfItsOwn:
    """A small optimizer in a callback, whose state is that of PyTorch."""

    def __init__(self, start):
        self.p = nn.Parameter(torch.tensor([start / 10], dtype=torch.float64))
        self.optimizer = torch.optim.Adam([self.p], lr=0.1)

    def next(self):
        self.p.grad = self.p.detach() * 2 - 1
        self.optimizer.step()
        return float(self.p.detach()[0] % 1)


@kind
class Types:
    def __init__(self, start):
        self.dtype, self.size, self.n = torch.float32, torch.Size([start]), start

    def next(self):
        self.dtype = torch.float64 if self.dtype is torch.float32 else torch.float32
        self.size = torch.Size([*self.size[-2:], len(self.size)])
        return (sum(self.size) * 3 + (self.dtype is torch.float64)) % 17 / 17


# --- the module ---


class Model(nn.Module):
    """A module, and behind it what attributes say."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.drop = nn.Dropout(0.1)
        self.gain = 1.0
        self._shift = np.float64(0.0)
        self.scales = [1.0, 0.5]
        self.table = {"a": 1.0, 3: [1.0]}
        self.noise = np.zeros(2)
        self.tensor = torch.ones(1)
        self.register_buffer("buffer", torch.ones(1))
        self.outside = lambda: 1.0
        self.leaves = ""

    def forward(self, *inputs, **named):
        y = self.inner(*inputs, **named)
        factor = self.gain * sum(self.scales) * self.table["a"] * self.table[3][0] * self.outside()
        factor = factor * float(self.tensor) * float(self.buffer) * (1.0 + float(self.noise.sum()))
        y = self.drop(y) * factor + float(self._shift)
        if self.leaves == "tensor":
            self.last = y.detach()
        elif self.leaves == "number":
            self.seen = len(y)
        elif self.leaves == "dict":
            self._stats = {"mean": y.detach().mean(), 3: y.shape}
        return y


# --- losses ---


class Around:
    """A loss of the user's own around another one, with a factor that is kept somewhere."""

    def __init__(self, base, part):
        self.base, self.part = base, part
        self.number = np.float64(1) if part == "NumPy" else 1.0
        self.mode = Mode.SOFT
        self.config = Config()
        self.table = {0: 1.0, "b": [1.0]}
        self.__private = 1.0

    @property
    def loss(self):
        return self

    def __call__(self, out, target):
        factor = self.number * self.config.inner.gain * self.table[0] * self.table["b"][0]
        if self.mode is Mode.HARD:
            factor = factor * 0.5
        return self.base(out, target) * float(factor * self.__private)

    def set(self, u):
        if self.part == "enum":
            self.mode = Mode.HARD if u < 0.5 else Mode.SOFT
        elif self.part == "nested object":
            self.config.inner.gain = 0.5 + u
        elif self.part == "dict":
            self.table["b"][0] = self.table[0] = 0.7 + u / 2
        elif self.part == "private":
            self.__private = 0.5 + u
        else:
            self.number = type(self.number)(0.5 + u)


class Config:
    def __init__(self, depth=1):
        self.gain = 1.0
        self.inner = Config(depth - 1) if depth else None


class ModuleLoss(nn.Module):
    def __init__(self, base, part):
        super().__init__()
        self.base, self.part = base, part
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.plain = torch.ones(())

    @property
    def loss(self):
        return self

    def forward(self, out, target):
        return self.base(out, target) * self.factor * self.hidden.sum() / 2 * self.plain

    def set(self, u):
        if self.part == "buffer in place":
            self.factor.fill_(0.5 + u)
        elif self.part == "buffer":
            self.hidden = torch.tensor([u, 1.0])
        else:
            self.plain = torch.tensor(0.5 + u)


class Setting:
    """A setting of a loss of PyTorch, if it has one."""

    def __init__(self, base, part):
        self.loss, self.part = base, part

    def set(self, u):
        if hasattr(self.loss, "label_smoothing"):
            self.loss.label_smoothing = np.float64(u * 0.3) if self.part == "NumPy" else u * 0.3
        elif hasattr(self.loss, "delta"):
            self.loss.delta = 0.5 + u
        elif hasattr(self.loss, "beta"):
            self.loss.beta = 0.5 + u


class Weights(Setting):
    """Weights of classes."""

    def set(self, u):
        weight = getattr(self.loss, "weight", None)
        if weight is None:
            super().set(u)
        elif self.part == "in place":
            weight.mul_(0.8 + 0.4 * u)
        else:
            self.loss.weight = weight * (0.8 + 0.4 * u)


GAIN = 1.0


class Functions:
    """Losses that are functions."""

    def __init__(self, base, part):
        gain = 1.0
        number = 1.0

        def loss(out, target, scale=1.0, box=[1.0]):  # noqa: B006
            return base(out, target) * (gain * loss.gain * scale * box[0] * number * GAIN)

        def change(u):
            nonlocal gain
            global GAIN
            if part == "closure":
                gain = 0.5 + u
            elif part == "global":
                GAIN = 0.5 + u
            elif part == "attribute":
                loss.gain = 0.5 + u
            elif part == "default":
                loss.__defaults__[1][0] = 0.5 + u
            else:
                self.loss.keywords["scale"] = 0.5 + u

        loss.gain = 1.0
        self.set = change
        self.loss = functools.partial(loss, scale=0.9) if part == "partial" else loss


class CountingLoss(Around):
    """It must be refused: how often a loss runs depends on the layout."""

    calls = 0

    def __call__(self, out, target):
        self.calls += 1
        return self.base(out, target) * (1.0 + self.calls % 7 / 10)


LOSSES = {
    **{
        f"own class, {part}": (Around, part)
        for part in ("number", "NumPy", "enum", "nested object", "dict", "private")
    },
    **{
        f"module, {part}": (ModuleLoss, part)
        for part in ("buffer in place", "buffer", "plain tensor")
    },
    "setting": (Setting, "number"),
    "NumPy setting": (Setting, "NumPy"),
    "weights": (Weights, "replaced"),
    "weights in place": (Weights, "in place"),
    **{
        f"function, {part}": (Functions, part)
        for part in ("closure", "global", "attribute", "default", "partial")
    },
}
COUNTING_LOSS = {"counting": (CountingLoss, None)}


# --- schedulers ---


class Factor:
    def __init__(self, part):
        self.part = part
        self.scale = np.float64(1)
        self._points = {0: 1.0, 3: 0.5}

    def __call__(self, step):
        return float(self.scale) * self._points[max(p for p in self._points if p <= step)]

    def set(self, u):
        if self.part == "dict":
            self._points[int(u * 5) + 1] = 0.3 + u
        else:
            self.scale = np.float64(0.5 + u)


class OwnScheduler(schedulers.LRScheduler):
    """A scheduler of the user's own, with state that JSON does not have."""

    def __init__(self, optimizer):
        self.scale = np.float64(1)
        self.seen = {0: []}
        super().__init__(optimizer)

    def get_lr(self):
        self.seen[0] = [*self.seen[0][-2:], self.last_epoch]
        factor = float(self.scale) / (1 + 0.1 * sum(self.seen[0]))
        return [base * factor for base in self.base_lrs]

    def set(self, u):
        self.scale = np.float64(0.5 + u)
        self.seen[len(self.seen)] = [int(u * 10)]


class PlainScheduler:
    """A scheduler that is no LRScheduler, with `state_dict()`."""

    def __init__(self, optimizer):
        self.optimizer, self.count, self.extra = optimizer, 0, {1: np.float32(1)}
        self.first = [group["lr"] for group in optimizer.param_groups]

    def step(self):
        self.count += 1
        for group, first in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = first * float(self.extra[1]) / self.count

    def state_dict(self):
        return {"count": self.count, "extra": self.extra}

    def load_state_dict(self, state):
        self.count, self.extra = state["count"], state["extra"]

    def set(self, u):
        self.extra[1] = np.float32(0.5 + u)


def closure_scheduler(optimizer):
    scale = 1.0
    box = [1.0]

    def factor(step):
        return scale * box[0] / (1 + 0.1 * step)

    def change(u):
        nonlocal scale
        scale, box[0] = 0.5 + u, 1.5 - u

    return schedulers.LambdaLR(optimizer, factor), change


def _of_factor(part, optimizer):
    factor = Factor(part)
    return schedulers.LambdaLR(optimizer, factor), factor.set


def _chained(optimizer):
    factor = Factor("number")
    first = schedulers.LambdaLR(optimizer, factor)
    return schedulers.ChainedScheduler(
        [first, schedulers.ExponentialLR(optimizer, 0.9)]
    ), factor.set


def _sequential(optimizer):
    factor = Factor("dict")
    parts = [schedulers.LinearLR(optimizer, 0.5), schedulers.LambdaLR(optimizer, factor)]
    return schedulers.SequentialLR(optimizer, parts, [2]), factor.set


def _with_set(make):
    def build(optimizer):
        made = make(optimizer)
        return made, made.set

    return build


SCHEDULERS = {
    "LambdaLR of an object": functools.partial(_of_factor, "number"),
    "LambdaLR of a dict": functools.partial(_of_factor, "dict"),
    "LambdaLR of a closure": closure_scheduler,
    "chained": _chained,
    "sequential": _sequential,
    "own": _with_set(OwnScheduler),
    "plain": _with_set(PlainScheduler),
}


# --- optimizers ---


class Counting(torch.optim.SGD):
    """SGD that counts, and keeps arrays that decide its rate."""

    def __init__(self, params):
        super().__init__(params, lr=0.02, momentum=0.9)
        self._n, self._history, self._by_step = 0, np.zeros(3), {}

    def step(self, closure=None):
        self._n += 1
        self._by_step[self._n % 4] = self._n
        for group in self.param_groups:
            group["lr"] = 0.02 / (1 + 0.1 * self._n) * (1 + float(self._history.mean()))
        return super().step(closure)

    def set(self, u):
        self._history = np.roll(self._history, 1)
        self._history[0] = u


class Lookahead(torch.optim.SGD):
    """Slow weights in the state, by a private count of steps."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)
        self._k, self.__alpha = 0, 0.5

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        self._k += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                if self._k % 2 == 0:
                    state["slow"].add_(p.detach() - state["slow"], alpha=self.__alpha)
                    p.copy_(state["slow"])
        return result

    def set(self, u):
        self.__alpha = 0.3 + u / 2


class Wrapper(torch.optim.Optimizer):
    """An optimizer that has another one, and counts its steps."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, {"lr": 0.01})
        self.gain, self.calls = 1.0, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.gain / self.calls**0.5)

    def set(self, u):
        self.gain = 0.5 + u


def with_hook(params):
    """Returns an optimizer whose hook counts steps, and lowers the rate by the count."""
    made = torch.optim.Adam(params, lr=0.01)
    made.box = {"calls": 0, "gain": 1.0}

    def hook(optimizer, args, kwargs):
        optimizer.box["calls"] += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * optimizer.box["gain"] / (1 + optimizer.box["calls"] % 3)

    made.register_step_post_hook(hook)
    return made


def with_closure_hook(params):
    made = torch.optim.SGD(params, lr=0.01)
    calls = 0

    def hook(optimizer, args, kwargs):
        nonlocal calls
        calls += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + calls % 3)

    made.register_step_pre_hook(hook)
    return made


OPTIMIZERS = {
    "counting SGD": Counting,
    "Lookahead": Lookahead,
    "rule of the user's own": Wrapper,
    "hook": with_hook,
    "hook with a closure": with_closure_hook,
}


# --- callbacks ---


class Acting(Callback):
    """Changes something, as a number of its state says."""

    _not_state = ("effect", "every", "event")

    def __init__(self, program, state, event, effect, every):
        self.state, self.program = state, program
        self.effect, self.every, self.event = effect, every, event

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
        with torch.no_grad(), context.trainer.gathered() as module:
            if self.best is None or loss < self.best * 0.9:
                self.best = loss
                self.weights = copy.deepcopy(dict(module.state_dict()))
                return
            for name, p in module.named_parameters():
                p.copy_(p * 0.5 + self.weights[name] * 0.5)


class Teacher(Callback):
    """A deep copy of the module, whose weights decide the rate."""

    def __init__(self, early, module):
        self.teacher = copy.deepcopy(module) if early else None
        self.updates = 0

    def on_fit_start(self, context):
        if self.teacher is None:
            with context.trainer.gathered() as module:
                self.teacher = copy.deepcopy(module)
            self.teacher.eval()

    def on_epoch_end(self, context):
        self.updates += 1
        with torch.no_grad(), context.trainer.gathered() as module:
            for mine, other in zip(self.teacher.parameters(), module.parameters(), strict=True):
                mine.mul_(0.5).add_(other.detach() * 0.5)
        total = sum(float(p.detach().double().abs().sum()) for p in self.teacher.parameters())
        for group in context.trainer.optimizer.param_groups:
            group["lr"] *= 0.8 + 0.4 * (total % 1)


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
    trainer.optimizer.param_groups[0]["lr"] = 0.02 * (0.5 + u)


@effect
def rate_times(program, trainer, u):
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.9 + 0.2 * u


@effect
def numpy_rate(program, trainer, u):
    trainer.optimizer.param_groups[-1]["lr"] = float(np.float32(0.01 + u / 50))


@effect
def group_extra(program, trainer, u):
    trainer.optimizer.param_groups[0]["my_setting"] = u


@effect
def gain(program, trainer, u):
    program.module.gain = 0.5 + u


@effect
def numpy_gain(program, trainer, u):
    program.module.gain = np.float64(0.5 + u)


@effect
def private_shift(program, trainer, u):
    program.module._shift = np.float64(u)


@effect
def scales(program, trainer, u):
    program.module.scales[int(u * 2)] = 0.3 + u


@effect
def table(program, trainer, u):
    program.module.table[3][0] = 0.5 + u
    program.module.table["a"] = 1.0 - u / 3


@effect
def noise(program, trainer, u):
    program.module.noise = np.full(2, u / 10)


@effect
def noise_in_place(program, trainer, u):
    program.module.noise[0] = u / 3


@effect
def tensor(program, trainer, u):
    program.module.tensor = torch.tensor([0.5 + u])


@effect
def tensor_in_place(program, trainer, u):
    program.module.tensor.fill_(0.5 + u)


@effect
def buffer_in_place(program, trainer, u):
    program.module.buffer.fill_(0.5 + u)


@effect
def clipping(program, trainer, u):
    trainer.clip_norm = None if u < 0.2 else 0.05 + u


@effect
def dropout(program, trainer, u):
    program.module.drop.p = u / 2


@effect
def frozen(program, trainer, u):
    parameters = list(program.module.parameters())
    if len(parameters) > 1:
        parameters[0].requires_grad_(u < 0.6)


@effect
def weights(program, trainer, u):
    with torch.no_grad(), trainer.gathered() as module:
        for p in module.parameters():
            p.mul_(0.98 + 0.04 * u)


@effect
def unread(program, trainer, u):
    program.module._unread = {"u": u, 3: [np.float32(u)], "t": torch.tensor(u)}


@effect
def loss(program, trainer, u):
    program.loss_member.set(u)


@effect
def scheduler(program, trainer, u):
    program.change_scheduler(u)


@effect
def optimizer(program, trainer, u):
    if hasattr(trainer.optimizer, "set"):
        trainer.optimizer.set(u)
    elif hasattr(trainer.optimizer, "box"):
        trainer.optimizer.box["gain"] = 0.5 + u


@effect
def transform(program, trainer, u):
    program.transform.set(u)


@effect
def collate(program, trainer, u):
    program.collate.set(u)


@effect
def closure(program, trainer, u):
    program.box[0] = 0.5 + u


# --- data ---


class Samples(data.Dataset):
    def __init__(self, x, y, form, transform=None):
        self.x, self.y, self.form, self.transform = x, y, form, transform
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        whole = len(self.y)
        return (
            max(2, whole * (self.epoch + 2) // (self.epoch + 3))
            if self.form == "growing"
            else whole
        )

    def __getitem__(self, i):
        x = self.x[i]
        if self.form == "curriculum" and x.is_floating_point():
            x = x * (1 + self.epoch / 4)
        return x if self.transform is None else self.transform(x), self.y[i]


class Strength:
    """A transform with a strength that a callback sets."""

    def __init__(self, form):
        self.form, self.strength, self._list = form, 1.0, [1.0]

    def __call__(self, x):
        strength = self._list[0] if self.form == "list" else self.strength
        return x * strength if x.is_floating_point() else x

    def set(self, u):
        self.strength = self._list[0] = 0.5 + u


class Collate:
    """A function that joins samples, with a setting."""

    def __init__(self):
        self.scale = np.float64(1)

    def __call__(self, samples):
        x, y = data.default_collate(samples)
        return x * float(self.scale) if x.is_floating_point() else x, y

    def set(self, u):
        self.scale = np.float64(0.5 + u)


def sampler_of(form, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    if form == "weighted":
        return data.WeightedRandomSampler(
            torch.linspace(0.1, 1, samples), samples, generator=generator
        )
    if form == "random":
        return data.RandomSampler(range(samples), generator=generator)
    return ByEpoch(samples)


class ByEpoch(data.Sampler):
    def __init__(self, samples):
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.samples

    def __iter__(self):
        return iter(
            np.random.default_rng([self.samples, self.epoch]).permutation(self.samples).tolist()
        )


# --- the program ---


class Program:
    """What a run trains with: a torch_draws.Training, with members in place of its parts."""

    def __init__(self, values, members, base, raising):
        self.kinds = {**values.KINDS, **KINDS}
        self.members, self.base, self.raising = members, base, raising
        self.states, self.given = [], []
        self.box = [1.0]
        self.loss_member = self.transform = self.collate = self.change_scheduler = None
        self.kind, self.shard, self.settings = base.kind, base.shard, base.settings
        self.loop, self.epochs = base.loop, base.epochs
        for kind, settings in members:
            if kind == "transform":
                self.transform = Strength(settings["form"])
            elif kind == "collate":
                self.collate = Collate()

    def member(self, kind):
        """Returns the settings of a member of a kind; None if there is none."""
        return next((settings for name, settings in self.members if name == kind), None)

    def module(self):
        self.module = made = Model(self.base.module())
        if leaves := self.member("leaves"):
            made.leaves = leaves["form"]
        if self.member("counting"):
            calls = [0]

            def outside():
                calls[0] += 1
                return 1.0 + calls[0] % 7 / 10

            made.outside = outside
        elif any(s.get("effect") == "closure" for _, s in self.members):
            box = self.box
            made.outside = lambda: box[0]
        return made

    def optimizer(self, module):
        if settings := self.member("optimizer"):
            return OPTIMIZERS[settings["optimizer"]](
                [p for p in module.parameters() if p.requires_grad]
            )
        return self.base.optimizer(module)

    def scheduler(self, optimizer):
        if settings := self.member("scheduler"):
            made, self.change_scheduler = SCHEDULERS[settings["scheduler"]](optimizer)
            return made
        return self.base.scheduler(optimizer)

    def loss(self):
        base = self.base.loss()
        if getattr(base, "reduction", "mean") == "sum":
            base.reduction = "mean"
        if settings := self.member("loss"):
            make, part = {**LOSSES, **COUNTING_LOSS}[settings["loss"]]
            self.loss_member = make(base, part)
            return self.loss_member.loss
        return base

    def weight(self):
        return self.base.weight()

    def callbacks(self, scheduled, module):
        made = []
        for kind, settings in self.members:
            if "state" in settings:
                make = functools.partial(self.kinds[settings["state"]], settings["start"])
                where = settings["event"], settings["effect"], settings["every"]
                late = settings["late"]
                made.append(LateState(self, make, *where) if late else Acting(self, make(), *where))
                self.states.append(made[-1])
            elif kind == "average" and settings["form"] == "EMA":
                made.append(
                    callbacks.EMA(
                        0.9, settings["warmup"], settings["every"], evaluate=settings["evaluate"]
                    )
                )
            elif kind == "average":
                made.append(callbacks.SWA(1, settings["every"], evaluate=settings["evaluate"]))
            elif kind == "best":
                made.append(Best(settings["form"]))
            elif kind == "teacher":
                made.append(Teacher(settings["form"] == "before fit()", module))
        self.given = made
        return [*made, self.raising]

    def batches(self, comm):
        x, y = self.base.tensors
        names = ("data", "sampler", "transform", "collate")
        own = [name for name in names if self.member(name)]
        if not own:
            return self.base.batches(comm)
        form = (self.member("data") or {}).get("form")
        samples = Samples(x, y, form, self.transform)
        how = {"shuffle": True} if form != "growing" else {}
        if sampler := self.member("sampler"):
            how = {"sampler": sampler_of(sampler["form"], len(samples), self.base.index)}
        return data.DataLoader(samples, self.base.batch, collate_fn=self.collate, **how)

    def ends(self):
        """Returns numbers that the states would give next."""
        states = [one.state for one in self.states if not hasattr(one.state, "is_scoped")]
        return [state.next() for state in states for _ in range(3)]
