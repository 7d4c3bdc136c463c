"""Checkpoints of a loop with `DistributedDataParallel`: everything that it resumes from.

Rank 0 writes a directory of odyssey/checkpoints, whole or not at all. The files are:

    parameters      parameters and buffers of the model, by name
    buffers         arrays that modules keep beside them, by the module's number and name
    optimizer       the optimizer's state, as STATE/PARAMETER

The values, as JSON, are the optimizer's settings, the number of dropouts of each rank, the place in
the data, and the values of the user.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..base.paths import expand_path
from ..core.native import KERNELS
from ..core.precision import GradScaler
from ..core.program import current
from ..data import DataLoader
from ..errors import CheckpointError, ConfigError
from ..optim import LambdaLR, Optimizer
from ..train import resume

if TYPE_CHECKING:
    from ..checkpoints import Snapshot
    from .ddp import DistributedDataParallel


class Parts(NamedTuple):
    """The parts of a loop that a checkpoint holds, besides the model."""

    optimizer: Optimizer
    loader: DataLoader | None
    scheduler: LambdaLR | None
    scaler: GradScaler | None


def save(
    ddp: DistributedDataParallel, folder: str | Path, parts: Parts, values: dict[str, Any]
) -> None:
    """Writes a checkpoint; see `DistributedDataParallel.save_checkpoint`."""
    from ..checkpoints import Store, environment_key

    comm = ddp._comm
    with resume.on_all_ranks(comm):
        _check_parts(ddp, parts)
        _check_between_steps(ddp)
        values = _as_json(values, "values")
    dropouts = comm.all_gather(np.array([current().layer], np.int64))[:, 0]
    # A rank without data does not know the epoch. The number of the batch is the same on all ranks.
    position = (-1, -1) if parts.loader is None else ddp._positions.get(parts.loader, (-1, -1))
    epoch, batch = comm.all_gather(np.array(position, np.int64)).max(0).tolist()
    with contextlib.ExitStack() as stack:
        store = None
        with resume.on_all_ranks(comm):
            if parts.loader is not None and epoch < 0:
                raise ConfigError(
                    "[ddp] save_checkpoint(loader=...) before a loop over ddp.join(loader), which "
                    "counts the batches; use `for x, y in ddp.join(loader)`"
                )
            _check_same_buffers(ddp)
            if comm.rank == 0:
                store = stack.enter_context(Store(expand_path(folder), key=environment_key()))
        progress = {
            "dropouts": dropouts.tolist(),
            "seed": int(current().context.seed),
            "data": None if parts.loader is None else _describe_data(ddp, parts.loader),
            "position": [epoch, batch],
        }
        resume.by_first(comm, lambda: str(store.save(_make_snapshot(ddp, parts, progress, values))))


def load(ddp: DistributedDataParallel, path: str | Path, parts: Parts) -> dict[str, Any] | None:
    """Takes back a checkpoint; see `DistributedDataParallel.load_checkpoint`."""
    comm = ddp._comm
    with resume.on_all_ranks(comm):
        _check_parts(ddp, parts)

    def read(in_memory: bool) -> tuple[Snapshot | None, str]:
        expanded_path = expand_path(path)
        if not _has_checkpoints(expanded_path):
            return None, str(path)
        return resume.find(expanded_path, ddp._tell, in_memory)

    snapshot, name = resume.shared(comm, read)
    if snapshot is None:
        return None
    with resume.on_all_ranks(comm):
        saved = snapshot.values.get("loop")
        if not isinstance(saved, dict):
            raise ConfigError(
                f"[ddp] {name} was not written by ddp.save_checkpoint(); use "
                "trainer.load_checkpoint() for a trainer's"
            )
        try:
            _compare(ddp, parts, saved, name)
            _restore(ddp, parts, snapshot, saved)
        except ConfigError:  # of a loop that does not fit; it is a ValueError too
            raise
        except (KeyError, IndexError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[ddp] {name} is not complete ({type(problem).__name__}: {problem}); use an "
                "older one"
            ) from problem
    return saved["values"]


def _check_parts(ddp: DistributedDataParallel, parts: Parts) -> None:
    """Raises ConfigError: a part is of the wrong kind, or belongs to another model."""
    kinds = {
        "optimizer": Optimizer,
        "loader": DataLoader,
        "scheduler": LambdaLR,
        "scaler": GradScaler,
    }
    for name, kind in kinds.items():
        part = getattr(parts, name)
        if not isinstance(part, kind) and (part is not None or name == "optimizer"):
            raise ConfigError(
                f"[ddp] {name} is a {type(part).__name__}; use odyssey's {kind.__name__}"
            )
    optimizer = parts.optimizer
    if optimizer.arena is not ddp._arena:
        raise ConfigError(
            "[ddp] the optimizer updates another model; use the one of ddp.parameters()"
        )
    if parts.scheduler is None and "_first_lr" in vars(optimizer):
        raise ConfigError("[ddp] the optimizer has a scheduler; pass scheduler= as well")
    if parts.scheduler is not None and parts.scheduler.optimizer is not optimizer:
        raise ConfigError("[ddp] the scheduler is of another optimizer; use the one of this one")
    if ddp._strategy.compression in ("topk", "powersgd"):
        raise ConfigError(
            f"[ddp] compression={ddp._strategy.compression!r} keeps what it did not send on each "
            "rank, and checkpoints of a loop don't hold it; use compression='bf16', or "
            "DistributedTrainer"
        )


def _check_between_steps(ddp: DistributedDataParallel) -> None:
    """Raises ConfigError: gradients wait for a step, and a checkpoint has no gradients."""
    if ddp._pass.is_pending:
        raise ConfigError(
            "[ddp] save_checkpoint() while passes under no_sync() wait for their step; save after "
            "optimizer.step()"
        )


def _check_same_buffers(ddp: DistributedDataParallel) -> None:
    """Raises ConfigError: ranks keep different buffers, and a checkpoint holds one of each.

    With broadcast_buffers the next forward pass takes those of rank 0, which are saved. A
    collective call.
    """
    if ddp.broadcast_buffers:
        return
    for name, buffer in ddp._buffers():
        rows = ddp._comm.all_gather(np.ascontiguousarray(buffer).reshape(-1).view(np.uint8))
        if (rows != rows[0]).any():
            raise ConfigError(
                f"[ddp] ranks have different values of the buffer {name}, and a checkpoint holds "
                "one; use broadcast_buffers=True"
            ).on_all_ranks()


def _describe_loop(ddp: DistributedDataParallel, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the settings that must be equal for the same results after a resume."""
    return {
        "model": [[name, list(p.shape)] for name, p in ddp._arena.named],
        "optimizer": type(optimizer).__name__,
        "average": ddp.average,
        "reduction": repr(ddp._strategy),
    }


