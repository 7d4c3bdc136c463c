"""Random networks: chains of ops that fit one another, on one place or several."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from chance import Random, draw

from odyssey import device, nn
from odyssey import functional as F
from odyssey.core.tensor import Tensor

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
    # of token ids (T,), if samples are such; targets are then classes of each token, or of all
    vocabulary: int = 0
    each: bool = False


GENERAL: dict[str, Callable[[Tensor], Tensor]] = {  # ops of tensors of any shape; each keeps it
    "center": lambda x: x - x.mean(1, True),
    "halves": lambda x: F.cat([x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1),
    "largest": lambda x: x / (x.abs().max(1, True) + 1),
    "where": lambda x: F.where(x > 0, x, 0.1 * x**2),
    "product": lambda x: x @ (x.transpose(-1, -2) @ x) * 0.01 if x.ndim > 2 else x,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, "tanh"),
    "silu": F.silu,
    "softplus": lambda x: F.softplus(x) - 0.5,
    "roots": lambda x: F.sqrt(x * x + 1) - F.exp(-x.abs()) + F.log(x * x + 1),
    "least": lambda x: F.maximum(F.minimum(x, x[:, :1]), -x).clamp(-3, 2.5),
    "variance": lambda x: (
        x / F.sqrt(x.reshape(x.shape[0], -1).var(1, 0).reshape(-1, *[1] * (x.ndim - 1)) + 1)
    ),
    "stacked": lambda x: F.stack([x, -x], 1).mean(1) + x[:, -1:].expand(*x.shape) + x.min(1, True),
    "split": lambda x: F.cat(x.split(max(x.shape[1] // 3, 1), 1)[::-1], 1),
    "powers": lambda x: 2.0 ** x.clamp(-4, 1) + (x * x + 1) ** -0.5,
}


SAMPLE_NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm, "group_norm": nn.GroupNorm
}  # fmt: skip


def _layer(name: str, *given: Any) -> nn.Module:
    """The layer of an op that has one."""
    if name == "norm":
        return (nn.BatchNorm2d if given[1] else nn.BatchNorm1d)(given[0])
    if name in SAMPLE_NORMS:
        return SAMPLE_NORMS[name](*given)
    return (nn.Conv2d if name == "conv" else nn.Linear)(*given[:-1], bias=given[-1])


LAYERS = ("linear", "conv", "add linear", "from input", "norm", *SAMPLE_NORMS)


class Chain(nn.Module):
    """Ops one after the other, as `Draft` writes them down."""

    def __init__(
        self, ops: Sequence[Op], unused: Sequence[int] = (), frozen: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.ops = tuple(ops)
        for i, (name, place, *given) in enumerate(ops):
            if name in LAYERS:
                setattr(self, f"layer{i}", _layer(name, *given) @ device(place))
            if name == "tied":  # the weight of another layer, perhaps all that it has; of any place
                kind, _, *made = self.ops[given[0]]
                layer, other = _layer(kind, *made), getattr(self, f"layer{given[0]}")
                for shared in vars(other) if given[1] else ["weight"]:
                    setattr(layer, shared, getattr(other, shared))
                setattr(self, f"layer{i}", layer @ device(place))
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
            if name in ("linear", "conv", "tied", "norm", *SAMPLE_NORMS):
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
        self.inputs, self.first = math.prod(self.shape), self.shape

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
        """Perhaps a residual addition, a layer used again or tied, dropout."""
        random, (n, *more) = self.random, self.shape
        shapes = [
            (self.first if i == 0 else self.shapes[i - 1], shape)
            for i, shape in enumerate(self.shapes)
        ]
        squares = [
            i
            for i, op in enumerate(self.ops)
            if op[0] in ("linear", "conv", "norm", *SAMPLE_NORMS)
            and shapes[i] == (self.shape, self.shape)
        ]
        if random.chance(0.1):
            self.put("scale", random.one([0.5, -1.25]))
        if random.chance(0.05) and not more:
            self.put(random.one(["softmax", "log_softmax"]))
        if not more and n <= 60 and random.chance(0.2):
            self.put("add linear", n, n, random.chance(0.5))
        if squares and random.chance(0.6):
            chosen = random.one(squares)
            kinds = (
                ["again", "checkpoint", "tied"] if self.ops[chosen][1] == self.place else ["tied"]
            )
            kind = random.one(kinds)
            self.put(kind, chosen, *[random.chance(0.5)] * (kind == "tied"))
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
        self.sample_norm(0.2)

    def sample_norm(self, p: float) -> None:
        """Perhaps a norm of each sample."""
        random, (n, *more) = self.random, self.shape
        if random.chance(p) and not more:
            self.put(random.one(["layer_norm", "rms_norm"]), n)
        elif random.chance(p) and more:
            self.put("group_norm", random.one([g for g in range(1, n + 1) if n % g == 0]), n)

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
        self.sample_norm(0.15)
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

    def network(
        self, classes: int, shape: Shape, unused: Sequence[int] = (), **more: Any
    ) -> Network:
        """It, with a last layer."""
        self.linear(classes)
        ops, text = tuple(self.ops), _text(shape, self.ops)
        layers = [i for i, op in enumerate(ops[:-1]) if op[0] in ("linear", "conv")]
        frozen = (self.random.one(layers),) if layers and self.random.chance(0.07) else ()
        if unused:
            text += f", unused {' '.join(map(str, unused))}"
        if frozen:
            text += f", the weight of layer {frozen[0]} is fixed"
        return Network(
            text, shape, classes, functools.partial(Chain, ops, tuple(unused), frozen), **more
        )


def _text(shape: Shape, ops: Sequence[Op]) -> str:
    words = []
    for name, place, *given in ops:
        at = f"@{place}" if place else ""
        if name in ("linear", "add linear", "from input"):
            words.append(f"{name} {given[1]}{'' if given[-1] else ' without bias'}{at}")
        elif name == "conv":
            _, k, (r, t), stride, padding, bias = given
            words.append(
                f"conv {k}x{r}x{t}/{stride}+{padding}{'' if bias else ' without bias'}{at}"
            )
        else:
            words.append(" ".join([name, *(str(g) for g in given if g is not None)]))
    return f"{'x'.join(map(str, shape))}: {', '.join(words)}"


class Blocks(nn.Module):
    """Planes (N, C, H, W), or signals (N, C, W), through blocks, then a linear layer."""

    def __init__(self, blocks: Sequence[Op], shape: Shape, classes: int, signal: bool) -> None:
        super().__init__()
        self.blocks, self.signal = tuple(blocks), signal
        make = nn.Conv1d if self.signal else nn.Conv2d
        for i, (kind, *given) in enumerate(blocks):
            layers: list[nn.Module] = []
            if kind == "conv":
                layers = [make(*given[:3], given[3], *given[4:])]
            elif kind == "residual":  # a bottleneck: 1 x 1, groups and dilation, 1 x 1
                c, mid, groups, dilation, norm = given
                norms = [_plane_norm(norm, n, self.signal) for n in (mid, mid, c)]
                wide = make(mid, mid, 3, 1, dilation, dilation, groups, bias=False)
                layers = [make(c, mid, 1), norms[0], wide, norms[1], make(mid, c, 1), norms[2]]
            elif kind == "u":  # down, across, up again and beside what was there
                c, mid, pool = given
                layers = [
                    make(c, mid, 3, 1, 1),
                    make(c + mid, c, 1),
                    *([] if self.signal else [pool(2)]),
                ]
            elif kind == "experts":
                layers = [nn.Linear(given[0], given[1]), nn.Embedding(given[1], given[0])]
            elif kind == "norm":
                layers = [_plane_norm(given[1], given[0], self.signal)]
            elif kind in ("max", "mean"):
                layers = [nn.MaxPool2d(*given) if kind == "max" else nn.AdaptiveAvgPool2d(given)]
            setattr(self, f"block{i}", nn.ModuleList(layers))
        self.head = nn.Linear(math.prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.signal:
            x = x.reshape(x.shape[0], *x.shape[-2:])
        for i, (kind, *_) in enumerate(self.blocks):
            x = getattr(self, f"_{kind}")(x, *getattr(self, f"block{i}"))
        return self.head(x.flatten())

    def _conv(self, x: Tensor, layer: nn.Module) -> Tensor:
        return F.silu(layer(x))

    def _residual(self, x: Tensor, *layers: nn.Module) -> Tensor:
        y = x
        for i, layer in enumerate(layers):
            y = F.relu(layer(y)) if i in (1, 3) else layer(y)
        return x + y

    def _u(self, x: Tensor, across: nn.Module, join: nn.Module, *pool: nn.Module) -> Tensor:
        y = F.relu(across(pool[0](x) if pool else x[..., ::2]))
        n, c, *sizes = y.shape
        if self.signal:
            y = y.reshape(n, c, *sizes, 1).expand(n, c, *sizes, 2)
        else:
            y = y.reshape(n, c, sizes[0], 1, sizes[1], 1).expand(n, c, sizes[0], 2, sizes[1], 2)
        return join(F.cat([y.reshape(n, c, *x.shape[2:]), x], 1))

    def _experts(self, x: Tensor, gate: nn.Module, table: nn.Module) -> Tensor:
        """Each sample adds the row of a table that its channels choose, and rows of it by
        softmax.
        """
        chosen = gate(x.reshape(*x.shape[:2], -1).mean(2))
        rows = table(chosen.argmax(1)) + F.softmax(chosen) @ table.weight[:]
        return x + rows.reshape(*rows.shape, *[1] * (x.ndim - 2)) * (x > 0)

    def _norm(self, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)

    _max = _mean = _norm


def _plane_norm(kind: str, channels: int, signal: bool) -> nn.Module:
    batch = nn.BatchNorm1d if signal else nn.BatchNorm2d
    if kind == "group":
        return nn.GroupNorm(next(g for g in (3, 2, 1) if channels % g == 0), channels)
    return {
        "batch": lambda: batch(channels),
        "plain batch": lambda: batch(channels, momentum=0.3, affine=False),
        "batch of now": lambda: batch(channels, track_running_stats=False),
        "none": nn.Identity,
    }[kind]()


@draw("network", 2)
def blocks(random: Random) -> Network:
    """Groups, dilation, bottlenecks, padded and adaptive pools, skips over other sizes, tables;
    signals as well.
    """
    c, h, w = (
        random.integer(1, 4),
        random.one([1, random.integer(5, 14)], [1, 3]),
        random.integer(5, 17),
    )
    made: list[Op] = []
    shape, signal = (c, h, w), h == 1
    norms = ["batch", "group", "plain batch", "batch of now", "none"]
    for _ in range(random.integer(1, 4)):
        kind = random.one(
            ["conv", "residual", "u", "experts", "norm", "max", "mean"], [4, 3, 2, 1, 1, 1, 1]
        )
        if kind == "conv":
            groups, kernel = (
                random.one([g for g in range(1, c + 1) if c % g == 0]),
                random.integer(1, 3),
            )
            out, stride = groups * random.integer(1, 6), random.one([1, 1, 2])
            padding, dilation = random.integer(0, 2), random.integer(1, 2)
            sizes = [(n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n in (h, w)]
            if min(sizes[signal:]) < 1:
                continue
            made.append(
                (kind, c, out, kernel, stride, padding, dilation, groups, random.chance(0.7))
            )
            c, h, w = out, 1 if signal else sizes[0], sizes[1]
        elif kind == "residual":
            groups = random.integer(1, 4)
            mid = groups * random.integer(1, 3)
            made.append((kind, c, mid, groups, random.integer(1, 3), random.one(norms)))
        elif kind == "u" and w % 2 == 0 and (signal or h % 2 == 0):
            made.append((kind, c, random.integer(1, 6), random.one([nn.MaxPool2d, nn.AvgPool2d])))
        elif kind == "experts":
            made.append((kind, c, random.integer(2, 5)))
        elif kind == "norm":
            made.append((kind, c, random.one(norms[:-1])))
        elif kind == "max" and not signal and min(h, w) > 1:
            stride = random.integer(1, 3)
            made.append((kind, 3, stride, 1))
            h, w = (h - 1) // stride + 1, (w - 1) // stride + 1
        elif kind == "mean" and not signal:
            h, w = random.integer(1, min(h, 4)), random.integer(1, min(w, 4))
            made.append((kind, h, w))
    classes = random.size(20)
    words = [" ".join(getattr(g, "__name__", str(g)) for g in block) for block in made]
    text = f"{'x'.join(map(str, shape))}: {', '.join([*words, f'linear {classes}'])}"
    given = shape[::2] if signal else shape
    return Network(
        text, given, classes, functools.partial(Blocks, tuple(made), (c, h, w), classes, signal)
    )


def _unused(random: Random) -> list[int]:
    return [random.size(40)] if random.chance(0.1) else []


class Decoder(nn.Module):
    """Token ids (N, T) to logits of each token (N, T, classes), or of the sample (N, classes):
    blocks of attention and of layers, each added to what comes in.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        classes: int,
        blocks: Sequence[Op],
        tied: bool,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.length = tuple(blocks), length
        for i, (kind, norm, *given) in enumerate(blocks):
            setattr(self, f"norm{i}", SAMPLE_NORMS[norm](width))
            if kind in ("attention", "masked"):
                setattr(
                    self, f"inner{i}", nn.MultiheadAttention(width, given[0], given[-1], given[1])
                )
            elif kind == "separate":
                setattr(
                    self,
                    f"inner{i}",
                    nn.ModuleList(nn.Linear(width, width, given[1]) for _ in "qkv"),
                )
                setattr(self, f"outer{i}", nn.Linear(width, width, given[1]))
            else:
                setattr(self, f"inner{i}", nn.Linear(width, given[0]))
                setattr(self, f"outer{i}", nn.Linear(given[0], width))
        self.head = nn.Linear(width, classes, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: self.length]
        for i, (kind, _, *given) in enumerate(self.blocks):
            y = getattr(self, f"norm{i}")(x)
            if kind == "attention":
                padding = ids == 0 if not given[2] and i % 2 == 0 else None
                y = getattr(self, f"inner{i}")(y, key_padding_mask=padding, is_causal=given[2])
            elif kind == "separate":
                q, k, v = (layer(y) for layer in getattr(self, f"inner{i}"))
                past, p = 0 if given[2] else None, given[-1] if self.training else 0.0
                y = getattr(self, f"outer{i}")(F.attention(q, k, v, given[0], past, dropout=p))
            elif kind == "masked":
                y = self._masked(getattr(self, f"inner{i}"), y, ids, given[0], given[2])
            else:
                y = getattr(self, f"outer{i}")(getattr(F, given[1])(getattr(self, f"inner{i}")(y)))
            x = x + F.dropout(y, given[-1], self.training)
        return self.head(x)

    def _masked(
        self, layer: nn.Module, x: Tensor, ids: Tensor, heads: int, written: bool
    ) -> Tensor:
        """Attention written out, where tokens 0 are padding that nobody looks at; or PyTorch's
        function of heads.
        """
        n, t, f = x.shape
        qkv = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).reshape(
            n, t, 3, heads, f // heads
        )
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        if written:
            scores = q @ k.transpose(-1, -2) * (f // heads) ** -0.5
            y = F.softmax(F.where(ids.float().eq(0).reshape(n, 1, 1, t), -1e4, scores)) @ v
        else:
            p = layer.dropout.p if self.training else 0.0
            mask = (ids != 0)[:, None, None] if n % 2 else np.arange(t) - np.arange(t)[:, None] > -5
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=t % 3 > 0)
        return layer.out_proj(y.transpose(1, 2).reshape(n, t, f))


