"""The engine on many layouts, ranks being threads: the same weights, optimizer values, losses
and evaluations, to the bit, as on one rank. And what a step that must not count or a small
batch does there.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from odyssey import data, device, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.engine.bucketed import BucketedRunner
from odyssey.engine.pipeline import PipelineRunner
from odyssey.errors import ConfigError, NumericsError
from odyssey.nn import PipelineParallel, Stage
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

MNIST = data.load("mnist", train=True)


class Tied(nn.Module):
    """A layer used twice, one that is not used, dropout."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(784, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 10),
        )
        self.unused = nn.Linear(5, 3)

    def forward(self, x):
        x = F.dropout(F.relu(self.a(F.flatten(x))), 0.2, self.training)
        x = F.relu(self.b(F.relu(self.b(x))))
        return self.d(F.dropout(F.tanh(self.c(x)), 0.1, self.training))


class Placed(nn.Module):
    """Hand-placed; a connection that skips a place, and a place that is visited twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(784, 20) @ device(0)
        self.b = nn.Linear(20, 20) @ device(1)
        self.c = nn.Linear(20, 20) @ device(2)
        self.d = nn.Linear(20, 10) @ device(0)

    def forward(self, x):
        a = F.relu(self.a(F.flatten(x)))
        b = F.tanh(self.b(a.to(1)))
        c = self.c(b.to(2)) + a.to(2)
        return self.d(c.to(0) + a)


def checkpointed():
    """Blocks that begin with ops without parameters, where no cut may part them from what
    follows.
    """
    layers = (nn.Tanh(), nn.Tanh(), nn.Linear(24, 24), nn.RMSNorm(24), nn.Linear(24, 24))
    blocks = (nn.checkpoint(nn.Sequential(*layers)) for _ in range(3))  # the same ones
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 24), *blocks, nn.Linear(24, 10))


MODELS = {
    "lenet5": nn.LeNet5,
    "checkpointed": checkpointed,
    "tied": Tied,
    "placed": Placed,
    "stages": lambda: PipelineParallel(
        [
            Stage([nn.Linear(784, 20), F.relu]),
            Stage([nn.Linear(20, 20), F.tanh]),
            Stage([nn.Linear(20, 10)]),
        ]
    ),
}
OPTIMIZERS = {"sgd": lambda: optim.SGD(lr=0.05, momentum=0.9), "adam": lambda: optim.AdamW(lr=2e-3)}


def train(comm, model, optimizer, samples, batch, settings):
    """What a rank holds after an evaluation, an epoch, an evaluation and another epoch."""
    nn.manual_seed(1)
    made = MODELS[model]()
    trainer = DistributedTrainer(
        made,
        OPTIMIZERS[optimizer](),
        comm=comm,
        device="cpu",
        **{"threads": 1, "shard_size": 8, **settings},
    )
    loader = data.DataLoader(MNIST.take(samples), batch_size=batch, shuffle=True)
    evaluated = [trainer.evaluate(MNIST.take(70))]
    losses = [trainer.fit(loader, epochs=1).train_loss]
    evaluated.append(trainer.evaluate(MNIST.take(9)))
    losses.append(trainer.fit(loader, epochs=1).train_loss)
    state = {
        k: v.tobytes() if isinstance(v, np.ndarray) else v
        for k, v in trainer.training_state.optimizer_state().items()
    }
    weights = {k: v.tobytes() for k, v in trainer.state_dict().items()}
    return weights, state, losses, evaluated, trainer.grad_norm, trainer


def same_bits(model, ranks, settings, *, optimizer="adam", samples=140, batch=64, common=None):
    """Trains on the layout and on one rank, compares, and returns the trainers of the layout."""
    common = common or {}
    one = mock.run(1, train, model, optimizer, samples, batch, common)[0]
    found = mock.run(ranks, train, model, optimizer, samples, batch, {**common, **settings})
    for rank, got in enumerate(found):
        for what, x, y in zip(
            ("weights", "optimizer", "losses", "evaluations", "norm"), got, one, strict=False
        ):
            assert x == y, f"rank {rank}: other {what}"
    return [got[-1] for got in found]


TINY = 1e-4  # MB: every layer is a bucket
LAYOUTS = {
    "2 ranks": (2, {}),
    "3 ranks, a bucket per layer": (3, {"bucket_size_mb": TINY}),
    "3 ranks, a bucket per layer, one after the other": (
        3,
        {"bucket_size_mb": TINY, "overlap": False},
    ),
    "2 ranks of 2 workers": (2, {"num_gpus": 2, "threads": 2, "bucket_size_mb": 0.02}),
    "zero=1": (4, {"zero": 1}),
    "zero=1, a bucket per layer": (3, {"zero": 1, "bucket_size_mb": TINY}),
    "zero=2": (3, {"zero": 2}),
    "zero=3": (4, {"zero": 3}),
    "zero=3, some buckets": (2, {"zero": 3, "bucket_size_mb": 0.02, "overlap": False}),
    "zero=3 alone": (1, {"zero": 3}),
}
PIPELINES = {
    "pp=2": (2, {"mesh": Mesh(pp=2)}),
    "pp=2, gpipe": (2, {"mesh": Mesh(pp=2), "pipeline_schedule": "gpipe"}),
    "pp=2, interleaved": (2, {"mesh": Mesh(pp=2), "pipeline_schedule": "interleaved"}),
    "dp=2, pp=2": (4, {"mesh": Mesh(pp=2), "zero": 1}),
    "pp=3": (3, {"mesh": Mesh(pp=3)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["lenet5", "tied"])
def test_replicas(model, layout):
    ranks, settings = LAYOUTS[layout]
    # 140 = 64 + 64 + 12: the last batch has two shards of 8, so some ranks have none
    trainers = same_bits(model, ranks, settings, common={"clip_norm": 0.3})
    bucketed = any(isinstance(r, BucketedRunner) for r in trainers[0].stepper.engine.runners)
    assert bucketed == (ranks > 1 and ("bucket_size_mb" in settings or settings.get("zero", 0) > 1))


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("model", ["lenet5", "tied"])
def test_pipelines(model, layout):
    ranks, settings = PIPELINES[layout]
    trainers = same_bits(model, ranks, settings, common={"clip_norm": 0.3})
    assert all(isinstance(r, PipelineRunner) for t in trainers for r in t.stepper.engine.runners)
    if ranks == 4:  # the optimizer's numbers are spread over stages and replicas
        kept = [t.optimizer.state["m"].size for t in trainers]
        assert sum(kept) <= trainers[0].arena.size + 64 and max(kept) < trainers[0].arena.size


@pytest.mark.parametrize(
    "ranks,settings",
    [
        (3, {"mesh": Mesh(pp=3), "pipeline_schedule": "gpipe"}),
        (2, {"zero": 3}),
        (6, {"pipeline_schedule": "gpipe"}),
    ],
)
def test_a_place_visited_twice(ranks, settings):
    trainers = same_bits("placed", ranks, settings, optimizer="sgd")
    assert trainers[0].mesh.pp == (1 if settings.get("zero") else 3)


@pytest.mark.parametrize("pp,schedule", [(2, "1f1b"), (3, "gpipe"), (2, "interleaved")])
def test_an_automatic_cut_leaves_checkpoints_whole(pp, schedule):
    """Also in a last batch of three samples, whose program is cut as that of the others was."""
    settings = {"mesh": Mesh(pp=pp), "pipeline_schedule": schedule}
    same_bits("checkpointed", pp, settings, samples=67)


def test_a_pipeline_of_the_models_own():
    trainers = same_bits("stages", 3, {"mesh": Mesh(pp=3)}, common={"shard_size": 8})
    assert trainers[0].mesh == Mesh(1, 3, 1)
    found = [t.optimizer.state["m"].size for t in trainers]
    assert found == [20 * 784 + 32, 20 * 20 + 32, 200 + 8 + 16]


@pytest.mark.parametrize("samples,batch,shard", [(67, 64, 8), (9, 4, 2), (5, 5, 32), (66, 64, 16)])
@pytest.mark.parametrize(
    "ranks,settings",
    [(1, {"zero": 2}), (2, {"bucket_size_mb": TINY}), (2, {"zero": 3}), (2, {"mesh": Mesh(pp=2)}),
     (2, {"mesh": Mesh(pp=2), "pipeline_schedule": "interleaved"})],
)  # fmt: skip
def test_small_batches_and_rows(samples, batch, shard, ranks, settings):
    """Last batches of one to four samples are computed in rows, where the program has other ops."""
    same_bits("tied", ranks, settings, samples=samples, batch=batch, common={"shard_size": shard})


def test_batches_of_many_sizes_and_other_data():
    """Arrays of any size, one after the other: prepared again when needed, never all kept."""
    rng = np.random.default_rng(0)
    batches = [
        (rng.standard_normal((n, 1, 28, 28)).astype(np.float32), np.arange(n) % 10)
        for n in range(20, 60, 3)
    ]

    def fit(comm, zero):
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.LeNet5(), optim.SGD(lr=0.01), comm=comm, threads=1, shard_size=8, zero=zero
        )
        trainer.fit(batches)
        trainer.fit(batches[:2] + batches[-1:])
        return trainer.weights_sha256(), len(trainer.stepper.engine.runners), trainer.memory()

    one = mock.run(1, fit, 0)[0]
    for zero in (0, 3):
        for weights, runners, memory in mock.run(2, fit, zero):
            assert weights == one[0] and runners <= 8
            assert all(v > 0 for v in memory.values())


@pytest.mark.parametrize("settings", [{"bucket_size_mb": TINY}, {"zero": 3}])
def test_all_ranks_keep_the_same_batch_sizes(settings):
    """5, 6 and 2 shards on 3 ranks: each time other ranks need more memory than before."""

    def fit(comm):
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.LeNet5(), optim.SGD(lr=0.01), comm=comm, threads=1, shard_size=8, **settings
        )
        kept = []
        for n in (40, 48, 24, 40, 48, 24, 56):
            x, y = MNIST.gather(np.arange(n))
            trainer.fit([(np.asarray(x, np.float32), y)])
            kept.append(list(trainer.stepper.engine._runners))
        return kept

    found = mock.run(3, fit)
    assert all(kept == found[0] for kept in found)
    assert any(len(kept) > 1 for kept in found[0])


# --- steps that do not count ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks,settings",
    [(1, {}), (3, {"bucket_size_mb": TINY}), (2, {"zero": 1}), (3, {"zero": 3}), (2, {"mesh": Mesh(pp=2)}),
     (4, {"mesh": Mesh(dp=2, pp=2), "zero": 1})],
)  # fmt: skip
@pytest.mark.parametrize("what,clip", [("loss", None), ("gradient", None), ("gradient", 1.0)])
def test_a_step_with_nan_is_taken_by_nobody(ranks, settings, what, clip):
    """A pixel of some samples is so large that the loss, or only the gradient of the first
    layer, is not finite.
    """
    x = np.random.default_rng(0).standard_normal((64, 784)).astype(np.float32)
    bad = x.copy()
    bad[50:60, 3] = 3e38
    good, bad = (x, np.arange(64) % 10), (bad, np.arange(64) % 10)

    def start(comm, settings):
        nn.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 16), nn.Linear(16, 16), nn.Linear(16, 10))
        for layer in (1, 2):
            model[layer].weight.data[...] *= 100
        if what == "gradient":
            model[0].weight.data[:, 3] = 0
        return DistributedTrainer(
            model,
            optim.SGD(lr=1e-12),
            comm=comm,
            threads=1,
            shard_size=8,
            clip_norm=clip,
            **settings,
        )

    def steps(comm):
        trainer = start(comm, settings)
        if what == "loss":
            trainer.fit([good])
        n = trainer.steps
        before = (
            trainer.weights_sha256(),
            trainer.training_state.optimizer_state()["momentum"].tobytes(),
            n,
        )
        with pytest.raises(
            NumericsError, match=f"the {what} is not finite at step {n + 1} "
        ) as error:
            trainer.fit([bad])
        assert error.value.raised_on_all_ranks
        assert before == (
            trainer.weights_sha256(),
            trainer.training_state.optimizer_state()["momentum"].tobytes(),
            trainer.steps,
        )
        trainer.fit([good])
        return trainer.weights_sha256()

    def without(comm):
        trainer = start(comm, {})
        trainer.fit([good] * (2 if what == "loss" else 1))
        return trainer.weights_sha256()

    assert set(mock.run(ranks, steps)) == set(mock.run(1, without))


@pytest.mark.parametrize("ranks,settings", [(1, {}), (2, {"zero": 3}), (2, {"mesh": Mesh(pp=2)})])
def test_an_overflow_of_fp16_is_skipped_by_all(ranks, settings, capsys):
    def steps(comm):
        nn.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 10)
        )
        trainer = DistributedTrainer(
            model, optim.SGD(lr=0.01), comm=comm, threads=1, shard_size=8, precision="fp16",
            scaler_init_scale=2.0**26, **settings,
        )  # fmt: skip
        trainer.fit(data.DataLoader(MNIST.take(640), batch_size=32))
        return trainer.weights_sha256(), trainer.scaler.value, trainer.scaler.skipped

    found = mock.run(ranks, steps)
    assert len(set(found)) == 1 and 0 < found[0][2] < 20
    assert found[0] == mock.run(1, steps_of_fp16)[0]
    assert "skipped: gradients overflowed" in capsys.readouterr().err


def steps_of_fp16(comm):
    nn.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 10)
    )
    trainer = DistributedTrainer(
        model,
        optim.SGD(lr=0.01),
        comm=comm,
        threads=1,
        shard_size=8,
        precision="fp16",
        scaler_init_scale=2.0**26,
    )
    trainer.fit(data.DataLoader(MNIST.take(640), batch_size=32))
    return trainer.weights_sha256(), trainer.scaler.value, trainer.scaler.skipped


# --- accumulation ---------------------------------------------------------------------------------


def test_one_batch_of_64_is_8_times_8_is_2_ranks_times_4_times_8():
    def fit(comm, batch, k, settings):
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.LeNet5(),
            optim.Adam(lr=1e-3),
            comm=comm,
            threads=1,
            shard_size=8,
            accumulation_steps=k,
            **settings,
        )
        history = trainer.fit(data.DataLoader(MNIST.take(256), batch_size=batch, shuffle=True))
        return trainer.weights_sha256(), history.train_loss, history.steps

    whole = mock.run(1, fit, 64, 1, {})[0]
    assert whole[2] == 4
    assert mock.run(1, fit, 8, 8, {}) == [whole]
    # each rank has 4 of the 8 batches of 8 of a step
    assert mock.run(2, fit, 8, 8, {}) == [whole] * 2
    assert mock.run(2, fit, 32, 2, {"zero": 2, "bucket_size_mb": TINY}) == [whole] * 2
    assert mock.run(2, fit, 16, 4, {"mesh": Mesh(pp=2)}) == [whole] * 2


def test_the_last_step_of_an_epoch_accumulates_what_is_left():
    def fit(comm, batch, k):
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.LeNet5(),
            optim.SGD(lr=0.05),
            comm=comm,
            threads=1,
            shard_size=8,
            accumulation_steps=k,
        )
        history = trainer.fit(data.DataLoader(MNIST.take(200), batch_size=batch))
        return trainer.weights_sha256(), history.steps

    assert mock.run(1, fit, 16, 4) == mock.run(1, fit, 64, 1)
    arrays = [
        (np.float32(MNIST.take(64).gather(np.arange(i, i + 16))[0]), np.arange(16) % 10)
        for i in range(0, 64, 16)
    ]
    trainer = DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.05), accumulation_steps=3)
    assert trainer.fit(arrays).steps == 2  # 3 batches, then 1
    with pytest.raises(ConfigError, match="accumulation_steps"):
        DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.05), accumulation_steps=0)


# --- the global norm ------------------------------------------------------------------------------


def test_the_norm_is_that_of_float64_and_the_same_for_all():
    """Gradients of very different sizes: the sum of squares is exact, so no layout changes its
    bits.
    """
    x = np.random.default_rng(0).standard_normal((32, 784)).astype(np.float32)
    labels = np.arange(32) % 10

    def norm(comm, settings):
        nn.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 16), nn.Linear(16, 16), nn.Linear(16, 10))
        model[1].weight.data[...] *= 1e-6
        model[2].weight.data[...] *= 1e4
        trainer = DistributedTrainer(
            model, optim.SGD(lr=1.0), comm=comm, threads=1, shard_size=8, clip_norm=1e-3, **settings
        )
        before = trainer.state_dict()
        trainer.fit([(x, labels)])
        after = trainer.state_dict()
        moved = math.sqrt(
            sum(float(((before[k].astype(float) - after[k]) ** 2).sum()) for k in before)
        )
        return trainer.grad_norm, moved

    # the gradients themselves, by a step of rate 1 from weights of 0 ... here from the engine of
    # one rank
    def reference(comm):
        nn.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 16), nn.Linear(16, 16), nn.Linear(16, 10))
        model[1].weight.data[...] *= 1e-6
        model[2].weight.data[...] *= 1e4
        trainer = DistributedTrainer(model, optim.SGD(lr=1.0), comm=comm, threads=1, shard_size=8)
        batch = data.Batch(data.arrays(x, labels, classes=10), np.arange(32), 0, 0)
        trainer.stepper.engine.run(batch, 0)
        (runner,) = trainer.stepper.engine.runners
        return (
            math.sqrt(float((runner.result[: trainer.arena.size].astype(np.float64) ** 2).sum()))
            / 32
        )

    wanted = mock.run(1, reference)[0]
    found = [
        value
        for ranks, settings in [(1, {}), (2, {}), (3, {"zero": 1}), (2, {"zero": 3, "bucket_size_mb": TINY}),
                                (2, {"mesh": Mesh(pp=2)}), (4, {"mesh": Mesh(dp=2, pp=2), "zero": 1})]
        for value in mock.run(ranks, norm, settings)
    ]  # fmt: skip
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(wanted, rel=1e-9)
    assert found[0][1] == pytest.approx(1e-3, rel=1e-2)  # what a step of rate 1 may move


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks,settings", [(1, {}), (2, {"zero": 1}), (3, {"zero": 3}), (2, {"mesh": Mesh(pp=2)})]
)
def test_the_optimizer_goes_on_where_it_was(ranks, settings):
    """State of one layout, taken over by another before its first step, or after some."""

    def start(comm, made):
        nn.manual_seed(0)
        return DistributedTrainer(
            nn.LeNet5(), optim.Adam(lr=1e-3), comm=comm, threads=1, shard_size=8, **made
        )

    def fit(trainer, samples):
        trainer.fit(data.DataLoader(samples, batch_size=64))

    first, second = MNIST.take(128), MNIST.take(192)

    def whole(comm):
        trainer = start(comm, {})
        fit(trainer, first)
        state, weights = trainer.training_state.optimizer_state(), trainer.state_dict()
        fit(trainer, second)
        return state, weights, trainer.weights_sha256()

    state, weights, wanted = mock.run(1, whole)[0]

    def resumed(comm):
        trainer = start(comm, settings)
        trainer.model.load_state_dict(weights)
        trainer.training_state.load_optimizer_state(state)
        trainer.steps = 2
        fit(trainer, second)
        found = trainer.weights_sha256()
        # after a step, each rank keeps its part
        trainer.training_state.load_optimizer_state(trainer.training_state.optimizer_state())
        with pytest.raises(ConfigError, match="no m of this optimizer"):
            trainer.training_state.load_optimizer_state({**state, "m": state["m"][:-1]})
        if ranks > 1:
            with pytest.raises(ConfigError, match="spread over the ranks"):
                trainer.optimizer.step()
            with pytest.raises(ConfigError, match="spread over the ranks"):
                DistributedTrainer(trainer.model, trainer.optimizer, comm=comm)
        return found

    assert set(mock.run(ranks, resumed)) == {wanted}


def test_zero_keeps_parts():
    """What each rank keeps of 8 equal layers: a quarter of the optimizer, of the gradients, of
    the parameters.
    """

    def memory(comm, zero):
        nn.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(784, 64), *(nn.Linear(64, 64) for _ in range(40)), nn.Linear(64, 10)
        )
        trainer = DistributedTrainer(
            model, optim.Adam(), comm=comm, threads=1, shard_size=8, zero=zero
        )
        x = np.ones((32, 784), np.float32)
        trainer.fit([(x, np.arange(32) % 10)])
        if zero == 3:
            with pytest.raises(ConfigError, match=r"zero=3\); call trainer.state_dict"):
                trainer.arena.sha256()
        return trainer.memory(), trainer.arena.size, trainer.stepper.engine.ownership.parts

    plain = mock.run(4, memory, 0)[0][0]
    for zero in (1, 2, 3):
        found = mock.run(4, memory, zero)
        size = found[0][1]
        assert sum(m["optimizer"] for m, _, _ in found) == 2 * 4 * size
        assert max(m["optimizer"] for m, _, _ in found) < 0.27 * plain["optimizer"]
        for m, _, parts in found:
            own = 4 * sum(b - a for a, b in parts.own)
            floats = [4 * b.floats for b in parts.buckets]
            first, second = sorted([0, *floats])[:-3:-1]
            assert m["parameters"] == (own + first + 2 * second if zero == 3 else 4 * size)
            if zero > 1:  # two at work: a sum, and what came from the others
                assert m["gradients"] == own + 2 * (max(floats[::2]) + max(floats[1::2]))
        ranges = found[0][2].ranges
        for b, of_ranks in enumerate(ranges):  # the parts of a bucket are all of it, in order
            ends = [0, *(hi for _, hi in of_ranks)]
            assert [lo for lo, _ in of_ranks] == ends[:-1] and ends[-1] == found[0][2].buckets[
                b
            ].floats


def test_what_does_not_go_together_is_refused():
    def make(comm, **settings):
        return DistributedTrainer(Tied(), optim.SGD(), comm=comm, **settings)

    for settings, message in [
        ({"mesh": Mesh(pp=2), "zero": 2}, "use --zero 1, or --pp 1 --tp 1"),
        ({"zero": 4}, "zero is 4; it must be an integer from 0 to 3"),
        ({"bucket_size_mb": 0}, "bucket_size_mb is 0; it must be a number above 0"),
        ({"bucket_size_mb": "25"}, "bucket_size_mb is '25'; it must be a number above 0"),
        ({"clip_norm": "1"}, "clip_norm is '1'; it must be a number above 0"),
        ({"seed": 1.5}, "seed is 1.5; it must be an integer from 0"),
        ({"mesh": "dp=2"}, r"mesh is 'dp=2'; give Mesh\(dp=, pp=, tp=\)"),
        ({"zero": 1, "execution": "eager"}, "use execution='replay'"),
        ({"pipeline_schedule": "zigzag"}, "choose from gpipe, 1f1b, interleaved"),
        ({"clip_norm": 0}, "clip_norm is 0"),
        (
            {"mesh": Mesh(dp=3)},
            r"dp\(3\) x pp\(1\) x tp\(1\) = 3, but 2 ranks are running; change --dp or -n",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            mock.run(2, lambda comm, s=settings: make(comm, **s))

    def apart(comm):
        class Apart(Tied):
            def forward(self, x):
                return self.d(self.b(self.b(self.a(F.flatten(x))).to(1)))

        trainer = DistributedTrainer(Apart(), optim.SGD(), comm=comm, mesh=Mesh(pp=2), shard_size=8)
        trainer.fit(data.DataLoader(MNIST.take(16), batch_size=16))

    # the layer is on device 0, its second input on device 1
    with pytest.raises(Exception, match="device"):
        mock.run(2, apart)

    def different(comm):
        return make(comm, bucket_size_mb=1.0 + comm.rank)

    with pytest.raises(
        ConfigError, match="the bucket_size_mb of rank 1 differs from that of rank 0"
    ):
        mock.run(2, different)
