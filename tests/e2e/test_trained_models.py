"""After training: the model of a checkpoint, its predictions on any ranks, what other programs
get; layers that are not trained.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import odyssey
from odyssey import DistributedTrainer, Tensor, data, nn, optim
from odyssey import functional as F
from odyssey.base.outputs import read_weights
from odyssey.comm import Communicator, mock
from odyssey.errors import CheckpointError, ConfigError, ShapeError
from odyssey.onnx.graph import onnx_model
from odyssey.parallel.mesh import Mesh
from odyssey.train import trained_models

RNG = np.random.default_rng(0)
SET = data.arrays(RNG.normal(size=(70, 6)).astype(np.float32), RNG.integers(0, 3, 70), classes=3)


class Own(nn.Module):
    """A model of a user's own code."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.GELU(),
        nn.LayerNorm(8, eps=1e-3),
        nn.Dropout(0.1),
        nn.Linear(8, 3),
    )


def trained(folder, model: nn.Module) -> DistributedTrainer:
    trainer = DistributedTrainer(model, optim.SGD(lr=0.1), threads=1)
    trainer.fit(data.DataLoader(SET, 16), epochs=1, checkpoint_dir=folder, verbose=False)
    return trainer


@pytest.mark.parametrize(
    "make", [plain, nn.LeNet5, lambda: nn.MLP(hidden=7), lambda: nn.ConvNet((3, 8, 8), 4)]
)
def test_a_built_in_model_is_built_as_its_recipe_says(make):
    model = make()
    again = trained_models.build(json.loads(json.dumps(trained_models.of_model(model))))
    assert repr(again) == repr(model)
    again.load_state_dict(model.state_dict())


def test_the_model_of_a_checkpoint(tmp_path):
    trainer = trained(tmp_path / "checkpoints", plain())
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step_00000005"):
        model = odyssey.load(path)
        assert not model.training and repr(model) == repr(trainer.model)
        x, _ = SET.gather(np.arange(32))
        assert np.array_equal(model(Tensor(x)).numpy(), trainer.predict(SET)[:32])
    nn.manual_seed(3)
    a = nn.Linear(2, 2).weight.data.copy()
    nn.manual_seed(3)
    odyssey.load(tmp_path)
    # what is made next is what it would have been
    assert np.array_equal(nn.Linear(2, 2).weight.data, a)


def test_a_layer_may_be_called_as_a_setting_is(tmp_path):
    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.a = nn.Dropout(0.25), nn.Linear(6, 3)

        def forward(self, x):
            return self.a(self.p(x))

    trainer = trained(tmp_path, Pooling())
    assert trainer.configuration()["layers"] == [["Pooling"], ["Dropout", 0.25], ["Linear"]]
    again = DistributedTrainer(Pooling(), optim.SGD(lr=0.1), threads=1)
    again.load_checkpoint(tmp_path / "step_00000005")
    assert again.weights_sha256() == trainer.weights_sha256()


@pytest.mark.parametrize(
    "said",
    [
        {"class": "Linear", "arguments": {"in_features": 10**5, "out_features": 10**5}},
        {"class": "LayerNorm", "arguments": {"features": 10**12}},
        {"class": "manual_seed", "arguments": {"seed": 1}},
        {"class": "Module.__init__", "arguments": {}},
        {"class": "Linear", "arguments": {"in_features": "x"}},
        {"class": "Sequential", "parts": [{}]},
        {"class": "Sequential", "parts": 3},
        {"class": ["Linear"], "arguments": {}},
    ],
)
def test_a_hostile_recipe_makes_nothing(said):
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError, ConfigError)):
        trained_models.build(said, 10_000)


