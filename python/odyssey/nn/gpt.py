"""GPT: a decoder of tokens in GPT-2's form (Radford et al. 2019), with the names that nanoGPT
gives its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core import functional as F
from ..core.tensor import Tensor, no_grad
from ..errors import ConfigError, ShapeError
from .layers import Dropout, Embedding, LayerNorm, Linear
from .losses import CrossEntropyLoss
from .module import Module, ModuleList, normal

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values (N, S, width) of each block, of the tokens so far."""


class SelfAttention(Module):
    """Causal self-attention of x (N, T, width): query, key and value from one layer, and one
    behind them.
    """

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = Linear(width, 3 * width, bias)
        self.c_proj = Linear(width, width, bias)
        self.attn_dropout = Dropout(dropout)
        self.resid_dropout = Dropout(dropout)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        qkv = self.c_attn(x)
        p = self.attn_dropout.p if self.training else 0.0
        if cache is None:
            y = F.attention(qkv, None, None, self.heads, past=0, dropout=p)
        else:
            q, k, v = F.split(qkv, x.shape[2], dim=2)
            cached = cache.pop(0)
            k, v = (
                F.cat([b, new], 1) if b.size else new for b, new in zip(cached, (k, v), strict=True)
            )
            cache.append((k, v))
            y = F.attention(q, k, v, self.heads, past=k.shape[1] - q.shape[1], dropout=p)
        return self.resid_dropout(self.c_proj(y))


class FeedForward(Module):
    """Two layers with GELU between them, four times as wide inside."""

    def __init__(self, width: int, dropout: float, bias: bool, gelu: str) -> None:
        super().__init__()
        self.c_fc = Linear(width, 4 * width, bias)
        self.c_proj = Linear(4 * width, width, bias)
        self.dropout = Dropout(dropout)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu)))


class Block(Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, gelu: str) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width, bias=bias)
        self.attn = SelfAttention(width, heads, dropout, bias)
        self.ln_2 = LayerNorm(width, bias=bias)
        self.mlp = FeedForward(width, dropout, bias, gelu)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Decoder(Module):
    """Embeddings of tokens and places, blocks, and a norm behind them."""

    def __init__(
        self,
        vocab_size: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float,
        bias: bool,
        gelu: str,
    ) -> None:
        super().__init__()
        self.wte = Embedding(vocab_size, width)
        self.wpe = Embedding(context, width)
        self.drop = Dropout(dropout)
        self.h = ModuleList(Block(width, heads, dropout, bias, gelu) for _ in range(layers))
        self.ln_f = LayerNorm(width, bias=bias)

    def forward(self, ids: Any, past: int, cache: Cache | None) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe.weight[past : past + np.shape(ids)[1]])
        for block in self.h:
            x = block(x, cache)
        return self.ln_f(x)


