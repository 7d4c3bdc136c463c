"""A GPT written out, trained on the characters of Shakespeare that come with odyssey: the weights of examples/gpt.py.

    mojo run -I . examples/mojo/gpt.mojo --steps 200
    mpirun -n 2 ./gpt

Sequences have 64 tokens, 128 features each; a layer that does not fit does not compile.
"""

from std.math import log
from std.python import PythonObject

from shared.training import *

comptime VOCABULARY = 76
comptime LENGTH = 64


struct Block[width: Int, heads: Int](Defaultable, Module):
    """Attention, then a feed-forward network, each added to what comes in."""

    comptime Input = Tokens[LENGTH, Self.width]
    comptime Output = Tokens[LENGTH, Self.width]
    var norm1: LayerNorm[Self.width]
    var attention: MultiheadAttention[Self.width, Self.heads, is_causal=True]
    var norm2: LayerNorm[Self.width]
    var feed_forward: Sequential[
        Linear[Self.width, 4 * Self.width],
        GELU,
        Linear[4 * Self.width, Self.width],
        In=Tokens[LENGTH, Self.width],
        Out=Tokens[LENGTH, Self.width],
    ]

    def __init__(out self):
        self.norm1 = {}
        self.attention = {}
        self.norm2 = {}
        self.feed_forward = {
            Linear[Self.width, 4 * Self.width](),
            GELU(),
            Linear[4 * Self.width, Self.width](),
        }

    def forward(self, x: Self.Input) raises -> Self.Output:
        var y = x + self.attention.forward(self.norm1.forward(x))
        return y + self.feed_forward.forward(self.norm2.forward(y))


struct GPT[width: Int, heads: Int, layers: Int](Module):
    """Ids to the logits of what follows each."""

    comptime Input = Ids[LENGTH]
    comptime Output = Tokens[LENGTH, VOCABULARY]
    var tokens: Embedding[VOCABULARY, Self.width]
    var places: Embedding[LENGTH, Self.width]
    var blocks: Repeated[Block[Self.width, Self.heads], Self.layers]
    var norm: LayerNorm[Self.width]
    var head: Linear[Self.width, VOCABULARY, bias=False]

    def __init__(out self):
        self.tokens = {}
        self.places = {}
        self.blocks = {}
        self.norm = {}
        self.head = {}

    def begin(self, module: PythonObject) raises:
        _ = module.tokens.weight.data.__imul__(0.02)
        _ = module.places.weight.data.__imul__(0.02)
        module.head.weight = module.tokens.weight  # one parameter in two places

    def forward(self, x: Self.Input) raises -> Self.Output:
        var y = self.tokens.forward(x) + self.places.first[LENGTH]()
        return self.head.forward(self.norm.forward(self.blocks.forward(y)))


def gpt() raises:
    _ = connect()  # first: whatever is wrong on one rank ends the others
    check_options("steps", flags="no-eval")
    var steps = number("steps", 2000, at_least=1)
    var trainer = DistributedTrainer(
        GPT[width=128, heads=4, layers=4](),
        AdamW(lr=1e-3, beta2=0.99, weight_decay=0.1, decay_vectors=False),
        schedule=schedule("cosine", steps, min(100, steps // 5)),
        clip_norm=1.0,
        shard_size=3,
    )
    var loader = DataLoader(shakespeare(train=True), 12, shuffle=True)
    _ = trainer.train(loader, epochs=steps, steps=steps)
    var test = DataLoader(shakespeare(train=False), 96)
    if not flag("no-eval"):
        var bits = trainer.evaluate(test).loss / log(Float64(2))
        if trainer.comm.rank() == 0:
            print(steps, "steps:", bits, "bits per character")
    if trainer.comm.rank() == 0:
        print("weights", trainer.weights_sha256())


def main():
    try:
        gpt()
    except e:
        stop(e)
