"""A preference data set for DPO: the right sum of two numbers before one whose first digit is wrong.

A recipe names `sums` as a generator (`recipes/algorithms/preference.yaml`); from files, a source with `reference_type: json` does the
same. The reference of a record is the pair, `{"chosen": text, "rejected": text}`.
"""

from collections.abc import Iterator

from relax.core.message import Json
from relax.core.seed import derive_seed
from relax.data.arithmetic import addition


def sums(seed: int, *, digits: int = 2) -> Iterator[dict[str, Json]]:
    """Problems of the quickstart, such as {"prompt": "07+45=", "reference": {"chosen": "250", "rejected": "850"}}."""
    for record in addition(seed, digits=digits):
        chosen: str = record["reference"]
        shift = 1 + derive_seed(seed, record["prompt"]) % 9
        rejected = f"{(int(chosen[0]) + shift) % 10}{chosen[1:]}"
        yield {"prompt": record["prompt"], "reference": {"chosen": chosen, "rejected": rejected}}
