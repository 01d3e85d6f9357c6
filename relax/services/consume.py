"""The loop that most roles are: take rows under a lease, compute, write, ack.

Each role gives its work as one function of what was fetched. A lease that is gone, or a group that ended meanwhile, costs
only the result: the bus refuses it and counts it as late (TQ4).
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from relax.bus.row import Fetched, RowPut
from relax.core.error import LateError
from relax.core.id import GroupId, group_of
from relax.services.access import BusAccess

Work = Callable[[Fetched], Awaitable[Sequence[RowPut]]]


async def consume(bus: BusAccess, consumer: str, max_rows: int, work: Work, holder: str | None = None) -> NoReturn:
    """Endless. `max_rows` units are leased at most at a time; whatever is ready goes together. `holder` is the name of one of
    several replicas of the consumer."""
    while True:
        receipt = await bus.take(consumer, holder or consumer, max_rows)
        try:
            rows = await work(await bus.fetch(receipt))
            if rows:
                await bus.put(rows, receipt.lease, is_last=True)
            else:
                await bus.ack(receipt.lease)
        except LateError:
            continue


def by_group(fetched: Fetched) -> dict[GroupId, list[str]]:
    """The leased rows of each group, in lease order."""
    groups: dict[GroupId, list[str]] = {}
    for id in fetched.ids:
        groups.setdefault(group_of(id), []).append(id)
    return groups
