"""Parameters that several stages of a pipeline use: random networks, places by hand, and what is
sent for them.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from odyssey import data, device, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core.native import GRADS
from odyssey.core.program import Range
from odyssey.data.nested import Form
from odyssey.errors import ConfigError, DeviceError
from odyssey.nn import PipelineParallel, Stage
from odyssey.parallel import costs
from odyssey.parallel.mesh import Mesh
from odyssey.parallel.stages import partition
from odyssey.train.trainer import DistributedTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))
import cases
import draws
from chance import Random

MNIST = data.load("mnist", train=True)


# --- random ones ----------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """Cases are of networks with shared parameters, on pipelines, some of them with tensor
    parallelism.
    """
    plain, words = draws.training, (" tied", "again ", "checkpoint ", "one weight", "one layer")

    def training(seed, index, all_data=False, changing=False):
        tries = (plain(seed + 1000 * i, index) for i in itertools.count())
        return next(made for made in tries if any(word in made.network.text for word in words))

    def layout(seed, index, of, number=0, all_data=False):
        random = Random(seed, index, f"pipeline {number}")
        return (draws.shared_layers if random.chance(0.2) else draws.pipeline)(random, of)

    monkeypatch.setattr(draws, "training", training)
    monkeypatch.setattr(draws, "layout", layout)


@pytest.mark.parametrize("play", [cases.play, cases.play_resumed])
def test_random_networks(play, drawn):
    outcomes = Counter()
    for index in range(16 if play is cases.play else 8):
        outcome, splits, text = play(cases.Threads(), 1, index)
        assert outcome.kind in ("same", "refused"), f"{index}: {outcome.text}\n{text}"
        outcomes[outcome.kind, splits] += 1
    assert outcomes["same", True] > sum(outcomes.values()) // 2, outcomes


# --- placed by hand -------------------------------------------------------------------------------


class Everything(nn.Module):
    """A convolution, a norm with its statistics, and weights of linear layers on three places;
    one in generic ops too, on the last place: its gradient is made there first, and added
    last.
    """

    def __init__(self):
        super().__init__()
        self.conv, self.conv1 = (
            nn.Conv2d(1, 1, 3, padding=1) @ device(0),
            nn.Conv2d(1, 1, 3, padding=1),
        )
        self.a, self.b, self.c = (
            nn.Linear(196, 14) @ device(0),
            nn.Linear(14, 196) @ device(1),
            nn.Linear(196, 14),
        )
        self.norm, self.norm2 = nn.BatchNorm1d(14) @ device(0), nn.BatchNorm1d(14)
        self.d = nn.Linear(14, 10) @ device(2)
        self.conv1.weight, self.c.weight = self.conv.weight, self.a.weight
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(self.norm2, name, getattr(self.norm, name))
        self.conv1 @ device(1)
        self.c @ device(2)
        self.norm2 @ device(2)

    def forward(self, x):
        x = F.relu(self.norm(self.a(F.flatten(F.max_pool2d(self.conv(x), 2)))))
        x = self.conv1(self.b(x.to(1)).reshape(x.shape[0], 1, 14, 14))
        x = F.tanh(self.norm2(self.c(F.flatten(x).to(2))))
        return self.d(x * self.norm2.weight + self.a.weight.to(2).mean(1))


def staged(places, schedule):
    """The same layer in all stages but the last, whose layer has its bias."""
    fc, last = nn.Linear(784, 784), nn.Linear(784, 784)
    last.bias = fc.bias
    stages = [Stage([fc, nn.Tanh()], device=place) for place in places[:-1]]
    return PipelineParallel(
        [*stages, Stage([last], device=places[-1])], micro_batch_size=8, schedule=schedule
    )


class Tokens(nn.Module):
    """Row sums of an image as tokens of a GPT whose output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.gpt = nn.models.build(
            "gpt", vocab_size=12, context=28, layers=2, heads=2, width=8, dropout=0.1
        )

    def forward(self, x):
        ids = (x.reshape(x.shape[0], 28, 28).mean(2) * 3).clamp(0, 11)
        return self.gpt(ids).mean(1)


MODELS = {
    "everything": (Everything, (3,)),
    "stages": (lambda: staged((0, 1, 2), "1f1b"), (3,)),
    "turns": (lambda: staged((0, 1, 0, 1), "interleaved"), (2,)),
    "gpt": (Tokens, (2, 3)),
}


