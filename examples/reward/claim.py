"""What a judge of sums learns from: a claim, and what to say of it: the right sum, then `y` or `n`.

A recipe names `claims` as a generator (`recipes/algorithms/judge-model.yaml`). The judge works the sum out before it says its
verdict, which a small model learns much faster than the verdict alone.
"""

from collections.abc import Iterator
from typing import Literal

from relax.core.message import Json
from relax.core.seed import derive_seed
from relax.data.arithmetic import addition


def claims(seed: int, *, digits: int = 2, split: Literal["train", "heldout"] = "train") -> Iterator[dict[str, Json]]:
    """Such as {"prompt": "07+45=259#", "reference": "250 n"}: about half of the claims are right."""
    for record in addition(seed, digits=digits, split=split):
        problem, right = record["prompt"], record["reference"]
        claim = claimed(derive_seed(seed, problem), right)
        yield {"prompt": f"{problem}{claim}#", "reference": f"{right} {'y' if claim == right else 'n'}"}


def claimed(choice: int, right: str) -> str:
    """The right sum, or one with a wrong digit, with other digits, too short or too long."""
    kind, rest = choice % 16, choice // 16
    if kind < 8:
        return right
    if kind < 14:
        place, shift = rest % len(right), 1 + rest // len(right) % 9
        return f"{right[:place]}{(int(right[place]) + shift) % 10}{right[place + 1 :]}"
    if kind == 14:
        return str(rest)[: len(right)]
    return right[:-1] if rest % 2 else f"{right}{rest // 2 % 10}"
