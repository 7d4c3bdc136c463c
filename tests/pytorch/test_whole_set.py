"""Metrics of the whole set with PyTorch's modules: the same bits on any number of ranks and after a
resume, objects of torchmetrics, and functions that are no mean over samples.
"""

from __future__ import annotations

import contextlib
import copy
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402

from odyssey import callbacks, metrics  # noqa: E402
from odyssey.comm import mock  # noqa: E402
from odyssey.errors import ConfigError, ShapeError  # noqa: E402
from odyssey.torch import DistributedTrainer  # noqa: E402

RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.normal(size=(230, 6)).astype(np.float32))
Y = torch.from_numpy((X[:, 0].numpy() + 0.8 * RNG.normal(size=230) > 1.1).astype(np.int64))
BATCHES = [(X[i : i + 100], Y[i : i + 100]) for i in range(0, 230, 100)]
torch.manual_seed(3)
NET = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
NUMBERS = nn.Linear(6, 1)


def f1(output, target):
    """Returns the F1 of class 1, as a user writes it."""
    predictions = output.argmax(1)
    right = ((predictions == 1) & (target == 1)).sum()
    return 2 * right / max(int((predictions == 1).sum() + (target == 1).sum()), 1)


METRICS = {
    "accuracy": "accuracy",
    "f1": metrics.F1(),
    "auc": "auc",
    "gathered": metrics.Gathered(f1),
}


def make(comm=None, given=None, module=NET, **settings):
    net = copy.deepcopy(module)
    where = {"comm": comm} if comm is not None else {"backend": "local"}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    settings = {"shard_size": 8, **where, **settings}
    return DistributedTrainer(
        net, optimizer, metrics=METRICS if given is None else given, **settings
    )


def figures(history):
    return [
        {k: v for k, v in record.items() if k.startswith(("train_", "test_"))}
        for record in history.records
    ]


def train(comm=None, fit=None, **settings):
    trainer = make(comm, **settings)
    history = trainer.fit(BATCHES, BATCHES, **{"epochs": 2, "verbose": False, **(fit or {})})
    return figures(history), trainer.weights_sha256()


@pytest.fixture(scope="module")
def alone():
    return {size: train(shard_size=size) for size in (8, 100)}


@pytest.mark.parametrize("size", [8, 100])
@pytest.mark.parametrize(
    ("ranks", "settings"), [(2, {}), (3, {}), (5, {}), (2, {"zero": 3}), (3, {"gather": True})]
)
def test_the_same_bits_on_any_number_of_ranks(alone, ranks, settings, size):
    wanted = train(shard_size=size, **settings) if "gather" in settings else alone[size]
    settings = {"shard_size": size, **settings}
    assert mock.run(ranks, lambda c: train(c, **settings)) == [wanted] * ranks


@pytest.mark.parametrize("size", [8, 100])
@pytest.mark.parametrize("ranks", [1, 3])
def test_beside_formulas_and_scikit_learn(ranks, size):
    def measure(comm):
        trainer = make(comm, shard_size=size)
        trainer.fit(BATCHES, epochs=4, verbose=False)
        return trainer.evaluate([(X[i : i + 70], Y[i : i + 70]) for i in range(0, 230, 70)]), (
            trainer.predict(X)
        )

    evaluation, output = mock.run(ranks, measure)[0]
    found = evaluation.metrics
    predictions = output.argmax(1)
    assert found["accuracy"] == (predictions == Y).double().mean()
    assert found["f1"] == pytest.approx(float(f1(output, Y)), rel=1e-6)
    assert found["gathered"] == float(f1(output, Y)) > 0.2
    scores = output.double()[:, 1] - output.double()[:, 0]
    positive, negative = scores[Y == 1][:, None], scores[Y == 0]
    pairs = (positive > negative).double() + (positive == negative).double() / 2
    assert found["auc"] == pytest.approx(float(pairs.mean()), abs=1e-12)
    sklearn = pytest.importorskip("sklearn.metrics")
    assert found["f1"] == pytest.approx(sklearn.f1_score(Y, predictions), abs=1e-12)
    assert found["auc"] == pytest.approx(sklearn.roc_auc_score(Y, scores), abs=1e-12)


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_resume_in_the_middle_of_an_epoch(alone, tmp_path, stop):
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    first, second = random.Random(stop).choices([1, 2, 3], k=2)
    mock.run(first, lambda c: train(c, {**saving, "steps": stop}))
    assert mock.run(second, lambda c: train(c, saving))[0] == alone[8]


