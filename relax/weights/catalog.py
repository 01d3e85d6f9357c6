"""Which weight versions there are, who holds them, and which may go: a pure state object.

`CatalogService` is its shell, tests attack it. Invariants: versions follow one another (WS1); what somebody holds and the
newest `keep` stay, and tensors stay while a version needs them (WS7). Calls may come twice: nothing happens then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relax.core.error import InvariantError, TransportError, UserError
from relax.core.version import Version


@dataclass(frozen=True, slots=True)
class Entry:
    """One published version: `num_bytes` of tensors under `digest`; `alias_of` names the version whose tensors it shares (ST7)."""

    version: Version
    digest: str
    num_bytes: int
    alias_of: Version | None = None

    @property
    def source(self) -> Version:
        """The version whose tensors these are."""
        return self.alias_of or self.version


@dataclass(frozen=True, slots=True)
class Deletion:
    """`version` can be fetched no more; the tensors of `tensors` (None: of none) are needed by nobody."""

    version: Version
    tensors: Version | None


def check_order(latest: Version | None, version: Version) -> None:
    """Raises InvariantError unless `version` follows `latest` or starts a new incarnation (WS1)."""
    if latest is not None and version != latest.next() and version.incarnation <= latest.incarnation:
        raise InvariantError(
            "WS1",
            f"version {version} does not follow {latest}: publish {latest.next()}, or start incarnation"
            f" {latest.incarnation + 1} after a restart below a published number",
        )


class Catalog:
    """`keep` is how many of the newest versions stay although nobody holds them."""

    def __init__(self, keep: int = 2) -> None:
        if keep < 1:
            raise UserError(f"weights.keep is {keep}; at least the newest version must stay: use 1 or more")
        self.keep = keep
        self._entries: dict[Version, Entry] = {}
        self._holders: dict[Version, set[str]] = {}
        self._restored = False

    @property
    def newest(self) -> Entry | None:
        """The version published last, None before the first."""
        return next(reversed(self._entries.values()), None)

    def versions(self) -> tuple[Version, ...]:
        """What can be fetched now, ascending."""
        return tuple(self._entries)

    def holders(self, version: Version) -> frozenset[str]:
        """Who holds a version now."""
        return frozenset(self._holders.get(version, ()))

    def num_bytes(self) -> int:
        """Bytes of tensors of all versions, shared ones once."""
        return sum({entry.source: entry.num_bytes for entry in self._entries.values()}.values())

    def restore(self, entries: Iterable[Entry]) -> None:
        """Begin with what is left of what an earlier life published.

        Its newest versions may have been lost since, so the first announcement afterwards need only be newer: the writer knows the order.
        """
        if self._entries:
            raise InvariantError("WS7", "a catalog is restored before anything is announced to it")
        self._entries = {entry.version: entry for entry in sorted(entries, key=lambda entry: entry.version)}
        self._restored = True

    def announce(self, entry: Entry) -> bool:
        """A version is there, whole. False when it was known already, as when an answer was lost and the call came again.

        Raises InvariantError unless it follows the newest one (WS1), or when its alias has no tensors (ST7).
        """
        if self._entries.get(entry.version) == entry:
            return False
        latest = None if self.newest is None else self.newest.version
        if not self._restored or latest is None or entry.version < latest:
            check_order(latest, entry.version)
        if entry.alias_of is not None and all(known.source != entry.alias_of for known in self._entries.values()):
            raise InvariantError("ST7", f"version {entry.version} cannot be an alias: {entry.alias_of} is not here")
        self._entries[entry.version] = entry
        self._restored = False
        return True

    def entry(self, version: Version) -> Entry:
        """What is known of a version. Raises TransportError when it is gone or was never published."""
        if version not in self._entries:
            held = ", ".join(map(str, self._entries)) or "none"
            raise TransportError(
                f"weight version {version} is not in the catalog (it holds {held}); fetch the newest instead"
            )
        return self._entries[version]

    def hold(self, version: Version, holder: str) -> None:
        """Keep a version for `holder` until it releases it or is dropped. Holding twice is holding once."""
        self.entry(version)
        self._holders.setdefault(version, set()).add(holder)

    def release(self, version: Version, holder: str) -> None:
        """`holder` needs the version no more. What it does not hold is none of its business: nothing happens."""
        holders = self._holders.get(version, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(version, None)

    def drop_holder(self, holder: str) -> None:
        """`holder` is dead: nothing is held for it."""
        for version in list(self._holders):
            self.release(version, holder)

    def reattach(self, holder: str, versions: Sequence[Version]) -> tuple[Version, ...]:
        """`holder` lives and holds exactly these; returns those of them that are gone."""
        self.drop_holder(holder)
        for version in versions:
            if version in self._entries:
                self.hold(version, holder)
        return tuple(version for version in versions if version not in self._entries)

    def forget(self) -> list[Deletion]:
        """Give up what is old and held by nobody (WS7); the caller deletes it, manifest before tensors."""
        deletions = []
        for version in list(self._entries)[: -self.keep]:
            if version in self._holders:
                continue
            source = self._entries.pop(version).source
            needed = any(entry.source == source for entry in self._entries.values())
            deletions.append(Deletion(version, None if needed else source))
        return deletions
