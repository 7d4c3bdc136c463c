"""Runs of shards (docs/kernels.md): shards that a thread computes together have the bits of shards
that are computed one by one.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from test_beginnings import RNG_X, RNG_Y, Odd

from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core import native
from odyssey.core.program import OwnMemory, encode
from odyssey.engine import shard_runs
from odyssey.engine.direct import DirectRunner
from odyssey.errors import OdysseyError

LENGTHS = (1, 2, 3, 5, 8, 16)
# Those in which this machine's kernels are joined.
DTYPES = next(
    trait.removeprefix("joined:").split("+")
    for trait in native.library().ops["linear_forward"].traits
    if trait.startswith("joined:")
)


@pytest.fixture(autouse=True)
def by_the_rule():
    """Tests that force a length leave none behind."""
    yield
    shard_runs.forced_length = None


# --- the joined kernels ---------------------------------------------------------------------------


class ShardRun(ctypes.Structure):
    """Mirrors `ShardRun` in mojo/kernels/record.mojo."""

    _fields_ = (
        *native.numbers("shards apart sum before"),
        ("earlier", ctypes.c_int64 * 4),
    )


class Layer:
    """A layer with its operands, each in memory for several shards."""

    def __init__(self, op, outputs, sizes, shards, dtype):
        lib = native.library()
        self.op = lib.ops[op]
        self.sizes, self.shards, self.dtype = sizes, shards, dtype
        self.outputs = outputs  # floats of each output of a shard
        rng = np.random.default_rng(sum(sizes) + shards)
        G, inputs, out = sizes[:3]
        floats = {"x": G * inputs * 16, "dy": G * out * 16, "w": inputs * out, "b": out}
        joined = lib.scratch(self.op, sizes, "lanes", dtype, shards)
        alone = lib.scratch(self.op, sizes, "lanes", dtype)
        # One workspace for each shard: outputs, inputs, scratch memory. Weights are in the first.
        self.places, position = {}, 0
        for name in self.op.outputs:
            self.places[name] = position
            position += -(-outputs[name] // 16) * 16
        for name in self.op.inputs:
            self.places[name] = position
            position += -(-floats.get(name, max(joined, alone) // 4) // 16) * 16 + 16
        self.work = native.aligned(shards * position).reshape(shards, position)
        self.apart = position
        self.work[:] = rng.standard_normal(self.work.shape)

    def record(self, shard, *, joined):
        lib = native.library()
        memory = [
            OwnMemory(self.work[0 if name in ("w", "b") else shard, at:])
            for name, at in self.places.items()
        ]
        made = np.zeros(lib.record, np.int64)
        args = [*memory, *self.sizes]
        encoded = encode(lib, self.op.name, args, lambda m: m.address, "lanes", self.dtype)
        made[: len(encoded)] = encoded
        if joined:
            made[0] |= 1 << native.JOINED
        elif self.op.added:
            made[0] |= 1 << native.BEGINS
        return made

    def run(self, record, run=None):
        context = native.Context()
        if run is not None:
            context.shard_run = ctypes.addressof(run)
        native.library().run(record.ctypes.data, 1, context)

    def taken(self, name, shard):
        at = self.places[name]
        return self.work[shard, at : at + self.outputs[name]].copy()


def along_the_tree(terms):
    """The sum of arrays as a plan adds them."""
    if len(terms) == 1:
        return terms[0]
    left = 1 << (len(terms) - 1).bit_length() - 1
    return along_the_tree(terms[:left]) + along_the_tree(terms[left:])


# groups, inputs, outputs: of one vector, of odd sizes, of several panels, chunks and blocks
SIZES = [
    (1, 5, 3),
    (1, 97, 401),
    (2, 33, 50),
    (2, 784, 100),
    (3, 100, 7),
    (5, 81, 26),
    (8, 40, 385),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", LENGTHS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_of_a_run_are_those_of_its_shards(sizes, shards, dtype):
    G, inputs, outputs = sizes
    if G * shards > shard_runs.MAX_GROUPS:
        shards = shard_runs.MAX_GROUPS // G
    for op, outs, more in (
        ("linear_forward", {"y": G * outputs * 16}, (1,)),
        ("linear_backward_input", {"dx": G * inputs * 16}, ()),
    ):
        layer = Layer(op, outs, (*sizes, *more), shards, dtype)
        name = next(iter(outs))
        alone = []
        for shard in range(shards):
            layer.run(layer.record(shard, joined=False))
            alone.append(layer.taken(name, shard).tobytes())
        layer.work[:, layer.places[name] : layer.places[name] + outs[name]] = np.nan
        run = ShardRun(shards=shards, apart=layer.apart)
        layer.run(layer.record(0, joined=True), run)
        assert [layer.taken(name, shard).tobytes() for shard in range(shards)] == alone, op


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", LENGTHS)
@pytest.mark.parametrize("sizes", [*SIZES, (9, 50, 30), (16, 70, 390)], ids=str)
def test_gradients_of_a_run_are_the_sum_of_its_shards(sizes, shards, dtype, before):
    G, inputs, outputs = sizes
    shards = max(min(shards, shard_runs.MAX_GROUPS // G), 1)
    outs = {"dw": inputs * outputs, "db": outputs}
    layer = Layer("linear_backward_weight", outs, sizes, shards, dtype)
    alone = {name: [] for name in outs}
    for shard in range(shards):
        layer.run(layer.record(shard, joined=False))
        for name in outs:
            alone[name].append(layer.taken(name, shard))
    # Gradient buffers: where the sum goes, then the sums of earlier shards.
    buffers = native.aligned((1 + before) * layer.apart).reshape(1 + before, layer.apart)
    buffers[:] = np.random.default_rng(before).standard_normal(buffers.shape)
    expected = {}
    for name, at in layer.places.items():
        if name in outs:
            expected[name] = along_the_tree(alone[name])
            for earlier in buffers[1:]:
                expected[name] = expected[name] + earlier[at : at + outs[name]]
    buffers[0] = np.nan
    run = ShardRun(shards=shards, apart=layer.apart, sum=buffers.ctypes.data, before=before)
    for t in range(before):
        run.earlier[t] = buffers[1 + t].ctypes.data
    record = layer.record(0, joined=True)
    for i, name in enumerate(outs, start=1):  # operands that a program finds in gradient buffers
        record[i] = native.GRADS << 56 | 4 * layer.places[name]
    layer.run(record, run)
    for name in outs:
        at = layer.places[name]
        assert buffers[0, at : at + outs[name]].tobytes() == expected[name].tobytes(), name
    assert np.isnan(buffers[0, layer.places["x"] :]).all(), "nothing else is written"


# --- trainings ------------------------------------------------------------------------------------


class Twice(nn.Module):
    """A layer that is called twice, a layer without a bias, a residual connection."""

    def __init__(self) -> None:
        self.first, self.twice = nn.Linear(64, 48), nn.Linear(48, 48)
        self.bare, self.out = nn.Linear(48, 40, bias=False), nn.Linear(40, 10)

    def forward(self, x):
        x = F.relu(self.first(x.reshape(x.shape[0], -1)))
        x = self.twice(F.relu(self.twice(x))) + x
        return self.out(F.relu(self.bare(x)))


def trained(comm, model, settings, forced, batch_size=44):
    shard_runs.forced_length = forced
    nn.manual_seed(3)
    trainer = DistributedTrainer(
        model(), optim.SGD(lr=0.1, momentum=0.9), comm=comm, **{"threads": 1, **settings}
    )
    loader = data.DataLoader(data.arrays(RNG_X, RNG_Y, classes=10), batch_size=batch_size)
    losses = [trainer.train_step(batch) for batch in loader]
    return trainer.weights_sha256(), losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 5, 8, 16])
@pytest.mark.parametrize("model", [Odd, Twice])
def test_trainings_have_the_same_bits_with_runs_of_any_length(model, size, precision):
    """Tied and frozen weights, layers without a bias, shards in rows, a last shard with fewer
    samples.
    """
    settings = {"precision": precision, "shard_size": size}
    one_by_one = mock.run(1, trained, model, settings, 0)
    for length in LENGTHS:
        for threads in (1, 3):
            found = mock.run(1, trained, model, {**settings, "threads": threads}, length)
            assert found == one_by_one, (length, threads)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("settings", [{}, {"zero": 1}, {"zero": 2}, {"rebalance": True}], ids=str)
def test_ranks_have_the_same_bits_with_runs(settings, ranks):
    settings = {**settings, "shard_size": 8}
    one_by_one = mock.run(1, trained, Twice, {"shard_size": 8}, 0)
    for length in (2, 3, 8):
        assert set(map(str, mock.run(ranks, trained, Twice, settings, length))) == {
            str(one_by_one[0])
        }


def wide():
    """A network whose weights are larger than the activations of a shard."""
    hidden = nn.Linear(400, 400)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), hidden, nn.ReLU(), nn.Linear(400, 10)
    )


def narrow():
    """A network whose activations are larger than its weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def prepared(model, **settings):
    nn.manual_seed(0)
    trainer = DistributedTrainer(
        model(), optim.SGD(lr=0.1), backend="local", **{"threads": 1, "shard_size": 16, **settings}
    )
    x = np.random.default_rng(0).standard_normal((128, 1, 8, 8)).astype(np.float32)
    made = data.arrays(x, np.arange(128) % 10, classes=10)
    for batch in data.DataLoader(made, batch_size=128):
        trainer.train_step(batch)
    (runner,) = trainer.stepper.engine.runners
    assert isinstance(runner, DirectRunner)
    return trainer, runner


