"""Averages of weights on a device, with the CPU's bits.

Each operation rounds once, as NumPy's do (callbacks/averages.py). PyTorch's lerp, and add with a
factor, may round the product and the sum together on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

GROUP_ELEMENTS = 1 << 24  # of tensors whose differences are in memory at a time
Pair = tuple[torch.Tensor, torch.Tensor]


def move_averages(
    averages: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    rate: float,
    keeps_equal: bool,
) -> None:
    """Moves averages towards weights: averages += rate (weights - averages).

    Averages that aren't floats become copies of their weights.

    Args:
        averages, weights: tensors of one device, in the same order.
        rate: 1 copies the weights.
        keeps_equal: True if an average that equals its weight stays as it is. The difference of
            infinities would be NaN.
    """
    pairs = list(zip(averages, weights, strict=True))
    if rate == 1:
        _copy(pairs)
        return
    _copy([pair for pair in pairs if not pair[0].is_floating_point()])
    for group in _groups([pair for pair in pairs if pair[0].is_floating_point()]):
        # the rate is rounded to the dtype of the numbers, as NumPy does
        rounded = torch.tensor(rate, dtype=group[0][0].dtype).item()
        if keeps_equal:
            _move_joined(group, rounded)
        else:
            _move(group, rounded)


def _groups(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Yields pairs in groups of one dtype, with at most GROUP_ELEMENTS elements or one pair."""
    for dtype in dict.fromkeys(average.dtype for average, _ in pairs):
        group: list[Pair] = []
        elements = 0
        for average, weight in pairs:
            if average.dtype != dtype or not average.numel():
                continue
            if group and elements + average.numel() > GROUP_ELEMENTS:
                yield group
                group = []
                elements = 0
            group.append((average, weight))
            elements += average.numel()
        if group:
            yield group


def _copy(pairs: list[Pair]) -> None:
    if pairs:
        averages, weights = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(averages, weights)


def _move(pairs: list[Pair], rate: float) -> None:
    averages, weights = map(list, zip(*pairs, strict=True))
    differences = torch._foreach_sub(weights, averages)
    torch._foreach_mul_(differences, rate)
    torch._foreach_add_(averages, differences)


def _move_joined(pairs: list[Pair], rate: float) -> None:
    """Moves averages that differ from their weights. They are joined, because buffers are small,
    and PyTorch has no `where` of many tensors.
    """
    columns = zip(*pairs, strict=True)
    average, weight = (torch.cat([one.reshape(-1) for one in column]) for column in columns)
    moved = average + (weight - average) * rate
    joined = torch.where(weight != average, moved, average)
    parts = joined.split([one.numel() for one, _ in pairs])
    targets = [target for target, _ in pairs]
    _copy([(target, part.view(target.shape)) for target, part in zip(targets, parts, strict=True)])
