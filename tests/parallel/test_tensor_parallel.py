"""Tensor parallelism: a rewritten program has the bits of the program, whatever the number of
ranks.

Ranks are threads (comm.mock) that run their rewritten programs side by side: native records in
pieces, exchanges in between, each with memory of its own that holds NaN where nothing was written.
"""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest

from odyssey import data, device, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core import native
from odyssey.core.arena import Arena
from odyssey.core.program import Range, Record, Recorder, Slot, encode, fuse, plan_memory, using
from odyssey.core.tensor import empty, layout_of, make
from odyssey.errors import ConfigError
from odyssey.parallel import tensor_parallel as tp
from odyssey.parallel.mesh import Mesh
from odyssey.parallel.plan import nodes
from odyssey.parallel.stages import partition
from odyssey.parallel.tensor_exchange import TensorExchange
from odyssey.train.trainer import DistributedTrainer

SIZES = (1, 2, 3, 4)


class ThreeLinears(nn.Module):
    """Sizes that no number of ranks divides; the middle layer's input lies split."""

    def __init__(self, i=37, hidden=(29, 23), o=7):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(i, hidden[0]), nn.Linear(*hidden, bias=False)
        self.fc3 = nn.Linear(hidden[1], o)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.fc3(F.tanh(self.fc2(F.tanh(self.fc1(x)))))


class Branches(nn.Module):
    """A split activation with several users, one of which wants it whole; a weight that is used
    twice.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 18), nn.Linear(18, 18), nn.Linear(18, 5)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        h = F.relu(self.a(x))
        h = F.sigmoid(self.b(h)) + h
        return self.c(F.dropout(F.sigmoid(self.b(h)) * h, 0.25))


class Convolutions(nn.Module):
    """Strides, padding, average pools, channels that do not divide, a convolution without bias."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(5, 7, 3, stride=2, padding=1, bias=False)
        self.fc = nn.Linear(7 * 2 * 2, 4)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        x = F.avg_pool2d(F.tanh(self.conv1(x)), 2)
        return self.fc(F.flatten(F.avg_pool2d(F.relu(self.conv2(x)), 2, 1)))


class Frozen(ThreeLinears):
    """A weight without a gradient, and a bias without one."""

    def __init__(self):
        super().__init__()
        self.fc2.weight.requires_grad = False
        self.fc1.bias.requires_grad = False


class Checkpointed(ThreeLinears):
    """The middle of the network is computed again in the backward pass."""

    def forward(self, x):
        return self.fc3(nn.checkpoint(lambda v: F.tanh(self.fc2(F.tanh(v))))(self.fc1(x)))


