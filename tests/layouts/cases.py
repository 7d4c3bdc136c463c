"""Runs the cases of draws.py on ranks that are there already, and compares each with one process.

A result is a dict of arrays: weights, the optimizer's values, what fit() and evaluate() said. All
ranks of a case must have the same, and that of one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import draws
import numpy as np
import own_loops
from draws import Layout, Stop, Training

from odyssey import data, nn
from odyssey.callbacks import Callback
from odyssey.comm import Communicator, mock
from odyssey.core import offload
from odyssey.engine import shard_runs
from odyssey.errors import CollectiveError, ConfigError, NumericsError, OdysseyError, ShapeError
from odyssey.parallel.balance import Balance
from odyssey.parallel.reduction import PhaseCommunicators
from odyssey.train.trainer import DistributedTrainer, History

Result = dict[str, np.ndarray]
offload.SMALL = 64  # bytes: small networks are in files too


@dataclasses.dataclass
class Outcome:
    """What became of a case; `kind` is "same", "refused" or "differs"."""

    kind: str
    text: str = ""


class Quiet:
    """A progress that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, *_: Any) -> None: ...

    step = epoch = end = begin

    def say(self, line: str) -> None:
        self.lines.append(line)


class Anywhere(Balance):
    """Puts shards anywhere, and elsewhere at each step; all of them on one rank, at some."""

    at = 0

    def before_step(self, shards: int) -> str:
        self.at += 1
        return ""

    def counts(self, shards: int) -> tuple[int, ...]:
        random = np.random.default_rng([self.at, shards])
        cuts = np.sort(random.integers(0, shards + 1, self.comm.size // self.members - 1)) * (
            random.random() < 0.7
        )
        return tuple(np.diff(cuts, prepend=0, append=shards).tolist())


def trained(
    case: Training,
    layout: Layout,
    comm: Communicator,
    last: tuple[int, int] | None = None,
    **fit: Any,
) -> Result:
    """What a rank holds after the training, which fails at batch `last`, if it is given."""
    nn.manual_seed(case.settings["seed"])
    # Ranks that are threads train at the same time, on the same layout.
    shard_runs.forced_length = layout.run_length
    quiet = Quiet()
    model = case.network.build()
    given = [callback for change in case.changes for callback in change.make(model)]
    trainer = DistributedTrainer(
        model,
        case.optimizer[1](),
        comm=comm,
        device="cpu",
        loss=case.loss.build(),
        metrics=case.metrics,
        weight=case.weight,
        schedule=case.schedule[1],
        progress=quiet,
        **case.settings,
        **layout.settings,
    )
    if trainer.layout.balance:
        trainer.layout.balance = Anywhere(comm, 1, trainer.layout.balance.members)
    try:
        loader = case.data.loader(data.DataLoader if last is None else _Failing, layout.readers)
        if last is not None:
            loader.last = last
        evaluated = loader.dataset if loader.in_memory else case.data.loader()
        if given:
            fit["callbacks"] = given
        history, sums = _looped(case, trainer, loader, **{"epochs": case.epochs, **fit})
        evaluation = trainer.evaluate(evaluated)
        result = {f"weight {name}": value for name, value in trainer.state_dict().items()}
        for name, value in trainer.training_state.optimizer_state().items():
            result[f"optimizer {name}"] = np.asarray(value)
        for i, record in enumerate(history.records):
            for name, value in record.items():
                if name.startswith(("train_", "test_")):
                    known = value is not None and np.isfinite(value)  # checkpoints have no inf
                    result[f"{name} of epoch {i + 1}"] = np.asarray(
                        value if known else np.nan, np.float64
                    )
        result["sums of steps"] = np.array(sums)
        result["evaluation"] = np.array([*evaluation.metrics.values(), evaluation.samples])
        result["steps"] = np.array([trainer.steps, history.steps, history.samples])
        if trainer.last is None and case.changes:
            result["complete already"] = np.array(True)
        if trainer.grad_norm is not None:
            result["norm of the gradients"] = np.asarray(trainer.grad_norm)
        result["loss scale"] = np.asarray(trainer.scaler.value)
        result["weights_sha256"] = np.frombuffer(bytes.fromhex(trainer.weights_sha256()), np.uint8)
        return result if not case.changes else {**result, **_now(trainer, given)}
    finally:
        _close(trainer, comm)


def _now(trainer: DistributedTrainer, given: Sequence[Callback]) -> Result:
    """What is set when the training has ended, and what its callbacks keep."""
    found = {f"state of callback {i}": callback.state_dict() for i, callback in enumerate(given)}
    for name in ("lr", "momentum", "weight_decay", "betas", "eps", "alpha"):
        found[f"setting optimizer.{name}"] = getattr(trainer.optimizer, name, None)
    for path, module in trainer.model.named_modules("model"):
        for name, value in {"training": module.training, **vars(module)}.items():
            if isinstance(value, (bool, int, float, list)):
                found[f"setting {path}.{name}"] = value
    found |= {f"{name} is trained": p.requires_grad for name, p in trainer.model.named_parameters()}
    found |= {"setting clip_norm": trainer.clip_norm, "setting base_rate": trainer.base_rate}
    return {
        name: np.frombuffer(json.dumps(value).encode(), np.uint8) for name, value in found.items()
    }


def _looped(
    case: Training, trainer: DistributedTrainer, loader: data.DataLoader, **fit: Any
) -> tuple[History, list[tuple[float, float]]]:
    """Trains as case.loop says; the last History, and what train_step() gave."""
    if case.loop == "fit with a validation set":
        # whose order counts
        fit["val_loader"] = dataclasses.replace(case.data, shuffle=False, sampler=None).loader()
    if case.loop in ("fit", "fit with a validation set"):
        return trainer.fit(loader, **fit), []
    if case.loop == "own":

        def batches_from(epoch: int, number: int) -> data.DataLoader:
            loader.start_at(epoch, number)
            return loader

        own_loops.run(trainer, batches_from, len(loader), fit.pop("callbacks", ()), **fit)
        return History(), []
    history, sums = History(), []
    for epoch in range(case.epochs):
        if epoch % 2 and case.loop != "train_step":
            history = trainer.fit(loader, epochs=1)
        else:
            sums += [trainer.train_step(batch) for batch in loader]
    return history, sums


def _close(trainer: DistributedTrainer, comm: Communicator) -> None:
    """Gives the trainer's groups back: MPI has no more than about 2,000."""
    engine = getattr(getattr(trainer, "stepper", None), "engine", None)
    groups = getattr(engine, "groups", None)
    if groups is None:
        return
    for part in (groups.tp, groups.pp, groups.dp, groups.model):
        if part is not comm and part.size > 1:
            for lane in PhaseCommunicators.of(part)._extra_lanes:
                lane.close()
            part.close()


def difference(expected: Result, found: Result) -> str:
    """The first difference, in words; empty if there is none."""
    # no step, so no norm; no epoch began, so forward() may read what nobody has set
    if "complete already" in found:
        left_out = "norm of the gradients", "evaluation", "complete already"
        expected, found = (
            {k: v for k, v in r.items() if k not in left_out} for r in (expected, found)
        )
    if list(expected) != list(found):
        return f"holds {sorted(set(expected) ^ set(found))[:3]}, or in another order"
    for name, x in expected.items():
        y = found[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name} is {y.dtype} {y.shape} instead of {x.dtype} {x.shape}"
        if x.tobytes() != y.tobytes():
            bits = [np.ascontiguousarray(v).reshape(-1).view(f"u{v.itemsize}") for v in (x, y)]
            where = np.flatnonzero(bits[0] != bits[1])
            at = np.unravel_index(where[0], x.shape) if x.shape else ()
            return (
                f"{name}{list(map(int, at))} is {y[at]!r} instead of {x[at]!r}, {len(where)} differ"
            )
    return ""


Ran = Result | Exception  # or what it ended with, an error for the user


def attempted(trained: Callable[..., Result]) -> Callable[..., Ran]:
    """The same, or the error that says why not; what is no error of odyssey's is a crash and
    goes through.
    """

    def tried(*given: Any, **fit: Any) -> Ran:
        try:
            return trained(*given, **fit)
        except CollectiveError:
            raise
        except OdysseyError as error:
            return error

    return tried


def tried(case: Training, *given: Any, **fit: Any) -> Ran:
    """What a rank holds after the training, or the error that says why not; of what must be
    refused without numbers, as a generator gives each rank others.
    """
    ran = attempted(trained)(case, *given, **fit)
    refused = case.refused and isinstance(ran, ConfigError)
    return ConfigError(re.sub(r"\d[\d.e-]*", "N", str(ran))) if refused else ran


def judged(expected: Ran, everyone: Sequence[Ran], refused: bool = False) -> Outcome:
    """Of what one process gave, and what each rank of a layout gave; `refused`: they must be
    refused.
    """
    first = everyone[0]
    if isinstance(first, ShapeError) and all(
        str(one) == str(first) for one in (expected, *everyone)
    ):
        return Outcome("refused", str(first))  # such as batch norm of a last sample alone
    if refused and not (isinstance(first, ConfigError) and isinstance(expected, ConfigError)):
        ends = [str(r) if isinstance(r, Exception) else "a result" for r in (first, expected)]
        return Outcome(
            "differs", f"is not refused: ends with {ends[0]}, on one process with {ends[1]}"
        )
    if any(
        str(e) != str(first)
        for e in everyone
        if isinstance(e, Exception) or isinstance(first, Exception)
    ):
        return Outcome(
            "differs",
            f"not all ranks end with: {next(e for e in everyone if isinstance(e, Exception))}",
        )
    if isinstance(expected, Exception) or isinstance(first, Exception):
        alike = str(expected) == str(first)
        if isinstance(expected, ConfigError) and "[pipeline] " in str(expected):
            # of compressed gradients the reference has the layout too, and its stages are those of
            # its first step; a training that was started again in between has met the parameter in
            # its own first step
            return Outcome("refused", str(expected))
        if isinstance(first, ConfigError) or (
            isinstance(first, NumericsError) and "[checkpoint]" in str(first)
        ):
            return Outcome("refused", str(first))  # numbers that are not finite are never saved
        if alike and isinstance(first, NumericsError):
            # a step that is not finite ends both; any other error would show nothing
            return Outcome("same")
        ends = [str(r) if isinstance(r, Exception) else "a result" for r in (first, expected)]
        return Outcome("differs", f"ends with {ends[0]} instead of {ends[1]}")
    for rank, found in enumerate(everyone):
        text = difference(expected, found)
        if text:
            return Outcome("differs", f"{f'rank {rank}: ' * (rank > 0)}{text}")
    return Outcome("same")


# --- ranks ----------------------------------------------------------------------------------------


class Threads:
    """Ranks that are threads of this process (comm.mock)."""

    leads = True

    def run(self, ranks: int, function: Callable[[Communicator], Any]) -> list[Any]:
        """What `function(communicator)` gives on each of so many ranks."""
        return mock.run(ranks, function)

    def alone(self, function: Callable[[Communicator], Any]) -> Any:
        """What it gives on one process."""
        return function(Communicator())

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A directory that all see."""
        with tempfile.TemporaryDirectory(prefix="odyssey-layouts-") as made:
            yield Path(made)

    def meet(self) -> None:
        """Waits for all."""


class Processes:
    """Ranks that mpirun has started; all make the same calls, and the first has the results."""

    def __init__(self, world: Communicator) -> None:
        self.world, self.leads = world, world.rank == 0
        self._groups = {n: world.group(range(n)) for n in range(1, world.size + 1)}

    def run(self, ranks: int, function: Callable[[Communicator], Any]) -> list[Any]:
        comm = self._groups[ranks]
        if comm is None:
            return []
        return self._gathered(comm, function(comm))

    def alone(self, function: Callable[[Communicator], Any]) -> Any:
        return function(Communicator()) if self.leads else None

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        made = tempfile.TemporaryDirectory(prefix="odyssey-layouts-") if self.leads else None
        name = np.zeros(256, np.uint8)
        if made is not None:
            name[: len(made.name)] = np.frombuffer(made.name.encode(), np.uint8)
        self.world.broadcast(name)
        with made or contextlib.nullcontext():
            yield Path(name.tobytes().rstrip(b"\0").decode())
            self.meet()

    def meet(self) -> None:
        self.world.barrier()

    @staticmethod
    def _gathered(comm: Communicator, own: Any) -> list[Any]:
        """What all ranks have: of equal ones, the first's; so a digest of each will do."""
        text = repr(own) if isinstance(own, Exception) else _digest(own)
        mine = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int64)
        everyone = comm.all_gather(mine)[:, 0] if comm.size > 1 else mine
        other = np.flatnonzero(everyone != everyone[0])
        return [own, *(RuntimeError(f"rank {p} has something else") for p in other)]


