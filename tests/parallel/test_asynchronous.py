"""Ranks that do not take every step together: they end, wait no longer than they must, and agree
at the end.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from odyssey import DistributedDataParallel, DistributedTrainer, data, functional, nn, optim
from odyssey.comm import mock
from odyssey.errors import ConfigError, NumericsError
from odyssey.parallel.mesh import Mesh
from odyssey.parallel.strategy import Strategy

ASYNC = "async_parameter_server"


class Small(nn.Module):
    """Few parameters: the tests are about messages."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(784, 10)

    def forward(self, x):
        return self.fc(functional.flatten(x))


def made(comm, lr: float = 0.05, momentum: float = 0.5, **settings) -> DistributedTrainer:
    nn.manual_seed(1)
    optimizer = optim.SGD(lr=lr, momentum=momentum)
    return DistributedTrainer(
        Small(), optimizer, shard_size=16, device="cpu", threads=1, comm=comm, **settings
    )


def loader(samples: int = 960, batch: int = 64) -> data.DataLoader:
    return data.DataLoader(
        data.load("mnist", train=True).take(samples), batch_size=batch, shuffle=True
    )


def trained(
    comm,
    epochs: int = 2,
    steps: int | None = None,
    samples: int = 960,
    validate: bool = False,
    **settings,
):
    trainer = made(comm, **settings)
    test = data.load("mnist", train=False).take(500) if validate else None
    history = trainer.fit(loader(samples), test, epochs=epochs, steps=steps)
    state = trainer.training_state.optimizer_state()
    return (
        trainer.weights_sha256(),
        history,
        {k: v for k, v in state.items() if isinstance(v, np.ndarray)},
        trainer,
    )


# --- the asynchronous parameter server ---


def test_one_worker_is_the_synchronous_training():
    """No gradient is late then: the same bits, also with the parameters cut among two servers."""
    alone = mock.run(1, trained)[0]
    for ranks, servers in ((2, 1), (3, 2)):
        for weights, history, state, _ in mock.run(
            ranks, lambda c, s=servers: trained(c, reduction=ASYNC, servers=s)
        ):
            assert weights == alone[0]
            assert state["momentum"].tobytes() == alone[2]["momentum"].tobytes()
            assert history.steps == 30
            assert history.train_loss == pytest.approx(alone[1].train_loss, rel=1e-6)
            assert history.records[-1]["staleness_largest"] == 0


@pytest.mark.parametrize("ranks, servers", [(3, 1), (4, 1), (5, 2)])
def test_several_workers_learn_and_all_ranks_agree(ranks, servers):
    done = mock.run(
        ranks, lambda c: trained(c, validate=True, epochs=3, reduction=ASYNC, servers=servers)
    )
    assert len({weights for weights, _, _, _ in done}) == 1
    assert len({state["momentum"].tobytes() for _, _, state, _ in done}) == 1
    assert len({t.optimizer.steps for _, _, _, t in done}) == 1
    for _, history, _, trainer in done:
        record = history.records[-1]
        assert record == {**done[0][1].records[-1], "seconds": record["seconds"]} | {
            k: record[k]
            for k in ("samples_per_second", "bytes_per_step", "bytes_per_step_uncompressed")
        }
        assert history.steps == 45
        assert trainer.steps == 45
        assert sum(record["steps_of_worker"].values()) == 45
        assert (
            max(record["steps_of_worker"].values()) - min(record["steps_of_worker"].values()) <= 3
        )
        assert record["test_accuracy"] > 0.7
        assert history.records[0]["train_loss"] > record["train_loss"]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_ends_cleanly_after_any_number_of_steps(steps):
    """Also with fewer batches than workers."""
    for _, history, _, trainer in mock.run(4, lambda c: trained(c, steps=steps, reduction=ASYNC)):
        assert history.steps == steps
        assert trainer.optimizer.steps == steps


