"""What somebody who comes from PyTorch writes: the same names, arguments and numbers."""

from __future__ import annotations

import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import odyssey
from odyssey import Tensor, nn, optim
from odyssey import functional as F
from odyssey.errors import ConfigError, ShapeError

torch = pytest.importorskip("torch")
X = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype(np.float32)


def same(ours, theirs, rtol=1e-5):
    assert tuple(ours.shape) == tuple(theirs.shape)
    assert np.allclose(np.asarray(ours), theirs.detach().numpy(), rtol, 1e-5)


METHODS = {
    "view": lambda x: x.view(3, -1),
    "size": lambda x: x.view(x.size(0), -1) + x.size()[1] + x.size(-1),
    "flatten": lambda x: x.flatten(1, 2),
    "squeeze": lambda x: (
        x[:, :1].squeeze() + x[:1, :, :1].squeeze((0, 2)).mean() + x[:, :1].squeeze(1)
    ),
    "softmax": lambda x: x.softmax(1) + x.log_softmax(dim=-1),
    "activations": lambda x: x.relu() + x.sigmoid() * x.tanh() - x.abs(),
    "matmul": lambda x: x.matmul(x.transpose(-2, -1)),
    "t": lambda x: x[0, 0].t().contiguous().clone(),
    "chunk": lambda x: x.chunk(3, dim=2)[2] * x.chunk(3, dim=2)[0] + x.unbind(1)[0].mean(),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -2.0),
    "masks": lambda x: (~((x > 0) & (x < 1)) | (x != x)).float(),
    "arithmetic": lambda x: x.add(1).mul(x).sub(2).div(3).pow(2),
    "numbers": lambda x: x * x.numel() + x.dim() + x.ne(0).float(),
    "bool": lambda x: x.relu().bool().unsqueeze(1).expand(3, 2, 4, 6, 5).float(),
    "long": lambda x: (x * 4).long().float(),
    "ints": lambda x: (x * 4).long().eq(2).float(),
}
FUNCTIONS = {
    "pad": lambda F, x: F.pad(x, (1, 2, 0, 3), value=0.5) * 2,
    "pad all": lambda F, x: F.pad(x, (0, 1, 1, 0, 2, 0, 1, 1)),
    "normalize": lambda F, x: F.normalize(x),
    "normalize last": lambda F, x: F.normalize(x, p=2, dim=-1),
    "layer_norm": lambda F, x: F.layer_norm(x, (5,)),
    "gelu": lambda F, x: F.gelu(x, approximate="tanh"),
    "inplace": lambda F, x: F.leaky_relu(
        F.silu(F.relu(x - 1, inplace=True) + x, inplace=True), 0.2, inplace=True
    ),
    "max_pool2d": lambda F, x: F.max_pool2d(x, (3, 3), stride=(2, 2), padding=(1, 1)),
    "avg_pool2d": lambda F, x: F.avg_pool2d(x, (2, 1), (1, 1)),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    ours, theirs = Tensor(X, requires_grad=True), torch.tensor(X, requires_grad=True)
    a, b = METHODS[name](ours), METHODS[name](theirs)
    same(a, b)
    if b.requires_grad:
        (a * a).sum().backward()
        (b * b).sum().backward()
        same(ours.grad, theirs.grad, 1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    ours, theirs = Tensor(X, requires_grad=True), torch.tensor(X, requires_grad=True)
    a, b = FUNCTIONS[name](F, ours), FUNCTIONS[name](torch.nn.functional, theirs)
    same(a, b)
    (a * a * a).sum().backward()
    (b * b * b).sum().backward()
    same(ours.grad, theirs.grad, 1e-4)


LAYERS = {
    "Conv2d": lambda nn: nn.Conv2d(
        4, 6, (3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), padding_mode="zeros"
    ),
    "same": lambda nn: nn.Conv2d(4, 6, (3, 5), padding="same", dilation=2, groups=2),
    "valid": lambda nn: nn.Conv2d(4, 6, 3, padding="valid"),
    "pools": lambda nn: nn.Sequential(
        nn.MaxPool2d((3, 3), (2, 2), (1, 1)), nn.AvgPool2d(2, stride=1, padding=1)
    ),
    "LayerNorm": lambda nn: nn.LayerNorm((5,), eps=1e-3),
    "no weights": lambda nn: nn.LayerNorm(5, elementwise_affine=False),
    "activations": lambda nn: nn.Sequential(
        nn.ReLU(inplace=True),
        nn.GELU(approximate="tanh"),
        nn.Softmax(dim=1),
        nn.LeakyReLU(0.3, True),
        nn.LogSoftmax(1),
    ),
    "named": lambda nn: nn.Sequential(OrderedDict([("act", nn.SiLU()), ("fc", nn.Linear(5, 2))])),
    "shapes": lambda nn: nn.Sequential(
        nn.Identity(54, unused=True), nn.Flatten(1, 2), nn.Linear(5, 2), nn.Flatten()
    ),
    "Dropout2d": lambda nn: nn.Dropout2d(0.4).eval(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    ours, theirs = LAYERS[name](nn), LAYERS[name](torch.nn)
    ours.load_state_dict({k: p.detach().numpy() for k, p in theirs.state_dict().items()})
    same(ours(Tensor(X)), theirs(torch.tensor(X)))


def test_settings_of_activations():
    ours = nn.LeakyReLU()
    assert (
        ours.negative_slope == 0.01
        and nn.GELU("tanh").approximate == "tanh"
        and nn.GELU().approximate == "none"
    )
    ours.negative_slope = 0.5
    same(ours(Tensor(X)), torch.nn.LeakyReLU(0.5)(torch.tensor(X)))


def test_dropout_of_channels():
    y = nn.Dropout2d(0.5)(Tensor(np.ones((40, 30, 2, 3)))).numpy().reshape(1200, 6)
    assert (y == y[:, :1]).all() and set(y[:, 0]) == {0.0, 2.0} and 0.4 < (y[:, 0] > 0).mean() < 0.6


def test_embedding_with_padding():
    ids = np.array([[3, 0, 1], [0, 0, 2]])
    ours, theirs = nn.Embedding(5, 4, padding_idx=0), torch.nn.Embedding(5, 4, padding_idx=0)
    assert not ours.weight.data[0].any()
    state = {"weight": theirs.weight.detach().numpy() + 1}  # what is loaded there is kept
    ours.load_state_dict(state)
    theirs.load_state_dict({"weight": torch.tensor(state["weight"])})
    a, b = ours(Tensor(ids, dtype=np.int32)), theirs(torch.tensor(ids))
    same(a, b)
    (a * a).sum().backward()
    (b * b).sum().backward()
    same(ours.weight.grad, theirs.weight.grad)


def test_one_hot_and_masks_of_ids():
    ids = np.array([[3, 0, 1], [0, 0, 2]])
    ours, theirs = Tensor(ids, dtype=np.int32), torch.tensor(ids)
    same(F.one_hot(ours, 4), torch.nn.functional.one_hot(theirs, 4))
    same((ours != 0).unsqueeze(-1).float(), (theirs != 0).unsqueeze(-1).float())


class Habits(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4, bias=False))}
        )
        self.gains = nn.ParameterList([nn.Parameter(np.ones(4)) for _ in range(2)])
        self.add_module("c", nn.Linear(4, 1))

    def forward(self, x):
        for gain, (_, part) in zip(self.gains, self.parts.items(), strict=True):
            x = part(x) * gain
        return self.c(x)


def test_modules():
    model, seen = Habits(), []
    assert [name for name, _ in model.named_modules()] == [
        "",
        "parts",
        "parts.a",
        "parts.b",
        "parts.b.0",
        "gains",
        "c",
    ]
    assert [type(m).__name__ for m in model.children()] == ["ModuleDict", "ParameterList", "Linear"]
    assert sorted(model.state_dict()) == [
        "c.bias", "c.weight", "gains.0", "gains.1", "parts.a.bias", "parts.a.weight", "parts.b.0.weight"
    ]  # fmt: skip
    assert model.apply(seen.append) is model and seen[-1] is model and len(seen) == 7
    assert (
        "a" in model.parts
        and len(model.parts) == len(model.gains) == 2
        and model.parts.a is model.parts["a"]
    )
    model.parts.requires_grad_(False)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 13
    model(Tensor(np.ones((2, 4)))).sum().backward()
    model.zero_grad(set_to_none=True)
    assert not model.c.weight.grad.data.any()


@pytest.mark.parametrize(
    "make",
    [
        lambda s, o: s.StepLR(o, 3, gamma=0.5),
        lambda s, o: s.CosineAnnealingLR(o, 12, eta_min=0.01),
        lambda s, o: s.LinearLR(o, 0.1, total_iters=4),
        lambda s, o: s.LambdaLR(o, lambda step: 0.9**step),
        lambda s, o: s.SequentialLR(
            o, [s.LinearLR(o, 0.1, total_iters=4), s.CosineAnnealingLR(o, 8)], [4]
        ),
    ],
)
def test_schedulers(make):
    ours = optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.2, betas=(0.9, 0.95), weight_decay=0.1)
    theirs = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=0.2)
    a, b = make(optim.lr_scheduler, ours), make(torch.optim.lr_scheduler, theirs)
    for _ in range(12):
        assert (
            ours.lr == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-9) == a.get_last_lr()[0]
        )
        theirs.step()
        a.step()
        b.step()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: nn.Conv2d(1, 1, 3, stride=(2, 1)),
            r"stride is \(2, 1\); give one number .* y\[:, :, ::2\]",
        ),
        (lambda: F.max_pool2d(Tensor(X), 2, (1, 2)), r"stride is \(1, 2\); give one number"),
        (lambda: nn.Conv2d(1, 1, 4, padding="same"), "'same' for odd kernels of stride 1"),
        (
            lambda: nn.Conv2d(1, 1, 3, padding_mode="reflect"),
            "padding_mode is 'reflect'; 'zeros' is supported",
        ),
        (lambda: nn.LayerNorm((6, 5)), r"shape \(6, 5\); give one number"),
        (lambda: F.layer_norm(Tensor(X), (6, 5)), "give the last axis"),
        (lambda: F.pad(Tensor(X), (1, 1), mode="reflect"), "F.cat of slices"),
        (lambda: F.normalize(Tensor(X), p=1), "p is 1; 2 is supported"),
        (lambda: ~Tensor(X), "compare first"),
        (lambda: nn.MultiheadAttention(4, 2, batch_first=False), r"x.transpose\(0, 1\)"),
        (lambda: nn.MultiheadAttention(4, 2)(Tensor(X), need_weights=True), "need_weights=False"),
        (lambda: nn.Embedding(4, 2, padding_idx=4), "4 of 4 rows; give one of them"),
        (lambda: nn.ModuleDict({"keys": nn.Linear(1, 1)}), "other names"),
        (lambda: nn.ParameterList([nn.Linear(1, 1)]), "give parameters"),
        (lambda: Tensor(X).add_(1), r"nothing is changed in place: x = x.add\(...\)"),
        (lambda: Tensor(X).softplus(), r"use functional.softplus\(x\)"),
        (
            lambda: Tensor(X) + (Tensor(X), None),
            r"one operand is a tuple of 2; give one of them, such as y\[0\]",
        ),
        (
            lambda: nn.Linear(5, 2)((Tensor(X), None)),
            "called with a tuple; give an array, or an odyssey.Tensor",
        ),
        (lambda: float(Tensor(X)), "needs one element"),
    ],
)
def test_what_is_refused_says_what_to_use(call, said):
    with pytest.raises((ConfigError, ShapeError, AttributeError), match=said) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_attention_is_called_in_pytorchs_ways():
    attention, x = (
        nn.MultiheadAttention(6, 2),
        Tensor(np.random.default_rng(0).normal(size=(2, 5, 6))),
    )
    y, weights = attention(x, x, x, need_weights=False)
    assert weights is None and (y.numpy() == attention(x).numpy()).all()
    assert (y.numpy() == attention(x, x.detach(), x)[0].numpy()).all()


