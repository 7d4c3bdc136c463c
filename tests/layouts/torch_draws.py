"""Random trainings of torch modules, and random layouts for them: what `scripts/random-layouts
--torch` is made of.

As in draws.py a case is a function of (seed, index), and what decides bits is drawn before where it
runs. Modules are made when a case is built, from the case's own seed: sizes from 1 on,
normalisations, dropout, tied, shared, unused and frozen weights; then a loss, an optimizer with its
groups, a scheduler, and a loader.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import zlib
from typing import Any

import numpy as np
import torch
import torch_changes as changes
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

import odyssey.torch
from odyssey import callbacks, data
from odyssey.comm import Communicator
from odyssey.data.nested import mapped

RANKS = 4  # of the largest layout
DEVICE = "cpu"  # of the modules


def numbers(seed: int, index: int, kind: str) -> random.Random:
    """Random numbers for one kind of draws of one case."""
    return random.Random(zlib.crc32(kind.encode()) + 1_000_003 * index + (seed << 40))


def size(r: random.Random, high: int = 40) -> int:
    """From 1 to high, half of them small, as small layers are where vectors are odd."""
    return r.randint(1, 9) if r.random() < 0.5 else r.randint(1, high)


# --- modules --------------------------------------------------------------------------------------


def activation(r: random.Random) -> nn.Module:
    kinds = [nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.PReLU, nn.Softplus]
    return r.choice(kinds)() if r.random() < 0.8 else nn.ReLU(inplace=True)


class Twice(nn.Module):
    """A layer that is used twice in a row, so its gradient has two parts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Gated(nn.Module):
    """What part is used depends on the sample values, so on the shard; a parameter without
    dimensions.

    A copy is returned where nothing is done: the layer that follows may work in place, on what an
    activation has kept.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale if float(x.detach().flatten()[0]) > 0 else x.clone()


def images(r: random.Random, shape: tuple[int, ...], out: int) -> nn.Module:
    """Convolutions over (C, H, W), then linear layers."""
    layers: list[nn.Module] = []
    c, least = shape[0], min(shape[1:])
    for _ in range(r.randint(1, 3)):
        k = r.randint(1, 3)
        d = size(r, 16)
        if r.random() < 0.2:
            groups, d = c, c * r.randint(1, 2)
        else:
            groups = 1
        stride = r.choice([1, 1, 2]) if least > 4 else 1
        pad = r.choice(["zeros", "reflect", "circular"]) if k == 3 and least > 2 else "zeros"
        layers.append(
            nn.Conv2d(
                c, d, k, stride, k // 2, groups=groups, bias=r.random() < 0.6, padding_mode=pad
            )
        )
        c, least = d, max(1, least // stride)
        norm = r.random()
        if norm < 0.4:
            momentum = r.choice([0.1, 0.3, None])
            layers.append(
                nn.BatchNorm2d(
                    c,
                    momentum=momentum,
                    affine=r.random() < 0.8,
                    track_running_stats=r.random() < 0.9,
                )
            )
        elif norm < 0.6:
            layers.append(nn.GroupNorm(r.choice([g for g in range(1, c + 1) if c % g == 0]), c))
        elif norm < 0.7 and least > 2:
            layers.append(
                nn.InstanceNorm2d(c, affine=r.random() < 0.5, track_running_stats=r.random() < 0.5)
            )
        layers.append(activation(r))
        if r.random() < 0.4:
            layers.append(
                r.choice([nn.Dropout, nn.Dropout2d, nn.AlphaDropout])(r.choice([0.1, 0.5]))
            )
        if r.random() < 0.3 and least > 3:
            layers.append(r.choice([nn.MaxPool2d, nn.AvgPool2d])(2))
            least //= 2
    if r.random() < 0.2:
        layers.append(Gated(nn.Conv2d(c, c, 1)))
    n = r.randint(1, 2)
    layers += [nn.AdaptiveAvgPool2d(n), nn.Flatten(), nn.Linear(c * n * n, out)]
    return nn.Sequential(*layers)


def rows(r: random.Random, shape: tuple[int, ...], out: int) -> nn.Module:
    """Linear layers over (F,)."""
    layers: list[nn.Module] = []
    d = shape[0]
    for _ in range(r.randint(0, 3)):
        width = size(r, 70)
        layer: nn.Module = nn.Linear(d, width, bias=r.random() < 0.7)
        kind = r.random()
        if kind < 0.15:
            layer = nn.utils.parametrizations.weight_norm(layer)
        elif kind < 0.25:
            layer, width = Twice(nn.Linear(d, d)), d
        elif kind < 0.35:
            layer, width = Gated(nn.Linear(d, d)), d
        layers.append(layer)
        d = width
        layers.append(r.choice([nn.BatchNorm1d(d), nn.LayerNorm(d), nn.RMSNorm(d), nn.Identity()]))
        layers += [activation(r), nn.Dropout(r.choice([0.0, 0.2]))]
    return nn.Sequential(*layers, nn.Linear(d, out))


class Tokens(nn.Module):
    """A language model over (T,) integers: tied weights, attention or a recurrent layer or a
    bag.
    """

    def __init__(self, r: random.Random, length: int, words: int, rounds: bool) -> None:
        super().__init__()
        heads = r.randint(1, 3)
        d = heads * r.randint(1, 9)
        self.embed = nn.Embedding(
            words, d, padding_idx=r.choice([None, 0]), scale_grad_by_freq=r.random() < 0.2
        )
        self.place = nn.Parameter(torch.randn(length, d) * 0.1) if r.random() < 0.5 else None
        kind = r.choice(["gru", "lstm", "attention", "block", "linear"])
        if rounds and kind == "lstm":
            kind = "gru"  # oneDNN has no LSTM in bf16 for processors without instructions for it
        self.kind = kind
        if kind in ("gru", "lstm"):
            both = r.random() < 0.3
            many = r.randint(1, 2)
            drop = 0.2 if many == 2 else 0.0
            self.mix = (nn.GRU if kind == "gru" else nn.LSTM)(
                d, d, many, batch_first=True, bidirectional=both, dropout=drop
            )
            self.back = nn.Linear(2 * d, d) if both else nn.Identity()
        elif kind == "attention":
            self.mix = nn.MultiheadAttention(d, heads, dropout=0.1, batch_first=True)
        elif kind == "block":
            self.mix = nn.TransformerEncoderLayer(
                d, heads, 2 * d, batch_first=True, norm_first=r.random() < 0.5
            )
        else:
            self.mix = nn.Linear(d, d)
        self.norm, self.out = (
            r.choice([nn.LayerNorm, nn.RMSNorm])(d),
            nn.Linear(d, words, bias=False),
        )
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))
        if r.random() < 0.6:
            self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        if self.place is not None:
            y = y + self.place
        if self.kind in ("gru", "lstm"):
            y = self.back(self.mix(y)[0])
        elif self.kind == "attention":
            y = y + self.mix(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        elif self.kind == "block":
            y = self.mix(y, src_mask=self.mask, is_causal=True)
        else:
            y = self.mix(y)
        return self.out(self.norm(y)).transpose(1, 2)


class Pair(nn.Module):
    """Two inputs, by place or by name: numbers and a bag of integers; the bag's table counts its
    own uses.
    """

    def __init__(self, r: random.Random, width: int, words: int, out: int) -> None:
        super().__init__()
        d = size(r, 20)
        self.line, self.bag = (
            nn.Linear(width, d),
            nn.EmbeddingBag(words, d, mode=r.choice(["sum", "mean", "max"])),
        )
        self.mix, self.norm = nn.Linear(d, out), nn.BatchNorm1d(d)

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.tanh(self.norm(self.line(numbers))) * self.bag(words))


class More(nn.Module):
    """A module beside one that nothing uses, and a parameter without elements."""

    def __init__(self, used: nn.Module, unused: nn.Module) -> None:
        super().__init__()
        self.unused, self.used, self.empty = unused, used, nn.Parameter(torch.zeros(0, 3))

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.used(*inputs, **named)


# --- what is drawn --------------------------------------------------------------------------------

Tensors = tuple[Any, Any]  # trees of all samples and targets


@dataclasses.dataclass
class Training:
    """All that decides bits. `module` and the like are made anew for every run, from `seed`."""

    seed: int
    index: int
    kind: str
    batch: int
    shard: int
    samples: int
    shuffle: bool
    loader: str
    loop: str
    epochs: int
    settings: dict[str, Any]
    channels_last: bool
    compiled: bool = False

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return -(-self.samples // (self.batch * self.settings["accumulation_steps"])) * self.epochs

    def _numbers(self, kind: str) -> random.Random:
        return numbers(self.seed, self.index, kind)

    @functools.cached_property
    def tensors(self) -> Tensors:
        """All samples and targets."""
        r = self._numbers("data")
        g = torch.Generator().manual_seed(r.randrange(1 << 30))
        n, out = self.samples, r.randint(1, 12)
        self.out, self.words, self.length = out, r.randint(2, 30), r.randint(1, 7)
        if self.kind == "tokens":
            words = torch.randint(0, self.words, (n, self.length + 1), generator=g)
            return words[:, :-1].contiguous(), words[:, 1:].contiguous()
        self.classes = out > 1 and r.random() < 0.7
        shape = (
            (r.randint(1, 4), r.randint(3, 11), r.randint(3, 11))
            if self.kind == "images"
            else (size(r, 50),)
        )
        x = torch.randn((n, *shape), generator=g)
        y = (
            torch.randint(0, out, (n,), generator=g)
            if self.classes
            else torch.randn((n, out), generator=g)
        )
        if self.kind == "pair":
            bag = torch.randint(0, self.words, (n, self.length), generator=g)
            return {"numbers": x, "words": bag} if r.random() < 0.5 else (x, bag), y
        return x, y

    def module(self) -> nn.Module:
        """The module, its weights from the case's seed."""
        x, _ = self.tensors
        r = self._numbers("module")
        torch.manual_seed(self.seed * 1_000_003 + self.index)
        if self.kind == "tokens":
            made: nn.Module = Tokens(
                r, self.length, self.words, self.settings["precision"] == "bf16"
            )
        elif self.kind == "pair":
            width = (x["numbers"] if isinstance(x, dict) else x[0]).shape[1]
            made = Pair(r, width, self.words, self.out)
        else:
            made = (images if self.kind == "images" else rows)(r, tuple(x.shape[1:]), self.out)
        if r.random() < 0.25:
            made = More(made, nn.Linear(size(r), size(r)))
        own = [p for p in made.parameters()]
        # torch 2.13 ends with a segmentation fault where a channels-last GroupNorm's inputs need no
        # gradient
        fragile = self.channels_last and any(isinstance(m, nn.GroupNorm) for m in made.modules())
        for p in () if fragile else own[:-1]:
            if r.random() < 0.08:
                p.requires_grad_(False)
        if r.random() < 0.1:
            for part in made.modules():
                if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                    part.eval()  # a normalisation that is not trained any more
        # torch 2.13 corrupts its heap in the backward pass of channels-last 1 x 1 convolutions with
        # a stride
        corrupts = any(
            isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) != m.stride for m in made.modules()
        )
        if self.channels_last and self.kind == "images" and not corrupts:
            made = made.to(memory_format=torch.channels_last)
        made = changes.Gain(made) if self._numbers("gain").random() < 0.3 else made
        return made.to(DEVICE)

    def callbacks(self, scheduled: bool, module: nn.Module) -> list[callbacks.Callback]:
        """What changes things while it runs; of trainings by fit() only."""
        fragile = self.channels_last and any(isinstance(m, nn.GroupNorm) for m in module.modules())
        return changes.drawn(self._numbers("changes"), scheduled, fragile)

    def loss(self) -> Any:
        """A function of (output, target)."""
        r = self._numbers("loss")
        if self.settings.get("gather"):
            return r.choice([contrastive, decorrelating, ranking])
        self.tensors  # noqa: B018  says whether targets are classes
        if self.kind == "tokens" or self.classes:
            classes = self.words if self.kind == "tokens" else self.out
            weight = torch.linspace(0.5, 2, classes).to(DEVICE)
            return r.choice(
                [
                    nn.CrossEntropyLoss(),
                    nn.CrossEntropyLoss(reduction="sum"),
                    nn.CrossEntropyLoss(label_smoothing=0.1),
                    nn.CrossEntropyLoss(weight=weight),
                    F.cross_entropy,
                    nn.MultiMarginLoss()
                    if self.kind != "tokens"
                    else nn.CrossEntropyLoss(ignore_index=-1),
                ]
            )
        return r.choice(
            [
                nn.MSELoss(),
                nn.L1Loss(),
                nn.HuberLoss(),
                nn.SmoothL1Loss(),
                nn.MSELoss(reduction="sum"),
            ]
        )

    def weight(self) -> Any:
        """A function of (output, target) that weighs shards, or None: their samples do."""
        is_sum = getattr(self.loss(), "reduction", "mean") == "sum"
        if self.loop == "own" or self.settings.get("gather") or is_sum:
            return None
        return self._numbers("weight").choice([None, None, count_above_mean])

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """An optimizer of the module's parameters, whole or in groups."""
        r = self._numbers("optimizer")
        given: Any = [p for p in module.parameters() if p.requires_grad or r.random() < 0.5]
        if r.random() < 0.35 and len(given) > 1:
            at = r.randrange(1, len(given))
            groups = [
                {"params": given[:at], "weight_decay": 0.0},
                {"params": given[at:], "lr": r.choice([1e-3, 3e-2])},
            ]
            given = groups
        lr, decay = r.choice([1e-3, 1e-2, 5e-2]), r.choice([0.0, 0.0, 0.01])
        way = r.choice([{}, {}, {"foreach": False}, {"foreach": True}])
        o = torch.optim
        return r.choice(
            [
                lambda: o.SGD(given, lr, weight_decay=decay, **way),
                lambda: o.SGD(
                    given, lr, momentum=0.9, dampening=0.1, maximize=r.random() < 0.2, **way
                ),
                # not fused: then PyTorch's ends in a TypeError at a parameter that is trained later
                # than others
                lambda: o.SGD(given, lr, momentum=0.8, nesterov=True),
                lambda: o.Adam(given, lr, amsgrad=r.random() < 0.5, weight_decay=decay, **way),
                lambda: o.Adam(given, lr, fused=True),
                lambda: o.AdamW(given, lr, weight_decay=decay, **way),
                lambda: o.AdamW(given, lr, fused=True, amsgrad=r.random() < 0.5),
                lambda: o.RMSprop(
                    given, lr, centered=r.random() < 0.5, momentum=r.choice([0, 0.9]), **way
                ),
                lambda: o.Adagrad(
                    given, lr, lr_decay=0.1, initial_accumulator_value=r.choice([0, 0.1])
                ),
                lambda: o.Adagrad(given, lr, fused=True),
                lambda: o.Adadelta(given, lr * 10, **way),
                lambda: o.NAdam(given, lr, decoupled_weight_decay=r.random() < 0.5, **way),
                lambda: o.RAdam(given, lr, **way),
                lambda: o.Adamax(given, lr, **way),
                lambda: o.Rprop(given, lr, **way),
                lambda: o.ASGD(given, lr, t0=3, **way),
                lambda: o.Adafactor(given, lr),
            ]
        )()

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """A scheduler, or none."""
        r, s, n = self._numbers("scheduler"), schedulers, self.steps
        return r.choice(
            [
                lambda: None,
                lambda: None,
                lambda: s.StepLR(optimizer, 2, 0.5),
                lambda: s.MultiStepLR(optimizer, [1, 3], 0.3),
                lambda: s.CosineAnnealingLR(optimizer, n),
                lambda: s.CosineAnnealingWarmRestarts(optimizer, 2),
                lambda: s.ExponentialLR(optimizer, 0.9),
                lambda: s.PolynomialLR(optimizer, n, 2.0),
                lambda: s.LambdaLR(optimizer, lambda k: 1 / (1 + k)),
                lambda: s.LinearLR(optimizer, 0.2, total_iters=3),
                lambda: s.ChainedScheduler(
                    [s.ConstantLR(optimizer, 0.5, 2), s.ExponentialLR(optimizer, 0.9)]
                ),
                lambda: s.SequentialLR(
                    optimizer, [s.LinearLR(optimizer, 0.1), s.CosineAnnealingLR(optimizer, 5)], [2]
                ),
                lambda: s.OneCycleLR(
                    optimizer,
                    0.05,
                    total_steps=n + 1,
                    cycle_momentum=any("momentum" in g for g in optimizer.param_groups),
                ),
            ]
        )()

    def batches(self, comm: Communicator) -> Any:
        """The loader: ours, torch's, odyssey.torch's, or a list."""
        x, y = self.tensors
        if self.loader == "ours":
            made = data.arrays(*mapped(lambda t: t.numpy(), (x, y)))
            return data.DataLoader(
                made, batch_size=self.batch, shuffle=self.shuffle, seed=self.index
            )
        if self.loader == "ours, of samples":
            made = Samples(x, y)
            return data.DataLoader(
                made, batch_size=self.batch, shuffle=self.shuffle, seed=self.index
            )
        if self.loader == "odyssey.torch":
            kind = Noisy if self._numbers("noise").random() < 0.4 else Samples
            return odyssey.torch.DataLoader(
                kind(x, y), self.batch, self.shuffle, self.index, shard_size=self.shard, comm=comm
            )
        if self.loader == "torch":
            r = self._numbers("sampler")
            if r.random() < 0.5:
                own = changes.sampler(r, self.samples, self.index)
                return torch.utils.data.DataLoader(Samples(x, y), self.batch, sampler=own)
            return torch.utils.data.DataLoader(Samples(x, y), self.batch, shuffle=self.shuffle)
        cuts = [slice(at, at + self.batch) for at in range(0, self.samples, self.batch)]
        return [tuple(mapped(lambda t, c=c: t[c], tree) for tree in (x, y)) for c in cuts]

    def __str__(self) -> str:
        module = self.module()
        optimizer = self.optimizer(module)
        scheduler = self.scheduler(optimizer)
        about = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)[2:]]
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        words = [" ".join(str(m).split()) for m in (module, optimizer)]
        loss = self.loss()
        return (
            f"{', '.join(about)}; {words[0]}, frozen {frozen}; {words[1]}; "
            f"{type(scheduler).__name__}; {getattr(loss, '__name__', loss)}; "
            f"{getattr(self.weight(), '__name__', 'by samples')}; "
            f"{[*map(str, self.callbacks(scheduler is not None, module))]}"
        )


