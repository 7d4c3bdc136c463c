"""Trees: an array, or a tuple or dict of trees.

Samples and targets that consist of more than one array are trees. The entries of a dict are in the
order of their names, so two dicts with the same names are the same tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Named(dict[str, Any]):
    """A dict in the order of its names. It can be a key of another dict."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def mapped(function: Callable[..., Any], tree: Any, *trees: Any) -> Any:
    """Returns a tree of the same form, with function(leaf) instead of each leaf.

    With more trees of the same form, it calls function(leaf, leaf of the second tree, ...). Leaves
    are visited in their order.
    """
    if isinstance(tree, dict):
        return Named(
            (name, mapped(function, tree[name], *(parallel[name] for parallel in trees)))
            for name in sorted(tree)
        )
    if isinstance(tree, tuple):
        return tuple(mapped(function, *parts) for parts in zip(tree, *trees, strict=True))
    return function(tree, *trees)


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree in their order."""
    tree_leaves: list[Any] = []
    mapped(tree_leaves.append, tree)
    return tree_leaves


def places(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """Returns (place, leaf) for each leaf of a tree, for example ("['image'][0]", leaf).

    name: the place of the tree itself.
    """
    if not isinstance(tree, tuple | dict):
        return [(name, tree)]
    parts = sorted(tree.items()) if isinstance(tree, dict) else enumerate(tree)
    return [pair for key, part in parts for pair in places(part, f"{name}[{key!r}]")]


@dataclass(frozen=True)
class Leaf:
    """The form of one array of a model's input: the shape without the batch axis, and the dtype.

    The dtype is "float32" or "int32".
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    normalised: bool = False  # the scale and shift of the data set apply to the numbers


class Form(NamedTuple):
    """The form of the samples of a data set: trees of Leaf. A program is recorded for each form."""

    inputs: Any
    targets: Any
    classes: bool  # the targets are classes

    @classmethod
    def of_classes(cls, *shape: int) -> Form:
        """Returns the form of normalised samples of one shape, and their classes."""
        return cls(Leaf(shape, normalised=True), Leaf((), "int32"), classes=True)