def _digest(found: Any) -> str:
    if not isinstance(found, dict):
        return repr(found)
    digest = hashlib.sha256()
    for name, value in found.items():
        digest.update(
            f"{name} {value.shape} {value.dtype}".encode() + np.ascontiguousarray(value).tobytes()
        )
    return digest.hexdigest()


def play(
    team: Threads | Processes, seed: int, index: int, **how: bool
) -> tuple[Outcome, bool, str]:
    """A case on its layout and on one process; what became of it, whether ranks had parts, what
    it was.

    how: which cases, as draws.case() takes it.
    """
    case = draws.case(seed, index, **how)
    what = case.training
    with team.folder() if what.at_checkpoints else contextlib.nullcontext() as folder:

        def run(name: str, layout: Layout, comm: Communicator) -> Ran:
            return tried(
                what, layout, comm, **({"checkpoint_dir": folder / name} if folder else {})
            )

        everyone = team.run(case.layout.ranks, lambda comm: run("layout", case.layout, comm))
        expected = team.alone(lambda comm: run("alone", what.alone, comm))
    outcome = judged(expected, everyone, what.refused) if team.leads else Outcome("")
    return outcome, case.layout.splits, str(case)


class _Failure(Exception):
    """What a data set raises where a training is to fail."""


class _Failing(data.DataLoader):
    """Raises where it is asked for batch `last` = (epoch, number) or a later one."""

    last = (0, 0)

    def __iter__(self) -> Iterator[data.Batch]:
        for batch in super().__iter__():
            if (batch.epoch, batch.index) >= self.last:
                raise _Failure
            yield batch