class Samples(torch.utils.data.Dataset):
    """Pairs, one by one, as arrays for our loader and as tensors for torch's."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return mapped(lambda t: t[i], self.x), mapped(lambda t: t[i], self.y)


def count_above_mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns a weight of a shard: how many of its targets are above their mean; 0 if all are
    equal.
    """
    return (y > y.float().mean()).sum()


def contrastive(out: torch.Tensor, y: Any) -> torch.Tensor:
    """Each sample is to be told from all others of the batch but the next, which it is to be
    like.
    """
    z = F.normalize(out.flatten(1).float(), eps=1e-3)
    return F.cross_entropy(z @ z.T / 0.2, (torch.arange(len(z), device=z.device) + 1) % len(z))


def decorrelating(out: torch.Tensor, y: Any) -> torch.Tensor:
    """Features of the batch are to be without correlation, after dropout of the loss's own."""
    z = F.dropout(out.flatten(1).float(), 0.1)
    z = z - z.mean(0)
    return ((z.T @ z / len(z)) - torch.eye(z.shape[1], device=z.device)).square().mean()


def ranking(out: torch.Tensor, y: Any) -> torch.Tensor:
    """Pairs of samples are to be in the order of their targets."""
    score, value = (
        out.flatten(1).float().mean(1),
        y.flatten(1).float().mean(1) if y.dim() > 1 else y.float(),
    )
    return (F.softplus(score[None] - score[:, None]) * (value[:, None] > value[None])).mean()