class Pooled(Decoder):
    """The mean of its tokens' logits."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mean(1)


@draw("network", 2)
def sequences(random: Random) -> Network:
    """A decoder or encoder of tokens, of any odd sizes; the output layer may be the embedding's."""
    # those of which ranks have some, and others
    heads = random.one([1, 2, 3, 4, 8], [2, 3, 2, 5, 3])
    length, vocabulary = random.integer(1, 20), random.integer(2, 30)
    width, tied, each = heads * random.integer(1, 9), random.chance(0.4), random.chance(0.6)
    blocks, norms = [], ["layer_norm", "rms_norm"]
    for _ in range(random.integer(1, 3)):
        p = random.one([0.0, 0.2])
        if random.chance(0.6):
            kind = random.one(["attention", "separate", "masked"], [3, 2, 1])
            blocks.append(
                (kind, random.one(norms), heads, random.chance(0.7), random.chance(0.7), p)
            )
        else:
            inner = random.one(["gelu", "silu", "relu", "softplus"])
            blocks.append(("layers", random.one(norms), random.integer(1, 40), inner, p))
    classes = vocabulary if tied else random.integer(2, 20)
    words = [" ".join(str(word) for word in block) for block in blocks]
    head = " tied" if tied else ", own head"
    text = (
        f"{length} tokens of {vocabulary}{head} {width} wide{' each' * each}: "
        f"{' then '.join(words)}"
    )
    made = Decoder if each else Pooled
    build = functools.partial(made, vocabulary, length, width, classes, tuple(blocks), tied)
    return Network(text, (length,), classes, build, vocabulary=vocabulary, each=each)