def test_wide_layers_run_together_and_need_one_gradient_buffer():
    trainer, runner = prepared(wide)
    assert runner.run_length == 8, "8 shards of one group"
    assert [str(action) for action in runner.plan.threads[0]] == ["b0 = shards 0 to 7"]
    shard_runs.forced_length = 0
    one_by_one, _ = prepared(wide)
    found, before = trainer.memory()["gradients"], one_by_one.memory()["gradients"]
    assert before == 4 * runner.floats * 4, "a buffer for each level of the tree"
    # One buffer, and for each shard the statistics.
    assert found < 1.05 * before / 4
    assert trainer.weights_sha256() == one_by_one.weights_sha256()


def test_threads_and_small_weights_shorten_runs():
    assert prepared(wide, threads=2)[1].run_length == 4
    assert prepared(wide, threads=3)[1].run_length == 1, "3, 3 and 2 shards"
    assert prepared(wide, shard_size=128)[1].run_length == 0, "one shard"
    assert prepared(narrow)[1].run_length == 0


def test_the_plan_says_which_gradients_are_added_up_shard_by_shard():
    trainer, runner = prepared(wide)
    assert trainer.plan == "threads compute up to 8 shards together"
    shard_runs.forced_length = 4
    trainer, runner = prepared(Twice)
    assert trainer.plan == (
        "threads compute up to 4 shards together, but add up these gradients shard by shard, as "
        "several layers use them: twice.weight, twice.bias"
    )
    assert runner.step.own_floats >= 48 * 48 + 48
    shard_runs.forced_length = 0
    assert prepared(Twice)[0].plan == ""


