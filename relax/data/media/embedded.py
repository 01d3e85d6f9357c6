"""The content of a medium that lies in a record, as bytes: those of a file of its kind, or of a packed array.

Called by `access`, on a thread. Pixels and samples are kept exactly, and equal content gives equal bytes, so that its digest means
something. What the content is worth is judged by the codecs, as for a file.
"""

import base64
import binascii
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt

from relax.config.media import MediaSection
from relax.core.media import pack_arrays
from relax.data.dataset import Refusal
from relax.data.media.reference import Held

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_TIFF_MODES = frozenset({"CMYK", "YCbCr", "LAB", "F", "I"})
_MAX_CHANNELS = 8
_DATA_PREFIX_CHARACTERS = 1000

Kind = Literal["file", "array"]


@dataclass(frozen=True, slots=True)
class EmbeddedLimits:
    """What is refused before it is turned into bytes."""

    max_bytes: int
    max_pixels: int

    @staticmethod
    def of(section: MediaSection) -> "EmbeddedLimits":
        return EmbeddedLimits(int(section.max_bytes), section.image.max_pixels)


def embedded_bytes(held: Held, limits: EmbeddedLimits) -> tuple[bytes, Kind]:
    """The medium's bytes, and whether they are a file or what `pack_arrays` wrote. Raises Refusal."""
    content = _READERS[held.form](held, limits)
    if not content:
        raise Refusal("empty medium", f"the {held.modality} has no bytes")
    if len(content) > limits.max_bytes:
        raise _too_large(held, len(content), limits)
    return content, "array" if held.form == "array" else "file"


def _too_large(held: Held, size: int, limits: EmbeddedLimits) -> Refusal:
    return Refusal(
        "too large a medium", f"the {held.modality} has {size} bytes, data.media.max_bytes is {limits.max_bytes}"
    )


def _from_bytes(held: Held, limits: EmbeddedLimits) -> bytes:
    return bytes(held.value)


def _from_data_uri(held: Held, limits: EmbeddedLimits) -> bytes:
    head, comma, body = held.value[5:].partition(",")
    if not comma or len(head) > _DATA_PREFIX_CHARACTERS:
        raise Refusal("broken data URI", f"{held.value[:60]!r} has no comma before its content")
    if head.lower().rstrip().endswith(";base64"):
        return _decode_base64(held, unquote_to_bytes(body) if "%" in body else body, limits)
    return unquote_to_bytes(body)


def _from_base64(held: Held, limits: EmbeddedLimits) -> bytes:
    return _decode_base64(held, held.value, limits)


def _decode_base64(held: Held, text: str | bytes, limits: EmbeddedLimits) -> bytes:
    if len(text) > limits.max_bytes * 3 // 2 + 1000:
        raise _too_large(held, len(text) * 3 // 4, limits)
    try:
        plain = text.encode("ascii") if isinstance(text, str) else text
        plain = b"".join(plain.split()).rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
        return base64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
    except (ValueError, binascii.Error) as error:
        raise Refusal("broken base64", f"the {held.modality}: {error}") from error


def _from_pil(held: Held, limits: EmbeddedLimits) -> bytes:
    """A PNG, or a TIFF for what PNG cannot hold; with the rotation that a file said the image has."""
    image = held.value
    width, height = image.size
    if width * height > limits.max_pixels:
        raise Refusal("too many pixels", f"{width} x {height}, at most {limits.max_pixels} are decoded")
    try:
        if image.mode not in _PNG_MODES | _TIFF_MODES:
            image = image.convert("RGBA" if "A" in image.mode.upper() else "RGB")
        orientation = image.getexif()
        buffer = io.BytesIO()
        if image.mode in _PNG_MODES:
            image.save(buffer, "PNG", compress_level=1, exif=orientation)
        else:
            image.save(buffer, "TIFF", exif=orientation)
    except Exception as error:  # opened lazily, so that saving it decodes it: PIL raises whatever the damage led to
        raise Refusal("damaged", f"a PIL image: {type(error).__name__}: {error}") from error
    return buffer.getvalue()


def _from_array(held: Held, limits: EmbeddedLimits) -> bytes:
    try:
        array = np.asarray(held.value)
    except Exception as error:  # lists of unequal lengths, tensors of another device, classes of their own
        raise Refusal("mistyped medium", f"the {held.modality} is no array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise Refusal("mistyped medium", f"the {held.modality} is an array of {array.dtype}; expected numbers")
    if array.size == 0:
        raise Refusal("empty medium", f"the {held.modality} is an array of shape {list(array.shape)}")
    if array.nbytes > limits.max_bytes:
        raise _too_large(held, array.nbytes, limits)
    if held.modality == "audio":
        array = _channels_last(array)
    name = {"audio": "rate", "video": "fps"}.get(held.modality)
    return pack_arrays({held.modality: array}, {} if name is None else {name: held.rate})


def _channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Samples [N] or [N, C]; of [C, N] it is told by its shape that the channels come first."""
    if array.ndim == 2 and array.shape[0] <= _MAX_CHANNELS < array.shape[1]:
        return np.ascontiguousarray(array.T)
    return array


_READERS: dict[str, Callable[[Held, EmbeddedLimits], bytes]] = {
    "bytes": _from_bytes,
    "data_uri": _from_data_uri,
    "base64": _from_base64,
    "pil": _from_pil,
    "array": _from_array,
}
