"""Two rows of the table of scripts/verify-torch; tests/pytorch/test_models.py has two others."""

from __future__ import annotations

import importlib.util

import pytest

from beds import torch_models

pytest.importorskip("torch")


@pytest.mark.parametrize(("model", "precision"), [("resnet18", "fp32"), ("vit", "bf16")])
def test_a_model_has_the_same_bits_everywhere(model, precision, tmp_path):
    # torchvision and timm themselves need run_example.py before they are imported
    for package in ("torchvision", *(("timm", "huggingface_hub") if model == "vit" else ())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra [published])")
    torch_models.row(model, precision, tmp_path)
