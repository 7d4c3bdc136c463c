"""Optimizers around their kernels, and schedules: settings, state, one arena per model.

The formulas are tested in tests/kernels/test_optimizers.py.
"""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from odyssey import functional as F
from odyssey import nn, optim
from odyssey.core import native
from odyssey.core.arena import Arena
from odyssey.errors import ConfigError
from odyssey.settings.recipes import OPTIMIZERS, SCHEDULES, check_listed


def trained(optimizer, model, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for i, p in enumerate(model.parameters()):
            p.grad.numpy()[...] = np.random.default_rng([step, i]).standard_normal(p.shape)
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: optim.Adam(p, lr=0.01),
        lambda p: optim.AdamW(p, lr=0.01),
    ],
)
def test_state_goes_on_where_it_was(make):
    nn.manual_seed(0)
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    optimizer = make(model.parameters())
    trained(optimizer, model, 3)
    second = make(other.named_parameters())
    second.lr = 77.0
    other.load_state_dict(model.state_dict())
    second.load_state_dict(optimizer.state_dict())
    assert (second.steps, second.lr) == (3, optimizer.lr)
    trained(optimizer, model, 2, 3)
    trained(second, other, 2, 3)
    assert np.array_equal(model.weight.numpy(), other.weight.numpy())
    assert np.array_equal(model.bias.numpy(), other.bias.numpy())


def test_state_dict_is_a_copy():
    model = nn.Linear(2, 2)
    optimizer = optim.Adam(model.parameters())
    state = optimizer.state_dict()
    trained(optimizer, model, 1)
    assert not state["m"].any()


def test_state_of_another_model_is_refused():
    small, large = (
        optim.Adam(nn.Linear(2, 2).parameters()),
        optim.Adam(nn.Linear(20, 20).parameters()),
    )
    with pytest.raises(ConfigError, match="the state has no m of"):
        large.load_state_dict(small.state_dict())
    with pytest.raises(ConfigError, match="the state has no m of"):
        small.load_state_dict(optim.SGD(nn.Linear(2, 2).parameters()).state_dict())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: optim.SGD(lr=-1), "lr is -1"),
        (lambda: optim.SGD(lr=math.nan), "lr is nan"),
        (lambda: optim.SGD(lr=math.inf), "lr is inf"),
        (lambda: optim.SGD(momentum=1.0), "momentum is 1.0"),
        (lambda: optim.SGD(momentum=-0.1), "momentum is -0.1"),
        (lambda: optim.SGD(nesterov=True), "nesterov"),
        (lambda: optim.SGD(weight_decay=-1), "weight_decay is -1"),
        (lambda: optim.Adam(betas=(0.9, 1.0)), "beta2 is 1.0"),
        (lambda: optim.AdamW(eps=0), "AdamW] eps is 0"),
        (lambda: optim.SGD(["weight"]), "model.parameters()"),
        (lambda: optim.SGD([]), "no parameters"),
        (lambda: optim.SGD().step(), "no parameters"),
        (lambda: optim.SGD().zero_grad(), "no parameters"),
    ],
)
def test_settings_that_are_refused(make, says):
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)


# --- arena ---


def test_arena_layout():
    model = nn.LeNet5()
    before = model.state_dict()
    arena = optim.SGD(model.parameters()).arena
    assert arena.params.ctypes.data % 64 == 0 and arena.grads.ctypes.data % 64 == 0
    end = 0
    for p in model.parameters():
        at = p.numpy().ctypes.data - arena.params.ctypes.data
        assert at % 64 == 0 and at >= end, (
            "every parameter starts on a vector, after the one before"
        )
        assert p.grad.numpy().ctypes.data - arena.grads.ctypes.data == at, (
            "gradients have the same layout"
        )
        end = at + 4 * p.size
    assert end <= 4 * arena.size == arena.params.nbytes
    assert arena.size % 16 == 0
    for name, value in model.state_dict().items():
        assert np.array_equal(value, before[name]), "values move along"


def test_gradients_move_along():
    """An optimizer made after the first backward() still sees it."""
    model = nn.Linear(3, 2)
    model.bias.grad.numpy()[...] = 4
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    before = model.bias.numpy().copy()
    optimizer.step()
    assert np.array_equal(model.bias.numpy(), before - 2)


