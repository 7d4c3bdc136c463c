"""What a custom training loop does with gradients between backward and step. The arithmetic is in norm.py."""

from __future__ import annotations

from ..core.norm import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
