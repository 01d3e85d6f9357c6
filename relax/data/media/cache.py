"""A folder of features that were computed before, shared by every run and process of a user.

Called by `MediaStore`, on threads. An entry is named by everything that it depends on, so it never goes stale; it appears whole or
not at all (written aside, renamed) and carries a checksum, so that a damaged one is as good as none. Nothing here ends a run: what
the disk does not take is computed again.
"""

import itertools
import logging
import os
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from relax.model.gguf import cache_folder

Count = Literal["hits", "misses", "written", "removed", "damaged", "failed"]

_report = logging.getLogger(__name__)
_MAGIC = b"relaxmedia1\n"
_HEADER_BYTES = 64
"""Keeps the alignment of what follows."""
_DIGEST_BYTES = 16
_KEY = re.compile(r"[0-9a-f]{16,128}")
_ASIDE = ".writing-"
_ASIDE_S = 3600.0
"""Older files of this kind were left by a process that died."""
_FILL = 0.9
"""Share of the limit that removal stops at, so that not every entry causes one."""
_SCAN_SHARE = 16
"""The folder is counted anew whenever this share of its limit was written here: other processes write too."""


class FeatureCache:
    """At most about `max_bytes` in `folder`; entries that were used longest ago go first. `counts` is what it did so far.

    Safe among any number of threads and processes: removal of an entry that somebody reads harms nobody.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.counts: Counter[Count] = Counter()
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._names = itertools.count()
        self._total: int | None = None
        self._unscanned = 0

    def get(self, key: str) -> memoryview | None:
        """An entry's content, read-only; None when there is none (any more)."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            self._count("misses")
            return None
        body = memoryview(content)[_HEADER_BYTES:]
        if content[:_HEADER_BYTES] != _header(body):
            _report.warning("the cached features %s are damaged; they are removed and computed again", path)
            self._count("damaged")
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # gone meanwhile, or of a folder that may only be read
            os.utime(path)
        self._count("hits")
        return body

    def put(self, key: str, content: bytes) -> None:
        """Keep an entry, unless it is larger than the whole cache or the disk does not take it."""
        size = _HEADER_BYTES + len(content)
        if size > self._max_bytes:
            return
        path = self._path(key)
        aside = self._folder / f"{_ASIDE}{os.getpid()}-{threading.get_ident()}-{next(self._names)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("xb") as file:
                file.write(_header(memoryview(content)))
                file.write(content)
            os.replace(aside, path)
            self._count("written")
            self._make_room(size)
        except OSError as error:
            self._fail(error)
        finally:
            with suppress(OSError):
                aside.unlink()

    def _fail(self, error: OSError) -> None:
        self._count("failed")
        if self.counts["failed"] == 1:
            _report.warning(
                "the cache of media features in %s takes no entry (%s): the run goes on and computes them each time; free"
                " space there, or set data.media.cache to another folder",
                self._folder,
                error.strerror or error,
            )

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._unscanned += size
            if self._total is not None:
                self._total += size
            if self._total is None or self._total > self._max_bytes or self._unscanned * _SCAN_SHARE > self._max_bytes:
                self._total = self._trim()
                self._unscanned = 0

    def _trim(self) -> int:
        """Remove what was used longest ago, if it is too much; the bytes that are left."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total <= self._max_bytes:
            return total
        for _, size, path in entries:
            if total <= self._max_bytes * _FILL:
                break
            with suppress(FileNotFoundError):  # another process was quicker
                path.unlink()
                self._count("removed")
            total -= size
        return total

    def _entries(self) -> list[tuple[int, int, Path]]:
        """Time of last use [ns], bytes and path of every entry; leftovers of dead writers are removed."""
        found = []
        for path in self._folder.rglob("*"):
            with suppress(OSError):  # gone meanwhile
                facts = path.lstat()
                if path.name.startswith(_ASIDE):
                    if time.time() - facts.st_mtime > _ASIDE_S:
                        path.unlink()
                elif _KEY.fullmatch(path.name):
                    found.append((facts.st_mtime_ns, facts.st_size, path))
        return found

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of a cache entry; expected 16 to 128 hexadecimal digits")
        return self._folder / key[:2] / key

    def _count(self, what: Count) -> None:
        with self._counting:
            self.counts[what] += 1


def feature_cache(folder: str | None, max_bytes: int) -> FeatureCache | None:
    """The cache that a configuration asks for (`data.media.cache`, `cache_bytes`); None for none."""
    return FeatureCache(cache_folder(folder) / "media", max_bytes) if max_bytes > 0 else None


def _header(body: memoryview) -> bytes:
    digest = blake2b(body, digest_size=_DIGEST_BYTES).digest()
    return (_MAGIC + len(body).to_bytes(8, "little") + digest).ljust(_HEADER_BYTES, b"\0")