def test_zero_grad_and_views():
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters())
    model.bias.grad.numpy()[...] = 4
    assert np.count_nonzero(optimizer.arena.grads) == 2
    optimizer.zero_grad()
    assert not model.bias.grad.numpy().any()


def test_one_model_has_one_arena():
    model = nn.Linear(3, 2)
    assert optim.SGD(model.parameters()).arena is optim.Adam(model.parameters()).arena


def test_parameters_of_two_arenas_are_refused():
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    optim.SGD(one.parameters())
    with pytest.raises(ConfigError, match="belong to another optimizer"):
        optim.SGD([*one.parameters(), *two.parameters()])
    with pytest.raises(ConfigError, match="belong to another optimizer"):
        optim.SGD([one.weight])


def test_parameters_of_another_arena_are_refused_wherever_they_stand():
    """A fresh parameter in front of one that already belongs elsewhere."""
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    first = optim.SGD(one.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="belong to another optimizer"):
        optim.SGD([*two.parameters(), *one.parameters()])
    one.bias.grad.numpy()[...] = 1
    before = one.bias.numpy().copy()
    first.step()
    assert np.array_equal(one.bias.numpy(), before - 1), (
        "the first optimizer still has its parameters"
    )


def test_an_optimizer_has_one_model():
    optimizer = optim.SGD(nn.Linear(3, 2).parameters())
    other = optim.SGD(nn.Linear(3, 2).parameters())
    with pytest.raises(ConfigError, match="already updates another model"):
        optimizer.bind(other.arena)


def test_hash_follows_the_values_and_the_layout_hash_the_names():
    nn.manual_seed(0)
    a = optim.SGD(nn.Linear(3, 2).named_parameters()).arena
    nn.manual_seed(0)
    b = optim.SGD(nn.Linear(3, 2).named_parameters()).arena
    c = optim.SGD(nn.Linear(2, 3).named_parameters()).arena
    assert a.sha256() == b.sha256()
    assert a.layout_hash() == b.layout_hash() != c.layout_hash()
    b.params[0] = np.nextafter(b.params[0], np.float32(9))
    assert a.sha256() != b.sha256()


# --- schedules ---


def test_cosine_ends_and_middle():
    factor = optim.cosine(100, floor=0.1)
    assert factor(0) == 1
    assert factor(50) == pytest.approx(0.55)
    assert factor(100) == factor(1000) == pytest.approx(0.1)
    values = [factor(i) for i in range(101)]
    assert values == sorted(values, reverse=True)
    assert optim.cosine(0)(0) == 1