def test_what_load_says_where_it_cannot_build_the_model(tmp_path):
    trainer = trained(tmp_path / "own", Own())
    with pytest.raises(
        ConfigError,
        match=r"is of a model of your own, Own of .*test_trained_models.py; build it and give odys",
    ):
        odyssey.load(tmp_path / "own")
    model = odyssey.load(tmp_path / "own", Own())
    assert np.array_equal(model.a.weight.data, trainer.model.a.weight.data)
    with pytest.raises(
        ConfigError,
        match=r"a.weight has shape \(8, 6\), not \(9, 6\); the checkpoint is of another",
    ):
        odyssey.load(tmp_path / "own", Own(9))
    with pytest.raises(ConfigError, match="is of a model of your own, Own of"):
        trained(tmp_path / "within", nn.Sequential(Own()))
        odyssey.load(tmp_path / "within")
    trainer.save_checkpoint(tmp_path / "older")  # of a loop of one's own: nothing is said
    with pytest.raises(
        ConfigError, match="does not say what its model is.*build it and give odyssey.load"
    ):
        odyssey.load(tmp_path / "older")
    with pytest.raises(CheckpointError, match="has no valid checkpoint; name a run"):
        odyssey.load(tmp_path / "nowhere")


LAYOUTS = [
    {"mesh": Mesh(pp=2)},
    {"zero": 1},
    {"zero": 2, "bucket_size_mb": 1e-4},
    {"zero": 3},
    {"mesh": Mesh(tp=2)},
    {},
]


def test_predictions_are_the_same_on_any_ranks():
    def work(comm, **layout):
        nn.manual_seed(0)
        trainer = DistributedTrainer(Own(), optim.Adam(lr=0.1), comm=comm, threads=1, **layout)
        trainer.fit(data.DataLoader(SET, 32), epochs=2, verbose=False)
        return trainer.predict(data.DataLoader(SET, 50)), trainer.evaluate(SET)

    alone, result = work(None)
    assert alone.shape == (70, 3) and np.mean(alone.argmax(1) == SET.labels) == pytest.approx(
        result.accuracy
    )
    for ranks, layout in ((2, LAYOUTS[0]), (3, LAYOUTS[3]), (4, LAYOUTS[4])):
        for found, _ in mock.run(ranks, lambda comm, layout=layout: work(comm, **layout)):
            assert np.array_equal(found, alone), layout


@pytest.mark.parametrize("frozen", [("a.weight", "a.bias"), ("b.weight",), ("a.bias", "b.weight")])
@pytest.mark.parametrize(
    "make", [lambda: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1), lambda: optim.AdamW(lr=0.1)]
)
def test_frozen_parameters_keep_their_bits_and_others_theirs_on_all_layouts(frozen, make):
    def work(comm, **layout):
        nn.manual_seed(0)
        model = Own()
        for name, p in model.named_parameters():
            p.requires_grad = name not in frozen
        before = model.state_dict()
        trainer = DistributedTrainer(model, make(), comm=comm, threads=1, clip_norm=0.5, **layout)
        trainer.fit(data.DataLoader(SET, 32), epochs=2, verbose=False)
        after = trainer.state_dict()
        assert {name for name in before if np.array_equal(before[name], after[name])} == set(frozen)
        return trainer.weights_sha256()

    alone = work(None)
    assert alone == work(None, execution="eager")
    for layout in LAYOUTS:
        ranks = 2 if "mesh" in layout else 3
        assert set(mock.run(ranks, lambda comm, layout=layout: work(comm, **layout))) == {alone}, (
            layout
        )


def test_predictions_of_several_outputs_are_of_their_form_on_any_ranks():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, x):
            return {"a": self.a(x), "rest": (self.b(x), x[:, :1].reshape(-1, 1, 1) * 2)}

    def work(comm):
        nn.manual_seed(2)
        trainer = DistributedTrainer(Several(), optim.SGD(lr=0.1), comm=comm, shard_size=40)
        found = trainer.predict(SET), trainer.predict(SET.take(1))
        return [[tree["a"], *tree["rest"]] for tree in found], trainer.model

    ((whole, one), model) = work(Communicator())
    x, _ = SET.gather(np.arange(70))
    assert [a.shape for a in whole] == [(70, 3), (70, 2), (70, 1, 1)]
    np.testing.assert_allclose(whole[0], model.a(Tensor(x)).numpy(), atol=1e-5)
    np.testing.assert_array_equal(whole[2][:, 0, 0], x[:, 0] * 2)
    for found, _ in mock.run(3, work):  # the third has no shard
        for a, b in zip((whole, one), found, strict=True):
            assert all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