@draw("network", 4)
def multilayer(random: Random) -> Network:
    """Linear layers of any width; some of the same, so that there is something to share and to
    add.
    """
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
def filtered(random: Random) -> Network:
    """Convolutions that Winograd's algorithm fits, with tiles that are whole or cut at the border."""
    shape = (random.integer(1, 3), random.integer(9, 20), random.integer(9, 20))
    draft = Draft(random, shape)
    for _ in range(random.integer(2, 3)):
        (c, h, w), k, padding = draft.shape, random.integer(32, 37), random.one([0, 1, 1, 2])
        out = (k, h + 2 * padding - 2, w + 2 * padding - 2)
        draft.put("conv", c, k, (3, 3), 1, padding, random.chance(0.7), shape=out)
        draft.activation()
        draft.extra()
    draft.put("max_pool2d", 3, shape=(k, out[1] // 3, out[2] // 3))
    return draft.network(random.size(20), shape)


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
        if random.chance(0.3):
            draft.put("general", random.one(list(GENERAL)))
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
    tied = random.one(["", "weight", "layer"])  # of all stages but the last
    if tied:
        sizes[:-1] = [shape[0]] * len(sizes[:-1])
    micro = random.integer(5, 20) if random.chance(0.8) else random.integer(1, 4)

    def build() -> nn.Module:
        *layers, last = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        if tied == "layer":
            layers = layers[:1] * len(layers)
        for layer in layers if tied else ():
            layer.weight = layers[0].weight
        stages = [nn.Stage([layer, kind()]) for layer in layers] + [nn.Stage([last])]
        return nn.PipelineParallel(stages, micro_batch_size=micro, schedule="1f1b")

    text = (
        f"stages {'-'.join(map(str, sizes))} {kind.__name__}{f', one {tied}' * bool(tied)}, "
        f"micro-batches of {micro}"
    )
    return Network(text, shape, classes, build, len(sizes) - 1, ("gpipe", "1f1b"), micro)
