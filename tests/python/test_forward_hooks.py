"""Hooks of modules, and prints in forward(): called and shown for the passes of a training, not
for odyssey's own checks.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from odyssey import DistributedTrainer, Tensor, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.errors import ConfigError

G = np.random.default_rng(0)
SAMPLES = data.arrays(G.standard_normal((64, 8), np.float32), G.integers(0, 3, 64))


class Net(nn.Module):
    """A network of a user's own, whose loss odyssey checks."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, outputs)
        self.prints = False

    def forward(self, x):
        hidden = F.relu(self.a(x))
        if self.prints:
            print(f"mean {hidden.numpy().mean():.6f}")
        return self.b(hidden)


def make(outputs: int = 3) -> Net:
    nn.manual_seed(0)
    return Net(outputs)


def fit(model: Net, comm=None, execution: str = "eager", epochs: int = 1) -> str:
    settings = {"execution": execution, "shard_size": 16, "comm": comm}
    trainer = DistributedTrainer(model, optim.SGD(lr=0.1), **settings)
    trainer.fit(data.DataLoader(SAMPLES, batch_size=64), epochs=epochs, verbose=False)
    return trainer.weights_sha256()


def test_a_hook_gets_what_pytorchs_gets():
    torch = pytest.importorskip("torch")
    calls = {}
    for name, module, x in (
        ("odyssey", nn.Linear(4, 2), Tensor(np.ones((3, 4), np.float32))),
        ("torch", torch.nn.Linear(4, 2), torch.ones(3, 4)),
    ):
        calls[name] = seen = []

        def first(module, args, seen=seen):
            seen.append(("pre", type(module).__name__, len(args)))

        def doubled(module, args):
            return args[0] * 2

        def both(module, args, kwargs, output, seen=seen):
            seen.append(("after", len(args), sorted(kwargs), tuple(output.shape)))

        def zero(module, args, output, seen=seen):
            seen.append(("zero", float(args[0].numpy().mean())))
            return output * 0

        module.register_forward_pre_hook(doubled)
        module.register_forward_pre_hook(first, prepend=True)
        handle = module.register_forward_hook(zero)
        module.register_forward_hook(both, with_kwargs=True)
        seen.append(float(abs(module(x).detach().numpy()).sum()))
        handle.remove()
        handle.remove()
        with module.register_forward_hook(zero, prepend=True):
            module(x)
        seen.append(float(abs(module(x).detach().numpy()).sum()) > 0)
    assert calls["odyssey"] == calls["torch"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_in_eager_training_sees_each_shard_once(ranks):
    original = make()

    def run(comm):
        model = copy.deepcopy(original)
        seen = []
        model.a.register_forward_hook(lambda m, args, y: seen.append(float(y.numpy().mean())))
        return fit(model, comm), seen

    results = mock.run(ranks, run)
    (plain,) = mock.run(1, lambda comm: fit(copy.deepcopy(original), comm))
    assert {sha for sha, _ in results} == {plain}
    assert sorted(len(seen) for _, seen in results) == [4 // ranks] * ranks
    assert len({value for _, seen in results for value in seen}) == 4


def test_a_hook_that_replaces_the_output_is_part_of_the_model():
    """Without it the loss would not even fit, so odyssey's checks call it as well."""
    hashes = set()
    for execution in ("eager", "replay"):
        model = make(5)
        model.register_forward_hook(lambda m, args, y: y[:, :3])
        hashes.add(fit(model, execution=execution))
    assert len(hashes) == 1


def test_a_hook_that_comes_or_goes_changes_the_next_step():
    hashes = []
    for execution in ("eager", "replay"):
        model = make()
        settings = {"execution": execution, "shard_size": 16}
        trainer = DistributedTrainer(model, optim.SGD(lr=0.1), **settings)
        loader = data.DataLoader(SAMPLES, batch_size=64)
        trainer.fit(loader, epochs=1, verbose=False)
        handle = model.a.register_forward_hook(lambda m, args, y: y * 0.5)
        trainer.fit(loader, epochs=1, verbose=False)
        hashes.append(trainer.weights_sha256())
        handle.remove()
        trainer.fit(loader, epochs=1, verbose=False)
        hashes.append(trainer.weights_sha256())
    assert hashes[:2] == hashes[2:] and hashes[0] != hashes[1]


def test_a_hook_that_is_no_function_is_refused():
    with pytest.raises(ConfigError, match="a hook must be a function, and got int"):
        make().register_forward_hook(3)


def test_a_print_in_forward_appears_once_per_shard(capsys):
    model = make()
    model.prints = True
    fit(model)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == 4 and all(line[:5] == "mean " for line in lines)


def test_prints_before_an_error_are_shown(capsys):
    class Failing(Net):
        def forward(self, x):
            print("look here")
            return self.b(x)

    with pytest.raises(Exception, match="16"):
        fit(Failing())
    assert "look here" in capsys.readouterr().out