def test_step_decay():
    factor = optim.step_decay(3, 0.5)
    assert [factor(i) for i in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_warmup_is_a_line_from_the_first_step_and_then_what_follows_starts_at_its_beginning():
    factor = optim.linear_warmup(4, optim.cosine(10))
    assert [factor(i) for i in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    assert factor(14) == pytest.approx(0, abs=1e-12)
    assert [optim.linear_warmup(2)(i) for i in (0, 1, 2, 99)] == [0.5, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "total", "warmup", "at", "wanted"),
    [
        ("constant", 10, 0, (0, 9), (1, 1)),
        ("constant", 10, 2, (0, 1, 2), (0.5, 1, 1)),
        ("step", 9, 0, (2, 3, 5, 6, 8), (1, 0.1, 0.1, 0.01, 0.01)),
        ("cosine", 10, 0, (0, 5, 10), (1, 0.5, 0)),
        ("cosine", 12, 2, (0, 1, 2, 7, 12), (0.5, 1, 1, 0.5, 0)),
        ("linear-warmup", 50, 0, (0, 4, 5, 49), (0.2, 1, 1, 1)),
        ("linear-warmup", 50, 2, (0, 1, 2), (0.5, 1, 1)),
    ],
)
def test_schedules_by_name(name, total, warmup, at, wanted):
    factor = optim.schedule(name, total, warmup)
    assert [factor(i) for i in at] == pytest.approx(list(wanted))


def test_unknown_schedule():
    with pytest.raises(ConfigError, match=f"'square'.*{', '.join(SCHEDULES)}"):
        optim.schedule("square", 10)


def test_a_warm_up_over_epochs_and_then_a_cosine():
    """LinearLR(0.1, 5 epochs), then CosineAnnealingLR over 95, joined by SequentialLR at 5:
    PyTorch's factors.
    """
    by_epoch = optim.sequential([optim.linear(0.1, 5), optim.cosine(95)], milestones=[5])
    expected = [0.1 + 0.9 * e / 5 for e in range(5)]
    expected += [0.5 * (1 + math.cos(math.pi * e / 95)) for e in range(95)]
    assert [by_epoch(e) for e in range(100)] == pytest.approx(expected)
    by_step = optim.per_epoch(by_epoch, 7)
    assert [by_step(s) for s in (0, 6, 7, 34, 35)] == pytest.approx([0.1, 0.1, 0.28, 0.82, 1.0])


@pytest.mark.parametrize("milestones", [[], [5, 5], [0, 3], [5]])
def test_milestones_that_do_not_fit(milestones):
    with pytest.raises(ConfigError, match="give 2 milestones that increase, from 1 on"):
        optim.sequential([optim.constant()] * 3, milestones)


def test_learning_rate_scaling():
    assert [optim.lr_factor(rule, 512, 128) for rule in ("none", "sqrt", "linear")] == [1, 2, 4]
    with pytest.raises(ConfigError, match="choose from none, sqrt, linear"):
        optim.lr_factor("cubic", 512, 128)


def test_every_name_of_the_settings_is_declared_in_one_place():
    """The classes and schedules are found by themselves; one that settings/recipes.py lacks is
    refused at import.
    """
    assert list(optim.BY_NAME) == list(OPTIMIZERS)
    for name in SCHEDULES:
        assert 0 <= optim.schedule(name, 30, 3)(29) <= 1
    with pytest.raises(
        ConfigError,
        match=r"\[settings\] optimizers: 'zork' is not in settings/recipes.py; add it there",
    ):
        check_listed("optimizers", {**optim.BY_NAME, "zork": optim.Adam}, OPTIMIZERS)
    with pytest.raises(ConfigError, match="schedules: 'step' of settings/recipes.py has no code"):
        check_listed("schedules", {*SCHEDULES} - {"step"}, SCHEDULES)


# --- records that are kept from step to step ------------------------------------------------------


class Decaying(optim.Adam):
    """An optimizer whose update is a rule, with a setting that changes the recorded program."""

    states = ("m",)

    def __init__(self, params=None, lr=0.01, weight_decay=0.0):
        super().__init__(params, lr, weight_decay=weight_decay)
        self.bounded = True

    def rule(self, p, g, m):
        m = self.betas[0] * m + (1 - self.betas[0]) * g
        turn = F.tanh(m) if self.bounded else m
        return p - self.lr * (turn + self.weight_decay * p), m


KINDS = [
    lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    lambda p: optim.AdamW(p, lr=0.01),
    lambda p: optim.RMSprop(p, lr=0.01, weight_decay=0.1),
    lambda p: optim.Lion(p, lr=0.01, weight_decay=0.1),
    lambda p: optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    lambda p: Decaying(p, lr=0.01, weight_decay=0.1),
]
KIND_NAMES = ["SGD", "Adam", "AdamW", "RMSprop", "Lion", "Adagrad", "rule"]


def layers(depth):
    """A model of `depth` layers with buffers of running statistics among them."""
    nn.manual_seed(3)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU()) for _ in range(depth)]
    )


@pytest.fixture
def ran(monkeypatch):
    """The tables that the library ran, int64 (records, numbers), one after another."""
    lib, tables = native.library(), []
    plain = lib.run

    def run(program, records, context, bases=None):
        tables.append(
            native.memory(program, 8 * records * lib.record)
            .view(np.int64)
            .reshape(records, -1)
            .copy()
        )
        return plain(program, records, context, bases)

    monkeypatch.setattr(lib, "run", run)
    return tables


def built_anew(optimizer, updates, divisor, lr, samples):
    """The table of a step as it is built from nothing: the checks of the gradients, then the
    update of each run.
    """
    lib = native.library()
    updates = optimizer.trained(updates)
    checks = [[lib.codes["finite"], u.grads, u.n] for u in updates]
    rules = [record for u in updates for record in optimizer.records(lib, u, divisor, lr, samples)]
    table = np.zeros((len(checks) + len(rules), lib.record), np.int64)
    for row, record in zip(table, checks + rules, strict=True):
        row[: len(record)] = record
    return table


