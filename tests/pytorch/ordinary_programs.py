"""Models, losses and callbacks as people write them, for test_ordinary_programs.py.

`CASES` holds functions that return a `Program`, by name. Each builds all objects anew, as a program
does that is started again.
"""

from __future__ import annotations

import argparse
import collections
import copy
import csv
import dataclasses
import functools
import importlib
import io
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from odyssey import callbacks
from odyssey.errors import Stopped
from odyssey.torch import DistributedTrainer

EPOCHS = 3
WIDTH, CLASSES = 6, 3
_generator = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randn(12, WIDTH, generator=_generator), torch.arange(12) % CLASSES) for _ in range(4)
]
STEPS = EPOCHS * len(BATCHES)

# What programs have at the top of their files.
args = argparse.Namespace(scale=0.5, label_smoothing=0.1, started=time.time(), out=Path("."))
DEVICE = torch.device("cpu")
RANK = int(os.environ.get("RANK", "0"))
IS_MAIN = RANK == 0
LAST_ACTIVATIONS: dict[str, torch.Tensor] = {}
DEBUG = False
calls_printed = 0
log = logging.getLogger(__name__)


@dataclasses.dataclass
class Program:
    """What a program trains: a module, and by choice a loss, callbacks and metrics."""

    module: nn.Module
    loss: Any = None
    callbacks: list[callbacks.Callback] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranks: tuple[int, ...] = (1, 2)


CASES: dict[str, Callable[[Path], Program]] = {}
PACKAGES: dict[str, str] = {}  # that a case needs


def case(package: str | None = None) -> Callable[[Any], Any]:
    """Adds a function of a folder to the cases."""

    def add(make: Any) -> Any:
        CASES[make.__name__] = make
        if package is not None:
            PACKAGES[make.__name__] = package
        return make

    return add


def is_available(name: str) -> bool:
    """Tells whether the package that a case needs can be imported."""
    package = PACKAGES.get(name)
    if package is None:
        return True
    try:
        importlib.import_module(package)
    except Exception:  # one package fails with an error of PyTorch's
        return False
    return True


class Net(nn.Module):
    """A small network with dropout."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, hidden)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(hidden, CLASSES)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.tanh(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.features(x))


# --- callbacks ------------------------------------------------------------------------------------


@case()
def csv_logger(folder):
    class Csv(callbacks.Callback):
        """Opens its file late, and keeps rows and times."""

        def __init__(self):
            self.file = None
            self.writer = None
            self.rows = []
            self.started = time.time()
            self.last_step = None

        def on_fit_start(self, context):
            self.trainer = context.trainer
            self.module = context.trainer.module
            self.file = open(folder / "log.csv", "a", newline="")  # noqa: SIM115
            self.writer = csv.writer(self.file)

        def on_step_end(self, context):
            seconds = time.time() - (self.last_step or self.started)
            self.last_step = time.time()
            self.rows.append((context.steps, self.trainer.last.loss, seconds))
            self.writer.writerow(self.rows[-1])

        def on_fit_end(self, context):
            self.file.close()
            self.file = self.writer = None

    return Program(Net(), callbacks=[Csv()])


@case("tensorboardX")
def tensorboard_logger(folder):
    class Board(callbacks.Callback):
        _writer = None

        @property
        def writer(self):
            if self._writer is None:
                from tensorboardX import SummaryWriter

                self._writer = SummaryWriter(str(folder / "board"))
            return self._writer

        def on_step_end(self, context):
            self.writer.add_scalar("loss", context.trainer.last.loss, context.steps)

    return Program(Net(), callbacks=[Board()])


@case("tqdm")
def progress_bar(folder):
    class Bar(callbacks.Callback):
        bar = None

        def on_epoch_start(self, context):
            import tqdm

            self.bar = tqdm.tqdm(total=len(BATCHES), file=io.StringIO())

        def on_step_end(self, context):
            self.bar.update()
            self.bar.set_postfix(loss=context.trainer.last.loss)

        def on_epoch_end(self, context):
            self.bar.close()
            self.bar = None

    return Program(Net(), callbacks=[Bar()])


@case("matplotlib")
def figure(folder):
    import matplotlib

    matplotlib.use("agg")

    class Plot(callbacks.Callback):
        """Keeps a figure, and makes it in the first step."""

        def __init__(self):
            self.figure = None
            self.losses = []

        def on_step_end(self, context):
            from matplotlib import pyplot

            if self.figure is None:
                self.figure, self.axes = pyplot.subplots()
                (self.line,) = self.axes.plot([], [])
            self.losses.append(context.trainer.last.loss)
            self.line.set_data(range(len(self.losses)), self.losses)

        def on_fit_end(self, context):
            from matplotlib import pyplot

            pyplot.close(self.figure)

    return Program(Net(), callbacks=[Plot()], ranks=(1,))


class AverageMeter:
    """A mean of values."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.value = self.sum = self.count = 0

    def update(self, value: float, n: int = 1) -> None:
        self.value = value
        self.sum += value * n
        self.count += n


