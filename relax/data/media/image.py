"""Images: what PIL reads, turned upright, as RGB of 8 bits, at the size that the model wants.

Called by `codec` inside a process of the pool. Content alone decides the format. Pixels are counted before any is decoded, an
image that ends early is refused, and of an animation the first frame is taken.
"""

import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile

from relax.data.media.content import BadMedium, blamed, read_packed

Image.init()
"""Every plugin now: a fork would load them again for each call."""

FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "DIB",
    "TIFF",
    "PPM",
    "ICO",
    "AVIF",
    "JPEG2000",
    "QOI",
    "PSD",
    "SGI",
)
"""What PIL may read. Not EPS (which starts a program), nor formats without a magic number, which any bytes could be taken for."""
_MAGIC = (
    b"\x89PNG",
    b"\xff\xd8\xff",
    b"GIF8",
    b"BM",
    b"II*\x00",
    b"MM\x00*",
    b"\x00\x00\x00\x0cjP",
    b"8BPS",
    b"qoif",
)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By the orientation tag of EXIF."""
_SIDEWAYS = (5, 6, 7, 8)
_WHITE = (255, 255, 255)


def look(stream: BinaryIO, limits: Mapping[str, Any], packed: bool) -> dict[str, Any]:
    """Width and height as the image is meant to be seen, from its header. Raises BadMedium."""
    if packed:
        array, _ = read_packed(stream, "image")
        height, width = _plane(array)
    else:
        with _opened(stream, limits) as (image, orientation):
            width, height = image.size[::-1] if orientation in _SIDEWAYS else image.size
    check_size(width, height, limits)
    return {"width": width, "height": height}


def decode(
    stream: BinaryIO, options: Mapping[str, Any], target: Mapping[str, Any], limits: Mapping[str, Any], packed: bool
) -> dict[str, npt.NDArray[Any]]:
    """`image`: uint8 [H, W, 3] of the target's size. Raises BadMedium."""
    if packed:
        array, _ = read_packed(stream, "image")
        height, width = _plane(array)
        check_size(width, height, limits)
        upright = picture(to_bytes(array))
    else:
        with _opened(stream, limits) as (image, orientation), blamed("damaged", "its pixels cannot be decoded"):
            width, height = image.size
            check_size(width, height, limits)
            upright = _load(image, orientation)
    return {"image": resized(upright, target["width"], target["height"])}


def check_size(width: int, height: int, limits: Mapping[str, Any]) -> None:
    """Raises BadMedium for a side of 0, too many pixels, or too long a shape."""
    if width < 1 or height < 1:
        raise BadMedium("no pixels", f"{width} x {height}")
    max_pixels, max_aspect = limits.get("max_pixels"), limits.get("max_aspect")
    if max_pixels is not None and width * height > max_pixels:
        raise BadMedium("too many pixels", f"{width} x {height}, at most {max_pixels} are decoded")
    if max_aspect is not None and max(width, height) > max_aspect * min(width, height):
        raise BadMedium("too long a shape", f"{width} x {height}, one side may be {max_aspect:g} times the other")


@contextmanager
def _opened(stream: BinaryIO, limits: Mapping[str, Any]) -> Iterator[tuple[Image.Image, int]]:
    """The image with its header read, and its orientation."""
    head = stream.read(16)
    stream.seek(0)
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = limits.get("max_pixels"), False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            known = head.startswith(_MAGIC) or head[8:12] == b"WEBP"
            reason = "damaged" if known else "no image"
            with blamed(reason, f"no image that is read ({', '.join(FORMATS)}); it begins with {head!r}"):
                image = _open(stream)
            yield image, _orientation(image, stream)
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