@pytest.mark.parametrize("make", KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_kept_records_are_those_of_a_fresh_table_whatever_changes_between_steps(make, seed, ran):
    random = Random(seed)
    model = layers(4)
    optimizer = make(None)
    optimizer.bind(Arena.of(list(model.named_parameters()), list(model.named_buffers())))
    arena, exempt = optimizer.arena, set()
    names = [name for name, _ in model.named_parameters()]
    arena.grads[:] = np.random.default_rng(seed).standard_normal(arena.grads.size)
    divisors = [np.full(1, 3, np.float32) for _ in range(2)]
    state = {"cuts": [0, arena.size], "divisor": divisors[0], "samples": divisors[0]}

    def scale(name):
        value = getattr(optimizer, name)
        factor = random.uniform(0.5, 0.99)
        setattr(
            optimizer,
            name,
            tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor,
        )

    def other_cuts():
        inner = [16 * random.randrange(1, arena.size // 16) for _ in range(3)]
        state["cuts"] = sorted({0, arena.size, *inner})

    def frozen():
        p = random.choice(list(model.parameters()))
        p.requires_grad = not p.requires_grad

    def other_arrays():
        optimizer.keep({name: a.copy() for name, a in optimizer.state.items()})

    def toggled(name):
        setattr(optimizer, name, not getattr(optimizer, name))

    def moved():
        arena.make = native.aligned
        arena._add([])

    def steps():
        optimizer.steps = random.randrange(100)

    changes = [
        lambda: None,
        lambda: scale(
            random.choice(
                [k for k, v in optimizer.settings.items() if isinstance(v, (float, tuple))]
            )
        ),
        lambda: setattr(
            optimizer, "undecayed", random.choice([None, optim.vectors, lambda n, p: n in exempt])
        ),
        lambda: exempt.symmetric_difference_update({random.choice(names)}),
        lambda: state.update(divisor=random.choice(divisors)),
        lambda: state.update(samples=random.choice(divisors)),
        other_cuts,
        frozen,
        other_arrays,
        moved,
        steps,
    ]
    flags = [name for name in ("nesterov", "decoupled", "bounded") if hasattr(optimizer, name)]
    changes += [lambda name=name: toggled(name) for name in flags]
    for _ in range(120):
        for change in random.choices(changes, k=random.choice([0, 0, 1, 1, 2])):
            change()
        arena.grads[3] = random.choice([1.0, 1.0, 1.0, np.nan])
        params, grads = arena.address(native.PARAMS), arena.address(native.GRADS)
        updates = [
            optim.Update(params + 4 * a, grads + 4 * a, a, b - a, a)
            for a, b in zip(state["cuts"], state["cuts"][1:], strict=False)
        ]
        lr, agree = random.choice([optimizer.lr, 0.003]), random.choice([None, bool])
        ran.clear()
        divisor, samples = state["divisor"].ctypes.data, state["samples"].ctypes.data
        ok = optimizer.apply(updates, divisor, lr, agree, samples)
        assert ok == (np.isfinite(arena.grads[3]) or not model[0][0].weight.requires_grad)
        optimizer.steps += not ok
        expected = built_anew(optimizer, updates, divisor, lr, samples)
        optimizer.steps -= not ok
        table = np.concatenate(ran)
        assert np.array_equal(table, expected[: len(table)])
        assert (
            len(table) == len(expected)
            if ok or agree is None
            else len(table) == len(optimizer.trained(updates))
        )


@pytest.mark.parametrize("make", KINDS, ids=KIND_NAMES)
def test_a_step_in_which_only_numbers_change_builds_one_record_for_each_kind_of_piece(
    make, monkeypatch
):
    model = layers(30)
    optimizer = make(model.named_parameters())
    optimizer.undecayed = lambda name, p: p.ndim < 2 and name.endswith("bias")
    kind, calls = type(optimizer), []
    plain = kind._records
    monkeypatch.setattr(
        kind,
        "_records",
        lambda self, *arguments: calls.append(arguments) or plain(self, *arguments),
    )
    built = []
    for step in range(4):
        optimizer.lr = 0.1 / (1 + step)
        calls.clear()
        trained(optimizer, model, 1, step)
        built.append(len(calls))
    assert built == [4 * 30, 2, 2, 2]