def test_frozen_layers_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    model = Own()
    model.a.weight.requires_grad = False
    theirs = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    odyssey.torch.to_torch(model, theirs, {"a": "0", "b": "2"})
    theirs[0].weight.requires_grad = False
    optimizer = torch.optim.SGD(
        (p for p in theirs.parameters() if p.requires_grad), lr=0.1, weight_decay=0.1
    )
    trainer = DistributedTrainer(model, optim.SGD(lr=0.1, weight_decay=0.1), threads=1)
    trainer.fit([(SET.images[:32], SET.labels[:32])], epochs=3, verbose=False)
    for _ in range(3):
        optimizer.zero_grad()
        x, y = torch.tensor(SET.images[:32]), torch.from_numpy(SET.labels[:32].astype(np.int64))
        torch.nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    for ours, p in zip(model.parameters(), theirs.parameters(), strict=True):
        assert np.allclose(ours.data, p.detach().numpy(), atol=1e-6)


def test_a_state_of_another_head_is_loaded_but_for_it():
    model, other = Own(), nn.Sequential(nn.Linear(6, 8))
    state = {**Own().state_dict(), "c": np.zeros(1)}
    del state["b.weight"]
    kept = model.b.weight.data.copy()
    assert model.load_state_dict(state, strict=False) == (["b.weight"], ["c"])
    assert np.array_equal(model.a.weight.data, state["a.weight"]) and np.array_equal(
        model.b.weight.data, kept
    )
    with pytest.raises(ShapeError, match="missing"):
        other.load_state_dict(state)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.f = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return self.f(F.flatten(F.avg_pool2d(y + self.b(y), 2)))


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        positive = abs(x) + F.exp(x)
        return positive.sqrt() * 0.5 + positive.log()


class Dilated(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(4, 6, (2, 3), padding=2, dilation=2, groups=2, bias=False), nn.Conv2d(6, 3, 3, 2, 0, 1, 3),
            nn.Flatten(), nn.Linear(75, 5), nn.LeakyReLU(0.2),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (nn.LeNet5, (1, 28, 28)),
        (nn.MLP, (1, 28, 28)),
        (lambda: nn.ConvNet((3, 12, 12), 3), (3, 12, 12)),
        (plain, (6,)),
        (Residual, (3, 16, 16)),
        (Dilated, (4, 9, 11)),
        *[
            (lambda layer=layer: nn.Sequential(nn.Linear(6, 4), getattr(nn, layer)()), (6,))
            for layer in F.ACTIVATIONS
        ],
        (Functions, (6,)),
    ],
)
def test_onnx_runs_elsewhere_with_the_same_numbers(make, shape):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = make().eval()
    made = runtime.InferenceSession(
        onnx_model(model, shape).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for n in (1, 3, 20):
        x = RNG.normal(size=(n, *shape)).astype(np.float32)
        (y,) = made.run(None, {"x": x})
        assert y.shape == (n, *y.shape[1:]) and np.allclose(y, model(Tensor(x)).numpy(), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 9, 9), (3, 64, 64)])
