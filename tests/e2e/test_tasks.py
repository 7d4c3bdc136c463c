"""Tasks that are no classification: targets of any form, losses and metrics of one's own; the
same bits wherever they are trained.
"""

from __future__ import annotations

import json
import textwrap

import numpy as np
import pytest

from odyssey import DistributedTrainer, Tensor, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.errors import ConfigError, ShapeError
from odyssey.parallel.mesh import Mesh

REGRESSION = """
    import json
    import numpy as np, odyssey
    from odyssey import data, nn, optim
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 8)).astype(np.float32)
    y = (x @ rng.normal(size=(8, 1))).astype(np.float32)
    nn.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    tr = odyssey.DistributedTrainer(net, optim.Adam(lr=1e-2), loss=nn.MSELoss(), metrics=["mae"])
    h = tr.fit(data.DataLoader(data.arrays(x, y), batch_size=100, shuffle=True), data.arrays(x[:77], y[:77]), epochs=5)
    names = [n for n in h.records[-1] if n.startswith(("train_", "test_"))]
    if tr.comm.rank == 0:
        print(json.dumps([tr.weights_sha256(), {n: h.records[-1][n] for n in names}]))
"""


def test_a_program_for_regression_on_one_rank_and_three(launch, tmp_path):
    program = tmp_path / "regression.py"
    program.write_text(textwrap.dedent(REGRESSION))
    said = []
    for ranks in (0, 1, 3):
        done = launch.python(program, ranks=ranks)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout.splitlines()[-1]))
    assert said[0] == said[1] == said[2]
    _, last = said[0]
    assert list(last) == ["train_loss", "train_mae", "test_loss", "test_mae"]  # and no accuracy
    assert 0 < last["test_loss"] < 0.2 and 0 < last["test_mae"] < 0.5


