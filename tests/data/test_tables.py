"""Tables with texts, missing and large numbers; what is learnt of the training part holds for
other tables.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from odyssey import data
from odyssey.data.tables import MAX_CATEGORIES, Columns, Table, notes
from odyssey.errors import ConfigError, DataError

TRAIN = "id,area,city,rooms,price\n1,50,Paris,2,1.5\n2,70,Berlin,,2.5\n3,90,Paris,4,3.5\n"


def written(tmp_path, text: str, name: str = "t.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_texts_become_a_number_for_each(tmp_path):
    made = data.csv(written(tmp_path, "city,n,y\nParis,1,0.5\nBerlin,2,1\nParis,3,2\n"))
    assert made.images.tolist() == [[0, 1, 1], [1, 0, 2], [0, 1, 3]]
    assert made.columns.features == ["city=Berlin", "city=Paris", "n"]


def test_what_the_training_part_has_holds_for_the_others(tmp_path):
    how = {"normalize": True, "drop_columns": ["id"], "fill": "mean"}
    train = data.csv(written(tmp_path, TRAIN), **how)
    areas, rooms = np.array([50, 70, 90.0]), np.array([2, 3, 4.0])  # the mean of 2 and 4
    wanted = [(areas - 70) / areas.std(), [0, 1, 0], [1, 0, 1], (rooms - 3) / rooms.std()]
    assert np.allclose(train.images, np.transpose(wanted))
    # the columns of another table may stand in another order, and its own means are not looked at
    other = written(tmp_path, "price,rooms,city,area\n1,NA,Berlin,170\n", "other.csv")
    x = data.csv(other, "price", like=train).images
    assert np.allclose(x, [[100 / areas.std(), 1, 0, 0]])
    kept = json.loads(json.dumps(train.columns.saved))
    assert np.array_equal(
        data.csv(other, "price", like=Columns.of_saved(kept, kept["names"])).images, x
    )
    mean, std = train.columns.scaling
    assert mean.tolist() == [70, 0, 0, 3] and np.allclose(std, [areas.std(), 1, 1, rooms.std()])
    with pytest.raises(ConfigError, match="normalize, drop_columns and fill are those of like="):
        data.csv(other, "price", like=train, fill=0)


def test_a_number_and_no_text_stand_for_what_is_missing(tmp_path):
    path = written(tmp_path, "a,b,y\n1,red,0.5\nn/a,,1\n")
    assert data.csv(path, fill=-1).images.tolist() == [[1, 1], [-1, 0]]
    assert data.csv(path, fill="7").images[1, 0] == 7
    with pytest.raises(
        DataError, match=r"t\.csv, line 3, column b: a text is missing; the training had red"
    ):
        data.csv(path, drop_columns=["a"])


@pytest.mark.parametrize(
    ("text", "how", "message"),
    [
        (
            "a,y\n,1\n",
            {},
            r"line 2, column a: '' is no finite number; fill it \(--fill mean, fill='mean'\), or "
            r"leave",
        ),
        (
            "a,y\n1,\n",
            {"fill": 0},
            r"line 2, column y: '' is no finite number; write it as a number, or leave the line",
        ),
        (
            "a,b,y\n,1,1\n,2,2\n",
            {"fill": "mean"},
            "column a has no number to fill with; leave the column out",
        ),
        ("a,y\ninf,1\n", {"fill": 0}, r"line 2, column a: 'inf' is no finite number"),
        ("a,y\n1,1\n", {"fill": "median"}, r"fill is 'median'; give 'mean' or a finite number"),
        ("a,y\n1,1\n", {"drop_columns": ["b"]}, r"has no column 'b'; its columns are a, y"),
        ("a,y\n1,1\n", {"drop_columns": ["y"]}, r"drop_columns names 'y', which is the target"),
        ("a,y\n1,1\n", {"drop_columns": ["a"]}, "no column besides the target"),
        ("a;y\n0,5;1\n", {}, "'0,5' is no finite number; write it as a number"),
        ("a;y\n1,234.5;1\n", {}, "is no finite number; write it as a number"),
        (
            "a,y\nx,1\n2,1\n",
            {},
            r"line 2, column a: 'x' is no finite number; write it as a number, or .*columns a\)",
        ),
        (
            "a,y\n" + "".join(f"w{i},1\n" for i in range(MAX_CATEGORIES + 1)),
            {},
            r"column a: 257 different texts, .*columns a, ",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, how, message):
    with pytest.raises((DataError, ConfigError), match=message):
        data.csv(written(tmp_path, text), **how)


def test_all_columns_that_do_not_fit_are_named(tmp_path):
    rows = [
        f"{i},2021-03-{i % 28 + 1:02} 10:{i % 60:02}:{i // 60:02},note {i},{i}" for i in range(300)
    ]
    rows[4] = "4,,note 4,"
    path = written(tmp_path, "\n".join(["y,date,comment,age", *rows]))
    with pytest.raises(DataError) as error:
        data.csv(path, "y", classes=False)
    message = str(error.value)
    assert "3 columns do not fit: date (299 dates, such as 2021-03-01 10:00:00); " in message
    assert "comment (300 different texts); age (line 6: '' is no finite number)" in message
    assert "--drop-columns date,comment,age" in message and "\n" not in message
    with pytest.raises(DataError, match="column date: 299 dates, .* columns of numbers instead"):
        data.csv(path, "y", classes=False, drop_columns=["comment"], fill="mean")
    fits = data.csv(path, "y", classes=False, drop_columns=["date", "comment"], fill="mean")
    assert fits.sample_shape == (1,)


def test_all_columns_of_a_later_table_that_do_not_fit_are_named(tmp_path):
    train = data.csv(written(tmp_path, TRAIN), drop_columns=["id", "rooms"])
    other = written(tmp_path, "area,city,price\n50,Rome,1\nx,Paris,1\n", "other.csv")
    with pytest.raises(
        DataError, match=r"area \(line 3: 'x' is no finite number\); city \(line 2: 'Rome' is unk"
    ):
        data.csv(other, like=train)


@pytest.mark.parametrize("missing", ["", "NaN"])
def test_a_missing_class_is_named(tmp_path, missing):
    path = written(tmp_path, f"a,kind\n1,red\n2,{missing}\n3,blue\n")
    with pytest.raises(DataError, match=r"line 3, column kind: missing class; write one, such as"):
        data.csv(path)


def test_the_training_part_says_what_the_target_is(tmp_path):
    written(tmp_path, "a,kind\n1,red\n3,blue\n4,green\n", "train.csv")
    test = written(tmp_path, "a,kind\n1,red\n3,green\n", "test.csv")
    parts = [data.opened("csv", tmp_path, train=train) for train in (True, False)]
    assert parts[0].labels.tolist() == [2, 0, 1] and parts[1].labels.tolist() == [2, 1]
    assert parts[0].class_names == parts[1].class_names == ("blue", "green", "red")
    test.write_text("a,kind\n1,red\n3,black\n")
    with pytest.raises(DataError, match="line 3, column kind: class 'black' is unknown; .* blue, "):
        data.opened("csv", tmp_path, train=False)
    # Whole numbers in the test part are numbers, if those of the training part are.
    written(tmp_path, "a,y\n1,0.5\n3,2\n", "train.csv")
    written(tmp_path, "a,y\n1,3\n3,2\n", "test.csv")
    assert data.opened("csv", tmp_path, train=False).labels.tolist() == [[3.0], [2.0]]
    written(tmp_path, "a,y\n1,3\n3,2\n", "train.csv")
    written(tmp_path, "a,y\n1,1\n3,2\n", "test.csv")
    assert data.opened("csv", tmp_path, train=False).classes == 4


def test_many_classes_that_may_be_numbers_are_told(tmp_path):
    path = written(tmp_path, "a,y\n" + "".join(f"1,{1000 + i}\n" for i in range(5)))
    assert notes(data.csv(path)) == [
        "the target has whole numbers, and becomes 1,005 classes; if it is a number, give --loss mse"
    ]


def test_a_text_that_the_training_did_not_have_is_refused(tmp_path):
    train = data.csv(written(tmp_path, TRAIN), drop_columns=["id", "rooms"])
    other = written(tmp_path, "area,city,price\n50,Paris,1\n50,Rome,1\n", "other.csv")
    wanted = (
        r"other\.csv, line 3, column city: 'Rome' is unknown; the training had Berlin, "
        r"Paris; correct it"
    )
    with pytest.raises(DataError, match=wanted):
        data.csv(other, like=train)


def test_means_are_of_the_training_part(tmp_path):
    draw = np.random.default_rng(0)
    rows = "".join(f"{a},{a}\n" for a in draw.normal(500, 20, 40))
    path = written(tmp_path, "a,y\n" + rows)
    parts = [data.opened("csv", path, train=train, normalize=True) for train in (True, False)]
    assert [len(part) for part in parts] == [36, 4]
    assert abs(parts[0].images.mean()) < 1e-6 and abs(parts[0].images.std() - 1) < 1e-6
    assert parts[0].columns == parts[1].columns
    for name in ("train", "test"):
        written(
            tmp_path,
            "a,b,y\n1,x,0.5\n3,z,1\n" if name == "train" else "a,b,y\n5,z,1\n",
            f"{name}.csv",
        )
    test = data.opened("csv", tmp_path, train=False, normalize=True, drop_columns=" b")
    assert test.images.tolist() == [[3]]
    # of train.csv's texts
    assert data.opened("csv", tmp_path, train=False).images.tolist() == [[5, 0, 1]]


def test_large_columns_and_texts_are_told(tmp_path):
    path = written(
        tmp_path, "area,year,city,y\n1000,2000,Rome,1\n1200,2010,Oslo,1\n3,2020,Oslo,1\n"
    )
    assert notes(data.csv(path)) == [
        "column city is text, and becomes 2 numbers: Oslo, Rome",
        "column year and 1 more: numbers of about 2,010, and above 100 training is slow or "
        "fails; give --normalize",
    ]
    assert len(notes(data.csv(path, normalize=True))) == 1
    assert notes(data.arrays(np.full((4, 2), 1e6), np.zeros(4, int))) == []


def test_a_table_on_standard_input(monkeypatch, tmp_path):
    with written(tmp_path, TRAIN).open() as file:
        monkeypatch.setattr("sys.stdin", file)
        table = Table("-")
    assert table.path == "standard input" and table.column("city") == ["Paris", "Berlin", "Paris"]