class GPT(Module):
    """Token ids (N, T), T up to `context`, to the logits (N, T, vocab_size) of the tokens that
    follow each.

    Weights are normal with deviation 0.02, of the layers that end a residual branch by sqrt(2
    layers) less, biases 0 (GPT-2). `dropout` acts on embeddings, on the probabilities of attention
    and on what each branch adds.

    Args:
        context: longest sequence.
        layers, heads, width: blocks, heads of each, features.
        bias: whether layers and norms have biases.
        gelu: "none", or "tanh" for GPT-2's approximation.
        tied: whether the output layer's weight is the embedding's.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 256,
        layers: int = 6,
        heads: int = 6,
        width: int = 384,
        dropout: float = 0.0,
        bias: bool = False,
        gelu: str = "none",
        tied: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"[GPT] width {width} and {heads} heads; the width must be a multiple of the heads"
            )
        self.context = context
        self.width = width
        self.transformer = Decoder(vocab_size, context, layers, heads, width, dropout, bias, gelu)
        self.lm_head = Linear(width, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.data[...] = 0
            elif p.ndim == 2:
                deviation = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02
                np.multiply(normal(p.shape).data, np.float32(deviation), out=p.data)
        self.loss = CrossEntropyLoss()

    def forward(self, ids: Any, cache: Cache | None = None) -> Tensor:
        """cache: `empty_cache()`, or that of the tokens before these; it takes in these."""
        past = cache[0][0].shape[1] if cache else 0
        if len(np.shape(ids)) != 2 or past + np.shape(ids)[1] > self.context:
            raise ShapeError(
                f"[GPT] ids of shape {np.shape(ids)} behind {past} tokens; they must be (N, T), "
                f"with at most {self.context} tokens altogether"
            )
        return self.lm_head(self.transformer(ids, past, cache))

    def empty_cache(self, n: int = 1) -> Cache:
        """The cache before the first token of n sequences."""
        nothing = np.zeros((n, 0, self.width), np.float32)
        return [(Tensor(nothing), Tensor(nothing)) for _ in self.transformer.h]

    def generate(
        self,
        ids: Sequence[int],
        tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        use_cache: bool = True,
    ) -> Iterator[int]:
        """The ids that follow `ids`, one after the other, each drawn with a number that is a
        function of (seed, place).

        Logits have the bits of `forward` on the whole text, with a cache or without: a token's do
        not depend on what is computed beside it. A text longer than `context` goes on from its last
        `context` tokens, without a cache.

        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw among so many likeliest ones; None: all.

        Raises ConfigError: there is no token to go on from, or a number is not allowed.
        """
        if not len(ids) or temperature < 0 or (top_k is not None and top_k < 1):
            raise ConfigError(
                f"[generate] {len(ids)} tokens to begin with, temperature {temperature}, top_k "
                f"{top_k}; give a token "
                "at least, a temperature of at least 0 and a top_k of at least 1"
            )
        text = [int(i) for i in ids]
        new = [int(i) for i in ids][-self.context :]
        cache = self.empty_cache() if use_cache else None
        for _ in range(tokens):
            if cache is None or len(text) > self.context:
                cache = None
                new = text[-self.context :]
            with no_grad():
                logits = (
                    self.eval()(np.array([new], np.int32), cache).numpy()[0, -1].astype(np.float64)
                )
            new = [_drawn(logits, temperature, top_k, seed, len(text))]
            text += new
            yield new[0]

    def load_gpt2(self, state: Mapping[str, Any]) -> None:
        """Copies weights in that have the names of nanoGPT or of transformers' GPT-2 (arrays or
        torch tensors). Raises ShapeError: a name is missing or unknown, or a shape differs.
        """
        current_state = self.state_dict()
        arrays = {}
        for name, value in state.items():
            name = name.removeprefix("_orig_mod.")
            name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
            if name.endswith((".attn.bias", ".attn.masked_bias")):  # masks
                continue
            array = np.asarray(
                value.detach().cpu() if hasattr(value, "detach") else value, np.float32
            )
            conv1d = name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and name.endswith("weight")
            arrays[name] = (array, conv1d)
        # transformers keeps the weights of these layers transposed; the feed-forward's tell which
        first = arrays.get("transformer.h.0.mlp.c_fc.weight", (np.zeros((4, 1)), True))[0]
        transposed = first.shape[0] < first.shape[1]
        state = {
            name: array.T if transposed and layer else array
            for name, (array, layer) in arrays.items()
        }
        self.load_state_dict(
            {
                "lm_head.weight": state.get(
                    "transformer.wte.weight", current_state["lm_head.weight"]
                ),
                **state,
            }
        )


def _drawn(logits: np.ndarray, temperature: float, top_k: int | None, seed: int, place: int) -> int:
    """A token by its logits (vocab_size,) float64; of equal ones the first counts as likelier."""
    order = np.argsort(-logits, kind="stable")[:top_k]
    if temperature == 0:
        return int(order[0])
    odds = np.cumsum(np.exp((logits[order] - logits[order[0]]) / temperature))
    u = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, place])).random()
    return int(order[min(np.searchsorted(odds, u * odds[-1], side="right"), len(order) - 1)])


def gpt(vocab_size: int = 76, context: int = 256, **options: Any) -> GPT:
    """nanoGPT's setting for characters: 6 layers of 6 heads, 384 wide, unless `options` say
    otherwise.
    """
    return GPT(vocab_size, context, **options)


def gpt_mini(vocab_size: int = 76, context: int = 64, **options: Any) -> GPT:
    """nanoGPT's setting for CPUs: 4 layers of 4 heads, 128 wide."""
    return GPT(vocab_size, context, **{"layers": 4, "heads": 4, "width": 128, **options})
