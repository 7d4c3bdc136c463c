"""Stage and PipelineParallel: the seed's example, where layers and values are, and what is
refused.
"""

from __future__ import annotations

import numpy as np
import pytest

import odyssey
from odyssey import PipelineParallel, Stage, Tensor, data, device, nn, optim
from odyssey import functional as F
from odyssey.comm import Communicator, mock
from odyssey.core.program import fuse
from odyssey.errors import ConfigError
from odyssey.train.trainer import DistributedTrainer


def layers():
    """Four convolutions and two linear layers, for images of 10 x 10."""
    nn.manual_seed(6)
    conv1, conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
    conv3, conv4 = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3)
    return conv1, conv2, conv3, conv4, nn.Linear(24, 16), nn.Linear(16, 5)


def seeds_example(**settings):
    conv1, conv2, conv3, conv4, fc1, fc2 = layers()
    return PipelineParallel(
        stages=[
            Stage(layers=[conv1, conv2], device=0),
            Stage(layers=[conv3, conv4], device=1),
            Stage(layers=[fc1, fc2], device=2),
        ],
        micro_batch_size=8,
        **settings,
    )


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3, self.conv4, self.fc1, self.fc2 = layers()

    def forward(self, x):
        x = self.conv4(self.conv3(self.conv2(self.conv1(x))))
        return self.fc2(self.fc1(F.flatten(x)))


def images(n=40):
    rng = np.random.default_rng(n)
    return data.arrays(rng.standard_normal((n, 1, 10, 10)).astype(np.float32), np.arange(n) % 5)


def trained(model, execution="replay"):
    trainer = DistributedTrainer(model, optim.SGD(lr=0.05), shard_size=8, execution=execution)
    trainer.fit(data.DataLoader(images(), batch_size=20, shuffle=True), epochs=2)
    return trainer.weights_sha256()


def test_the_example_of_the_seed():
    model = seeds_example()
    assert model.places == (0, 1, 2) and len(model.stages) == 3
    assert (model.micro_batch_size, model.schedule) == (8, "1f1b")
    y = model(Tensor(images().images[:3]))
    assert y.shape == (3, 5) and y.device == device(2)
    np.testing.assert_array_equal(y.numpy(), Plain()(Tensor(images().images[:3])).numpy())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_it_trains_to_the_bits_of_the_same_model_without_stages(schedule):
    expected = trained(Plain())
    for execution in ("replay", "eager"):
        assert trained(seeds_example(schedule=schedule), execution) == expected


def test_parameters_are_named_by_stage_and_position_and_are_on_their_place():
    model = seeds_example()
    names = [name for name, _ in model.named_parameters()]
    assert names == [f"{s}.{i}.{w}" for s in range(3) for i in range(2) for w in ("weight", "bias")]
    assert [p.device.slot for p in model.parameters()] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_layer_may_be_a_function():
    model = PipelineParallel(
        [
            Stage([nn.Conv2d(1, 2, 3), F.relu, lambda x: F.max_pool2d(x, 2)]),
            Stage([nn.Linear(32, 5), nn.LogSoftmax()]),
        ],
        loss=F.nll_loss,
    )
    assert [name for name, _ in model.named_parameters()] == [
        "0.0.weight",
        "0.0.bias",
        "1.0.weight",
        "1.0.bias",
    ]
    before = DistributedTrainer(model, optim.SGD(lr=0.1)).weights_sha256()
    assert trained(model) != before
    assert "relu" in repr(model) and "<lambda>" in repr(model)


@pytest.mark.parametrize(
    ("made", "flattens"),
    [
        (lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], 1),
        (lambda: [nn.Flatten(), nn.Linear(4, 4), F.relu, nn.Dropout(), nn.Linear(4, 4)], 1),
        (lambda: [nn.Linear(4, 4), nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Linear(4, 4)], 2),
        (lambda: [nn.Conv2d(1, 1, 1), F.relu], 0),
        (lambda: [nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)], 1),
    ],
)
def test_flatten_is_put_in_and_shown(made, flattens):
    assert repr(Stage(made())).count("Flatten") == flattens


@pytest.mark.parametrize(
    ("shape", "given"), [((2, 3, 4), (2, 3, 5)), ((2, 1, 4), (2, 1, 5)), ((2, 1, 1, 4), (2, 5))]
)
def test_tokens_are_not_flattened(shape, given):
    assert Stage([nn.LayerNorm(4), nn.Linear(4, 5)])(Tensor(np.ones(shape))).shape == given


def test_a_micro_batch_is_a_shard():
    fcs = [nn.Linear(4, 4) for _ in range(4)]
    small = PipelineParallel([Stage([fcs[0]])], micro_batch_size=4)
    assert DistributedTrainer(small, optim.SGD()).shard_size == 4
    assert DistributedTrainer(fcs[1], optim.SGD()).shard_size is None  # the global batch is to come
    assert DistributedTrainer(fcs[2], optim.SGD(), shard_size=6).shard_size == 6
    with pytest.raises(
        ConfigError,
        match="shard_size is 8 and the model's micro_batch_size 4; a micro-batch is a shard",
    ):
        DistributedTrainer(
            PipelineParallel([Stage([fcs[3]])], micro_batch_size=4), optim.SGD(), shard_size=8
        )


