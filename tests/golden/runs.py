"""Short trainings whose weights must stay the same to the last bit: models x precisions x
optimizers x layouts.

    python tests/golden/runs.py                    compares with the file of this CPU target
    python tests/golden/runs.py --record           writes it
    python tests/golden/runs.py --gpu [--record]   the same on a GPU; test_golden.py runs it on an emulated one

Weights depend on the instruction set, so there is one file per CPU target (`<target>.json`). A
change that means to change bits records the file again and says so in its commit message; no other
change may.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from odyssey import DistributedTrainer, Mesh, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.compile.library import compiler_version, plan, source_root

HERE = Path(__file__).parent


class Residual(nn.Module):
    """Ops that the models of odyssey do not use; a value that goes two ways; a stride, no bias,
    a loss of two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 5, stride=3)
        self.conv2 = nn.Conv2d(5, 5, 3, padding=1, bias=False)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(5 * 2 * 3, 7)

    def forward(self, x):
        x = F.tanh(self.conv1(x))
        x = F.avg_pool2d(x + F.sigmoid(self.conv2(x)) * x, 2)
        x = self.drop(F.relu(x - 0.1))
        return F.log_softmax(self.fc(F.flatten(x)))

    def loss(self, y, labels):
        return F.nll_loss(y, labels) + F.mean(y * y) * 0.01


class Wide(nn.Module):
    """Sizes that are no multiple of anything; a max-pool that overlaps; softmax inside; a
    repeated checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, (3, 5), stride=2, padding=(1, 2))
        self.conv2 = nn.Conv2d(9, 17, 1)
        self.fc1 = nn.Linear(17 * 8 * 9, 33)
        self.fc2 = nn.Linear(33, 7)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 3, 1)
        x = nn.checkpoint(lambda v: F.relu(self.conv2(v)), x)
        x = F.flatten(x)
        return self.fc2(F.softmax(self.fc1(x)) * 3.0 + F.sigmoid(self.fc1(x)))


def parallel_net() -> nn.Module:
    """Layers that tensor parallelism shares."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12 * 6 * 7, 48),
        nn.Sigmoid(),
        nn.Dropout(0.2),
        nn.Linear(48, 32),
        nn.ReLU(),
        nn.Linear(32, 7),
    )


class Blocks(nn.Module):
    """Batch norm, groups, a stride beside a 1 x 1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 8, 3)
        self.conv1, self.norm1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = (
            nn.Conv2d(16, 24, 3, stride=2, padding=1, groups=2, bias=False),
            nn.BatchNorm2d(24),
        )
        self.short, self.norm3 = nn.Conv2d(16, 24, 1, stride=2), nn.GroupNorm(4, 24)
        self.fc = nn.Linear(24, 7)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(self.conv0(x))))
        x = F.relu(self.norm2(self.conv2(x)) + self.norm3(self.short(x)))
        return self.fc(x.mean((2, 3)))


class Filters(nn.Module):
    """Convolutions for Winograd's algorithm, with tiles that are whole or cut at the border, after
    one with too few channels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.conv1 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 33, 3, padding=1, bias=False)
        self.conv2, self.fc = nn.Conv2d(33, 34, 3), nn.Linear(34, 7)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(F.relu(self.conv0(x)))), 2, 1)
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