def test_fewer_batches_than_workers():
    for _, history, _, _ in mock.run(4, lambda c: trained(c, samples=70, reduction=ASYNC)):
        assert history.steps == 4
        assert history.samples == 140


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_fast_worker_waits_for_a_slow_one(staleness):
    begun = [0] * 3  # steps of each rank

    def rank(comm):
        trainer = made(comm, reduction=ASYNC, staleness=staleness)
        compute, until = trainer.stepper.gradients, time.monotonic() + 60

        def counted(*arguments):
            begun[comm.rank] += 1
            if comm.rank == 2 and begun[2] < 4:  # until the other one is as far ahead as it may be
                while begun[1] < begun[2] + staleness and time.monotonic() < until:
                    time.sleep(0.005)
            return compute(*arguments)

        trainer.stepper.gradients = counted
        return trainer.fit(loader(), epochs=1).records[-1]

    record = mock.run(3, rank)[0]
    # a step is begun while at most `staleness` ahead
    assert record["lead_largest"] <= staleness + 1
    if staleness:
        assert record["lead_largest"] > 1
        assert record["staleness_largest"] >= 2


def test_a_gradient_that_is_not_finite_ends_all_ranks():
    """One worker's; all raise the same, and hold the same finite parameters."""

    def rank(comm):
        trainer = made(comm, reduction=ASYNC)
        if comm.rank == 2:
            compute = trainer.stepper.gradients

            def spoiled(batch, step):
                sums, gradients, divisor = compute(batch, step)
                if step > 4:
                    gradients[3] = np.inf
                return sums, gradients, divisor

            trainer.stepper.gradients = spoiled
        with pytest.raises(
            NumericsError, match="Lower --lr, warm up, or lower --staleness"
        ) as caught:
            trainer.fit(loader(), epochs=1)
        assert caught.value.raised_on_all_ranks
        assert np.isfinite(trainer.arena.params).all()
        return trainer.weights_sha256()

    assert len(set(mock.run(3, rank))) == 1


def test_clipping_and_joined_batches():
    alone = mock.run(1, lambda c: trained(c, clip_norm=0.5, accumulation_steps=3))[0]
    for weights, history, _, _ in mock.run(
        2, lambda c: trained(c, reduction=ASYNC, clip_norm=0.5, accumulation_steps=3)
    ):
        assert weights == alone[0]
        assert history.steps == 10


def test_single_steps_are_refused():
    def rank(comm):
        batch = next(iter(loader()))
        with pytest.raises(ConfigError, match="call fit"):
            made(comm, reduction=ASYNC).train_step(batch)

    mock.run(2, rank)


# --- local SGD ---


def test_an_average_after_each_step_is_close_to_the_synchronous_training():
    """Of plain SGD, with shares of one size: the same but for rounding."""
    alone = mock.run(1, lambda c: trained(c, momentum=0.0))[0]
    for _, history, _, trainer in mock.run(
        4, lambda c: trained(c, momentum=0.0, reduction="local_sgd", local_steps=1)
    ):
        assert np.allclose(trainer.arena.params, alone[3].arena.params, atol=1e-6)
        assert history.train_loss == pytest.approx(alone[1].train_loss, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_local_sgd_learns_and_gives_the_same_bits_again(ranks, optimizer):
    def rank(comm):
        nn.manual_seed(1)
        kind = optim.SGD(lr=0.05, momentum=0.5) if optimizer == "sgd" else optim.Adam(lr=1e-3)
        trainer = DistributedTrainer(
            Small(),
            kind,
            shard_size=16,
            device="cpu",
            threads=1,
            comm=comm,
            reduction="local_sgd",
            local_steps=4,
        )
        history = trainer.fit(loader(), data.load("mnist", train=False).take(500), epochs=3)
        state = b"".join(
            v.tobytes()
            for v in trainer.training_state.optimizer_state().values()
            if isinstance(v, np.ndarray)
        )
        assert history.records[-1]["test_accuracy"] > 0.7
        assert history.bytes_per_step > 0
        return trainer.weights_sha256(), state, trainer.optimizer.steps

    assert len(set(mock.run(ranks, rank) + mock.run(ranks, rank))) == 1


def test_averages_come_every_so_many_steps():
    def rank(comm):
        trainer = made(comm, reduction="local_sgd", local_steps=3)
        params = []
        for batch, _ in zip(loader(), range(7), strict=False):
            trainer.train_step(batch)
            params.append(trainer.arena.params.copy())
        return params, trainer.weights_sha256()

    (a, first), (b, second) = mock.run(2, rank)
    same = [x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)]
    assert same == [False, False, True, False, False, True, False]
    assert first == second  # a hash is of what all agree on


