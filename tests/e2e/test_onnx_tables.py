"""ONNX does with a row of a table what `odyssey predict` does, for random tables."""

from __future__ import annotations

import json

import numpy as np
import pytest

from odyssey import data, nn
from odyssey.data.tables import Columns, Table
from odyssey.train import trained_models

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

# Names that a graph also uses for its own values, and ordinary ones.
NAMES = ["area", "x", "y_", "fc1.weight", "sub_1", "constant_0", "größe", "town name", "y", "N"]
TEXTS = ["Rome", "Oslo", "São Paulo", "a", "NONE", "0x", "yes, no"]


def random_table(rng, path, columns, texts_of, rows: int, missing: float):
    """Writes a table whose last column is its target, and returns its path."""
    lines = [",".join(f'"{name}"' for name in (*columns, "target"))]
    for _ in range(rows):
        fields = []
        for name in columns:
            texts = texts_of.get(name)
            value = rng.choice(texts) if texts else f"{rng.normal(40, 30):.3f}"
            fields.append("" if rng.random() < missing else f'"{value}"')
        lines.append(",".join([*fields, f"{rng.gamma(1.0, 900.0):.2f}"]))
    # Every text occurs, and a number in every column, so that rules can be learnt.
    for k in range(len(TEXTS)):
        fields = [
            f'"{texts_of[n][k % len(texts_of[n])]}"' if n in texts_of else f"{k}" for n in columns
        ]
        lines.append(",".join([*fields, "1.5"]))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("seed", range(24))
def test_a_random_table(seed, tmp_path):
    rng = np.random.default_rng(seed)
    columns = list(rng.permutation(NAMES))[: rng.integers(1, len(NAMES) + 1)]
    texts_of = {
        name: list(rng.permutation(TEXTS)[: rng.integers(1, len(TEXTS))])
        for name in columns
        if rng.random() < (0.0, 0.4, 1.0)[seed % 3]
    }
    fill = [None, "mean", -3.5][seed % 5 % 3]
    missing = 0.0 if fill is None else 0.2
    train = random_table(rng, tmp_path / "t.csv", columns, texts_of, 40, missing)
    options = {"normalize": bool(rng.integers(2)), "fill": fill, "classes": False}
    dataset = data.csv(train, "target", **options)
    nn.manual_seed(seed)
    targets = dataset.labels.astype(np.float64)
    log = bool(rng.integers(2))
    measured = np.log1p(targets) if log else targets
    scale = (measured.mean(0).tolist(), measured.std(0).tolist(), log)
    model = nn.MLP(dataset.sample_shape, 1, hidden=8, target_scale=scale)
    rules = Columns.of_saved(json.loads(json.dumps(dataset.columns.saved)), columns)
    content = trained_models.content("onnx", model, {}, dataset.sample_shape, columns=rules)
    session = onnxruntime.InferenceSession(content)

    rows = Table(random_table(rng, tmp_path / "n.csv", columns, texts_of, 10, missing))
    expected = trained_models.predict(model.eval(), rules.samples(rows))
    numbers = {name: rows.parsed(name)[0].astype(np.float32) for name in columns}
    if not rules.categories:
        feed = {"x": np.stack([numbers[name] for name in columns], axis=1)}
    else:
        about = {p.key: p.value for p in onnx.load_from_string(content).metadata_props}
        feed = {
            given: np.array(rows.column(name), object)[:, None]
            if name in rules.categories
            else numbers[name][:, None]
            for name, given in json.loads(about["inputs"]).items()
        }
    (outputs,) = session.run(None, feed)
    np.testing.assert_allclose(outputs, expected, rtol=2e-4, atol=1e-3)


def test_targets_of_several_numbers():
    nn.manual_seed(0)
    scale = ([3.0, -400.0, 0.1], [2.0, 50.0, 0.01], False)
    model = nn.MLP((4,), 3, hidden=8, target_scale=scale)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    content = trained_models.content("onnx", model, {}, (4,))
    (outputs,) = onnxruntime.InferenceSession(content).run(None, {"x": x})
    np.testing.assert_allclose(outputs, trained_models.predict(model.eval(), x), rtol=1e-4)


def test_constants_in_a_model_of_your_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            y = self.layer(x) * np.array([2.0, 3.0], np.float32) + 5.0
            return 1.0 - y

    nn.manual_seed(0)
    model = Net()
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    content = trained_models.content("onnx", model, {}, (3,))
    (outputs,) = onnxruntime.InferenceSession(content).run(None, {"x": x})
    np.testing.assert_allclose(outputs, trained_models.predict(model.eval(), x), rtol=1e-4)
