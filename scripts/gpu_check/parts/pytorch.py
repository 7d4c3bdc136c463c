"""The part torch: PyTorch on the GPU, and odyssey.torch there."""

from __future__ import annotations

import signal
import sys
import tempfile
from typing import Any

from ..check import Check, Skip, last_json

PROGRAM = "tests/gpu/torch_facts.py"
MODELS_PROGRAM = "tests/gpu/torch_models.py"
MODELS = ("lenet", "resnet18", "transformer")
PRECISIONS = ("fp32", "bf16")
FORMS = (*PRECISIONS, "compile")
# fp16 starts with a loss scale that overflows
MODEL_FORMS = (*PRECISIONS, "fp16", "compile")
# cuBLAS reads this when it starts.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run(c: Check) -> dict[str, Any]:
    """Plain PyTorch gives the same bits twice, in two processes. odyssey.torch gives those of
    one rank on two.

    LeNet-5, ResNet-18 and a transformer have the same weights on one rank, on two, and on two after
    the one rank was killed. Their steps are timed beside plain loops and DDP.

    The emulated GPU can't run PyTorch's kernels. There the same programs run on the CPU, and the
    models on a PyTorch device that stands in for a GPU.
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
        command = (PROGRAM, "trainer", device, form)
        result[form] = c.once(form, lambda command=command: ranks(c, *command))
    result.update(models(c))
    return result


def models(c: Check) -> dict[str, Any]:
    """The hashes and times of three models, by model and form."""
    device = "pretend" if c.options.emulated else "cuda"
    forms = MODEL_FORMS[:-1] if c.options.emulated else MODEL_FORMS
    result: dict[str, Any] = {}
    for model in MODELS:
        for form in forms:
            name = f"{model} {form}"
            command = (MODELS_PROGRAM, "train", device, model, form)
            result[name] = c.once(name, lambda command=command: ranks(c, *command))
        name = f"{model} killed"
        weights = result[f"{model} fp32"]["weights"]
        command = (MODELS_PROGRAM, "train", device, model, "fp32")
        result[name] = c.once(
            name, lambda command=command, weights=weights: resumed(c, weights, *command)
        )
    device = "cpu" if c.options.emulated else "cuda"
    for model in MODELS:
        for form in ("fp32",) if c.options.emulated else FORMS:
            name = f"times {model} {form}"
            command = (MODELS_PROGRAM, "times", device, model, form)
            result[name] = c.once(
                name, lambda command=command: last_json(c.python(*command, **DETERMINISTIC))
            )
    return result


def resumed(c: Check, weights: str, *command: str) -> dict[str, str]:
    """Kills a training run of one rank, resumes it on two ranks, and returns its hash.

    Raises RuntimeError: the hash isn't `weights`.
    """
    folder = tempfile.mkdtemp(dir=c.scratch)
    killed = [*command, "--folder", folder, "--die", "3"]
    code, output = c.attempt(sys.executable, *killed, **DETERMINISTIC)
    if code != -signal.SIGKILL:
        raise RuntimeError(f"exit code {code}, and it should have been killed: {output[-900:]}")
    way, output = c.two_ranks(*command, "--folder", folder, **DETERMINISTIC)
    found = last_json(output)
    if found["weights"] != weights or found["ranks"] != 2:
        raise RuntimeError(f"killed and resumed on two ranks ({way}): {found}, expected {weights}")
    return {"weights": weights, "way": way}


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


def ranks(c: Check, *command: str) -> dict[str, str]:
    """The hash of a training run of odyssey.torch, which one rank and two ranks must agree on."""
    alone = last_json(c.python(*command, **DETERMINISTIC))
    way, output = c.two_ranks(*command, **DETERMINISTIC)
    two = last_json(output)
    if two["weights"] != alone["weights"] or (alone["ranks"], two["ranks"]) != (1, 2):
        name = " ".join(command[1:])
        raise RuntimeError(f"{name}: different bits: {alone} alone, {two} on two ranks ({way})")
    return {"weights": alone["weights"], "way": way, "sums": two["sums"]}