class Evaluates(callbacks.Callback):
    """Evaluates in the middle of an epoch."""

    def on_step_end(self, context):
        context.trainer.evaluate(BATCHES[:1])


def test_evaluations_in_an_epoch_do_not_change_its_metrics(alone):
    assert train(fit={"callbacks": [Evaluates()]}) == alone[8]


def test_numbers_and_probabilities():
    target = (X[:, :1] > 0.3).float()
    batches = [(X, target)]
    given = {
        "r2": metrics.R2(),
        "correlation": "correlation",
        "f1": metrics.F1(threshold=0.25),
        "auc": metrics.AUC(),
    }
    trainer = make(None, given, NUMBERS, loss=nn.MSELoss())
    found = trainer.evaluate(batches).metrics
    output = trainer.predict(X).double()
    error = ((output - target) ** 2).sum() / ((target - target.double().mean()) ** 2).sum()
    assert found["r2"] == pytest.approx(1 - float(error), rel=1e-6)
    r = np.corrcoef(output[:, 0], target[:, 0])[0, 1]
    assert found["correlation"] == pytest.approx(r, rel=1e-6)
    predicted = (output > 0.25).double()
    wanted = 2 * (predicted * target).sum() / (predicted + target).sum()
    assert found["f1"] == pytest.approx(float(wanted), abs=1e-12)


