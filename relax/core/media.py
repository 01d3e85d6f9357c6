"""Media as a model reads them: the features of one image, sound or video, ready for an encoder.

Made by `data` from a `MediaPart` and a model family's own processing, carried blindly by tasks, bus and services, read by engines
and training. Arrays are read-only. A packed form, one flat buffer that describes itself, is what the bus, the cache on disk and
the process pool carry; it is exact for every dtype, and reading it copies nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from relax.core.error import InvariantError
from relax.core.message import MediaPart, Message, Prompt

Modality: TypeAlias = Literal["image", "audio", "video"]
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

_ALIGNMENT = 64
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Medium:
    """`key` names the content and everything that was done to it: equal keys mean equal arrays, so caches may use it.

    `num_tokens` placeholders stand for it in a prompt (MM1); `encoder_tokens` is what its encoder works through (patches,
    frames of sound), for budgets. `arrays` have the names that the family's encoder expects. `dtypes` names the type of an array
    that numpy has none for: bfloat16 travels as uint16 words (TQ6).
    """

    key: str
    modality: Modality
    num_tokens: int
    encoder_tokens: int
    arrays: Arrays
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays.values())


class MediaLoader(Protocol):
    """Turns references into features, off the event loop, once for each medium however many ask (MM2)."""

    async def load(self, parts: Sequence[MediaPart]) -> tuple[Medium, ...]:
        """The features of each part, in order; a video with its sound gives two. Raises DataError for a bad medium (MM3)."""
        ...


class MediaReader(MediaLoader, Protocol):
    """Looks at media before they are rendered: their content's digest, and what their metadata say."""

    async def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt with every medium looked at, measured against the limits of the data. Raises DataError (MM1, MM3)."""
        ...

    async def look(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages of an environment's turn, likewise. Raises DataError."""
        ...


def miscounted(
    token_ids: npt.NDArray[np.int32], placeholders: Mapping[Modality, int], media: Sequence[Medium]
) -> list[tuple[Modality, int, int]]:
    """Every modality of whose placeholders int32[T] holds another number than the media have features, with both numbers (MM1)."""
    found: list[tuple[Modality, int, int]] = []
    for modality, token_id in placeholders.items():
        count = int(np.count_nonzero(token_ids == token_id))
        features = sum(medium.num_tokens for medium in media if medium.modality == modality)
        if count != features:
            found.append((modality, count, features))
    return found


def pack_arrays(arrays: Arrays, header: Any = None) -> bytes:
    """Arrays and a JSON-ready header in one buffer: its length, a JSON index, the raw values, each aligned to 64 bytes."""
    index: list[list[Any]] = []
    starts, offset = [], 0
    for name, array in arrays.items():
        index.append([name, array.dtype.str, list(array.shape), offset])
        starts.append(offset)
        offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    text = json.dumps({"header": header, "arrays": index}).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    start = _LENGTH_BYTES + len(text)
    buffer = bytearray(start + offset)
    buffer[:_LENGTH_BYTES] = len(text).to_bytes(_LENGTH_BYTES, "little")
    buffer[_LENGTH_BYTES:start] = text
    for where, array in zip(starts, arrays.values(), strict=True):
        raw = np.ascontiguousarray(array).tobytes()
        buffer[start + where : start + where + len(raw)] = raw
    return bytes(buffer)


def unpack_arrays(buffer: bytes | memoryview) -> tuple[dict[str, npt.NDArray[Any]], Any]:
    """The arrays, as read-only views of `buffer`, and the header. Raises InvariantError for what `pack_arrays` did not write."""
    view = memoryview(buffer).toreadonly()
    try:
        start = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
        content = json.loads(bytes(view[_LENGTH_BYTES:start]))
        arrays = {
            name: np.frombuffer(
                view, dtype=np.dtype(dtype), count=int(np.prod(shape, dtype=np.int64)), offset=start + offset
            ).reshape(shape)
            for name, dtype, shape, offset in content["arrays"]
        }
        return arrays, content["header"]
    except (ValueError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise InvariantError("TQ6", f"{len(view)} bytes are no packed arrays: {error}") from error


def pack_media(media: Sequence[Medium]) -> bytes:
    """Media in one buffer; `unpack_media` is its exact inverse."""
    arrays = {f"{number}/{name}": array for number, one in enumerate(media) for name, array in one.arrays.items()}
    header = [[one.key, one.modality, one.num_tokens, one.encoder_tokens, dict(one.dtypes)] for one in media]
    return pack_arrays(arrays, header)


def unpack_media(buffer: bytes | memoryview) -> tuple[Medium, ...]:
    """The media of a buffer, in order; their arrays are views of it."""
    arrays, header = unpack_arrays(buffer)
    found: list[dict[str, npt.NDArray[Any]]] = [{} for _ in header]
    for name, array in arrays.items():
        number, _, short = name.partition("/")
        found[int(number)][short] = array
    return tuple(
        Medium(key, modality, num_tokens, encoder_tokens, found[number], dtypes)
        for number, (key, modality, num_tokens, encoder_tokens, dtypes) in enumerate(header)
    )