def test_a_residual_network_as_onnx(shape):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = nn.models.build("resnet18", sample_shape=shape, classes=5).eval()
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.data[...] = RNG.uniform(0.5, 1, buffer.shape) * (
                -0.1 if name.endswith("mean") else 1
            )
    made = runtime.InferenceSession(
        onnx_model(model, shape).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = RNG.normal(size=(3, *shape)).astype(np.float32)
    (y,) = made.run(None, {"x": x})
    expected = model(Tensor(x)).numpy()
    assert expected.std(0).max() > 1e-3 and np.allclose(
        y, expected, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.parametrize("more", [{}, {"gelu": "tanh", "bias": True, "tied": False}])
def test_a_gpt_as_onnx(more):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = nn.models.build(
        "gpt", vocab_size=11, context=12, layers=2, heads=2, width=16, **more
    ).eval()
    made = runtime.InferenceSession(
        onnx_model(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for n, length in ((1, 1), (3, 12), (2, 5)):
        x = RNG.integers(0, 11, (n, length))
        (y,) = made.run(None, {"x": x})
        assert np.allclose(y, model(x.astype(np.int32)).numpy(), atol=1e-6)


def test_an_op_without_an_onnx_form_is_named():
    pytest.importorskip("onnx")
    with pytest.raises(
        ConfigError, match=r"\[export\] \w+ has no ONNX form here; .* Use --format safetensors"
    ):
        onnx_model(nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8)), (6,))


OWN = """
from odyssey import nn

class Own(nn.Module):
    def __init__(self, hidden=5):
        super().__init__()
        self.a, self.b = nn.Linear(6, hidden), nn.Linear(hidden, 3)

    def forward(self, x):
        return self.b(self.a(x).relu())

def wide():
    return Own(7)

number = 3
def needs(size): return Own(size)
def other(): return 3
"""
TRAINED = """
import sys
import numpy as np
from odyssey import DistributedTrainer, data, nn, optim
from net import Own, wide
nn.manual_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 6)).astype(np.float32)
model = wide() if sys.argv[1] == "wide" else Own()
trainer = DistributedTrainer(model, optim.SGD(lr=0.1))
trainer.fit(data.DataLoader(data.arrays(x, rng.integers(0, 3, 40)), batch_size=20), checkpoint_dir=sys.argv[1])
np.save(sys.argv[1] + ".npy", trainer.predict(data.arrays(x, np.zeros(40, int))))
np.savetxt("rows.csv", x, delimiter=",", header=",".join("abcdef"), comments="")
labelled = np.hstack([x, rng.integers(0, 3, (40, 1))])
np.savetxt("labelled.csv", labelled, ["%.6f"] * 6 + ["%d"], delimiter=",", header=",".join("abcdefy"), comments="")
"""


def test_a_class_of_ones_own_on_the_command_line(launch):
    (launch.folder / "net.py").write_text(OWN)
    (launch.folder / "train.py").write_text(TRAINED)
    for place, name in (("net.py:Own", "plain"), ("net.py:wide", "wide")):
        done = launch.python("train.py", name)
        assert done.returncode == 0, done.stderr
        said = launch.python(
            "-m", "odyssey", "predict", name, "rows.csv", "--json", "--model", place
        )
        rows = [json.loads(line) for line in said.stdout.splitlines()]
        logits = np.load(launch.folder / f"{name}.npy", allow_pickle=False)
        assert [row["classes"][0] for row in rows] == logits.argmax(1).tolist(), said.stderr
        words = (
            "-m",
            "odyssey",
            "export",
            name,
            "--format",
            "safetensors",
            "--output",
            "w.safetensors",
        )
        assert launch.python(*words).returncode == 0
        words = ("--dataset", "csv", "--data-dir", "labelled.csv", "--model", place)
        own = launch.python("-m", "odyssey", "evaluate", name, *words)
        assert own.returncode == 0 and "accuracy" in own.stdout and "4 samples" in own.stdout, (
            own.stderr
        )
    refused = launch.python("-m", "odyssey", "predict", "plain", "rows.csv")
    assert refused.returncode == 64 and "net.py:Own on the command line" in refused.stderr
    for place, said in (
        ("net.py", "write FILE.py:NAME"),
        ("none.py:Own", "there is no file none.py"),
        ("net.py:Onw", "net.py has no class Onw, but Own"),
        ("net.py:number", "net.py has no class number"),
        ("net.py:needs", "name a function without arguments"),
        ("net.py:other", "gives a int; an nn.Module is needed"),
        ("net.py:wide", "a.weight"),
    ):
        done = launch.python("-m", "odyssey", "predict", "plain", "rows.csv", "--model", place)
        assert done.returncode == 64 and said in done.stderr and "Traceback" not in done.stderr, (
            done.stderr
        )


def test_export_and_predict_in_python(tmp_path):
    model = Own()
    x = RNG.normal(size=(70, 6)).astype(np.float32)
    expected = model.eval()(Tensor(x)).numpy()
    loader = data.DataLoader(data.arrays(x, np.zeros(70, int)), batch_size=20)
    for given in (x, x.astype(np.float64), Tensor(x), loader.dataset, loader):
        assert np.allclose(odyssey.predict(model, given), expected, atol=1e-6)
    assert (
        mock.run(2, lambda comm: odyssey.predict(model, x).tobytes())[1]
        == odyssey.predict(model, x).tobytes()
    )
    odyssey.export(model, tmp_path / "m.safetensors")
    assert set(read_weights(tmp_path / "m.safetensors")[0]) == set(model.state_dict())
    for words, said in (
        ((model, tmp_path / "m.bin"), "has no ending of .safetensors"),
        ((model, tmp_path / "m", "tflite"), "'tflite' is unknown; choose from safetensors"),
        ((x, tmp_path / "m.onnx"), "the model is a ndarray"),
        ((model, tmp_path / "m.onnx"), "give sample_shape="),
    ):
        with pytest.raises(ConfigError, match=said):
            odyssey.export(*words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


def pictures(folder) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 12), ("test", 4)):
        for name, colour in (("blue", (30, 30, 200)), ("red", (200, 30, 30))):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(RNG.normal(colour, 30, size=(14, 12, 3)), 0, 255).astype(np.uint8)
                image.fromarray(pixels).save(folder / part / name / f"{i}.png")


def test_pictures_from_the_command_line_alone(launch, tmp_path):
    pictures(tmp_path / "p")
    words = (
        "--model",
        "convnet",
        "--dataset",
        "image-folder",
        "--data-dir",
        "p",
        "--image-size",
        8,
        "--epochs",
        3,
        "-q",
    )
    done = launch.train(
        *words, "--global-batch-size", 8, "--run-dir", "run", "--log", "csv,tensorboard"
    )
    assert done.returncode == 0, done.stderr
    found = ["p/test/red/0.png", "p/test/blue/1.png"]
    one = launch.python("-m", "odyssey", "predict", "run", *found, "--top", 2, "--json")
    assert one.returncode == 0, one.stderr
    rows = [json.loads(line) for line in one.stdout.splitlines()]
    assert [row["input"] for row in rows] == found and [row["classes"][0] for row in rows] == [
        "red",
        "blue",
    ]
    assert all(sum(row["probabilities"]) == pytest.approx(1) for row in rows)
    three = launch.python("-m", "odyssey", "predict", "run", *found, "--top", 2, "--json", ranks=3)
    assert three.stdout == one.stdout, three.stderr
    said = launch.python("-m", "odyssey", "evaluate", "run", "--json", ranks=2)
    assert json.loads(said.stdout)["samples"] == 8 and json.loads(said.stdout)["accuracy"] > 0.9, (
        said.stderr
    )
    words = ("evaluate", "run", "--metrics", "f1,accuracy", "--json")
    said = launch.python("-m", "odyssey", *words, ranks=3)
    assert json.loads(said.stdout)["f1"] > 0.9, said.stderr
    torch, load = pytest.importorskip("torch"), pytest.importorskip("safetensors.numpy").load_file
    for kind in ("onnx", "torch", "safetensors"):
        done = launch.python(
            "-m", "odyssey", "export", "run", "--format", kind, "--output", f"m.{kind}"
        )
        assert done.returncode == 0, done.stderr
    state = odyssey.load(tmp_path / "run").state_dict()
    for other in (
        load(tmp_path / "m.safetensors"),
        torch.load(tmp_path / "m.torch", weights_only=True),
    ):
        assert all(np.array_equal(other[name], value) for name, value in state.items()) and len(
            other
        ) == len(state)
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "m.onnx")
    x = data.ImageFolder(tmp_path / "p" / "test", 8)[0][0][None].astype(np.float32) / 127.5 - 1
    (y,) = session.run(None, {"x": x})
    assert np.exp(y[0]).argmax() == 0


