"""The part ranks: the bits of one process for two ranks whose sums pass through host memory."""

from __future__ import annotations

from typing import Any

from ..check import Check, weights_hash


def run(c: Check) -> dict[str, Any]:
    """Compares one process with two ranks of mpirun, or of PyTorch's Gloo."""
    options = ["--device", "gpu", "--oversubscribe", *c.short()]
    alone = c.once("alone", lambda: weights_hash(c.train(*options)))
    way, output = c.two_ranks("-m", "odyssey.train", "--no-progress", *options)
    two = weights_hash(output)
    if two != alone:
        raise RuntimeError(f"different bits: {alone} alone, {two} on two ranks ({way})")
    return {"alone": alone, "2 ranks": two, "way": way}
