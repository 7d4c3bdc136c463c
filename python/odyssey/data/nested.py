"""Trees: an array, or a tuple or dict of trees.

What samples and targets are that are more than one array.

A dict's entries go by the order of their names, so that two dicts with the same names are the same
tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Named(dict[str, Any]):
    """A dict in the order of its names, which can be a key itself."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree with function(leaf) in the place of each leaf, called in their order; with trees
    of the same form function(leaf, theirs, ...).
    """
    if isinstance(tree, dict):
        return Named(
            (name, mapped(function, tree[name], *(t[name] for t in others)))
            for name in sorted(tree)
        )
    if isinstance(tree, tuple):
        return tuple(mapped(function, *parts) for parts in zip(tree, *others, strict=True))
    return function(tree, *others)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree in their order."""
    tree_leaves: list[Any] = []
    mapped(tree_leaves.append, tree)
    return tree_leaves


def places(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves with their places in the tree, such as ("['image'][0]", leaf)."""
    if not isinstance(tree, tuple | dict):
        return [(name, tree)]
    parts = sorted(tree.items()) if isinstance(tree, dict) else enumerate(tree)
    return [pair for key, part in parts for pair in places(part, f"{name}[{key!r}]")]


@dataclass(frozen=True)
class Leaf:
    """One array as a model is given it: shape without the batch axis, and "float32" or "int32"."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    normalised: bool = False  # numbers go through the scale and shift of their data set


class Form(NamedTuple):
    """Form of the samples of a data set: trees of Leaf. Programs are recorded per form."""

    inputs: Any
    targets: Any
    classes: bool  # whether the targets are classes

    @classmethod
    def of_classes(cls, *shape: int) -> Form:
        """Samples of one shape, normalised, and their classes."""
        return cls(Leaf(shape, normalised=True), Leaf((), "int32"), True)
