"""Places: what device() accepts, where results are, what is refused before anything runs, and
what a recorded program says about where each of its records runs.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import Tensor, data, device, nn, no_grad, optim, placement
from odyssey import functional as F
from odyssey.comm import Communicator, mock
from odyssey.core.arena import Arena
from odyssey.core.placement import Device
from odyssey.data.nested import Form
from odyssey.engine.engine import Engine, Layout
from odyssey.errors import ConfigError, DeviceError
from odyssey.train.trainer import DistributedTrainer


def batch(n=20, features=(1, 4, 4), classes=3):
    rng = np.random.default_rng(n)
    dataset = data.arrays(
        rng.standard_normal((n, *features)).astype(np.float32), np.arange(n) % classes
    )
    return data.Batch(dataset, np.arange(n), 0, 0)


class Split(nn.Module):
    """Three places, one visited twice, and a value that is used on two of them."""

    def __init__(self, placed=True) -> None:
        super().__init__()
        nn.manual_seed(5)
        self.fc1 = nn.Linear(16, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 8)
        self.fc4 = nn.Linear(8, 3)
        self.placed = placed
        if placed:
            self.fc2 @ device(1)
            self.fc3.to(2)
            self.fc4.to(device=device(1))

    def forward(self, x):
        def go(v, k):
            return v.to(device(k)) if self.placed else v

        a = F.relu(self.fc1(F.flatten(x)))
        b = F.tanh(self.fc2(go(a, 1)))
        c = self.fc3(go(a, 2)) * go(b, 2)
        return self.fc4(F.dropout(go(c, 1) + b, 0.25, self.training))


def engine(model, train=True, execution="replay"):
    layout = Layout(Communicator(), 1, 1, 32, "tree", execution)
    return Engine(
        model,
        nn.CrossEntropyLoss(),
        Arena.of(model.named_parameters()),
        layout,
        train=train,
        seed=3,
    )


def recorded(model, monkeypatch, train=True):
    """The records of one shard, before fusion."""
    monkeypatch.setattr("odyssey.engine.engine.fuse", list)
    return engine(model, train).record(32, Form.of_classes(1, 4, 4))


# --- device() ---


def test_a_device_is_a_slot():
    assert (
        device(1) == Device(1) == device("1") == device("cpu:1") == device(device(1)) != device(0)
    )
    assert len({device(1), device("cpu:1"), device(2)}) == 2
    assert repr(device(3)) == "device(3)"
    assert device("cpu") == device() == device(0)


@pytest.mark.parametrize("wrong", [-1, True, 1.0, None, "tpu:0", "gpu:-1", "cpu:", ""])
def test_what_is_no_place_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"\[device\] .* is no place; give a slot from 0"):
        device(wrong)


@pytest.mark.parametrize("name", ["gpu", "gpu:1", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(name, monkeypatch):
    monkeypatch.setattr(placement.gpus, "count", lambda: 0)
    with pytest.raises(DeviceError, match="this machine has none; use device"):
        nn.Linear(2, 2) @ device(name)
    monkeypatch.setattr(placement.gpus, "count", lambda: 4)
    with pytest.raises(DeviceError, match="layers are placed on slots"):
        device(name)


# --- where things are ---


def test_placing_a_module_places_all_below_it_and_returns_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    assert model @ device(2) is model
    assert (
        {p.device for p in model.parameters()}
        == {device(2)}
        == {p.grad.device for p in model.parameters()}
    )
    assert model.to(device=1) is model
    assert {p.device for p in model.parameters()} == {device(1)}
    Arena.of(model.named_parameters())
    assert {p.grad.device for p in model.parameters()} == {device(1)}, "the arena changes no place"


def test_results_are_where_their_inputs_are():
    x = Tensor(np.ones((20, 1, 4, 4)))
    assert x.device == device(0)
    y = x.to("cpu:1")
    assert y.to(device(1)) is y and y.detach().device == device(1)
    for made in (
        y + 1,
        2 - y,
        F.flatten(y),
        F.pad2d(y, 1),
        F.max_pool2d(y, 2),
        F.to_lanes(y),
        F.dropout(y),
        y.mean(),
    ):
        assert made.device == device(1)
    np.testing.assert_array_equal(y.numpy(), x.numpy())
    with no_grad():
        assert F.relu(y).device == device(1)


@pytest.mark.parametrize("samples", [3, 20])
def test_a_move_carries_the_gradient_back(samples):
    rng = np.random.default_rng(0)
    values, seed = rng.standard_normal((2, samples, 5)).astype(np.float32)
    x, far = Tensor(values, requires_grad=True), Tensor(values, requires_grad=True)
    (F.tanh(x) * x).backward(seed)
    (F.tanh(far.to(1)) * far.to(device=1)).to(2).backward(seed)
    assert np.array_equal(x.grad.numpy(), far.grad.numpy())
    assert far.grad.device == device(0)


# --- what is refused ---


def test_a_wrong_place_is_named():
    fc = nn.Linear(4, 3) @ device(1)
    x = Tensor(np.ones((2, 4)))
    with pytest.raises(DeviceError) as caught:
        fc(x)
    assert str(caught.value) == (
        "[linear] the input is on device(0), the weight (3, 4) on device(1); move the input with "
        ".to(device(1)), or place the layer with @ device(0), after its weights are shared"
    )
    fc.bias.put(device(2))
    with pytest.raises(DeviceError, match=r"the bias \(3,\) on device\(2\)"):
        fc(x.to(1))
    with pytest.raises(
        DeviceError, match=r"\[add\] one input is on device\(1\), another on device\(0\)"
    ):
        x.to(1) + x
    with pytest.raises(DeviceError, match=r"\[multiply\] one input"):
        x * x.to(3)
    conv = nn.Conv2d(1, 2, 2).to(1)
    with pytest.raises(DeviceError, match=r"\[conv2d\] the input is on device\(0\)"):
        conv(Tensor(np.ones((1, 1, 4, 4))))


def test_a_trainer_refuses_it_before_anything_runs():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3) @ device(1))
    trainer = DistributedTrainer(model, optim.SGD(lr=0.1))
    before = trainer.weights_sha256()
    with pytest.raises(DeviceError) as caught:
        trainer.train_step(batch())
    assert str(caught.value) == (
        "[linear] the input is on device(0), the weight 2.weight on device(1); move the input with "
        ".to(device(1)), or place the layer with @ device(0), after its weights are shared"
    )
    assert trainer.weights_sha256() == before and trainer.steps == 0


def test_labels_are_fetched_where_the_model_ends():
    class Back(Split):
        def loss(self, y, labels):
            return F.cross_entropy(y.to(0), labels)

    trainer = DistributedTrainer(Back(), optim.SGD(lr=0.1))
    with pytest.raises(
        DeviceError, match=r"the label tensor is on device\(1\), the input on device\(0\)"
    ):
        trainer.train_step(batch())
    moved = Back()
    moved.loss = lambda y, labels: F.cross_entropy(y.to(0), labels.to(0))
    DistributedTrainer(moved, optim.SGD(lr=0.1)).train_step(batch())


# --- what is recorded ---


def test_places_change_no_bit():
    def raw(made):
        made.run(batch(), 2)
        return made.runners[0].result.tobytes()

    plain = raw(engine(Split(placed=False)))
    for execution in ("replay", "eager"):
        assert raw(engine(Split(), execution=execution)) == plain
    assert np.isfinite(np.frombuffer(plain, np.float32)).all()


ELSEWHERE = {
    "exp": lambda x: F.exp(-x * x),
    "roots": lambda x: F.sqrt(x * x + 1) + F.log(x * x + 1),
    "powers": lambda x: (x * x + 1) ** (x * 0.1) + 2.0**x,
    "quotients": lambda x: 1 / (1 + x * x) + np.ones(8, np.float32) / (2 + x * x),
    "extremes": lambda x: x - x.max(1, True) + F.minimum(x, 0.2),
    "an array": lambda x: x @ np.eye(8, dtype=np.float32) + np.arange(8, dtype=np.float32) * x,
    "choices": lambda x: F.where(np.arange(8) % 2, x, 0.0) * (x == x[:, :1]) + x.clamp(-0.3, 0.4),
    "a norm": lambda x: x / (x.var(1, keepdim=True) + 1) + F.softmax(x),
}
WEIGHTED = {
    "classes": nn.CrossEntropyLoss(weight=[1, 2, 3]),
    "outputs": nn.BCEWithLogitsLoss(pos_weight=[1, 2, 3]),
}


@pytest.mark.parametrize("name", [*ELSEWHERE, *WEIGHTED])
def test_an_op_elsewhere_has_the_bits_of_one_here(name):
    class Elsewhere(nn.Module):
        def __init__(self, place):
            super().__init__()
            nn.manual_seed(3)
            self.place, self.fc1, self.fc2 = (
                device(place),
                nn.Linear(16, 8) @ device(place),
                nn.Linear(8, 3),
            )
            self.fc2.to(place)

        def forward(self, x):
            return self.fc2(ELSEWHERE.get(name, F.relu)(self.fc1(F.flatten(x).to(self.place))))

    def trained(comm, place):
        loss = WEIGHTED.get(name)
        trainer = DistributedTrainer(
            Elsewhere(place), optim.SGD(lr=0.1), comm=comm, shard_size=5, loss=loss
        )
        samples = batch().dataset
        if name == "outputs":
            samples = data.arrays(samples.images, np.linspace(0, 1, 60).reshape(20, 3))
        trainer.fit(data.DataLoader(samples, batch_size=15), verbose=False)
        return trainer.weights_sha256()

    here = trained(Communicator(), 0)
    assert trained(Communicator(), 1) == here
    assert mock.run(2, lambda comm: trained(comm, 1)) == [here, here]


@pytest.mark.parametrize("train", [True, False])
def test_every_record_says_where_it_runs_and_what_it_belongs_to(train, monkeypatch):
    records = recorded(Split(), monkeypatch, train)
    forward = [r for r in records if r.phase == "forward"]
    backward = [r for r in records if r.phase == "backward"]
    assert records == forward + backward and bool(backward) == train
    assert [
        (r.op, r.device)
        for r in forward
        if r.op not in ("relu_forward", "tanh_forward", "dropout_forward")
    ] == [
        ("input", 0),
        ("linear_forward", 0),
        ("copy", 1),
        ("linear_forward", 1),
        ("copy", 2),
        ("linear_forward", 2),
        ("copy", 2),
        ("multiply", 2),
        ("copy", 1),
        ("add", 1),
        ("linear_forward", 1),
        ("array", 1),
        ("cross_entropy_forward", 1),
        ("stats", 1),
    ]
    tags = [r.tag for r in forward]
    assert tags == sorted(tags) and len(set(tags)) == len(tags), "one record per forward op here"


def test_a_record_of_the_backward_pass_is_where_its_op_was_and_a_copy_where_the_value_came_from(
    monkeypatch,
):
    records = recorded(Split(), monkeypatch)
    of = {r.tag: r for r in records if r.phase == "forward"}
    maker = {}  # by slot
    for r in records:
        if r.op == "copy":
            source = maker[id(r.args[1])]
            assert source.device != r.device, "a copy is on the other side of what it copies"
        if r.phase == "backward":
            assert r.tag in of
            if r.op == "copy":
                forward = of[r.tag]
                assert forward.op == "copy" and r.device == maker[id(forward.args[1])].device
                assert source.device == forward.device
            elif r.op not in ("add", "fill"):
                assert r.device == of[r.tag].device
                assert r.op.split("_backward")[0] == of[r.tag].op.split("_forward")[0]
        maker.setdefault(id(r.args[0]), r)
    assert sum(r.op == "copy" for r in records) == 8
    sums = [r for r in records if r.op == "add" and r.phase == "backward"]
    assert {r.device for r in sums} == {0, 1}, "gradients of one value meet where the value is"


def test_only_copies_cross(monkeypatch):
    """Whatever a record reads in memory of the workspace was made on its own place, unless it is
    a copy.
    """
    made: dict[int, int] = {}
    for r in recorded(Split(), monkeypatch):
        slots = [id(a) for a in r.args if type(a).__name__ == "Slot"]
        if r.op != "copy":
            assert all(made.setdefault(s, r.device) == r.device for s in slots), r
        elif slots:
            made[slots[0]] = r.device


@pytest.mark.parametrize("name", ["lenet5", "convnet", "mlp"])
def test_the_backward_of_a_fused_op_belongs_to_what_it_is_part_of(name):
    """Else a pipeline would not know the stage of a relu_backward whose relu_forward is part of
    a convolution.
    """
    nn.manual_seed(0)
    records = engine(nn.models.build(name)).record(32, Form.of_classes(1, 28, 28))
    forward = {r.tag: r.op for r in records if r.phase == "forward"}
    orphans = [r.op for r in records if r.tag not in forward]
    assert not orphans
    relus = [r for r in records if r.op == "relu_backward"]
    assert relus and all(forward[r.tag] in ("conv2d_forward", "linear_forward") for r in relus)
