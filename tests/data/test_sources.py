"""Data sets out of files: what is read, and how a file that is wrong is named."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from odyssey import data
from odyssey.data import sources
from odyssey.errors import ConfigError, DataError

PIL = pytest.importorskip("PIL.Image")


def picture(path, color, size=(8, 6), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.new(mode, size, color).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    for k, name in enumerate(("cat", "ant", "bee")):
        for i in range(4):
            picture(tmp_path / name / f"{i}.png", (10 * k, i, 200))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "bee" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "cat" / "Thumbs.db").write_bytes(b"x")
    return tmp_path


def test_an_image_folder(folder):
    made = data.ImageFolder(folder)
    assert (
        made.classes == ["ant", "bee", "cat"] and len(made) == 12 and made.sample_shape == (3, 6, 8)
    )
    pixels, label = made[9]
    assert (label, pixels.dtype, pixels.shape) == (2, np.uint8, (3, 6, 8)) and pixels[
        :, 0, 0
    ].tolist() == [0, 1, 200]
    batch = next(iter(data.DataLoader(made, 12)))
    x, y = batch
    assert batch.dataset.images.dtype == np.uint8 and y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    np.testing.assert_allclose(x[9, :, 0, 0], (np.array([0, 1, 200]) / 255 - 0.5) / 0.5, atol=1e-6)
    seen = []
    seeing = next(
        iter(data.DataLoader(made, 12, transform=lambda pixels, rng: seen.append(pixels) or pixels))
    )
    # a transform is given what a model would be given without it
    np.testing.assert_array_equal(seeing.inputs, x)
    assert (seen[9].dtype, seen[9].shape) == (np.float32, (3, 6, 8))
    assert (
        data.ImageFolder(folder, (4, 5))[0][0].shape
        == data.ImageFolder(folder, (4, 5)).sample_shape
        == (3, 4, 5)
    )
    picture(folder / "ant" / "4.jpg", 7, (30, 40), "L")
    picture(folder / "ant" / "5.png", 3, (9, 9), "P")
    assert [data.ImageFolder(folder, 4)[i][0].shape for i in (4, 5)] == [(3, 4, 4)] * 2


@pytest.mark.parametrize("how", ["broken", "cut", "text", "size", "empty", "nothing", "missing"])
def test_what_is_wrong_with_a_folder_is_named(folder, how):
    path = picture(folder / "ant" / "9.jpg", 5, (8, 6))
    message, size = r"9\.jpg cannot be read as an image .*; replace it, or move it elsewhere", 8
    if how == "broken":
        path.write_bytes(b"not a picture")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif how == "text":
        path, message = (
            path.rename(path.with_suffix(".txt")),
            r"9\.txt is no picture; move it elsewhere",
        )
    elif how == "size":
        picture(path, 5, (7, 6))
        size, message = (
            None,
            r"9\.jpg has 7 x 6 pixels, the first picture 8 x 6; give ImageFolder a size",
        )
    elif how == "empty":
        (folder / "dog").mkdir()
        message = r"dog is empty"
    else:
        folder, message = (
            folder / ("ant" if how == "nothing" else "none"),
            "has no folders with|is not a folder",
        )
    with pytest.raises(DataError, match=message):
        list(data.DataLoader(data.ImageFolder(folder, size), 8))


def test_a_table(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a, b,kind,y\n1,2,red,0.5\n3,4e0,blue,-1\n\n5,6,red,2\n")
    # one-hot: blue, red
    assert data.csv(path).images.tolist() == [[1, 2, 0, 1], [3, 4, 1, 0], [5, 6, 0, 1]]
    path.write_text("a, b,kind,y\n1,2,0,0.5\n3,4e0,1,-1\n\n5,6,0,2\n")
    made = data.csv(path)
    assert made.classes == 0 and made.images.tolist() == [[1, 2, 0], [3, 4, 1], [5, 6, 0]]
    assert made.labels.tolist() == [[0.5], [-1], [2]] and made.labels.dtype == np.float32
    assert (
        data.csv(path, "kind").labels.tolist() == [0, 1, 0] and data.csv(path, "kind").classes == 2
    )
    assert data.csv(path, ["a", "y"]).labels.tolist() == [[1, 0.5], [3, -1], [5, 2]]
    assert data.csv(path, "kind", classes=False).labels.tolist() == [[0], [1], [0]]
    for missing in ("", "nan"):
        path.write_text(f"a,kind\n1,red\n3,{missing}\n")
        with pytest.raises(DataError, match="line 3, column kind: missing class; .* such as red"):
            data.csv(path)
    path.write_text("a,kind\n1,red\n3,blue\n")
    assert data.csv(path).labels.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"line 2, column kind: 'red'"):
        data.csv(path, words=False)


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("a,b\n1,2\n3\n", None, r"line 3: 2 fields expected"),
        ("a,b\n1,2\n3,nan\n", None, r"line 3, column b: 'nan' is no finite number"),
        ("a,b\n1,2\n,1\n", None, r"line 3, column a: '' is no finite number"),
        ("a,b\n1,2\n", "c", r"has no column 'c'; its columns are a, b"),
        ("a,a\n1,2\n", None, "has two columns 'a'; rename one"),
        ("a,b\n", None, "has no lines of numbers below"),
        ("", None, "has no lines of numbers below"),
        (
            "0.5,2\n1,2\n",
            None,
            r"begins with numbers \(0.5, 2\); put a line with names of columns first",
        ),
        ("a;b\n0,5;1\n", None, "'0,5' is no finite number; write it as a number"),
        ("y\n1\n", None, "no column besides the target"),
        ('a,b\n"1,2\n', None, "cannot be read as a table"),
        (b"\xff\xfe\x00", None, "cannot be read as a table"),
        (None, None, r"t\.csv cannot be read as a table \(No such file or directory\); give"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path, text, target, message):
    path = tmp_path / "t.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        data.csv(path, target)


@pytest.mark.parametrize(
    "text", ["a;b\n1;2\n", "a\tb\r\n1\t2\r\n", '"a";"b, of c"\n"1";2\n', "0,1\n1,2\n"]
)
def test_tables_of_other_programs(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text, newline="", encoding="utf-8-sig")
    x, y = data.csv(path, classes=False)[-1]
    assert (x.tolist(), y.tolist()) == ([1], [2])


def test_one_sample_of_what_is_read_in_batches(tmp_path):
    tree = data.arrays({"a": np.arange(6).reshape(3, 2), "b": np.ones((3, 1))}, np.arange(3) / 2)
    x, y = tree[1]
    assert (x["a"].tolist(), x["b"].tolist(), y) == ([2, 3], [1], 0.5) and tree[-1][1] == 1
    pixels = data.arrays(np.full((2, 1, 2, 2), 255, np.uint8), [0, 1], scale=1 / 255)
    assert [y for _, y in pixels] == [0, 1] and pixels[0][0].max() == 1  # as a model is given it
    with pytest.raises(IndexError):
        pixels[2]
    np.arange(7, dtype=np.uint16).tofile(tmp_path / "t.bin")
    ids, following = data.tokens(tmp_path / "t.bin", length=3, classes=7, dtype="u2")[1]
    assert (ids.tolist(), following.tolist()) == ([3, 4, 5], [4, 5, 6])


def test_npz(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((4, 3)), y=np.arange(4), z=np.zeros((4, 2), np.float32))
    assert data.npz(path).classes == 4
    assert data.npz(path, {"one": "x", "two": "z"}, "z").sample_shape == {"one": (3,), "two": (2,)}
    with pytest.raises(DataError, match=r"has no array 'q'; it has x, y, z"):
        data.npz(path, "q")
    np.savez(path, x=np.array([None]), y=np.zeros(1))
    with pytest.raises(
        DataError, match=r"a\.npz cannot be read as \.npz \(Object arrays cannot be loaded"
    ):
        data.npz(path)
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        data.npz(path)


def test_npy_files_are_read_by_rows(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(20, 2, 3)).astype(np.float32), np.arange(20) % 3
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    loader = data.DataLoader(
        data.npy(tmp_path / "x.npy", tmp_path / "y.npy", classes=3), 6, True, seed=1
    )
    for batch in loader:
        found, labels = batch
        np.testing.assert_array_equal(found[:, 0], x[batch.numbers])
        np.testing.assert_array_equal(labels, y[batch.numbers])
    np.save(tmp_path / "z.npy", y[:5])
    with pytest.raises(DataError, match=r"has 20 rows, .*z\.npy has 5"):
        data.npy(tmp_path / "x.npy", tmp_path / "z.npy")
    np.save(tmp_path / "z.npy", np.asfortranarray(x[:, 0]))
    with pytest.raises(DataError, match="one behind the other"):
        data.npy(tmp_path / "z.npy", tmp_path / "y.npy")
    (tmp_path / "z.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-4])
    with pytest.raises(DataError, match=r"z\.npy holds \d+ bytes of numbers"):
        data.npy(tmp_path / "z.npy", tmp_path / "y.npy")


def test_tokens(tmp_path):
    path = tmp_path / "t.bin"
    ids = np.random.default_rng(0).integers(0, 50, 1003).astype(np.uint16)
    ids.tofile(path)
    made = data.tokens(path, length=10, classes=50, dtype=np.uint16)
    assert len(made) == 100
    x, y = next(iter(data.DataLoader(made, 100)))
    np.testing.assert_array_equal(x.reshape(-1), ids[:1000])
    np.testing.assert_array_equal(y.reshape(-1), ids[1:1001])
    np.save(tmp_path / "t.npy", ids.astype(np.int64))
    np.testing.assert_array_equal(
        data.tokens(tmp_path / "t.npy", length=10, classes=50).gather(np.arange(100))[1], y
    )
    with pytest.raises(DataError, match="are too few for one sample of 2000"):
        data.tokens(path, length=2000, classes=50, dtype=np.uint16)
    np.save(tmp_path / "t.npy", ids.astype(np.float32))
    with pytest.raises(
        DataError, match=r"t\.npy holds float32 rows \(\); token ids \(N,\), integers"
    ):
        data.tokens(tmp_path / "t.npy", length=10, classes=50)
    path.write_bytes(b"odd")
    with pytest.raises(
        DataError, match=r"t\.bin holds 3 bytes of numbers, which are no uint16 rows"
    ):
        data.tokens(path, length=1, classes=50, dtype=np.uint16)


def test_the_width_of_token_files_is_known_or_passed(tmp_path):
    path = tmp_path / "t.bin"
    rng = np.random.default_rng(0)
    for dtype in ("u1", "<u2", ">u2", "<u4", ">u4", "<i2", "<i4", "<i8", "<u8"):
        ids = rng.integers(0, 100, 61).astype(dtype)
        ids.tofile(path)
        np.save(tmp_path / "t.npy", ids)
        for made in (
            data.tokens(path, length=6, classes=100, dtype=dtype),
            data.tokens(tmp_path / "t.npy", length=6, classes=100),
            data.tokens(tmp_path / "t.npy", length=6, classes=100, dtype=dtype),
        ):
            x, y = made.gather(np.arange(10))
            np.testing.assert_array_equal(x.reshape(-1), ids[:60])
            np.testing.assert_array_equal(y.reshape(-1), ids[1:])
            assert (x.dtype, y.dtype) == (np.int32, np.int32)
    with pytest.raises(ConfigError, match=r"t\.bin holds plain numbers, and their width isn't kno"):
        data.tokens(path, length=6, classes=100)
    with pytest.raises(DataError, match=r"t\.npy holds uint64, and dtype is uint16; pass no dtype"):
        data.tokens(tmp_path / "t.npy", length=6, classes=100, dtype=np.uint16)
    for wrong in ("number", object, "S2"):
        with pytest.raises(
            ConfigError, match=r"dtype is .*; a dtype of integers or floats expected"
        ):
            data.tokens(path, length=6, classes=100, dtype=wrong)
    with pytest.raises(DataError, match=r"t\.bin holds float64 rows \(\); token ids \(N,\), integ"):
        data.tokens(path, length=6, classes=100, dtype=float)
    with pytest.raises(DataError, match=r"t\.bin is not a \.npy file; write it with numpy\.save"):
        data.npy(path, path)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_large", [False, True])
def test_ids_that_are_not_allowed_are_named_with_their_position(
    tmp_path, monkeypatch, seed, is_large
):
    """At once, and in a file too large to check at once when the sample is read."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(rng.choice(["u2", "u4", "i4", "i8"]))
    length = int(rng.integers(1, 9))
    ids = rng.integers(0, 300, int(rng.integers(3 * length, 40 * length)) + 1).astype(dtype)
    position = int(rng.integers(0, (len(ids) - 1) // length * length + 1))  # one that is used
    value = int(rng.choice([300, 301, np.iinfo(dtype).max, -1 if dtype.kind == "i" else 300]))
    ids[position] = value
    suffix = str(rng.choice(["bin", "npy"]))
    path = tmp_path / f"t.{suffix}"
    ids.tofile(path) if suffix == "bin" else np.save(path, ids)
    if is_large:
        monkeypatch.setattr(sources, "CHECKED_BYTES", 16)
    message = rf"t\.{suffix} holds {value} at position {position}; values from 0 to 299 expected; c"
    with pytest.raises(DataError, match=message):
        made = data.tokens(path, length=length, classes=300, dtype=dtype)
        assert is_large
        indices = np.arange(len(made))
        made.gather(rng.permutation(indices) if position % length else indices)
    ids[position] = 299
    ids.tofile(path) if suffix == "bin" else np.save(path, ids)
    made = data.tokens(path, length=length, classes=300, dtype=dtype)
    assert made.gather(np.arange(len(made)))[0].max() <= 299


def test_wrong_classes_of_npy_files_are_named(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((5, 2), np.float32))
    np.save(tmp_path / "y.npy", np.array([0, 1, 2, 3, 0]))
    with pytest.raises(
        DataError, match=r"y\.npy holds 3 at position 3; values from 0 to 2 expected"
    ):
        data.npy(tmp_path / "x.npy", tmp_path / "y.npy", classes=3)
    assert len(data.npy(tmp_path / "x.npy", tmp_path / "y.npy", classes=4)) == 5


def test_text(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("abcä€ba" * 10)
    whole, train, test = (data.text(path, length=4, train=part) for part in (None, True, False))
    assert (
        whole.vocabulary == train.vocabulary == test.vocabulary == ["a", "b", "c", "ä", "€"]
        and whole.classes == 5
    )
    assert (len(whole), len(train), len(test)) == (17, 15, 1)
    x, y = whole.gather(np.array([0]))
    assert (x.tolist(), y.tolist(), x.dtype) == ([[0, 1, 2, 3]], [[1, 2, 3, 4]], np.int32)
    assert whole.vocabulary.decode(whole.vocabulary.encode("€ba")) == "€ba"
    with pytest.raises(
        DataError, match=r"character 1 of the text is 'z', which is not among the 5"
    ):
        whole.vocabulary.encode("az")
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"t\.txt cannot be read as text"):
        data.text(path)


def test_text_with_a_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel(
        {"be": 0, "or": 1, "not": 2, "to": 3, "?": 5}, unk_token="?"
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("to be or not to be")
    found = data.text(tmp_path / "t.txt", length=5, tokenizer=tmp_path / "tokenizer.json")
    assert found.gather(np.array([0]))[1].tolist() == [[0, 1, 2, 3, 0]]
    assert found.bits(math.log(2)) == {"bits_per_character": 6 / 18}
    assert (found.classes, found.vocabulary) == (6, ["be", "or", "not", "to", "", "?"])
    back = data.Vocabulary(tokenizer=found.vocabulary.saved["tokenizer"])
    assert (
        back == found.vocabulary
        and back.encode("to be").tolist() == [3, 0]
        and back.decode([3, 0]) == "to be"
    )
    with pytest.raises(DataError, match=r"t\.txt cannot be read as a tokenizer"):
        data.text(tmp_path / "t.txt", tokenizer=tmp_path / "t.txt")


def test_shakespeare(monkeypatch, tmp_path):
    made = data.shakespeare(length=100)
    assert (made.classes, len(made)) == (76, 10360)
    x, _ = made.gather(np.arange(len(made)))
    assert "To be, or not to be" in "".join(made.vocabulary[i] for i in x.reshape(-1))
    assert len(data.shakespeare(train=True)) == 14568 and len(data.shakespeare(train=False)) == 1618
    changed = tmp_path / "s.txt.gz"
    changed.write_bytes(gzip.compress(b"to be"))
    monkeypatch.setattr(sources, "_SHAKESPEARE", changed)
    with pytest.raises(DataError, match="was altered"):
        data.shakespeare()


def test_rows_of_tables_of_other_libraries():
    rows = [{"img": PIL.new("L", (3, 2), 10 * i), "label": i % 2, "more": [i, i]} for i in range(5)]
    x, y = next(iter(data.DataLoader(data.columns(rows, "img", "label"), 5)))
    assert (
        x.shape == (5, 1, 2, 3)
        and x[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40]
        and y.tolist() == [0, 1, 0, 1, 0]
    )
    scaled = next(
        iter(data.DataLoader(data.columns(rows, "img", "label", scale=1 / 255, shift=-0.5), 5))
    ).inputs
    np.testing.assert_allclose(scaled, x / 255 - 0.5, atol=1e-6)
    x, y = next(
        iter(data.DataLoader(data.columns(rows, {"a": "img", "b": "more"}, ("label", "more")), 5))
    )
    assert x["b"].tolist() == [[i, i] for i in range(5)] and y[1].shape == (5, 2)
    with pytest.raises(
        DataError, match=r"row 0 has no column 'text'; it has 'img', 'label', 'more'"
    ):
        list(data.DataLoader(data.columns(rows, "text", "label"), 5))


def test_a_split(folder):
    made = data.arrays(np.arange(20, dtype=np.float32)[:, None], np.arange(20) % 4)
    train, test = data.split(made, 0.2, seed=3)
    assert sorted([*train.images[:, 0], *test.images[:, 0]]) == list(range(20)) and len(test) == 4
    assert train.classes == test.classes == 4
    a, b = data.split(data.ImageFolder(folder), 0.25)
    assert (len(a), len(b), a.classes, a.sample_shape) == (9, 3, ["ant", "bee", "cat"], (3, 6, 8))
    assert len(list(data.DataLoader(a, 4))) == 3
    ids = data.split(data.shakespeare())[1]
    assert next(iter(data.DataLoader(ids, 4))).inputs.shape == (4, 64)
    with pytest.raises(ConfigError, match="leave some for training"):
        data.split(made, 0.99)


def test_by_name(folder, tmp_path):
    assert len(data.opened("mnist", None, train=False)) == 10000
    assert len(data.opened("shakespeare", None, train=False, length=100)) == 1036
    assert [len(data.opened("image-folder", folder, train=t, size=4)) for t in (True, False)] == [
        11,
        1,
    ]
    with pytest.raises(
        ConfigError,
        match=r"--dataset csv is a data set of your own; say where it is with --data-dir",
    ):
        data.opened("csv", None, train=True)
    other = tmp_path / "parts"
    for part, names in (("train", "ab"), ("test", "ac")):
        for name in names:
            picture(other / part / name / "1.png", 0)
    assert data.opened("image-folder", other, train=True).classes == ["a", "b"]
    with pytest.raises(DataError, match="has other folders than"):
        data.opened("image-folder", other, train=False)
    for part in ("train", "test"):
        (other / f"{part}.csv").write_text("a,b\n1,0.5\n")
        np.savez(other / f"{part}.npz", x=np.ones((2, 2)), y=np.ones((2, 1)))
        assert len(data.opened("csv", other, train=part == "train")) == 1
        assert len(data.opened("npz", other, train=part == "train")) == 2


def test_bytes_of_npz_are_pixels_on_the_command_line(tmp_path):
    pixels = np.array([0, 51, 255], np.uint8).reshape(3, 1, 1, 1).repeat(2, 1)
    np.savez(tmp_path / "a.npz", x=pixels, y=np.arange(3))
    found = [data.opened("npz", tmp_path / "a.npz", train=part) for part in (True, False)]
    values = {
        float(v)
        for part in found
        for v in np.ravel(part.images[:, 0] * part.scale[0] + part.shift[0])
    }
    assert np.allclose(sorted(values), [-1, -0.6, 1], atol=1e-6)
    np.savez(tmp_path / "a.npz", x=pixels[:, :, 0, 0].astype(np.float32), y=np.arange(3))
    assert np.all(data.opened("npz", tmp_path / "a.npz", train=True).scale == 1)


MEASURED = """
import resource, sys
import numpy as np
from odyssey import data
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = data.tokens(sys.argv[1], length=1023, classes=65535, dtype=np.uint16)
assert len(made) > 100_000
for batch in data.DataLoader(made, 512, sampler=range(0, len(made), 11)):
    assert batch.targets[-1, -1] == 0
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_file_larger_than_the_memory_it_takes(tmp_path):
    path = tmp_path / "tokens.bin"
    with path.open("wb") as file:
        file.truncate(300 << 20)
    done = subprocess.run([sys.executable, "-c", MEASURED, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())  # KiB
    assert after - before < 100 << 10, (before, after)


def test_a_folder_s_fingerprint_is_of_names_sizes_and_classes(folder):
    def found(size=4):
        return data.ImageFolder(folder, size).fingerprint()

    first = found()
    assert len(first) == 16 and found() == first and found(5) != first
    (some, label), *_ = data.ImageFolder(folder, 4).files
    assert label == 0
    with open(some, "ab") as file:
        file.write(b"\0")
    longer = found()
    assert longer != first
    Path(some).rename(Path(some).with_name("zz.jpg"))
    renamed = found()
    assert renamed not in (first, longer)
    (folder / "ant").rename(folder / "other")
    assert found() not in (first, longer, renamed)


def test_every_source_has_a_fingerprint(tmp_path):
    x, y = np.arange(40, dtype=np.float32).reshape(10, 4), np.arange(10, dtype=np.int32)

    def made(x):
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", y)
        np.savez(tmp_path / "a.npz", x=x, y=y)
        np.savetxt(tmp_path / "t.csv", x, delimiter=",", header="a,b,c,d", comments="")
        (tmp_path / "t.txt").write_text("".join(chr(65 + int(v) % 26) for v in x.ravel()))
        x.ravel().astype(np.uint16).tofile(tmp_path / "t.bin")
        yield data.arrays(x, y)
        yield data.npz(tmp_path / "a.npz")
        yield data.npy(tmp_path / "x.npy", tmp_path / "y.npy")
        yield data.csv(tmp_path / "t.csv", classes=False)
        yield data.text(tmp_path / "t.txt", length=5)
        yield data.tokens(tmp_path / "t.bin", length=5, classes=2**16, dtype=np.uint16)
        rows = data.columns([{"x": a, "y": b} for a, b in zip(x, y, strict=True)], "x", "y")
        yield rows
        yield sources.Subset(rows, np.arange(1, 9))

    other = x.copy()
    other[6, 1] += 1  # in the middle
    for before, again, after in zip(
        *([s.fingerprint() for s in made(a)] for a in (x, x, other)), strict=True
    ):
        assert before == again != after and len(before) == 16
    rows = type("Rows", (), {"_fingerprint": "of Hugging Face", "__len__": lambda self: 3})()
    assert data.columns(rows, "x", "y").fingerprint() == "of Hugging Face"
    part = sources.Subset(data.arrays(x, y), np.arange(4))
    assert part.fingerprint() != sources.Subset(data.arrays(x, y), np.arange(1, 5)).fingerprint()
