"""The sampler of the trainer's consumer: what the gate allows, and nothing else."""

from collections.abc import Sequence

from relax.core.protocol import Candidate
from relax.services.gate import Gate


class GateSampler:
    """Lets the bus lease to the trainer only what the gate allows (ST3); choosing is taking."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def choose(self, candidates: Sequence[Candidate], max_rows: int) -> Sequence[str]:
        return self._gate.choose(candidates, max_rows)