class Labelled(nn.Module):
    """Takes a batch that is a dict, as models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, values, labels):
        logits = self.linear(values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_batches_that_are_dicts():
    batches = [{"values": x, "labels": y} for x, y in BATCHES]
    module = Labelled()

    def run(comm=None):
        trainer = make(comm, ["f1", "accuracy"], module)
        return trainer.evaluate(batches).metrics

    found = run()
    assert found["f1"] == pytest.approx(float(f1(module.linear(X), Y)), rel=1e-6)
    assert mock.run(3, run) == [found] * 3


def test_bfloat16_outputs():
    trainer = make(given=["f1", "auc"], precision="bf16")
    assert 0 <= trainer.evaluate(BATCHES).metrics["auc"] <= 1


# --- torchmetrics ---------------------------------------------------------------------------------


@pytest.fixture
def torchmetrics():
    with contextlib.suppress(ImportError):
        from pytorch import vision  # noqa: F401 (torchmetrics imports torchvision)

    return pytest.importorskip("torchmetrics")


def objects(torchmetrics):
    """Returns metrics that keep counts, and some that keep values."""
    of = {"task": "multiclass", "num_classes": 2}
    return {
        "f1": torchmetrics.F1Score(**of, average="macro"),
        "auroc": torchmetrics.AUROC(**of),
        "precision": torchmetrics.AveragePrecision(**of, thresholds=20),
        "mean": torchmetrics.Accuracy(**of, average="micro"),
        "ours": metrics.F1("macro"),
        "auc": metrics.AUC(),
    }


def test_objects_of_torchmetrics(torchmetrics, tmp_path):
    given = objects(torchmetrics)
    whole = train(given=given)
    for ranks in (2, 3):
        assert mock.run(ranks, lambda c: train(c, given=given)) == [whole] * ranks
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    mock.run(3, lambda c: train(c, {**saving, "steps": 5}, given=given))
    assert train(fit=saving, given=given) == whole
    last = whole[0][-1]
    assert last["test_f1"] == pytest.approx(last["test_ours"], abs=1e-6)
    assert last["test_auroc"] == pytest.approx(last["test_auc"], abs=1e-6)
    assert given["f1"].update_count == 0  # the user's object is not changed


def test_a_collection_of_torchmetrics(torchmetrics):
    collection = torchmetrics.MetricCollection(
        [
            torchmetrics.classification.MulticlassF1Score(2),
            torchmetrics.Accuracy("multiclass", num_classes=2),
        ]
    )
    trainer = make(given=collection)
    found = trainer.evaluate(BATCHES).metrics
    collection.update(trainer.predict(X), Y)
    wanted = {name: float(value) for name, value in collection.compute().items()}
    assert found == {"loss": found["loss"], **wanted} and len(wanted) == 2


def test_torchmetrics_with_a_model_of_odyssey(torchmetrics):
    import odyssey
    from odyssey import data, optim
    from odyssey import nn as layers

    samples = data.arrays(X.numpy(), Y.numpy())

    def run(comm=None):
        layers.manual_seed(0)
        trainer = odyssey.DistributedTrainer(
            layers.Linear(6, 2),
            optim.SGD(lr=0.1),
            metrics=objects(torchmetrics),
            shard_size=8,
            device="cpu",
            **({"comm": comm} if comm else {"backend": "local"}),
        )
        trainer.fit(data.DataLoader(samples, batch_size=100), epochs=1, verbose=False)
        return trainer.evaluate(samples).metrics

    found = run()
    assert mock.run(3, run) == [found] * 3
    assert found["f1"] == pytest.approx(found["ours"], abs=1e-6)


def test_a_metric_of_several_numbers_is_refused(torchmetrics):
    several = torchmetrics.F1Score("multiclass", num_classes=2, average=None)
    with pytest.raises(ConfigError, match="metric several computed 'tensor.*one number"):
        make(given={"several": several}).evaluate(BATCHES)


# --- functions that are no mean -------------------------------------------------------------------


def rmse(output, target):
    return nn.functional.mse_loss(output, target).sqrt()


def constant(module):
    """Returns a module that predicts class 0 for all samples, so F1 is 0 everywhere."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        module[-1].weight.zero_()
        module[-1].bias.copy_(torch.tensor([1.0, 0.0]))
    return module


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("size", [8, 100])
@pytest.mark.parametrize("act", ["fit", "evaluate"])
@pytest.mark.parametrize("kind", ["f1", "constant", "rmse"])
def test_a_function_that_is_no_mean_is_refused(ranks, size, act, kind):
    batches = BATCHES if kind != "rmse" else [(X, X[:, :1])]
    settings = {"loss": nn.MSELoss(), "module": NUMBERS} if kind == "rmse" else {}
    if kind == "constant":
        settings["module"] = constant(NET)
    function = rmse if kind == "rmse" else f1

    def run(comm):
        trainer = make(comm, {"score": function}, shard_size=size, **settings)
        with pytest.raises(ConfigError, match=r"metric score is no mean over samples.*F1, AUC"):
            trainer.fit(batches, verbose=False) if act == "fit" else trainer.evaluate(batches)
        return trainer.steps

    assert mock.run(ranks, run) == [0] * ranks


def test_functions_that_are_means_are_summed():
    given = {
        "margin": lambda out, y: out.amax(1) - out.gather(1, y[:, None])[:, 0],
        "entropy": lambda out, y: nn.functional.cross_entropy(out, y),
        "right": lambda out, y: (out.argmax(1) == y).float().mean(),
    }
    state = torch.get_rng_state()
    trainer = make(given=given)
    found = trainer.evaluate([(X, Y)]).metrics
    output = trainer.predict(X)
    for name, function in given.items():
        assert found[name] == pytest.approx(float(function(output, Y).mean()), rel=1e-5)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_does_not_fit():
    with pytest.raises(ShapeError, match="R2 got outputs"):
        make(given=["r2"]).fit(BATCHES, verbose=False)
    with pytest.raises(ConfigError, match=r"metric 'f1' is the class F1; use an object"):
        make(given={"f1": metrics.F1})
