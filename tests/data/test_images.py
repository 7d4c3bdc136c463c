"""Image files of every kind of pixels, compared with formulas that don't use Pillow.

PNG and TIFF files are written here byte by byte, because Pillow cannot write most of these kinds.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from odyssey import data
from odyssey.data.images import read_image
from odyssey.errors import DataError

PIL = pytest.importorskip("PIL.Image")

# Colour types of PNG, with the number of channels of a pixel.
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}
PNG_KINDS = [
    *((GREY, depth) for depth in (1, 2, 4, 8, 16)),
    *((PALETTE, depth) for depth in (1, 2, 4, 8)),
    *((color, depth) for color in (RGB, GREY_ALPHA, RGBA) for depth in (8, 16)),
]


def packed(samples: np.ndarray, depth: int, order: str = ">") -> list[bytes]:
    """Returns the bytes of each row of samples (H, W, C) of `depth` bits."""
    rows = samples.reshape(len(samples), -1)
    if depth in (8, 16, 32):
        return [row.astype(f"{order}u{depth // 8}").tobytes() for row in rows]
    bits = (rows[:, :, None] >> np.arange(depth - 1, -1, -1)) & 1
    return [np.packbits(row.reshape(-1).astype(np.uint8)).tobytes() for row in bits]


def write_png(path, samples, color, depth, extra=()):
    """Writes a PNG file. extra: pairs of name and content of more chunks."""
    height, width = samples.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    content = zlib.compress(b"".join(b"\0" + row for row in packed(samples, depth)))
    chunks = [(b"IHDR", header), *extra, (b"IDAT", content), (b"IEND", b"")]
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, body in chunks:
            checksum = struct.pack(">I", zlib.crc32(name + body))
            file.write(struct.pack(">I", len(body)) + name + body + checksum)
    return str(path)


def write_tiff(path, samples, depth, photometric, order="<", **tags):
    """Writes a TIFF file of one strip. tags: sample_format, extra, orientation."""
    height, width, channels = samples.shape
    content = b"".join(packed(samples, depth, order))
    entries = [(256, width), (257, height), (258, [depth] * channels), (259, 1)]
    entries += [(262, photometric), (273, 8), (274, tags.get("orientation", 1)), (277, channels)]
    entries += [(278, height), (279, len(content))]
    if "extra" in tags:
        entries.append((338, tags["extra"]))
    entries.append((339, [tags.get("sample_format", 1)] * channels))
    directory = 8 + len(content) + len(content) % 2
    outside = directory + 2 + 12 * len(entries) + 4
    records, arrays = b"", b""
    for number, value in entries:
        values = value if isinstance(value, list) else [value]
        is_long = number == 279  # a number of bytes, which may need 32 bits
        body = struct.pack(f"{order}{len(values)}{'I' if is_long else 'H'}", *values)
        record = struct.pack(f"{order}HHI", number, 4 if is_long else 3, len(values))
        if len(body) > 4:
            records += record + struct.pack(f"{order}I", outside + len(arrays))
            arrays += body
        else:
            records += record + body.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    start = struct.pack(f"{order}I", directory)
    count = struct.pack(f"{order}H", len(entries))
    padding = b"\0" * (len(content) % 2)
    path.write_bytes(magic + start + content + padding + count + records + b"\0" * 4 + arrays)
    return str(path)


def on_white(colors: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Returns what alpha of 0 to 255 leaves of colours, and white of the rest."""
    weight = alpha / 255.0
    return colors * weight + 255 * (1 - weight)


def assert_shows(path, expected, tolerance=0.0):
    """Compares what is read with the pixels (H, W, 1 or 3) that a viewer shows."""
    pixels = read_image(path)
    height, width = expected.shape[:2]
    assert (pixels.dtype, pixels.shape) == (np.uint8, (3, height, width))
    colors = np.broadcast_to(expected, (height, width, 3))
    difference = np.abs(pixels.transpose(1, 2, 0) - colors)
    assert difference.max() <= tolerance, (path, difference.max())
    np.testing.assert_array_equal(read_image(path, (width, height)), pixels)
    grey = colors @ (0.299, 0.587, 0.114)
    assert np.abs(read_image(path, mode="L")[0] - grey).max() <= tolerance + 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("color", "depth"), PNG_KINDS)
