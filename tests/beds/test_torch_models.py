"""The whole table of scripts/verify-torch; tests/pytorch/test_models.py has two rows of it."""

from __future__ import annotations

import pytest

from beds import torch_models

pytest.importorskip("torch")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", torch_models.MODELS)
def test_a_model_has_the_same_bits_everywhere(model, precision, tmp_path):
    pytest.importorskip("timm" if model == "vit" else "PIL")
    torch_models.row(model, precision, tmp_path)
