"""The whole state of a training between two steps: taken from the ranks, and put back on any layout.

`capture` gives what a checkpoint holds: named tensors that know nothing of ranks, meshes or ZeRO stages, and a few
values. `restore` puts it into a trainer of another layout; the training then goes on with the same bits. What must be
the same for that is compared by name (`configuration`, `check`). What it is not: files (odyssey/checkpoints).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import errors
from .checkpoints import Snapshot, Store, environment_key
from .data import ArrayDataset
from .errors import CheckpointError, ConfigError, OdysseyError

if TYPE_CHECKING:
    from .comm import Communicator
    from .data import DataLoader
    from .optim import Schedule
    from .trainer import DistributedTrainer

TREE = ("tree", "hierarchical", "parameter_server")  # the same bits on any number of ranks

#: Steps whose learning-rate factor is compared: schedules are functions and cannot be.
PROBES = (0, *(n * 10**k for k in range(6) for n in (1, 2, 5)))


@dataclasses.dataclass
class Cursor:
    """Where a training is in its data: the next step is number `step` of epoch `epoch` (both from 0) of a fit()."""

    epoch: int = 0
    step: int = 0
    loader_epoch: int = 0  # that epoch as the loader counts them
    samples: int = 0  # that steps have consumed so far, in all epochs

    def check(self) -> None:
        """TypeError if it is not made of numbers from 0."""
        if any(type(n) is not int or n < 0 for n in dataclasses.astuple(self)):
            raise TypeError(f"its cursor is {self}")


# --- what must be the same -------------------------------------------------------------------------------------------


def configuration(trainer: DistributedTrainer) -> dict[str, Any]:
    """What decides the bits of a training, beside its data, as JSON values by the names that users know them by.

    Ranks, workers, threads, mesh, ZeRO stage, buckets and execution are not in it: they change nothing.
    """
    lay, optimizer = trainer.layout, trainer.optimizer
    settings = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float, tuple)) and k != "steps"}
    modules = [(type(m).__name__, *(getattr(m, k) for k in ("p",) if hasattr(m, k))) for m in trainer.model.modules()]
    strategy = lay.reduction
    kind = "tree" if strategy.reduction in TREE and strategy.compression is None else repr(strategy)
    return _json(
        {
            "model": [[name, list(p.shape)] for name, p in trainer.arena.named],
            "optimizer": [type(optimizer).__name__, sorted(settings.items())],
            "shard size": lay.shard_size,
            "layers": modules,
            "loss": type(trainer.loss).__name__,
            "seed": trainer.seed,
            "precision": [trainer.precision, trainer.scaler.growth_interval if trainer.scaler.enabled else 0],
            "clip norm": None if trainer.clip_norm is None else float(trainer.clip_norm),
            "reduction": kind,
            "learning-rate scaling": [trainer.lr_scaling, trainer.base_batch_size],
            "schedule": probed(trainer.schedule),
            **(trainer.data_configuration or {"accumulation": trainer.accumulation_steps}),
        }
    )


def probed(schedule: Schedule) -> list[float | None]:
    """A schedule's factors at PROBES; None where it has none, as one made of a table."""
    factors: list[float | None] = []
    for step in PROBES:
        try:
            factors.append(float(schedule(step)))
        except Exception:
            factors.append(None)
    return factors


