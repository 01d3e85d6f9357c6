"""What the trainer does with a critic: asks it to evaluate what was taken, and reads the advantages that it put on the bus.

A step role: the trainer calls it between take and train (TQ10). Only receipts go to the critic, wherever it is.
"""

from collections.abc import Sequence

from relax.algorithms.gae import COLUMN
from relax.bus.row import Receipt
from relax.services.access import BusAccess, CriticAccess
from relax.services.train_group import TrainGroup


class CriticColumn:
    """Adds `gae_advantages`."""

    def __init__(self, bus: BusAccess, critic: CriticAccess) -> None:
        self._bus, self._critic = bus, critic

    async def add(self, step: int, groups: Sequence[TrainGroup], receipts: Sequence[Receipt]) -> None:
        """`groups` are of the receipts; those that the trainer will not train may be missing."""
        await self._critic.evaluate(step, receipts)
        by_sample = {sample: group for group in groups for sample in group.samples}
        for receipt in receipts:
            fetched = await self._bus.fetch(receipt, ("span", COLUMN))
            wanted = {group.id: group for id in fetched.ids if (group := by_sample.get(id)) is not None}  # type: ignore[call-overload]
            for group in wanted.values():
                group.read(fetched, (COLUMN,))
