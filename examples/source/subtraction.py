"""A data source of one's own: a Python generator of records.

A recipe names it by import path (`subtraction.yaml`). relax calls it once with a seed of the run; what it yields is the data
set, so it has to end, and to depend on its arguments alone: then a resumed run sees the same records.
"""

import random
from collections.abc import Iterator


def subtraction(seed: int, *, digits: int = 2, count: int = 4000) -> Iterator[dict[str, str]]:
    """Problems such as {"prompt": "45-07=", "reference": "38"}; the result is never negative."""
    generator = random.Random(seed)
    for _ in range(count):
        first, second = sorted((generator.randrange(10**digits) for _ in range(2)), reverse=True)
        yield {"prompt": f"{first:0{digits}d}-{second:0{digits}d}=", "reference": f"{first - second:0{digits}d}"}
