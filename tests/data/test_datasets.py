"""Array data sets and the known ones: values, checks, and the errors of missing, altered and
mismatched files.
"""

from __future__ import annotations

import gzip
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import odyssey.data
from odyssey.data import DATASETS, ArrayDataset, arrays, datasets, load
from odyssey.errors import ConfigError, DataError

SHIPPED = Path(odyssey.data.__file__).parent / "mnist"


def idx_bytes(values: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()
    )


def write_idx_pair(
    folder: Path, images: np.ndarray, labels: np.ndarray, part: str = "train", gz: bool = False
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
        name = f"{part}-{kind}-ubyte"
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(values)))
        else:
            (folder / name).write_bytes(idx_bytes(values))


def some_images(n: int = 6) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 28, 28), dtype=np.uint8)


def some_labels(n: int = 6) -> np.ndarray:
    return np.arange(n, dtype=np.uint8) % 10


# arrays()


def test_arrays_keeps_uint8_and_adds_a_channel() -> None:
    images = some_images()
    data = arrays(images, some_labels().astype(np.int64))
    assert data.images.shape == (6, 1, 28, 28)
    assert data.images.dtype == np.uint8
    assert np.shares_memory(data.images, images)
    assert data.labels.dtype == np.int32
    assert data.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert (data.classes, len(data), data.sample_shape, data.name) == (6, 6, (1, 28, 28), "arrays")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", ">f8"])
def test_arrays_converts_floats_to_native_float32(dtype: object) -> None:
    data = arrays(np.array([[0.5, 1.5], [2.5, 3.5]], dtype=dtype), [0, 1])  # type: ignore[arg-type]
    assert data.images.dtype == np.float32
    assert data.images.dtype.isnative
    assert data.images.tolist() == [[0.5, 1.5], [2.5, 3.5]]
    assert data.sample_shape == (2,)


def test_arrays_makes_contiguous() -> None:
    images = np.arange(48, dtype=np.uint8).reshape(2, 4, 3, 2).transpose(0, 2, 3, 1)
    data = arrays(images, [0, 0], classes=3)
    assert data.images.flags.c_contiguous
    np.testing.assert_array_equal(data.images, images)
    assert data.classes == 3


def test_arrays_result_cannot_be_written_and_labels_are_copied() -> None:
    labels = np.array([0, 1], np.int32)
    data = arrays(np.zeros((2, 3), np.float32), labels)
    labels[0] = 99
    assert data.labels[0] == 0
    for part in (data.images, data.labels, data.scale, data.shift):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint16, np.bool_])
def test_other_integers_become_int32(dtype: type) -> None:
    data = arrays(np.ones((2, 3), dtype), [0, 1])
    assert (
        data.images.dtype == np.int32
        and data.images.tolist() == [[1, 1, 1]] * 2
        and not data.normalised
    )


@pytest.mark.parametrize("dtype", [np.complex64, object, "U3"])
def test_arrays_refuses_what_is_no_number(dtype: object) -> None:
    with pytest.raises(DataError, match="uint8, other integers and floats are allowed"):
        arrays(np.zeros((2, 3), dtype), [0, 1])  # type: ignore[call-overload]
    with pytest.raises(
        DataError, match="the targets are .*; floats, integers and booleans are allowed"
    ):
        arrays(np.zeros((2, 3)), np.zeros((2, 3), dtype))  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_classes_are_integers(dtype: type) -> None:
    with pytest.raises(DataError, match=r"labels are \w+; classes are integers"):
        arrays(np.zeros((2, 3), np.uint8), np.zeros(2, dtype), classes=2)


@pytest.mark.parametrize("shape", [(4,), (2, 1, 1, 3, 3), (0, 3), (2, 0), (2, 3, 0, 4)])
def test_arrays_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="images have the shape"):
        arrays(np.zeros(shape, np.uint8), np.zeros(shape[0], np.int32))


