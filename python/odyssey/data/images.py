"""Image files as 8-bit pixels, as an image viewer shows them.

Pillow alone reads 16-bit grey as white, ignores alpha and leaves photos of phones on their side.
What has no right display raises an error with the name of the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from odyssey.errors import DataError, printable

if TYPE_CHECKING:
    from PIL.Image import Image

# What a viewer does for each value of the EXIF tag Orientation, as Pillow names it.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# Where Pillow's `getexif` finds EXIF data. It takes longer than this look.
_EXIF_KEYS = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
# Numbers of tags, of EXIF and of TIFF.
_ORIENTATION = 274
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_WHITE_IS_ZERO = 0
_SAMPLE_FORMAT = 339
_SIGNED = 2
# The raw modes of PNG files with grey of 2 and 4 bits. Pillow multiplies their pixels, but not the
# transparent grey, by these factors.
_GREY_FACTORS = {"L;2": 85, "L;4": 17}
# Marks at the end of complete files, by Pillow's names of formats, and how many bytes at the end
# of a file are searched for them: some programs write more after the mark.
_END_MARKS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL = 4096
# Pillow's modes of pixels whose black and white are known. `_show` looks at others in detail.
_SHOWN_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")


def read_image(path: str, size: tuple[int, int] | None = None, mode: str = "RGB") -> np.ndarray:
    """Reads an image file as uint8 (C, H, W), as an image viewer shows it.

    Of a file with several images it reads the first one.

    Args:
        path: the file, of any format that Pillow reads.
        size: (width, height). The image is scaled to cover it, and the excess is cut off at both
            ends. None keeps the size of the image.
        mode: "RGB" for 3 channels, "L" for one channel of grey.

    Raises:
        DataError: Pillow cannot read the file, or its pixels have no known black and white.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            raw_mode = _raw_mode(image)  # first, because Pillow loads some images for their EXIF
            orientation = _orientation(image)
            if size is not None:
                width, height = size
                is_on_its_side = orientation >= 5
                # Decodes a JPEG at the next larger size that is cheap.
                image.draft("RGB", (height, width) if is_on_its_side else (width, height))
            shown_image = _show(image, raw_mode, path)
            if orientation > 1:
                shown_image = shown_image.transpose(Image.Transpose[_TURNS[orientation]])
            if shown_image.mode != mode:  # `convert` would copy the image
                shown_image = shown_image.convert(mode)
            if size is not None:
                shown_image = ImageOps.fit(shown_image, size, method=Image.Resampling.BILINEAR)
            pixels = np.asarray(shown_image, np.uint8)
    except DataError:
        raise
    # For damaged files Pillow raises not only OSError, but also SyntaxError, struct.error and more.
    except Exception as problem:
        raise _damage(path, problem) from None
    # Pillow returns (H, W) for grey images and (H, W, C) for the others.
    channels_last = pixels.reshape(*pixels.shape[:2], -1)
    return np.ascontiguousarray(channels_last.transpose(2, 0, 1))