def _describe_data(ddp: DistributedDataParallel, loader: DataLoader) -> dict[str, Any]:
    """Returns the settings that decide the samples of a batch of all ranks."""
    sampler = loader.sampler
    shuffle = bool(getattr(sampler, "shuffle", loader.shuffle))
    return {
        "samples": len(loader.dataset),
        "shuffle": shuffle,
        "seed": getattr(sampler, "seed", loader.seed) if shuffle else None,
        "batch of all ranks": loader.batch_size * ddp._comm.size,
    }


def _make_snapshot(
    ddp: DistributedDataParallel, parts: Parts, progress: dict[str, Any], values: dict[str, Any]
) -> Snapshot:
    """Returns the state of the loop on this rank."""
    from ..checkpoints import Snapshot

    optimizer = parts.optimizer
    arena = ddp._arena
    arrays = {
        "parameters": ddp.module.state_dict(),
        "buffers": {name: np.array(buffer) for name, buffer in ddp._buffers()},
        "optimizer": {
            f"{state}/{name}": arena.view(array, name)
            for state, array in optimizer.state.items()
            for name, _ in arena.named
        },
    }
    loop = {
        "configuration": _describe_loop(ddp, optimizer),
        "steps": optimizer.steps,
        "settings": optimizer.settings,
        "undecayed": optimizer.undecayed_names,
        "scheduler": None if parts.scheduler is None else parts.scheduler.last_epoch,
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "reductions": ddp.reductions,
        "kernels": KERNELS,
        "values": values,
        **progress,
    }
    present = {stem: tensors for stem, tensors in arrays.items() if tensors}
    return Snapshot(optimizer.steps, present, {"loop": _as_json(loop, "the optimizer's settings")})