def test_png_files_are_shown(tmp_path, color, depth, seed):
    rng = np.random.default_rng([color, depth, seed])
    height, width = rng.integers(1, 20, 2)
    samples = rng.integers(0, 2**depth, (height, width, CHANNELS[color]))
    # 1, 2, 4 bits reach from 0 to 255; of 16 bits the upper 8 are shown.
    levels = samples >> 8 if depth == 16 else samples * (255 // (2**depth - 1))
    has_transparency = bool(seed % 2)
    extra = []
    tolerance = 0.0
    if color == PALETTE:
        palette = rng.integers(0, 256, (2**depth, 3))
        extra.append((b"PLTE", palette.astype(np.uint8).tobytes()))
        expected = palette[samples[..., 0]]
        if has_transparency:
            count = rng.integers(1, 2**depth + 1)  # those behind it are opaque
            alphas = np.full(2**depth, 255)
            alphas[:count] = rng.choice([0, 255, 77], count)
            extra.append((b"tRNS", alphas[:count].astype(np.uint8).tobytes()))
            expected = on_white(expected, alphas[samples[..., 0]][..., None])
            tolerance = 1
    elif color in (GREY_ALPHA, RGBA):
        expected = on_white(levels[..., :-1], levels[..., -1:])
        tolerance = 1
    else:
        expected = levels
        if has_transparency:
            key = samples[rng.integers(height), rng.integers(width)]
            extra.append((b"tRNS", key.astype(">u2").tobytes()))
            is_key = (samples == key).all(axis=2, keepdims=True)
            expected = np.where(is_key, 255, expected)
    path = write_png(tmp_path / "a.png", samples, color, depth, extra)
    if (color, depth, has_transparency) == (RGB, 16, True):
        with pytest.raises(DataError, match=r"a\.png has a transparent colour of 16 bits per chan"):
            read_image(path)
        return
    assert_shows(path, expected, tolerance)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("channels", "depth", "photometric", "extra"),
    [
        (1, 1, 0, None),
        (1, 1, 1, None),
        (1, 4, 1, None),
        (1, 8, 0, None),
        (1, 8, 1, None),
        (1, 12, 1, None),
        (1, 16, 0, None),
        (1, 16, 1, None),
        (2, 8, 1, 1),
        (2, 8, 1, 2),
        (3, 8, 2, None),
        (3, 16, 2, None),
        (4, 8, 2, 0),
        (4, 8, 2, 1),
        (4, 8, 2, 2),
        (4, 16, 2, 2),
        (4, 8, 5, None),
    ],
)
def test_tiff_files_are_shown(tmp_path, channels, depth, photometric, extra, seed, order):
    rng = np.random.default_rng([channels, depth, photometric, seed])
    height, width = rng.integers(1, 20, 2)
    samples = rng.integers(0, 2**depth, (height, 2 * width, channels))
    tolerance = 0.0
    if extra == 1:  # colours that are multiplied by alpha
        samples[..., :-1] = samples[..., :-1] * samples[..., -1:] // 255
        tolerance = 3
    levels = samples >> (depth - 8) if depth > 8 else samples * (255 // (2**depth - 1))
    if photometric == 5:  # cyan, magenta, yellow, black
        expected = (255 - levels[..., :3]) * (255 - levels[..., 3:]) / 255
        tolerance = 1
    elif extra == 0:  # a fourth channel that is no alpha
        expected = levels[..., :3]
    elif extra == 1:
        expected = levels[..., :-1] + 255.0 - levels[..., -1:]
    elif extra == 2:
        expected = on_white(levels[..., :-1], levels[..., -1:])
        tolerance = 1
    else:
        expected = 255 - levels if photometric == 0 else levels
    more = {} if extra is None else {"extra": extra}
    path = write_tiff(tmp_path / "a.tif", samples, depth, photometric, order, **more)
    if order == ">" and (depth == 12 or (photometric == 0 and depth == 16)):  # Pillow can't
        with pytest.raises(DataError, match=r"a\.tif cannot be read as an image"):
            read_image(path)
        return
    assert_shows(path, expected, tolerance)


@pytest.mark.parametrize(
    ("depth", "sample_format", "kind"),
    [(32, 3, "float"), (32, 1, "32-bit"), (32, 2, "signed"), (16, 2, "signed"), (8, 2, "signed")],
)
def test_pixels_without_known_black_and_white_are_named(tmp_path, depth, sample_format, kind):
    folder = tmp_path / "a"
    folder.mkdir()
    samples = np.arange(48).reshape(6, 8, 1)
    write_tiff(folder / "x.tif", samples, depth, 1, sample_format=sample_format)
    message = rf"x\.tif has {kind} pixels, and which of them are black and white isn't known; con"
    with pytest.raises(DataError, match=message):
        data.ImageFolder(tmp_path, 4)[0]


TURNED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", [*range(10), 65535])
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif"])
def test_images_are_turned_as_their_exif_data_say(tmp_path, suffix, orientation):
    rng = np.random.default_rng(orientation)
    height, width = rng.integers(1, 12, 2)
    # Blocks of 16 pixels and full levels, which JPEG changes little.
    levels = 255 * rng.integers(0, 2, (height, width, 1)).repeat(16, 0).repeat(16, 1).repeat(3, 2)
    path = tmp_path / f"a.{suffix}"
    if suffix == "tif":
        write_tiff(path, levels, 8, 2, orientation=orientation)
    else:
        exif = PIL.Exif()
        exif[274] = orientation
        options = {"lossless": True} if suffix == "webp" else {}
        PIL.fromarray(levels.astype(np.uint8)).save(path, exif=exif, **options)
    expected = TURNED.get(orientation, TURNED[1])(levels)
    assert_shows(str(path), expected, 12 if suffix == "jpg" else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photo_is_scaled_after_it_was_turned(tmp_path, orientation):
    """A JPEG is decoded at a smaller size, which must cover the size that is asked for."""
    rows, columns = np.mgrid[:480, :640]
    levels = np.stack([rows // 2, columns // 3, (rows + columns) // 5], axis=2).astype(np.uint8)
    exif = PIL.Exif()
    exif[274] = orientation
    PIL.fromarray(levels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    PIL.fromarray(np.ascontiguousarray(TURNED[orientation](levels))).save(tmp_path / "b.png")
    turned = read_image(str(tmp_path / "a.jpg"), (30, 50)).astype(int)
    upright = read_image(str(tmp_path / "b.png"), (30, 50)).astype(int)
    assert turned.shape == (3, 50, 30)
    assert np.abs(turned - upright).max() <= 6


def test_other_formats(tmp_path):
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (5, 7)).astype(np.uint8)
    PIL.fromarray(grey).save(tmp_path / "a.gif", transparency=int(grey[0, 0]))
    expected = np.where(grey == grey[0, 0], 255, grey)[..., None]
    assert_shows(str(tmp_path / "a.gif"), expected)
    colors = rng.integers(0, 256, (5, 7, 4)).astype(np.uint8)
    PIL.fromarray(colors).save(tmp_path / "a.webp", lossless=True, exact=True)
    assert_shows(str(tmp_path / "a.webp"), on_white(colors[..., :3], colors[..., 3:]), 1)
    PIL.fromarray(colors[..., :3].copy()).save(tmp_path / "a.bmp")
    assert_shows(str(tmp_path / "a.bmp"), colors[..., :3])
    # Cyan, magenta, yellow and black, in flat areas that JPEG keeps.
    flat = np.full((16, 16, 4), colors[0, 0])
    PIL.fromarray(flat, "CMYK").save(tmp_path / "a.jpg", quality=100)
    inks = 255.0 - flat
    assert_shows(str(tmp_path / "a.jpg"), inks[..., :3] * inks[..., 3:] / 255, 4)
    values = rng.integers(0, 1000, (5, 7))
    numbers = values.astype(">u2").tobytes()
    (tmp_path / "a.ppm").write_bytes(b"P5\n7 5\n999\n" + numbers)
    assert_shows(str(tmp_path / "a.ppm"), (values / 999 * 255)[..., None], 1)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif", "gif", "bmp", "ppm"])
def test_cut_files_are_named(tmp_path, suffix):
    """With EXIF data behind the pixels or without, half of an image is no image."""
    path = tmp_path / f"a.{suffix}"
    levels = np.random.default_rng(0).integers(0, 256, (60, 60, 3)).astype(np.uint8)
    exif = PIL.Exif()
    exif[274] = 6
    options = {} if suffix in ("gif", "bmp", "ppm") else {"exif": exif}
    PIL.fromarray(levels).save(path, **options)
    path.write_bytes(path.read_bytes()[:-500])
    for size in (None, (8, 8)):
        with pytest.raises(DataError, match=rf"a\.{suffix} cannot be read as an image"):
            read_image(str(path), size)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about tags
def test_damaged_files_are_named(tmp_path):
    """Pillow raises errors of many kinds for damaged files, and none may leave without a name."""
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, (9, 9, 3)).astype(np.uint8)
    exif = PIL.Exif()
    exif[274] = 6
    for suffix in ("png", "jpg", "webp", "tif", "gif", "bmp", "ppm"):
        path = tmp_path / f"a.{suffix}"
        options = {} if suffix in ("gif", "bmp", "ppm") else {"exif": exif}
        PIL.fromarray(levels).save(path, **options)
        content = path.read_bytes()
        refused = 0
        for _ in range(60):
            changed = bytearray(content[: rng.integers(1, len(content) + 1)])
            for place in rng.integers(0, min(len(changed), 200), rng.integers(1, 6)):
                changed[place] = rng.integers(256)
            path.write_bytes(changed)
            try:
                pixels = read_image(str(path), (4, 4))
            except DataError as error:
                refused += 1
                assert f"a.{suffix}" in str(error)
            else:
                assert (pixels.dtype, pixels.shape) == (np.uint8, (3, 4, 4))
        assert refused


def test_images_of_other_libraries():
    """The samples of a data set may be Pillow images."""
    grey = PIL.new("L", (3, 2), 7)
    black_and_white = PIL.new("1", (3, 2), 1)
    mask = PIL.new("P", (3, 2), 5)

    def first_batch(sample, target):
        return next(iter(data.DataLoader([(sample, target)] * 2, 2)))

    assert first_batch(black_and_white, 0).inputs.tolist() == [[[[255] * 3] * 2]] * 2
    assert first_batch(grey, mask).targets.tolist() == [[[[5] * 3] * 2]] * 2
    with pytest.raises(
        DataError, match=r"list: sample 0 is an image with a palette, so its pixels"
    ):
        first_batch(mask, 0)


def test_all_unreadable_images_are_found(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "a").mkdir()
    for i in range(8):
        pixels = rng.integers(0, 255, (40, 40, 3)).astype(np.uint8)
        PIL.fromarray(pixels).save(tmp_path / "a" / f"{i}.{'jpg' if i % 2 else 'png'}")
    for name in ("1.jpg", "2.png"):  # cut off, as after a broken download
        path = tmp_path / "a" / name
        path.write_bytes(path.read_bytes()[:-300])
    (tmp_path / "a" / "3.jpg").write_bytes(b"no image")
    damaged = bytearray((tmp_path / "a" / "4.png").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (tmp_path / "a" / "4.png").write_bytes(bytes(damaged))
    with (tmp_path / "a" / "5.jpg").open("ab") as file:
        file.write(b"\0" * 5000)  # complete, with more bytes after its end
    PIL.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "a" / "9.tif")
    folder = data.ImageFolder(tmp_path, 16)
    found = folder.unreadable()
    assert [path[-5:] for path in found] == ["1.jpg", "2.png", "3.jpg", "9.tif"]
    assert "float pixels" in [*found.values()][-1]
    # Damage in the middle is found where all pixels are read.
    thorough = folder.unreadable(thorough=True)
    assert {path[-5:] for path in thorough} == {"1.jpg", "2.png", "3.jpg", "4.png", "9.tif"}
    readable = data.ImageFolder(tmp_path, 16, skip=thorough)
    assert len(readable) == len([readable[i] for i in range(len(readable))]) == 4


def test_files_that_are_no_images_are_listed(tmp_path):
    (tmp_path / "a").mkdir()
    PIL.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "a" / "1.png")
    for i in range(12):
        (tmp_path / "a" / f"{i:02}.txt").write_text("")
    with pytest.raises(DataError, match=r"09\.txt and 2 more files are no pictures; move them"):
        data.ImageFolder(tmp_path)
