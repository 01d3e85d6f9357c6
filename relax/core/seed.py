"""Seeds derived from identity, never from arrival order (DE1).

Called by data (order of a pass), tasks (per-request seeds) and simulation. Equal parts give equal seeds on every machine.
"""

from hashlib import blake2b


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """A 63-bit seed from the run's seed and the parts that identify a choice, e.g. `(source, record, pass, attempt, sibling, turn)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (run_seed, *parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