@case()
def meters(folder):
    class Meters(callbacks.Callback):
        """Makes meters in each epoch, and remembers the best weights."""

        def __init__(self):
            self.meters = {}
            self.best = math.inf
            self.best_state = None
            self.best_epoch = None

        def on_epoch_start(self, context):
            self.meters = {name: AverageMeter(name) for name in ("loss", "rate")}

        def on_step_end(self, context):
            self.meters["loss"].update(context.trainer.last.loss, 12)
            self.meters["rate"].update(context.trainer.rate)

        def on_epoch_end(self, context):
            mean = self.meters["loss"].sum / self.meters["loss"].count
            if mean < self.best:
                self.best, self.best_epoch = mean, len(context.history.records)
                self.best_state = copy.deepcopy(context.trainer.module.state_dict())

    return Program(Net(), callbacks=[Meters()])


@case()
def dropout_schedule(folder):
    class Dropout(callbacks.Callback):
        def __init__(self, rates):
            self.rates = rates
            self.epoch = 0

        def on_epoch_start(self, context):
            for module in context.trainer.module.modules():
                if isinstance(module, nn.Dropout):
                    module.p = self.rates[min(self.epoch, len(self.rates) - 1)]

        def on_epoch_end(self, context):
            self.epoch += 1

    return Program(Net(), callbacks=[Dropout([0.3, 0.2, 0.1])])


@case()
def printed_counter(folder):
    class Prints(callbacks.Callback):
        count = 0

        def on_step_end(self, context):
            global calls_printed
            calls_printed += 1
            Prints.count += 1
            print(f"step {self.count}", file=io.StringIO())

    return Program(Net(), callbacks=[Prints()])


@case()
def queue_of_losses(folder):
    class Smooth(callbacks.Callback):
        def __init__(self):
            self.losses = collections.deque(maxlen=3)
            self.by_epoch = collections.defaultdict(list)
            self.names = collections.Counter()

        def on_step_end(self, context):
            self.losses.append(context.trainer.last.loss)
            self.by_epoch[context.cursor.epoch].append(self.losses[-1])
            self.names["step"] += 1

    return Program(Net(), callbacks=[Smooth()])


# --- models that keep something -------------------------------------------------------------------


@case()
def attention_maps(folder):
    class Attention(Net):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.maps = None
            self.all_maps = []
            self.last_features = {}

        def forward(self, x):
            h = self.features(x)[:, None, :].expand(-1, 3, -1)
            h, self.maps = self.attention(h, h, h)
            self.all_maps = [self.maps.detach()]
            self.last_features["mean"] = h.detach().mean(1)
            self.last_features["shape"] = tuple(h.shape)
            return self.last(h.mean(1))

    return Program(Attention())


@case()
def output_objects(folder):
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        hidden: torch.Tensor

    class Keeps(Net):
        last_output = None

        def forward(self, x):
            h = self.features(x)
            self.last_output = Output(self.last(h), h)
            return self.last_output.logits

    return Program(Keeps())


@case()
def hooks_of_users(folder):
    model = Net()
    activations = {}
    gradients = []

    def keep(name):
        def hook(module, inputs, output):
            activations[name] = output.detach()

        return hook

    for name, child in model.named_children():
        child.register_forward_hook(keep(name))
    model.last.register_full_backward_hook(
        lambda module, grad_in, grad_out: gradients.append(grad_out[0].detach())
    )
    model.register_state_dict_post_hook(lambda *args: None)
    model.first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    return Program(model)


@case()
def globals_for_debugging(folder):
    class Debugged(Net):
        def forward(self, x):
            global DEBUG
            h = self.features(x)
            LAST_ACTIVATIONS["features"] = h.detach()
            LAST_ACTIVATIONS["mean"] = h.detach().mean()
            if DEBUG:
                log.info("features %s", h)
            return self.last(h)

    return Program(Debugged())


