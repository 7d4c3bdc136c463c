"""Metrics of the whole set: their values beside plain formulas and scikit-learn's, and the same
bits on any number of ranks, in shards of any size, and after a resume.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

import odyssey
from odyssey import Mesh, callbacks, data, metrics, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.errors import ConfigError, ShapeError

AVERAGES = ("binary", "macro", "micro", "weighted")


def in_pieces(metric, output, target, seed):
    """Returns a metric of samples that are added in random shards and batches."""
    generator = np.random.default_rng(seed)
    start = 0
    while start < len(target):
        end = min(len(target), start + int(generator.integers(1, 40)))
        bounds = sorted({start, end, *generator.integers(start, end + 1, 3).tolist()})
        shards = [
            metric.values(output[lo:hi], target[lo:hi])
            for lo, hi in zip(bounds, bounds[1:], strict=False)
        ]
        metric.update(*(np.concatenate(parts) for parts in zip(*shards, strict=True)))
        start = end
    return metric.compute()


# --- values ---------------------------------------------------------------------------------------


def plain_score(kind, average, predictions, target):
    """Returns F1, precision or recall by counting."""
    classes = sorted({*predictions.tolist(), *target.tolist()})
    rows = []
    for one in [1] if average == "binary" else classes:
        tp = int(((predictions == one) & (target == one)).sum())
        fp = int(((predictions == one) & (target != one)).sum())
        fn = int(((predictions != one) & (target == one)).sum())
        rows.append((tp, fp, fn, int((target == one).sum())))
    if average == "micro":
        rows = [tuple(map(sum, zip(*rows, strict=True)))]

    def score(tp, fp, fn):
        top, bottom = {
            "F1": (2 * tp, 2 * tp + fp + fn),
            "Precision": (tp, tp + fp),
            "Recall": (tp, tp + fn),
        }[kind]
        return top / bottom if bottom else 0.0

    scores = [score(*row[:3]) for row in rows]
    weights = [row[3] if average == "weighted" else 1 for row in rows]
    return sum(s * w for s, w in zip(scores, weights, strict=True)) / sum(weights)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["F1", "Precision", "Recall"])
def test_scores_of_counts(kind, seed):
    generator = np.random.default_rng(seed)
    classes = int(generator.integers(2, 7))
    n = int(generator.integers(1, 300))
    output = generator.normal(size=(n, classes)).astype(np.float32)
    target = generator.integers(0, max(1, classes - seed % 2), n)
    average = AVERAGES[1 + seed % 3] if classes > 2 else AVERAGES[seed % 4]
    value = in_pieces(getattr(metrics, kind)(average), output, target, seed)
    predictions = output.argmax(1)
    assert value == pytest.approx(plain_score(kind, average, predictions, target), abs=1e-12)
    sklearn = pytest.importorskip("sklearn.metrics")
    function = {"F1": "f1_score", "Precision": "precision_score", "Recall": "recall_score"}[kind]
    theirs = getattr(sklearn, function)(target, predictions, average=average, zero_division=0)
    assert value == pytest.approx(theirs, abs=1e-12)


def test_averages_that_are_the_default():
    generator = np.random.default_rng(0)
    for classes, average in ((2, "binary"), (5, "macro")):
        output = generator.normal(size=(60, classes))
        target = generator.integers(0, classes, 60)
        assert in_pieces(metrics.F1(), output, target, 1) == in_pieces(
            metrics.F1(average), output, target, 2
        )


def test_one_output_per_target_has_a_threshold():
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(90, 1)).astype(np.float32)
    target = generator.integers(0, 2, 90)
    probabilities = 1 / (1 + np.exp(-logits))
    wanted = plain_score("F1", "binary", (logits[:, 0] > 0).astype(int), target)
    assert in_pieces(metrics.F1(), logits, target, 0) == wanted
    assert in_pieces(metrics.F1(threshold=0.5), probabilities, target[:, None] * 1.0, 0) == wanted


def test_classes_of_tokens_and_pixels():
    generator = np.random.default_rng(4)
    target = generator.integers(0, 3, (20, 7))
    target[generator.random((20, 7)) < 0.3] = -100
    scores = generator.normal(size=(20, 7, 3))
    counted = target != -100
    wanted = plain_score("F1", "macro", scores.argmax(-1)[counted], target[counted])
    assert in_pieces(metrics.F1(), scores, target, 0) == pytest.approx(wanted)
    assert in_pieces(metrics.F1(), np.moveaxis(scores, -1, 1), target, 0) == pytest.approx(wanted)


def area_of_pairs(scores, positive):
    """Returns the area under the ROC curve by comparing all pairs."""
    twice = sum(2 * int(a > b) + int(a == b) for a in scores[positive] for b in scores[~positive])
    return float(Fraction(twice, 2 * int(positive.sum()) * int((~positive).sum())))


@pytest.mark.parametrize("seed", range(10))
def test_auc_of_two_classes(seed):
    generator = np.random.default_rng(seed)
    n = int(generator.integers(8, 150))
    scores = generator.normal(size=n).astype(np.float32)
    if seed % 2:
        scores = scores.round(1)  # ties
    target = generator.integers(0, 2, n)
    target[:2] = 0, 1
    value = in_pieces(metrics.AUC(), scores, target, seed)
    assert value == area_of_pairs(scores, target == 1)
    pair = np.stack([np.zeros(n, np.float32), scores], 1)
    assert in_pieces(metrics.AUC(), pair, target, seed) == value
    sklearn = pytest.importorskip("sklearn.metrics")
    assert value == pytest.approx(sklearn.roc_auc_score(target, scores), abs=1e-12)


@pytest.mark.parametrize("logits", [True, False])
def test_auc_of_several_classes(logits):
    generator = np.random.default_rng(5)
    output = generator.normal(size=(120, 4))
    probabilities = np.exp(output) / np.exp(output).sum(1, keepdims=True)
    target = generator.integers(0, 4, 120)
    given = output if logits else probabilities
    value = in_pieces(metrics.AUC(logits=logits), given, target, 0)
    areas = [area_of_pairs(probabilities[:, one], target == one) for one in range(4)]
    assert value == pytest.approx(np.mean(areas), abs=1e-12)
    sklearn = pytest.importorskip("sklearn.metrics")
    theirs = sklearn.roc_auc_score(target, probabilities, multi_class="ovr")
    assert value == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("columns", [None, 1, 3])
def test_r2_and_correlation(columns):
    generator = np.random.default_rng(6)
    shape = (150,) if columns is None else (150, columns)
    target = (1000 + generator.normal(size=shape)).astype(np.float32)
    output = (target + 0.7 * generator.normal(size=shape)).astype(np.float32)
    x = output.reshape(150, -1).astype(np.float64)
    y = target.reshape(150, -1).astype(np.float64)
    r2 = np.mean(1 - ((y - x) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0))
    assert in_pieces(metrics.R2(), output, target, 0) == pytest.approx(r2, abs=1e-12)
    r = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(x.T, y.T, strict=True)])
    assert in_pieces(metrics.Correlation(), output, target, 0) == pytest.approx(r, abs=1e-9)
    sklearn = pytest.importorskip("sklearn.metrics")
    assert sklearn.r2_score(y, x) == pytest.approx(r2, abs=1e-12)


def test_what_has_no_value():
    ones = np.ones(9, np.int64)
    scores = np.arange(9.0)
    assert math.isnan(in_pieces(metrics.AUC(), scores, ones, 0))
    assert math.isnan(in_pieces(metrics.AUC(), np.append(scores, np.nan), np.append(ones, 0), 0))
    assert math.isnan(in_pieces(metrics.Correlation(), scores, ones, 0))
    assert in_pieces(metrics.R2(), scores, ones, 0) == 0.0
    assert in_pieces(metrics.R2(), ones, ones, 0) == 1.0
    for empty in (metrics.F1(), metrics.AUC(), metrics.R2(), metrics.Gathered(max)):
        assert math.isnan(empty.compute())
    ignored = metrics.F1()
    ignored.update(*ignored.values(scores, ones * -100))
    assert math.isnan(ignored.compute())
    # nothing is predicted, so precision has no denominator
    assert in_pieces(metrics.Precision(), scores - 20, ones, 0) == 0.0


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: metrics.F1("mean"), "average is 'mean'; use one of binary, macro"),
        (lambda: metrics.Gathered(3), "Gathered got a int; use a function"),
        (
            lambda: metrics.F1().values(np.zeros((4, 3)), np.zeros(5)),
            r"F1 got outputs \(4, 3\) for targets \(5,\); use targets",
        ),
        (
            lambda: metrics.AUC().values(np.zeros((2, 3)), np.array([1, 3])),
            "AUC got the target 3; expected class numbers from 0 to 2",
        ),
        (
            lambda: metrics.Recall().values(np.zeros(2), np.array([1, 0.5])),
            "Recall got the target 0.5; expected class numbers from 0 to 1",
        ),
        (
            lambda: metrics.R2().values(np.zeros((4, 2)), np.zeros(4)),
            r"R2 got outputs \(4, 2\) for targets \(4,\)",
        ),
        (
            lambda: in_pieces(metrics.F1("binary"), np.eye(3), np.arange(3), 0),
            r"F1\(average='binary'\) got 3 classes; use average='macro'",
        ),
    ],
)
def test_errors(act, says):
    with pytest.raises((ConfigError, ShapeError), match=says):
        act()


# --- in a trainer ---------------------------------------------------------------------------------

RNG = np.random.default_rng(7)
X = RNG.normal(size=(230, 6)).astype(np.float32)
RARE = (X[:, 0] + 0.8 * RNG.normal(size=230) > 1.1).astype(np.int64)  # 20 % are class 1
SAMPLES = data.arrays(X, RARE)
METRICS = {
    "accuracy": "accuracy",
    "f1": metrics.F1(),
    "recall": "recall",
    "auc": metrics.AUC(),
    "gathered": metrics.Gathered(lambda output, target: float((output.argmax(1) == target).mean())),
}


def make(comm=None, given=None, model=None, **settings):
    nn.manual_seed(2)
    net = (model or (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))))()
    where = {"comm": comm} if comm is not None else {"backend": "local"}
    settings = {"shard_size": 8, "threads": 1, "device": "cpu", **where, **settings}
    return odyssey.DistributedTrainer(
        net, optim.Adam(lr=0.05), metrics=METRICS if given is None else given, **settings
    )


def loader(samples=SAMPLES):
    return data.DataLoader(samples, batch_size=100, shuffle=True, seed=3)


def figures(history):
    return [
        {k: v for k, v in record.items() if k.startswith(("train_", "test_"))}
        for record in history.records
    ]


def train(comm=None, fit=None, **settings):
    trainer = make(comm, **settings)
    history = trainer.fit(loader(), SAMPLES, **{"epochs": 3, "verbose": False, **(fit or {})})
    return figures(history), trainer.weights_sha256()


LAYOUTS = [
    (2, {}),
    (3, {}),
    (5, {}),
    (3, {"execution": "eager"}),
    (2, {"zero": 3}),
    (2, {"bucket_size_mb": 1e-4}),
    (2, {"mesh": Mesh(pp=2)}),
    (2, {"mesh": Mesh(tp=2)}),
    (4, {"mesh": Mesh(dp=2, pp=2)}),
    (1, {"num_gpus": 2, "threads": 2}),
]


@pytest.fixture(scope="module")
def alone():
    return {size: train(shard_size=size) for size in (8, 100)}


@pytest.mark.parametrize("size", [8, 100])
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_the_same_bits_on_any_layout(alone, layout, size):
    ranks, settings = LAYOUTS[layout]
    settings = {"shard_size": size, **settings}
    results = mock.run(ranks, lambda c: train(c, **settings)) if ranks > 1 else [train(**settings)]
    assert results == [alone[size]] * ranks
    names = ["loss", "accuracy", "f1", "recall", "auc", "gathered"]
    assert list(results[0][0][-1]) == [f"{part}_{n}" for part in ("train", "test") for n in names]


@pytest.mark.parametrize("size", [8, 100])
@pytest.mark.parametrize("ranks", [1, 3])
def test_beside_scikit_learn(ranks, size):
    def measure(comm):
        trainer = make(comm, shard_size=size)
        trainer.fit(loader(), epochs=4, verbose=False)
        evaluation = trainer.evaluate(data.DataLoader(SAMPLES, batch_size=70))
        return evaluation.metrics, trainer.predict(SAMPLES)

    found, output = mock.run(ranks, measure)[0]
    predictions = output.argmax(1)
    scores = output[:, 1].astype(np.float64) - output[:, 0]
    assert found["f1"] == plain_score("F1", "binary", predictions, RARE)
    assert found["auc"] == area_of_pairs(scores, RARE == 1)
    assert found["gathered"] == found["accuracy"] == (predictions == RARE).mean()
    assert 0.2 < found["f1"] < 0.95 and 0.6 < found["auc"] < 0.99
    sklearn = pytest.importorskip("sklearn.metrics")
    assert found["f1"] == pytest.approx(sklearn.f1_score(RARE, predictions), abs=1e-12)
    assert found["auc"] == pytest.approx(sklearn.roc_auc_score(RARE, scores), abs=1e-12)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 8])
def test_a_resume_in_the_middle_of_an_epoch(alone, tmp_path, stop):
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    first, second = random.Random(stop).choices([1, 2, 3], k=2)
    mock.run(first, lambda c: train(c, {**saving, "steps": stop}))
    assert mock.run(second, lambda c: train(c, saving))[0] == alone[8]


def test_a_metric_that_is_new_after_a_resume_begins_with_the_next_epoch(alone, tmp_path):
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    train(fit={**saving, "steps": 4}, given={"f1": metrics.F1()})
    records, _ = train(fit=saving, given={"f1": metrics.F1(), "auc": metrics.AUC()})
    assert "train_auc" not in records[1] and records[1]["test_auc"] == alone[8][0][1]["test_auc"]
    assert records[2]["train_auc"] == alone[8][0][2]["train_auc"]
    assert [r["train_f1"] for r in records] == [r["train_f1"] for r in alone[8][0]]


def test_a_metric_that_is_gone_after_a_resume(alone, tmp_path):
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    train(fit={**saving, "steps": 4}, given={"f1": metrics.F1(), "auc": metrics.AUC()})
    records, _ = train(fit=saving, given={"f1": metrics.F1()})
    assert [r["train_f1"] for r in records] == [r["train_f1"] for r in alone[8][0]]


class Evaluates(callbacks.Callback):
    """Evaluates in the middle of an epoch."""

    def on_step_end(self, context):
        context.trainer.evaluate(SAMPLES.take(50))


def test_evaluations_in_an_epoch_do_not_change_its_metrics(alone):
    assert train(fit={"callbacks": [Evaluates()]}) == alone[8]


def test_the_same_metrics_in_two_trainers(alone):
    first, second = make(), make()
    a = first.fit(loader(), SAMPLES, epochs=1, verbose=False)
    second.fit(loader(), SAMPLES, epochs=2, verbose=False)
    b = first.fit(loader(), SAMPLES, epochs=1, verbose=False)
    assert figures(a) == alone[8][0][:1] and figures(b) != figures(a)


def test_stopping_and_the_best_checkpoint_by_f1(tmp_path):
    trainer = make()
    history = trainer.fit(
        loader(),
        SAMPLES,
        epochs=30,
        verbose=False,
        checkpoint_dir=tmp_path,
        callbacks=[
            callbacks.EarlyStopping("test_f1", patience=2, mode="max"),
            callbacks.ModelCheckpoint("test_f1", mode="max"),
        ],
    )
    scores = [record["test_f1"] for record in history.records]
    assert len(scores) < 30 and max(scores) == scores[-3]
    best = make(model=lambda: odyssey.load(tmp_path / "best"))
    assert best.evaluate(SAMPLES).metrics["f1"] == max(scores)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_are_left_out_add_no_sample(tmp_path, policy, ranks):
    bad = X.copy()
    bad[150] = 3e38  # the loss of its batch is infinite

    def run(comm):
        given = {"r2": metrics.R2(), "seen": Seen()}
        settings = {"model": lambda: nn.Linear(6, 1), "loss": nn.MSELoss(), "nonfinite": policy}
        trainer = make(comm, given, **settings)
        fit = {"checkpoint_dir": tmp_path, "checkpoint_every": 1} if policy == "rollback" else {}
        batches = data.DataLoader(data.arrays(bad, X[:, :1]), batch_size=100)
        return figures(trainer.fit(batches, epochs=2, verbose=False, **fit))

    results = mock.run(ranks, run)
    assert results == [results[0]] * ranks
    for record in results[0]:
        assert record["train_seen"] == 130 and -10 < record["train_r2"] < 1


class Seen(metrics.Metric):
    """Counts samples."""

    def reset(self):
        self.seen = 0

    def update(self, output, target):
        self.seen += len(target)

    def compute(self):
        return self.seen


def test_numbers_as_targets():
    y = (X[:, :1] + 0.3 * X[:, 1:2]).astype(np.float32)
    samples = data.arrays(X, y)

    def run(comm=None):
        trainer = make(
            comm,
            {"r2": "r2", "correlation": metrics.Correlation(), "mse": "mse"},
            lambda: nn.Linear(6, 1),
            loss=nn.MSELoss(),
        )
        trainer.fit(loader(samples), epochs=3, verbose=False)
        return trainer.evaluate(samples).metrics, trainer.predict(samples)

    found, output = run()
    assert all(other[0] == found for other in mock.run(3, run))
    wanted = metrics.R2()
    wanted.update(output, y)
    assert found["r2"] == wanted.compute() and 0 < found["r2"] < found["correlation"] < 1


class Tokens(nn.Module):
    def __init__(self):
        self.embedding = nn.Embedding(9, 5)
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        return self.linear(self.embedding(x))


def test_classes_of_tokens():
    x = RNG.integers(0, 9, (70, 3))
    y = RNG.integers(0, 4, (70, 3))
    samples = data.arrays((x,), y, classes=0)

    def run(comm=None, **settings):
        trainer = make(comm, ["f1", "auc"], Tokens, loss=nn.CrossEntropyLoss(), **settings)
        trainer.fit(data.DataLoader(samples, batch_size=32), epochs=1, verbose=False)
        return trainer.evaluate(samples).metrics, trainer.predict(samples)

    found, output = run()
    assert found["f1"] == pytest.approx(
        plain_score("F1", "macro", output.argmax(-1).reshape(-1), y.reshape(-1))
    )
    for settings in ({}, {"execution": "eager"}, {"mesh": Mesh(pp=2)}):
        assert mock.run(2, lambda c, s=settings: run(c, **s))[1][0] == found
    assert run(shard_size=3)[0].keys() == found.keys()  # samples in rows


class TwoOutputs(nn.Module):
    def __init__(self):
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        y = self.linear(x)
        return {"a": y[:, :1], "b": y[:, 1:]}


def test_trees_of_outputs_and_targets():
    y = {"a": X[:, :1], "b": X[:, 1:3]}
    samples = data.arrays((X,), y)

    def worst(output, target):
        return max(float(abs(output[k] - target[k]).max()) for k in ("a", "b"))

    def run(comm=None, **settings):
        trainer = make(
            comm,
            {"worst": metrics.Gathered(worst)},
            TwoOutputs,
            loss=lambda o, t: F.mse_loss(o["a"], t["a"]) + F.mse_loss(o["b"], t["b"]),
            **settings,
        )
        return trainer.evaluate(samples).metrics, trainer.predict(samples)

    found, output = run()
    assert found["worst"] == worst(output, y)
    assert mock.run(3, run)[2][0] == run(execution="eager")[0] == found


class Largest(metrics.Metric):
    """A metric as in the documentation."""

    def reset(self):
        self.largest = 0.0

    def update(self, output, target):
        self.largest = max(self.largest, float(abs(output).max()))

    def compute(self):
        return self.largest


def test_a_metric_of_the_user_s_own(tmp_path):
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    whole = train(given={"largest": Largest()})
    train(fit={**saving, "steps": 4}, given={"largest": Largest()})
    assert train(fit=saving, given={"largest": Largest()}) == whole
    assert whole[0][0]["train_largest"] > 0


# --- what is refused ------------------------------------------------------------------------------


def rmse(output, target):
    return F.sqrt(F.mse_loss(output, target))


@pytest.mark.parametrize("lacking", ["update", "compute", "reset"])
@pytest.mark.parametrize("front_end", ["odyssey", "torch"])
def test_a_metric_that_lacks_a_method_is_refused_at_once(lacking, front_end):
    methods = {"reset": lambda self: None, "update": lambda self, *_: None, "compute": float}
    del methods[lacking]
    kind = type("Half", (metrics.Metric,), methods)
    message = rf"Half has no {lacking}\(\); write {lacking}\(self"
    if lacking == "reset":
        with pytest.raises(ConfigError, match=message):
            kind()
    half = kind.__new__(kind)  # a subclass need not call __init__
    with pytest.raises(ConfigError, match=message):
        if front_end == "odyssey":
            odyssey.DistributedTrainer(nn.Linear(4, 3), optim.SGD(lr=0.1), metrics={"half": half})
        else:
            torch = pytest.importorskip("torch")
            module = torch.nn.Linear(4, 3)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            odyssey.torch.DistributedTrainer(module, optimizer, metrics={"half": half})


def test_methods_may_be_attributes():
    class Half(metrics.Metric):
        reset = update = compute = lambda self, *_: 0.0

    whole = Half()
    whole.update = lambda output, target: None
    metrics.check_methods(whole)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("act", ["fit", "evaluate"])
@pytest.mark.parametrize("size", [8, 100])
def test_a_function_that_is_no_mean_is_refused(ranks, act, size):
    samples = data.arrays(X, X[:, :1])

    def run(comm):
        trainer = make(
            comm, {"rmse": rmse}, lambda: nn.Linear(6, 1), loss=nn.MSELoss(), shard_size=size
        )
        with pytest.raises(ConfigError, match=r"metric rmse is no mean over samples.*F1, AUC"):
            trainer.fit(loader(samples), verbose=False) if act == "fit" else trainer.evaluate(
                samples
            )
        return trainer.steps

    assert mock.run(ranks, run) == [0] * ranks


def test_functions_that_are_means_are_summed():
    samples = data.arrays(X, X[:, :1])
    given = {
        "far": lambda o, t: F.abs(o - t),
        "number": lambda o, t: F.l1_loss(o, t),
        "mae": "mae",
    }
    trainer = make(None, given, lambda: nn.Linear(6, 1), loss=nn.MSELoss())
    trainer.fit(loader(samples), epochs=1, verbose=False)
    found = trainer.evaluate(samples).metrics
    assert found["far"] == pytest.approx(found["mae"]) == pytest.approx(found["number"])


class ByShard(nn.Module):
    """A model whose outputs depend on the shard, which is no matter of its metrics."""

    def __init__(self):
        self.linear = nn.Linear(6, 1)
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x):
        return self.linear(self.norm(x))


def test_a_model_that_looks_across_the_shard_is_no_reason():
    given = {"far": lambda o, t: F.l1_loss(o, t)}
    trainer = make(None, given, ByShard, loss=nn.MSELoss())
    trainer.fit(loader(data.arrays(X, X[:, :1])), epochs=1, verbose=False)


def test_what_no_trainer_takes():
    with pytest.raises(ConfigError, match=r"metric 'f1' is the class F1; use an object, F1\(\)"):
        make(given={"f1": metrics.F1})
    with pytest.raises(ConfigError, match="computed '.*expected one number"):
        make(given={"two": metrics.Gathered(lambda o, t: o[:2])}).evaluate(SAMPLES)

    def apart(comm):
        with pytest.raises(ConfigError, match="metric f1 needs the outputs of all ranks"):
            make(comm, ["f1"], reduction="local_sgd")

    mock.run(2, apart)


def test_names():
    trainer = make(given=["auc", "correlation", "f1", "precision", "r2", "recall"])
    with pytest.raises(ShapeError, match="Correlation got outputs"):
        trainer.evaluate(SAMPLES)
    with pytest.raises(ConfigError, match="no metric 'f2'; give one of .*top5.*, auc, corr"):
        make(given=["f2"])
