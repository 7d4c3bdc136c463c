"""Convolutions by Winograd's algorithm: values and gradients, which convolutions are computed
so, and the same bits however a training is laid out. That a sample's do not depend on its
batch, test_batch_invariance.py says.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from kernels import reference as R

from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core import native, program
from odyssey.core.tensor import Tensor, no_grad
from odyssey.errors import CheckpointError, ConfigError
from odyssey.nn.module import Parameter
from odyssey.parallel.mesh import Mesh
from odyssey.testing import check_op
from odyssey.train import resume

# n, c, h, w, k, padding: tiles that are whole and cut at the border
SHAPES = [
    (3, 32, 8, 8, 32, 1),
    (17, 33, 9, 11, 34, 1),
    (16, 32, 10, 13, 45, 0),
    (5, 35, 7, 9, 32, (2, 1)),
    (33, 40, 16, 16, 33, 1),
    (2, 32, 17, 22, 37, 1),
    (16, 43, 18, 20, 32, 0),
    (1, 32, 15, 14, 32, (3, 4)),
    (4, 33, 7, 7, 32, 1),
]


def draw(n, c, h, w, k, padding):
    rng = np.random.default_rng([n, c, h, w, k])
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((n, c, h, w), (k, c, 3, 3), (k,))]
    y = R.conv2d(*(a.astype(np.float64) for a in arrays), 1, padding)
    return arrays, y, rng.standard_normal(y.shape)


def winograd(x, w, b=None, padding=1):
    return F.conv2d(x, w, b, 1, padding, algorithm="winograd")


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape):
    arrays, y, dy = draw(*shape)
    x, w, b = Tensor(arrays[0], requires_grad=True), Parameter(arrays[1]), Parameter(arrays[2])
    got = winograd(x, w, b, shape[-1])
    got.backward(dy.astype(np.float32))
    wanted = R.conv2d_backward(*(a.astype(np.float64) for a in arrays), 1, shape[-1], dy)
    for name, a, right in zip(
        ("y", "dx", "dw", "db"), (got, x.grad, w.grad, b.grad), (y, *wanted), strict=True
    ):
        assert np.abs(a.numpy() - right).max() < 3e-5 * np.abs(right).max(), name


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_few_samples_without_gradients_have_the_bits_of_many(shape, relu):
    """Those are computed in rows, whose vectors hold tiles instead of samples."""
    (_, w, b), _, _ = draw(*shape)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((20, *w.shape[1:2], *shape[2:4])).astype(np.float32)
    weight, bias = Parameter(w), Parameter(b)
    with no_grad():

        def computed(samples):
            y = winograd(Tensor(samples), weight, bias, shape[-1])
            return (F.relu(y) if relu else y).numpy()

        many = computed(x)
        for n in (1, 2, 3, 4):
            assert np.array_equal(computed(x[5 : 5 + n]), many[5 : 5 + n]), n


@pytest.mark.parametrize(("c", "h", "w", "k", "padding"), [(32, 9, 8, 33, 1), (33, 17, 18, 32, 0)])
def test_a_training_has_the_same_bits_in_every_layout(c, h, w, k, padding):
    check_op(
        lambda x, w, b: winograd(x, w, b, padding),
        None,
        (c, h, w),
        parameters=[(k, c, 3, 3), (k,)],
        batches=(),
    )


def test_a_bias_is_not_needed():
    (x, w, b), _, _ = draw(*SHAPES[1])
    got = winograd(Tensor(x), Parameter(w)).numpy()
    assert np.array_equal(got, winograd(Tensor(x), Parameter(w), Parameter(0 * b)).numpy())


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding"),
    [
        ((31, 12, 12), (33, 3, 3), 1, 1),
        ((33, 12, 12), (31, 3, 3), 1, 1),
        ((32, 8, 12), (32, 3, 3), 1, 0),
        ((32, 12, 12), (32, 3, 1), 1, 1),
        ((32, 12, 12), (32, 5, 5), 1, 2),
        ((32, 24, 24), (32, 3, 3), 2, 1),
    ],
)
def test_others_are_computed_directly(shape, kernel, stride, padding):
    rng = np.random.default_rng(1)
    x = Tensor(rng.standard_normal((16, *shape)).astype(np.float32))
    w = Parameter(rng.standard_normal((kernel[0], shape[0], *kernel[1:])).astype(np.float32))
    got, direct = (
        F.conv2d(x, w, None, stride, padding, algorithm=a).numpy() for a in ("winograd", "direct")
    )
    assert np.array_equal(got, direct)


def test_an_unknown_algorithm_and_a_gpu_are_refused():
    (x, w, b), _, _ = draw(*SHAPES[0])
    with pytest.raises(
        ConfigError, match=r"\[conv2d\] algorithm is 'fft'; choose from auto, direct, winograd"
    ):
        F.conv2d(Tensor(x), Parameter(w), algorithm="fft")
    executor = program.Eager()
    executor.gpu = True
    with (
        program.using(executor),
        pytest.raises(ConfigError, match="'winograd', which CPUs have; use 'direct' or 'auto'"),
    ):
        winograd(Tensor(x), Parameter(w), Parameter(b))


class Net(nn.Module):
    """Two convolutions that Winograd's algorithm fits, and a shortcut."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(1, 32, 3, padding=1),
            nn.Conv2d(32, 33, 3, padding=1, bias=False),
        )
        self.conv3, self.fc = nn.Conv2d(33, 33, 3, padding=1), nn.Linear(297, 4)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc(F.flatten(F.avg_pool2d(F.relu(self.conv3(x) + x), 3)))


