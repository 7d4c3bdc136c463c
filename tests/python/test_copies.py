"""Copies of parameters, models and optimizers own their memory; what cannot be copied says so by
its name.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import odyssey
from odyssey import Tensor, data, device, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core import offload, setting_versions
from odyssey.core.arena import Arena, Buffer
from odyssey.core.program import Range
from odyssey.distributed import DDP
from odyssey.errors import ConfigError, OdysseyError
from odyssey.nn import PipelineParallel, Stage
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "layouts")]

import draws  # noqa: E402, F401 - declares what can be drawn
from chance import Random, drawn  # noqa: E402
from copied import output, relu_twice  # noqa: E402
from thread_ranks import on  # noqa: E402

RNG = np.random.default_rng(5)
X = RNG.normal(size=(48, 8)).astype(np.float32)
Y = RNG.integers(0, 3, 48)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled}
EVERY_WAY = {"copy": copy.copy, **WAYS}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_way = pytest.mark.parametrize("way", EVERY_WAY.values(), ids=EVERY_WAY)


def small(seed=0):
    nn.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def train(model, optimizer=None, steps=2, x=X, y=Y, comm=None, **settings):
    """A trainer that has taken steps."""
    settings = {"shard_size": 8, "threads": 1, "device": "cpu", **settings}
    trainer = DistributedTrainer(model, optimizer or optim.Adam(lr=0.05), comm=comm, **settings)
    loader = data.DataLoader(data.arrays(x, y, classes=3), batch_size=24)
    trainer.fit(loader, steps=steps, epochs=steps, verbose=False)
    return trainer


def one_step(model, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(Tensor(X)), Y).backward()
    optimizer.step()


def values(model):
    return {name: p.tobytes() for name, p in model.state_dict().items()}


def reuse_memory():
    """What is free now is overwritten, so that reading it is seen."""
    gc.collect()
    return [np.full(n, np.nan, np.float32) for n in (8, 16, 48, 128, 512, 1024) for _ in range(200)]


# --- every public class ---------------------------------------------------------------------------

F32 = np.float32
ROWS, PLANES = (X[:6],), (RNG.normal(size=(6, 4, 9, 9)).astype(F32),)
SIGNALS = (RNG.normal(size=(6, 4, 9)).astype(F32),)
TOKENS, SEQUENCES = (
    (RNG.integers(0, 11, (3, 5)).astype(np.int32),),
    (RNG.normal(size=(6, 5, 8)).astype(F32),),
)
CLASSES = (RNG.normal(size=(6, 5)).astype(F32), RNG.integers(0, 5, 6))
NUMBERS = (X[:6], RNG.random((6, 8)).astype(F32))


#: Of each public class of nn that is a module: how it is made, and an input.
MODULES = {
    "Checkpoint": (lambda: nn.checkpoint(nn.Sequential(nn.Linear(8, 4), nn.ReLU())), ROWS),
    "ConvNet": (lambda: nn.ConvNet((1, 12, 12)), (RNG.normal(size=(2, 1, 12, 12)).astype(F32),)),
    "GPT": (lambda: nn.GPT(11, 8, layers=2, heads=2, width=16), TOKENS),
    "LeNet5": (nn.LeNet5, (RNG.normal(size=(2, 1, 28, 28)).astype(F32),)),
    "MLP": (lambda: nn.MLP((8,), 3, 16, targets=(1.0, 2.0)), ROWS),
    "ModuleDict": (lambda: nn.ModuleDict({"one": nn.Linear(8, 3)}), None),
    "ModuleList": (lambda: nn.ModuleList([nn.Linear(8, 3), nn.ReLU()]), None),
    "ParameterList": (lambda: nn.ParameterList([nn.Parameter(X[0])]), None),
    "PipelineParallel": (
        lambda: PipelineParallel([Stage([nn.Linear(8, 8), F.relu]), Stage([nn.Linear(8, 3)])]),
        ROWS,
    ),
    "ResNet18": (nn.ResNet18, (RNG.normal(size=(2, 3, 16, 16)).astype(F32),)),
    "Sequential": (lambda: nn.Sequential({"a": nn.Linear(8, 3), "b": nn.Softmax()}), ROWS),
    "Stage": (lambda: Stage([nn.Conv2d(4, 2, 3), relu_twice, nn.Linear(98, 3)], device=1), PLANES),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((4, 2)), PLANES),
    "AvgPool2d": (lambda: nn.AvgPool2d(2, 1), PLANES),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8, momentum=0.3), ROWS),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), PLANES),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), SIGNALS),
    "Conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), 2, (1, 0), bias=False), PLANES),
    "Dropout": (lambda: nn.Dropout(0.3), ROWS),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), PLANES),
    "Embedding": (lambda: nn.Embedding(11, 4, padding_idx=2), TOKENS),
    "Flatten": (lambda: nn.Flatten(2), PLANES),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), PLANES),
    "Identity": (lambda: nn.Identity(3, a=4), ROWS),
    "LayerNorm": (lambda: nn.LayerNorm(8, 1e-3), ROWS),
    "Linear": (lambda: nn.Linear(8, 3), ROWS),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), PLANES),
    "Module": (nn.Module, None),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, 0.1), SEQUENCES),
    "RMSNorm": (lambda: nn.RMSNorm(8, None), ROWS),
    "BCEWithLogitsLoss": (
        lambda: nn.BCEWithLogitsLoss(reduction="sum", pos_weight=np.full(8, 2, F32)),
        NUMBERS,
    ),
    "CrossEntropyLoss": (
        lambda: nn.CrossEntropyLoss(weight=np.arange(5, dtype=F32), label_smoothing=0.1),
        CLASSES,
    ),
    "L1Loss": (nn.L1Loss, NUMBERS),
    "MSELoss": (lambda: nn.MSELoss(reduction="none"), NUMBERS),
    "NLLLoss": (nn.NLLLoss, CLASSES),
    "ScaledLoss": (lambda: nn.ScaledLoss("l1", [1.0], [2.0]), NUMBERS),
    "TargetScale": (lambda: nn.TargetScale([1.0], [2.0], log=True), ROWS),
    "SmoothL1Loss": (lambda: nn.SmoothL1Loss(beta=0.5), NUMBERS),
    "GELU": (lambda: nn.GELU(approximate="tanh"), ROWS),
    "LeakyReLU": (lambda: nn.LeakyReLU(0.2, inplace=True), ROWS),
    "LogSoftmax": (lambda: nn.LogSoftmax(dim=1), PLANES),
    "ReLU": (nn.ReLU, ROWS),
    "SiLU": (nn.SiLU, ROWS),
    "Sigmoid": (nn.Sigmoid, ROWS),
    "Softmax": (lambda: nn.Softmax(-1), SEQUENCES),
    "Softplus": (nn.Softplus, ROWS),
    "Tanh": (nn.Tanh, ROWS),
}


def build(name):
    nn.manual_seed(3)
    make, inputs = MODULES[name]
    return make().eval(), inputs


def check_alike(new, old, inputs):
    """The same kind, settings, values and output, in other memory."""
    assert type(new) is type(old) and repr(new) == repr(old) and values(new) == values(old)
    assert nn.settings.values(new) == nn.settings.values(old)
    for p, q in zip(new._state(), old._state(), strict=True):
        assert type(p[1]) is type(q[1]) and not np.shares_memory(p[1].data, q[1].data)
    if inputs is not None:
        assert output(new, inputs).tobytes() == output(old, inputs).tobytes()


def test_each_public_class_is_in_the_table():
    classes = {
        n
        for n in nn.__all__
        if isinstance(getattr(nn, n), type) and issubclass(getattr(nn, n), nn.Module)
    }
    assert classes == set(MODULES)


@each_way
@pytest.mark.parametrize("name", MODULES)
def test_each_public_class(name, way):
    old, inputs = build(name)
    check_alike(way(old), old, inputs)
    if any(True for _ in old.parameters()):  # an optimizer needs parameters
        optimizer = optim.SGD(old.parameters(), lr=0.1)
        new = way(old)
        check_alike(new, old, inputs)
        before = values(new)
        optimizer.arena.params[:] = 7
        assert values(new) == before
        del old, optimizer
        junk = reuse_memory()
        assert values(new) == before and junk
        optim.SGD(new.parameters(), lr=0.1).step()


def test_another_process_loads_them(launch):
    made = [build(name) for name in MODULES if MODULES[name][1] is not None]
    for module, _ in made:
        if any(True for _ in module.parameters()):
            optim.SGD(module.parameters(), lr=0.1)
    with open(launch.folder / "modules", "wb") as file:
        pickle.dump(made, file)
    done = launch.python(HERE / "copied.py", "modules", "outputs.npz")
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(launch.folder / "outputs.npz", allow_pickle=False) as outputs:
        for (module, inputs), name in zip(made, outputs.files, strict=True):
            assert outputs[name].tobytes() == output(module, inputs).tobytes(), module


@pytest.mark.parametrize("name", sorted(F.ACTIVATIONS))
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_protocols(name, protocol):
    model = nn.Sequential(nn.Linear(8, 3), getattr(nn, name)())
    optim.SGD(model.parameters(), lr=0.1)
    check_alike(pickle.loads(pickle.dumps(model, protocol)), model, ROWS)


def test_buffers_that_pickle_lends_are_not_shared():
    model = small()
    optim.SGD(model.parameters(), lr=0.1)
    lent = []
    bytes_ = pickle.dumps(model, 5, buffer_callback=lent.append)
    new = pickle.loads(bytes_, buffers=lent)
    check_alike(new, model, ROWS)


# --- random networks ------------------------------------------------------------------------------


def random_network(index):
    """A network of tests/layouts, and an input of it."""
    random = Random(11, index, "network")
    network = drawn("network", random)
    nn.manual_seed(index)
    model = network.build()
    generator = np.random.default_rng(index)
    shape = (5, *network.shape)
    ids = generator.integers(0, max(network.vocabulary, 1), shape).astype(np.int32)
    return model.eval(), (ids,) if network.vocabulary else (
        generator.normal(size=shape).astype(F32),
    )


def test_random_networks():
    seen = set()
    for index in range(40):
        model, inputs = random_network(index)
        for p in model.parameters():
            seen.update(
                ["placed"] if p.device.slot else [], ["frozen"] if not p.requires_grad else []
            )
            seen.update(["tied"] if len(p.places) > 1 else [])
        seen.update(["buffers"] if list(model.buffers()) else [])
        parts = [p for p in model.parameters()]
        with_optimizer = optim.Adam(parts, lr=0.1) if index % 2 else None
        for way in WAYS.values():
            new = way(model)
            check_alike(new, model, inputs)
            check_places(new, model)
        if with_optimizer:
            new, other = copy.deepcopy((model, with_optimizer))
            assert [id(p) for _, p in other.arena.named] == [id(p) for p in new.parameters()]
            check_alike(new, model, inputs)
    assert seen == {"placed", "frozen", "tied", "buffers"}


def check_places(new, old):
    """Parameters are on the same places, said by the copies of the modules that said it of the
    originals.
    """
    ids = {id(m): id(n) for m, n in zip(old.modules(), new.modules(), strict=True)}
    for p, q in zip(old.parameters(), new.parameters(), strict=True):
        assert q.device == p.device and q.requires_grad == p.requires_grad
        assert q.places == {ids[key]: where for key, where in p.places.items()}


def test_random_networks_in_another_process(launch):
    made = [random_network(index) for index in range(12)]
    for model, _ in made:
        optim.SGD(model.parameters(), lr=0.1)
    with open(launch.folder / "modules", "wb") as file:
        pickle.dump(made, file)
    done = launch.python(HERE / "copied.py", "modules", "outputs.npz")
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(launch.folder / "outputs.npz", allow_pickle=False) as outputs:
        for (module, inputs), name in zip(made, outputs.files, strict=True):
            assert outputs[name].tobytes() == output(module, inputs).tobytes(), module


# --- models that are trained ----------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("execution", ["replay", "eager"])
def test_a_copy_of_a_trained_model(way, execution):
    model = small()
    trainer = train(model, execution=execution)
    best, at_copy, original = way(model), values(model), trainer.weights_sha256()
    assert values(best) == at_copy
    train(best, execution=execution)
    assert (
        values(best) != at_copy
        and trainer.weights_sha256() == original
        and values(model) == at_copy
    )
    best, again = way(model), way(model)
    trainer.fit(
        data.DataLoader(data.arrays(X, Y, classes=3), batch_size=24), epochs=9, verbose=False
    )
    assert values(model) != at_copy and values(best) == at_copy
    kept = weakref.ref(trainer.arena)
    del trainer, model
    junk = reuse_memory()
    assert kept() is None and values(best) == at_copy and junk
    one, other = train(best), train(again)
    assert one.weights_sha256() == other.weights_sha256() and values(best) != at_copy


def test_a_copy_goes_on_as_the_original_would():
    """Trained from the copy or from the original: the same bits."""
    of_copy, of_model = small(), small()
    train(of_copy)
    train(of_model)
    of_copy = pickled(copy.deepcopy(of_copy))
    fresh = small()
    fresh.load_state_dict(of_model.state_dict())
    assert train(of_copy).weights_sha256() == train(fresh).weights_sha256()


def test_a_running_program_does_not_notice_a_copy():
    """A trainer looks at its model again when a setting has changed: a copy changes none."""
    model = small()
    train(model)
    numbers = setting_versions.models.value, setting_versions.updates.value
    for way in EVERY_WAY.values():
        way(model)
    assert (setting_versions.models.value, setting_versions.updates.value) == numbers


def test_callbacks_that_keep_the_best_model():
    nn.manual_seed(0)
    model, kept, outputs = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), [], []

    def keep(context):
        kept.append(copy.deepcopy(model))
        outputs.append(output(model, ROWS).tobytes())

    trainer = DistributedTrainer(model, optim.SGD(lr=0.1), shard_size=8, threads=1, device="cpu")
    loader = data.DataLoader(data.arrays(X, Y, classes=3), batch_size=24)
    trainer.fit(
        loader,
        epochs=4,
        verbose=False,
        callbacks=[odyssey.callbacks.LambdaCallback(on_epoch_end=keep)],
    )
    assert len(set(outputs)) == 4 and [output(m, ROWS).tobytes() for m in kept] == outputs


def test_loops_with_copies():
    """An average of weights, the target of Q-learning, folds."""
    model = small()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    mean, target = copy.deepcopy(model).requires_grad_(False), copy.deepcopy(model)
    expected = model.state_dict()
    for _ in range(3):
        one_step(model, optimizer)
        for kept, now in zip(mean.parameters(), model.parameters(), strict=True):
            kept.data = F32(0.9) * kept.data + F32(0.1) * now.data
        now = model.state_dict()
        expected = {n: F32(0.9) * v + F32(0.1) * now[n] if n in dict(mean.named_parameters()) else v
                    for n, v in expected.items()}  # fmt: skip
    found = mean.state_dict()
    assert all(found[n].tobytes() == v.tobytes() for n, v in expected.items())
    assert not any(p.requires_grad for p in mean.parameters()) and all(
        p.requires_grad for p in model.parameters()
    )
    assert values(target) == values(small())
    target.load_state_dict(model.state_dict())
    one_step(model, optimizer)
    assert output(target.eval(), ROWS).tobytes() != output(model.eval(), ROWS).tobytes()
    target.train()
    folds = [train(copy.deepcopy(target)).weights_sha256() for _ in range(3)]
    assert len(set(folds)) == 1


@each_way
def test_a_copied_body_gets_another_head(way):
    model = small()
    train(model)
    body = [way(model[i]) for i in range(3)]
    body[0].weight.requires_grad = False
    assert model[0].weight.requires_grad
    tuned = nn.Sequential(*body, nn.Linear(16, 3))
    before = values(tuned)
    train(tuned)
    changed = {name for name, value in values(tuned).items() if value != before[name]}
    assert (
        "0.weight" not in changed
        and {"0.bias", "1.weight", "1.running_mean", "3.weight"} <= changed
    )
    with pytest.raises(ConfigError, match="another optimizer or trainer"):
        train(nn.Sequential(model[0], nn.Linear(16, 3)))


@each_way
def test_settings_modes_and_sharing(way):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.25)
            self.b.weight = self.a.weight
            self.same = self.a
            self.register_buffer("scale", np.full(3, 2.0))
            self.register_buffer("index", np.arange(4), persistent=False)
            self.table, self.notes = X.copy(), {"rates": [1, 2]}

        def forward(self, x):
            return self.b(self.drop(self.a(x)))

    globals()["Tied"] = Tied
    Tied.__qualname__ = "Tied"
    old = Tied()
    optimizer = optim.SGD(old.parameters(), lr=0.1)
    old.drop.eval()
    old.a.bias.requires_grad = False
    new = way(old)
    assert new.a.weight is new.b.weight and new.same is new.a and not new.a.bias.requires_grad
    assert new.training and not new.drop.training and new.drop.p == 0.25
    assert isinstance(new.scale, Buffer) and not np.shares_memory(new.scale.data, old.scale.data)
    assert new.index.data.tolist() == [0, 1, 2, 3] and not np.shares_memory(
        new.index.data, old.index.data
    )
    assert new.table is not old.table and new.notes == old.notes and new.notes is not old.notes
    assert (
        len(list(new.parameters())) == 3
        and optimizer.arena.size == Arena(new.named_parameters()).size
    )


@each_way
def test_gradients_of_a_copy_are_zero(way):
    """As in PyTorch; those of the original stay."""
    model = small()
    F.cross_entropy(model(Tensor(X)), Y).backward()
    for _ in range(2):
        new = way(model)
        assert all(not p.grad.data.any() for p in new.parameters())
        assert any(p.grad.data.any() for p in model.parameters())
        F.cross_entropy(new(Tensor(X)), Y).backward()
        for p, q in zip(model.parameters(), new.parameters(), strict=True):
            assert p.grad.data.tobytes() == q.grad.data.tobytes() and not np.shares_memory(
                p.grad.data, q.grad.data
            )
        optim.SGD(model.parameters(), lr=0.1)  # the same of parameters in an arena


# --- placed models --------------------------------------------------------------------------------


class Placed(nn.Sequential):
    """Layers on places."""

    def forward(self, x):
        for layer in self:
            x = layer(x.to(layer.weight.device))
        return x


def placed():
    nn.manual_seed(2)
    return Placed(nn.Linear(8, 16), nn.Linear(16, 16) @ device(1), nn.Linear(16, 3) @ device(1))


@each_way
def test_places(way):
    model = placed()
    train(model)
    new = way(model)
    check_places(new, model)
    new[1].to(0)  # places are its own
    assert [p.device.slot for p in model.parameters()] == [0, 0, 1, 1, 1, 1]
    assert [p.device.slot for p in new.parameters()] == [0, 0, 0, 0, 1, 1]
    assert {d.slot for p in new[1].parameters() for d in p.places.values()} == {0}


@each_way
def test_shared_layers_of_stages(way):
    layer = nn.Linear(8, 8)
    model = PipelineParallel([Stage([layer, F.relu]), Stage([layer, nn.Linear(8, 3)])])
    optim.SGD(model.parameters(), lr=0.1)
    new = way(model)
    check_places(new, model)
    assert getattr(new.stages[0], "0") is getattr(new.stages[1], "0") and new.places == (0, 1)
    head = way(model.stages[1])  # alone, the other stage's place is none of its own
    assert {d.slot for p in head.parameters() for d in p.places.values()} == {1}


# --- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p=None: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p=None: optim.Adam(p, lr=0.02),
    "AdamW": lambda p=None: optim.AdamW(p, lr=0.02),
    "RMSprop": lambda p=None: optim.RMSprop(p, lr=0.02),
    "Lion": lambda p=None: optim.Lion(p, lr=0.02),
    "Adagrad": lambda p=None: optim.Adagrad(p, lr=0.02, lr_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@each_way
def test_model_and_optimizer_together(name, way):
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer.undecayed = optim.vectors
    one_step(model, optimizer)
    for order in (lambda m, o: (m, o), lambda m, o: (o, m)[::-1]):
        new, other = way(order(model, optimizer))
        assert other.arena is not optimizer.arena and other.steps == optimizer.steps
        assert [id(p) for _, p in other.arena.named] == [id(p) for p in new.parameters()]
        assert other.settings == optimizer.settings and other.undecayed is optim.vectors
        at_copy = values(model)
        one_step(new, other)
        assert values(model) == at_copy != values(new)
    one_step(model, optimizer)
    assert values(model) == values(new)
    assert all(a.tobytes() == other.state[k].tobytes() for k, a in optimizer.state.items())
    del model, optimizer
    junk = reuse_memory()
    one_step(new, other)
    assert all(np.isfinite(p.data).all() for p in new.parameters()) and junk


@each_way
def test_a_trained_model_with_its_optimizer(way):
    """The trainer of the copies goes on with the state, as one does to which the same optimizer
    is given again.
    """
    model = small()
    optimizer = optim.Adam(lr=0.05)
    train(model, optimizer)
    new, other = way((model, optimizer))
    train(model, optimizer)
    train(new, other)
    assert values(model) == values(new) and other.steps == optimizer.steps == 4
    assert all(a.tobytes() == other.state[k].tobytes() for k, a in optimizer.state.items())


@each_way
def test_an_optimizer_alone(way):
    """As in PyTorch it has copies of the parameters, which belong to nobody else."""
    model = small()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    other, at_copy = way(optimizer), values(model)
    (group,) = other.param_groups
    assert len(group["params"]) == len(list(model.parameters()))
    for p, q in zip(group["params"], model.parameters(), strict=True):
        assert (
            p is not q
            and p.data.tobytes() == q.data.tobytes()
            and not np.shares_memory(p.data, q.data)
        )
    for p in group["params"]:
        p.grad.data[...] = 1
    other.step()
    assert values(model) == at_copy
    with pytest.raises(ConfigError, match=r"copy\.deepcopy\(\(model, optimizer\)\)"):
        DistributedTrainer(model, other, threads=1, device="cpu")


def test_a_shallow_copy_of_an_optimizer_has_its_own_state():
    model = small()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one_step(model, optimizer)
    other = copy.copy(optimizer)
    assert other.arena is optimizer.arena and other.steps == 1
    state, before = optimizer.state["momentum"].tobytes(), values(model)
    one_step(model, other)
    assert (
        optimizer.state["momentum"].tobytes() == state
        and optimizer.steps == 1
        and values(model) != before
    )


@every_way
def test_an_optimizer_of_no_model(way):
    template = optim.AdamW(lr=0.01, betas=(0.8, 0.9))
    hashes = {train(small(), way(template)).weights_sha256() for _ in range(2)}
    assert hashes == {train(small(), optim.AdamW(lr=0.01, betas=(0.8, 0.9))).weights_sha256()}
    assert template.arena is None


class Averaged(optim.Optimizer):
    """A rule with a setting and an attribute of its own."""

    states = ("mean",)

    def __init__(self, params=None, lr=0.1, share=0.5):
        super().__init__(params, lr, share=share)
        self.notes = {"of": [1, 2]}

    def rule(self, p, g, mean):
        mean = self.share * mean + (1 - self.share) * g
        return p - self.lr * mean, mean


@every_way
def test_an_optimizer_with_a_rule(way):
    model = small()
    optimizer = Averaged(model.parameters())
    one_step(model, optimizer)  # its rule is recorded
    optimizer.restore(optimizer.settings, ["1"])  # as a resume says which parameters do not decay
    new, other = (model, way(optimizer)) if way is copy.copy else way((model, optimizer))
    assert other.undecayed_names == ["1"] and other.notes == optimizer.notes
    one_step(new, other)
    if way is not copy.copy:
        one_step(model, optimizer)
        assert values(model) == values(new) and other.notes is not optimizer.notes


@each_way
def test_schedules(way):
    model = small()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    new, other, its = way((model, optimizer, schedule))
    its.step()
    assert its.optimizer is other and other.lr == 0.05 and optimizer.lr == 0.1
    parts = [optim.linear_warmup(3, after=optim.cosine(9, floor=0.1)), optim.constant()]
    for s in (
        optim.sequential(parts, [5]),
        optim.step_decay(2),
        optim.per_epoch(optim.linear(0.5, 4), 2),
    ):
        assert repr(way(s)) == repr(s) and [way(s)(i) for i in range(12)] == [
            s(i) for i in range(12)
        ]


# --- shallow copies -------------------------------------------------------------------------------


def test_a_shallow_copy_of_a_module_has_the_same_parameters():
    model = placed()
    other = copy.copy(model)
    assert type(other) is type(model) and list(map(id, other.parameters())) == list(
        map(id, model.parameters())
    )
    places = [dict(p.places) for p in model.parameters()]
    layer = copy.copy(model[1])
    assert layer.weight is model[1].weight and [p.places for p in model.parameters()] == places
    before = values(model)
    train(other)
    assert values(model) == values(other) != before
    other.append(nn.ReLU())
    assert len(model) == 3
    del other
    junk = reuse_memory()
    assert np.isfinite(output(model.to(0), ROWS)).all() and junk


@every_way
def test_a_parameter_alone(way):
    model = small()
    optim.SGD(model.parameters(), lr=0.1)
    p = model[0].weight
    p.requires_grad = False
    q = way(p)
    assert type(q) is nn.Parameter and q.data.tobytes() == p.data.tobytes() and not q.requires_grad
    assert not np.shares_memory(p.data, q.data) and not np.shares_memory(p.grad.data, q.grad.data)
    assert not isinstance(q.memory, Range) and q.places == {}
    q.data[...] = 3
    assert not (p.data == 3).any()
    optim.SGD([q], lr=0.1)


@every_way
def test_buffers_keep_their_kind(way):
    norm = nn.BatchNorm1d(4)
    for b in (norm.running_mean, Buffer(X[0])):
        new = way(b)
        assert (
            type(new) is Buffer
            and new.requires_grad == b.requires_grad
            and new.data.tobytes() == b.data.tobytes()
        )


def test_an_arena_is_not_copied_without_its_parameters():
    model = small()
    arena = optim.SGD(model.parameters(), lr=0.1).arena
    with pytest.raises(ConfigError, match="arena"):
        copy.copy(arena)
    for way in WAYS.values():
        new = way(arena)
        assert (
            new.sha256() == arena.sha256()
            and new.offsets == arena.offsets
            and new.trained == arena.trained
        )
        assert not np.shares_memory(new.params, arena.params) and new.frozen == arena.frozen


# --- tensors --------------------------------------------------------------------------------------


class Marked(Tensor):
    """A tensor with an attribute."""


class Slotted(nn.Parameter):
    """A parameter with slots."""

    __slots__ = ("mark", "__private", "__dict__")

    def keep(self, value):
        self.__private = value
        return self

    def kept(self):
        return self.__private


@every_way
def test_tensors(way):
    leaf = Tensor(X, requires_grad=True)
    (leaf * 2).sum().backward()
    leaf.device = device(1)
    new = way(leaf)
    assert (
        new.data.tobytes() == X.tobytes()
        and new.requires_grad
        and not np.shares_memory(new.data, leaf.data)
    )
    assert new.grad.data.tobytes() == leaf.grad.data.tobytes() and new.device == device(1)
    assert not np.shares_memory(new.grad.data, leaf.grad.data)
    ids = way(Tensor([1, 2, 3], dtype=np.int32))
    assert ids.dtype == np.int32 and ids.tolist() == [1, 2, 3]
    with odyssey.no_grad():
        lanes, tokens, mask = (
            F.softmax(Tensor(X)),
            F.to_lanes(Tensor(SEQUENCES[0]), "tokens"),
            Tensor(X) > 0,
        )
    assert lanes.layout == "lanes" and tokens.layout == "tokens"
    for t in (lanes, tokens, mask, Tensor(np.zeros((0, 3))), Tensor(2.5)):
        new = way(t)
        assert (
            type(t) is type(new)
            and new.data.tobytes() == t.data.tobytes()
            and new.shape == t.shape
            and new.mask == t.mask
        )
        assert t.size == 0 or (new + 1).data.tobytes() == (t + 1).data.tobytes()
    frozen = np.arange(4, dtype=F32)
    frozen.flags.writeable = False
    new = way(Tensor(frozen))
    new.data[...] = 1
    assert frozen[0] == 0
    marked = Marked(X)
    marked.mark = ["a"]
    assert type(way(marked)) is Marked and way(marked).mark == ["a"]
    slotted = Slotted(X).keep("c")
    slotted.mark, slotted.other = "b", "d"
    new = way(slotted)
    assert (type(new), new.mark, new.kept(), new.other) == (Slotted, "b", "c", "d")
    new.other = "e"
    assert slotted.other == "d"


@every_way
def test_a_tape_is_not_copied(way):
    leaf = Tensor(X, requires_grad=True)
    made = leaf * 2
    with pytest.raises(ConfigError, match=r"detach\(\)"):
        way(made)
    model = small()
    model.last = made
    if way is not copy.copy:
        with pytest.raises(ConfigError, match=r"detach\(\)"):
            way(model)
    assert way(made.detach()).tolist() == made.tolist()


@each_way
def test_tensors_that_share_memory_share_it_again(way):
    x = Tensor(X.copy())
    one, other = way((x, x.detach()))
    one.data[0, 0] = 99
    assert other.data[0, 0] == 99 and x.data[0, 0] != 99


@each_way
def test_activations_of_a_program(way, monkeypatch):
    """Layers that a program has added (functional.unary)."""
    monkeypatch.setitem(F.ACTIVATIONS, "Doubled", ("2 x.", lambda x, by=2.0: x * by))
    assert output(way(nn.Doubled(3.0)), ROWS).tobytes() == (3 * X[:6]).tobytes()
    assert type(way(nn.Doubled())) is nn.Doubled
    with pytest.raises(AttributeError, match="Tripled"):
        nn.Tripled  # noqa: B018
    with pytest.raises(AttributeError, match="Tripled"):
        nn.layers.Tripled  # noqa: B018


def test_tensors_of_a_recording_are_refused():
    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x):
            return self.layer(copy.deepcopy(x))

    with pytest.raises(OdysseyError, match="recorded"):
        train(Copies())


# --- what is not copied ---------------------------------------------------------------------------


@every_way
def test_trainers_are_refused_by_name(way):
    trainer = train(small())
    for value in (trainer, [trainer], trainer.context) if way is not copy.copy else (trainer,):
        with pytest.raises(
            ConfigError, match=r"DistributedTrainer.*copy\.deepcopy\(\(model, optimizer"
        ):
            way(value)
    with pytest.raises(ConfigError, match="Engine"):
        way(trainer.stepper.engine)
    assert trainer.weights_sha256()


@every_way
def test_wrappers_are_refused_by_name(way):
    def work():
        net = DDP(small())
        optimizer = optim.Adam(net.parameters(), lr=0.1)
        one_step(net, optimizer)
        with pytest.raises(ConfigError, match=r"DistributedDataParallel.*ddp\.module"):
            way(net)
        if way is not copy.copy:
            new = way(net.module)
            with pytest.raises(ConfigError, match="without inputs"):
                new()
            at_copy = values(net.module)
            F.cross_entropy(net.eval()(Tensor(X)), Y).backward()
            F.cross_entropy(new(Tensor(X)), Y).backward()  # nobody reduces it
            assert net.reductions == 2 and values(net.module) == at_copy
            new, other = way((net.module, optimizer))
            one_step(new, other)
            assert net.reductions == 2 and values(net.module) == at_copy != values(new)
            own = DDP(way(net.module))
            F.cross_entropy(own(Tensor(X)), Y).backward()
            assert own.reductions == 1
        with pytest.raises(ConfigError, match="ommunicator"):
            way(net._comm)
        return True

    assert on(2, work) == [True] * 2


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"zero": 1}),
        (2, {"zero": 2}),
        (2, {"zero": 3}),
        (2, {"mesh": Mesh(pp=2)}),
        (2, {"mesh": Mesh(tp=2)}),
        (4, {"mesh": Mesh(dp=2, pp=2), "zero": 1}),
    ],
    ids=str,
)
@each_way
def test_ranks_that_have_parts(ranks, settings, way):
    """Weights of which a rank has a part are refused, or whole; within writing() they are whole."""
    whole = settings.get("zero", 0) < 3 and "mesh" not in settings

    def work(comm):
        model, optimizer = small(), optim.Adam(lr=0.05)
        trainer = train(model, optimizer, comm=comm, **settings)
        now = {name: value.tobytes() for name, value in trainer.state_dict().items()}
        if whole:
            assert values(way(model)) == now
        else:
            with pytest.raises(ConfigError, match=r"\[copy\].*trainer\.writing\(\)"):
                way(model)
            with pytest.raises(ConfigError, match=r"\[copy\].*trainer\.writing\(\)"):
                way(model[0].weight)
        with pytest.raises(ConfigError, match=r"\[copy\].*trainer\.writing\(\)"):
            way(optimizer)
        with pytest.raises(ConfigError, match=r"\[copy\].*trainer\.writing\(\)"):
            copy.copy(optimizer)
        with trainer.writing():
            new, other = way((model, optimizer))
        assert values(new) == now
        new.load_state_dict({name: value + 1 for name, value in new.state_dict().items()})
        assert {name: value.tobytes() for name, value in trainer.state_dict().items()} == now
        state = trainer.training_state.optimizer_state()
        assert all(other.state[k].tobytes() == state[k].tobytes() for k in optimizer.states)
        return {name: value.tolist() for name, value in trainer.state_dict().items()}

    results = mock.run(ranks, work)
    assert all(result == results[0] for result in results)


def test_reads_of_parts_give_arrays_that_can_be_written():
    """A copy of an array of which a rank has a part is an ordinary array."""

    def work(comm):
        model = small()
        train(model, comm=comm, mesh=Mesh(pp=2))
        for way in (*EVERY_WAY.values(), lambda a: a.copy()):
            new = way(model[0].weight.data)
            assert type(new) is np.ndarray
            new[...] = 1
        return True

    assert mock.run(2, work) == [True] * 2


def test_offloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 64)
    model, optimizer = small(), optim.Adam(lr=0.05)
    trainer = train(model, optimizer, offload=str(tmp_path))
    assert isinstance(trainer.arena.make, offload.Files)
    at_copy = values(model)
    new, other = copy.deepcopy((model, optimizer))
    assert values(new) == at_copy and other.arena.make is optimizer.arena.make
    loaded = pickled(model)
    train(new, other)
    assert values(model) == at_copy == values(loaded) != values(new)
    del trainer
    train(model, optimizer, offload=str(tmp_path))
    assert values(model) == values(new)


RANKS = """
import copy, gc, pickle, sys
import numpy as np
from odyssey import DistributedTrainer, Mesh, data, nn, optim
from odyssey.errors import ConfigError