def test_a_table_from_the_command_line_alone(launch, tmp_path):
    x = RNG.normal(size=(60, 3))
    rows = "".join(f"{a},{a + 2 * b - c},{b},{c}\n" for a, b, c in x.tolist())
    (tmp_path / "t.csv").write_text("a,price,b,c\n" + rows)
    words = (
        "--model",
        "mlp",
        "--dataset",
        "csv",
        "--data-dir",
        "t.csv",
        "--target",
        "price",
        "--epochs",
        20,
        "-q",
    )
    done = launch.train(*words, "--global-batch-size", 16, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    (tmp_path / "new.csv").write_text("c;b;a\n0;0;1\n0;1;0\n")  # columns are found by their names
    said = launch.python("-m", "odyssey", "predict", "run", "new.csv", "--json")
    outputs = [json.loads(line)["output"][0] for line in said.stdout.splitlines()]
    assert outputs == pytest.approx([1, 2], abs=0.7), said.stderr
    for word, message in (
        ("t.png", "are no pictures; give a table"),
        ("no.csv", "cannot be read as a table"),
    ):
        said = launch.python("-m", "odyssey", "predict", "run", word)
        assert (
            said.returncode in (64, 65) and message in said.stderr and said.stderr.count("\n") == 1
        )


def test_a_table_that_is_prepared_from_the_command_line_alone(launch, tmp_path):
    draw = np.random.default_rng(0)
    # prices of thousands: the model is told their mean and deviation, else 200 steps do not come
    # near
    area, rooms, town = (
        draw.uniform(20, 2000, 80),
        draw.integers(1, 6, 80),
        draw.choice(["Oslo", "Rome"], 80),
    )
    price = 1000 * (area / 400 + rooms + 2 * (town == "Rome"))
    every = enumerate(zip(area, rooms, town, price, strict=True))
    rows = [f"{i},{a:.3f},{r},{t},{p:.4f}\n" for i, (a, r, t, p) in every]
    rows[3] = rows[3].replace(f",{rooms[3]},", ",,")
    (tmp_path / "t.csv").write_text("id,area,rooms,town,price\n" + "".join(rows))
    words = (
        "--model",
        "mlp",
        "--dataset",
        "csv",
        "--data-dir",
        "t.csv",
        "--epochs",
        40,
        "--global-batch-size",
        16,
    )
    more = (
        "--normalize",
        "--drop-columns",
        "id",
        "--fill",
        "mean",
        "--run-dir",
        "run",
        "--json",
        "r.json",
    )
    done = launch.train(*words, *more, ranks=2)
    assert (
        done.returncode == 0
        and "column town is text, and becomes 2 numbers: Oslo, Rome" in done.stderr
    ), done.stderr
    trained = json.loads((tmp_path / "r.json").read_text())
    assert trained["normalize"] is True and trained["test_loss"] < 0.1 * price.var()
    raw = launch.train(*words, "--drop-columns", "id", "--fill", "mean", "--steps", 1, "--no-eval")
    assert "column area: numbers of about 1," in raw.stderr and "; give --normalize" in raw.stderr
    said = launch.python("-m", "odyssey", "evaluate", "run", "--json", ranks=2)
    assert json.loads(said.stdout)["loss"] == pytest.approx(trained["test_loss"], rel=1e-6), (
        said.stderr
    )
    (tmp_path / "new.csv").write_text("town,rooms,area\nRome,2,800\nOslo,,400\n")
    said = launch.python("-m", "odyssey", "predict", "run", "new.csv", "--json")
    outputs = np.array([json.loads(line)["output"] for line in said.stdout.splitlines()])
    assert outputs.reshape(-1) == pytest.approx([6000, 1000 * (1 + rooms.mean())], abs=1000), (
        said.stderr
    )
    (tmp_path / "bad.csv").write_text("town,rooms,area\nBonn,2,800\n")
    said = launch.python("-m", "odyssey", "predict", "run", "bad.csv")
    assert (
        said.returncode == 65
        and "bad.csv, line 2, column town: 'Bonn' is unknown; the training had" in said.stderr
    )
    onnx = pytest.importorskip("onnx")
    done = launch.python("-m", "odyssey", "export", "run", "--format", "onnx", "--output", "m.onnx")
    assert done.returncode == 0, done.stderr
    about = {p.key: json.loads(p.value) for p in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert about == {
        "columns": ["area", "rooms", "town=Oslo", "town=Rome"],
        "inputs": {"area": "area", "rooms": "rooms", "town": "town"},
    }
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "m.onnx")
    columns = {  # as the table has them
        "area": np.array([[800], [400]], np.float32),
        "rooms": np.array([[2], [np.nan]], np.float32),
        "town": np.array([["Rome"], ["Oslo"]], object),
    }
    (y,) = session.run(None, columns)
    np.testing.assert_allclose(y, outputs, rtol=1e-4)


def test_onnx_has_what_is_used_alone():
    onnx = pytest.importorskip("onnx")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    assert "1.num_batches_tracked" in model.state_dict()
    graph = onnx.load_from_string(trained_models.content("onnx", model, {}, (1, 4, 4))).graph
    names = {i.name for i in graph.initializer}
    assert names <= {name for node in graph.node for name in node.input}
    assert "1.running_mean" in names and "1.num_batches_tracked" not in names


TORCH = """
import torch, odyssey.torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
if __name__ == "__main__":
    torch.manual_seed(0)
    module, rows = build(), torch.randn(30, 6)
    open("t.csv", "w").write("a,b,c,d,e,y\\n" + "".join(",".join(map(str, r)) + "\\n" for r in rows.tolist()))
    trainer = odyssey.torch.DistributedTrainer(module, torch.optim.Adam(module.parameters()), torch.nn.MSELoss())
    data = torch.utils.data.TensorDataset(rows[:, :5], rows[:, 5:])
    trainer.fit(torch.utils.data.DataLoader(data, 10), checkpoint_dir="c", verbose=False)
    torch.save(module.eval()(rows[:, :5])[:, 0].detach(), "y.pt")
"""


def test_a_pytorch_module_on_the_command_line(launch, tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(TORCH)
    assert launch.python("net.py").returncode == 0
    expected = torch.load(tmp_path / "y.pt", weights_only=True).numpy()
    rows = [line.rpartition(",")[0] for line in (tmp_path / "t.csv").read_text().splitlines()]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    said = launch.python(
        "-m", "odyssey", "predict", "c", "x.csv", "--json", "--model", "net.py:build", ranks=2
    )
    outputs = [json.loads(line)["output"][0] for line in said.stdout.splitlines()]
    assert outputs == pytest.approx(expected.tolist(), abs=1e-5), said.stderr
    words = (
        "-m",
        "odyssey",
        "evaluate",
        "c",
        "--dataset",
        "csv:t.csv",
        "--json",
        "--model",
        "net.py:build",
    )
    parts = [json.loads(launch.python(*words, *which).stdout) for which in (("--train",), ())]
    y = np.loadtxt(tmp_path / "t.csv", delimiter=",", skiprows=1)[:, 5]
    total = sum(part["loss"] * part["samples"] for part in parts)
    assert (
        total == pytest.approx(np.square(expected - y).sum(), rel=1e-4)
        and sum(p["samples"] for p in parts) == 30
    )
    for words, message in (
        (
            ("predict", "c", "x.csv"),
            "is of a PyTorch module, Sequential; build it and give odyssey.load(path, model)",
        ),
        (
            ("predict", "c", "t.csv", "--model", "net.py:build"),
            "samples (6,): mat1 and mat2 shapes",
        ),
        (
            ("export", "c", "--format", "onnx", "--output", "m.onnx", "--model", "net.py:build"),
            "torch.onnx.export",
        ),
    ):
        done = launch.python("-m", "odyssey", *words)
        assert (
            done.returncode in (64, 65)
            and message in done.stderr
            and "Traceback" not in done.stderr
        ), done.stderr