def _until(case: Training, stop: Stop, comm: Communicator, folder: Path, every: int | None) -> Ran:
    """What a rank holds, or the error with which it ended, at a stop of a training that goes on
    from `folder`.
    """
    saving = {"checkpoint_dir": folder, "checkpoint_every": every}
    if stop.after is None:
        return tried(case, stop.layout, comm, **saving)
    if stop.kind == "limit":
        return tried(case, stop.layout, comm, steps=stop.after, **saving)
    epoch, step = divmod(stop.after, case.steps)
    last = epoch, step * case.settings["accumulation_steps"]
    try:
        return tried(case, stop.layout, comm, last=last, **saving)
    except _Failure:
        return {}


def play_resumed(
    team: Threads | Processes, seed: int, index: int, **how: bool
) -> tuple[Outcome, bool, str]:
    """An interrupted training of a case, and the undisturbed one."""
    case = draws.interrupted(seed, index, **how)
    what, first = case.training, case.undisturbed
    outcome = None
    with team.folder() as folder:
        saving = (
            {"checkpoint_dir": folder / "whole", "checkpoint_every": case.every}
            if what.at_checkpoints
            else {}
        )
        expected = team.run(first.ranks, lambda comm: tried(what, first, comm, **saving))
        parts = folder / "parts"
        for stop in case.stops:
            everyone = team.run(
                stop.layout.ranks, lambda comm, at=stop: _until(what, at, comm, parts, case.every)
            )
            team.meet()
            if outcome is None and team.leads:
                errors = [str(ran) for ran in everyone if isinstance(ran, Exception)]
                if errors or stop.after is None:
                    outcome = judged(expected[0], everyone, what.refused)
                    outcome.text += f" ({stop})" * bool(errors)
    return outcome or Outcome(""), any(s.layout.splits for s in case.stops), str(case)