def test_a_tensor_of_one_number_is_one():
    x = Tensor(np.float32(3.25))
    assert (float(x), int(x), f"{x:.1f}", f"{x}") == (3.25, 3, "3.2", repr(x))


# --- the order and the names of arguments ---


def test_class_weights_come_first_in_losses_as_in_pytorch() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(20, 5)).astype(np.float32), rng.integers(0, 5, 20)
    weights = rng.uniform(0.1, 3, 5).astype(np.float32)
    theirs = torch.tensor(x), torch.tensor(y)
    for given in (weights, list(weights), Tensor(weights), torch.tensor(weights)):
        mine = nn.CrossEntropyLoss(given)(Tensor(x), y).item()
        right = torch.nn.CrossEntropyLoss(torch.tensor(weights))(*theirs).item()
        assert mine == pytest.approx(right, rel=1e-6)
    log_x = Tensor(torch.log_softmax(theirs[0], -1).numpy())
    right = torch.nn.NLLLoss(torch.tensor(weights), reduction="sum")
    mine = nn.NLLLoss(weights, reduction="sum")(log_x, y).item()
    assert mine == pytest.approx(right(torch.tensor(log_x.data), theirs[1]).item(), rel=1e-6)
    t = rng.uniform(size=(20, 5)).astype(np.float32)
    right = torch.nn.BCEWithLogitsLoss(torch.tensor(weights))(theirs[0], torch.tensor(t))
    mine = nn.BCEWithLogitsLoss(weights)(Tensor(x), t).item()
    assert mine == pytest.approx(right.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: nn.CrossEntropyLoss("sum"), "weight is 'sum'; .*use reduction='sum'"),
        (lambda: nn.CrossEntropyLoss([1, "b"]), "it must be numbers"),
        (
            lambda: nn.CrossEntropyLoss(None, -1),
            "argument 2 is -1; use a name, such as ignore_index",
        ),
        (lambda: nn.MSELoss("sum"), "argument 1 is 'sum'; use a name, such as reduction='sum'"),
        (lambda: nn.SmoothL1Loss(delta=1), "unknown argument 'delta'; did you mean 'beta'"),
        (lambda: optim.SGD(None, 0.1, 0.9, 1e-4), "argument 4 is 0.0001; use a name"),
        (
            lambda: F.cross_entropy(Tensor(np.zeros((2, 3))), [0, 1], "sum"),
            "weight is 'sum'; .*use reduction='sum'",
        ),
        (lambda: F.nll_loss(Tensor(np.zeros((2, 3))), [0, 1], [1, 2]), r"must be \(3,\)"),
    ],
)
def test_arguments_that_pytorch_has_elsewhere_need_their_names(
    build: Callable[[], object], said: str
) -> None:
    with pytest.raises((ConfigError, ShapeError), match=said):
        build()


