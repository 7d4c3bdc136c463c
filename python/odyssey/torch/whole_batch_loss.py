"""A loss over all outputs of a batch whose shards ran apart, on any ranks: two passes
(GradCache, Gao et al. 2021).

The first pass gives the outputs, which all ranks get, joined in the order of the samples. Each rank
that has shards computes the same loss of them and its gradients; in the second pass a shard runs
again, with the same random numbers, and these are propagated through it. What it is not: for losses
inside of modules, which see the samples of a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..comm import Communicator
from ..errors import ConfigError
from ..train import spread
from .objects import packed, unpacked


class Outputs:
    """Outputs of this rank's shards in the first pass. spec: the tree (output, targets), whose
    first `output_leaves` leaves are the output's.
    """

    def __init__(self) -> None:
        # leaves by (first sample, one past the last)
        self.shards: dict[tuple[int, int], list[Any]] = {}
        self.spec: Any = None
        self.output_leaves = 0

    def add(self, lo: int, hi: int, out: Any, y: Any) -> None:
        """Keeps those of a shard, without what backward() would need."""
        leaves, self.spec = pytree.tree_flatten((out, y))
        self.output_leaves = len(pytree.tree_leaves(out))
        self.shards[lo, hi] = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]

    def exchanged(self, comm: Communicator, failed: bool) -> list[Any] | None:
        """[first, one past the last, tensors] of all shards in order; None: a rank has failed.

        A collective call.
        """
        local_shards = [
            [*span, [packed(t) for t in leaves if isinstance(t, torch.Tensor)]]
            for span, leaves in self.shards.items()
        ]
        everyone = [spread(comm, [failed, local_shards], rank) for rank in range(comm.size)]
        shards = [
            [lo, hi, [unpacked(t) for t in tensors]]
            for _, its in everyone
            for lo, hi, tensors in its
        ]
        return (
            None if any(its for its, _ in everyone) else sorted(shards, key=lambda shard: shard[:2])
        )


class WholeBatchLoss:
    """The loss of all outputs of a batch, and its gradients of them. loss: of (output, targets).
    scale: what it is multiplied with for the gradients; None: they are not needed. Raises
    ConfigError: the shards' outputs cannot be joined.
    """

    def __init__(
        self, outputs: Outputs, shards: list[Any], loss: Callable[[Any, Any], Any], scale: Any
    ) -> None:
        self.outputs = outputs
        leaves = list(next(iter(outputs.shards.values())))
        places = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)]
        if len({len(tensors) for _, _, tensors in shards}) > 1:
            raise ConfigError(
                "[torch] gather=True: forward() gives other numbers of tensors for some shards"
            )
        for k, i in enumerate(places):
            leaves[i] = _join([(hi - lo, tensors[k]) for lo, hi, tensors in shards])
        self._gradient_leaves = [
            i for i in places if i < outputs.output_leaves and leaves[i].is_floating_point()
        ]
        for i in self._gradient_leaves:
            leaves[i].requires_grad_(scale is not None)
        value = loss(*pytree.tree_unflatten(leaves, outputs.spec))
        self.loss = float(value.detach())
        if scale is not None:
            self._gradients = torch.autograd.grad(
                value * scale, [leaves[i] for i in self._gradient_leaves], allow_unused=True
            )

    def backward(self, lo: int, hi: int, out: Any) -> None:
        """The second pass of a shard.

        Raises ConfigError: it is not what the first one gave, or has no gradient.
        """
        leaves = pytree.tree_leaves(out)
        first_leaves = self.outputs.shards[lo, hi]
        ends = []
        gradients = []
        for i, gradient in zip(self._gradient_leaves, self._gradients, strict=True):
            t = leaves[i]
            if not torch.equal(t, first_leaves[i]) and not bool(t.isnan().any()):
                raise ConfigError(
                    "[torch] gather=True: forward() gives other outputs when it runs again on "
                    "the same samples; draw "
                    "from torch's generator alone, and keep nothing from call to call"
                )
            if gradient is None or not t.requires_grad or (not t.dim() and lo):
                continue  # a number is of the parameters alone, so one shard answers for it
            ends.append(t)
            gradients.append(gradient[lo:hi] if t.dim() else gradient)
        if not ends and not lo:
            raise ConfigError(
                "[torch] gather=True: the loss does not depend on the outputs of forward(); "
                "leave it out"
            )
        if ends:
            torch.autograd.backward(ends, gradients)


def _join(parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """One tensor of those of (samples, tensor) of all shards."""
    first = parts[0][1]
    if not first.dim() and all(torch.equal(t, first) for _, t in parts):
        return first.clone()
    shapes = sorted({tuple(t.shape[1:]) for _, t in parts})
    if len(shapes) > 1 or any(not t.dim() or len(t) != n for n, t in parts):
        raise ConfigError(
            "[torch] gather=True joins outputs and targets along their first axis, the samples; "
            f"shards gave {shapes} "
            "behind it; give such tensors, and numbers that depend on parameters alone"
        )
    return torch.cat([t for _, t in parts])
