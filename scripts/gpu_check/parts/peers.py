"""The part peers: two ranks that read each other's GPU memory (CUDA IPC), on one GPU if there is
only one.
"""

from __future__ import annotations

from typing import Any

from ..check import Check, last_json

PROGRAM = "tests/gpu/transports.py"


def run(c: Check) -> dict[str, Any]:
    """Compares the weights of one process with those of two ranks."""
    alone = c.once("alone", lambda: last_json(c.python(PROGRAM, 1, "alone"))["alone"])
    way, output = c.two_ranks(PROGRAM, 1, "peers")
    two = last_json(output)["peers"]["ipc"]
    if two != alone:
        raise RuntimeError(f"different bits: {alone} alone, {two} on two ranks ({way})")
    return {"alone": alone, "2 ranks": two, "way": way}