def data_configuration(loader: DataLoader, batch_size: int) -> dict[str, Any]:
    """What decides which samples a step sees, where a DataLoader gives them.

    Of the samples only some are looked at: the first and last of an ArrayDataset.
    """
    data, sampler = loader.dataset, loader.sampler
    digest = hashlib.sha256()
    if isinstance(data, ArrayDataset):
        ends = np.unique([0, len(data) // 2, len(data) - 1])
        for array in data.gather(ends):
            digest.update(np.ascontiguousarray(array).tobytes())
    return {
        "batch size": batch_size,
        "data set": [len(data), digest.hexdigest()[:16]],
        "data order": [loader.seed, loader.shuffle, None if sampler is None else type(sampler).__name__],
        "short last batch": not loader.drop_last,
    }


def check(saved: dict[str, Any], now: dict[str, Any], name: str) -> None:
    """ConfigError if a checkpoint called `name` was made with other settings: going on would be another training."""
    for key, value in now.items():
        if key not in saved:
            raise ConfigError(f"[resume] {name} says nothing of the {key}; use --resume never, or another checkpoint")
        if saved[key] != value and key == "schedule":  # told by probes of its factors, which say nothing to a reader
            raise ConfigError(
                f"[resume] {name} was made with another learning rate over time than this training has; give the same "
                "schedule and length (--schedule, --warmup-steps, --epochs, --steps), or start anew (--resume never, "
                "another directory)"
            )
        if saved[key] != value:
            raise ConfigError(
                f"[resume] {name} was made with {key} {_brief(saved[key], value)}, this training has "
                f"{_brief(value, saved[key])}; give the same, or start anew (--resume never, another directory)"
            )


def _brief(value: Any, other: Any) -> str:
    """A value for a message; of two lists only what is the first to differ."""
    while isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        pair = next(((a, b) for a, b in zip(value, other, strict=True) if a != b), None)
        if pair is None or not isinstance(pair[0], list):
            break
        value, other = pair
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _json(value: Any) -> Any:
    """A value as it comes back from JSON."""
    return json.loads(json.dumps(value))


# --- out of a trainer ------------------------------------------------------------------------------------------------


def capture(trainer: DistributedTrainer, values: dict[str, Any]) -> Snapshot | None:
    """What a checkpoint of this moment holds, on rank 0; None on the others. A collective call.

    The arrays may be those that training goes on with: copy or write them before the next step.
    """
    arena = trainer.arena
    flat = trainer._train.parameters()
    states = trainer.optimizer_arrays()
    residuals, counts = _residuals(trainer)
    if trainer.comm.rank != 0:
        return None
    arrays = {
        "parameters": {name: arena.view(flat, name) for name, _ in arena.named},
        "optimizer": {
            f"{state}/{name}": arena.view(whole, name) for state, whole in states.items() for name, _ in arena.named
        },
    }
    if residuals:
        arrays["residuals"] = residuals
    optimizer = trainer.optimizer
    return Snapshot(
        step=trainer.steps,
        arrays={stem: tensors for stem, tensors in arrays.items() if tensors},
        values={
            "optimizer": {"steps": optimizer.steps, "lr": optimizer.lr},
            "scaler": trainer.scaler.state_dict(),
            "lr_scaling": [trainer._lr_factor, trainer._lr_scaled],
            "configuration": configuration(trainer),
            "bucket size": trainer.layout.bucket_size_mb,
            "ranks": trainer.comm.size,
            "layout": f"{trainer.mesh}, zero {trainer.layout.zero}, {trainer.layout.workers} workers",
            "residuals": counts,
            **values,
        },
    )


def _residuals(trainer: DistributedTrainer) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """What a compression still has to send: arrays (ranks, ...) on rank 0, and numbers that all ranks have alike."""
    arrays, counts = {}, {}
    for b, memory in sorted(trainer._train.memories.items()):
        for name, value in sorted(memory.items()):
            if isinstance(value, int):
                counts[f"{b}/{name}"] = value
                continue
            many = isinstance(value, list)
            for i, array in enumerate(value if many else [value]):
                rows = trainer.comm.gather(array)
                if rows is not None:
                    arrays[f"{b}/{name}/{i}" if many else f"{b}/{name}"] = rows
    return arrays, counts


# --- into a trainer --------------------------------------------------------------------------------------------------


def shared(comm: Communicator, read: Callable[[], tuple[Snapshot | None, str]]) -> tuple[Snapshot | None, str]:
    """What `read` gives on rank 0, a snapshot and its name, on all ranks; a collective call.

    Raises:
        OdysseyError: what `read` raised, on all ranks.
    """
    snapshot, name, error = None, "", None
    if comm.rank == 0:
        try:
            snapshot, name = read()
        except OdysseyError as problem:
            error = problem
    text = b""
    if comm.rank == 0 and comm.size > 1:
        head, table = None, []
        if snapshot is not None:
            head = [snapshot.step, snapshot.values]
            table = [
                [stem, key, a.dtype.name, list(a.shape)]
                for stem, tensors in snapshot.arrays.items()
                for key, a in tensors.items()
            ]
        problem = None if error is None else [type(error).__name__, str(error)]
        text = json.dumps([head, name, problem, table]).encode()
    if comm.size > 1:
        length = int(comm.broadcast(np.array([len(text)], np.int64))[0])
        data = np.frombuffer(bytearray(text) or bytearray(length), np.uint8)
        head, name, problem, table = json.loads(comm.broadcast(data).tobytes())
        if problem is not None and error is None:
            error = getattr(errors, problem[0])(problem[1])
    if error is not None:
        error.everywhere = True
        raise error
    if comm.size == 1 or head is None:
        return snapshot, name
    step, values = head
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for stem, key, dtype, shape in table:
        if comm.rank == 0:
            array = np.array(snapshot.arrays[stem][key], order="C")
        else:
            array = np.empty(shape, dtype)
        arrays.setdefault(stem, {})[key] = comm.broadcast(array)
    return Snapshot(step, arrays, values), name


def find(path: Path, tell: Callable[[str], None]) -> tuple[Snapshot, str]:
    """The checkpoint at a path, or the newest valid one of a directory of them, with its name; no collective call.

    Raises:
        CheckpointError: there is none that is valid.
    """
    if (path / "manifest.json").exists():
        return Store(path.parent, owner=False, key=environment_key()).load(path), path.name
    store = Store(path, owner=False, key=environment_key())
    snapshot, refused = store.newest()
    for one in refused:
        tell(one.message(snapshot))
    if snapshot is None:
        raise CheckpointError(f"[resume] {path} has no valid checkpoint; name another, or use resume 'auto'")
    return snapshot, f"{path.name}/{store.path_of(snapshot.step).name}"


def restore(trainer: DistributedTrainer, snapshot: Snapshot, name: str) -> None:
    """Puts a snapshot that all ranks have into their trainers, of whatever layout.

    Args:
        name: of the checkpoint, for messages.

    Raises:
        ConfigError: it is of another training; nothing was changed.
        CheckpointError: something is missing in it; nothing was changed.
    """
    values, arrays, arena = snapshot.values, snapshot.arrays, trainer.arena
    now = configuration(trainer)
    check(_entry(values, "configuration", name), now, name)
    if now["reduction"] != "tree" and values.get("ranks") != trainer.comm.size:
        trainer._show(
            f"[resume] {name} was made by {values.get('ranks')} ranks, {trainer.comm.size} run now: with this "
            "reduction the bits depend on their number, so the training goes on with others"
        )
    optimizer, scaler = _entry(values, "optimizer", name), _entry(values, "scaler", name)
    flat = _flat(arena, arrays.get("parameters", {}), "", name)
    states = {s: _flat(arena, arrays.get("optimizer", {}), f"{s}/", name) for s in trainer.optimizer.states}
    memories = _memories(trainer, snapshot, name)
    try:
        trainer.scaler.load_state_dict(scaler)
        trainer._lr_factor, trainer._lr_scaled = float(values["lr_scaling"][0]), bool(values["lr_scaling"][1])
        trainer.load_optimizer_state({**states, "steps": optimizer["steps"], "lr": optimizer["lr"]})
    except (KeyError, ConfigError, TypeError, ValueError) as problem:
        raise CheckpointError(f"[resume] {name}: its state of the optimizer is not complete: {problem}") from problem
    trainer._train.load(flat, memories)
    trainer.steps = snapshot.step


def _entry(values: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    found = values.get(key)
    if not isinstance(found, dict):
        raise CheckpointError(f"[resume] {name} has no {key}; it was not written by a trainer")
    return found


def _flat(arena: Any, tensors: dict[str, np.ndarray], prefix: str, name: str) -> np.ndarray:
    """Named tensors as one array of the arena's layout."""
    flat = np.zeros(arena.size, np.float32)
    for own, p in arena.named:
        found = tensors.get(prefix + own)
        if found is None or found.shape != tuple(p.shape) or found.dtype != np.float32:
            what = "is missing" if found is None else f"is {found.dtype} {found.shape}"
            raise CheckpointError(f"[resume] {name}: {prefix}{own} {what}; float32 {tuple(p.shape)} is needed")
        arena.view(flat, own)[...] = found
    return flat


def _memories(trainer: DistributedTrainer, snapshot: Snapshot, name: str) -> dict[int, dict[str, Any]]:
    """This rank's part of what a compression still has to send."""
    counts, arrays = snapshot.values.get("residuals", {}), snapshot.arrays.get("residuals", {})
    if not counts and not arrays:
        return {}
    ranks = snapshot.values.get("ranks")
    if ranks != trainer.comm.size:
        raise ConfigError(
            f"[resume] {name} was made by {ranks} ranks with compression, which keeps on each rank what it has not "
            f"sent yet; {trainer.comm.size} ranks run now. Use {ranks} ranks"
        )
    if snapshot.values.get("bucket size") != trainer.layout.bucket_size_mb:
        raise ConfigError(
            f"[resume] {name} was made with compression in buckets of {snapshot.values.get('bucket size')} MB, and "
            f"this training has {trainer.layout.bucket_size_mb}; give the same"
        )
    memories: dict[int, dict[str, Any]] = {}
    for key, value in counts.items():
        b, _, what = key.partition("/")
        memories.setdefault(int(b), {})[what] = int(value)
    for key in sorted(arrays, key=lambda k: [int(w) if w.isdigit() else w for w in k.split("/")]):
        b, what, *index = key.split("/")
        memory, own = memories.setdefault(int(b), {}), np.array(arrays[key][trainer.comm.rank], order="C")
        if index:
            memory.setdefault(what, []).append(own)
        else:
            memory[what] = own
    return memories