g = np.random.default_rng(3)
x, y = g.normal(size=(48, 8)).astype(np.float32), g.integers(0, 3, 48)
loader = data.DataLoader(data.arrays(x, y, classes=3), batch_size=24)


def build():
    nn.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))


def take(model, optimizer, **settings):
    trainer = DistributedTrainer(model, optimizer, shard_size=8, threads=1, device="cpu", **settings)
    trainer.fit(loader, epochs=1, verbose=False)
    return trainer


for settings in {}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"mesh": Mesh(pp=2)}, {"mesh": Mesh(tp=2)}:
    model, optimizer = build(), optim.Adam(lr=0.05)
    trainer = take(model, optimizer, **settings)
    with trainer.writing():
        copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    want = take(model, optimizer, **settings).weights_sha256() if not settings else None
    comm = trainer.comm
    try:
        copy.deepcopy(comm)
    except ConfigError as problem:
        assert "ommunicator" in str(problem)
    else:
        raise SystemExit("a communicator was copied")
    del trainer, model, optimizer
    gc.collect()
    junk = [np.full(n, np.nan, np.float32) for n in (16, 48, 128, 512) for _ in range(100)]
    hashes = [take(*pair, **settings).weights_sha256() for pair in copies]
    assert hashes[0] == hashes[1] and want in (None, hashes[0]), (settings, hashes, want)
    if comm.rank == 0:
        print(hashes[0])
"""


def test_two_processes(launch):
    (launch.folder / "ranks.py").write_text(RANKS)
    done = launch.python("ranks.py", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.split()
    assert len(lines) == 6 and len(set(lines)) == 1
