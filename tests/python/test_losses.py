"""Losses and metrics against their formulas in float64, and PyTorch's where it is installed."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, Tensor, data, nn, optim
from odyssey import functional as F
from odyssey.core.tensor import Parameter
from odyssey.errors import ConfigError, NumericsError, ShapeError

LOSSES = {
    "mse_loss": (nn.MSELoss, {}),
    "l1_loss": (nn.L1Loss, {}),
    "smooth_l1_loss": (nn.SmoothL1Loss, {"beta": 0.7}),
    "binary_cross_entropy_with_logits": (nn.BCEWithLogitsLoss, {}),
}


def samples(n):
    rng = np.random.default_rng(n)
    return (rng.standard_normal((n, 3, 2)) * 3).astype(np.float32), rng.random((n, 3, 2)).astype(
        np.float32
    )


@pytest.mark.parametrize("n", [1, 3, 16, 40])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_pytorch(name, reduction, n):
    torch = pytest.importorskip("torch")
    module, settings = LOSSES[name]
    x, t = samples(n)
    mine = [Parameter(x), Tensor(t, requires_grad=True)]
    y = module(reduction=reduction, **settings)(*mine)
    y.backward(np.ones(y.shape, np.float32))
    theirs = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, t)]
    z = getattr(torch.nn.functional, name)(*theirs, reduction=reduction, **settings)
    z.backward(torch.ones_like(z))
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=2e-6, atol=1e-6)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=2e-6, atol=1e-6)
    assert (
        getattr(F, name)(Tensor(x), t, reduction=reduction, **settings).numpy().tobytes()
        == y.numpy().tobytes()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": [[1.0, 2.0], [0.5, 0], [3, 1]]},
        {"pos_weight": [0.5, 4]},
        {"weight": 2, "pos_weight": [[1.0], [2], [3]]},
    ],
)
def test_weights_of_outputs_and_of_targets_that_are_1(settings):
    torch = pytest.importorskip("torch")
    x, t = samples(20)
    mine = Parameter(x)
    loss = nn.BCEWithLogitsLoss(**settings)(mine, t)
    loss.backward()
    theirs = torch.tensor(x.astype(np.float64), requires_grad=True)
    wide = {name: torch.tensor(value, dtype=torch.float64) for name, value in settings.items()}
    right = torch.nn.BCEWithLogitsLoss(**wide)(theirs, torch.tensor(t.astype(np.float64)))
    right.backward()
    np.testing.assert_allclose(loss.item(), right.item(), rtol=2e-6)
    np.testing.assert_allclose(mine.grad.numpy(), theirs.grad.numpy(), rtol=2e-6, atol=1e-7)
    with pytest.raises(ShapeError, match=r"shapes \(20, 3, 2\) and \(4,\) do not fit"):
        nn.BCEWithLogitsLoss(weight=[1, 2, 3, 4])(mine, t)


def test_logits_far_from_0_lose_nothing():
    x = np.array([[-80.0, -30, -10, 10, 30, 80]], np.float32)
    for t in (0, 1):
        p = Parameter(x)
        each = F.binary_cross_entropy_with_logits(p, np.full(x.shape, t), reduction="none")
        right = np.logaddexp(0, np.where(t, -x, x).astype(np.float64))
        np.testing.assert_allclose(each.numpy(), right, rtol=3e-6)
        F.sum(each).backward()
        wide = 1 / (1 + np.exp(-x.astype(np.float64))) - t
        np.testing.assert_allclose(p.grad.numpy(), wide, rtol=1e-6, atol=1e-7)


def test_what_is_not_a_number_stays_one():
    nan = Tensor(np.array([[np.nan]], np.float32))
    for name in LOSSES:
        assert np.isnan(getattr(F, name)(nan, np.zeros((1, 1))).item()), name


def test_smooth_l1_without_a_corner_is_l1():
    x, t = samples(5)
    assert nn.SmoothL1Loss(beta=0)(Tensor(x), t).item() == F.l1_loss(Tensor(x), t).item()


@pytest.mark.parametrize("n", [2, 20])
def test_top_k(n):
    rng = np.random.default_rng(n)
    x, labels = rng.standard_normal((n, 7)).astype(np.float32), rng.integers(0, 7, n)
    order = np.argsort(-x, axis=1, kind="stable")
    for k in (1, 3, 7, 9):
        right = (order[:, :k] == labels[:, None]).any(axis=1)
        assert F.top_k(Tensor(x), labels, k).numpy().tolist() == right.astype(float).tolist()
    equal = Tensor(np.zeros((1, 4)))
    # the first are the largest
    assert [F.top_k(equal, [2], k).item() for k in (1, 2, 3)] == [0, 0, 1]
    assert np.mean(F.top_k(Tensor(x), labels).numpy()) == pytest.approx(
        F.accuracy(Tensor(x), labels)
    )


def test_abs():
    p = Parameter(np.array([[-2.0, 0, 3]], np.float32))
    F.sum(abs(p)).backward()
    assert p.grad.numpy().tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: F.mse_loss(x, np.zeros(4)), r"output \(4, 2\) and target \(4,\)"),
        (
            lambda x: F.l1_loss(x, np.zeros((4, 2)), reduction="max"),
            "'max'; it must be 'mean', 'sum' or 'none'",
        ),
        (lambda x: F.smooth_l1_loss(x, np.zeros((4, 2)), beta=-1), "beta is -1"),
        (lambda x: F.top_k(x, [0, 1, 0, 1], 0), "k 0"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(ShapeError, match=said):
        call(Tensor(np.zeros((4, 2))))


@pytest.mark.parametrize("execution", ["replay", "eager"])
@pytest.mark.parametrize("n", [4, 40])  # in rows, in lanes
def test_the_class_of_a_token_that_is_out_of_range_ends_the_training(n, execution):
    ids = np.random.default_rng(n).integers(0, 7, (n, 5)).astype(np.int32)
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        for wrong, says in ((7, "a label or index out of range"), (2**30, "not finite"), (6, None)):
            targets = ids.copy()
            targets[n // 2, 3] = wrong
            net = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
            trainer = DistributedTrainer(net, optim.SGD(lr=0.1), loss=loss, execution=execution)
            loader = data.DataLoader(data.arrays(ids, targets), batch_size=n)
            if says is None:
                trainer.fit(loader, verbose=False)
                continue
            before = trainer.weights_sha256()
            with pytest.raises(NumericsError, match=says):
                trainer.fit(loader, verbose=False)
            assert trainer.weights_sha256() == before


@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_a_loss_of_one_output_names_several(smoothing):
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    x = np.ones((8, 3), np.float32)
    loss, net = nn.CrossEntropyLoss(label_smoothing=smoothing), Two(3, 3)
    with pytest.raises(ShapeError, match="the input is a tuple; give loss="):
        DistributedTrainer(net, optim.SGD(lr=0.1), loss=loss).evaluate(
            data.arrays(x, np.zeros(8, int))
        )
    with pytest.raises(ShapeError, match="the targets are a dict; give loss="):
        DistributedTrainer(nn.Linear(3, 3), optim.SGD(lr=0.1)).evaluate(data.arrays(x, {"a": x}))


def test_what_modules_refuse():
    with pytest.raises(ConfigError, match="reduction is 'max'; allowed are 'mean', 'sum', 'none'"):
        nn.MSELoss(reduction="max")
    with pytest.raises(ConfigError, match="beta is nan"):
        nn.SmoothL1Loss(beta=float("nan"))


def test_identity():
    x = Tensor(np.ones((2, 3)))
    assert nn.Identity()(x) is x


SMOOTHED = [
    {"label_smoothing": 0.1},
    {"weight": [0.2, 1.0, 3.0, 0.0, 0.5]},
    {"weight": [0.2, 1.0, 3.0, 0.7, 0.5], "label_smoothing": 0.3},
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.parametrize("settings", SMOOTHED)
def test_classes_that_count_and_targets_that_are_smoothed(settings, n, tokens, reduction):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(n)
    shape = (n, tokens) if tokens else (n,)
    x, t = rng.standard_normal((*shape, 5)).astype(np.float32) * 2, rng.integers(0, 5, shape)
    t.reshape(-1)[0] = 2
    if n > 1:
        t.reshape(-1)[1] = -100
    mine = Parameter(x)
    loss = nn.CrossEntropyLoss(reduction=reduction, **settings)(mine, t)
    loss.backward()
    theirs = torch.tensor(x.astype(np.float64), requires_grad=True)
    given = {
        k: torch.tensor(v, dtype=torch.float64) if k == "weight" else v for k, v in settings.items()
    }
    wanted = torch.nn.functional.cross_entropy(
        theirs.reshape(-1, 5), torch.tensor(t).reshape(-1), reduction=reduction, **given
    )
    wanted.backward()
    np.testing.assert_allclose(loss.item(), wanted.item(), rtol=3e-6)
    np.testing.assert_allclose(mine.grad.numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_nothing_but_ignored_targets_is_no_loss():
    for settings in ({}, {"label_smoothing": 0.1}):
        assert (
            F.cross_entropy(
                Tensor(np.ones((2, 3), np.float32)), np.array([-100, -100]), **settings
            ).item()
            == 0
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight": [1.0, 2.0]}, r"weight has shape \(2,\); it must be \(5,\)"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
    ],
)
def test_a_weight_for_each_class(settings, said):
    with pytest.raises((ConfigError, ShapeError), match=said):
        nn.CrossEntropyLoss(**settings)(Tensor(np.zeros((3, 5), np.float32)), np.zeros(3, int))


def test_a_trainer_with_such_a_loss_counts_correct_predictions_of_the_logits():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 6)).astype(np.float32), rng.integers(0, 5, 40)
    found = []
    for settings in ({}, {"weight": [9.0, 1, 0.1, 1, 1], "label_smoothing": 0.2}):
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.Linear(6, 5),
            optim.SGD(lr=0.1),
            loss=nn.CrossEntropyLoss(**settings),
            shard_size=16,
            backend="local",
        )
        found.append(trainer.evaluate(data.DataLoader(data.arrays(x, y, classes=5), batch_size=40)))
    assert found[0].accuracy == found[1].accuracy > 0 and found[0].loss != found[1].loss
