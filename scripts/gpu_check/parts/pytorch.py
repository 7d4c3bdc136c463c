"""The part torch: PyTorch on the GPU, and odyssey.torch there."""

from __future__ import annotations

import sys
from typing import Any

from ..check import Check, Skip, last_json

PROGRAM = "tests/gpu/torch_facts.py"
PRECISIONS = ("fp32", "bf16")
FORMS = (*PRECISIONS, "compile")
# cuBLAS reads this when it starts.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run(c: Check) -> dict[str, Any]:
    """Plain PyTorch gives the same bits twice, in two processes. odyssey.torch gives those of
    one rank on two.

    The emulated GPU can't run PyTorch's kernels. There the same programs run on the CPU.
    """
    if c.attempt(sys.executable, "-c", "import torch", limit=120)[0]:
        raise Skip("PyTorch is not installed")
    facts = c.once("facts", lambda: last_json(c.python(PROGRAM, "facts", **DETERMINISTIC)))
    if not facts["cuda available"] and not c.options.emulated:
        raise Skip(f"PyTorch {facts['torch']} has no CUDA here")
    device = "cpu" if c.options.emulated else "cuda"
    plain = c.once("plain", lambda: compared(c, device))
    result: dict[str, Any] = {"device": device, "facts": facts, "plain": plain}
    for form in PRECISIONS if c.options.emulated else FORMS:  # compiling takes minutes on a CPU
        result[form] = c.once(form, lambda form=form: ranks(c, device, form))
    return result


def compared(c: Check, device: str) -> dict[str, str]:
    """The hashes of short training runs of plain PyTorch, which two processes must agree on."""
    twice = [c.start(sys.executable, PROGRAM, "plain", device, **DETERMINISTIC) for _ in range(2)]
    ended = c.finish(twice, c.left)
    for code, output in ended:
        if code:
            raise RuntimeError(f"exit code {code}: {output[-900:]}")
    first, second = (last_json(output) for _, output in ended)
    apart = [name for name in first if first[name] != second[name]]
    if apart:
        raise RuntimeError(
            f"two processes have different bits: {', '.join(apart)}: {first}, {second}"
        )
    return first


def ranks(c: Check, device: str, form: str) -> dict[str, str]:
    """The hash of a training run of odyssey.torch, which one rank and two ranks must agree on."""
    command = [PROGRAM, "trainer", device, form]
    alone = last_json(c.python(*command, **DETERMINISTIC))
    way, output = c.two_ranks(*command, **DETERMINISTIC)
    two = last_json(output)
    if two["weights"] != alone["weights"] or (alone["ranks"], two["ranks"]) != (1, 2):
        raise RuntimeError(f"{form}: different bits: {alone} alone, {two} on two ranks ({way})")
    return {"weights": alone["weights"], "way": way, "sums": two["sums"]}
