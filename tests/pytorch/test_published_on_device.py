"""Published models on a device that isn't the CPU have the CPU's bits on 1, 2 and 3 ranks.

PyTorch computes two of them in another way there; they have the bits of one rank on the device
(models_on_device.py).
"""

from __future__ import annotations

import importlib.util

import pytest
from pytorch.published import HERE, RUN

NEEDED = ("torch", "torchvision", "timm", "transformers")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED),
    reason="torchvision, timm or transformers is not installed (extra [published])",
)

PROGRAM = HERE / "models_on_device.py"
RANKS = 3
# Each of these has something that the others lack: statistics, tied weights, labels that don't
# count, and attention over patches.
IN_EVERY_RUN = ("zoo cnn", "zoo gpt", "zoo vit", "t5")
IN_LONG_RUNS = (
    "zoo resnet18",
    "timm resnet18",
    "timm vit_tiny_patch16_224",
    "timm convnext_atto",
    "timm mobilenetv3_small_050",
    "timm efficientnet_b0",
    "timm mixer_s32_224",
    "timm regnetx_002",
    "timm densenet121",
    "timm xcit_nano_12_p16_224",
    "timm nf_resnet26",
    "lraspp",
    "gpt2",
    "bert",
    "bert masked",
    "roberta",
    "bart",
    "llama",
    "qwen2",
    "vit transformers",
    "wav2vec2",
    "mixtral",
    "mixtral routed",
    "clip",
)


@pytest.mark.parametrize(
    "name",
    [*IN_EVERY_RUN, *(pytest.param(name, marks=pytest.mark.long) for name in IN_LONG_RUNS)],
)
@pytest.mark.parametrize("device", ["pretend"])
def test_published_model_has_the_same_bits_on_any_ranks(launch, device, name):
    # configurations of transformers keep a hash() of strings, which differs in each process
    launch.environment.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    done = launch.python("-W", "ignore", RUN, PROGRAM, device, name, ranks=RANKS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name}, {n} ranks: same" for n in range(1, RANKS + 1)]
