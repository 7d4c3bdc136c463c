"""The part bits: one hash for 1, 2 and 4 workers, with and without CUDA graphs."""

from __future__ import annotations

from typing import Any

from ..check import Check, weights_hash


def run(c: Check) -> dict[str, Any]:
    """Compares hashes of weights, and has more workers than GPUs rejected unless they may share."""

    def one(*options: object, **environment: str) -> str:
        output = c.train(*options, *c.short(), **environment)
        if "one by one" in output and "ODYSSEY_GPU_GRAPHS" not in environment:
            raise RuntimeError(f"it trained without CUDA graphs: {output[-300:]}")
        return weights_hash(output)

    hashes = {}
    for n in (1, 2, 4):
        name = f"{n} workers"
        hashes[name] = c.once(name, lambda n=n: one("--num-gpus", n, "--oversubscribe"))
    hashes["launch by launch"] = c.once(
        "launch by launch", lambda: one("--num-gpus", 1, ODYSSEY_GPU_GRAPHS="0")
    )
    hashes["again"] = one("--num-gpus", 1)
    if len(set(hashes.values())) != 1:
        raise RuntimeError(f"different bits: {hashes}")
    rejected = c.train("--num-gpus", 99, *c.short(), "--global-batch-size", 4096, codes=(69,))
    return {**hashes, "refused": rejected.strip()[-300:]}
