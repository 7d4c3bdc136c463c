"""Activation checkpointing: the same bits with fewer values kept, eager and recorded."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from odyssey import Tensor, checkpoint, data, device, nn, no_grad
from odyssey import functional as F
from odyssey.comm import Communicator
from odyssey.core.arena import Arena
from odyssey.core.program import Eager, fuse, using
from odyssey.engine.engine import Engine, Layout
from odyssey.errors import ConfigError, DeviceError, ShapeError


class Block(nn.Module):
    """Dropout, a value used twice, and several ops between input and output."""

    def __init__(self, width) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        y = self.drop(F.relu(self.fc1(x)))
        return F.tanh(self.fc2(y)) * y + F.sigmoid(x)


class Deep(nn.Module):
    """Blocks in a row; `how` wraps each, or all."""

    def __init__(self, how, blocks=6, width=32) -> None:
        super().__init__()
        nn.manual_seed(4)
        self.how = how
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = F.relu(self.first(F.flatten(x)))
        if self.how == "nested":
            half = len(self.blocks) // 2
            for part in (self.blocks[:half], self.blocks[half:]):
                x = checkpoint(lambda v, part=part: run(part, v, checkpoint), x)
        else:
            x = run(self.blocks, x, checkpoint if self.how == "each" else lambda b, v: b(v))
        return self.last(x)


def run(blocks, x, how):
    for block in blocks:
        x = how(block, x)
    return x


class Picture(nn.Module):
    """Convolutions with what the recorder fuses, and an output that goes two ways."""

    def __init__(self, how) -> None:
        super().__init__()
        nn.manual_seed(2)
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(16, 3)
        self.how = how

    def forward(self, x):
        def block(conv):
            def f(v):
                return F.max_pool2d(F.relu(conv(v)), 2, 1)

            return checkpoint(f) if self.how == "each" else f

        a = block(self.conv1)(x)
        b = block(self.conv2)(a)  # 2 x 2
        return self.fc(F.flatten(b + F.avg_pool2d(a, 2, 1)))


class Both(nn.Module):
    """A leaf weight and an outer value inside a checkpoint, used outside of it too, before and
    after.
    """

    def __init__(self, how) -> None:
        super().__init__()
        nn.manual_seed(9)
        self.fc1 = nn.Linear(16, 8)
        self.fc2 = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)
        self.how = how

    def forward(self, x):
        a = F.tanh(self.fc1(F.flatten(x)))
        c = F.sigmoid(a)

        def f(v):
            return self.fc2(v * c) + a * v  # a and c come from outside

        g = checkpoint(f) if self.how == "each" else f
        b = g(a)
        return self.out(self.fc2(b) * a + g(b) + c)


MODELS = {"deep": Deep, "picture": Picture, "both": Both}


def sums(model, train=True, execution="replay", samples=40, threads=1):
    layout = Layout(Communicator(), 1, threads, 16, "tree", execution)
    engine = Engine(
        model,
        nn.CrossEntropyLoss(),
        Arena.of(model.named_parameters()),
        layout,
        train=train,
        seed=3,
    )
    rng = np.random.default_rng(1)
    dataset = data.arrays(
        rng.standard_normal((samples, 1, 4, 4)).astype(np.float32), np.arange(samples) % 3
    )
    engine.run(data.Batch(dataset, np.arange(samples), 0, 0), 5)
    (runner,) = engine.runners
    return runner.result.tobytes(), runner.step.work_bytes, engine


# --- the same bits ---


@pytest.mark.parametrize("samples", [3, 40])
@pytest.mark.parametrize("execution", ["replay", "eager"])
@pytest.mark.parametrize(
    ("name", "how"), [("deep", "each"), ("deep", "nested"), ("picture", "each"), ("both", "each")]
)
def test_no_bit_changes(name, how, execution, samples):
    plain = sums(MODELS[name]("not"), samples=samples)[0]
    assert np.isfinite(np.frombuffer(plain, np.float32)).all()
    assert sums(MODELS[name](how), execution=execution, samples=samples)[0] == plain


def test_no_bit_changes_without_a_trainer():
    x = np.random.default_rng(0).standard_normal((20, 16)).astype(np.float32)
    grads = set()
    for how in ("not", "each", "nested"):
        model = Deep(how)
        with using(Eager()):  # counts dropouts from 0
            for _ in range(2):  # the second backward pass adds, and draws other masks
                F.cross_entropy(model(Tensor(x)), np.arange(20) % 3).backward()
        grads.add(b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
    assert len(grads) == 1


def test_leaves_get_their_gradients():
    def f(v):
        return F.tanh(v) * v

    rng = np.random.default_rng(0)
    values, weight = rng.standard_normal((2, 6, 5)).astype(np.float32)
    kept = []
    for g in (f, checkpoint(f), checkpoint(checkpoint(f))):
        x, w = Tensor(values, requires_grad=True), Tensor(weight, requires_grad=True)
        (g(x) * w + g(w) + x).sum().backward()
        kept.append((x.grad.numpy().tobytes(), w.grad.numpy().tobytes()))
    assert kept[0] == kept[1] == kept[2]


def test_dropout_draws_the_same_mask_again_and_the_next_one_another():
    x = Tensor(np.ones((8, 50)), requires_grad=True)
    y = checkpoint(lambda v: F.dropout(v, 0.5), x)
    z = F.dropout(x, 0.5)
    y.sum().backward()
    assert np.array_equal(x.grad.numpy(), y.numpy()) and not np.array_equal(y.numpy(), z.numpy())
    after = F.dropout(x, 0.5)
    assert not np.array_equal(after.numpy(), y.numpy()) and not np.array_equal(
        after.numpy(), z.numpy()
    )


# --- less memory ---


@pytest.mark.parametrize("how", ["each", "nested"])
def test_the_workspace_of_a_shard_shrinks(how):
    plain, small = sums(Deep("not", blocks=16))[1], sums(Deep(how, blocks=16))[1]
    assert small < 0.55 * plain, f"{small} of {plain} bytes"


def test_what_is_between_is_freed_in_eager_mode():
    alive = []

    def f(v):
        inner = F.tanh(v)
        alive.append(weakref.ref(inner))
        return F.relu(inner)

    x = Tensor(np.ones((20, 4)), requires_grad=True)
    y = checkpoint(f, x)
    assert alive[0]() is None
    y.sum().backward()
    assert len(alive) == 2 and alive[1]() is None, "computed once more"
    with no_grad():
        checkpoint(f, x)
    assert len(alive) == 3


def test_what_nobody_reads_is_not_repeated(monkeypatch):
    """The last product of a block is not needed for its own backward pass."""
    seen = []
    monkeypatch.setattr(
        "odyssey.engine.engine.fuse", lambda records: seen.append(list(records)) or fuse(records)
    )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = F.relu(self.fc1(F.flatten(x)))
            return self.fc3(checkpoint(lambda v: self.fc2(F.tanh(self.fc2(v))), x))

    sums(Net())
    records = seen[0]
    again = [r for r in records if r.recompute]
    assert [r.op for r in again] == ["linear_forward", "tanh_forward"]
    assert {r.phase for r in again} == {"backward"}
    first = {r.tag: r.op for r in records if r.phase == "forward"}
    assert all(first[r.tag] == r.op for r in again), "they belong to the op they repeat"
    for r in records:
        if r.phase == "backward" and not r.recompute and r.op.endswith("_backward_weight"):
            assert first[r.tag] == "linear_forward"


# --- modules, and what is refused ---


def test_a_module_keeps_its_names_and_hears_of_eval():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = checkpoint(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))

        def forward(self, x):
            return self.block(x)

    net = Net()
    assert [name for name, _ in net.named_parameters()] == ["block.0.weight", "block.0.bias"]
    x = Tensor(np.ones((3, 4)))
    assert np.count_nonzero(net(x).numpy() == 0) > 0
    net.eval()
    assert np.count_nonzero(net(x).numpy() == 0) == 0
    net(x).sum().backward()
    assert net.block.module[0].weight.grad.numpy().any()


def test_nothing_to_remember_is_passed_through():
    x = Tensor(np.ones((3, 4)), requires_grad=True)
    assert checkpoint(lambda v: v, x) is x
    assert checkpoint(F.relu, Tensor(np.ones((3, 4)))).node is None


def test_what_cannot_be_is_refused():
    x = Tensor(np.ones((3, 4)), requires_grad=True)
    with pytest.raises(
        DeviceError, match=r"a checkpoint goes from device\(0\) to device\(1\); it must stay on one"
    ):
        checkpoint(lambda v: F.relu(v.to(device(1))), x)
    F.relu(x.to(1))  # outside of it that is still allowed
    with pytest.raises(ShapeError, match="returned a tuple; it must return one tensor"):
        checkpoint(lambda v: (v, v), x)
    with pytest.raises(ConfigError, match="a int was given; give a module or a function"):
        checkpoint(3)