def trainer_of(comm=None, **settings):
    nn.manual_seed(2)
    how = {"shard_size": 16, "threads": 1, "device": "cpu", "backend": "local", **settings}
    if comm is not None:
        how["comm"] = comm
    return DistributedTrainer(Net(), optim.SGD(lr=0.05), **how)


def trained(comm=None, folder=None, steps=3, **settings):
    rng = np.random.default_rng(5)
    images, labels = rng.standard_normal((70, 1, 18, 18)).astype(np.float32), rng.integers(0, 4, 70)
    trainer = trainer_of(comm, **settings)
    loader = data.DataLoader(
        data.arrays(images, labels, classes=4), batch_size=40, shuffle=True, seed=1
    )
    trainer.fit(loader, epochs=9, steps=steps, checkpoint_dir=folder, verbose=False)
    return trainer.weights_sha256()


def test_it_is_the_default_and_the_layout_does_not_change_the_bits():
    one = trained(conv_algorithm="winograd")
    assert trained() == trained(conv_algorithm="auto") == one != trained(conv_algorithm="direct")
    assert trained(execution="eager") == one
    assert trained(threads=2, num_gpus=2) == one
    for mesh in (Mesh(tp=2), Mesh(dp=2), Mesh(pp=2)):
        assert set(mock.run(2, lambda comm, m=mesh: trained(comm, mesh=m))) == {one}
    assert set(mock.run(3, trained)) == {one}
    assert set(mock.run(4, lambda comm: trained(comm, mesh=Mesh(tp=4)))) == {one}


def test_auto_is_direct_where_winograd_is_not_used():
    assert trainer_of().conv_algorithm == "winograd"
    assert trainer_of(precision="bf16").conv_algorithm == "direct"
    assert trainer_of(precision="bf16", conv_algorithm="winograd").conv_algorithm == "winograd"
    lenet = nn.models.build("lenet5")
    trainer = DistributedTrainer(lenet, optim.SGD(lr=0.05), threads=1, backend="local")
    assert trainer.conv_algorithm == "direct"
    assert trainer.configuration()["convolution algorithm"] == "direct"


def test_the_plan_counts_the_convolutions():
    trainer = trainer_of()
    rng = np.random.default_rng(5)
    trainer.train_step((rng.standard_normal((32, 1, 18, 18)).astype(np.float32), np.arange(32) % 4))
    assert trainer.plan == "Winograd's algorithm computes 2 of 3 convolutions"