def _open(stream: BinaryIO) -> Image.Image:
    try:
        return Image.open(stream, formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadMedium("too many pixels", str(error)) from error


def _orientation(image: Image.Image, stream: BinaryIO) -> int:
    """1 to 8 (EXIF 2.3, 4.6.4); 1 where nothing says, or what says is damaged, and for TIFF, which PIL turns by itself."""
    if image.format == "TIFF":
        return 1
    try:
        exif = Image.Image.getexif(image)  # a PNG's own would decode the pixels to look behind them
        if ExifTags.Base.Orientation not in exif and image.format == "PNG" and (late := _late_exif(stream)):
            exif.load(late)
        value = exif.get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # its parser raises anything; every viewer shows such an image unturned
        return 1
    return value if value in _TURNS else 1


def _late_exif(stream: BinaryIO) -> bytes | None:
    """The EXIF chunk of a PNG, wherever it lies."""
    where = stream.tell()
    try:
        stream.seek(8)
        while len(head := stream.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"eXIf":
                return b"Exif\x00\x00" + stream.read(min(length, 1 << 16))
            if kind == b"IEND":
                return None
            stream.seek(length + 4, 1)
        return None
    finally:
        stream.seek(where)


def _load(image: Image.Image, orientation: int) -> Image.Image:
    size = image.size
    image.load()
    if image.size != size:
        raise BadMedium(
            "damaged", f"its header says {size[0]} x {size[1]}, its pixels are {image.size[0]} x {image.size[1]}"
        )
    rgb = _to_rgb(image)
    return rgb.transpose(_TURNS[orientation]) if orientation in _TURNS else rgb


def _to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of any mode. What is transparent is laid on white."""
    if image.mode.startswith("I;16"):
        return Image.fromarray(_of_16_bits(image)).convert("RGB")
    if image.mode == "I":
        values = np.asarray(image)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 65535:
            raise BadMedium("unknown scale", f"an image of 32-bit values from {low} to {high}; 0 to 65535 are read")
        return Image.fromarray(_scaled_16(values)).convert("RGB")
    if image.mode == "F":
        return Image.fromarray(to_bytes(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBa", "La"):
        image = image.convert({"RGBa": "RGBA", "La": "LA"}[image.mode])
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, _WHITE)
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def _of_16_bits(image: Image.Image) -> npt.NDArray[np.uint8]:
    values = np.asarray(image)
    grey = _scaled_16(values)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey[values == clear] = 255
    return grey


def _scaled_16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """0 to 65535 as 0 to 255, rounded."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def to_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Pixel values as 8 bits: bytes as they are, booleans as black and white, 16 bits scaled, other integers when all are 0 to
    255, floats of 0 to 1 scaled and of 0 to 255 rounded. Raises BadMedium for any other range, and for NaN."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype == np.uint16:
        return _scaled_16(array)
    if array.dtype.kind not in "iuf":
        raise BadMedium("wrong array", f"values of type {array.dtype} are no pixels")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 255):  # false for NaN too
        raise BadMedium(
            "unknown scale", f"{array.dtype} values from {low:g} to {high:g}; 0 to 255 are read, or floats of 0 to 1"
        )
    if array.dtype.kind == "f":
        array = np.rint(array * 255 if high <= 1 else array)
    return array.astype(np.uint8)


def _plane(array: npt.NDArray[Any]) -> tuple[int, int]:
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 2, 3, 4)):
        raise BadMedium("wrong array", f"shape {list(array.shape)} is not [height, width] or [height, width, 1 to 4]")
    return array.shape[0], array.shape[1]


def picture(array: npt.NDArray[np.uint8]) -> Image.Image:
    """RGB of uint8 [H, W] or [H, W, 1 (grey), 2 (grey, alpha), 3 or 4 (alpha last)]."""
    plane = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return _to_rgb(Image.fromarray(np.ascontiguousarray(plane)))


def resized(image: Image.Image, width: int, height: int) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3], by the very call of transformers' PIL image processors (`image_transforms.resize`)."""
    if image.size != (width, height):
        image = image.resize((width, height), resample=Image.Resampling.BICUBIC)
    return np.array(image)
