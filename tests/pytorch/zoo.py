"""A training of a model that people use, as a user writes it; prints the SHA-256 of its weights
on rank 0.

    zoo.py --model cnn|gpt|resnet18|vit [--steps 6] [--bf16] [--until 3] [--every 2] [--bug] [--die
    3]

resnet18 is torchvision's, vit timm's, with random weights; torchvision needs run_example.py before
it. --bug: rank 1 changes one bit of a weight after step 2. --die: rank 1 is killed before this step
of a run's first attempt.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np
import torch
from torch import nn

from odyssey import data
from odyssey.torch import DistributedTrainer

MODELS = ("cnn", "gpt", "resnet18", "vit")


class CNN(nn.Sequential):
    def __init__(self) -> None:
        convs = [
            nn.Conv2d(1, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
        ]
        super().__init__(
            *convs,
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.4),
            nn.Linear(120, 16),
            nn.ReLU(),
            nn.Linear(16, 4),
        )


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(
            nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (
            s.view(b, t, 2, d // 2).transpose(1, 2) for s in self.qkv(self.norm1(x)).split(d, 2)
        )
        p = 0.1 if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 16), nn.Parameter(torch.randn(5, 16) * 0.02)
        self.blocks, self.norm = nn.Sequential(*(Block(16) for _ in range(4))), nn.LayerNorm(16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.place))).transpose(1, 2)


def made(name: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """A model, the shape of a sample, and its classes."""
    if name == "resnet18":
        import torchvision

        return torchvision.models.resnet18(num_classes=5), (3, 32, 32), 5
    if name == "vit":
        import timm

        sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
        model = timm.create_model(
            "vit_tiny_patch16_224",
            num_classes=5,
            drop_rate=0.1,
            attn_drop_rate=0.1,
            drop_path_rate=0.2,
            **sizes,
        )
        return model, (3, 16, 16), 5
    return (GPT(), (5,), 11) if name == "gpt" else (CNN(), (1, 9, 7), 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cnn", choices=MODELS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--until", type=int, help="stop after this step")
    parser.add_argument("--every", type=int, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", help="of checkpoints")
    parser.add_argument(
        "--check", type=int, default=0, help="steps from one comparison of ranks to the next"
    )
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--die", type=int)
    given = parser.parse_args()

    torch.manual_seed(0)
    module, shape, classes = made(given.model)
    g = np.random.default_rng(0)
    if given.model == "gpt":
        ids = g.integers(0, classes, (60, shape[0] + 1))
        x, y = ids[:, :-1], ids[:, 1:]
    else:
        x, y = g.standard_normal((60, *shape), np.float32), g.integers(0, classes, 60)
    samples = data.arrays(x, y, classes=0 if given.model == "gpt" else classes)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    precision = "bf16" if given.bf16 else "fp32"
    settings = {
        "shard_size": 4,
        "precision": precision,
        "clip_norm": 1.0,
        "check_every": given.check,
    }
    trainer = DistributedTrainer(module, optimizer, scheduler=scheduler, **settings)

    def stepped(*_: object) -> None:
        if given.bug and trainer.comm.rank == 1 and trainer.steps == 1:
            trainer.arena.params.numpy().view(np.uint32)[3] ^= 1 << 20
        if (
            trainer.steps + 2 == given.die
            and trainer.comm.rank == 1
            and os.environ.get("ODYSSEY_ATTEMPT") == "1"
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_post_hook(stepped)
    loader = data.DataLoader(samples, batch_size=22, shuffle=True)
    saving = {"checkpoint_dir": given.folder} if given.folder else {}
    saving["checkpoint_every"] = given.every
    trainer.fit(loader, samples.take(20), epochs=10**6, steps=given.until or given.steps, **saving)
    if trainer.comm.rank == 0:
        print("sha256", trainer.weights_sha256(), flush=True)


if __name__ == "__main__":
    main()