@pytest.mark.parametrize(("algorithm", "other"), [("winograd", "direct"), ("direct", "winograd")])
def test_a_training_resumes_with_its_algorithm_only(tmp_path, algorithm, other):
    whole = trained(conv_algorithm=algorithm, steps=4)
    trained(folder=tmp_path, conv_algorithm=algorithm, steps=2)
    said = f'made with convolution algorithm "{algorithm}", this training has "{other}"'
    with pytest.raises(ConfigError, match=said):
        trained(folder=tmp_path, conv_algorithm=other, steps=4)
    assert trained(folder=tmp_path, steps=3) != whole
    assert trained(folder=tmp_path, conv_algorithm=algorithm, steps=4) == whole


def older(snapshot, algorithm):
    """A snapshot as kernels 6 made it. algorithm: the setting; None: it did not exist."""
    configuration = {**snapshot.values["configuration"], resume.CONV_ALGORITHM: algorithm}
    if algorithm is None:
        del configuration[resume.CONV_ALGORITHM]
    values = {**snapshot.values, "configuration": configuration, "kernels": 6}
    # copies, because the trainer goes on with its arrays
    return dataclasses.replace(snapshot, values=values, arrays=copy.deepcopy(snapshot.arrays))


def stepped(trainer, snapshot=None):
    """The weights' hash after the steps of a batch: one before the snapshot, one after it."""
    rng = np.random.default_rng(5)
    batch = rng.standard_normal((32, 1, 18, 18)).astype(np.float32), np.arange(32) % 4
    if snapshot is not None:
        trainer.load(snapshot, "step_1")
        trainer.expect(snapshot, "step_1", exactly=True)
    trainer.train_step(batch)
    return trainer.weights_sha256()


@pytest.mark.parametrize("algorithm", ["auto", "direct", None])
def test_an_older_checkpoint_of_auto_stays_direct(algorithm, capsys):
    whole = trainer_of(conv_algorithm="direct")
    stepped(whole)
    snapshot = older(whole.state({}), algorithm)
    expected = stepped(whole)
    for steps_before in (0, 1):  # a program of the other algorithm may have been recorded
        resumed = trainer_of()
        for _ in range(steps_before):
            stepped(resumed)
        assert stepped(resumed, snapshot) == expected
        assert resumed.conv_algorithm == "direct"
        assert resumed.configuration()["convolution algorithm"] == "direct"
    assert "kernels" not in "".join(capsys.readouterr())
    with pytest.raises(ConfigError, match='algorithm "direct", this training has "winograd"'):
        trainer_of(conv_algorithm="winograd").load(snapshot, "step_1")


def test_an_older_checkpoint_of_winograd_is_resumed_and_says_so(capsys):
    whole = trainer_of()
    stepped(whole)
    snapshot = older(whole.state({}), "winograd")
    snapshot.values["changed"]["program"]["ops"] = "0" * 8  # other kernels, other ops
    assert stepped(trainer_of(), snapshot) == stepped(whole)
    said = "".join(capsys.readouterr())
    assert f"step_1 was made with kernels 6, these are {native.KERNELS}" in said


def test_an_unknown_algorithm_in_a_checkpoint_is_refused():
    snapshot = older(trainer_of().state({}), "fft")
    with pytest.raises(CheckpointError, match="has the convolution algorithm 'fft'"):
        trainer_of().load(snapshot, "step_1")


def test_a_run_that_moves_to_a_gpu_says_that_it_is_direct_from_there(capsys):
    """On a trainer that only takes itself for one of a GPU."""
    snapshot = trainer_of().state({})
    moved = trainer_of(conv_algorithm="direct")
    state = moved.training_state
    state.settings = dataclasses.replace(state.settings, conv_algorithm="auto", device="gpu")
    moved.load(snapshot, "step_1")
    said = "".join(capsys.readouterr())
    assert "[resume] step_1 was made with Winograd's algorithm, which GPUs don't have" in said
    assert moved.conv_algorithm == "direct"
