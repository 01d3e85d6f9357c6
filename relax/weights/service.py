"""The catalog's shell, in the process of the controller: whoever asks for the newest version waits here.

Consumes: announcements of the writer, holds of readers. Waits for: a newer version (`newest`). Unblocked by: `announce`. What is old
and held by nobody is deleted from the folder. Killed, it comes back by `restore` with what the folder holds whole.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from relax.core.batch import Measure
from relax.core.version import Version
from relax.weights.catalog import Catalog, Deletion, Entry
from relax.weights.folder import Scan


class CatalogAccess(Protocol):
    """What writers and readers use of the service, here or from another process."""

    async def announce(self, entry: Entry) -> None: ...
    async def newest(self, after: Version | None = None) -> Entry: ...
    async def entry(self, version: Version) -> Entry: ...
    async def versions(self) -> tuple[Version, ...]: ...
    async def hold(self, version: Version, holder: str) -> None: ...
    async def release(self, version: Version, holder: str) -> None: ...
    async def reattach(self, holder: str, versions: Sequence[Version]) -> tuple[Version, ...]: ...


class Folder(Protocol):
    """Where versions lie: a `VersionFolder`, or a `Mirror` of two."""

    def scan(self) -> Scan: ...
    def delete(self, deletion: Deletion) -> None: ...


class CatalogService:
    """Deletes in `folder` (None: whoever keeps the tensors asks `versions`).

    After `restore` nothing is deleted for `grace_s` seconds: holders that live on say so by `reattach` meanwhile.
    """

    def __init__(self, catalog: Catalog, folder: Folder | None = None, grace_s: float = 30.0) -> None:
        self._catalog = catalog
        self._folder = folder
        self._grace_s = grace_s
        self._settled_at = float("-inf")
        self._told = asyncio.Event()
        self._due: deque[Deletion] = deque()
        self._deleting = asyncio.Lock()

    async def restore(self) -> tuple[Version, ...]:
        """Begin with what the folder holds whole; halves of a version whose writer died are removed. Returns what is there."""
        if self._folder is not None:
            scan = await asyncio.to_thread(self._folder.scan)
            self._catalog.restore(stored.entry for stored in scan.stored)
        self._settled_at = asyncio.get_running_loop().time() + self._grace_s
        self._tell()
        return self._catalog.versions()

    async def announce(self, entry: Entry) -> None:
        """A version can be fetched from now on. Saying it again changes nothing; see `Catalog.announce` for errors."""
        if self._catalog.announce(entry):
            self._tell()
        await self._forget()

    async def newest(self, after: Version | None = None) -> Entry:
        """The newest version, as soon as it is above `after` (None: as soon as there is one).

        No deadline: whoever asks has nothing to do before there is one, and is cancelled or cut off when the run ends.
        """
        while (newest := self._catalog.newest) is None or (after is not None and newest.version <= after):
            await self._told.wait()
        return newest

    async def entry(self, version: Version) -> Entry:
        """What is known of a version. Raises TransportError when it is gone."""
        return self._catalog.entry(version)

    async def versions(self) -> tuple[Version, ...]:
        """What can be fetched now, ascending."""
        return self._catalog.versions()

    async def hold(self, version: Version, holder: str) -> None:
        """Keep a version for `holder` (WS7). Raises TransportError when it is gone."""
        self._catalog.hold(version, holder)

    async def release(self, version: Version, holder: str) -> None:
        """`holder` needs the version no more."""
        self._catalog.release(version, holder)
        await self._forget()

    async def drop_holder(self, holder: str) -> None:
        """`holder` is dead: what it held may go."""
        self._catalog.drop_holder(holder)
        await self._forget()

    async def reattach(self, holder: str, versions: Sequence[Version]) -> tuple[Version, ...]:
        """`holder` lives, after the service or the connection did not, and holds exactly these; returns those that are gone."""
        return self._catalog.reattach(holder, versions)

    def measures(self) -> dict[str, Measure]:
        """As metrics: what is kept now."""
        return {
            "weights/versions_kept": Measure(len(self._catalog.versions())),
            "weights/bytes_kept": Measure(self._catalog.num_bytes()),
        }

    def _tell(self) -> None:
        self._told.set()
        self._told = asyncio.Event()

    async def _forget(self) -> None:
        if asyncio.get_running_loop().time() < self._settled_at:
            return
        self._due.extend(self._catalog.forget())
        if self._folder is None:
            self._due.clear()
            return
        async with self._deleting:  # a call that is cancelled leaves the rest to the next one
            while self._due:
                await asyncio.to_thread(self._folder.delete, self._due[0])
                self._due.popleft()


async def follow(catalog: CatalogAccess, notify: Callable[[Version], None], after: Version | None = None) -> None:
    """Tell each newer version; versions in between may be skipped (WS1). Ends by cancellation, or with what `newest` raises."""
    while True:
        after = (await catalog.newest(after)).version
        notify(after)