def test_layers_have_pytorchs_names_of_arguments() -> None:
    for name in ("LayerNorm", "RMSNorm", "Linear", "Conv2d", "Embedding", "MultiheadAttention"):
        mine, theirs = (inspect.signature(getattr(where, name)) for where in (nn, torch.nn))
        ordered = [p.name for p in mine.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        assert ordered == [*theirs.parameters][: len(ordered)], name
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad"):
        mine, theirs = (inspect.signature(getattr(where, name)) for where in (optim, torch.optim))
        ordered = [p.name for p in mine.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        assert ordered == [*theirs.parameters][: len(ordered)], name


def test_functional_is_found_where_pytorch_has_it() -> None:
    module = importlib.import_module("odyssey.nn.functional")
    assert module is F is nn.functional


def test_odyssey_torch_lists_its_names() -> None:
    import odyssey.torch

    assert dir(odyssey.torch) == sorted(odyssey.torch.__all__)
    assert all(hasattr(odyssey.torch, name) for name in dir(odyssey.torch))


# --- one set of names to save and load ---


def test_export_takes_a_trainer(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    trainer = odyssey.DistributedTrainer(net, optim.SGD(lr=0.1))
    odyssey.export(trainer, tmp_path / "a.safetensors")
    odyssey.export(net, tmp_path / "b.safetensors")
    with pytest.deprecated_call(match=r'use odyssey.export\(trainer, "weights.safetensors"\)'):
        trainer.save_weights(tmp_path / "c.safetensors")
    first, second, third = (path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert first == second == third
    with pytest.deprecated_call(match="use trainer.save_checkpoint"):
        state = trainer.optimizer_state()
    with pytest.deprecated_call(match="use trainer.load_checkpoint"):
        trainer.load_optimizer_state(state)
    with pytest.raises(ConfigError, match="give an odyssey.nn.Module or a trainer"):
        odyssey.export({}, tmp_path / "d.safetensors")
