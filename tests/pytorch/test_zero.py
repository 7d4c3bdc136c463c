"""ZeRO 1 to 3 of torch modules: random modules have the bits of one process, whole and gone on
with; memory.
"""

from __future__ import annotations

import copy
import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from odyssey.comm import mock
from odyssey.errors import ConfigError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import odyssey.torch as ot  # noqa: E402

MAKING = threading.Lock()  # ranks are threads here, and torch has one generator
WIDTH, CLASSES, SAMPLES = 6, 4, 22


class Nested(nn.Module):
    """Parts that are nested, shared, called twice, used by name outside of their own forward(),
    or not at all.
    """

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(r.randint(1, 4)):
            kind = r.choice(
                [
                    "linear",
                    "shared",
                    "deep",
                    "norm",
                    "lstm",
                    "attention",
                    "branch",
                    "other",
                    "scale",
                    "block",
                ]
            )
            made = {
                "linear": lambda: nn.Linear(WIDTH, WIDTH, bias=r.random() < 0.5),
                "shared": lambda: nn.Sequential(shared, nn.Tanh(), shared),
                "deep": lambda: nn.Sequential(
                    nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH)), nn.Linear(2 * WIDTH, WIDTH)
                ),
                "norm": lambda: nn.BatchNorm1d(WIDTH),
                "lstm": lambda: nn.LSTM(WIDTH, WIDTH, r.randint(1, 2), batch_first=True),
                "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
                "block": lambda: nn.TransformerEncoderLayer(
                    WIDTH, 2, 8, dropout=0.0, batch_first=True
                ),
                "branch": lambda: Branch(),
                "other": lambda: Other(shared),
                "scale": lambda: Scale(),
            }[kind]()
            self.layers.append(made)
        self.unused = nn.Linear(2, 3) if r.random() < 0.4 else None
        self.out = nn.Linear(WIDTH, WIDTH if r.random() < 0.4 else CLASSES)
        if self.out.out_features == WIDTH:
            self.out.weight = shared.weight  # tied
        if r.random() < 0.5:
            for p in r.sample(list(self.parameters()), 2):
                p.requires_grad_(False)
            self.out.bias.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if isinstance(layer, nn.LSTM):
                x = layer(x[:, None])[0][:, 0]
            elif isinstance(layer, nn.MultiheadAttention):
                x = x + layer(x[None], x[None], x[None], need_weights=False)[0][0]
            elif isinstance(layer, nn.TransformerEncoderLayer):
                x = layer(x[:, None])[:, 0]
            else:
                x = layer(x)
        return self.out(x)[:, :CLASSES]


class Branch(nn.Module):
    """Parts of which a shard takes one, in an order that depends on it: ranks need other
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) > 0:
            return self.b(torch.tanh(self.a(x)))
        return self.a(self.b(x)) if float(x.detach()[0, 0]) > 0 else self.a(x)


class Other(nn.Module):
    """Uses the weight of a module without calling it, a slice of one, and its own transposed."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other, self.own = other, nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.other.weight) + (x @ self.own) @ self.own.T[:, :WIDTH]


