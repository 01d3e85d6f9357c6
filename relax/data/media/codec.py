"""Every codec by its modality, and the two calls that the media store sends to the process pool.

A worker imports this module before it forks, so everything that decoders need is imported with it, and none of that starts a
thread. What comes back is facts as JSON, packed arrays, or a `BadMedium`, which `as_refusal` finds again in the pool's error.
"""

import json
import re
import struct
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from relax.core.error import LimitError, TaskError
from relax.core.media import pack_arrays
from relax.data.dataset import Refusal
from relax.data.media import audio, image, video
from relax.data.media.content import BadMedium, open_content

CODECS: Mapping[str, ModuleType] = {"image": image, "audio": audio, "video": video}
"""Modules with `look` and `decode`."""

REASONS = frozenset(
    {
        "missing medium", "unreadable medium", "not a file", "empty medium", "too large a medium",
        "no image", "no sound", "no video", "unknown codec",
        "truncated", "damaged", "not as long as it says", "frames missing",
        "no pixels", "too many pixels", "too long a shape", "unknown scale",
        "no samples", "no sample rate", "too many channels", "not finite",
        "no frames", "no frame rate", "too long", "nothing left", "wrong array",
        "takes too long", "needs too much memory", "decodes to too much", "decoder failed", "decoder crashed",
    }
)  # fmt: skip
"""Every reason for which a codec, or the process that it runs in, refuses a medium."""

_FRAME = struct.Struct(">cQ")
"""Kind and length of one result among several."""
_BAD = re.compile(r"(?:look|decode) raised BadMedium: ([^:]+): (.*)", re.DOTALL)
_RAISED = re.compile(r"(?:look|decode) raised (.*)", re.DOTALL)


def look(modality: str, content: bytes | str, limits: dict[str, Any], packed: bool = False) -> dict[str, Any]:
    """The facts of a medium (`MediaPart.facts`) without decoding it. Raises BadMedium.

    `content` is bytes, or the path of a file. `limits` may hold max_bytes, max_pixels, max_aspect, max_s, and for a video the
    `start` and `end` (s) of its part, to which max_s then applies, and `audio`: whether its sound must be readable too.
    `packed` says that content is what `core.media.pack_arrays` made of one array: image [H, W] or [H, W, C]; audio [N] or
    [N, channels] with header {"rate"}; video [F, H, W, C] with header {"fps"}.
    """
    with open_content(content, limits.get("max_bytes")) as stream:
        return dict(CODECS[modality].look(stream, limits, packed))


def decode(
    modality: str,
    content: bytes | str,
    options: dict[str, Any],
    target: dict[str, Any],
    limits: dict[str, Any] | None = None,
    packed: bool = False,
) -> bytes:
    """The decoded arrays of a medium (`Family.features`), packed, of exactly the target's sizes (`Family.target`). Raises BadMedium.

    `options` are the part's (start and end, in seconds, for sound); `limits` as for `look`: content may have changed since.
    """
    limits = limits or {}
    with open_content(content, limits.get("max_bytes")) as stream:
        return pack_arrays(CODECS[modality].decode(stream, options, target, limits, packed))


def run_many(calls: list[tuple[str, tuple[Any, ...]]]) -> bytes:
    """Several calls of `look` and `decode`, by name and arguments, one after the other; `results_of` reads what comes back.

    Raises whatever is not a `BadMedium`: then nothing is known of any of them.
    """
    functions: dict[str, Callable[..., Any]] = {"look": look, "decode": decode}
    frames = []
    for name, args in calls:
        try:
            value = functions[name](*args)
        except BadMedium as error:
            kind, body = b"e", json.dumps([error.reason, error.detail]).encode()
        else:
            kind, body = (b"b", value) if isinstance(value, bytes) else (b"v", json.dumps(value).encode())
        frames.append(_FRAME.pack(kind, len(body)) + body)
    return b"".join(frames)


def results_of(packed: bytes) -> list[Any]:
    """Facts, decoded arrays, or a Refusal for each call that `run_many` made, in order."""
    found: list[Any] = []
    start = 0
    while start < len(packed):
        kind, length = _FRAME.unpack_from(packed, start)
        start += _FRAME.size
        body = packed[start : start + length]
        start += length
        found.append(body if kind == b"b" else Refusal(*json.loads(body)) if kind == b"e" else json.loads(body))
    return found


def result_bytes(modality: str, target: Mapping[str, Any]) -> int:
    """What a call of `decode` to this target returns at most, for `Limits.result_bytes`."""
    sound = target if modality == "audio" else target.get("audio")
    pixels = 0 if modality == "audio" else 3 * target["width"] * target["height"] * len(target.get("frames") or (0,))
    return 4096 + pixels + (4 * sound["samples"] if sound else 0)


def as_refusal(error: TaskError) -> Refusal:
    """Why a medium is refused, from the error of a pool call to `look` or `decode`.

    Raises the error itself when it says nothing about the medium: the pool was closed, or a worker could not load the codecs.
    """
    text = str(error)
    if isinstance(error, LimitError):
        if "returned" in text:
            return Refusal("decodes to too much", text)
        if "of memory" in text:
            return Refusal("needs too much memory", f"{text} (data.media.memory)")
        return Refusal("takes too long", f"{text} (data.media.time_s)")
    if found := _BAD.fullmatch(text):
        return Refusal(found[1], found[2])
    if found := _RAISED.fullmatch(text):
        return Refusal("decoder failed", found[1])
    if any(sign in text for sign in ("died without an answer", "malformed answer", "no JSON", "worker was lost")):
        return Refusal("decoder crashed", text)
    raise error


__all__ = ["CODECS", "BadMedium", "as_refusal", "decode", "look", "result_bytes"]
