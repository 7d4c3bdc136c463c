"""Compressed gradients: what arrives, what is kept for later, how many bytes travel, and that
training goes on.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.comm import mock
from odyssey.errors import ConfigError, NumericsError
from odyssey.inexact.compression import GradientCompression, count, largest, orthonormal
from odyssey.parallel import costs
from odyssey.parallel import plan as planning
from odyssey.parallel import strategy as strategies
from odyssey.parallel.mesh import Mesh
from odyssey.parallel.strategy import Content, Strategy
from odyssey.settings import recipes

SHAPES = ((0, (20, 30)), (608, (30,)), (640, (8, 4, 5)))
FLOATS, REST = 800, 8


def gradient(rank: int, step: int = 0) -> np.ndarray:
    rng = np.random.default_rng((rank, step))
    g = np.zeros(FLOATS + REST, np.float32)
    for offset, shape in SHAPES:
        n = int(np.prod(shape))
        g[offset : offset + n] = rng.standard_normal(n)
    g[FLOATS:] = rank + 1
    return g


def session(
    comm, strategy: Strategy, steps: int, samples=lambda step: 64, given=gradient, **options
):
    """Sums of a gradient per rank and step; also what the rank keeps and its reduction."""
    plan = planning.make(comm.size, comm.rank, comm.size, 1, 1)
    memory: dict = {}
    made, results = {}, []
    for step in range(steps):
        n = samples(step)
        if n not in made:
            content = Content(FLOATS, SHAPES, n, memory)
            made[n] = strategies.make(
                strategy, comm, plan, FLOATS + REST, 1, content=content, **options
            )
        made[n].buffers[0] = given(comm.rank, step)
        made[n].start()
        results.append(made[n].finish().copy())
    return results, memory, list(made.values())


def exact(ranks: int, step: int = 0) -> np.ndarray:
    return sum(gradient(r, step).astype(np.float64) for r in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("compression", recipes.COMPRESSIONS)
def test_all_ranks_get_the_same_and_the_same_again(compression, ranks):
    first = mock.run(ranks, session, Strategy(compression=compression), 3)
    again = mock.run(ranks, session, Strategy(compression=compression), 3)
    for results, _, _ in first + again:
        for step in range(3):
            assert results[step].tobytes() == first[0][0][step].tobytes()
            # counts are exact
            assert results[step][FLOATS:].tolist() == [ranks * (ranks + 1) / 2] * REST


@pytest.mark.parametrize("compression, error", [("fp16", 2**-11), ("bf16", 2**-8)])
def test_sixteen_bits_round_twice(compression, error):
    for results, _, made in mock.run(3, session, Strategy(compression=compression), 1):
        scale = sum(np.abs(gradient(r)) for r in range(3))
        assert np.all(np.abs(results[0] - exact(3)) <= 2.1 * error * scale)
        assert 0.49 < made[0].bytes_sent / made[0].bytes_plain < 0.55


def test_fp16_neither_overflows_nor_underflows():
    for factor in (1e-30, 1e30):
        given = lambda rank, step, f=factor: gradient(rank) * np.float32(f)  # noqa: E731
        for results, _, _ in mock.run(
            2, lambda c, g=given: session(c, Strategy(compression="fp16"), 1, given=g)
        ):
            got = results[0][:FLOATS].astype(np.float64) / factor
            assert np.allclose(got, exact(2)[:FLOATS], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_sixteen_bits_with_scatter(compression):
    """ZeRO: each rank has its own range, rounded once."""

    def rank(comm):
        plan = planning.make(comm.size, comm.rank, comm.size, 1, 1)
        content = Content(FLOATS, SHAPES, 64, {})
        storage = np.zeros(64 * FLOATS, np.float32)
        made = strategies.make(
            Strategy(compression=compression),
            comm,
            plan,
            FLOATS,
            1,
            content=content,
            scatter=True,
            storage=storage,
        )
        made.buffers[0] = gradient(comm.rank)[:FLOATS]
        made.start()
        a, b = made.own
        return np.abs(made.finish()[a:b] - exact(comm.size)[a:b]).max(), b - a

    results = mock.run(3, rank)
    assert sum(n for _, n in results) == FLOATS
    assert max(error for error, _ in results) < 0.05


# --- top-k ---


def test_largest_takes_the_first_of_equals():
    assert largest(np.array([1, -3, 3, 2, -3], np.float32), 2).tolist() == [1, 2]
    assert largest(np.array([0, 0, 0], np.float32), 2).tolist() == [0, 1]
    rng = np.random.default_rng(0)
    for _ in range(20):
        a = rng.integers(-5, 6, 50).astype(np.float32)
        order = sorted(range(50), key=lambda i: (-abs(a[i]), i))
        assert largest(a, 13).tolist() == sorted(order[:13])


def test_count():
    assert [count(n, 0.01) for n in (0, 1, 20, 100, 1000)] == [0, 1, 1, 1, 10]
    assert count(10, 1.0) == 10


def test_what_topk_keeps_and_what_it_sends_add_up():
    """Over the steps nothing is lost: sent + kept = all gradients."""
    steps = 6
    done = mock.run(3, session, Strategy(compression="topk", compression_ratio=0.05), steps)
    sent = sum(r.astype(np.float64) for r in done[0][0])[:FLOATS]
    kept = sum(memory["residual"].astype(np.float64) for _, memory, _ in done)
    assert np.allclose(sent + kept, sum(exact(3, s) for s in range(steps))[:FLOATS], atol=1e-4)
    for results, _, made in done:
        assert np.count_nonzero(results[0][:FLOATS]) <= 3 * 40
        beside = made[0]._exact.bytes_sent
        # to two ranks, 40 pairs of 8 bytes
        assert made[0].bytes_sent - beside == steps * 2 * 40 * 8


def test_topk_warms_up():
    strategy = Strategy(compression="topk", compression_ratio=0.01, compression_warmup_steps=4)
    for results, _, _ in mock.run(
        2, session, strategy, 6, lambda step: 64, lambda rank, step: gradient(0, step)
    ):
        # both ranks send the same positions
        sent = [np.count_nonzero(r[:FLOATS]) for r in results]
        assert sent == [200, 89, 40, 18, 8, 8]


@pytest.mark.parametrize("compression", ["topk", "powersgd"])
def test_what_is_kept_counts_for_batches_of_other_sizes(compression):
    """A step divides by its samples: what a batch of 64 left is half as much in units of one of
    32.
    """
    strategy = Strategy(compression=compression)
    given = lambda rank, step: gradient(rank) if step == 0 else 0 * gradient(rank)  # noqa: E731
    name = "residual" if compression == "topk" else "error"
    _, first, _ = mock.run(2, lambda c: session(c, strategy, 1, given=given))[0]
    results, memory, _ = mock.run(2, lambda c: session(c, strategy, 2, lambda s: 64 >> s, given))[0]
    assert memory["samples"] == 32
    if compression == "topk":
        at = largest(first["residual"], 8)
        assert np.all(memory[name][at] == 0)
        left = np.delete(first[name], at)
        assert np.delete(memory[name], at).tolist() == (left / 2).tolist()
    assert np.abs(memory[name]).sum() < 0.6 * np.abs(first[name]).sum()


@pytest.mark.parametrize("compression", recipes.COMPRESSIONS)
def test_a_number_that_is_not_finite_reaches_all_and_nothing_of_it_is_kept(compression):
    def given(rank, step):
        g = gradient(rank, step)
        if rank == 1 and step == 1:
            g[5] = np.inf
        return g

    for results, memory, _ in mock.run(
        2, lambda c: session(c, Strategy(compression=compression), 3, given=given)
    ):
        finite = [bool(np.isfinite(r).all()) for r in results]
        assert finite == [True, False, True]
        assert all(np.isfinite(v).all() for v in memory.values() if isinstance(v, np.ndarray))


# --- PowerSGD ---


def test_columns_become_orthonormal():
    rng = np.random.default_rng(0)
    p = orthonormal(rng.standard_normal((50, 4)).astype(np.float32))
    assert np.allclose(p.T @ p, np.eye(4), atol=1e-6)
    twice = np.repeat(rng.standard_normal((9, 1)).astype(np.float32), 2, axis=1)
    assert not orthonormal(twice)[:, 1].any()
    assert not orthonormal(np.zeros((5, 2), np.float32)).any()


def test_power_iteration_finds_a_matrix_of_low_rank():
    rng = np.random.default_rng(1)
    low = (rng.standard_normal((20, 2)) @ rng.standard_normal((2, 30))).astype(np.float32)

    def given(rank, step):
        g = np.zeros(FLOATS + REST, np.float32)
        g[:600] = low.ravel()
        g[608:638] = rank
        return g

    for results, memory, made in mock.run(
        2, lambda c: session(c, Strategy(compression="powersgd"), 8, given=given)
    ):
        assert np.allclose(results[7][:600], 2 * low.ravel(), atol=1e-3)
        assert results[7][608:638].tolist() == [1.0] * 30  # a vector is sent as it is
        assert np.abs(memory["error"]).max() < 1e-2
        assert made[0].bytes_sent < made[0].bytes_plain / 2


def test_what_powersgd_keeps_and_what_it_sends_add_up():
    steps = 5
    done = mock.run(3, session, Strategy(compression="powersgd", powersgd_rank=1), steps)
    sent = sum(r.astype(np.float64) for r in done[0][0])[:FLOATS]
    kept = sum(memory["error"].astype(np.float64) for _, memory, _ in done)
    assert np.allclose(sent + kept, sum(exact(3, s) for s in range(steps))[:FLOATS], atol=1e-3)


# --- settings ---


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"compression": "zip"}, "choose from fp16, bf16, topk, powersgd, or None"),
        ({"compression": "topk", "compression_ratio": 0.0}, "above 0 and at most 1"),
        (
            {"compression": "topk", "compression_ratio": "1 %"},
            "must be a number above 0 and at most 1",
        ),
        ({"compression": "fp16", "compression_ratio": 0.1}, "only to compression='topk', not fp16"),
        ({"compression": "topk", "powersgd_rank": 4}, "only to compression='powersgd', not topk"),
        ({"compression": "topk", "reduction": "ring"}, "leave reduction='ring' out"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Strategy(**settings)


@pytest.mark.parametrize(
    "compression, mesh, zero, precision, message",
    [
        ("topk", Mesh(2, 1, 1), 2, "fp32", "use zero=1"),
        ("powersgd", Mesh(2, 1, 1), 0, "fp16", "use precision='bf16'"),
        ("fp16", Mesh(1, 1, 2), 0, "fp32", "use --tp 1"),
    ],
)
def test_combinations_that_are_refused(compression, mesh, zero, precision, message):
    with pytest.raises(ConfigError, match=message):
        Strategy(compression=compression).check(mesh, zero, precision)


# --- trainings ---


def trained(comm, **settings):
    model = nn.models.build("lenet5", seed=1)
    train = data.load("mnist", train=True).take(1500)
    loader = data.DataLoader(train, batch_size=128, shuffle=True)
    trainer = DistributedTrainer(
        model,
        optim.SGD(lr=0.03, momentum=0.9),
        shard_size=32,
        device="cpu",
        threads=1,
        comm=comm,
        **settings,
    )
    history = trainer.fit(loader, epochs=3)
    return trainer.weights_sha256(), history, trainer


@pytest.fixture(scope="module")
def plain() -> float:
    """The loss of the third epoch without compression."""
    return mock.run(1, trained)[0][1].train_loss


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "fp16", "zero": 2, "bucket_size_mb": 0.05},
        {"compression": "bf16", "execution": "eager"},
        {"compression": "topk", "bucket_size_mb": 0.05, "compression_ratio": 0.05},
        {"compression": "topk", "zero": 1, "compression_ratio": 0.05},
        {"compression": "powersgd"},
        {"compression": "powersgd", "mesh": Mesh(pp=2)},
    ],
    ids=str,
)
def test_trainings(settings, plain):
    ranks = 4 if "mesh" in settings else 2
    done = mock.run(ranks, lambda c: trained(c, **settings))
    assert len({weights for weights, _, _ in done}) == 1
    _, history, trainer = done[0]
    assert history.train_loss == pytest.approx(plain, abs=0.15)  # 2.3 at the start
    if "mesh" not in settings:  # activations are not compressed
        # parameters that come back from their owners are not compressed
        most = 0.76 if "zero" in settings else 0.7
        assert history.bytes_per_step < most * history.bytes_per_step_uncompressed
        assert trainer.bytes_per_step == pytest.approx(history.bytes_per_step, rel=0.1)


# --- a loop of one's own ---


def test_gradient_compression_is_smaller_and_loses_nothing():
    rng = np.random.default_rng(0)
    compression = GradientCompression(compression_ratio=0.1)
    sent, total = 0, 0
    for _ in range(4):
        gradients = {
            "w": rng.standard_normal((30, 20)).astype(np.float32),
            "b": rng.standard_normal(3).astype(np.float32),
        }
        compressed = compression.compress_gradients(gradients)
        assert sum(s.nbytes for s in compressed.values()) == 8 * (60 + 1)
        back = compression.decompress_gradients(compressed)
        assert {k: v.shape for k, v in back.items()} == {"w": (30, 20), "b": (3,)}
        assert np.count_nonzero(back["w"]) == 60
        sent, total = sent + back["w"].astype(np.float64), total + gradients["w"]
    assert np.allclose(sent + compression._residuals["w"].reshape(30, 20), total, atol=1e-5)


def test_gradient_compression_of_a_list_without_feedback():
    compression = GradientCompression(0.5, error_feedback=False)
    for _ in range(2):
        (back,) = compression.decompress_gradients(
            compression.compress_gradients([np.array([[1.0, -4.0]])])
        )
        assert back.tolist() == [[0.0, -4.0]]


def test_a_gradient_that_is_none_stays_none():
    compression = GradientCompression(1.0)
    for gradients in ([np.ones(3), None], {"w": np.ones(3), "unused": None}):
        back = compression.decompress_gradients(compression.compress_gradients(gradients))
        first, none = back if isinstance(back, list) else back.values()
        assert first.tolist() == [1, 1, 1] and none is None


def test_gradient_compression_refuses():
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        GradientCompression(compression_ratio=0)
    with pytest.raises(ConfigError, match="give a dict or a list"):
        GradientCompression().compress_gradients(np.zeros(3))
    compression = GradientCompression()
    compression.compress_gradients([np.zeros(3)])
    with pytest.raises(ConfigError, match="had 3 before"):
        compression.compress_gradients([np.zeros(4)])


def test_a_step_that_is_not_finite_is_taken_by_no_rank():
    def rank(comm):
        model = nn.models.build("mlp", seed=1)
        trainer = DistributedTrainer(
            model,
            optim.SGD(lr=0.1),
            shard_size=8,
            device="cpu",
            threads=1,
            comm=comm,
            compression="topk",
        )
        x = np.ones((32, 1, 28, 28), np.float32)
        x[20] = 3e38  # overflows in the first layer
        before = trainer.weights_sha256()
        with pytest.raises(NumericsError):
            trainer.fit([(x, np.zeros(32, np.int32))])
        return trainer.weights_sha256() == before

    assert mock.run(2, rank) == [True, True]


@pytest.mark.parametrize(
    ("settings", "measures"),
    [({"compression": "topk"}, False), ({"reduction": "ring"}, False), ({}, True)],
)
def test_where_bits_depend_on_the_cut_of_a_pipeline_it_does_not_depend_on_time(
    monkeypatch, settings, measures
):
    seen = []
    seconds = costs.seconds
    monkeypatch.setattr(costs, "seconds", lambda *given: seen.append(0) or seconds(*given))

    def train(comm):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 9), nn.ReLU(), nn.Linear(9, 30), nn.Linear(30, 10)
        )
        trainer = DistributedTrainer(
            model,
            optim.SGD(lr=0.1),
            comm=comm,
            threads=1,
            shard_size=8,
            mesh=Mesh(dp=2, pp=2),
            **settings,
        )
        trainer.fit(
            data.DataLoader(data.load("mnist", train=True).take(64), batch_size=64), steps=1
        )

    mock.run(4, train)
    assert bool(seen) == measures


@pytest.mark.parametrize(
    "settings", [{"compression": "topk", "compression_ratio": 0.1}, {"compression": "powersgd"}]
)
def test_a_pipeline_goes_on_with_what_its_stages_have_not_sent(tmp_path, settings):
    """Stages have gradients of other sizes, so other remainders; on another mesh they would be
    of no use.
    """

    def train(comm, mesh, steps, folder):
        nn.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 9), nn.ReLU(), nn.Linear(9, 30), nn.Linear(30, 10)
        )
        trainer = DistributedTrainer(
            model,
            optim.SGD(lr=0.1),
            comm=comm,
            device="cpu",
            threads=1,
            shard_size=8,
            mesh=mesh,
            **settings,
        )
        loader = data.DataLoader(data.load("mnist", train=True).take(200), batch_size=64)
        trainer.fit(
            loader, epochs=2, steps=steps, **({"checkpoint_dir": tmp_path} if folder else {})
        )
        return trainer.weights_sha256()

    pipeline = Mesh(dp=2, pp=2)
    expected = mock.run(4, train, pipeline, None, False)
    mock.run(4, train, pipeline, 3, True)
    with pytest.raises(
        ConfigError,
        match=r"dp\(2\) x pp\(2\) x tp\(1\) with compression.*give the same --dp and --pp",
    ):
        mock.run(4, train, Mesh(dp=4, pp=1), None, True)
    assert mock.run(4, train, pipeline, None, True) == expected
