"""Media as features, each computed once: looked at, decoded in the process pool, worked through by the model's family, kept.

Called through `PromptPreparer` by the roles that read media. Nothing here blocks the event loop: files, downloads, hashes and
features are on threads, decoding is in killable processes. A medium that cannot be used is a Refusal with the reason (MM2, MM3).
"""

import asyncio
import json
import os
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from relax.config.media import MediaSection
from relax.core.completion import frozen
from relax.core.error import DataError, InvariantError
from relax.core.media import Medium, pack_media, unpack_arrays, unpack_media
from relax.core.message import Json, MediaPart
from relax.core.protocol import Limits, Pool
from relax.data.dataset import Refusal
from relax.data.media import codec
from relax.data.media.access import Content, MediaAccess
from relax.data.media.batch import MAX_CALLS, SMALL_BYTES, CodecBatches
from relax.data.media.cache import FeatureCache
from relax.data.media.content import BadMedium
from relax.data.media.flight import Flights
from relax.data.media.recent import Recent
from relax.data.media.reference import given_part, shown_uri
from relax.model.family import Family
from relax.model.feature import narrow

T = TypeVar("T")

FORMAT = 1
"""Counts up when equal content would give other features, so that what was cached before is not used."""
_MAX_FACTS = 65536
_LONG_URI = 4096
_SPOOLED_BYTES = 4 << 20
_MAX_RESULT_BYTES = 1 << 31
"""What the process pool gives back at most."""
_BFLOAT16_EXPONENT = 0x7F80