def test_a_plan_that_was_prepared_is_kept_when_weights_are_frozen():
    """Programs for the same batches share their buffers, whatever the rule says of each."""
    hashes = []
    for forced in (0, None):
        shard_runs.forced_length = forced
        nn.manual_seed(0)
        model = wide()
        trainer = DistributedTrainer(
            model, optim.SGD(lr=0.1), backend="local", threads=1, shard_size=16
        )
        made = data.arrays(RNG_X[:128], RNG_Y[:128], classes=10)
        for frozen in (False, True, False):
            for parameter in list(dict(model.named_parameters()).values())[:2]:
                parameter.requires_grad = not frozen
            for batch in data.DataLoader(made, batch_size=128):
                trainer.train_step(batch)
        lengths = {runner.run_length for runner in trainer.stepper.engine.runners}
        assert lengths == {0 if forced == 0 else 8}
        hashes.append(trainer.weights_sha256())
    assert hashes[0] == hashes[1]


def test_the_first_shard_that_fails_is_reported():
    """Shards 3 and 6 have a label that the model has no output for."""
    messages = []
    for length in (0, 2, 8):
        shard_runs.forced_length = length
        x, y = RNG_X[:128], RNG_Y[:128].copy()
        y[3 * 16 + 5], y[6 * 16] = 12, 13
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            wide(), optim.SGD(lr=0.1), backend="local", threads=1, shard_size=16
        )
        with pytest.raises(OdysseyError) as raised:
            for batch in data.DataLoader(data.arrays(x, y, classes=10), batch_size=128):
                trainer.train_step(batch)
        messages.append(str(raised.value))
    assert messages[0] == messages[1] == messages[2]


def test_a_timeline_has_each_record_of_each_shard():
    """The time of a joined record is shared among its shards."""
    entries = {}
    for length in (0, 8):
        shard_runs.forced_length = length
        _, runner = prepared(wide)
        lib, step = native.library(), runner.step
        most = runner.shards * (step.records + 1)
        room = np.zeros(2 + 3 * most, np.int64)
        room[1] = most
        step.context.times = room.ctypes.data
        lib.step(step)
        step.context.times = 0
        rows = room[2 : 2 + 3 * int(room[0])].reshape(-1, 3)
        assert (rows[:, 1] <= rows[:, 2]).all()
        record = rows[:, 0] & (1 << 24) - 1
        entries[length] = sorted(rows[record < step.records, 0].tolist())
    assert entries[0] == entries[8]