def table(tmp_path, samples=90):
    """A file of numbers as a spreadsheet writes it: six columns and what is to be found out."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(samples, 6))
    y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    file = tmp_path / "table.csv"
    np.savetxt(file, np.hstack([x, y]), delimiter=",", header="a,b,c,d,e,f,target", comments="")
    read = np.loadtxt(file, delimiter=",", skiprows=1)
    return data.arrays(read[:, :6], read[:, 6:])


def multilayer():
    return nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 1)
    )


def trainer(comm=None, loss=None, metrics=("mae", "mse"), model=None, **settings):
    nn.manual_seed(2)
    model = (model or multilayer)()
    where = {"comm": comm} if comm is not None else {"backend": "local"}
    loss = loss or nn.SmoothL1Loss(beta=0.5)
    given = {"shard_size": 8, "threads": 1, "device": "cpu", **where, **settings}
    return DistributedTrainer(model, optim.Adam(lr=0.01), loss=loss, metrics=metrics, **given)


def trained(samples, comm=None, fit=None, **settings):
    t = trainer(comm, **settings)
    loader = data.DataLoader(samples, batch_size=40, shuffle=True, seed=3)
    history = t.fit(loader, samples.take(33), **{"epochs": 3, **(fit or {})})
    said = [
        {k: v for k, v in r.items() if k.startswith(("train_", "test_"))} for r in history.records
    ]
    return t.weights_sha256(), said


LAYOUTS = {
    "eager": (1, {"execution": "eager"}),
    "two workers": (1, {"num_gpus": 2, "threads": 2}),
    "three ranks": (3, {}),
    "three ranks, eager": (3, {"execution": "eager"}),
    "buckets": (2, {"bucket_size_mb": 1e-4}),
    "ZeRO 1": (2, {"zero": 1}),
    "ZeRO 3": (3, {"zero": 3}),
    "pipeline": (3, {"mesh": Mesh(pp=3)}),
    "layers shared": (2, {"mesh": Mesh(tp=2)}),
    "pipeline of shared layers, replicated": (4, {"mesh": Mesh(dp=1, pp=2, tp=2)}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    samples = table(tmp_path_factory.mktemp("table"))
    return samples, trained(samples)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_table_of_numbers_on_any_layout(alone, name):
    samples, wanted = alone
    ranks, settings = LAYOUTS[name]
    found = (
        [trained(samples, **settings)]
        if ranks == 1
        else mock.run(ranks, lambda c: trained(samples, c, **settings))
    )
    assert all(f == wanted for f in found)
    assert list(wanted[1][0]) == [
        "train_loss",
        "train_mae",
        "train_mse",
        "test_loss",
        "test_mae",
        "test_mse",
    ]


# in the middle of an epoch of three steps, or at its end
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_it_goes_on_on_other_ranks(alone, tmp_path, stop):
    samples, wanted = alone
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    mock.run(3, lambda c: trained(samples, c, {**saving, "steps": stop}, zero=2))
    assert mock.run(2, lambda c: trained(samples, c, saving, mesh=Mesh(pp=2)))[0] == wanted


def test_metrics_that_are_new_after_a_resume_begin_with_the_next_epoch(alone, tmp_path):
    samples, _ = alone
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    trained(samples, fit={**saving, "steps": 1}, metrics=["mae"])
    _, said = trained(samples, fit=saving, metrics=["mae", "mse"])
    assert "train_mae" in said[0] and "train_mse" not in said[0] and "train_mse" in said[1]


APART = [{"reduction": "local_sgd", "local_steps": 2}, {"reduction": "async_parameter_server"}]


@pytest.mark.parametrize("settings", APART)
def test_ranks_that_train_apart_sum_their_metrics(alone, settings):
    samples, _ = alone
    found = mock.run(3, lambda c: trained(samples, c, **settings))
    assert all(
        set(r) >= {"train_mae", "test_mae"} and 0 < r["train_mae"] < 3 for f in found for r in f[1]
    )
    assert found[0][1] == found[1][1] == found[2][1]


def test_the_means_are_those_of_numpy(alone):
    samples, _ = alone
    t = trainer(loss=nn.MSELoss(), metrics={"mae": "mae", "worst": lambda y, t: F.abs(y - t)})
    got = t.evaluate(samples)
    y = t.model(Tensor(samples.images)).numpy().astype(np.float64)
    difference = y - samples.labels
    assert got.loss == pytest.approx((difference**2).mean(), rel=1e-5)
    assert (
        got.metrics["mae"]
        == got.metrics["worst"]
        == pytest.approx(np.abs(difference).mean(), rel=1e-5)
    )
    assert got.accuracy is None and got.samples == 90


# --- other forms ----------------------------------------------------------------------------------


class Two(nn.Module):
    """Numbers and small integers in; numbers and scores of classes out."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last, self.scores = (
            nn.Linear(6, 9),
            nn.Linear(3, 9),
            nn.Linear(9, 2),
            nn.Linear(9, 8),
        )

    def forward(self, *given):
        a, b = (given[0]["a"], given[0]["b"]) if len(given) == 1 else given
        h = F.tanh(self.a(a) + self.b(b.float()))
        return self.last(h), self.scores(h)


def both(y, target):
    return F.mse_loss(y[0], target["numbers"]) + F.cross_entropy(y[1], target["class"])


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_several_inputs_and_targets(form):
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(100, 6)), rng.integers(-3, 4, (100, 3))
    x = (a, b) if form == "tuple" else {"b": b, "a": a}
    y = {"numbers": rng.random((100, 2)), "class": rng.integers(0, 8, 100)}
    samples = data.arrays(x, y)
    metrics = {
        "top3": lambda y, t: F.top_k(y[1], t["class"], 3),
        "mae": lambda y, t: F.l1_loss(y[0], t["numbers"]),
    }

    def run(comm=None, **settings):
        return trained(samples, comm, loss=both, metrics=metrics, model=Two, **settings)

    wanted = run()
    assert run(execution="eager") == wanted
    for ranks, settings in (
        (3, {}),
        (3, {"mesh": Mesh(pp=3)}),
        (2, {"mesh": Mesh(tp=2)}),
        (2, {"zero": 3}),
    ):
        assert mock.run(ranks, lambda c, s=settings: run(c, **s)) == [wanted] * ranks
    assert 3 / 8 < wanted[1][-1]["train_top3"] <= 1
    batch = next(iter(data.DataLoader(samples, batch_size=4)))
    assert batch.targets["numbers"].shape == (4, 2) and batch.targets["class"].dtype == np.int32
    np.testing.assert_array_equal(batch.inputs[1] if form == "tuple" else batch.inputs["b"], b[:4])


