"""Samples and targets that are more than one array, or no classes."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey.data import DataLoader, arrays
from odyssey.data.nested import Leaf, leaves, mapped
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
    assert inputs == {
        "flag": Leaf((), "int32"),
        "ids": Leaf((4,), "int32"),
        "more": Leaf((2, 3), "float32"),
    }
    assert targets == (Leaf((5,), "float32"), Leaf((2,), "int32")) and not classes
    batch = next(iter(DataLoader(data, batch_size=4, shuffle=True, seed=2)))
    np.testing.assert_array_equal(batch.inputs["ids"], x["ids"][batch.indices])
    np.testing.assert_array_equal(batch.targets[0], y[0].astype(np.float32)[batch.indices])
    assert [a.shape for a in leaves(data.take(2).gather(np.array([1])))] == [
        (1,),
        (1, 4),
        (1, 2, 3),
        (1, 5),
        (1, 2),
    ]
    with pytest.raises(ValueError, match="read-only"):
        data.labels[0][0] = 1


def test_classes_and_other_targets() -> None:
    x = np.zeros((3, 2))
    assert arrays(x, [2, 0, 1]).classes == 3 and arrays(x, [2, 0, 1], classes=0).classes == 0
    assert (
        arrays(x, [2.0, 0, 1]).classes == 0 and arrays(x, [[2], [0], [1]]).labels.dtype == np.int32
    )


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (
            np.zeros((3, 2)),
            np.zeros((4, 1)),
            r"an array of the targets has the shape \(4, 1\); \(3, ...\) expected",
        ),
        (
            (np.zeros((3, 2)), np.zeros(4)),
            [0, 1, 2],
            r"of the inputs has the shape \(4,\); \(3, ...\) expected",
        ),
        ((), [0], "the inputs are an empty tuple"),
        (np.zeros((3, 2)), 1.5, r"of the targets has the shape \(\)"),
        (
            np.zeros((3, 2)),
            np.array([[1], [2], [2**40]]),
            "integers from 1 to 1099511627776; those of int32",
        ),
        (np.zeros((3, 2)), [0, np.nan, 1], r"sample 1 of the targets holds nan at index \(1,\)"),
        (
            np.zeros((3, 2)),
            ["a", "b", "c"],
            "the targets are <U1; floats, integers and booleans are allowed",
        ),
    ],
)
def test_what_is_refused(x: object, y: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        arrays(x, y)


def test_trees_of_pytorchs_data_sets() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.arange(60.0).reshape(10, 2, 3), torch.arange(10) % 3
    found = next(iter(DataLoader(torch.utils.data.TensorDataset(x, y), 4)))
    # (H, W) is an image of one channel
    np.testing.assert_array_equal(found.inputs[:, 0], x[:4].numpy())
    assert found.dataset.form.classes and found.targets.tolist() == [0, 1, 2, 0]

    class Own(torch.utils.data.Dataset):
        def __init__(self, made):
            self.made = made

        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return self.made(i)

    made = Own(
        lambda i: (
            {"image": x[i], "more": (i, x[i] > 20)},
            {"kind": y[i], "size": x[i, 0].double()},
        )
    )
    part = torch.utils.data.Subset(made, [7, 2, 5])
    found = next(iter(DataLoader(part, 3)))
    assert (
        found.inputs["more"][0].tolist() == [7, 2, 5] and found.inputs["more"][1].dtype == np.int32
    )
    np.testing.assert_array_equal(found.targets["size"], x[[7, 2, 5], 0].numpy())
    assert found.targets["kind"].tolist() == [1, 2, 2] and not found.dataset.form.classes
    for wrong, said in [
        (
            lambda i: (x[i].clone().requires_grad_(), 1),
            "Own: sample 0 has a part that is a Tensor .*requires grad",
        ),
        (
            lambda i: (x[i], x[i], 1),
            r"Own: sample 0 is tuple \(Tensor, Tensor, int\); \(sample, target\) expected",
        ),
        (
            lambda i: ((x[i], np.nan if i == 3 else 0.5), 1),
            r"Own: sample 3\[1\] holds NaN or infinity; clean it",
        ),
        (
            lambda i: (x[i], torch.tensor(np.inf if i == 6 else 1.0)),
            "Own: the target of sample 6 holds NaN or infinity",
        ),
    ]:
        with pytest.raises(DataError, match=said):
            list(
                DataLoader(Own(wrong), 4, sampler=[9, 0, 3, 6] if "sample 0" not in said else None)
            )
