"""Tensors may have any names: of modules called "layer 1" or "größe", too."""

from __future__ import annotations

import random

import numpy as np
import pytest

from odyssey import DistributedTrainer, Mesh, data, nn, optim
from odyssey.checkpoints import Snapshot, Store
from odyssey.checkpoints.header import decode_name, encode_name, find_name_problem
from odyssey.comm import mock

NAMES = ["layer 1", "größe", "a%b", "100 %", "層", "x:y", "a+b", "tab\there", "emoji 🙂", "Ä.ö"]
PLAIN = ["weight", "layers.0.weight", "a/b-c_D.9"]


@pytest.mark.parametrize("name", NAMES + PLAIN)
def test_a_name_comes_back_from_its_form_in_files(name):
    text = encode_name(name)
    assert find_name_problem(text) is None
    assert decode_name(text) == name
    assert (text == name) == (name in PLAIN)


def test_random_names_come_back_and_stay_apart():
    draw = random.Random(0)
    characters = 'ab%2F. /\u00e4\u5c64\U0001f642\x1b\n"\\'
    names = {"x" + "".join(draw.choices(characters, k=draw.randint(1, 20))) for _ in range(2000)}
    forms = {encode_name(name) for name in names}
    assert len(forms) == len(names)
    assert {decode_name(form) for form in forms} == names


def test_a_store_keeps_tensors_of_any_names(tmp_path):
    arrays = {name: np.full(3, i, np.float32) for i, name in enumerate(NAMES + PLAIN)}
    with Store(tmp_path) as store:
        store.save(Snapshot(1, {"parameters": arrays}, {}))
        snapshot, _ = store.newest()
    kept = snapshot.arrays["parameters"]
    assert set(kept) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(kept[name]), array)


class Net(nn.Module):
    """Layers with names that are no words."""

    def __init__(self):
        super().__init__()
        setattr(self, "layer 1", nn.Linear(6, 8))
        self.größe = nn.Linear(8, 3)

    def forward(self, x):
        return self.größe(getattr(self, "layer 1")(x))


X = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 40)


def trained(comm=None, folder=None, steps=None, **settings):
    nn.manual_seed(0)
    trainer = DistributedTrainer(
        Net(), optim.Adam(lr=0.01), shard_size=8, threads=1, comm=comm, **settings
    )
    loader = data.DataLoader(data.arrays(X, Y), 20)
    trainer.fit(loader, epochs=3, steps=steps, checkpoint_dir=folder, verbose=False)
    return trainer.weights_sha256()


@pytest.mark.parametrize(
    "settings", [{}, {"zero": 1}, {"zero": 3}, {"mesh": Mesh(pp=2)}, {"mesh": Mesh(tp=2)}], ids=str
)
def test_a_training_with_such_names_goes_on(settings, tmp_path):
    whole = trained()
    mock.run(2, lambda comm: trained(comm, tmp_path, 3, **settings))
    assert trained(folder=tmp_path) == whole


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_torch_module_with_such_names_goes_on(zero, tmp_path):
    torch = pytest.importorskip("torch")
    import odyssey.torch

    class TorchNet(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = {"layer 1": torch.nn.Linear(6, 8), "größe": torch.nn.Linear(8, 3)}
            self.parts = torch.nn.ModuleDict(layers)

        def forward(self, x):
            return self.parts["größe"](torch.tanh(self.parts["layer 1"](x)))

    torch.manual_seed(0)
    start = TorchNet().state_dict()

    def run(comm=None, folder=None, steps=None, zero=0):
        module = TorchNet()
        module.load_state_dict(start)
        optimizer = torch.optim.Adam(module.parameters(), 0.01)
        trainer = odyssey.torch.DistributedTrainer(
            module, optimizer, shard_size=8, comm=comm, zero=zero
        )
        loader = data.DataLoader(data.arrays(X, Y), 20)
        trainer.fit(loader, epochs=3, steps=steps, checkpoint_dir=folder, verbose=False)
        return trainer.weights_sha256()

    whole = run()
    mock.run(2, lambda comm: run(comm, tmp_path, 3, zero))
    assert run(folder=tmp_path) == whole