@pytest.mark.parametrize("labels", [[0], [0, 0, 0], 0])
def test_arrays_refuses_different_lengths(labels: object) -> None:
    with pytest.raises(DataError, match=r"2 samples but labels of the shape .*\(2,\) expected"):
        arrays(np.zeros((2, 3), np.uint8), np.array(labels))


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([0, 3, 1], 3, r"label 3 at index 1; 0 to 2 are allowed"),
        ([0, 1, -1], None, r"label -1 at index 2; 0 to 1 are allowed"),
        (np.array([2**63, 0, 0], np.uint64), None, r"label 9223372036854775808 at index 0"),
        ([2**40, 0, 0], 10, r"label 1099511627776 at index 0; 0 to 9"),
    ],
)
def test_arrays_refuses_labels_out_of_range(
    labels: object, classes: int | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        arrays(np.zeros((3, 2), np.uint8), labels, classes=classes)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_arrays_refuses_values_that_are_not_finite(value: float) -> None:
    images = np.zeros((4, 2, 3, 3))
    images[2, 1, 0, 2] = value
    images[3, 0, 0, 0] = np.nan
    with pytest.raises(
        DataError, match=r"sample 2 of the images holds \S+ at index \(2, 1, 0, 2\)"
    ):
        arrays(images, [0, 0, 0, 0])


def test_arrays_allows_values_whose_float32_sum_overflows() -> None:
    data = arrays(np.full((2, 3), 3e38, np.float32), [0, 1])
    assert data.images[0, 0] == np.float32(3e38)


@pytest.mark.parametrize(
    "option", [{"scale": [1.0, 2.0]}, {"shift": np.nan}, {"scale": 1e300}, {"shift": "x"}]
)
def test_arrays_refuses_wrong_scale_and_shift(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="scale|shift"):
        arrays(np.zeros((1, 3, 2, 2), np.uint8), [0], **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [-1, 2.5])
def test_arrays_refuses_wrong_classes(classes: object) -> None:
    with pytest.raises(ConfigError, match="classes"):
        arrays(np.zeros((1, 3), np.uint8), [0], classes=classes)  # type: ignore[arg-type]


def test_constructing_directly_is_checked_too() -> None:
    one = np.ones(1, np.float32)
    images, labels = np.zeros((2, 3), np.uint8), np.array([0, 7], np.int32)
    assert len(ArrayDataset(images, labels, 8, one, one, "own")) == 2
    with pytest.raises(DataError, match="label 7"):
        ArrayDataset(images, labels, 7, one, one, "own")
    with pytest.raises(DataError, match="an array is int64"):
        ArrayDataset(images, labels.astype(np.int64), 8, one, one, "own")
    with pytest.raises(DataError, match="an array is int16"):
        ArrayDataset(images.astype(np.int16), labels, 8, one, one, "own")
    with pytest.raises(DataError, match="scale is float64"):
        ArrayDataset(images, labels, 8, one.astype(np.float64), one, "own")


# gather, take


def test_gather_normalises_each_channel_in_order() -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    data = arrays(images, [4, 5], scale=[1.0, 0.5, 0.25], shift=[0.0, 10.0, -1.0])
    x, y = data.gather(np.array([1, 0, 1]))
    assert x.dtype == np.float32
    assert y.dtype == np.int32
    assert y.tolist() == [5, 4, 5]
    scale, shift = (
        np.array([1, 0.5, 0.25]).reshape(3, 1, 1),
        np.array([0, 10.0, -1.0]).reshape(3, 1, 1),
    )
    np.testing.assert_array_equal(x, images[[1, 0, 1]] * scale + shift)


def test_gather_of_features_and_of_nothing() -> None:
    data = arrays(np.array([[1, 2], [3, 4]], np.uint8), [0, 1], scale=2.0, shift=1.0)
    assert data.gather([1])[0].tolist() == [[7.0, 9.0]]
    x, y = data.gather(np.array([], np.int64))
    assert x.shape == (0, 2)
    assert y.shape == (0,)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_gather_refuses_an_index_outside(wrong: int) -> None:
    data = arrays(np.zeros((2, 2), np.uint8), [0, 1])
    with pytest.raises(DataError, match=f"index {wrong} is not a sample; 0 to 1"):
        data.gather(np.array([0, wrong]))


def test_take() -> None:
    data = arrays(some_images(), some_labels(), scale=0.5, name="six")
    part = data.take(2)
    assert (len(part), part.labels.tolist(), part.classes, part.name) == (2, [0, 1], 6, "six")
    assert np.shares_memory(part.images, data.images)
    assert part.scale.tolist() == [0.5]
    for wrong in (0, 7, -1):
        with pytest.raises(ConfigError, match=f"is {wrong}; it must be from 1 to 6"):
            data.take(wrong)


# MNIST


@pytest.mark.parametrize(
    ("train", "count", "first"), [(True, 60000, [5, 0, 4, 1]), (False, 10000, [7, 2, 1, 0])]
)
def test_shipped_mnist(train: bool, count: int, first: list[int]) -> None:
    data = load("mnist", train=train)
    assert data.images.shape == (count, 1, 28, 28)
    assert data.images.dtype == np.uint8
    assert data.labels[:4].tolist() == first
    assert sorted(set(data.labels.tolist())) == list(range(10))
    assert (data.classes, data.name) == (10, "mnist")
    assert not data.images.flags.writeable


def test_mnist_is_normalised_as_published() -> None:
    data = load("mnist", train=True)
    assert data.scale.tolist() == [np.float32(1.0 / (255.0 * 0.3081))]
    assert data.shift.tolist() == [np.float32(-0.1307 / 0.3081)]
    # An odd step: even and odd samples come from different writers and have different means.
    x, _ = data.gather(np.arange(0, 60000, 7))
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 1.0) < 0.01


