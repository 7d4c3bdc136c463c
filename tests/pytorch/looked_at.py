"""Published models and what odyssey.torch says of their losses: looked_at.py; prints a line for
each, in float32 and in bfloat16 (autocast), kind first.

They are those of published_models.py: classifiers with cross entropy, models with the losses that
they hold, and one whose loss looks across the batch.
"""

from __future__ import annotations

import functools
from typing import Any

import published_models
import torch

from odyssey.torch import huggingface, separable


def look(name: str, module: torch.nn.Module, batch: tuple[Any, Any], loss: Any) -> None:
    def run(both: tuple[Any, Any], precision: str) -> torch.Tensor:
        x, y = both
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return loss(module(**x) if isinstance(x, dict) else module(x), y)

    for precision in ("fp32", "bf16"):
        count = huggingface.label_counter(module)
        kind, _ = separable.looked_at(
            [module.train()],
            functools.partial(run, precision=precision),
            batch,
            weight=None if count is None else functools.partial(weigh, count),
        )
        print(kind, name, precision, flush=True)


def weigh(count: Any, both: tuple[Any, Any]) -> float:
    """Returns the weight of a shard of a model that counts its labels."""
    batch, _ = both
    return float(count(None, batch))


def main() -> None:
    for name in published_models.MODELS:
        module, batch, loss = published_models.build(name)
        pair = (batch, ()) if isinstance(batch, dict) else batch
        look(name, module, pair, loss or (lambda out, y: huggingface.loss(out)))


if __name__ == "__main__":
    main()