class MediaStore:
    """The media of a run, for metrics with `counts`, `refused` (by reason) and `seconds` (by what was waited for, queues included).

    Counted are media looked_at, decoded, found in memory (memory_hits) or in the cache (disk_hits), and callers who shared work.
    """

    def __init__(
        self,
        section: MediaSection,
        family: Family | None,
        pool: Pool,
        access: MediaAccess,
        cache: FeatureCache | None = None,
    ) -> None:
        """`family` None is a model that reads text only: it refuses every medium."""
        self.family = family
        self.section = section
        self.refused: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._batches = CodecBatches(pool, section.processes)
        self._access = access
        self._cache = cache
        self._looks: Flights[MediaPart] = Flights()
        self._loads: Flights[tuple[Medium, ...]] = Flights()
        self._facts: OrderedDict[str, dict[str, Json]] = OrderedDict()
        self._held: Recent[tuple[Medium, ...]] = Recent(int(section.held_bytes))
        # Decoded pixels wait for their features in memory: no more of them than decoders, and the one at work.
        self._working = asyncio.Semaphore(section.processes + 1)
        self._working_small = asyncio.Semaphore(MAX_CALLS * (section.processes + 1))

    @property
    def counts(self) -> Mapping[str, int]:
        return {**self._counts, "shared": self._looks.shared + self._loads.shared}

    async def close(self) -> None:
        await asyncio.gather(self._looks.close(), self._loads.close())
        await self._batches.close()

    async def look(self, part: MediaPart, source: str | None = None) -> MediaPart:
        """The part with its digest, its facts and every option that its decoding depends on. Raises Refusal."""
        try:
            part = given_part(part)
        except Refusal as refusal:
            self.refused[refusal.reason] += 1
            raise
        part = replace(part, options=self._merged(part))
        if len(part.uri) > _LONG_URI:  # a data URI: too long for a key that is kept
            return await self._counted(part, self._look(part, source))
        key = _name(["look", part.type, part.uri, part.digest, dict(part.options), source])
        return await self._counted(part, self._looks.run(key, lambda: self._look(part, source)))

    async def load(self, parts: Sequence[MediaPart]) -> tuple[Medium, ...]:
        """The features of looked-at parts, in order; a video read with its sound gives two. Raises Refusal."""
        if len(parts) > self.section.max_per_prompt:
            raise Refusal("too many media", f"{len(parts)}, data.media.max_per_prompt is {self.section.max_per_prompt}")
        found = await _all(self._load_one(part) for part in parts)
        media = tuple(medium for one in found for medium in one)
        size, limit = (
            sum(one.num_bytes for one in {one.key: one for one in media}.values()),
            self.section.max_feature_bytes,
        )
        if size > limit:
            raise Refusal(
                "too large features",
                f"{size} bytes of {len(parts)} media, data.media.max_feature_bytes is {int(limit)}; make the media smaller"
                " (resize_max_pixels, max_frames), or raise it",
            )
        return media

    async def _counted(self, part: MediaPart, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives. Its Refusal is counted, and says which medium it is about."""
        try:
            return await work
        except Refusal as refusal:
            self.refused[refusal.reason] += 1
            uri = shown_uri(part.uri)
            if uri in refusal.detail:
                raise
            raise Refusal(refusal.reason, f"{part.type} {uri!r}: {refusal.detail}", refusal.excerpt) from refusal

    # --- looking ---

    def _merged(self, part: MediaPart) -> dict[str, Json]:
        """The part's options, and the configuration's where it has none; of two that exclude each other the part's."""
        image, video = self.section.image, self.section.video
        defaults: dict[str, Json] = {}
        if part.type == "image":
            defaults = {"max_pixels": image.resize_max_pixels}
        elif part.type == "video":
            defaults = {
                "fps": video.fps,
                "min_frames": video.min_frames,
                "max_frames": video.max_frames,
                "max_pixels": video.resize_max_pixels,
                "audio": video.audio and self.family is not None and "audio" in self.family.modalities,
            }
        own = dict(part.options)
        for one, other, exclude in (("min_frames", "max_frames", int.__gt__), ("max_frames", "min_frames", int.__lt__)):
            if own.get(other) and defaults.get(one) and one not in own and exclude(defaults[one], own[other]):
                del defaults[one]
        return {**{key: value for key, value in defaults.items() if value is not None}, **own}

    async def _look(self, part: MediaPart, source: str | None) -> MediaPart:
        family = self._reads(part)
        with self._timed("fetch"):
            content = await self._access.fetch(part, source)
        if part.digest and content.digest != part.digest:
            raise _changed(part)
        limits = self._limits(part)
        key = _name(["facts", part.type, content.digest, content.packed, limits])
        facts = self._facts.get(key)
        if facts is None:
            with self._timed("look"):
                facts = await self._call(codec.look, part.type, content, limits, content.packed)
            self._counts["looked_at"] += 1
            self._facts[key] = facts
            if len(self._facts) > _MAX_FACTS:
                self._facts.popitem(last=False)
        looked = replace(part, uri=content.uri, digest=content.digest, facts=facts)
        _target(family, looked)
        return looked

    def _reads(self, part: MediaPart) -> Family:
        """The family, if it reads such a part. Raises Refusal."""
        if self.family is None:
            raise Refusal(
                "text only", f"the model reads text only, and {part.type} {shown_uri(part.uri)!r} is in the prompt"
            )
        if part.type not in self.family.modalities:
            known = ", ".join(self.family.modalities)
            raise Refusal("unsupported modality", f"the model reads {known} beside text, not {part.type}")
        if part.type == "video" and part.options.get("audio") and "audio" not in self.family.modalities:
            raise Refusal("unsupported modality", "the part asks for the sound of a video, and the model does not hear")
        return self.family

    def _limits(self, part: MediaPart) -> dict[str, Json]:
        """What the codec is told to refuse (see `codec.look`)."""
        section, max_bytes = self.section, int(self.section.max_bytes)
        if part.type == "image":
            return {
                "max_bytes": max_bytes,
                "max_pixels": section.image.max_pixels,
                "max_aspect": section.image.max_aspect,
            }
        if part.type == "audio":
            return {"max_bytes": max_bytes, "max_s": section.audio.max_s}
        trim = {key: part.options[key] for key in ("start", "end") if key in part.options}
        return {
            "max_bytes": max_bytes,
            "max_pixels": section.video.max_pixels,
            "max_s": section.video.max_s,
            "audio": bool(part.options.get("audio")),
            **trim,
        }

    # --- loading ---

    async def _load_one(self, part: MediaPart) -> tuple[Medium, ...]:
        if not part.digest or not part.facts:
            raise InvariantError("MM2", f"{part.type} {shown_uri(part.uri)!r} was not looked at before it is loaded")
        family = self._reads(part)
        target = _target(family, part)
        facts = [FORMAT, family.key(part), part.digest, part.type, dict(part.options), target, self.section.dtype]
        key = _name(["features", *facts])
        held = self._held.get(key)
        if held is not None:
            self._counts["memory_hits"] += 1
            return held
        return await self._counted(part, self._loads.run(key, lambda: self._load(family, part, dict(target), key)))

    async def _load(self, family: Family, part: MediaPart, target: dict[str, Json], key: str) -> tuple[Medium, ...]:
        recalled = await self._recall(key)
        if recalled is not None:
            self._hold(key, recalled)
            return recalled
        is_small = codec.result_bytes(part.type, target) <= SMALL_BYTES
        async with self._working_small if is_small else self._working:
            decoded = await self._decode(part, target)
            with self._timed("features"):
                media, packed = await asyncio.to_thread(self._featurise, family, part, decoded, key)
        self._hold(key, media)
        if self._cache is not None:
            await asyncio.to_thread(self._cache.put, key, packed)
        return media

    async def _recall(self, key: str) -> tuple[Medium, ...] | None:
        if self._cache is None:
            return None
        packed = await asyncio.to_thread(self._cache.get, key)
        if packed is None:
            return None
        self._counts["disk_hits"] += 1
        return unpack_media(packed)

    async def _decode(self, part: MediaPart, target: dict[str, Json]) -> bytes:
        with self._timed("fetch"):
            content = await self._access.fetch(part)
        if content.digest != part.digest:
            raise _changed(part)
        options, limits = dict(part.options), self._limits(part)
        size, most = codec.result_bytes(part.type, target), min(int(self.section.memory), _MAX_RESULT_BYTES)
        if size > most:
            raise Refusal("decodes to too much", f"{size} bytes, at most {most} (data.media.memory)")
        with self._timed("decode"):
            decoded: bytes = await self._call(
                codec.decode, part.type, content, options, target, limits, content.packed, result_bytes=size
            )
        self._counts["decoded"] += 1
        if not await asyncio.to_thread(content.is_unchanged):
            raise _changed(part)
        return decoded

    async def _call(
        self, function: Callable[..., Any], modality: str, content: Content, *args: Any, result_bytes: int = 1 << 20
    ) -> Any:
        if content.packed:  # an array that the record holds: numbers already, which no decoder has to be trusted with
            return await asyncio.to_thread(_in_process, function, modality, content.place, *args)
        limits = Limits(self.section.time_s, int(self.section.memory), result_bytes=result_bytes)
        async with _place_of(content) as place:
            return await self._batches.run(function, modality, place, *args, num_bytes=content.num_bytes, limits=limits)

    def _featurise(self, family: Family, part: MediaPart, decoded: bytes, key: str) -> tuple[tuple[Medium, ...], bytes]:
        """The features of decoded arrays, and their packed form; on a thread."""
        arrays, _ = unpack_arrays(decoded)
        try:
            made = family.features(part, arrays)
        except DataError as error:
            raise Refusal("refused by the model", str(error)) from error
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
            # Its arithmetic is over sizes that the data chose; the run goes on, and the quarantine tells.
            raise Refusal("cannot be processed", f"{type(error).__name__}: {error}") from error
        media = []
        for number, medium in enumerate(made):
            kept = narrow(medium, self.section.dtype)
            for name, array in kept.arrays.items():
                if not _is_finite(frozen(array), kept.dtypes.get(name)):
                    raise Refusal("features not finite", f"{name} of the {medium.modality}, as {self.section.dtype}")
            media.append(replace(kept, key=key if number == 0 else f"{key}-{number}"))
        return tuple(media), pack_media(media)

    def _hold(self, key: str, media: tuple[Medium, ...]) -> None:
        self._held.put(key, media, sum(medium.num_bytes for medium in media))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start_s  # type: ignore[assignment]


def _name(facts: Json) -> str:
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=20).hexdigest()


