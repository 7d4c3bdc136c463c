"""Short training runs of PyTorch, plain and with odyssey.torch, for scripts/gpu-check; prints a
JSON object.

    python tests/gpu/torch_facts.py facts
    python tests/gpu/torch_facts.py plain DEVICE            hashes of weights, by form
    python tests/gpu/torch_facts.py trainer DEVICE FORM     the hash of weights, on all ranks

DEVICE is cpu or cuda. FORM is fp32, bf16 or compile. All flags that make PyTorch deterministic are
set.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 4
BATCH = 40


def set_flags() -> None:
    """Makes PyTorch deterministic, in full float32."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_num_threads(1)


def facts() -> dict[str, Any]:
    """Versions, and the flags as they are before anybody sets them."""
    cuda = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if cuda else None
    return {
        "torch": torch.__version__,
        "cuda available": cuda,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "gpu": None if properties is None else properties.name,
        "capability": None if properties is None else f"{properties.major}.{properties.minor}",
        "multiprocessors": None if properties is None else properties.multi_processor_count,
        "matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "bf16 sums in bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "nccl": bool(torch.distributed.is_available() and torch.distributed.is_nccl_available()),
    }


class Attention(nn.Module):
    """One block of attention and a classifier, over rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 3 * 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projection(x.flatten(1, 2)).view(len(x), 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(y.transpose(1, 2).flatten(2).mean(1))


def convolutions() -> nn.Module:
    """A network with a convolution, batch normalization and dropout."""
    layers = (
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(4 * 36, 10),
    )
    return nn.Sequential(*layers)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same batches in every process."""
    g = torch.Generator().manual_seed(1)
    images = [torch.randn(BATCH, 1, 8, 8, generator=g) for _ in range(STEPS)]
    return [(x, torch.randint(0, 10, (BATCH,), generator=g)) for x in images]


def weights_hash(module: nn.Module) -> str:
    """The first 16 digits of a hash of all parameters and buffers."""
    whole = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        whole.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


def plain_run(make: Callable[[], nn.Module], device: str, narrow: bool, compiled: bool) -> str:
    """The hash of the weights after a short training run without odyssey."""
    torch.manual_seed(0)
    net = make().to(device)
    forward = torch.compile(net) if compiled else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=narrow):
            loss = F.cross_entropy(forward(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return weights_hash(net)


def plain(device: str) -> dict[str, str]:
    """The hashes by form; the error of a form that PyTorch rejects."""
    set_flags()
    forms: dict[str, tuple[Callable[[], nn.Module], bool, bool]] = {
        "fp32": (convolutions, False, False),
        "bf16": (convolutions, True, False),
        "attention fp32": (Attention, False, False),
        "attention bf16": (Attention, True, False),
        "compile": (convolutions, False, True),
    }
    hashes = {}
    for name, arguments in forms.items():
        try:
            hashes[name] = plain_run(arguments[0], device, *arguments[1:])
        # a fact as well: what can't be deterministic, or has no compiler
        except Exception as problem:
            if name in ("fp32", "bf16"):
                raise
            hashes[name] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
    return hashes


def make_trainer(device: str, form: str) -> Any:
    """A trainer of odyssey.torch for a module on the device."""
    from odyssey.torch import DistributedTrainer

    torch.manual_seed(0)
    net = convolutions().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    precision = "bf16" if form == "bf16" else "fp32"
    if form == "compile":
        net = torch.compile(net)
    loss = nn.CrossEntropyLoss()
    return DistributedTrainer(
        net, optimizer, loss, shard_size=8, precision=precision, clip_norm=0.5, backend="auto"
    )


def trainer(device: str, form: str) -> dict[str, Any] | None:
    """The hash of the weights after a short training run with odyssey, on rank 0."""
    set_flags()
    t = make_trainer(device, form)
    t.fit(batches(), epochs=2, verbose=False)
    evaluation = t.evaluate(batches()[:1])
    if t.comm.rank:
        return None
    return {
        "sums": type(t.shards._links).__name__,  # NoneType if they go through the host
        "weights": t.weights_sha256()[:16],
        "loss": float(evaluation.loss).hex(),
        "ranks": t.comm.size,
    }


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    result = {"facts": facts, "plain": plain, "trainer": trainer}[command](*rest)
    if result is not None:
        print(json.dumps(result), flush=True)
