"""Two rows of the table of scripts/verify-torch; tests/pytorch/test_models.py has two others."""

from __future__ import annotations

import pytest

from beds import torch_models

pytest.importorskip("torch")


@pytest.mark.parametrize(("model", "precision"), [("resnet18", "fp32"), ("vit", "bf16")])
def test_a_model_has_the_same_bits_everywhere(model, precision, tmp_path):
    if model == "vit":
        # that timm imports; timm itself needs run_example.py
        pytest.importorskip("huggingface_hub")
    torch_models.row(model, precision, tmp_path)
