"""A GPT written out, trained on the characters of Shakespeare that come with odyssey, and some
text from it.

    python examples/gpt.py
    mpirun -n 2 python examples/gpt.py

The model is nanoGPT's setting for CPUs. `nn.models.build("gpt-mini")` is the same with a cache for
generation, and `odyssey train --model gpt-mini` trains that one. docs/gpt.md explains it.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from odyssey import DistributedTrainer, Tensor, data, nn, no_grad, optim


class Block(nn.Module):
    """Attention, then a feed-forward network, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Ids (N, T) to the logits (N, T, vocabulary) of what follows each."""

    def __init__(
        self, vocabulary: int, context: int, layers: int = 4, heads: int = 4, width: int = 128
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for p in (self.tokens.weight, self.places.weight):
            p.data[...] *= 0.02
        self.head.weight = self.tokens.weight  # one parameter in two places

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: np.shape(ids)[1]]
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="a few steps, for a test")
    args = parser.parse_args()
    steps = 5 if args.quick else args.steps

    train, test = (data.shakespeare(length=64, train=part) for part in (True, False))
    nn.manual_seed(0)
    model = GPT(train.classes, 64)
    optimizer = optim.AdamW(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer.undecayed = optim.vectors
    schedule = optim.schedule("cosine", steps, min(100, steps // 5))
    trainer = DistributedTrainer(
        model, optimizer, loss=nn.CrossEntropyLoss(), shard_size=3, clip_norm=1.0, schedule=schedule
    )
    trainer.fit(data.DataLoader(train, batch_size=12, shuffle=True), steps=steps, verbose=False)
    few = data.split(test, 0.05)[1] if args.quick else test
    loss = trainer.evaluate(data.DataLoader(few, batch_size=96)).loss
    if trainer.comm.rank:
        return
    print(
        f"{steps} steps on {trainer.comm.size} ranks: {loss / math.log(2):.3f} bits per character"
    )

    text = [train.vocabulary.index(c) for c in "HAMLET"]
    model.eval()
    with no_grad():
        for _ in range(20 if args.quick else 300):
            logits = model(np.array([text[-64:]])).numpy()[0, -1]
            text.append(int(np.argmax(logits)))
    print("".join(train.vocabulary[i] for i in text))


if __name__ == "__main__":
    main()
