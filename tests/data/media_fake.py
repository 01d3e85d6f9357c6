"""Stand-ins for the tests of media: a model family without a model, a pool without processes, pictures and sounds."""

import asyncio
import io
import json
import struct
import zlib
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from relax.config.media import MediaSection
from relax.core.error import DataError, TaskError
from relax.core.media import Medium
from relax.core.message import MediaPart
from relax.data.media import codec
from relax.data.media.access import MediaAccess
from relax.data.media.origin import Origins
from relax.data.media.store import MediaStore
from tests.data.toy import source_config


class CellFamily:
    """An image is made of cells of 4 x 4 pixels, one token each; a sound of 100 samples a token; a video of one token a frame."""

    modalities = ("image", "audio", "video")
    placeholders = {"image": 1001, "audio": 1002, "video": 1003}  # noqa: RUF012
    names = {"image": "<|image_pad|>", "audio": "<|audio_pad|>", "video": "<|video_pad|>"}  # noqa: RUF012

    def __init__(self, scale: float = 1 / 255) -> None:
        self.scale = scale
        self.featurised = 0

    def target(self, part: MediaPart) -> dict[str, Any]:
        facts = part.facts
        if part.type == "audio":
            start, end = part.options.get("start", 0.0), part.options.get("end", facts["seconds"])
            return {"rate": facts["rate"], "samples": round((end - start) * facts["rate"])}
        if part.type == "video":
            frames = list(range(0, facts["frames"], 2))
            hears = facts["audio"] if part.options.get("audio") else None
            sound = hears and {"rate": hears["rate"], "samples": hears["samples"]}
            return {"width": 8, "height": 8, "frames": frames, "fps": facts["fps"] / 2, "audio": sound}
        if facts["width"] == 13:
            raise DataError("the model does not look at pictures that are 13 wide")
        return {"width": 4 * max(1, facts["width"] // 4), "height": 4 * max(1, facts["height"] // 4)}

    def count(self, part: MediaPart) -> int:
        target = self.target(part)
        if part.type == "image":
            return int(target["width"] * target["height"] // 16)
        return -(-target["samples"] // 100) if part.type == "audio" else len(target["frames"])

    def slot(self, part: MediaPart) -> str:
        return self.names[part.type] * self.count(part)

    def key(self, part: MediaPart) -> str:
        return sha256(json.dumps([part.digest, self.target(part), self.scale]).encode()).hexdigest()

    def features(self, part: MediaPart, decoded: dict[str, Any]) -> tuple[Medium, ...]:
        self.featurised += 1
        with np.errstate(all="ignore"):
            pixels = np.asarray(decoded[part.type], dtype=np.float32) * np.float32(self.scale)
        if np.asarray(decoded[part.type]).flat[0] == 77:
            raise IndexError("a grid of no columns")
        arrays = {"values": pixels.reshape(len(pixels), -1), "size": np.array(pixels.shape)}
        made = Medium("family", part.type, self.count(part), self.count(part), arrays)
        if "audio" not in decoded or part.type == "audio":
            return (made,)
        sound = np.asarray(decoded["audio"], dtype=np.float32)[None]
        return made, Medium("family", "audio", -(-sound.size // 100), 1, {"sound": sound})

    def encode(self, model: Any, media: Any) -> Any:
        raise NotImplementedError

    def positions(self, token_ids: Any, media: Any) -> Any:
        raise NotImplementedError

    def parts(self) -> dict[str, tuple[str, ...]]:
        return {}


class ThreadPool:
    """Runs what the process pool would run on a thread, and words its errors as the pool does. `delay_s` holds up every call."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.calls: Counter[str] = Counter()
        self.places: list[Any] = []
        self.delay_s = delay_s
        self.error: Exception | None = None

    async def run(self, function: Any, *args: Any, limits: Any) -> Any:
        for name, called in args[0] if function is codec.run_many else [(function.__name__, args)]:
            self.calls[name] += 1
            self.places.append(called[1])
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        try:
            found = await asyncio.to_thread(_call_open, function, *args)
        except Exception as error:
            raise TaskError(f"{function.__name__} raised {type(error).__name__}: {error}") from error
        assert not isinstance(found, bytes) or len(found) <= limits.result_bytes
        return found


def _call_open(function: Any, *args: Any) -> Any:
    """A fork's open files end with it; here the codec gets the content instead of a path."""
    if function is codec.run_many:
        return function([(name, _with_content(*called)) for name, called in args[0]])
    return function(*_with_content(*args))


def _with_content(modality: str, place: str | bytes, *args: Any) -> tuple[Any, ...]:
    content = Path(place).read_bytes() if isinstance(place, str) else place
    return modality, content, *args


def store_of(
    section: MediaSection | None = None,
    *,
    family: Any = None,
    pool: Any = None,
    origins: Origins | None = None,
    **options: Any,
) -> MediaStore:
    section = section or MediaSection()
    access = MediaAccess(section, origins or Origins(has_roots=bool(section.roots)))
    return MediaStore(section, family or CellFamily(), pool or ThreadPool(), access, **options)


def held_parts(origins: Origins, modality: Any, *values: Any) -> list[MediaPart]:
    """References to what one record holds, read a moment ago."""
    reader = origins.reader(object(), source_config(path="held.jsonl", name="held"), 0)  # type: ignore[arg-type]
    parts = [reader.read(modality, value) for value in values]
    origins.keep(reader)
    return parts


def png(array: Any) -> bytes:
    """An image file of uint8 [H, W, 3] or [H, W]."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.asarray(array, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def wav(samples: Any, rate: int = 8000) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.asarray(samples), rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is large and holds a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
