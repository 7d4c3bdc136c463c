"""A loss over all outputs of a batch whose shards run separately, on any ranks. It takes two passes
(GradCache, Gao et al. 2021).

The first pass computes the outputs. All ranks get them, joined in the order of the samples. Each
rank that has shards computes the same loss of all outputs, and its gradients of them. In the second
pass each shard runs again with the same random numbers, and backward() starts from these gradients.
A loss inside a module isn't supported: it sees the samples of one shard only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..comm import Communicator
from ..errors import ConfigError
from ..train import spread
from .device import Device, Findings, to_host
from .objects import packed, unpacked

_OTHER_OUTPUTS = (
    "[torch] gather=True: forward() gives other outputs when it runs again on the same samples; "
    "draw from torch's generator alone, and keep nothing from call to call"
)


class Outputs:
    """The outputs and targets of this rank's shards in the first pass.

    shards: the leaves of the tree (output, targets), by (first sample, one past the last).
    spec: the form of that tree. output_leaves: how many of its leaves, the first, are the output's.
    """

    def __init__(self) -> None:
        self.shards: dict[tuple[int, int], list[Any]] = {}
        self.spec: Any = None
        self.output_leaves = 0

    def add(self, lo: int, hi: int, out: Any, y: Any) -> None:
        """Keeps the output and targets of a shard, without the graph for backward()."""
        leaves, self.spec = pytree.tree_flatten((out, y))
        self.output_leaves = len(pytree.tree_leaves(out))
        self.shards[lo, hi] = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]

    def exchanged(self, comm: Communicator, failed: bool) -> list[Any] | None:
        """Sends the tensors of this rank's shards to all ranks; a collective call.

        failed: True if this rank's first pass failed.

        Returns [first sample, one past the last, tensors] of the shards of all ranks in order, or
        None if a rank has failed. Of several ranks the tensors are in memory of the host.
        """
        local_shards = [
            [lo, hi, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]]
            for (lo, hi), leaves in self.shards.items()
        ]
        if comm.size == 1:
            return None if failed else sorted(local_shards, key=lambda shard: shard[:2])
        on_host = iter(to_host([t for _, _, tensors in local_shards for t in tensors]))
        sent = [
            [lo, hi, [packed(next(on_host)) for _ in tensors]] for lo, hi, tensors in local_shards
        ]
        rank_results = [spread(comm, [failed, sent], rank) for rank in range(comm.size)]
        if any(rank_failed for rank_failed, _ in rank_results):
            return None
        shards = [
            [lo, hi, list(map(unpacked, tensors))]
            for _, rank_shards in rank_results
            for lo, hi, tensors in rank_shards
        ]
        return sorted(shards, key=lambda shard: shard[:2])


class WholeBatchLoss:
    """The loss of all outputs of a batch, and its gradients of them.

    Args:
        outputs: of this rank's shards.
        shards: of all ranks, as `Outputs.exchanged` returns them.
        loss: a function of (output, targets).
        device: of the outputs.
        summands: the number that the loss is divided by, if it is a sum; 1 if it is a mean.
        train: True if gradients are needed.
        scale: what gradients are multiplied by.

    Attributes:
        loss: its value, as `Device.read` returns it.
        findings: mistakes that the device finds.

    Raises:
        ConfigError: The outputs of the shards can't be joined.
    """

    def __init__(
        self,
        outputs: Outputs,
        shards: list[Any],
        loss: Callable[[Any, Any], Any],
        *,
        device: Device,
        summands: int,
        train: bool,
        scale: float = 1.0,
    ) -> None:
        self.outputs = outputs
        self.findings = Findings()
        _, self._samples, _ = shards[-1]
        leaves = list(next(iter(outputs.shards.values())))  # any shard's; tensors are replaced
        tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if len({len(tensors) for _, _, tensors in shards}) > 1:
            raise ConfigError(
                "[torch] gather=True: forward() gives other numbers of tensors for some shards"
            )
        for k, i in enumerate(tensor_leaves):
            parts = [(hi - lo, tensors[k]) for lo, hi, tensors in shards]
            leaves[i] = device.put(self._join_tensors(parts))
        self._gradient_leaves = [
            i for i in tensor_leaves if i < outputs.output_leaves and leaves[i].is_floating_point()
        ]
        for i in self._gradient_leaves:
            leaves[i].requires_grad_(train)
        value = loss(*pytree.tree_unflatten(leaves, outputs.spec))
        if summands > 1:
            value = value / summands
        self.loss = device.read(value.detach())
        if train:
            if scale != 1:
                value = value.float() * scale  # 16 bits would overflow
            self._gradients = torch.autograd.grad(
                value, [leaves[i] for i in self._gradient_leaves], allow_unused=True
            )

    def backward(self, lo: int, hi: int, out: Any) -> None:
        """Runs backward() of a shard from the gradients of its outputs.

        Shards are averaged afterwards, weighted by their samples. So the gradients of the outputs
        are multiplied by the samples of the batch / the samples of the shard.

        lo, hi: the first sample of the shard, and one past the last. out: its output in the second
        pass.

        Raises ConfigError: the output differs from that of the first pass, or the loss doesn't
        depend on it.
        """
        leaves = pytree.tree_leaves(out)
        first_leaves = self.outputs.shards[lo, hi]
        tensors = []
        gradients = []
        for i, gradient in zip(self._gradient_leaves, self._gradients, strict=True):
            tensor = leaves[i]
            first = first_leaves[i]
            if tensor.shape != first.shape:
                raise ConfigError(_OTHER_OUTPUTS)
            is_other = (tensor != first).any() & ~tensor.isnan().any()
            self.findings.add(is_other, _OTHER_OUTPUTS)
            if gradient is None or not tensor.requires_grad:
                continue
            # A number is equal in all shards, as it depends on parameters only. So its gradient is
            # used once, in the first shard.
            if not tensor.dim() and lo:
                continue
            tensors.append(tensor)
            local_gradient = gradient[lo:hi] if tensor.dim() else gradient
            gradients.append(local_gradient * (self._samples / (hi - lo)))
        if not tensors and not lo:
            raise ConfigError(
                "[torch] gather=True: the loss does not depend on the outputs of forward(); "
                "leave it out"
            )
        if tensors:
            torch.autograd.backward(tensors, gradients)

    def _join_tensors(self, parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Returns one tensor of the (samples, tensor) of all shards; equal numbers stay a number.

        Raises ConfigError: their shapes don't fit together.
        """
        _, first = parts[0]
        shapes = sorted({tuple(t.shape[1:]) for _, t in parts})
        problem = (
            "[torch] gather=True joins outputs and targets along their first axis, the samples; "
            f"shards gave {shapes} "
            "behind it; give such tensors, and numbers that depend on parameters alone"
        )
        if all(not t.dim() for _, t in parts):
            is_equal = (torch.stack([t for _, t in parts]) == first).all()
            self.findings.add(~is_equal, problem)
            return first.clone()
        if len(shapes) > 1 or any(not t.dim() or len(t) != samples for samples, t in parts):
            raise ConfigError(problem)
        return torch.cat([t for _, t in parts])