def test_rows_of_both_forms_are_what_an_iterable_gives():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(64, 6)), rng.normal(size=(64, 1))
    loader = data.DataLoader(data.arrays(x, y), batch_size=16)

    def run(batches, **settings):
        t = trainer(loss=nn.MSELoss(), **settings)
        t.fit(batches, epochs=2)
        return t.weights_sha256()

    pairs = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
    assert run(loader) == run(pairs) and run(loader, accumulation_steps=2) == run(
        pairs, accumulation_steps=2
    )


def test_accuracy_is_for_classes_only_and_counts_with_any_loss(alone):
    rng = np.random.default_rng(4)
    x, labels = rng.normal(size=(70, 6)), rng.integers(0, 5, 70)
    samples = data.arrays(x, labels, classes=5)

    def run(loss, metrics=None):
        t = trainer(loss=loss, metrics=metrics, model=lambda: nn.Linear(6, 5))
        result = t.evaluate(samples)
        right = np.argmax(t.model(Tensor(x)).numpy(), 1) == labels
        assert result.accuracy == pytest.approx(right.mean())
        return result

    run(nn.CrossEntropyLoss())
    run(lambda y, t: F.mean(F.softplus(y)))  # one that counts no correct predictions
    best = run(nn.CrossEntropyLoss(), ["accuracy", "top1", "top5", "top2"]).metrics
    assert best["top1"] == best["accuracy"] < best["top2"] < best["top5"] == 1
    assert run(lambda y, t: F.mean(F.softplus(y)), {"accuracy": "accuracy"}).metrics["accuracy"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metrics": "mae"}, "metrics is 'mae'"),
        ({"metrics": ["rmse"]}, "'rmse'.*accuracy, mae, mse, top5"),
        ({"metrics": {"loss": "mae"}}, "'loss'"),
        ({"metrics": {f"m{i}": "mae" for i in range(13)}}, "13 metrics are given; at most 12"),
        ({"metrics": {"a": lambda y, t: 1.0}}, "the metric a gave a float; it must give a Tensor"),
        ({"loss": 3}, "loss is 3; give a function"),
        ({"loss": lambda y, t: F.l1_loss(y, t, reduction="none")}, r"the loss has shape \(8, 1\)"),
        ({"loss": lambda y, t: 1.0}, "the loss is a float"),
        ({"loss": nn.L1Loss(reduction="none")}, "reduction='none'"),
    ],
)
def test_what_is_refused(alone, settings, said):
    with pytest.raises(ConfigError, match=said):
        trainer(**settings).evaluate(alone[0])


def test_targets_that_do_not_fit_the_loss_are_named(alone):
    samples, _ = alone
    with pytest.raises(ShapeError, match=r"a target of float32 \(8,(?: 1)?\); it must be integers"):
        trainer(loss=nn.CrossEntropyLoss()).evaluate(samples)
    flat = data.arrays(samples.images, samples.labels[:, 0])
    with pytest.raises(
        ShapeError, match=r"output \(8, 1\) and target \(8,\); they must be of the same shape"
    ):
        trainer(loss=nn.MSELoss()).evaluate(flat)
    classes = data.arrays(samples.images, np.zeros((90, 1), np.int64))
    with pytest.raises(ShapeError, match=r"the target is integers \(8, 1\).*give target.float\(\)"):
        trainer(loss=nn.MSELoss()).evaluate(classes)
    with pytest.raises(
        ShapeError,
        match=r"a tensor of integers, \(8, 1\), where numbers are computed; use its .float",
    ):
        trainer(loss=lambda y, t: F.mean(y * t)).evaluate(classes)
    assert (
        trainer(loss=lambda y, t: F.mse_loss(y, t.float()), metrics=None).evaluate(classes).loss > 0
    )
