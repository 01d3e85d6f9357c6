"""The old-logprob role: logprobs of taken rows under the version that the step trains, exactly (TQ10).

A role of step scope: the trainer calls it between take and train, on its own compute thread, because only the trainer holds
version k. Consumes the token rows of the taken groups, produces `old_logprobs`; nothing of it goes over the bus. Call it
before the step's first update.
"""

from relax.core.protocol import Compute, TrainBackend
from relax.services.roles.token_column import TokenColumn

COLUMN = "old_logprobs"


class OldLogprobs(TokenColumn):
    """`token_budget`, `in_order` and `encoder_budget` cut micro-batches as in training."""

    def __init__(
        self,
        backend: TrainBackend,
        compute: Compute,
        token_budget: int,
        in_order: bool = False,
        encoder_budget: int | None = None,
    ) -> None:
        super().__init__(COLUMN, backend, backend.logprobs, compute, token_budget, in_order, encoder_budget)