@pytest.fixture
def shipped_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "installed" / "mnist"
    copy.mkdir(parents=True)
    for file in SHIPPED.glob("t10k*.gz"):
        shutil.copy(file, copy)
    monkeypatch.setattr(datasets, "_SHIPPED", copy)
    empty = tmp_path / "cache"
    empty.write_bytes(b"")  # a file: nothing that was unpacked before can be there, or be kept
    monkeypatch.setenv("ODYSSEY_CACHE_DIR", str(empty))
    return copy


def repack(path: Path, at: int, flip: int) -> None:
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[at] ^= flip
    path.write_bytes(gzip.compress(bytes(content), 1))


def test_altered_pixel_of_the_shipped_mnist_is_noticed(shipped_copy: Path) -> None:
    assert len(load("mnist", train=False)) == 10000
    repack(shipped_copy / "t10k-images-idx3-ubyte.gz", 500_000, 1)
    with pytest.raises(
        DataError, match=r"t10k-images-idx3-ubyte\.gz was altered: .* expected 0fa7898d5092"
    ):
        load("mnist", train=False)
    with pytest.raises(DataError, match="was altered"):
        load("mnist", train=False, data_dir=shipped_copy)


def test_altered_label_of_the_shipped_mnist_is_noticed(shipped_copy: Path) -> None:
    repack(shipped_copy / "t10k-labels-idx1-ubyte.gz", 8, 1)
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte\.gz was altered: .* expected ff7bcfd416de"
    ):
        load("mnist", train=False)


def test_flipped_byte_in_the_shipped_gzip_is_noticed(shipped_copy: Path) -> None:
    path = shipped_copy / "t10k-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz"):
        load("mnist", train=False)


def test_incomplete_installation(shipped_copy: Path) -> None:
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.* missing from the installation"):
        load("mnist", train=True)


# a folder of the user's


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "."),
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "."),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_files_of_the_user(tmp_path: Path, name: str, folder: str, gz: bool) -> None:
    images = some_images()
    write_idx_pair(tmp_path / folder, images, some_labels(), gz=gz)
    write_idx_pair(tmp_path / folder, images[:2], some_labels(2), "t10k", gz=gz)
    data = load(name, train=True, data_dir=tmp_path)
    np.testing.assert_array_equal(data.images[:, 0], images)
    assert data.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert (data.classes, data.name) == (10, name)
    assert len(load(name, train=False, data_dir=tmp_path)) == 2


def test_fashion_mnist_has_its_own_normalisation(tmp_path: Path) -> None:
    write_idx_pair(tmp_path, some_images(), some_labels())
    data = load("fashion-mnist", train=True, data_dir=tmp_path)
    assert data.scale.tolist() == [np.float32(1.0 / (255.0 * 0.3530))]
    assert data.shift.tolist() == [np.float32(-0.2860 / 0.3530)]


def test_a_folder_named_after_the_data_set_comes_first(tmp_path: Path) -> None:
    write_idx_pair(tmp_path, some_images(3), some_labels(3))
    write_idx_pair(tmp_path / "fashion-mnist", some_images(5), some_labels(5))
    assert len(load("fashion-mnist", train=True, data_dir=tmp_path)) == 5
    assert len(load("mnist", train=True, data_dir=tmp_path)) == 3


def test_mnist_under_the_name_of_fashion_mnist_is_refused() -> None:
    with pytest.raises(DataError, match="is of MNIST, not of fashion-mnist"):
        load("fashion-mnist", train=False, data_dir=SHIPPED)


def test_different_numbers_of_images_and_labels(tmp_path: Path) -> None:
    write_idx_pair(tmp_path, some_images(6), some_labels(5))
    with pytest.raises(DataError, match=r"has 6 images but .* has 5 labels"):
        load("mnist", train=True, data_dir=tmp_path)


def test_images_and_labels_swapped(tmp_path: Path) -> None:
    write_idx_pair(tmp_path, some_labels(), some_images())
    with pytest.raises(DataError, match="1 dimensions; 3 expected"):
        load("mnist", train=True, data_dir=tmp_path)


