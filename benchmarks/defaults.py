"""The same two models by six ways to train on several processes, each at its defaults: one table.

    python benchmarks/defaults.py [--forms ddp fsdp2 ...] [--json FILE]

A classifier of tokens (two transformer blocks of width 64, 32 tokens, global batch 32, Adam) and
LeNet-5 (global batch 128), two processes of one thread on this machine, cross-entropy, whole loops
with their loaders. Printed are, by form:

    step       median over the steps of the second epoch, ms, of rank 0
    MiB        the largest resident memory of rank 0, of the whole process
    1 = 2      whether the weights after two epochs are the same bytes with one process and with two
    a kill     SIGKILL of rank 1 in the second epoch of the transformer, under the form's own
               launcher

Horovod itself has had no release since 2023: its API is measured over odyssey's communicator. What
is not installed is left out, and named. A few minutes at most; times of a busy machine say little.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

WIDTH, TOKENS, SAMPLES, EPOCHS = 64, 32, 1024, 2
BATCH = {"transformer": 32, "lenet": 128}
FORMS = {  # name: (what it is, packages beside odyssey, launcher)
    "ddp": ("PyTorch DDP, Gloo", "torch", "torchrun"),
    "fsdp2": ("PyTorch FSDP2 (fully_shard), Gloo", "torch", "torchrun"),
    "lightning": ("Lightning, strategy ddp, Gloo", "lightning", "torchrun"),
    "odyssey-ddp": ("PyTorch DDP, backend odyssey", "torch", "odyssey"),
    "horovod": ("Horovod's API (odyssey.torch.horovod)", "torch", "odyssey"),
    "odyssey-torch": ("odyssey.torch.DistributedTrainer", "torch", "odyssey"),
    "odyssey": ("odyssey, its own layers and kernels", "", "odyssey"),
}


def build(nn: Any, F: Any, name: str) -> Any:
    """One of the two models, of torch's layers or of odyssey's: the lines are the same."""
    if name == "lenet":
        return nn.Sequential(
            *(
                nn.Conv2d(1, 6, 5, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(6, 16, 5),
                nn.ReLU(),
            ),
            *(
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(400, 120),
                nn.ReLU(),
                nn.Linear(120, 84),
                nn.ReLU(),
            ),
            nn.Linear(84, 10),
        )

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            y = self.n1(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return x + self.down(F.gelu(self.up(self.n2(x))))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 10)
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, ids: Any) -> Any:
            return self.head(self.blocks(self.tokens(ids)).mean(1))

    return Classifier()


def samples(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(SAMPLES) % 10
    if name == "lenet":
        return rng.normal(size=(SAMPLES, 1, 28, 28)).astype(np.float32), y
    return rng.integers(0, 100, (SAMPLES, TOKENS)).astype(np.int64), y


# --- in a rank: each form trains a model, tells `mark` of every step, gives its rank and the
#     weights

Mark = Callable[[int], None]
Trained = tuple[int, list[np.ndarray]]


def of_torch(name: str, ranks: int = 1) -> tuple[Any, Any, Any, Any]:
    """(module, optimizer, data set, the loader of a rank), as PyTorch's tutorial makes them."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build(torch.nn, torch.nn.functional, name)
    x, y = samples(name)
    table = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    sampler = None
    if ranks > 1:
        sampler = torch.utils.data.DistributedSampler(
            table, ranks, int(os.environ["RANK"]), shuffle=False
        )
    loader = torch.utils.data.DataLoader(table, BATCH[name] // ranks, sampler=sampler)
    return module, torch.optim.Adam(module.parameters(), 1e-3), table, loader


def own_loop(
    name: str, mark: Mark, wrap: Callable[[Any, Any], tuple[Any, Any]], ranks: int, rank: int
) -> Trained:
    import torch

    module, optimizer, _, loader = of_torch(name, ranks)
    net, optimizer = wrap(module, optimizer)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            mark(rank)
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return rank, [p.detach().numpy() for p in values]


def group(backend: str) -> tuple[int, int]:
    import torch.distributed as dist

    import odyssey.torch  # noqa: F401

    if not dist.is_initialized():
        dist.init_process_group(backend)
    return dist.get_world_size(), dist.get_rank()


def ddp(name: str, mark: Mark, backend: str = "gloo") -> Trained:
    from torch.nn.parallel import DistributedDataParallel

    ranks, rank = group(backend)
    return own_loop(name, mark, lambda module, o: (DistributedDataParallel(module), o), ranks, rank)


def fsdp2(name: str, mark: Mark) -> Trained:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks, rank = group("gloo")

    def wrap(module: Any, _: Any) -> tuple[Any, Any]:
        mesh = init_device_mesh("cpu", (ranks,))
        for block in getattr(module, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module, torch.optim.Adam(module.parameters(), 1e-3)

    return own_loop(name, mark, wrap, ranks, rank)


def horovod(name: str, mark: Mark) -> Trained:
    import odyssey.torch.horovod as hvd

    hvd.init()
    os.environ.setdefault("RANK", str(hvd.rank()))

    def wrap(module: Any, optimizer: Any) -> tuple[Any, Any]:
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        return module, hvd.DistributedOptimizer(
            optimizer, named_parameters=module.named_parameters()
        )

    return own_loop(name, mark, wrap, hvd.size(), hvd.rank())


def lightning(name: str, mark: Mark) -> Trained:
    import logging
    import warnings

    import torch

    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    importlib.import_module("pytorch.vision")  # also a torchvision that is built for another torch
    import lightning as L

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ranks = int(os.environ["WORLD_SIZE"])
    module, optimizer, _, loader = of_torch(name, ranks)

    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def training_step(self, batch: Any, _: int) -> Any:
            return torch.nn.functional.cross_entropy(self.module(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            mark(self.global_rank)

    task, off = (
        Task(),
        {"enable_progress_bar": False, "enable_model_summary": False, "logger": False},
    )
    off |= {"enable_checkpointing": False, "use_distributed_sampler": False}
    trainer = L.Trainer(accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=EPOCHS, **off)
    trainer.fit(task, loader)
    return trainer.global_rank, [p.detach().numpy() for p in module.parameters()]


def by_trainer(name: str, mark: Mark, own: bool) -> Trained:
    from odyssey.callbacks import LambdaCallback

    steps = LambdaCallback(on_step_end=lambda context: mark(context.trainer.comm.rank))
    if own:
        from odyssey import DistributedTrainer, data, nn, optim
        from odyssey import functional as F

        nn.manual_seed(0)
        model, settings = build(nn, F, name), {"loss": nn.CrossEntropyLoss(), "threads": 1}
        trainer: Any = DistributedTrainer(model, optim.Adam(lr=1e-3), **settings)
        loader: Any = data.DataLoader(
            data.arrays(*samples(name), classes=10), batch_size=BATCH[name]
        )
    else:
        import torch

        from odyssey.torch import DistributedTrainer as Torch

        module, optimizer, _, loader = of_torch(name)
        trainer = Torch(module, optimizer, torch.nn.CrossEntropyLoss())
    trainer.fit(loader, epochs=EPOCHS, callbacks=[steps], verbose=False)
    return trainer.comm.rank, [np.asarray(v) for v in trainer.state_dict().values()]


TRAIN: dict[str, Callable[[str, Mark], Trained]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "lightning": lightning,
    "odyssey-ddp": lambda name, mark: ddp(name, mark, "odyssey"),
    "horovod": horovod,
    "odyssey-torch": lambda name, mark: by_trainer(name, mark, own=False),
    "odyssey": lambda name, mark: by_trainer(name, mark, own=True),
}


def rank_of_a_form(form: str, names: list[str], output: Path, fatal: Path | None) -> None:
    """Trains, and rank 0 writes what was seen. fatal: a file that is made when rank 1 kills
    itself, once.
    """
    seen: dict[str, Any] = {}
    rank = 0
    for name in names:
        times: list[float] = []
        per_epoch = SAMPLES // BATCH[name]

        def mark(rank: int, times: list[float] = times, at: int = per_epoch + 8) -> None:
            times.append(time.perf_counter())
            if fatal is not None and rank == 1 and len(times) == at and not fatal.exists():
                fatal.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        rank, weights = TRAIN[form](name, mark)
        digest = hashlib.sha256(
            b"".join(np.ascontiguousarray(w).tobytes() for w in weights)
        ).hexdigest()
        own = times[-per_epoch:]
        steps = [b - a for a, b in zip(own, own[1:], strict=False)]
        seen[name] = {"ms": 1e3 * statistics.median(steps), "weights": digest[:16]}
    seen["MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if rank == 0:
        output.write_text(json.dumps(seen))
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()  # a rank that ends before the others would end them
            dist.destroy_process_group()


# --- the processes of all forms ---


def start(
    form: str, ranks: int, work: Path, names: list[str], fatal: Path | None = None
) -> tuple[int, float, str, Path]:
    """(exit code, seconds, stderr, output) of a form's training under its own launcher."""
    output = work / f"{form}-{ranks}{'-killed' * (fatal is not None)}.json"
    script = [__file__, "--form", form, "--output", str(output), "--models", *names]
    script += [] if fatal is None else ["--fatal", str(fatal)]
    if FORMS[form][2] == "torchrun":
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            *script,
        ]
    elif fatal is None and ranks == 1:
        words = script
    else:
        words = [
            "-m",
            "odyssey",
            "launch",
            "-n",
            str(ranks),
            "--run-dir",
            str(work / output.stem),
            *script,
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=150,
            cwd=work,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return 124, 150.0, "", output
    return done.returncode, time.monotonic() - began, done.stderr, output


def of_a_form(form: str, work: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"form": FORMS[form][0]}
    seen = {}
    for ranks in (1, 2):
        code, _, stderr, output = start(form, ranks, work, list(BATCH))
        if code:
            return {**row, "failed": stderr.strip()[-300:]}
        seen[ranks] = json.loads(output.read_text())
    for name in BATCH:
        row[name] = {**seen[2][name], "same": seen[1][name]["weights"] == seen[2][name]["weights"]}
    row["MiB"] = seen[2]["MiB"]
    fatal = work / f"{form}.killed"
    code, _, stderr, output = start(form, 2, work, ["transformer"], fatal)
    ended = time.time() - float(fatal.read_text())
    whole = (
        output.exists()
        and json.loads(output.read_text())["transformer"]["weights"]
        == row["transformer"]["weights"]
    )
    named = "rank 1" in stderr or "local_rank: 1" in stderr
    row["killed"] = {"code": code, "seconds": ended, "named": named, "whole": whole}
    return row


def main() -> None:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=list(FORMS), help="some of them"
    )
    for name, kind in (("--form", str), ("--output", Path), ("--fatal", Path)):
        parser.add_argument(name, type=kind, help=common.INTERNAL)
    parser.add_argument("--models", nargs="+", help=common.INTERNAL)
    given = parser.parse_args()
    if given.form:
        return rank_of_a_form(given.form, given.models, given.output, given.fatal)
    common.print_machine()
    rows = []
    print(
        f"{'2 processes of 1 thread':<40} transformer: ms  1 = 2   LeNet-5: ms  1 = 2   MiB   a "
        "kill of rank 1"
    )
    for form in given.forms:
        if FORMS[form][1] and importlib.util.find_spec(FORMS[form][1]) is None:
            print(f"{FORMS[form][0]:<40} {FORMS[form][1]} is not installed")
            continue
        work = Path(tempfile.mkdtemp(prefix="odyssey-defaults-"))
        try:
            row = of_a_form(form, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        rows.append(row)
        if "failed" in row:
            print(f"{row['form']:<40} failed: {row['failed']}", flush=True)
            continue
        cells = [
            f"{row[name]['ms']:>{wide}.2f}  {'yes' if row[name]['same'] else 'no':<5}"
            for name, wide in (("transformer", 15), ("lenet", 13))
        ]
        k = row["killed"]
        end = (
            "went on, the weights of an undisturbed run"
            if k["whole"]
            else "went on"
            if not k["code"]
            else "ended"
        )
        said = (
            f"{end}; {k['seconds']:.1f} s, code {k['code']}, "
            f"{'rank 1 named' if k['named'] else 'nobody named'}"
        )
        print(f"{row['form']:<40}{cells[0]} {cells[1]} {row['MiB']:>5.0f}   {said}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