class Scale(nn.Module):
    """A parameter without dimensions, one of one element, and one that is read as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b * self.a.item()


def trained(comm, number: int, zero: int, steps: int = 4, folder=None, load: bool = False):
    """What a rank holds after a training."""
    r = random.Random(number)
    with MAKING:
        torch.manual_seed(number)
        net = Nested(r)
    kind = r.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.Adafactor])
    given = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([p for p in net.parameters() if p.requires_grad], lr=0.02, **given)
    # no bf16: autocast holds a lock of the process while it reads a parameter, and here ranks are
    # threads of one
    settings = {"clip_norm": r.choice([None, 0.5])}
    shard, gather = r.choice([2, 4, 5]), r.random() < 0.2
    if gather:
        settings["gather"] = True
    made = ot.DistributedTrainer(net, optimizer, comm=comm, zero=zero, shard_size=shard, **settings)
    x = np.random.default_rng(number).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    if load:
        made.load_checkpoint(folder)
    history = made.fit([(x, np.arange(SAMPLES) % CLASSES)] * steps, verbose=False)
    if folder is not None and not load:
        made.save_checkpoint(folder)
    found = made.named_state()
    found["loss"] = np.array(
        [history.records[-1]["train_loss"], made.evaluate([(x, np.arange(SAMPLES) % CLASSES)]).loss]
    )
    found["prediction"] = made.predict(torch.from_numpy(x)).numpy()
    found["norm"] = np.array(made.gradient_norm())
    found.update({f"gradient {name}": g for name, g in made.last_gradients().items()})
    with made.gathered() as whole:
        found.update({f"module {name}": t.numpy().copy() for name, t in whole.state_dict().items()})
    return found, made.fingerprints(), made.weights_sha256()


def test_bytes_of_a_rank(launch):
    """At rest, and at most while a step is taken, with 4 ranks: of what memory() says, and of
    what there is.
    """
    found = {}
    for zero in range(4):
        done = launch.python(Path(__file__).parent / "zero_memory.py", zero, ranks=4, timeout=200)
        assert done.returncode == 0, done.stderr
        found[zero] = [
            json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
        ]
        assert len(found[zero]) == 4
    assert len({rank["sha256"] for ranks in found.values() for rank in ranks}) == 1
    for zero, ranks in found.items():
        for rank in ranks:
            whole, most, memory = 4 * rank["parameters"], 4 * rank["largest"], rank["memory"]
            part = whole / 4 + most  # parameters are not cut
            # each parameter starts on a vector, so there may be a few floats between them
            assert rank["rest"] <= (part if zero == 3 else whole + 64)
            assert memory["parameters"] <= (part + 2 * most if zero == 3 else whole + 64)
            assert memory["optimizer"] <= 2 * (part if zero else whole) + 1000
            assert memory["gradients"] <= (
                2 * part + 4 * most if zero > 1 else 3 * whole + 2_000
            )  # and what goes behind them
            if zero > 1:  # beside them: autograd's own gradients of a parameter, a batch, outputs
                assert rank["peak"] <= sum(memory.values()) + 2 * most + 60_000
    peaks = [max(rank["peak"] for rank in ranks) for ranks in found.values()]
    assert peaks[3] < 0.8 * peaks[2] < 0.55 * peaks[1]


def same(found, one) -> None:
    assert found.keys() == one.keys()
    for name, value in one.items():
        assert np.array_equal(found[name], value, equal_nan=True), name


def check(number: int, folder) -> None:
    """A case: whole on one layout, stopped and gone on with on two others."""
    r = random.Random(-number)
    ((one, prints, sha),) = mock.run(1, trained, number, 0)
    ranks, zero = r.randint(2, 5), r.randint(1, 3)
    everyone = mock.run(ranks, trained, number, zero)
    for found, _, own in everyone:
        same(found, one)
        assert own == sha
    if zero > 1:
        assert (
            tuple(sum(parts) % 2**64 for parts in zip(*(p for _, p, _ in everyone), strict=True))
            == prints
        )
    mock.run(r.randint(1, 5), trained, number, r.randint(0, 3), 2, folder)
    for found, _, own in mock.run(
        r.randint(1, 5), trained, number, r.randint(0, 3), 2, folder, True
    ):
        same(
            {k: v for k, v in found.items() if k != "loss"},
            {k: v for k, v in one.items() if k != "loss"},
        )
        assert own == sha


@pytest.mark.parametrize(
    "number", [*range(12), *(pytest.param(n, marks=pytest.mark.long) for n in range(12, 300))]
)
def test_random_modules_have_the_bits_of_one_process(number, tmp_path):
    check(number, tmp_path)


def little(comm, zero: int, module=None, optimizer=torch.optim.SGD, **settings):
    """A trainer of a small module, and batches for it."""
    with MAKING:
        torch.manual_seed(0)
        net = (
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
            if module is None
            else module()
        )
    x = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)
    made = ot.DistributedTrainer(
        net, optimizer(net.parameters(), lr=0.1), comm=comm, zero=zero, shard_size=2, **settings
    )
    return made, [(x, torch.arange(8) % CLASSES)]


def raised(function, *arguments) -> str:
    with pytest.raises(Exception) as found:
        function(*arguments)
    return str(found.value)


def test_parameters_are_away_outside_of_gathered():
    def rank(comm):
        made, batches = little(comm, 3)
        made.fit(batches, verbose=False)
        says = [
            raised(made.module.state_dict),
            raised(made.module[0].state_dict),
            raised(made.module.load_state_dict, {}),
        ]
        weight = made.module[0].weight
        assert weight.shape == (8, WIDTH) and weight.isnan().all()
        with made.gathered() as module, torch.no_grad():
            says.append(raised(made.fit, batches))
            loss = made.evaluate(batches).loss
            before = {name: t.clone() for name, t in module.state_dict().items()}
            module[0].weight.mul_(2)
        assert made.evaluate(batches).loss != loss
        assert np.array_equal(made.state_dict()["0.weight"], 2 * before["0.weight"].numpy())
        says.append(
            raised(
                ot.DistributedTrainer, made.module, torch.optim.SGD(made.module.parameters(), 0.1)
            )
        )
        with torch.no_grad():
            says.append(raised(weight.mul_, 2))
        return says

    for says in mock.run(3, rank):
        assert all("with zero=3: in `with trainer.gathered():`" in line for line in says[:3]), says
        assert "a step within trainer.gathered(); end the block first" in says[3]
        assert "0.weight is in parts, as an earlier trainer of this module has zero=3" in says[4]
        assert "single memory location" in says[5]


def test_a_later_trainer_takes_the_module_over():
    def rank(comm):
        made, batches = little(comm, 3)
        made.fit(batches, verbose=False)
        with made.gathered() as module:
            later = ot.DistributedTrainer(
                module, torch.optim.SGD(module.parameters(), 0.1), comm=comm, shard_size=2
            )
        later.fit(batches, verbose=False)
        assert "is not where it was" in raised(made.fit, batches)
        return later.state_dict() | {"own": module.state_dict()["0.weight"].numpy()}

    def alone(comm):
        made, batches = little(comm, 0)
        made.fit(batches * 2, verbose=False)
        return made.state_dict()

    (one,) = mock.run(1, alone)
    for found in mock.run(2, rank):
        assert np.array_equal(found.pop("own"), one["0.weight"])
        same(found, one)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_on_one_rank_ends_the_step_on_all_and_the_next_goes_on(zero, where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("no gradient")

    def rank(comm, fails: bool):
        made, batches = little(comm, zero)

        def broken(module, inputs, out):
            if comm.rank != 1:
                return out
            if where == "forward":
                raise ValueError("no output")
            return Fails.apply(out)

        if fails:
            hook = made.module[1].register_forward_hook(broken)
            assert "no " in raised(made.fit, batches)
            hook.remove()
        made.fit(batches * 2, verbose=False)
        return made.state_dict()

    (one,) = mock.run(1, rank, False)
    for found in mock.run(3, rank, True):
        same(found, one)


def test_a_gradient_that_comes_twice_and_numpy_in_forward_are_refused():
    class Twice(nn.Linear):
        def forward(self, x):
            from torch.utils.checkpoint import checkpoint

            y = checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
            return checkpoint(super().forward, y, use_reentrant=True)

    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.layers = (
                nn.Linear(WIDTH, WIDTH),
                nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))),
            )

        def forward(self, x):
            return self.layers(x * float(self.a.weight.detach().numpy().sum()) + self.a(x))

    def rank(comm, module, zero):
        made, batches = little(comm, zero, module)
        return raised(made.fit, batches)

    for says in mock.run(2, rank, lambda: Twice(WIDTH, WIDTH), 2):
        assert (
            " twice, as in checkpoint(use_reentrant=True), and zero=2 has sent its gradient" in says
        ), says
    for says in mock.run(2, rank, Numbers, 3):
        assert "forward() makes NumPy arrays of parameters" in says, says


def take_steps_of_own_loop(comm, zero):
    """Returns the weights after a loop around train_step() that reads odyssey's loader."""
    with MAKING:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.linspace(-1, 1, 26 * 6).reshape(26, 6)
    y = torch.arange(26) % 3
    samples = [(x[i], y[i]) for i in range(26)]
    loader = ot.DataLoader(samples, batch_size=13, shuffle=True, shard_size=2, comm=comm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = ot.DistributedTrainer(net, optimizer, shard_size=2, zero=zero, comm=comm)
    for _ in range(2):
        for batch in loader:
            trainer.train_step(batch)
    return trainer.weights_sha256()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_own_loop_reads_the_shards_that_the_trainer_gives_to_a_rank(zero):
    (expected,) = mock.run(1, take_steps_of_own_loop, 0)
    for ranks in (2, 3):
        assert set(mock.run(ranks, take_steps_of_own_loop, zero)) == {expected}


def test_a_copy_of_a_module_in_parts_is_an_error():
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    expected = [p.detach().clone() for p in module.parameters()]
    batches = [(torch.randn(4, 4), torch.arange(4) % 2)]

    def train(comm):
        net = copy.deepcopy(module)
        optimizer = torch.optim.SGD(net.parameters(), 0.0)
        trainer = ot.DistributedTrainer(net, optimizer, comm=comm, zero=3, shard_size=2)
        with pytest.raises(ConfigError, match="copy it inside `with trainer.gathered"):
            copy.deepcopy(net)
        with trainer.gathered() as whole:
            copied = copy.deepcopy(whole)
        trainer.fit(batches, verbose=False)
        with pytest.raises(ConfigError, match="copy it inside `with trainer.gathered"):
            copy.deepcopy(net)
        return [p.detach() for p in copied.parameters()]

    for copied in mock.run(2, train):
        assert all(map(torch.equal, copied, expected))