def fault_of_image(path: str, thorough: bool = False) -> str | None:
    """Returns why an image file cannot be used, or None.

    It reads the beginning and the end of the file: the header, and the mark that a complete file
    has at its end. Where the mark is missing it reads all pixels, because some writers omit it.

    Args:
        path: the file.
        thorough: read all pixels of each file, which finds damage in the middle too.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            mark = _END_MARKS.get(image.format or "")
            is_judged_by_header = (
                not thorough and image.mode in _SHOWN_MODES and "transparency" not in image.info
            )
            image_is_complete = mark is not None and mark in _last_bytes(path)
        if not (is_judged_by_header and image_is_complete):
            read_image(path)
    except DataError as problem:
        return str(problem)
    # As in `read_image`.
    except Exception as problem:
        return str(_damage(path, problem))
    return None


def _last_bytes(path: str) -> bytes:
    """Returns the last bytes of a file, in which formats have their mark."""
    with open(path, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL))
        return file.read()


def _damage(path: str, problem: Exception) -> DataError:
    """Returns the error of an image file that Pillow cannot read."""
    return DataError(
        f"{printable(path)} cannot be read as an image ({problem}); replace it, or move it "
        "elsewhere"
    )


def _orientation(image: Image) -> int:
    """Returns the EXIF orientation, from 1 to 8, that Pillow does not apply itself.

    It is 1 if there is none, or it is damaged.
    """
    if image.format == "PNG":
        image.load()  # its EXIF data may follow the pixels
    if image.format == "TIFF" or image.info.keys().isdisjoint(_EXIF_KEYS):
        return 1
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    # A viewer shows an image with damaged EXIF data as it is. Pillow raises errors of many kinds.
    except Exception:
        return 1
    return orientation if orientation in _TURNS else 1


def _raw_mode(image: Image) -> Any:
    """Returns how pixels are stored in the file, in Pillow's words, or None if it is unknown."""
    if not getattr(image, "tile", None):
        return None
    _, _, _, arguments = image.tile[0]
    return arguments[0] if isinstance(arguments, tuple) and arguments else arguments


def _show(image: Image, raw_mode: Any, path: str) -> Image:
    """Returns an image as opaque pixels of mode L or RGB.

    Raises DataError if a black and a white pixel aren't known.
    """
    from PIL import Image as images

    is_16_bit = image.mode.startswith("I;16") or (
        image.mode == "I" and image.format in ("PNG", "PPM")
    )
    is_signed = _SIGNED in getattr(image, "tag_v2", {}).get(_SAMPLE_FORMAT, ())
    if is_signed or (image.mode in ("I", "F") and not is_16_bit):
        kind = "signed" if is_signed else "float" if image.mode == "F" else "32-bit"
        raise DataError(
            f"{printable(path)} has {kind} pixels, and which of them are black and white isn't "
            "known; convert it to 8 or 16 bits per channel"
        )
    if image.mode == "1":
        image = image.convert("L")
    key = image.info.get("transparency")
    if image.mode in ("L", "RGB") or is_16_bit:
        if key is not None and raw_mode == "RGB;16B":
            raise DataError(
                f"{printable(path)} has a transparent colour of 16 bits per channel, which isn't "
                "supported; convert it to 8 bits per channel, or to an alpha channel"
            )
        values = np.asarray(image) if is_16_bit or key is not None else None
        opaque_image = images.fromarray(_to_8_bits(values, image)) if is_16_bit else image
        if key is None:
            return opaque_image
        key = np.asarray(key) * _GREY_FACTORS.get(raw_mode, 1)
        is_transparent = (values == key).reshape(*values.shape[:2], -1).all(axis=2)
        alpha = np.where(is_transparent, 0, 255).astype(np.uint8)
        return _on_white(opaque_image.convert("RGB"), images.fromarray(alpha))
    if image.mode == "La":  # multiplied by alpha; Pillow converts it to LA only
        image = image.convert("LA")
    has_alpha_in_palette = image.mode == "P" and (
        key is not None or image.palette.mode.endswith("A")
    )
    if has_alpha_in_palette or image.mode in ("LA", "PA", "RGBA", "RGBa"):
        rgba_image = image.convert("RGBA")
        return _on_white(rgba_image.convert("RGB"), rgba_image.getchannel("A"))
    return image.convert("RGB")


def _to_8_bits(values: np.ndarray, image: Image) -> np.ndarray:
    """Returns the upper 8 bits of grey pixels (H, W), as Pillow does for colours of 16 bits."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]  # 12 is possible
    pixels = (values >> (bits - 8)).astype(np.uint8)
    # Pillow inverts only 8 bits.
    return 255 - pixels if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else pixels


def _on_white(image: Image, alpha: Image) -> Image:
    """Returns an RGB image on a white background: alpha / 255 of it, the rest is white."""
    from PIL import Image as images

    canvas = images.new("RGB", image.size, "white")
    canvas.paste(image, mask=alpha)
    return canvas
