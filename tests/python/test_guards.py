"""What a trainer refuses because it would train on, wrongly; and what it must not keep."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import data, manual_seed, nn, optim
from odyssey.errors import ConfigError, DataError, ShapeError
from odyssey.train.trainer import DistributedTrainer


def images(n: int, classes: int = 10) -> data.ArrayDataset:
    rng = np.random.default_rng(n)
    pixels = rng.integers(0, 255, (n, 1, 28, 28), dtype=np.uint8)
    return data.arrays(pixels, np.arange(n) % classes, classes=classes, scale=1 / 255)


def trainer(execution: str = "replay", classes: int = 10, **options: object) -> DistributedTrainer:
    model = nn.MLP(classes=classes, hidden=16)
    return DistributedTrainer(model, optim.SGD(lr=0.01), threads=1, execution=execution, **options)


@pytest.mark.parametrize("execution", ["replay", "eager"])
def test_labels_need_an_output_each(execution: str) -> None:
    t = trainer(execution, classes=3)
    before = t.weights_sha256()
    with pytest.raises(ConfigError, match="10 classes and the model 3 outputs"):
        t.fit(data.DataLoader(images(64), batch_size=64))
    assert t.weights_sha256() == before
    t.fit(data.DataLoader(images(64, classes=3), batch_size=64))
    assert t.weights_sha256() != before


def test_many_small_data_sets_share_one_plan() -> None:
    """Pairs of arrays become a data set each; nothing is kept of them, and each is trained on
    its own samples.
    """
    dataset = images(160)
    loader = data.DataLoader(dataset, batch_size=32)
    pairs = [(dataset.gather(b.indices)[0], dataset.labels[b.indices]) for b in loader]
    a, b = trainer(), trainer()
    b.arena.params[:] = a.arena.params
    a.fit(loader)
    b.fit(pairs)
    assert len(b.stepper.engine._runners) == 1
    assert a.weights_sha256() == b.weights_sha256()


def test_a_loader_may_fill_the_same_memory_again() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 8, 4)).astype(np.float32), rng.integers(0, 3, (5, 8))

    class Filled:
        def __iter__(self):
            samples, labels = np.empty_like(x[0]), np.empty_like(y[0])
            for samples[:], labels[:] in zip(x, y, strict=True):
                yield samples, labels

    def trained(loader: object) -> str:
        manual_seed(0)
        t = DistributedTrainer(nn.Linear(4, 3), optim.SGD(lr=0.1), threads=1, accumulation_steps=2)
        t.fit(loader)
        return t.weights_sha256()

    assert trained(Filled()) == trained(list(zip(x, y, strict=True)))


def test_what_is_no_batch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the loader gave a dict; give batches of \(x, y\)"):
        trainer().fit([{"image": 1, "label": 2, "weight": 3}])


def test_training_mode_is_left_as_it_was() -> None:
    t = trainer()
    t.model.train()
    t.fit(data.DataLoader(images(64), batch_size=64), images(32))
    assert all(m.training for m in t.model.modules())
    t.model.eval()
    t.fit(data.DataLoader(images(64), batch_size=64))
    assert not any(m.training for m in t.model.modules())


def test_a_sampler_that_splits_is_refused() -> None:
    dataset = images(64)
    loader = data.DataLoader(dataset, batch_size=32, sampler=data.DistributedSampler(dataset, 2, 0))
    with pytest.raises(ConfigError, match="DistributedSampler"):
        trainer().fit(loader)


def test_unknown_reduction_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="'butterfly'; choose from tree, mpi"):
        trainer(reduction="butterfly")


def test_a_step_takes_a_pair() -> None:
    x, y = next(iter(data.DataLoader(images(64), batch_size=32)))
    batch = next(iter(data.DataLoader(data.arrays(x, y, classes=10), batch_size=32)))
    weights = []
    for given in (batch, (x, y), [x, y]):
        manual_seed(1)
        made = trainer()
        made.train_step(given)
        weights.append(made.weights_sha256())
    assert len(set(weights)) == 1


@pytest.mark.parametrize("given", [None, np.zeros((2, 4)), (np.zeros(3),), {"x": np.zeros(3)}, 3])
def test_what_is_no_batch_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"train_step\(\) expected .* pair .*, got a "):
        trainer().train_step(given)


@pytest.mark.parametrize(
    "loader", [(np.zeros((4, 1, 28, 28)), np.zeros(4, int)), np.zeros((4, 1, 28, 28)), 3]
)
def test_what_is_no_loader_is_refused(loader: object) -> None:
    with pytest.raises(ConfigError, match="expected a data.DataLoader .* as training data"):
        trainer().fit(loader)
    made = trainer()
    with pytest.raises(ConfigError, match="expected a data.DataLoader .* as validation data"):
        made.fit(data.DataLoader(images(64), batch_size=32), loader)
    assert made.context.history.records == []  # at once, not after an epoch


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"loss": nn.MSELoss},
            r"loss is the class MSELoss; give a function of \(output, target\), such as",
        ),
        ({"metrics": ["f3"]}, "there is no metric 'f3'; give one of accuracy, mae, mse, top5"),
    ],
)
def test_what_is_no_loss_or_metric_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.1), **given)


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (
            np.arange(64) / 2,
            r"integers \(32,\), the class of each sample.*; numbers as targets need nn.MSELoss",
        ),
        (np.full(64, -1), "label -1 of sample 0; 0 to 2147483646 are allowed"),
    ],
)
def test_targets_that_are_no_classes(y: np.ndarray, says: str) -> None:
    class Own:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> tuple[np.ndarray, object]:
            return np.zeros((1, 28, 28), np.float32), y[i]

    with pytest.raises((DataError, ShapeError), match=says):
        trainer(shard_size=32).fit(data.DataLoader(Own(), batch_size=64))


def test_a_data_set_is_evaluated_without_a_loader_but_not_trained_on() -> None:
    class Own:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
            x, y = images(64).gather(np.array([i]))
            return x[0], int(y[0])

    made = trainer()
    history = made.fit(data.DataLoader(Own(), batch_size=32), Own())
    assert history.records[-1]["test_loss"] == made.evaluate(images(64)).loss
    with pytest.raises(ConfigError, match=r"give data\.DataLoader\(your Own, batch_size=\.\.\.\)"):
        made.fit(Own())


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "says"),
    [
        (
            nn.LeNet5,
            optim.SGD(lr=0.1),
            {},
            r"model is the class LeNet5; give an object of it, such as LeNet5\(...\)",
        ),
        (optim.SGD(lr=0.1), nn.LeNet5(), {}, "model is of type SGD; "),
        (
            nn.LeNet5(),
            optim.SGD,
            {},
            r"optimizer is the class SGD; give an object of it, such as SGD\(...\)",
        ),
        (
            nn.LeNet5(),
            optim.SGD(lr=0.1),
            {"schedule": "cosine"},
            "schedule is 'cosine'; give a function",
        ),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(model, optimizer, options, says) -> None:
    with pytest.raises(ConfigError, match=says):
        DistributedTrainer(model, optimizer, **options)


@pytest.mark.parametrize("execution", ["replay", "eager"])
def test_a_forward_that_returns_nothing_is_refused(execution: str) -> None:
    class Forgot(nn.MLP):
        def forward(self, x):
            super().forward(x)

    with pytest.raises(
        ConfigError, match=r"forward\(\) of Forgot returned None; return its result"
    ):
        DistributedTrainer(Forgot(), optim.SGD(lr=0.1), execution=execution).fit(
            data.DataLoader(images(64), batch_size=64)
        )


@pytest.mark.parametrize("layers", [[], [nn.ReLU()]])
def test_a_model_without_parameters_is_refused(layers: list) -> None:
    with pytest.raises(ConfigError, match="the model has no parameters"):
        DistributedTrainer(nn.Sequential(*layers), optim.Adam(), shard_size=4)


def test_num_gpus_must_be_an_integer() -> None:
    with pytest.raises(ConfigError, match="num_gpus is '4'"):
        trainer(num_gpus="4")


def test_a_summed_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduction='sum'"):
        trainer(loss=nn.CrossEntropyLoss(reduction="sum"))


def test_an_optimizer_state_without_its_numbers_is_refused() -> None:
    optimizer = optim.SGD(nn.Linear(3, 2).parameters())
    state = optimizer.state_dict()
    del state["steps"]
    with pytest.raises(ConfigError, match="no steps"):
        optimizer.load_state_dict(state)