def test_stages_without_a_device_are_numbered():
    fcs = [nn.Linear(4, 4) for _ in range(3)]
    assert PipelineParallel([Stage([fc]) for fc in fcs]).places == (0, 1, 2)
    assert [fc.weight.device.slot for fc in fcs] == [0, 1, 2]


def test_each_move_between_stages_is_one_copy(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "odyssey.engine.engine.fuse", lambda records: seen.append(list(records)) or fuse(records)
    )
    trained(seeds_example())
    copies = [(r.phase, r.device) for r in seen[0] if r.op == "copy"]
    assert copies == [("forward", 1), ("forward", 2), ("backward", 1), ("backward", 0)]
    assert {r.device for r in seen[0]} == {0, 1, 2}


def test_interleaved_places():
    def model(places, schedule="interleaved"):
        return PipelineParallel(
            [Stage([nn.Linear(4, 4)], device=d) for d in places], schedule=schedule
        )

    assert model((0, 1, 0, 1)).places == (0, 1, 0, 1)
    for places in ((0, 0, 1, 1), (0, 1, 0), (1, 0, 1, 0)):
        with pytest.raises(ConfigError, match="'interleaved' needs stages = v x devices"):
            model(places)
    for schedule in ("gpipe", "1f1b"):
        for places in ((0, 1, 0), (1, 0), (0, 0), (0, 2)):
            with pytest.raises(
                ConfigError, match=f"schedule '{schedule}' needs stage s on device s, but the"
            ):
                model(places, schedule)


def test_what_is_refused():
    fc = nn.Linear(4, 4)
    for make, says in (
        (lambda: Stage([]), "there are no layers"),
        (lambda: Stage([fc, 3]), "layer 1 is a int; give modules or functions"),
        (lambda: PipelineParallel([]), "there are no stages"),
        (
            lambda: PipelineParallel([fc]),
            r"stage 0 is a Linear; give Stage\(layers=\[...\], device=0\)",
        ),
        (
            lambda: PipelineParallel([Stage([fc])], micro_batch_size=0),
            "micro_batch_size is 0; it must be an integer",
        ),
        (lambda: PipelineParallel([Stage([fc])], micro_batch_size=2.0), "micro_batch_size is 2.0"),
        (
            lambda: PipelineParallel([Stage([fc])], schedule="zigzag"),
            "'zigzag'; choose from gpipe, 1f1b, interleaved",
        ),
        (lambda: PipelineParallel([Stage([fc])]).to(1), "a place for each stage, not 1 for all"),
    ):
        with pytest.raises(ConfigError, match=says):
            make()
    assert odyssey.Stage is nn.Stage and odyssey.PipelineParallel is nn.PipelineParallel


TOKENS = {
    "numbers": lambda x, w: 1 - x.clamp(-0.3) / 2,
    "an array": lambda x, w: x * np.arange(6, dtype=np.float32),
    "an axis": lambda x, w: (
        (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1) + F.normalize(x, dim=-1)
    ),
    "choices": lambda x, w: x.masked_fill(x > 0.5, 0.1) + F.where(x > 0, x, 0.5),
    "a shared parameter": lambda x, w: F.maximum(w, x) + (w + w * x) + w / (2 + x * x),
}


class Of(nn.Module):
    """An op of tokens and a parameter."""

    def __init__(self, name, w):
        super().__init__()
        self.name, self.fc, self.w = name, nn.Linear(6, 6), w

    def forward(self, x):
        return TOKENS[self.name](self.fc(x), self.w)


@pytest.mark.parametrize("name", TOKENS)
def test_ops_of_tokens_are_on_their_stage(name):
    ids = np.random.default_rng(0).integers(0, 9, (2, 17, 7))

    def trained(comm):
        nn.manual_seed(0)
        w = nn.Parameter(np.linspace(0.5, 1.5, 6))
        stages = [Stage([nn.Embedding(9, 6), Of(name, w)]), Stage([Of(name, w), nn.Linear(6, 9)])]
        loss = nn.CrossEntropyLoss(weight=np.linspace(1, 2, 9), label_smoothing=0.1)
        model = PipelineParallel(stages, micro_batch_size=5)
        trainer = DistributedTrainer(model, optim.SGD(lr=0.1), loss=loss, comm=comm)
        trainer.fit(
            data.DataLoader(data.arrays((ids[0],), ids[1]), batch_size=10), epochs=2, verbose=False
        )
        return trainer.weights_sha256()

    assert mock.run(2, trained) == [trained(Communicator())] * 2
