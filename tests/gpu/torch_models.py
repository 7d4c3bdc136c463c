"""Training runs of three PyTorch models with odyssey.torch, and the time of a step, for
scripts/gpu-check; prints a JSON object.

    python tests/gpu/torch_models.py train DEVICE MODEL FORM [--folder DIR] [--die STEP]
    python tests/gpu/torch_models.py times DEVICE MODEL FORM

DEVICE is cuda, cpu, or pretend, which stands in for a GPU (tests/pytorch/pretend.py). MODEL is
lenet, resnet18 or transformer. FORM is fp32, bf16, fp16 or compile. `train` prints the hash of the
weights, and how many steps the loss scale of fp16 skipped. With --folder it writes checkpoints there, and resumes from them. With --die it kills
itself after that step. `times` prints the milliseconds of a step: in a plain loop, in a plain loop
with deterministic algorithms, with PyTorch's DDP on one rank, and with odyssey on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from odyssey import callbacks
from odyssey.torch import DistributedTrainer

STEPS = 6
BATCH = 32
TIMED_STEPS = {"cuda": 20, "cpu": 2}
Batch = tuple[torch.Tensor, torch.Tensor]


def make_lenet(is_small: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, 10),
    )


class Residual(nn.Module):
    """Two convolutions of ResNet-18, and what goes around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.through = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.through(x) + self.around(x))


def make_resnet18(is_small: bool) -> nn.Module:
    width = 4 if is_small else 64
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        outputs = width << stage
        layers += [Residual(inputs, outputs, 1 + (stage > 0)), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Block(nn.Module):
    """A block of a transformer, with causal attention and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.projection = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        parts = self.projection(self.before_attention(x))
        heads = parts.view(samples, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """A model of the next token, with tied weights."""

    def __init__(self, words: int, tokens: int, width: int, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.LayerNorm(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.words(x) + self.places)
        return F.linear(features, self.words.weight).transpose(1, 2)


def make_transformer(is_small: bool) -> nn.Module:
    return Transformer(64, 16, 16, 2) if is_small else Transformer(512, 256, 256, 4)


MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "lenet": make_lenet,
    "resnet18": make_resnet18,
    "transformer": make_transformer,
}


def make_batches(model: str, is_small: bool, count: int) -> list[Batch]:
    """The same batches in every process."""
    draw = torch.Generator().manual_seed(1)
    if model == "transformer":
        words, tokens = (64, 16) if is_small else (512, 256)
        ids = [torch.randint(words, (BATCH, tokens + 1), generator=draw) for _ in range(count)]
        return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in ids]
    shape = (1, 28, 28) if model == "lenet" else (3, 32, 32)
    images = [torch.randn(BATCH, *shape, generator=draw) for _ in range(count)]
    return [(x, torch.randint(10, (BATCH,), generator=draw)) for x in images]


class Run:
    """A model in a form on a device.

    Attributes:
        module: as it is called, which may be compiled.
    """

    def __init__(self, device: str, model: str, form: str) -> None:
        if device == "pretend":
            sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pytorch"))
            import pretend  # noqa: F401  (it adds the device)
        torch.set_num_threads(1)
        self.device = device
        self.model = model
        self.precision = form if form in ("bf16", "fp16") else "fp32"
        self.is_small = device != "cuda"
        torch.manual_seed(0)
        plain = MODELS[model](self.is_small).to(device)
        self.module = torch.compile(plain, dynamic=False) if form == "compile" else plain
        self.optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def make_trainer(self, shard_size: int) -> DistributedTrainer:
        # this scale overflows in the first steps
        scaling = {"scaler_init_scale": 2.0**20} if self.precision == "fp16" else {}
        return DistributedTrainer(
            self.module,
            self.optimizer,
            nn.CrossEntropyLoss(),
            metrics={},
            shard_size=shard_size,
            precision=self.precision,
            clip_norm=1.0,
            backend="auto",
            **scaling,
        )

    def step(self, batch: Batch) -> None:
        """A step of a plain loop."""
        x, y = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            loss = F.cross_entropy(self.module(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        loss.item()  # a user looks at it


class Die(callbacks.Callback):
    """Kills the process after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(given: argparse.Namespace) -> dict[str, Any] | None:
    """The hash of the weights after a few steps, on rank 0."""
    run = Run(given.device, given.model, given.form)
    trainer = run.make_trainer(shard_size=8)
    saving = {"checkpoint_dir": given.folder, "checkpoint_every": 2} if given.folder else {}
    batches = make_batches(given.model, run.is_small, STEPS)
    trainer.fit(batches, callbacks=[Die(given.die)], verbose=False, **saving)
    weights = trainer.weights_sha256()[:16]
    if trainer.comm.rank:
        return None
    skipped = trainer.scaler.skipped
    sums = type(trainer.shards._links).__name__  # NoneType if they go through the host
    return {"weights": weights, "skipped": skipped, "ranks": trainer.comm.size, "sums": sums}


def time_steps(step: Callable[[Batch], Any], batches: list[Batch], device: str) -> float:
    """The milliseconds of a step, after some that start everything."""
    for batch in batches[:3]:
        step(batch)
    count = TIMED_STEPS.get(device, 1)
    started = time.perf_counter()
    for number in range(count):
        step(batches[number % len(batches)])  # each reads its loss, so it has ended
    return round((time.perf_counter() - started) / count * 1000, 3)


def times(given: argparse.Namespace) -> dict[str, Any]:
    """The milliseconds of a step by kind of loop."""
    device, model, form = given.device, given.model, given.form
    batches = make_batches(model, device != "cuda", STEPS)
    found: dict[str, Any] = {"plain": time_steps(Run(device, model, form).step, batches, device)}
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    found["plain, deterministic"] = time_steps(Run(device, model, form).step, batches, device)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    found["DDP, 1 rank"] = time_ddp(given, batches)
    for name, shard_size in (("odyssey, 1 shard", BATCH), ("odyssey, 8 shards", BATCH // 8)):
        trainer = Run(device, model, form).make_trainer(shard_size)
        found[name] = time_steps(trainer.train_step, batches, device)
    return found


def time_ddp(given: argparse.Namespace, batches: list[Batch]) -> float | str:
    """The milliseconds of a step of PyTorch's DDP on one rank, or why there are none."""
    backend = {"cuda": "nccl", "cpu": "gloo"}.get(given.device)
    if backend is None:
        return f"DDP has no backend for {given.device}"
    distributed = torch.distributed
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    run = Run(given.device, given.model, given.form)
    run.module = nn.parallel.DistributedDataParallel(run.module)
    found = time_steps(run.step, batches, given.device)
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["train", "times"])
    parser.add_argument("device", choices=["cuda", "cpu", "pretend"])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("form", choices=["fp32", "bf16", "fp16", "compile"])
    parser.add_argument("--folder", help="of checkpoints")
    parser.add_argument("--die", type=int, help="the step after which the process kills itself")
    arguments = parser.parse_args()
    if arguments.command == "times" and arguments.form == "fp16":
        parser.error("times has no plain loop in fp16; use fp32, bf16 or compile")
    result = train(arguments) if arguments.command == "train" else times(arguments)
    if result is not None:
        print(json.dumps(result), flush=True)