@functools.cache
def causal_mask(length: int) -> torch.Tensor:
    return torch.tril(torch.ones(length, length))


@functools.cache
def rotary(length: int, width: int) -> torch.Tensor:
    return torch.outer(torch.arange(length), 1 / 10 ** (torch.arange(width) / width)).sin()


@case()
def cached_masks(folder):
    class Masked(Net):
        """A module that caches its masks in three ways: functions, a property and a dict."""

        def __init__(self):
            super().__init__()
            self.masks = {}
            self.table = None

        @functools.cached_property
        def scale(self):
            return torch.tensor(0.7)

        def forward(self, x):
            n = x.shape[-1]
            if n not in self.masks:
                self.masks[n] = causal_mask(n)
            if self.table is None or self.table.shape[0] < n:
                self.table = rotary(n, n)
            x = x @ self.masks[n] * self.scale + self.table.mean()
            return super().forward(x)

    return Program(Masked())


@case()
def lambdas(folder):
    class Lambdas(Net):
        def __init__(self):
            super().__init__()
            self.activation = lambda x: F.gelu(x) * args.scale
            self.norm = functools.partial(F.layer_norm, normalized_shape=(8,))
            self.steps = [torch.tanh, self.activation]

        def forward(self, x):
            h = self.norm(self.first(x))
            for step in self.steps:
                h = step(h)
            return self.last(h.to(DEVICE) if IS_MAIN else h)

    return Program(Lambdas())


# --- models that are built from settings ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    width: int = 8
    dropout: float = 0.1
    activation: type[nn.Module] = nn.GELU


@dataclasses.dataclass
class Config:
    blocks: list[BlockConfig] = dataclasses.field(default_factory=lambda: [BlockConfig()] * 2)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: torch.device = DEVICE


class Block(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.line = nn.Linear(config.width, config.width)
        self.activation = config.activation()
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.activation(self.line(x)))


@case()
def dataclass_configs(folder):
    class Stack(Net):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.blocks = nn.ModuleList(Block(one) for one in config.blocks)
            self.by_name = nn.ModuleDict({"head": self.last})

        def features(self, x):
            h = self.first(x)
            for block in self.blocks:
                h = block(h)
            return h

    return Program(Stack(Config()))


