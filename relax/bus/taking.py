"""Several leases in one call: what comes together is taken together, and what cannot be handed over goes back whole.

Called by `TransferQueue`, on itself. Each unit has a lease of its own, so that each is done, or comes back, by itself.
"""

from collections.abc import Sequence
from typing import Protocol

from relax.bus.row import Located, Receipt
from relax.core.protocol import Candidate


class Taking(Protocol):
    """What is asked of the queue."""

    async def take(self, consumer: str, holder: str, max_rows: int = 1, timeout_s: float | None = None) -> Receipt: ...

    async def locate(self, receipt: Receipt) -> Located: ...

    async def release(self, lease: str) -> None: ...


async def take_more(queue: Taking, first: Receipt, max_leases: int, candidates: Sequence[Candidate]) -> list[Receipt]:
    """After a first take of one unit those of `candidates`, as they are now, that the sampler gives. When `take` raises, nothing stays
    leased."""
    receipts = [first]
    try:
        while candidates and len(receipts) < max_leases:
            receipts.append(await queue.take(first.consumer, first.holder, 1, 0.0))
    except TimeoutError:
        pass  # the sampler declines them, or others were first in line
    except BaseException:
        await _release(queue, receipts)
        raise
    return receipts


async def located(queue: Taking, receipts: Sequence[Receipt]) -> list[tuple[Receipt, Located]]:
    """Where the rows of each lie. When one cannot be located, none stays leased."""
    try:
        return [(receipt, await queue.locate(receipt)) for receipt in receipts]
    except BaseException:
        await _release(queue, receipts)
        raise


async def _release(queue: Taking, receipts: Sequence[Receipt]) -> None:
    for receipt in receipts:
        await queue.release(receipt.lease)
