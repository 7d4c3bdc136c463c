"""Convolutions by Winograd's algorithm: values and gradients, which convolutions are computed
so, and the same bits however a training is laid out. That a sample's do not depend on its
batch, test_batch_invariance.py says.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernels import reference as R

from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core import program
from odyssey.core.tensor import Tensor
from odyssey.errors import ConfigError
from odyssey.nn.module import Parameter
from odyssey.parallel.mesh import Mesh
from odyssey.testing import check_op

# n, c, h, w, k, padding: tiles of 2 x 2 and of 4 x 4 outputs, whole and cut at the border
SHAPES = [
    (3, 8, 8, 8, 8, 1),
    (17, 9, 9, 11, 10, 1),
    (16, 8, 10, 13, 21, 0),
    (5, 11, 7, 9, 8, (2, 1)),
    (33, 16, 16, 16, 9, 1),
    (2, 8, 17, 22, 13, 1),
    (16, 19, 18, 20, 8, 0),
    (1, 8, 15, 14, 8, (3, 4)),
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


@pytest.mark.parametrize(("c", "h", "w", "k", "padding"), [(8, 9, 8, 9, 1), (9, 17, 18, 8, 0)])
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
        ((7, 12, 12), (9, 3, 3), 1, 1),
        ((9, 12, 12), (7, 3, 3), 1, 1),
        ((8, 9, 12), (8, 3, 3), 1, 0),
        ((8, 12, 12), (8, 3, 1), 1, 1),
        ((8, 12, 12), (8, 5, 5), 1, 2),
        ((8, 24, 24), (8, 3, 3), 2, 1),
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
    """Two convolutions that Winograd's algorithm fits, one with tiles of each size, and a
    shortcut.
    """

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Conv2d(8, 9, 3, padding=1, bias=False),
        )
        self.conv3, self.fc = nn.Conv2d(9, 9, 3, padding=1), nn.Linear(81, 4)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc(F.flatten(F.avg_pool2d(F.relu(self.conv3(x) + x), 3)))


def trained(comm=None, folder=None, steps=3, resume="auto", model=None, **settings):
    rng = np.random.default_rng(5)
    images, labels = rng.standard_normal((70, 1, 18, 18)).astype(np.float32), rng.integers(0, 4, 70)
    nn.manual_seed(2)
    how = {"shard_size": 16, "threads": 1, "device": "cpu", "backend": "local", **settings}
    if comm is not None:
        how["comm"] = comm
    trainer = DistributedTrainer(Net(), optim.SGD(lr=0.05), **how)
    loader = data.DataLoader(
        data.arrays(images, labels, classes=4), batch_size=40, shuffle=True, seed=1
    )
    trainer.fit(loader, epochs=9, steps=steps, checkpoint_dir=folder, resume=resume, verbose=False)
    return trainer.weights_sha256()


def test_the_setting_decides_the_bits_and_the_layout_does_not():
    one = trained(conv_algorithm="winograd")
    assert trained(conv_algorithm="direct") == trained(conv_algorithm="auto") != one
    assert trained(conv_algorithm="winograd", execution="eager") == one
    assert trained(conv_algorithm="winograd", threads=2, num_gpus=2) == one
    for mesh in (Mesh(tp=2), Mesh(dp=2), Mesh(pp=2)):
        assert set(
            mock.run(2, lambda comm, m=mesh: trained(comm, conv_algorithm="winograd", mesh=m))
        ) == {one}
    assert set(
        mock.run(4, lambda comm: trained(comm, conv_algorithm="winograd", mesh=Mesh(tp=4)))
    ) == {one}


def test_a_training_goes_on_with_its_algorithm_only(tmp_path):
    whole = trained(conv_algorithm="winograd", steps=4)
    trained(folder=tmp_path, conv_algorithm="winograd", steps=2)
    with pytest.raises(
        ConfigError, match='made with convolution algorithm "winograd", this training has "auto"'
    ):
        trained(folder=tmp_path, steps=4)
    assert trained(folder=tmp_path, conv_algorithm="winograd", steps=4) == whole


def test_a_checkpoint_without_the_setting_is_one_of_auto():
    from odyssey.train import resume

    resume.check({}, {"convolution algorithm": "auto"}, "step 3")
    with pytest.raises(
        ConfigError, match='made with convolution algorithm "auto", this training has "winograd"'
    ):
        resume.check({}, {"convolution algorithm": "winograd"}, "step 3")
