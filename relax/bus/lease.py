"""Leases: who holds which units of a consumer, and until when (TQ2).

Owned by `BusState`. A lease has one heap entry for its whole life; renewing it touches the heap only when that entry comes
up, so renewals are O(1).
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from relax.core.id import GroupId

ACKED = "acked"
"""Why a lease ended that its holder was done with."""
_REMEMBERED = 1024
"""How many closed leases keep their reason, for messages only."""


@dataclass(slots=True)
class Lease:
    """`units` are the rows or groups still held; `lost` are groups that ended under the lease."""

    id: str
    consumer: str
    holder: str
    units: dict[str, GroupId]
    deadline: float
    lost: set[GroupId] = field(default_factory=set)


class LeaseTable:
    """All leases that are held."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._heap: list[tuple[float, str]] = []
        self._closed: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease: Lease) -> None:
        self._leases[lease.id] = lease
        heapq.heappush(self._heap, (lease.deadline, lease.id))

    def get(self, lease: str) -> Lease | None:
        """The lease, or None when it is not held."""
        return self._leases.get(lease)

    def close(self, lease: str, why: str) -> Lease:
        """Stop holding a lease; returns it."""
        self._closed[lease] = why
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
        return self._leases.pop(lease)

    def why_closed(self, lease: str) -> str:
        """How a lease ended, in words."""
        return self._closed.get(lease, "unknown, or ended long ago")

    def ids(self) -> list[str]:
        """Every lease that is held."""
        return list(self._leases)

    def holder_of(self, lease: str) -> str:
        """Who has a lease that is held."""
        return self._leases[lease].holder

    def held_by(self, holder: str) -> list[str]:
        """Ids of the leases of a holder, oldest first. O(leases): called when a holder dies."""
        return [lease.id for lease in self._leases.values() if lease.holder == holder]

    def due(self, now: float) -> list[str]:
        """Ids of the leases whose deadline is at or before `now`, earliest first. They stay due until they are closed."""
        due: list[str] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            due.append(heapq.heappop(self._heap)[1])
        for lease in due:
            heapq.heappush(self._heap, (self._leases[lease].deadline, lease))
        return due

    def next_deadline(self) -> float | None:
        """The earliest deadline of a held lease, None without leases."""
        while self._heap:
            entry, lease_id = self._heap[0]
            lease = self._leases.get(lease_id)
            if lease is None:
                heapq.heappop(self._heap)
            elif lease.deadline != entry:
                heapq.heapreplace(self._heap, (lease.deadline, lease_id))
            else:
                return entry
        return None

    def state(self) -> dict[str, Any]:
        return {
            lease.id: [lease.consumer, lease.holder, list(lease.units), lease.deadline, sorted(lease.lost)]
            for lease in self._leases.values()
        }