def _as_json(value: Any, name: str) -> Any:
    """Returns a value as it comes back from JSON.

    Raises ConfigError: JSON has no such value; the message calls it `name`.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"[ddp] {name} can't be saved as JSON ({problem}); use numbers, strings, lists and "
            "dicts of them"
        ) from problem


def _has_checkpoints(path: Path) -> bool:
    """Returns whether a path is a checkpoint, or a directory that holds one."""
    from ..checkpoints import Store

    if (path / "manifest.json").exists() or (path / "checkpoints").is_dir():
        return True
    return path.is_dir() and bool(Store(path, owner=False).names())


def _compare(ddp: DistributedDataParallel, parts: Parts, saved: dict[str, Any], name: str) -> None:
    """Raises ConfigError: the checkpoint is of a loop that this one can't continue."""
    for key, value in _as_json(_describe_loop(ddp, parts.optimizer), "the model").items():
        saved_value = saved["configuration"].get(key)
        if saved_value != value:
            detail = "" if key == "model" else f" {saved_value}, and this loop has {value}"
            raise ConfigError(f"[ddp] {name} was made with another {key}{detail}; use the same")
    for key in ("scheduler", "scaler"):
        if (saved[key] is None) != (getattr(parts, key) is None):
            verb = "has no" if saved[key] is None else "has the state of a"
            action = "omit" if saved[key] is None else "pass"
            raise ConfigError(f"[ddp] {name} {verb} {key}; {action} {key}=")
    if parts.loader is None:
        if saved["data"] is not None:
            ddp._tell(
                f"[ddp] {name} has the place in the data (epoch {saved['position'][0]}, batch "
                f"{saved['position'][1]}), but loader= is not passed, so this loop starts with the "
                "first batch of its loader"
            )
        return
    if saved["data"] is None:
        raise ConfigError(f"[ddp] {name} has no place in the data; omit loader=")
    for key, value in _describe_data(ddp, parts.loader).items():
        # between epochs a batch of another size changes the results, but loses no sample
        is_needed = key != "batch of all ranks" or saved["position"][1]
        if saved["data"][key] != value and is_needed:
            raise ConfigError(
                f"[ddp] {name} was made with a loader whose {key} was {saved['data'][key]}, and "
                f"here it is {value}; use the same, or omit loader= and call loader.set_epoch()"
            )


def _restore(
    ddp: DistributedDataParallel, parts: Parts, snapshot: Snapshot, saved: dict[str, Any]
) -> None:
    """Takes over the state of a checkpoint that fits."""
    optimizer = parts.optimizer
    arena = ddp._arena
    arrays = snapshot.arrays
    state = {name: np.zeros_like(array) for name, array in optimizer.state.items()}
    for state_name, array in state.items():
        for name, _ in arena.named:
            arena.view(array, name)[...] = arrays["optimizer"][f"{state_name}/{name}"]
    ddp.module.load_state_dict(arrays["parameters"])
    for name, buffer in ddp._buffers():
        buffer[...] = arrays["buffers"][name]
    optimizer.load_state_dict({"steps": saved["steps"], "lr": saved["settings"]["lr"], **state})
    optimizer.restore(saved["settings"], saved["undecayed"])
    if parts.scheduler is not None:
        parts.scheduler.last_epoch = int(saved["scheduler"])
    if parts.scaler is not None:
        parts.scaler.load_state_dict(saved["scaler"])
    if parts.loader is not None:
        epoch, batch = saved["position"]
        parts.loader.start_at(epoch, min(batch, len(parts.loader)))
        ddp._positions[parts.loader] = (epoch, batch)
    executor = current()
    dropouts = saved["dropouts"]
    rank = ddp._comm.rank
    # another number of ranks draws other masks; the largest number repeats none
    executor.layer = dropouts[rank] if len(dropouts) == ddp._comm.size else max(dropouts)
    executor.context.seed = saved["seed"]
    ddp.reductions = int(saved["reductions"])
    if saved["kernels"] != KERNELS:
        ddp._tell(
            f"[ddp] the checkpoint was made with kernels {saved['kernels']}, these are {KERNELS}: "
            "results may differ from those of a run that never stopped"
        )
