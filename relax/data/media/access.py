"""The content of a medium: found where its reference says, if it may be read, and named by its digest (MM6).

Called by `MediaStore`. Every file that is opened lies inside an allowed root, by its real path; every address that is connected
to was checked itself. Reading and hashing happen on threads. What cannot be had is a Refusal with the reason (MM3).
"""

import asyncio
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from relax.config.media import MediaSection
from relax.core.message import MediaPart
from relax.data.dataset import Refusal
from relax.data.media.download import Download
from relax.data.media.embedded import EmbeddedLimits, embedded_bytes
from relax.data.media.origin import SCHEME, Origins
from relax.data.media.recent import Recent
from relax.data.media.reference import Held, file_uri

MEMORY = "memory:"
DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 20
_KEPT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Content:
    """One medium's bytes: `place` is the path of its file, or the bytes themselves, of a file or of a packed array.

    `uri` finds it again.
    """

    uri: str
    digest: str
    num_bytes: int
    place: str | bytes
    packed: bool = False
    stamp: tuple[int, ...] = ()

    def is_unchanged(self) -> bool:
        """Whether the file is still the one that was hashed; asked once it was read again. Touches the disk."""
        if isinstance(self.place, bytes):
            return True
        try:
            return _stamp(os.stat(self.place)) == self.stamp
        except OSError:
            return False


class MediaAccess:
    """What a run may read: `section` says from where, `origins` knows the records. `download` is replaced in tests."""

    def __init__(self, section: MediaSection, origins: Origins, download: Download | None = None) -> None:
        self._section = section
        self._origins = origins
        self._download = download or Download(section.hosts, int(section.max_bytes), section.fetch_s)
        self._limits = EmbeddedLimits.of(section)
        self._kept: Recent[Content] = Recent(_KEPT_BYTES)
        self._carried: Recent[Content] = Recent(int(section.held_bytes))

    async def fetch(self, part: MediaPart, source: str | None = None) -> Content:
        """The content of a part of a record of `source` (None: it may be any). Raises Refusal."""
        uri = part.uri
        if uri.startswith("file:"):
            return await asyncio.to_thread(self._open, uri, self._roots(source))
        if uri.startswith(MEMORY):
            carried = self._carried.get(uri.removeprefix(MEMORY))
            if carried is None:
                raise Refusal(
                    "missing medium", f"{uri!r} is not held any more; raise data.media.held_bytes, or give it again"
                )
            return replace(carried, uri=uri)
        if uri[:5].lower() == "data:":
            return await self._carry(part)
        kept = self._kept.get(part.digest)
        if kept is not None:
            return replace(kept, uri=uri)
        if uri.startswith(SCHEME):
            content = await self._embedded(uri, self._origins.medium(uri))
        elif uri.startswith(("http://", "https://")):
            data = await self._download.get(uri)
            content = Content(uri, await asyncio.to_thread(_digest, data), len(data), data)
        else:
            raise Refusal("unsupported URL", f"{uri[:80]!r} is none of file:, data:, http: and https:")
        self._kept.put(
            content.digest, content, content.num_bytes
        )  # a download or an encoding is wanted again when the medium is decoded
        return content

    async def _carry(self, part: MediaPart) -> Content:
        """What a data URI holds, under a short uri: its text is not carried on, what is kept from here is found by digest."""
        content = await self._embedded("", Held(part.type, "data_uri", part.uri))
        content = replace(content, uri=MEMORY + content.digest)
        self._carried.put(content.digest, content, content.num_bytes)
        return content

    async def _embedded(self, uri: str, held: Held) -> Content:
        data, kind = await asyncio.to_thread(embedded_bytes, held, self._limits)
        return Content(uri, await asyncio.to_thread(_digest, data), len(data), data, packed=kind == "array")

    def _roots(self, source: str | None) -> tuple[Path, ...]:
        if self._section.roots:
            return tuple(Path(root).expanduser().absolute() for root in self._section.roots)
        return self._origins.homes(source)

    def _open(self, uri: str, roots: Sequence[Path]) -> Content:
        path = uri.removeprefix("file://") if uri.startswith("file://") else uri.removeprefix("file:")
        real = _real_path(unquote(path), roots)
        try:
            # A pipe or a device would block, or never end; it is opened only to be seen for what it is.
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise Refusal("missing medium", f"{real!r} went away") from error
        except OSError as error:
            raise Refusal("unreadable medium", f"{real!r}: {error.strerror}") from error
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise Refusal("not a file", f"{real!r} is a folder, a device or a pipe")
            # Between the look at the path and the open somebody may have put a link into it.
            if not _is_inside(os.path.realpath(f"/proc/self/fd/{descriptor}"), roots):
                raise _outside(real, roots)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return self._hash(file_uri(real), real, file, facts)
        finally:
            os.close(descriptor)

    def _hash(self, uri: str, real: str, file: BinaryIO, facts: os.stat_result) -> Content:
        limit = int(self._section.max_bytes)
        if facts.st_size > limit:
            raise Refusal("too large a medium", f"{real!r} has {facts.st_size} bytes, data.media.max_bytes is {limit}")
        hasher, size = blake2b(digest_size=DIGEST_BYTES), 0
        try:
            while chunk := file.read(_CHUNK_BYTES):
                size += len(chunk)
                hasher.update(chunk)
                if size > limit:
                    raise Refusal("too large a medium", f"{real!r} grows beyond data.media.max_bytes, {limit}")
        except OSError as error:
            raise Refusal("unreadable medium", f"{real!r}: {error.strerror}") from error
        if size == 0:
            raise Refusal("empty medium", f"{real!r} has no bytes")
        return Content(uri, hasher.hexdigest(), size, real, stamp=_stamp(facts))


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _stamp(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _real_path(path: str, roots: Sequence[Path]) -> str:
    """The real path of a file in one of the roots, the first that has it. Raises Refusal."""
    if "\0" in path:
        raise Refusal("forbidden path", f"a NUL character in {path[:80]!r}")
    places = [path] if path.startswith("/") else [f"{root}/{path}" for root in roots]
    reals = [os.path.realpath(place) for place in places]
    inside = [real for real in reals if _is_inside(real, roots)]
    if not inside:
        raise _outside(path, roots)
    for real in inside:
        if os.path.lexists(real):
            return real
    raise Refusal("missing medium", f"there is no file {path!r} in {', '.join(map(str, roots))}")


def _is_inside(real: str, roots: Sequence[Path]) -> bool:
    return any(Path(real).is_relative_to(os.path.realpath(root)) for root in roots)


def _outside(path: str, roots: Sequence[Path]) -> Refusal:
    return Refusal(
        "forbidden path",
        f"{path!r} does not lie in {', '.join(map(str, roots))}; data.media.roots names the folders that media may lie in",
    )