def test_images_of_another_size(tmp_path: Path) -> None:
    write_idx_pair(tmp_path, np.zeros((2, 28, 27), np.uint8), some_labels(2))
    with pytest.raises(DataError, match="images of 28 x 27; mnist has 28 x 28"):
        load("mnist", train=True, data_dir=tmp_path)


def test_label_out_of_range_in_a_file(tmp_path: Path) -> None:
    write_idx_pair(tmp_path, some_images(3), np.array([0, 10, 11], np.uint8))
    with pytest.raises(
        DataError, match=r"train-labels-idx1-ubyte: label 10 at index 1; 0 to 9 are allowed"
    ):
        load("mnist", train=True, data_dir=tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    write_idx_pair(tmp_path, some_images(), some_labels())
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="mnist: train-labels-idx1-ubyte not found in") as caught:
        load("mnist", train=True, data_dir=tmp_path)
    assert "train-images" not in str(caught.value)


def test_data_dir_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--data-dir .*nowhere is not a folder"):
        load("mnist", train=True, data_dir=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "file"),
    [("fashion-mnist", "train-images-idx3-ubyte"), ("cifar10", "data_batch_5.bin")],
)
def test_without_data_dir_only_mnist_is_there(name: str, file: str) -> None:
    with pytest.raises(DataError, match="--data-dir") as caught:
        load(name, train=True)
    assert file in str(caught.value)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="'minst'; allowed are mnist, fashion-mnist, cifar10"):
        load("minst", train=True)


# CIFAR-10


def cifar_bytes(labels: list[int], seed: int = 0) -> tuple[bytes, np.ndarray]:
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
    return b"".join(
        bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True)
    ), images


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin", "cifar10"])
def test_cifar10(tmp_path: Path, folder: str) -> None:
    home = tmp_path / folder
    home.mkdir(exist_ok=True)
    all_images = []
    for number in range(1, 6):
        content, images = cifar_bytes([number, 9], number)
        (home / f"data_batch_{number}.bin").write_bytes(content)
        all_images.append(images)
    (home / "test_batch.bin").write_bytes(cifar_bytes([3])[0])
    data = load("cifar10", train=True, data_dir=tmp_path)
    np.testing.assert_array_equal(data.images, np.concatenate(all_images))
    assert data.labels.tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5, 9]
    assert data.images.flags.c_contiguous
    x, y = data.gather([0])
    assert x.shape == (1, 3, 32, 32)
    wanted = (
        all_images[0][0] / 255 - np.array([0.4914, 0.4822, 0.4465])[:, None, None]
    ) / np.array([0.2470, 0.2435, 0.2616])[:, None, None]
    np.testing.assert_allclose(x[0], wanted, atol=1e-6)
    assert load("cifar10", train=False, data_dir=tmp_path).labels.tolist() == [3]


@pytest.mark.parametrize("change", [-1, 1, -3073])
def test_cifar10_of_a_wrong_length(tmp_path: Path, change: int) -> None:
    content = cifar_bytes([3])[0]
    content = content[:change] if change < 0 else content + bytes(change)
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(
        DataError,
        match=rf"test_batch\.bin holds {3073 + change} bytes; a non-zero multiple of 3073",
    ):
        load("cifar10", train=False, data_dir=tmp_path)


def test_cifar10_label_out_of_range(tmp_path: Path) -> None:
    (tmp_path / "test_batch.bin").write_bytes(cifar_bytes([9, 10])[0])
    with pytest.raises(DataError, match=r"test_batch\.bin: label 10 at index 1; 0 to 9"):
        load("cifar10", train=False, data_dir=tmp_path)


def test_cifar10_with_a_missing_batch(tmp_path: Path) -> None:
    for number in (1, 2, 3, 5):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(cifar_bytes([0])[0])
    with pytest.raises(DataError, match=r"cifar10: data_batch_4\.bin not found"):
        load("cifar10", train=True, data_dir=tmp_path)


# the package


def test_datasets_table_agrees_with_what_is_loaded() -> None:
    data = load("mnist", train=False)
    assert data.sample_shape == DATASETS["mnist"].shape
    assert data.classes == DATASETS["mnist"].classes
    assert DATASETS["cifar10"].shape == (3, 32, 32)
    assert all(len(info.mean) == len(info.std) == info.shape[0] for info in DATASETS.values())


def test_importing_costs_numpy_only() -> None:
    code = (
        "import sys, odyssey.data; print([m for m in ('mpi4py', 'max', 'torch') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