class Stages(nn.Module):
    """Two places; what goes over and back is split on both sides, and used twice on the first."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(20, 18), nn.Linear(18, 18)
        self.c, self.d = nn.Linear(18, 12) @ device(1), nn.Linear(12, 4) @ device(1)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        h = F.relu(self.a(x))
        x = (self.b(h) + h).to(device(1))
        return self.d(F.tanh(self.c(x)))


class Attentive(nn.Module):
    """Random attention: of any heads, from one layer or three, over T tokens or others', with
    what may be around it.
    """

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(f"attention {seed}")
        self.heads, self.tokens = rng.choice([1, 2, 3, 4, 4, 8]), rng.randint(2, 20)
        self.width, self.kind = (
            self.heads * rng.randint(1, 6),
            rng.choice(["qkv", "qkv", "q, k, v", "of few", "q"]),
        )
        self.past, self.p, bias = rng.choice([0, None]), rng.choice([0.0, 0.3]), rng.random() < 0.5
        self.between = rng.choice([None, None, None, F.gelu, F.relu, lambda x: F.dropout(x, 0.2)])
        layers, each = {"qkv": (1, 3 * self.width), "q": (1, self.width)}.get(
            self.kind, (3, self.width)
        )
        self.qkv = nn.ModuleList(nn.Linear(self.width, each, bias) for _ in range(layers))
        self.out, self.checkpointed = nn.Linear(self.width, self.width, bias), rng.random() < 0.2
        self.twice = rng.random() < 0.15  # somebody else needs all of y
        self.head, self.loss = nn.Linear(self.width, 5), nn.CrossEntropyLoss()

    def attention(self, x):
        few = x[:, : max(self.tokens // 2, 1)] if self.kind == "of few" else x
        given = [layer(x if i == 0 else few) for i, layer in enumerate(self.qkv)]
        given = [self.between(t) if self.between else t for t in given] + [
            x if self.kind == "q" else None
        ] * 2
        y = F.attention(*given[:3], self.heads, self.past, dropout=self.p)
        return self.out(y) + y if self.twice else self.out(y)

    def forward(self, x):
        x = x.reshape(x.shape[0], self.tokens, self.width)
        x = x + (nn.checkpoint(self.attention, x) if self.checkpointed else self.attention(x))
        return self.head(x.mean(1))


ATTENTIVE = {f"attention {seed}": functools.partial(Attentive, seed) for seed in range(24)}
MODELS = {
    "lenet5": (lambda: nn.models.build("lenet5", seed=1), (1, 28, 28)),
    "mlp": (lambda: nn.models.build("mlp", seed=1), (1, 28, 28)),
    "convnet": (lambda: nn.models.build("convnet", (1, 12, 12), seed=1), (1, 12, 12)),
    "three linears": (ThreeLinears, (37,)),
    "branches": (Branches, (20,)),
    "convolutions": (Convolutions, (2, 10, 10)),
    "frozen": (Frozen, (37,)),
    "checkpointed": (Checkpointed, (37,)),
    "stages": (Stages, (20,)),
    **{name: (make, (make().tokens * make().width,)) for name, make in ATTENTIVE.items()},
}


def record(
    name: str, n: int = 32, precision: str = "fp32", train: bool = True
) -> tuple[Arena, list[Record]]:
    """The program of one shard of n samples, unfused, as an engine records it."""
    build, shape = MODELS[name]
    nn.manual_seed(3)
    model = build().train(train)
    arena = Arena.of(model.named_parameters())
    recorder = Recorder(arena, 4 * arena.size, n, precision)
    with using(recorder):
        layout = layout_of(n)
        x = empty((n, *shape), layout)
        recorder.emit(
            "input",
            x.memory,
            x.groups,
            x.features,
            shape[0] if len(shape) > 1 else 1,
            layout=layout,
        )
        recorder.close(x.device)
        y = model(x)
        labels = make(recorder.alloc(4 * x.groups * 16), (n,), layout, np.int32)
        labels.device = y.device
        recorder.emit("array", labels.memory, x.groups, 1, 0, -1, layout=layout)
        recorder.close(labels.device)
        loss = model.loss(y, labels)
        recorder.emit("stats", recorder.stats, loss.memory, recorder.first_stats, 0)
        recorder.close(loss.device)
        if train:
            loss.backward()
    return arena, recorder.records


class Rank:
    """Runs a program of one rank over shards, each with a workspace and a gradient buffer."""

    def __init__(
        self, arena: Arena, records: list[Record], shape: tuple[int, ...], shards: int, n: int
    ) -> None:
        size = plan_memory(records)
        self.works = [native.aligned(size, np.uint8) for _ in range(shards)]
        for work in self.works:
            work.view(np.float32)[:] = np.nan
        self.grads = [native.aligned(arena.size + native.library().stats) for _ in range(shards)]
        self.records, self.arena = records, arena
        rng = np.random.default_rng(0)
        total = n * shards
        self.images = rng.standard_normal((total, int(np.prod(shape)))).astype(np.float32)
        self.labels = rng.integers(0, 4, total).astype(np.int32)
        self.arrays = np.array([self.labels.ctypes.data], np.int64)
        self.rows = np.arange(total, dtype=np.int64)
        channels = shape[0] if len(shape) > 1 else 1
        self.scale, self.shift = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        self.contexts = []
        for s in range(shards):
            valid = n if s + 1 < shards else n - 3  # the last is partly filled
            self.contexts.append(
                native.Context(
                    seed=5,
                    step=9,
                    first=s * n,
                    valid=valid,
                    images=self.images.ctypes.data,
                    arrays=self.arrays.ctypes.data,
                    rows=self.rows[s * n :].ctypes.data,
                    scale=self.scale.ctypes.data,
                    shift=self.shift.ctypes.data,
                )
            )

    def native(self, records: list[Record]) -> None:
        lib = native.library()
        for work, grads, context in zip(self.works, self.grads, self.contexts, strict=True):

            def operand(memory, work=work, grads=grads):
                if isinstance(memory, Slot):
                    return work.ctypes.data + memory.offset
                if isinstance(memory, Range) and memory.space == native.GRADS:
                    return grads.ctypes.data + memory.offset
                return memory.address

            table = np.zeros((len(records), lib.record), np.int64)
            for row, r in zip(table, records, strict=True):
                row[: len(r.args) + 1] = encode(lib, r.op, r.args, operand, r.layout)
            assert lib.run(table.ctypes.data, len(table), context) == -1, "a record was refused"

    def run(self, comm=None) -> list[np.ndarray]:
        for other, run in itertools.groupby(
            self.records, lambda record: isinstance(record, tp.Pseudo)
        ):
            if not other:
                self.native(list(run))
            for record in run if other else ():
                TensorExchange(comm, record, self.works)()
        return self.grads


def spoil(arena: Arena, ownership: dict[str, tp.Piece], rank: int) -> None:
    """Parameters that other ranks train become NaN: here they would be out of date."""
    for name, piece in ownership.items():
        values = arena.view(arena.params, name)
        mine = piece.of(values, rank).copy()
        values[...] = np.nan
        piece.of(values, rank)[...] = mine


def bits(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint32)


@pytest.mark.parametrize("order", ["rewritten, then fused", "fused, then rewritten"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_same_bits(name, size, order, shards=2, n=32):
    """Loss, and every gradient, on every rank: its pieces, nothing beside them, and the others'
    to the bit.
    """
    arena, records = record(name, n)
    shape = MODELS[name][1]
    wanted = Rank(arena, fuse(records), shape, shards, n).run()
    assert all(np.isfinite(w).all() for w in wanted)

    recordings = [record(name, n) for _ in range(size)]  # placing a program writes into its slots

    def rank(comm):
        own, given = recordings[comm.rank]
        if order == "rewritten, then fused":
            split = tp.rewrite(given, comm.rank, size)
            mine = fuse(split.records)
        else:
            split = tp.rewrite(fuse(given), comm.rank, size)
            mine = split.records
        spoil(own, split.ownership, comm.rank)
        return split, Rank(own, mine, shape, shards, n).run(comm), comm.rank

    for split, grads, t in mock.run(size, rank):
        for got, right in zip(grads, wanted, strict=True):
            assert np.array_equal(bits(got[arena.size :]), bits(right[arena.size :])), (
                "loss and counts"
            )
            for name_, piece in split.ownership.items():
                a, b = arena.view(got, name_), arena.view(right, name_)
                assert np.array_equal(bits(piece.of(a, t)), bits(piece.of(b, t))), name_
                rest = a.copy()
                piece.of(rest, t)[...] = 0
                assert not rest.any(), f"{name_}: a gradient outside of the rank's piece"
        assert set(split.ownership) == {name_ for name_, _ in arena.named}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rewritten_program_can_be_cut_into_stages(size, fused):
    """Every exchange is in a part of the place where its values lie; the parts one after the
    other are the program.
    """
    recordings = [record("stages") for _ in range(size + 1)]
    arena, records = recordings.pop()
    wanted = Rank(arena, fuse(records), (20,), 2, 32).run()

    def rank(comm):
        own, given = recordings[comm.rank]
        split = tp.rewrite(given, comm.rank, size)
        parts = partition(fuse(split.records) if fused else split.records, lambda r: r.device)
        assert [(p.phase, p.place) for p in parts] == [
            ("forward", 0),
            ("forward", 1),
            ("backward", 1),
            ("backward", 0),
        ]
        for part in parts:
            meetings = [r for r in part.records if isinstance(r, tp.Pseudo)]
            assert meetings and all(r.device == part.place for r in meetings)
        return split, Rank(own, [r for p in parts for r in p.records], (20,), 2, 32).run(comm)

    for t, (split, grads) in enumerate(mock.run(size, rank)):
        for got, right in zip(grads, wanted, strict=True):
            for name, piece in split.ownership.items():
                a, b = (piece.of(arena.view(flat, name), t) for flat in (got, right))
                assert np.array_equal(bits(a), bits(b)), name


@pytest.mark.parametrize("size", [2, 3, 4])
def test_another_program_is_split_like_the_first(size):
    """Without dropout fc1's input would lie split.

    A rank that follows the training reads only what it trains.
    """
    shape = MODELS["convnet"][1]
    recordings = [record("convnet") for _ in range(size)]
    evaluations = [record("convnet", train=False) for _ in range(size + 1)]
    arena, records = evaluations.pop()
    wanted = Rank(arena, fuse(records), shape, 2, 32).run()
    assert (
        dict((layer.name, layer.split) for layer in tp.rewrite(records, 0, size).layers)["fc1"]
        == "inputs"
    )

    def rank(comm):
        ownership = tp.rewrite(recordings[comm.rank][1], comm.rank, size).ownership
        own, given = evaluations[comm.rank]
        spoil(own, ownership, comm.rank)
        split = tp.rewrite(fuse(given), comm.rank, size, like=ownership)
        assert split.ownership == ownership
        assert [layer.split for layer in split.layers] == ["outputs"] * 4
        return Rank(own, split.records, shape, 2, 32).run(comm)

    for grads in mock.run(size, rank):
        for got, right in zip(grads, wanted, strict=True):
            assert np.array_equal(bits(got[arena.size :]), bits(right[arena.size :])), (
                "loss and counts"
            )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_makes_the_same_exchanges(size):
    _, records = record("lenet5")
    lists = []
    for t in range(size):
        exchanges = [r for r in tp.rewrite(records, t, size).records if isinstance(r, tp.Pseudo)]
        lists.append(
            [
                (r.op, r.layer, r.phase, getattr(r, "ranges", None), getattr(r, "floats", 0))
                for r in exchanges
            ]
        )
    assert lists[0] and all(one == lists[0] for one in lists)


def test_lenet_alternates_outputs_and_inputs():
    """conv2's output goes through ReLU and pool into fc1 without being gathered, fc2's into fc3."""
    _, records = record("lenet5")
    split = tp.rewrite(records, 0, 2)
    assert [(layer.name, layer.split) for layer in split.layers] == [
        ("conv1", "outputs"),
        ("conv2", "outputs"),
        ("fc1", "inputs"),
        ("fc2", "outputs"),
        ("fc3", "inputs"),
    ]
    exchanges = [(r.op, r.layer, r.phase) for r in split.records if isinstance(r, tp.Pseudo)]
    assert exchanges == [
        ("tp_gather", "conv1", "forward"),
        ("tp_sum", "fc1", "forward"),
        ("tp_sum", "fc3", "forward"),
        ("tp_sum", "fc2", "backward"),
        ("tp_slice", "conv2", "backward"),  # conv1 needs its own channels only
    ]
    assert split.layers[0].forward == 4 * 2 * 16 * 3 * 14 * 14, (
        "half of the pooled channels of two groups"
    )
    assert split.layers[2].forward == 4 * 2 * 16 * 120
    assert split.ownership["fc1.weight"] == tp.Piece(1, ((0, 200), (200, 400)))
    assert split.ownership["fc1.bias"] == tp.Piece()
    assert split.ownership["conv2.bias"] == tp.Piece(0, ((0, 8), (8, 16)))


def test_work_is_divided():
    """Each of two ranks has half of the multiply-adds of the forward products."""

    def products(records):
        total = 0
        for r in records:
            if r.op == "conv2d_forward":
                g, c, h, w, k, height, width, step, _ = r.args[5:]
                total += (
                    g
                    * k
                    * ((h - height) // step + 1)
                    * ((w - width) // step + 1)
                    * c
                    * height
                    * width
                )
            elif r.op == "linear_forward":
                g, i, o, _ = r.args[5:]
                total += g * i * o
            elif r.op == "linear_forward_parts":
                g, i, o, _, parts = r.args[3:]
                total += g * i * o * parts // 4
        return total

    _, records = record("lenet5")
    assert [products(tp.rewrite(records, t, 2).records) for t in range(2)] == [
        products(records) // 2
    ] * 2


def test_description():
    _, records = record("mlp")
    split = tp.rewrite(records, 0, 2)
    lines = tp.describe(split.layers).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["fc1", "512", "x", "784", "outputs", "0-256", "256-512", "-", "-"]
    assert lines[2].split() == ["fc2", "10", "x", "512", "inputs", "0-256", "256-512", "1.2", "-"]
    assert lines[3].split() == ["total", "1.2", "-"]
    assert tp.describe(split.layers, shards=8).splitlines()[2].endswith("10.0             -")


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_owns_one_node(size):
    """So one partial sum per rank is enough, and a tree over ranks is the tree over parts."""
    for t in range(size):
        assert len(nodes(tp.parts(t, size), tp.PARTS)) == 1
    for n in range(20):
        runs = [tp.owned(n, t, size) for t in range(size)]
        assert [a for a, _ in runs] + [n] == [0] + [b for _, b in runs]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("floats", [16, 64 * 1024 // 4, 64 * 1024 // 4 + 16, 40000])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_small_and_large(size, floats, shards):
    """Both ways of exchanging nodes add along the tree."""
    rng = np.random.default_rng(floats)
    nodes_ = rng.standard_normal((size, shards, floats)).astype(np.float32)
    right = nodes_[0] + nodes_[1]
    if size == 3:
        right = right + nodes_[2]
    elif size == 4:
        right = right + (nodes_[2] + nodes_[3])

    def rank(comm):
        y, mine = Slot(4 * floats), Slot(4 * floats)
        r = tp.TreeSum([y, mine], floats, size)
        bytes_ = plan_memory([r])
        works = [native.aligned(bytes_, np.uint8) for _ in range(shards)]
        exchange = TensorExchange(comm, r, works)
        for _ in range(2):
            for s, work in enumerate(works):
                work[mine.offset :].view(np.float32)[:floats] = nodes_[comm.rank, s]
                work[y.offset :].view(np.float32)[:floats] = np.nan
            exchange()
        return [work[y.offset :].view(np.float32)[:floats].copy() for work in works]

    for results in mock.run(size, rank):
        assert np.array_equal(bits(np.array(results)), bits(right))


def test_refusals():
    _, records = record("lenet5")
    for rank, size in ((0, 5), (2, 2), (0, 0), (-1, 2)):
        with pytest.raises(ConfigError, match="--tp must be 1 to 4"):
            tp.rewrite(records, rank, size)
    with pytest.raises(ConfigError, match="computed in rows"):
        tp.rewrite(record("mlp", n=3)[1], 0, 2)
    with pytest.raises(ConfigError, match="only products in fp32"):
        tp.rewrite(record("mlp", precision="bf16")[1], 0, 2)


def test_layers_too_narrow_stay_whole():
    MODELS["narrow"] = (lambda: ThreeLinears(4, (8, 3), 2), (4,))
    try:
        arena, records = record("narrow")
        split = tp.rewrite(records, 0, 4)
        assert [layer.split for layer in split.layers] == ["outputs", "inputs", "whole"]
        assert split.ownership["fc3.weight"] == tp.Piece()
        MODELS["narrower"] = (lambda: ThreeLinears(4, (3, 2), 2), (4,))
        with pytest.raises(ConfigError, match="no layer can be split over 4 ranks"):
            tp.rewrite(record("narrower")[1], 0, 4)
    finally:
        MODELS.pop("narrow")
        MODELS.pop("narrower", None)


def test_a_shared_layer_smaller_than_a_vector_of_lanes():
    """Its part on a rank is 8 numbers of a bucket of 16."""
    rng = np.random.default_rng(0)
    samples = data.arrays(rng.normal(size=(64, 2)).astype(np.float32), np.arange(64) % 8, classes=8)

    def run(comm=None, **settings):
        model = nn.Sequential(nn.Linear(2, 8, bias=False))
        model[0].weight.data[...] = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
        t = DistributedTrainer(model, optim.AdamW(lr=0.01), shard_size=8, comm=comm, **settings)
        t.fit(data.DataLoader(samples, batch_size=32), epochs=1, verbose=False)
        return t.weights_sha256()

    wanted = run()
    assert mock.run(4, lambda comm: run(comm, mesh=Mesh(dp=2, tp=2), zero=1)) == [wanted] * 4