class Encoder(nn.Module):
    """Attention that does not see padding, and drops probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(29, 24), nn.RMSNorm(24)
        self.attention = nn.MultiheadAttention(24, 3, dropout=0.1)
        self.fc = nn.Linear(24, 29)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), key_padding_mask=ids == 0)
        return self.fc(F.silu(x))


def gpt() -> nn.Module:
    sizes = {"vocab_size": 29, "context": 21, "layers": 2, "heads": 3, "width": 24}
    return nn.models.build("gpt", seed=3, dropout=0.2, **sizes)


def texts(n: int = 240) -> data.ArrayDataset:
    ids = np.random.default_rng(7).integers(0, 29, (n, 22)).astype(np.int32)
    return data.arrays(ids[:, :-1].copy(), ids[:, 1:].copy())


def images(n: int = 240) -> data.ArrayDataset:
    rng = np.random.default_rng(7)
    pixels = rng.normal(size=(n, 3, 19, 21)).astype(np.float32)
    return data.arrays(pixels, rng.integers(0, 7, n))


OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(lr=0.05),
    "momentum": lambda: optim.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda: optim.SGD(lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optim.Adam(lr=2e-3, weight_decay=1e-2),
    "adamw": lambda: optim.AdamW(lr=2e-3, weight_decay=0.05),
}


def build(name: str) -> nn.Module:
    if name in nn.models.MODELS and name != "gpt":
        return nn.models.build(name, seed=3)
    nn.manual_seed(3)
    own = {
        "residual": Residual,
        "wide": Wide,
        "parallel": parallel_net,
        "blocks": Blocks,
        "filters": Filters,
        "encoder": Encoder,
        "gpt": gpt,
    }
    return own[name]()


def train(
    model: str,
    precision: str = "fp32",
    optimizer: str = "momentum",
    batch: int = 80,
    steps: int = 3,
    **settings,
) -> str:
    """The hash of the weights after some steps."""
    trainer = DistributedTrainer(
        build(model),
        OPTIMIZERS[optimizer](),
        **{
            "backend": "local",
            "threads": 2,
            "device": "cpu",
            "precision": precision,
            "shard_size": 32,
            "seed": 5,
            **settings,
        },
    )
    if model in ("gpt", "encoder"):
        dataset = texts()
    else:
        dataset = (
            images() if model not in nn.models.MODELS else data.load("mnist", train=True).take(512)
        )
    loader = data.DataLoader(dataset, batch_size=batch, shuffle=True, seed=2)
    for each in itertools.islice(loader, steps):
        trainer.train_step(each)
    return trainer.weights_sha256()


def shared(ranks: int, **settings) -> str:
    """The hash of the weights of a training whose layers are shared by `ranks` ranks, in one
    process.
    """
    hashes = mock.run(ranks, lambda c: train("parallel", comm=c, mesh=Mesh(tp=ranks), **settings))
    assert len(set(hashes)) == 1, hashes
    return hashes[0]


def runs() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and training, of all."""
    for model in ("lenet5", "mlp", "convnet", "residual", "wide", "parallel"):
        for precision in ("fp32", "bf16", "fp16"):
            for optimizer in OPTIMIZERS if model in ("lenet5", "residual") else ("momentum",):
                if precision != "fp32" and optimizer in ("sgd", "nesterov"):
                    continue
                # lanes; a shard partly filled; rows, on the CPU for shards of at most 4 samples
                for layout, size, batch in (("lanes", 32, 80), ("rows", 3, 20)):
                    name = f"{model} {precision} {optimizer} {layout}"
                    yield (
                        name,
                        lambda m=model, p=precision, o=optimizer, s=size, b=batch: train(
                            m, p, o, b, shard_size=s
                        ),
                    )
    for model in ("lenet5", "residual"):
        yield f"{model} eager", lambda m=model: train(m, execution="eager", shard_size=16)
        yield f"{model} clipped", lambda m=model: train(m, clip_norm=0.1)
    for model in ("gpt", "encoder"):
        for precision in ("fp32", "bf16"):
            yield (
                f"{model} {precision} adamw",
                lambda m=model, p=precision: train(m, p, "adamw", batch=20, shard_size=7),
            )
    yield "blocks fp32 direct", lambda: train("blocks", conv_algorithm="direct")
    for algorithm in ("auto", "direct", "winograd"):
        yield f"filters fp32 {algorithm}", lambda a=algorithm: train("filters", conv_algorithm=a)
    yield "parallel shared by 2", lambda: shared(2)
    yield "parallel adam shared by 2", lambda: shared(2, optimizer="adam")
    yield "parallel shared by 4", lambda: shared(4)


def gpu_runs() -> Iterator[tuple[str, Callable[[], str]]]:
    """Those on a GPU; an emulated one takes its time."""
    for model, precision, optimizer in (
        *(("lenet5", precision, "momentum") for precision in ("fp32", "tf32", "bf16", "fp16")),
        ("lenet5", "fp32", "adam"),
        ("residual", "fp32", "nesterov"),
        ("residual", "bf16", "adamw"),
        ("wide", "fp32", "momentum"),
        ("wide", "fp16", "momentum"),
        ("parallel", "fp32", "momentum"),
    ):
        yield (
            f"{model} {precision} {optimizer}",
            lambda m=model, p=precision, o=optimizer: train(
                m, p, o, steps=2, device="gpu", num_gpus=1
            ),
        )


def path(gpu: bool = False) -> Path:
    """The file of the CPU target: of this machine, or ODYSSEY_TARGET_CPU."""
    return HERE / f"{plan(source_root()).cpu}{'-gpu' if gpu else ''}.json"


def measured(gpu: bool = False) -> dict[str, str]:
    """All hashes."""
    return {name: run() for name, run in (gpu_runs() if gpu else runs())}


def main() -> int:
    began, gpu = time.perf_counter(), "--gpu" in sys.argv
    found = measured(gpu)
    print(f"{len(found)} trainings in {time.perf_counter() - began:.1f} s")
    if "--record" in sys.argv:
        content = {
            "target": plan(source_root()).cpu,
            "compiler": compiler_version(),
            "weights_sha256": found,
        }
        path(gpu).write_text(json.dumps(content, indent=1) + "\n")
        return 0
    known = json.loads(path(gpu).read_text())["weights_sha256"]
    different = [name for name in sorted({*known, *found}) if known.get(name) != found.get(name)]
    print("\n".join(f"differs: {name}" for name in different) or "all equal")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