def _target(family: Family, part: MediaPart) -> Mapping[str, Json]:
    """What the family wants it decoded to. Raises Refusal for what it refuses."""
    try:
        return family.target(part)
    except Refusal:
        raise
    except DataError as error:
        raise Refusal("refused by the model", str(error)) from error


def _in_process(function: Callable[..., T], *args: Any) -> T:
    """A codec's call on this thread. Raises Refusal."""
    try:
        return function(*args)
    except BadMedium as error:
        raise Refusal(error.reason, error.detail) from error
    except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise Refusal("decoder failed", f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def _place_of(content: Content) -> AsyncIterator[str | bytes]:
    """What a worker gets: a path, or bytes that are few. Many go through a temporary file, since copying them to a worker would
    hold up the event loop."""
    if isinstance(content.place, str) or content.num_bytes <= _SPOOLED_BYTES:
        yield content.place
        return
    descriptor, path = tempfile.mkstemp(prefix="relax-media-")
    try:
        await asyncio.to_thread(_write, descriptor, content.place)
        yield path
    finally:
        os.unlink(path)


def _write(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _is_finite(array: npt.NDArray[Any], dtype: str | None) -> bool:
    """False for an array with an infinity or NaN; bfloat16 is known by its words."""
    if dtype == "bfloat16":
        return bool(((array & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _changed(part: MediaPart) -> Refusal:
    return Refusal(
        "changed medium",
        f"{shown_uri(part.uri)!r} is not what it was when it was looked at; do not change media while a run reads them",
    )


async def _all(waits: Any) -> list[Any]:
    """Every result, in order. When some fail the others end first, and the first failure is raised: always the same one."""
    found = await asyncio.gather(*waits, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
