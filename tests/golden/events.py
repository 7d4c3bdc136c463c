"""Records what happens in short trainings, in order: events of callbacks, lines to the user,
collective calls, checkpoints that are written or loaded, and the error that ends it.

    python tests/golden/events.py            compares with events.json and shows differences
    python tests/golden/events.py --record   writes events.json

Ranks are threads of this process. A change that only moves code leaves every line as it is; a
change that means to move an event records the file again and says so in its commit message.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from odyssey import DistributedTrainer, Mesh, callbacks, data, nn, optim
from odyssey.checkpoints.store import Store
from odyssey.comm import mock
from odyssey.comm.base import Communicator
from odyssey.errors import OdysseyError

HERE = Path(__file__).parent
RECORD = HERE / "events.json"
EVENTS = [name for name in vars(callbacks.Callback) if name.startswith("on_")]
TIMED = ("on_sync",)  # these go by the clock
BROKEN = 2  # a sample of the second step whose loss overflows
OVERLAPPING = ("all_to_all_v", "all_gather_v")


def note(line: str) -> None:
    """Adds a line to the trace of this rank, if there is one.

    The trace belongs to the thread, because the capture of state would keep or name a global of
    this file.
    """
    lines = getattr(threading.current_thread(), "trace", None)
    if lines is not None:
        lines.append(line)


def make_listener() -> callbacks.Callback:
    """Returns a callback that notes each event, with the place of the training at it."""

    def method(event: str) -> Callable[[Any, callbacks.Context], None]:
        def hear(self: Any, context: callbacks.Context) -> None:
            cursor = context.cursor
            kind = "finite" if np.isfinite(context.loss) else "not finite"
            note(
                f"{event} step {context.steps} epoch {cursor.epoch}.{cursor.step} "
                f"loader {cursor.loader_epoch} samples {cursor.samples} loss {kind} "
                f"tally {context.tally.samples}/{context.tally.steps} "
                f"history {context.history.steps} record of {len(context.record)}"
            )

        return hear

    return type(
        "Listener",
        (callbacks.Callback,),
        {event: method(event) for event in EVENTS if event not in TIMED},
    )()


class Lines:
    """A progress object that notes what it is told."""

    def begin(self, *arguments: Any) -> None:
        note("progress begins")

    def step(self, *arguments: Any) -> None:
        """Notes nothing, because progress of steps is shown by the clock."""

    def epoch(self, *arguments: Any) -> None:
        note("progress of an epoch")

    def end(self, *arguments: Any) -> None:
        note("progress ends")

    def say(self, line: str) -> None:
        note(f"says {line}")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Notes collective calls of communicators and what checkpoint stores read and write."""
    start = Communicator._start
    stored = {name: getattr(Store, name) for name in ("save", "save_later", "newest", "mark")}

    def noted_start(self: Communicator, call: Any, name: str = "") -> Any:
        note(f"{call.kind} of {self.size}")
        return start(self, call, name)

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Store, *arguments: Any, **keywords: Any) -> Any:
            note(f"store {name}")
            return method(self, *arguments, **keywords)

        return call

    try:
        Communicator._start = noted_start
        for name, method in stored.items():
            setattr(Store, name, noted(name, method))
        yield
    finally:
        Communicator._start = start
        for name, method in stored.items():
            setattr(Store, name, method)


def plain(text: str, folder: Path) -> str:
    """Returns a line without this machine's paths and times."""
    text = text.replace(str(folder), "FOLDER")
    text = re.sub(r"\nstage .*", "", text)  # by measured cost
    return re.sub(r"\d+(\.\d+)? (s|ms|MB|GB|MiB|GiB)\b", r"N \2", text)