class Tree:
    """Nested settings that are read as attributes, and are created when they are missing."""

    def __init__(self, content: dict[str, Any], parent: Any = None) -> None:
        object.__setattr__(self, "_content", content)
        object.__setattr__(self, "_parent", parent)
        object.__setattr__(self, "_cache", {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._content.get(name)
        if isinstance(value, dict):
            return self._cache.setdefault(name, Tree(value, self))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._content[name] = value


class Attributes(dict):
    """A dict whose items are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


@case()
def nested_settings(folder):
    settings = Tree({"model": {"drop": {"p": 0.2}, "gain": 1.5}, "name": "test"})
    options = Attributes(model=Attributes(scale=0.9), names=["a", "b"])

    class Configured(Net):
        def __init__(self, settings, options):
            super().__init__()
            self.settings = settings
            self.options = options

        def forward(self, x):
            h = F.dropout(torch.tanh(self.first(x)), self.settings.model.drop.p, self.training)
            return self.last(h) * self.settings.model.gain * self.options.model.scale

    return Program(Configured(settings, options))


@case()
def tied_weights(folder):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(WIDTH, WIDTH)
            self.decode = nn.Linear(WIDTH, WIDTH)
            self.decode.weight = self.encode.weight
            self.head = nn.Linear(WIDTH, CLASSES)
            self.also_head = [self.head]
            self._parameters_list = [self.encode.weight, self.head.bias]

        def forward(self, x):
            return self.also_head[0](self.decode(torch.tanh(self.encode(x))))

    return Program(Tied())


class Lora(nn.Module):
    """A frozen layer with a small trained one next to it."""

    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = {"default": alpha / rank}
        self.merged_adapters: list[str] = []
        self.active = "default"
        self._caches: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x @ self.down.T @ self.up.T
        return self.base(x) + low * self.scaling[self.active]


@case()
def lora(folder):
    model = Net()
    model.first = Lora(model.first)
    model.last = Lora(model.last)
    return Program(model)


@case()
def parametrizations(folder):
    model = Net()
    nn.utils.parametrizations.weight_norm(model.first)
    nn.utils.parametrizations.orthogonal(model.last)
    return Program(model)


@case()
def compiled(folder):
    model = Net()
    model.first = torch.compile(model.first, backend="eager")
    return Program(model, ranks=(1,))


# --- losses ---------------------------------------------------------------------------------------


@case()
def perceptual_loss(folder):
    class Perceptual(nn.Module):
        """Compares features of a frozen network, which a hook keeps."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.frozen = nn.Sequential(nn.Linear(CLASSES, 5), nn.BatchNorm1d(5)).eval()
            self.frozen.requires_grad_(False)
            self.kept = {}
            self.frozen[0].register_forward_hook(self.keep)
            self.weights = {"ce": 1.0, "features": 0.1}
            self.last_parts = {}

        def keep(self, module, inputs, output):
            self.kept["features"] = output

        def forward(self, output, target):
            self.frozen(output)
            one = self.kept["features"]
            self.frozen(F.one_hot(target, CLASSES).float())
            distance = F.mse_loss(one, self.kept["features"])
            parts = {"ce": F.cross_entropy(output, target), "features": distance}
            self.last_parts = {name: part.detach() for name, part in parts.items()}
            return sum(self.weights[name] * part for name, part in parts.items())

    return Program(Net(), Perceptual())


def loss_of_arguments(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log.debug("on rank %d since %f", RANK, args.started)
    return F.cross_entropy(output, target.to(DEVICE), label_smoothing=args.label_smoothing)


@case()
def loss_with_arguments(folder):
    args.started = time.time()  # as in a program that is started again
    return Program(Net(), loss_of_arguments)


@case()
def focal_loss(folder):
    class Focal:
        """Is no module, and remembers its last value."""

        def __init__(self, gamma=2.0, weight=None):
            self.gamma = gamma
            self.weight = weight
            self.last = None
            self.history = []

        def __call__(self, output, target):
            ce = F.cross_entropy(output, target, self.weight, reduction="none")
            value = ((1 - torch.exp(-ce)) ** self.gamma * ce).mean()
            self.last = value.item()
            self.history.append(self.last)
            return value

    return Program(Net(), Focal(weight=torch.tensor([1.0, 2.0, 1.0])))


# --- metrics --------------------------------------------------------------------------------------


@case()
def metric_objects(folder):
    class Accuracy:
        """Accumulates as metrics of torchmetrics do."""

        def __init__(self):
            self.correct = torch.tensor(0)
            self.total = 0
            self._computed = None
            self._update_count = 0
            self._lock = None

        def update(self, output, target):
            self.correct = self.correct + (output.argmax(-1) == target).sum()
            self.total += len(target)
            self._update_count += 1
            self._computed = None

        def __call__(self, output, target):
            self.update(output, target)
            return (output.argmax(-1) == target).float().mean()

    return Program(Net(), settings={"metrics": {"accuracy": Accuracy()}})


@case("torchmetrics")
def torchmetrics_attribute(folder):
    import torchmetrics

    class Measured(Net):
        def __init__(self):
            super().__init__()
            self.measured = []

        def forward(self, x):
            output = super().forward(x)
            self.measured = [output.detach()]
            return output

    class Measure(callbacks.Callback):
        def __init__(self):
            self.mean = torchmetrics.MeanMetric()

        def on_step_end(self, context):
            self.mean.update(context.trainer.last.loss)

        def on_epoch_end(self, context):
            self.mean.reset()

    return Program(Measured(), callbacks=[Measure()])


# --- training -------------------------------------------------------------------------------------


class Stop(callbacks.Callback):
    """Stops after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps == self.step:
            context.stop = "the test"


def train(comm: Any, name: str, folder: Path, stop: int | None = None, **fit: Any) -> Any:
    """Trains a program, and returns the hash of the weights and what was printed."""
    torch.manual_seed(0)
    program = CASES[name](folder)
    with torch.no_grad():  # ranks are threads, which share the generator
        for p in program.module.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    trainer = DistributedTrainer(
        program.module,
        torch.optim.Adam([p for p in program.module.parameters() if p.requires_grad], 0.05),
        program.loss,
        shard_size=3,
        comm=comm,
        **program.settings,
    )
    lines: list[str] = []
    trainer.capture._say = lines.append
    hooks = [*program.callbacks, Stop(stop)]
    try:
        trainer.fit(BATCHES, epochs=EPOCHS, callbacks=hooks, verbose=False, **fit)
    except Stopped:
        pass
    return trainer.weights_sha256(), lines