class Noisy(Samples):
    """Pairs of which some are drawn, by torch's, NumPy's or Python's generator."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        draw = (lambda: torch.rand(()), np.random.random, random.random)[i % 3]
        scale = 1.0 if i % 7 < 5 else float(draw())
        return mapped(lambda t: t * scale if t.is_floating_point() else t, x), y


@dataclasses.dataclass
class Layout:
    """Where a training runs; nothing in it may change a bit."""

    ranks: int
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def splits(self) -> bool:
        """Whether ranks have parts."""
        return self.settings.get("zero", 0) > 0

    def __str__(self) -> str:
        return f"{self.ranks} ranks {self.settings}"


ALONE = Layout(1)


@dataclasses.dataclass
class Case:
    """A training; the layouts it runs on whole; and those on which it is stopped after so many
    steps, then goes on.
    """

    training: Training
    whole: Layout
    before: Layout
    after: Layout
    stop: int
    every: int | None

    def __str__(self) -> str:
        return (
            f"on {self.whole}; {self.stop} steps on {self.before}, then {self.after}, "
            f"checkpoint_every={self.every}: {self.training}"
        )


def layout(r: random.Random, accumulation: int) -> Layout:
    """A layout of 1 to 4 ranks."""
    ranks = r.randint(1, RANKS)
    settings: dict[str, Any] = {"zero": r.choice([0, 1, 2, 3])}
    kind = r.choice(["tree", "tree", "hierarchical", "parameter_server"])
    if ranks > 1 and not settings["zero"] and kind != "tree":
        settings["reduction"] = kind
        if kind == "parameter_server":
            settings["servers"] = r.randint(1, ranks)
    return Layout(ranks, settings)


def case(seed: int, index: int) -> Case:
    """Case number `index` of a seed."""
    r = numbers(seed, index, "training")
    kind = r.choice(["images", "images", "rows", "tokens", "pair"])
    shard = r.choice([2, 3, 4, 5, 8, 16])
    batch = max(
        2, r.choice([shard, 2 * shard, 3 * shard + 2, 4 * shard, 7 * shard - 1, r.randint(2, 60)])
    )
    samples = batch * r.randint(1, 3) + r.choice([0, 0, batch // 2, 3])
    batch, samples = even(batch, shard, samples)
    loader = r.choice(["ours", "ours", "ours, of samples", "torch", "odyssey.torch", "list"])
    accumulation = r.choice([1, 1, 2, 3]) if loader in ("ours", "odyssey.torch") else 1
    if accumulation > 1:  # steps of joined batches: no shard of one sample there either
        samples = batch * accumulation * r.randint(1, 2)
        batch, samples = even_joined(batch, shard, samples, accumulation)
    settings: dict[str, Any] = {
        "seed": r.randrange(1 << 40),
        "clip_norm": r.choice([None, None, 0.1, 10.0]),
        "precision": r.choice(["fp32", "fp32", "bf16"]),
        "threads": r.choice([1, 1, 1, 2]),
        "accumulation_steps": accumulation,
        "check_every": r.choice([0, 1, 3]),
        "nonfinite": "skip",
        "scheduler_interval": r.choice(["step", "step", "epoch"]),
    }
    loop = "own" if accumulation == 1 and r.random() < 0.2 else "fit"
    if loop == "fit" and numbers(seed, index, "gather").random() < 0.25:
        settings["gather"] = True
    training = Training(
        seed,
        index,
        kind,
        batch,
        shard,
        samples,
        r.random() < 0.7,
        loader,
        loop,
        r.randint(1, 3),
        settings,
        r.random() < 0.3,
    )
    where = numbers(seed, index, "layout")
    layouts = [layout(where, accumulation) for _ in range(3)]
    if layouts[0].ranks == 1:
        layouts[0].ranks = where.randint(2, RANKS)
    for one, moves in zip(
        layouts, numbers(seed, index, "rebalance").choices([False, True], k=3), strict=True
    ):
        # both have equal shares
        if moves and loader != "odyssey.torch" and one.settings["zero"] < 2:
            one.settings["rebalance"] = True  # cases.Anywhere
    stop = where.randint(1, max(1, training.steps - 1))
    return Case(training, *layouts, stop, where.choice([None, 1, 2]))


def even(batch: int, shard: int, samples: int) -> tuple[int, int]:
    """The same, a little larger, so that no shard has one sample only: BatchNorm needs two."""
    batch += batch % shard == 1 or batch == 1
    last = samples % batch
    while last and (last == 1 or last % shard == 1):
        samples, last = samples + 1, last + 1
    return batch, samples


def even_joined(batch: int, shard: int, samples: int, k: int) -> tuple[int, int]:
    """That for k batches as one step."""
    for more in itertools.count():
        b = batch + more
        if (b * k) % shard != 1:
            return b, b * k * max(1, samples // (b * k))
    raise AssertionError