def test_a_rank_without_samples_counts_the_step():
    """A last batch of two samples for three ranks."""
    done = mock.run(3, lambda c: trained(c, samples=66, reduction="local_sgd", local_steps=5))
    assert len({weights for weights, _, _, _ in done}) == 1
    assert [t.optimizer.steps for _, _, _, t in done] == [4, 4, 4]
    assert {h.samples for _, h, _, _ in done} == {132}


# --- settings ---


@pytest.mark.parametrize(
    "settings, mesh, zero, precision, message",
    [
        ({"reduction": "local_sgd"}, Mesh(2, 2, 1), 0, "fp32", "use --pp 1 --tp 1"),
        ({"reduction": "local_sgd"}, Mesh(2, 1, 1), 1, "fp32", "use zero=0"),
        ({"reduction": "local_sgd"}, Mesh(2, 1, 1), 0, "fp16", "use precision='bf16'"),
        (
            {"reduction": ASYNC},
            Mesh(1, 1, 1),
            0,
            "fp32",
            "beside its 1 server, and 1 is running; raise -n",
        ),
        (
            {"reduction": ASYNC, "servers": 2},
            Mesh(2, 1, 1),
            0,
            "fp32",
            "beside its 2 servers, and 2 are running",
        ),
    ],
)
def test_combinations_that_are_refused(settings, mesh, zero, precision, message):
    with pytest.raises(ConfigError, match=message):
        Strategy(**settings).check(mesh, zero, precision)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"reduction": ASYNC, "compression": "topk"},
            "leave reduction='async_parameter_server' out",
        ),
        ({"staleness": 2}, "only to reduction='async_parameter_server', not tree"),
        ({"reduction": ASYNC, "staleness": -1}, "at least 0"),
        ({"reduction": "local_sgd", "local_steps": 0}, "at least 1"),
        (
            {"reduction": "local_sgd", "servers": 2},
            "only to reduction='parameter_server' or 'async_parameter_server', not local_sgd",
        ),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Strategy(**settings)


def test_ddp_refuses():
    def rank(comm):
        nn.manual_seed(1)
        with pytest.raises(ConfigError, match="use DistributedTrainer, or one of tree, mpi"):
            DistributedDataParallel(Small(), reduction="local_sgd")

    mock.run(2, rank)


# --- learning-rate scaling ---


@pytest.mark.parametrize("scaling, factor", [("sqrt", 0.5), ("linear", 0.25)])
def test_the_rate_follows_the_batch_size(scaling, factor, capsys):
    def rank(comm, **settings):
        trainer = made(comm, momentum=0.0, **settings)
        trainer.fit(loader(), epochs=1)
        return trainer.arena.params.copy()

    scaled = mock.run(1, lambda c: rank(c, lr=0.1, lr_scaling=scaling, base_batch_size=256))[0]
    assert capsys.readouterr().err.count(f"= {0.1 * factor:g}\n") == 1
    assert scaled.tobytes() == mock.run(1, lambda c: rank(c, lr=0.1 * factor))[0].tobytes()


def test_a_scaled_rate_needs_its_batch_size():
    for settings, says in (
        ({"lr_scaling": "sqrt"}, "needs the batch size that the rate is for; give base_batch_size"),
        ({"base_batch_size": 32}, "applies only to lr_scaling='sqrt' or 'linear'"),
    ):
        with pytest.raises(ConfigError, match=says):
            mock.run(1, lambda c, s=settings: made(c, **s))
