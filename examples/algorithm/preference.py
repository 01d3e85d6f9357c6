"""A preference data set for DPO: the right sum of two numbers before one whose first digit is wrong.

A recipe names `sums` as a generator (`recipes/algorithms/preference.yaml`); records of files have the same form. The source says which
keys hold the two answers: `fields: {chosen: chosen, rejected: rejected}`.
"""

from collections.abc import Iterator

from relax.core.message import Json
from relax.core.seed import derive_seed
from relax.data.arithmetic import addition


def sums(seed: int, *, digits: int = 2) -> Iterator[dict[str, Json]]:
    """Problems of the quickstart, such as {"prompt": "07+45=", "chosen": "250", "rejected": "850"}."""
    for record in addition(seed, digits=digits):
        chosen: str = record["reference"]
        shift = 1 + derive_seed(seed, record["prompt"]) % 9
        rejected = f"{(int(chosen[0]) + shift) % 10}{chosen[1:]}"
        yield {"prompt": record["prompt"], "chosen": chosen, "rejected": rejected}
