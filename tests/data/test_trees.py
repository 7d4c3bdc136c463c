"""Samples and targets that are more than one array, or no classes."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey.data import DataLoader, arrays
from odyssey.data.trees import Leaf, leaves, mapped
from odyssey.errors import DataError


def test_a_tree_goes_by_names_and_places() -> None:
    tree = {"b": (1, 2), "a": {"d": 3, "c": 4}}
    assert leaves(tree) == [4, 3, 1, 2]
    twice = mapped(lambda v: 2 * v, tree)
    assert twice == {"a": {"c": 8, "d": 6}, "b": (2, 4)}
    assert hash(twice) == hash(mapped(lambda v: 2 * v, {"a": {"c": 4, "d": 3}, "b": (1, 2)}))


def test_what_is_no_class_keeps_its_shape() -> None:
    rng = np.random.default_rng(0)
    more = rng.random((6, 2, 3)).astype(np.float16)
    x = {"ids": rng.integers(0, 9, (6, 4)), "flag": rng.random(6) < 0.5, "more": more}
    y = (rng.random((6, 5)), rng.integers(-9, 9, (6, 2), np.int8))
    data = arrays(x, y)
    assert len(data) == 6 and data.classes == 0 and not data.normalised
    inputs, targets, classes = data.form
    assert inputs == {"flag": Leaf((), "int32"), "ids": Leaf((4,), "int32"), "more": Leaf((2, 3), "float32")}
    assert targets == (Leaf((5,), "float32"), Leaf((2,), "int32")) and not classes
    batch = next(iter(DataLoader(data, batch_size=4, shuffle=True, seed=2)))
    np.testing.assert_array_equal(batch.inputs["ids"], x["ids"][batch.indices])
    np.testing.assert_array_equal(batch.targets[0], y[0].astype(np.float32)[batch.indices])
    assert [a.shape for a in leaves(data.take(2).gather(np.array([1])))] == [(1,), (1, 4), (1, 2, 3), (1, 5), (1, 2)]
    with pytest.raises(ValueError, match="read-only"):
        data.labels[0][0] = 1


def test_classes_and_other_targets() -> None:
    x = np.zeros((3, 2))
    assert arrays(x, [2, 0, 1]).classes == 3 and arrays(x, [2, 0, 1], classes=0).classes == 0
    assert arrays(x, [2.0, 0, 1]).classes == 0 and arrays(x, [[2], [0], [1]]).labels.dtype == np.int32


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (np.zeros((3, 2)), np.zeros((4, 1)), r"an array of the targets has the shape \(4, 1\); \(3, ...\) expected"),
        ((np.zeros((3, 2)), np.zeros(4)), [0, 1, 2], r"of the inputs has the shape \(4,\); \(3, ...\) expected"),
        ((), [0], "the inputs are an empty tuple"),
        (np.zeros((3, 2)), 1.5, r"of the targets has the shape \(\)"),
        (np.zeros((3, 2)), np.array([[1], [2], [2**40]]), "integers from 1 to 1099511627776; those of int32"),
        (np.zeros((3, 2)), [0, np.nan, 1], r"sample 1 of the targets holds nan at index \(1,\)"),
        (np.zeros((3, 2)), ["a", "b", "c"], "the targets are <U1; floats, integers and booleans are allowed"),
    ],
)
def test_what_is_refused(x: object, y: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        arrays(x, y)
