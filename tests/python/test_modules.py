"""Modules: names and order of parameters, tied weights, state, modes, repr, and what initial
values depend on.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, Tensor, nn, optim
from odyssey import functional as F
from odyssey.errors import ConfigError, ShapeError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(2, 3)
        self.first = nn.Linear(3, 2, bias=False)
        self.scale = nn.Parameter(np.ones(1))

    def forward(self, x):
        return self.first(self.second(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def test_parameters_come_in_the_order_they_were_assigned():
    names = [
        name for name, _ in nn.Sequential(Block(), nn.ReLU(), nn.Linear(3, 1)).named_parameters()
    ]
    assert names == [
        "0.second.weight",
        "0.second.bias",
        "0.first.weight",
        "0.scale",
        "2.weight",
        "2.bias",
    ]


def test_lenet5():
    model = nn.LeNet5()
    assert sum(p.size for p in model.parameters()) == 61_706
    assert {name: p.shape for name, p in model.named_parameters()} == {
        "conv1.weight": (6, 1, 5, 5),
        "conv1.bias": (6,),
        "conv2.weight": (16, 6, 5, 5),
        "conv2.bias": (16,),
        "fc1.weight": (120, 400),
        "fc1.bias": (120,),
        "fc2.weight": (84, 120),
        "fc2.bias": (84,),
        "fc3.weight": (10, 84),
        "fc3.bias": (10,),
    }
    assert model(Tensor(np.zeros((3, 1, 28, 28)))).shape == (3, 10)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("lenet5", 61_706),
        ("mlp", 784 * 512 + 512 + 5130),
        ("convnet", 320 + 18_496 + 9216 * 128 + 128 + 1290),
    ],
)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_models_take_the_images_of_all_data_sets(name, count, shape):
    model = nn.models.build(name, sample_shape=shape, classes=10).eval()
    assert model(Tensor(np.zeros((2, *shape)))).shape == (2, 10)
    if shape == (1, 28, 28):
        assert sum(p.size for p in model.parameters()) == count


def test_unknown_model():
    with pytest.raises(ConfigError, match="'resnet'.*lenet5, mlp, convnet"):
        nn.models.build("resnet")


def test_tied_weights_are_one_parameter():
    model = Tied()
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias", "b.bias"]
    model(Tensor(np.ones((1, 3)))).sum().backward()
    w = model.a.weight.numpy()
    hidden = w @ np.ones(3) + model.a.bias.numpy()
    wanted = np.outer(np.ones(3), hidden) + np.outer(w.sum(0), np.ones(3))
    np.testing.assert_allclose(model.a.weight.grad.numpy(), wanted, rtol=1e-5)


def test_state_dict_there_and_back():
    nn.manual_seed(1)
    one, other = nn.LeNet5(), nn.LeNet5()
    state = one.state_dict()
    assert list(state) == [name for name, _ in one.named_parameters()]
    memory = other.conv1.weight.numpy()
    assert not np.array_equal(memory, state["conv1.weight"])
    other.load_state_dict(state)
    for name, p in other.named_parameters():
        assert np.array_equal(p.numpy(), state[name])
    assert np.array_equal(memory, state["conv1.weight"]), (
        "values are copied into the memory that is there"
    )
    state["conv1.weight"][...] = 9
    assert not np.any(one.conv1.weight.numpy() == 9), "state_dict() gives copies"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("1.bias"), r"missing: \['1.bias'\]"),
        (lambda s: s.update(extra=np.zeros(1)), r"unknown: \['extra'\]"),
        (lambda s: s.update({"1.bias": np.zeros(5)}), r"1.bias has shape \(5,\), not \(2,\)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, says):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = model.state_dict()
    state = {name: value + 1 for name, value in before.items()}
    change(state)
    with pytest.raises(ShapeError, match=says):
        model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert np.array_equal(value, before[name])


def test_sequential():
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    assert len(model) == 3
    assert isinstance(model[1], nn.ReLU) and model[-1] is model[2]
    x = Tensor(np.ones((2, 2)))
    assert np.array_equal(model(x).numpy(), model[2](F.relu(model[0](x))).numpy())
    with pytest.raises(ConfigError, match="a function was given"):
        nn.Sequential(nn.ReLU(), lambda x: x)


def test_train_and_eval_reach_every_module():
    model = nn.Sequential(nn.Sequential(nn.Dropout(0.5)), nn.Dropout(0.9))
    x = Tensor(np.ones((4, 50)))
    assert np.any(model(x).numpy() == 0)
    assert model.eval() is model
    assert not any(m.training for m in model.modules())
    assert model(x) is x
    model.train()
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize(
    ("layer", "op"),
    [
        (nn.MaxPool2d(2), lambda x: F.max_pool2d(x, 2)),
        (nn.MaxPool2d((3, 2), 1), lambda x: F.max_pool2d(x, (3, 2), 1)),
        (nn.AvgPool2d(3, 2), lambda x: F.avg_pool2d(x, 3, 2)),
        (nn.Tanh(), F.tanh),
        (nn.Sigmoid(), F.sigmoid),
        (nn.Flatten(), F.flatten),
        (nn.Sequential(nn.Flatten(), nn.Softmax()), lambda x: F.softmax(F.flatten(x))),
        (nn.Sequential(nn.Flatten(), nn.LogSoftmax()), lambda x: F.log_softmax(F.flatten(x))),
    ],
)
def test_layers_are_their_ops(layer, op):
    x = Tensor(np.random.default_rng(0).standard_normal((5, 2, 6, 6)))
    assert np.array_equal(layer(x).numpy(), op(x).numpy())


def test_losses_are_their_ops():
    x, labels = Tensor(np.random.default_rng(0).standard_normal((5, 3))), [0, 1, 2, 1, 0]
    assert nn.CrossEntropyLoss()(x, labels).item() == F.cross_entropy(x, labels).item()
    assert (
        nn.NLLLoss(reduction="sum")(x, labels).item()
        == F.nll_loss(x, labels, reduction="sum").item()
    )
    with pytest.raises(ConfigError, match="'none'.*allowed are 'mean', 'sum'"):
        nn.CrossEntropyLoss(reduction="none")


def test_repr():
    model = nn.Sequential(
        nn.Conv2d(1, 6, (5, 3), stride=2, padding=1), nn.ReLU(), nn.Linear(4, 2), nn.Dropout(0.25)
    )
    assert repr(model) == (
        "Sequential(\n  (0): Conv2d(1, 6, (5, 3), stride=2, padding=1)\n  (1): ReLU()\n  (2): "
        "Linear(4, 2)\n"
        "  (3): Dropout(0.25)\n)"
    )
    assert repr(nn.MaxPool2d(2)) == "MaxPool2d(2)"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(0, 1), "in_features is 0"),
        (lambda: nn.Linear(1, 2.0), "out_features is 2.0"),
        (lambda: nn.Conv2d(1, 1, (3, 0)), "kernel_width is 0"),
        (lambda: nn.Conv2d(1, 1, 3, stride=0), "stride is 0"),
        (lambda: nn.Dropout(1.0), "p is 1.0"),
        (lambda: nn.Softmax(axis=1), "unexpected keyword argument 'axis'"),
        (lambda: nn.ReLU(True, 1), "too many positional arguments"),
        (lambda: nn.manual_seed(-1), "-1"),
        (lambda: nn.manual_seed(2**63), "2^63"),
    ],
)
def test_settings_that_are_refused(make, says):
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)


def test_a_mixin_behind_a_module_has_its_arguments():
    class Named:
        def __init__(self, name):
            self.name = name

    class Net(nn.Module, Named):
        def __init__(self):
            super().__init__("net")

    assert Net().name == "net"


def test_two_parameters_of_one_name_are_refused():
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    setattr(net, "0.0", nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="2 parameters are called 0.0.weight"):
        DistributedTrainer(net, optim.SGD(lr=0.1))


def test_a_module_without_forward_says_so():
    with pytest.raises(TypeError, match="Thing has no forward"):
        type("Thing", (nn.Module,), {})()(1)


# --- initial values ---


def test_initial_values_depend_on_the_seed_alone():
    nn.manual_seed(3)
    one = nn.LeNet5().state_dict()
    np.random.seed(0)
    F.dropout(Tensor(np.ones((2, 2))))
    nn.manual_seed(3)
    again = nn.LeNet5().state_dict()
    nn.manual_seed(4)
    other = nn.LeNet5().state_dict()
    for name in one:
        assert np.array_equal(one[name], again[name])
        assert not np.array_equal(one[name], other[name])


def test_initial_values_fill_the_range_of_the_fan_in():
    nn.manual_seed(0)
    for layer, fan_in in ((nn.Linear(400, 120), 400), (nn.Conv2d(6, 64, 5), 150)):
        values, bound = layer.weight.numpy(), fan_in**-0.5
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.99 * bound
        assert abs(values.mean()) < 0.02 * bound
        assert values.std() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_parameters_of_one_model_differ():
    nn.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    assert not np.array_equal(model[0].weight.numpy(), model[1].weight.numpy())


# --- lists ---


def test_a_module_list_is_found():
    layers = nn.ModuleList([nn.Linear(2, 3)])
    layers.append(nn.ReLU()).extend([nn.Dropout(), nn.Linear(3, 1, bias=False)])
    assert [name for name, _ in layers.named_parameters()] == ["0.weight", "0.bias", "3.weight"]
    assert len(layers) == 4 and layers[-1] is list(layers)[3] and len(layers[1:3]) == 2
    layers[-1] = nn.Linear(3, 2)
    assert layers[3].weight.shape == (2, 3) and len(layers) == 4
    assert not any(m.training for m in layers.eval())
    for wrong in (lambda: layers.append(F.relu), lambda: layers.__setitem__(0, None)):
        with pytest.raises(ConfigError, match="give modules"):
            wrong()
    with pytest.raises(IndexError):
        layers[4]
    with pytest.raises(TypeError, match=r"ModuleList has no forward\(\); write one"):
        layers(Tensor([1.0]))


class Holder(nn.Module):
    def __init__(self, value, known=None) -> None:
        super().__init__()
        self.known = known
        self.layers = value


@pytest.mark.parametrize(
    "value",
    [
        lambda: [nn.Linear(2, 2)],
        lambda: (1, {"a": [nn.Linear(2, 2)]}),
        lambda: [nn.Dropout()],
        lambda: {"w": nn.Parameter(np.ones(2))},
    ],
)
def test_a_plain_list_of_modules_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"\[Holder\] layers is a (list|tuple|dict) with a .*use nn.ModuleList"
    ):
        list(nn.Sequential(Holder(value()), nn.Linear(2, 2)).named_parameters())


def test_a_plain_list_of_what_is_found_anyway_is_not_refused():
    fc = nn.Linear(2, 2)
    held = Holder([fc, (fc.weight, 3)], known=fc)
    assert [name for name, _ in held.named_parameters()] == ["known.weight", "known.bias"]
    assert len(list(Holder([1, "a", F.relu, np.ones(3)]).parameters())) == 0


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU())])
def test_an_array_is_taken_as_a_tensor(layer, rows):
    shape = (4,) if isinstance(layer, nn.Linear) else (1, 4, 4)
    x = np.random.default_rng(0).normal(size=(rows, *shape)).astype(np.float32)
    assert layer.forward(x).numpy().tobytes() == layer(Tensor(x)).numpy().tobytes()
    for op in (F.relu, F.flatten, nn.GELU()):
        assert op(x).numpy().tobytes() == op(Tensor(x)).numpy().tobytes()
    with pytest.raises(
        ShapeError, match=r"a layer is called with a list; give an array, or an odyssey.Tensor"
    ):
        layer(x.tolist())
