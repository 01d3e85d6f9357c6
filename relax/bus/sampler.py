"""Which candidates a consumer leases next; implements core Sampler.

Called by the queue, which passes candidates in order of `ready_number`. Samplers are quick and never wait.
"""

from collections.abc import Sequence

from relax.core.protocol import Candidate


class FifoSampler:
    """First complete, first taken. A row whose lease came back keeps its old place, so it goes first."""

    def choose(self, candidates: Sequence[Candidate], max_rows: int) -> Sequence[str]:
        """The first `max_rows` candidates; their order is the queue's order by `ready_number`."""
        return [candidate.id for candidate in candidates[:max_rows]]
