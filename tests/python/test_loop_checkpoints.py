"""`DistributedDataParallel.save_checkpoint` and `load_checkpoint`: a custom loop that resumes ends
with the results of one that never stopped. Ranks are threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odyssey import Tensor, data, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.core.precision import GradScaler
from odyssey.core.program import current
from odyssey.distributed import loop_checkpoints
from odyssey.distributed.ddp import DDP
from odyssey.errors import CheckpointError, ConfigError
from odyssey.optim import lr_scheduler, schedules
from odyssey.parallel.strategy import Strategy
from odyssey.train.trainer import DistributedTrainer

sys.path.insert(0, str(Path(__file__).parent))
from thread_ranks import on  # noqa: E402

RNG = np.random.default_rng(5)
SAMPLES = data.arrays(
    RNG.normal(size=(44, 8)).astype(np.float32), RNG.integers(0, 3, 44), classes=3
)
EPOCHS = 3
OPTIMIZERS = {
    "SGD": functools.partial(optim.SGD, lr=0.1),
    "momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": functools.partial(optim.AdamW, lr=0.01),
    "Lion": functools.partial(optim.Lion, lr=0.003),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.01),
}


@dataclasses.dataclass
class Loop:
    """The settings of a loop."""

    optimizer: str = "AdamW"
    dropout: float = 0.5
    norm: bool = True
    batch: int = 12  # samples of all ranks
    accumulate: int = 1
    schedule: bool = True
    scaler: bool = False
    average: str = "samples"
    shuffle: bool = True
    broadcast_buffers: bool = True

    def build(self) -> tuple[DDP, dict[str, Any]]:
        """Returns the model and the parts of a checkpoint, new."""
        layers = [nn.Linear(8, 12), nn.Dropout(self.dropout), nn.ReLU(), nn.Linear(12, 3)]
        if self.norm:
            layers.insert(1, nn.BatchNorm1d(12))
        ddp = DDP(
            nn.Sequential(*layers),
            average=self.average,
            broadcast_buffers=self.broadcast_buffers,
        )
        optimizer = OPTIMIZERS[self.optimizer](ddp.parameters())
        sampler = dist.DistributedSampler(SAMPLES, shuffle=self.shuffle, seed=3)
        size = self.batch // dist.get_world_size()
        parts = {
            "optimizer": optimizer,
            "loader": data.DataLoader(SAMPLES, size, sampler=sampler),
            "scheduler": lr_scheduler.StepLR(optimizer, 3, 0.7) if self.schedule else None,
            "scaler": GradScaler(2.0**6, growth_interval=3) if self.scaler else None,
        }
        return ddp, parts

    def run(self, folder: Path, stop: int | None) -> str:
        """Resumes if there is a checkpoint; stops after so many batches, or returns a hash."""
        nn.manual_seed(4)
        ddp, parts = self.build()
        optimizer, loader, scheduler, scaler = parts.values()
        values = ddp.load_checkpoint(folder, **parts)
        done = 0 if values is None else values["batches"]
        if values is None:
            optimizer.zero_grad()
        while loader.next_epoch < EPOCHS:
            batches = ddp.join(loader)
            for number, (x, y) in enumerate(batches, 1 + done % self.per_epoch):
                is_last = number % self.accumulate == 0 or number == self.per_epoch
                with self.no_sync(ddp, is_last):
                    loss = F.cross_entropy(ddp(Tensor(x)), y)
                    (loss if scaler is None else scaler.scale(loss)).backward()
                done += 1
                if is_last:
                    optimizer.step() if scaler is None else scaler.step(optimizer)
                    optimizer.zero_grad()
                    if scheduler is not None:
                        scheduler.step()
                if done == stop:
                    ddp.save_checkpoint(folder, **parts, values={"batches": done})
                    return ""
        self.trained = np.concatenate([a.ravel() for a in ddp.state_dict().values()])
        arrays = [*ddp.state_dict().values(), *(a for _, a in sorted(optimizer.state.items()))]
        return f"{optimizer.steps} {optimizer.lr} {hash(b''.join(a.tobytes() for a in arrays))}"

    @property
    def per_epoch(self) -> int:
        return -(-len(SAMPLES) // self.batch)

    def no_sync(self, ddp: DDP, is_last: bool) -> Any:
        return contextlib.nullcontext() if is_last else ddp.no_sync()


def draw(index: int) -> tuple[Loop, int, int]:
    """Returns a loop, the batches before its stop, and its ranks."""
    r = random.Random(index)
    loop = Loop(
        optimizer=r.choice(list(OPTIMIZERS)),
        dropout=r.choice([0.0, 0.5]),
        norm=r.random() < 0.5,
        batch=r.choice([8, 12, 16]),
        accumulate=r.choice([1, 1, 2]),
        schedule=r.random() < 0.5,
        scaler=r.random() < 0.3,
        shuffle=r.random() < 0.7,
    )
    # with four ranks the last batch of a rank may be of one sample, which has no variance
    ranks = r.choice([1, 2] if loop.norm else [1, 2, 4])
    stops = [
        n for n in range(1, EPOCHS * loop.per_epoch) if n % loop.per_epoch % loop.accumulate == 0
    ]
    return loop, r.choice(stops), ranks


@pytest.mark.parametrize("index", range(40))
def test_random_loops_resume(index, tmp_path):
    loop, stop, ranks = draw(index)
    whole = on(ranks, loop.run, tmp_path / "whole", None)
    on(ranks, loop.run, tmp_path / "stopped", stop)
    assert on(ranks, loop.run, tmp_path / "stopped", None) == whole


def test_a_lost_number_of_dropouts_changes_the_results(tmp_path, monkeypatch):
    """Shows that the test above can fail."""
    loop = Loop(norm=False)
    whole = on(2, loop.run, tmp_path / "whole", None)
    on(2, loop.run, tmp_path / "stopped", 3)

    def forget(*arguments: Any) -> None:
        restore(*arguments)
        current().layer = 0

    restore = loop_checkpoints._restore
    monkeypatch.setattr(loop_checkpoints, "_restore", forget)
    assert on(2, loop.run, tmp_path / "stopped", None) != whole


def test_without_random_numbers_another_number_of_ranks_continues(tmp_path):
    """Sums are of other terms, so results differ in the last bits."""

    def weights(folder: str, stop: int | None) -> np.ndarray | None:
        loop = Loop("SGD", dropout=0.0, norm=False)
        loop.run(tmp_path / folder, stop)
        return None if stop else loop.trained

    (whole, _) = on(2, weights, "whole", None)
    on(2, weights, "stopped", 5)
    (one,) = on(1, weights, "stopped", None)
    np.testing.assert_allclose(one, whole, rtol=1e-4, atol=1e-6)


def test_ranks_with_fewer_batches_resume_within_an_epoch(tmp_path):
    """Rank 1 has 21 of 43 samples, so it fills in for the last batch."""

    def run(folder: str, stops: bool) -> list[Any]:
        nn.manual_seed(0)
        ddp = DDP(
            nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.Linear(4, 3)), average="samples"
        )
        optimizer = optim.SGD(ddp.parameters(), lr=0.1)
        samples = SAMPLES.take(43)
        loader = data.DataLoader(samples, 7, sampler=dist.DistributedSampler(samples))
        ddp.load_checkpoint(tmp_path / folder, optimizer, loader=loader)
        seen = []
        while loader.next_epoch < 2:
            for x, y in ddp.join(loader):
                optimizer.zero_grad()
                F.cross_entropy(ddp(Tensor(x)), y).backward()
                optimizer.step()
                seen.append(ddp.active)
                if stops:
                    ddp.save_checkpoint(tmp_path / folder, optimizer, loader=loader)
                    if len(seen) == 1:
                        return seen
        return [ddp.state_dict()["2.weight"].tolist(), ddp.state_dict()["0.bias"].tolist()]

    whole = on(2, run, "whole", False)
    for _ in range(4):  # a new program for each batch
        on(2, run, "stopped", True)
    assert on(2, run, "stopped", False) == whole


# --- errors --------------------------------------------------------------------------------------


def alone(act: Any) -> Any:
    (result,) = on(1, act)
    return result


def make(**settings: Any) -> tuple[DDP, optim.Optimizer]:
    ddp = DDP(nn.Linear(8, 3), **settings)
    return ddp, optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)


def take_step(ddp: DDP, optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp(Tensor(np.ones((2, 8)))).sum().backward()
    optimizer.step()


def test_values_come_back_and_no_checkpoint_is_none(tmp_path):
    def act() -> None:
        ddp, optimizer = make()
        assert ddp.load_checkpoint(tmp_path / "none", optimizer) is None
        (tmp_path / "empty").mkdir()
        assert ddp.load_checkpoint(tmp_path / "empty", optimizer) is None
        take_step(ddp, optimizer)
        optimizer.momentum = 0.25
        ddp.save_checkpoint(tmp_path / "a", optimizer, values={"best": 0.5, "names": ["x"]})
        again, other = make()
        assert again.load_checkpoint(tmp_path / "a", other) == {"best": 0.5, "names": ["x"]}
        assert other.steps == 1 and other.momentum == 0.25 and again.reductions == 1

    alone(act)


def test_parts_that_are_missing_or_wrong(tmp_path):
    def act() -> None:
        ddp, optimizer = make()
        _, other = make()
        with pytest.raises(ConfigError, match="updates another model"):
            ddp.save_checkpoint(tmp_path, other)
        with pytest.raises(ConfigError, match="optimizer is a dict; use odyssey's Optimizer"):
            ddp.save_checkpoint(tmp_path, {})
        with pytest.raises(ConfigError, match="loader is a list; use odyssey's DataLoader"):
            ddp.save_checkpoint(tmp_path, optimizer, loader=[])
        with pytest.raises(ConfigError, match="values can't be saved as JSON"):
            ddp.save_checkpoint(tmp_path, optimizer, values={"a": object()})
        loader = data.DataLoader(SAMPLES, 11)
        with pytest.raises(ConfigError, match="before a loop over ddp.join"):
            ddp.save_checkpoint(tmp_path, optimizer, loader=loader)
        take_step(ddp, optimizer)
        ddp.save_checkpoint(tmp_path, optimizer)
        with pytest.raises(ConfigError, match="has no place in the data; omit loader="):
            ddp.load_checkpoint(tmp_path, optimizer, loader=loader)
        with pytest.raises(ConfigError, match="has no scaler; omit scaler="):
            ddp.load_checkpoint(tmp_path, optimizer, scaler=GradScaler())
        scheduler = lr_scheduler.StepLR(optimizer, 3)
        with pytest.raises(ConfigError, match="the optimizer has a scheduler; pass scheduler="):
            ddp.save_checkpoint(tmp_path, optimizer)
        with pytest.raises(ConfigError, match="has no scheduler; omit"):
            ddp.load_checkpoint(tmp_path, optimizer, scheduler=scheduler)

    alone(act)


def test_another_model_optimizer_or_average_is_an_error_and_changes_nothing(tmp_path):
    def act() -> None:
        ddp, optimizer = make()
        take_step(ddp, optimizer)
        ddp.save_checkpoint(tmp_path, optimizer)
        for other, key in (
            (DDP(nn.Linear(8, 4)), "model"),
            (DDP(nn.Linear(8, 3), average="samples"), "average ranks, and this loop has samples"),
            (DDP(nn.Linear(8, 3), reduction="ring"), "reduction"),
        ):
            before = other.state_dict()
            with pytest.raises(ConfigError, match=f"was made with another {key}"):
                other.load_checkpoint(tmp_path, optim.SGD(other.parameters(), 0.1, momentum=0.5))
            after = other.state_dict()
            assert all(np.array_equal(before[name], after[name]) for name in before)
        other = DDP(nn.Linear(8, 3))
        with pytest.raises(ConfigError, match="another optimizer SGD, and this loop has Lion"):
            other.load_checkpoint(tmp_path, optim.Lion(other.parameters()))

    alone(act)


def test_passes_that_wait_for_a_step_are_an_error(tmp_path):
    def act() -> None:
        ddp, optimizer = make()
        with ddp.no_sync():
            ddp(Tensor(np.ones((2, 8)))).sum().backward()
        with pytest.raises(ConfigError, match="wait for their step; save after optimizer.step"):
            ddp.save_checkpoint(tmp_path, optimizer)
        optimizer.zero_grad()
        ddp.save_checkpoint(tmp_path, optimizer)

    alone(act)


def test_state_that_belongs_to_a_rank_is_an_error(tmp_path):
    def compressed() -> None:
        ddp, optimizer = make(reduction=Strategy(compression="topk"))
        with pytest.raises(ConfigError, match="compression='topk' keeps what it did not send"):
            ddp.save_checkpoint(tmp_path, optimizer)

    def buffers() -> None:
        layers = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        ddp = DDP(layers, broadcast_buffers=False)
        optimizer = optim.SGD(ddp.parameters(), lr=0.1)
        x = np.random.default_rng(dist.get_rank()).normal(size=(4, 8))
        ddp(Tensor(x)).sum().backward()
        with pytest.raises(ConfigError, match="different values of the buffer.*broadcast_buffers"):
            ddp.save_checkpoint(tmp_path, optimizer)

    alone(compressed)
    on(2, buffers)


def test_another_loader_is_an_error(tmp_path, capfd):
    def act() -> None:
        ddp, optimizer = make(average="samples")

        def loop(loader: data.DataLoader) -> None:
            for x, y in ddp.join(loader):
                optimizer.zero_grad()
                F.cross_entropy(ddp(Tensor(x)), y).backward()
                optimizer.step()
                return ddp.save_checkpoint(tmp_path, optimizer, loader=loader)

        loop(data.DataLoader(SAMPLES, 11, shuffle=True, seed=1))
        for loader, key in (
            (data.DataLoader(SAMPLES, 11, shuffle=True, seed=2), "seed was 1, and here it is 2"),
            (data.DataLoader(SAMPLES, 11), "shuffle"),
            (data.DataLoader(SAMPLES, 4, shuffle=True, seed=1), "batch of all ranks was 11"),
            (data.DataLoader(SAMPLES.take(22), 11, shuffle=True, seed=1), "samples was 44"),
        ):
            with pytest.raises(ConfigError, match=key):
                ddp.load_checkpoint(tmp_path, optimizer, loader=loader)
        assert not capfd.readouterr().err
        assert ddp.load_checkpoint(tmp_path, optimizer) == {}
        assert "(epoch 0, batch 1), but loader= is not passed" in capfd.readouterr().err

    alone(act)


def test_damaged_checkpoints_and_those_of_trainers(tmp_path, monkeypatch):
    def act() -> None:
        ddp, optimizer = make()
        take_step(ddp, optimizer)
        ddp.save_checkpoint(tmp_path / "a", optimizer)
        (file,) = (tmp_path / "a").glob("step_*/parameters*")
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(CheckpointError, match="no valid checkpoint"):
            ddp.load_checkpoint(tmp_path / "a", optimizer)
        describe = loop_checkpoints._describe_loop
        monkeypatch.setattr(loop_checkpoints, "_describe_loop", lambda *arguments: {})
        ddp.save_checkpoint(tmp_path / "e", optimizer)
        monkeypatch.setattr(loop_checkpoints, "_describe_loop", describe)
        with pytest.raises(ConfigError, match="was made with another model"):
            ddp.load_checkpoint(tmp_path / "e", optimizer)
        trainer = DistributedTrainer(nn.Linear(8, 3), optim.SGD(lr=0.1))
        trainer.fit(data.DataLoader(SAMPLES, 11), epochs=1, verbose=False)
        trainer.save_checkpoint(tmp_path / "b")
        with pytest.raises(ConfigError, match="was not written by ddp.save_checkpoint"):
            ddp.load_checkpoint(tmp_path / "b", optimizer)
        ddp.save_checkpoint(tmp_path / "c", optimizer)
        with pytest.raises((ConfigError, CheckpointError)):
            trainer.load_checkpoint(tmp_path / "c")

    alone(act)


def test_a_loop_of_train_step_resumes_within_an_epoch(tmp_path):
    """A trainer's own methods: the place in the data is the program's."""

    def run(folder: str | None, stop: int | None, start: tuple[int, int]) -> Any:
        nn.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 3))
        trainer = DistributedTrainer(net, optim.AdamW(lr=0.01), schedule=schedules.cosine(9))
        loader = data.DataLoader(SAMPLES, 16, shuffle=True)
        if start != (0, 0):
            trainer.load_checkpoint(tmp_path / folder)
            loader.start_at(*start)
        while loader.next_epoch < EPOCHS:
            for batch in loader:
                trainer.train_step(batch)
                if trainer.steps == stop:
                    trainer.save_checkpoint(tmp_path / folder)
                    return batch.epoch, batch.index + 1
        return trainer.weights_sha256()

    (whole,) = on(1, run, None, None, (0, 0))
    for stop in (2, 3, 5):
        (position, _) = on(2, run, str(stop), stop, (0, 0))
        assert on(1, run, str(stop), None, position) == [whole]