def trained(comm, model, settings, folder=None, epochs=2):
    nn.manual_seed(1)
    if model in ("stages", "turns"):
        settings = {
            k: v for k, v in settings.items() if k not in ("shard_size", "pipeline_schedule")
        }
    made = MODELS[model][0]()
    trainer = DistributedTrainer(
        made, optim.AdamW(lr=2e-3), comm=comm, threads=1, clip_norm=0.3, **settings
    )
    loader = data.DataLoader(MNIST.take(53), batch_size=32, shuffle=True)
    trainer.evaluate(MNIST.take(20))
    loss = trainer.fit(loader, epochs=epochs, checkpoint_dir=folder).train_loss
    state = {
        k: v.tobytes() if isinstance(v, np.ndarray) else v
        for k, v in trainer.training_state.optimizer_state().items()
    }
    weights = {k: v.tobytes() for k, v in trainer.state_dict().items()}
    return weights, state, loss, trainer.evaluate(MNIST.take(9)), trainer.grad_norm


LAYOUTS = {
    "1f1b": (1, 1, {"pipeline_schedule": "1f1b"}),
    "gpipe": (1, 1, {"pipeline_schedule": "gpipe"}),
    "dp": (2, 1, {"rebalance": True}),
    "zero": (2, 1, {"zero": 1}),
    "tp": (1, 2, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_of_one_process(model, layout, tmp_path):
    dp, tp, settings = LAYOUTS[layout]
    settings = {"shard_size": 8, **settings}
    (one,) = mock.run(1, trained, model, {"shard_size": 8})
    for pp in MODELS[model][1]:
        meshed = {**settings, "mesh": Mesh(dp=dp, pp=pp, tp=tp)}
        if tp > 1 and model in ("stages", "turns"):  # all their layers are shared, and stay whole
            with pytest.raises(ConfigError, match="no layer can be split"):
                mock.run(dp * pp * tp, trained, model, meshed)
            continue
        assert mock.run(dp * pp * tp, trained, model, meshed) == [one] * (dp * pp * tp)
        folder = tmp_path / str(pp)
        mock.run(dp * pp * tp, trained, model, meshed, folder, 1)
        assert mock.run(1, trained, model, {"shard_size": 8}, folder) == [one]


# --- what is sent ---------------------------------------------------------------------------------


def test_a_gradient_goes_from_stage_to_stage_and_the_first_keeps_it():
    trainer = DistributedTrainer(Everything(), optim.SGD(), threads=1)
    parts = partition(
        trainer.stepper.engine.record(8, Form.of_classes(1, 28, 28)), lambda r: r.device
    )
    # 14 x 196, in whole vectors
    (gradient,) = (t.slot for p in parts for t in p.sends if t.slot.nbytes == 4 * 2752)
    order = [
        (p.place, r.op) for p in parts for r in p.records if any(a is gradient for a in r.args)
    ]
    product = "linear_backward_weight"  # what other ops add comes last, as in one process
    assert order == [(2, "fill"), (2, product), (0, product), (0, "accumulate"), (0, "copy")]
    kept = {name: set() for name in trainer.arena.offsets}
    for part, r in ((p, r) for p in parts for r in p.records if r.phase == "backward"):
        for name, at in trainer.arena.offsets.items():
            if any(isinstance(a, Range) and (a.space, a.offset) == (GRADS, 4 * at) for a in r.args):
                kept[name].add(part.place)
    assert all(len(places) == 1 for places in kept.values())
    assert (
        kept["a.weight"]
        == kept["norm.running_mean"]
        == kept["norm.weight"]
        == kept["conv.weight"]
        == {0}
    )


def test_automatic_cuts_know_what_a_shared_parameter_costs():
    model = nn.models.build("gpt", vocab_size=50, context=8, layers=2, heads=2, width=8)
    trainer = DistributedTrainer(model, optim.SGD(), threads=1)
    records = trainer.stepper.engine.record(
        8, data.arrays(np.zeros((8, 8), np.int32), np.zeros((8, 8), np.int32)).form
    )
    _, found = costs.ops(records, trainer.arena, 8, np.ones(len(records)))
    crossing = [op.crossing_bytes for op in found]
    tied, residual = 4 * 50 * 8 // 8, 4 * 8 * 8  # per sample: of the weight, of x (8 tokens, 8)
    assert all(n >= tied + residual for n in crossing[2:-2]) and crossing[-1] == 0
    assert sum(op.parameter_bytes for op in found) == sum(4 * p.size for p in model.parameters())


# --- what is refused ------------------------------------------------------------------------------


def test_a_layer_has_one_place_and_each_that_shares_is_placed():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    x = nn.Parameter(np.ones((2, 4)))
    b @ device(1)
    with pytest.raises(DeviceError, match=r"the weight \(4, 4\) on device\(1\)"):
        a(x)
    a @ device(0)
    y = b(a(x).to(1))
    assert y.device == device(1) and b.weight.device == device(0)
    with pytest.raises(DeviceError, match=r"the bias \(4,\) on device\(0\)"):
        a(y)
    a.to(2)
    with pytest.raises(DeviceError, match=r"the weight \(4, 4\) on device\(2\)"):
        a(x)
