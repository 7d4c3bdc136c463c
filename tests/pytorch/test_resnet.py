"""ResNet-18 beside torchvision's: its safetensors load by name; outputs, gradients, running
statistics agree.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from odyssey import Tensor, nn
from odyssey import functional as F

pytestmark = pytest.mark.skipif(  # not imported here: every worker would wait for it
    not all(importlib.util.find_spec(name) for name in ("torch", "torchvision")),
    reason="torchvision is not installed",
)


def theirs(large: bool):
    import torch
    from pytorch.vision import torchvision

    torch.manual_seed(3)
    model = torchvision.models.resnet18(num_classes=7)
    if not large:  # the usual change for CIFAR-10
        model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = torch.nn.Identity()
    return model


@pytest.mark.parametrize(("size", "n"), [(64, 3), (13, 4)])
def test_against_torchvision(size, n, tmp_path):
    import torch
    from safetensors.numpy import load_file
    from safetensors.torch import save_file

    other = theirs(size >= 64)
    save_file(other.state_dict(), tmp_path / "resnet18.safetensors")
    model = nn.models.build("resnet18", sample_shape=(3, size, size), classes=7)
    model.load_state_dict(load_file(tmp_path / "resnet18.safetensors"))
    rng = np.random.default_rng(1)
    a, labels = rng.standard_normal((n, 3, size, size)).astype(np.float32), rng.integers(0, 7, n)
    other.double()
    x, t = Tensor(a), torch.tensor(a.astype(np.float64))
    loss, wanted = (
        F.cross_entropy(model(x), labels),
        torch.nn.functional.cross_entropy(other(t), torch.tensor(labels)),
    )
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
    loss.backward()
    wanted.backward()
    gradients = {name: p.grad.numpy() for name, p in other.named_parameters()}
    for name, p in model.named_parameters():
        error = np.linalg.norm(p.grad.data - gradients[name]) / np.linalg.norm(gradients[name])
        # where no ReLU has an input so near 0 that its rounding decides
        assert error < 1e-4, (name, error)
    state = model.state_dict()
    for name, value in other.state_dict().items():
        np.testing.assert_allclose(state[name], value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    model.eval(), other.eval()
    np.testing.assert_allclose(model(x).numpy(), other(t).detach().numpy(), rtol=1e-3, atol=1e-4)