def traced(ranks: int, program: Callable[[Communicator, Path], Any]) -> list[list[str]]:
    """Runs a program on ranks that are threads; returns each rank's lines, repeats joined."""
    traces: dict[int, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def work(comm: Communicator) -> None:
            lines: list[str] = []
            traces[comm.rank] = lines
            threading.current_thread().trace = lines
            try:
                program(comm, folder)
            except OdysseyError as error:
                note(f"raises {type(error).__name__}: {error}")
            finally:
                threading.current_thread().trace = None

        with watched():
            mock.run(ranks, work)
        return [[plain(line, folder) for line in joined(traces[r])] for r in sorted(traces)]


def in_order(lines: list[str]) -> list[str]:
    """Returns the lines with calls that overlap work, which are started by when memory is free,
    sorted where they follow each other.
    """
    groups = itertools.groupby(lines, key=lambda line: line.startswith(OVERLAPPING))
    return [line for overlaps, group in groups for line in (sorted(group) if overlaps else group)]


def joined(lines: list[str]) -> list[str]:
    """Returns the lines with each run of equal ones as one line and its number."""
    runs: list[tuple[str, int]] = []
    for line in in_order(lines):
        if runs and runs[-1][0] == line:
            runs[-1] = line, runs[-1][1] + 1
        else:
            runs.append((line, 1))
    return [line if count == 1 else f"{line} x {count}" for line, count in runs]


# --- trainings of odyssey's own modules ---


def samples(count: int = 60, classes: int = 3) -> data.ArrayDataset:
    """Returns random samples, the same ones each time."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((count, 6)).astype(np.float32)
    return data.arrays(x, generator.integers(0, classes, count))


def loader(batch_size: int = 20, **options: Any) -> data.DataLoader:
    return data.DataLoader(samples(), batch_size=batch_size, shuffle=True, **options)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def trainer(comm: Communicator, model: nn.Module | None = None, **settings: Any) -> Any:
    model = model or net()
    optimizer = settings.pop("optimizer", None) or optim.Adam(lr=0.01)
    settings.setdefault("progress", Lines())
    return DistributedTrainer(model, optimizer, comm=comm, **{"shard_size": 4, **settings})


def fit(a_trainer: Any, *arguments: Any, **options: Any) -> Any:
    """Trains with a callback that notes events; notes the number of steps."""
    history = a_trainer.fit(*arguments, callbacks=[make_listener()], **options)
    note(f"{a_trainer.steps} steps")
    return history


def plain_fit(comm: Communicator, folder: Path, **settings: Any) -> None:
    a_trainer = trainer(comm, **settings)
    fit(a_trainer, loader(), samples(24), epochs=2)
    note(f"evaluates to {a_trainer.evaluate(samples(24)).samples}")
    a_trainer.predict(samples(24))
    note(f"gradient norm {a_trainer.gradient_norm() is not None}, {a_trainer.in_parts}")
    note(f"state {sorted(a_trainer.named_state())}")


def resumed(comm: Communicator, folder: Path, **settings: Any) -> None:
    """A training with checkpoints within epochs that is stopped, and goes on."""
    options = {"checkpoint_dir": folder / "run", "checkpoint_every": 2}
    fit(trainer(comm, **settings), loader(), epochs=2, steps=4, **options)
    second = trainer(comm, **settings)
    fit(second, loader(), epochs=3, **options)
    third = trainer(comm, **settings)
    third.load_checkpoint(folder / "run")
    third.save_checkpoint(folder / "other")
    fourth = trainer(comm, **settings)
    note(f"step {fourth.load_checkpoint(folder / 'other')}")
    fourth.take_step(next(iter(loader().steps())))
    again = {"checkpoint_dir": folder / "run", "resume": "weights"}
    fit(trainer(comm, **settings), loader(), epochs=1, **again)


def not_finite(policy: str) -> Callable[[Communicator, Path], None]:
    """One sample makes the loss overflow."""

    def program(comm: Communicator, folder: Path) -> None:
        x = samples().images.copy()
        x[BROKEN] = 3e38
        broken = data.arrays(x, samples().labels)
        a_trainer = trainer(comm, nonfinite=policy)
        batches = data.DataLoader(broken, batch_size=20, shuffle=True)
        fit(a_trainer, batches, epochs=2, checkpoint_dir=folder / "run", checkpoint_every=1)

    return program


class Changes(callbacks.Callback):
    """Changes settings in the middle: on one rank alone, if it is told which."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps == 2 and self.rank in (None, context.trainer.comm.rank):
            context.trainer.clip_norm = 0.01
            context.trainer.optimizer.lr = 0.02


def changed(rank: int | None) -> Callable[[Communicator, Path], None]:
    def program(comm: Communicator, folder: Path) -> None:
        a_trainer = trainer(comm)
        listeners = [make_listener(), Changes(rank)]
        a_trainer.fit(loader(), epochs=2, callbacks=listeners, checkpoint_dir=folder / "run")
        note(f"{a_trainer.steps} steps")

    return program


def finished(comm: Communicator, folder: Path) -> None:
    """A callback ends the training, another one its run; a third fit() goes on."""

    class Ends(callbacks.Callback):
        def on_step_end(self, context: callbacks.Context) -> None:
            if context.steps == 4:
                context.finish("a test")

    a_trainer = trainer(comm)
    options = {"checkpoint_dir": folder / "run", "checkpoint_every": 3}
    a_trainer.fit(loader(), epochs=3, callbacks=[make_listener(), Ends()], **options)
    fit(a_trainer, loader(), epochs=1)
    for _ in range(2):
        batch = next(iter(loader().steps()))
        a_trainer.train_step(batch)
        note(f"step {a_trainer.steps}")


def with_settings(**settings: Any) -> Callable[[Communicator, Path], None]:
    return lambda comm, folder: plain_fit(comm, folder, **settings)


def resumed_with(**settings: Any) -> Callable[[Communicator, Path], None]:
    return lambda comm, folder: resumed(comm, folder, **settings)


def on_mesh(**sizes: int) -> Callable[[Communicator, Path], None]:
    return lambda comm, folder: resumed(comm, folder, mesh=Mesh(**sizes), shard_size=10)


def mean_of_batch(comm: Communicator, folder: Path) -> None:
    """A loss that is no mean over samples."""

    def loss(output: Any, target: Any) -> Any:
        value = nn.CrossEntropyLoss()(output, target)
        return value * value

    plain_fit(comm, folder, loss=loss)


NATIVE: dict[str, tuple[int, Callable[[Communicator, Path], None]]] = {
    "plain": (1, plain_fit),
    "plain on 2 ranks": (2, plain_fit),
    "plain on 3 ranks, eager": (3, with_settings(execution="eager")),
    "schedule, clipping, accumulation": (
        2,
        with_settings(
            schedule=optim.cosine(6),
            clip_norm=0.1,
            accumulation_steps=2,
            lr_scaling="linear",
            base_batch_size=10,
        ),
    ),
    "fp16": (2, with_settings(precision="fp16", scaler_init_scale=2.0**40)),
    "many workers": (2, with_settings(num_gpus=4, device="cpu")),
    "compression": (2, with_settings(compression="topk", compression_ratio=0.1)),
    "local_sgd": (2, with_settings(reduction="local_sgd", local_steps=2)),
    "rebalance": (2, with_settings(rebalance=True)),
    "loss that is no mean": (2, mean_of_batch),
    "resumed": (1, resumed),
    "resumed on 2 ranks": (2, resumed),
    "resumed with zero 1": (2, resumed_with(zero=1)),
    "resumed with zero 3": (2, resumed_with(zero=3, overlap=False)),
    "resumed with fp16": (2, resumed_with(precision="fp16")),
    "resumed on tp 2": (2, on_mesh(tp=2)),
    "resumed on pp 2": (2, on_mesh(pp=2)),
    "not finite, skip": (2, not_finite("skip")),
    "not finite, rollback": (2, not_finite("rollback")),
    "not finite, stop": (2, not_finite("stop")),
    "changed on all ranks": (2, changed(None)),
    "changed on one rank": (2, changed(1)),
    "finished": (2, finished),
}


# --- trainings of PyTorch modules ---


def torch_trainings() -> dict[str, tuple[int, Callable[[Communicator, Path], None]]]:
    """The same of PyTorch modules; empty where PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    import odyssey.torch as odyssey_torch

    drawing = threading.Lock()

    def module_trainer(comm: Communicator, scheduled: str = "", **settings: Any) -> Any:
        # threads share torch's generator, so that only a single rank can draw from it
        dropout = 0.2 if comm.size == 1 else 0.0
        with drawing:
            torch.manual_seed(0)
            module = torch.nn.Sequential(
                torch.nn.Linear(6, 8),
                torch.nn.BatchNorm1d(8),
                torch.nn.Dropout(dropout),
                torch.nn.Linear(8, 3),
            )
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        if scheduled:
            settings["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            settings["scheduler_interval"] = scheduled
        settings.setdefault("progress", Lines())
        return odyssey_torch.DistributedTrainer(
            module, optimizer, comm=comm, shard_size=4, **settings
        )

    def fitted(**settings: Any) -> Callable[[Communicator, Path], None]:
        def program(comm: Communicator, folder: Path) -> None:
            a_trainer = module_trainer(comm, **settings)
            fit(a_trainer, loader(), samples(24), epochs=2)
            note(f"evaluates to {a_trainer.evaluate(samples(24)).samples}")
            a_trainer.predict(samples(24))
            note(f"gradient norm {a_trainer.gradient_norm() is not None}")
            note(f"gradients {sorted(a_trainer.last_gradients())}")
            note(f"state {sorted(a_trainer.named_state())}")

        return program

    def goes_on(**settings: Any) -> Callable[[Communicator, Path], None]:
        def program(comm: Communicator, folder: Path) -> None:
            options = {"checkpoint_dir": folder / "run", "checkpoint_every": 2}
            fit(module_trainer(comm, **settings), loader(), epochs=2, steps=4, **options)
            fit(module_trainer(comm, **settings), loader(), epochs=3, **options)
            third = module_trainer(comm, **settings)
            third.load_checkpoint(folder / "run")
            third.save_checkpoint(folder / "other")
            fourth = module_trainer(comm, **settings)
            note(f"step {fourth.load_checkpoint(folder / 'other')}")
            fourth.take_step(next(iter(loader().steps())))

        return program

    def broken(policy: str) -> Callable[[Communicator, Path], None]:
        def program(comm: Communicator, folder: Path) -> None:
            x = samples().images.copy()
            x[BROKEN] = 3e38
            batches = data.DataLoader(data.arrays(x, samples().labels), batch_size=20, shuffle=True)
            options = {"checkpoint_dir": folder / "run", "checkpoint_every": 1}
            fit(module_trainer(comm, nonfinite=policy), batches, epochs=2, **options)

        return program

    def own_loader(comm: Communicator, folder: Path) -> None:
        x = torch.from_numpy(samples().images.copy()).float()
        y = torch.from_numpy(samples().labels.astype(np.int64))
        pairs = torch.utils.data.TensorDataset(x, y)
        fit(
            module_trainer(comm),
            torch.utils.data.DataLoader(pairs, batch_size=20),
            epochs=2,
            checkpoint_dir=folder / "run",
        )
        own = odyssey_torch.DataLoader(pairs, batch_size=20, shuffle=True, comm=comm)
        fit(module_trainer(comm), own, epochs=2)

    class Unfreezes(callbacks.Callback):
        def on_epoch_start(self, context: callbacks.Context) -> None:
            first = context.trainer.module[0]
            first.requires_grad_(context.epoch > 1)

    def unfrozen(comm: Communicator, folder: Path) -> None:
        a_trainer = module_trainer(comm)
        a_trainer.module[0].requires_grad_(False)
        listeners = [make_listener(), Unfreezes()]
        a_trainer.fit(loader(), epochs=2, callbacks=listeners, checkpoint_dir=folder / "run")
        note(f"{a_trainer.steps} steps")

    def changed_rate(comm: Communicator, folder: Path) -> None:
        class Rates(callbacks.Callback):
            def on_step_end(self, context: callbacks.Context) -> None:
                if context.steps == 2 and comm.rank == 1:
                    context.trainer.optimizer.param_groups[0]["lr"] = 0.5

        a_trainer = module_trainer(comm)
        a_trainer.fit(loader(), epochs=2, callbacks=[make_listener(), Rates()])

    return {
        "torch": (1, fitted()),
        "torch on 2 ranks": (2, fitted()),
        "torch, clipping, accumulation": (2, fitted(clip_norm=0.1, accumulation_steps=2)),
        "torch, bf16, scheduler of epochs": (2, fitted(precision="bf16", scheduled="epoch")),
        "torch, gather": (2, fitted(gather=True)),
        "torch, zero 1": (2, fitted(zero=1)),
        "torch, zero 2": (2, fitted(zero=2)),
        "torch, zero 3": (2, fitted(zero=3, clip_norm=0.1)),
        "torch, rebalance": (2, fitted(rebalance=True)),
        "torch, resumed": (1, goes_on(scheduled="step")),
        "torch, resumed on 2 ranks": (2, goes_on(scheduled="epoch")),
        "torch, resumed with zero 1": (2, goes_on(zero=1)),
        "torch, resumed with zero 3": (2, goes_on(zero=3)),
        "torch, not finite, skip": (2, broken("skip")),
        "torch, not finite, rollback": (2, broken("rollback")),
        "torch, not finite, stop": (2, broken("stop")),
        "torch, loaders": (2, own_loader),
        "torch, unfrozen": (2, unfrozen),
        "torch, changed on one rank": (2, changed_rate),
    }


def trainings() -> dict[str, tuple[int, Callable[[Communicator, Path], None]]]:
    return {**NATIVE, **torch_trainings()}


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def recorded_form(traces: list[list[str]]) -> dict[str, Any]:
    """Returns what the file keeps: rank 0's lines, and a hash of those of each other rank."""
    return {"rank 0": traces[0], "others": [digest(lines) for lines in traces[1:]]}


if __name__ == "__main__":
    results = {}
    for title, (rank_count, run) in trainings().items():
        results[title] = recorded_form(traced(rank_count, run))
        print(f"{title}: {len(results[title]['rank 0'])} lines", flush=True)
    if "--record" in sys.argv:
        RECORD.write_text(json.dumps(results, indent=0) + "\n")
        sys.exit()
    wanted = json.loads(RECORD.read_text())
    for title, result in results.items():
        if result != wanted.get(title):
            before = wanted.get(title, {}).get("rank 0", [])
            print(f"--- {title} differs", result["others"] == wanted.get(title, {}).get("others"))
            print("\n".join(difflib.unified_diff(before, result["rank 0"], lineterm="", n=2)))
