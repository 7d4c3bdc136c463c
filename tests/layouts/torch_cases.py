"""Runs the cases of torch_draws.py on ranks that mpirun has started, and compares each with one
process (cases.py).

A case runs whole on one layout; then it is stopped after some steps on a second one and goes on,
from its checkpoint, on a third. All must hold what one process holds.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import own_loops
import torch
import torch_draws as draws
from cases import Anywhere, Outcome, Processes, Quiet, Ran, Result, attempted, judged
from torch_draws import ALONE, Layout, Training

from odyssey import data
from odyssey.comm import Communicator
from odyssey.data.nested import mapped
from odyssey.nn import settings
from odyssey.torch import DataLoader, DistributedDataParallel, DistributedTrainer
from odyssey.torch.data import tree_of
from odyssey.train.trainer import History

warnings.filterwarnings(
    "ignore", message=".*(lr_scheduler|epoch parameter|nested tensor|Overriding).*"
)


def trained(case: Training, layout: Layout, comm: Communicator, **fit: Any) -> Result:
    """What a rank holds after the training."""
    module = case.module()
    optimizer = case.optimizer(module)
    scheduler = case.scheduler(optimizer)
    if case.loop == "own":
        return looped(case, module, optimizer, scheduler, comm)
    trainer = DistributedTrainer(
        module,
        optimizer,
        case.loss(),
        scheduler=scheduler,
        weight=case.weight(),
        shard_size=case.shard,
        comm=comm,
        progress=Quiet(),
        **case.settings,
        **layout.settings,
    )
    if trainer.layout.balance:
        trainer.layout.balance = Anywhere(comm, 1)
    with trainer.gathered():  # a callback may copy the module
        changes = case.callbacks(scheduler is not None, module)
    if case.loop == "own steps":
        history = History()
        _take_steps(case, trainer, case.batches(comm), changes, **fit)
    else:
        history = trainer.fit(case.batches(comm), epochs=case.epochs, callbacks=changes, **fit)
    evaluation, found = trainer.evaluate(case.batches(comm)), trainer.predict(case.batches(comm))
    result = dict(sorted(trainer.named_state().items()))
    for i, record in enumerate(history.records):
        for name, value in record.items():
            if name.startswith(("train_", "test_")):
                result[f"{name} of epoch {i + 1}"] = np.asarray(value, np.float64)
    result["evaluation"] = np.array([evaluation.loss, evaluation.accuracy or 0, evaluation.samples])
    result["prediction"] = found.numpy()
    result["steps"] = np.array([trainer.steps, history.steps, history.samples])
    result["rate"] = np.array(trainer.rate)
    held = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    own = ("seen", "last")  # set by forward(), of the shards of this rank
    seen = {k: v for k, v in settings.values(module).items() if k.rpartition(".")[2] not in own}
    for name, value in {
        "groups": held,
        "settings": seen,
        "callbacks": [c.state_dict() for c in changes],
    }.items():
        result[name] = np.frombuffer(repr(value).encode(), np.uint8)
    return result


def looped(
    case: Training, module: Any, optimizer: Any, scheduler: Any, comm: Communicator
) -> Result:
    """A loop of one's own; batches of our loader are shared out as the trainer does it."""
    settings, loss = case.settings, case.loss()
    net = DistributedDataParallel(
        module, shard_size=case.shard, seed=settings["seed"], threads=settings["threads"], comm=comm
    )
    loader = case.batches(comm)
    for epoch in range(case.epochs):
        for batch in _of(loader, epoch, settings["seed"]):
            for x, y in net.shards(batch):
                trees = map(tree_of, (x, y))  # lists become tuples
                x, y = (mapped(lambda t: t.to(draws.DEVICE), tree) for tree in trees)
                with torch.autocast(
                    draws.DEVICE, torch.bfloat16, enabled=settings["precision"] == "bf16"
                ):
                    given = x if isinstance(x, (tuple, list)) else (x,)
                    out = net(**x) if isinstance(x, dict) else net(*given)
                    error = loss(out, y)
                if getattr(loss, "reduction", "mean") == "sum":
                    error = error / len(y)
                error.backward()
            if settings["clip_norm"]:
                torch.nn.utils.clip_grad_norm_(
                    net.parameters(), settings["clip_norm"], error_if_nonfinite=False
                )
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    found = {name: t.detach().cpu().clone().numpy() for name, t in module.state_dict().items()}
    for i, p in enumerate(module.parameters()):
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, (torch.Tensor, int, float)):
                found[f"optimizer {name} of {i}"] = np.array(
                    value.cpu() if isinstance(value, torch.Tensor) else value
                )
    return found


def _take_steps(case: Training, trainer: Any, loader: Any, changes: Any, **fit: Any) -> None:
    """Trains in a loop around train_step() (own_loops.py)."""

    def batches_from(epoch: int, number: int) -> Any:
        loader.start_at(epoch, number)
        return loader

    own_loops.run(trainer, batches_from, len(loader), changes, epochs=case.epochs, **fit)


def _of(loader: Any, epoch: int, seed: int) -> Any:
    """A loader's batches of an epoch; those of odyssey.data's loader as tensors."""
    torch.manual_seed(seed % 2**40 + epoch)
    for batch in loader:
        if not isinstance(batch, data.Batch) or isinstance(loader, DataLoader):
            yield batch
            continue
        x, y = batch
        x, y = (mapped(torch.as_tensor, tree) for tree in (x, y))
        yield x, y.long() if y.dtype == torch.int32 else y


tried = attempted(trained)


def play(team: Processes, seed: int, index: int) -> tuple[Outcome, bool, str]:
    """A case on its layouts and on one process; what became of it, whether ranks had parts, what
    it was.
    """
    case = draws.case(seed, index)
    what = case.training
    expected = team.alone(lambda comm: tried(what, ALONE, comm))
    everyone = team.run(case.whole.ranks, lambda comm: tried(what, case.whole, comm))
    outcome = judged(expected, everyone) if team.leads else Outcome("")
    if what.loop == "fit":
        with team.folder() as folder:
            ends = _gone_on(team, case, folder)
        if team.leads and outcome.kind == "same" and ends:
            outcome = judged(expected, ends)
            outcome.text += " (gone on)" * bool(outcome.text)
    return (
        outcome,
        any(at.splits for at in (case.whole, case.before, case.after)),
        str(case) if team.leads else "",
    )


def _gone_on(team: Processes, case: draws.Case, folder: Path) -> list[Ran]:
    saving = {"checkpoint_dir": folder, "checkpoint_every": case.every}
    team.run(
        case.before.ranks,
        lambda comm: tried(case.training, case.before, comm, steps=case.stop, **saving),
    )
    team.meet()
    ends = team.run(case.after.ranks, lambda comm: tried(case.training, case.after, comm, **saving))
    team.meet()
    return ends
