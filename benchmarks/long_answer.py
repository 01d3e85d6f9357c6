"""The quickstart's task with answers as long as a short chain of thought: `function: "benchmarks.long_answer:addition"`.

Used by `modes`. The answer is followed by dots up to the limit of tokens, so that a step's stages take the time that they take with
longer texts while the task stays as hard as it was: with the quickstart's four tokens the roles' own Python would be most of a step.
"""

from collections.abc import Iterator
from typing import Any

from relax.core.message import Json
from relax.data import arithmetic


def addition(seed: int, *, dots: int, **args: Any) -> Iterator[dict[str, Json]]:
    """Problems of `relax.data.arithmetic:addition`, such as {"prompt": "07+45=", "reference": "250....."}."""
    for record in arithmetic.addition(seed, **args):
        yield {**record, "reference": f"{record['reference']}{'.' * dots}"}


def begins_right(response: str, reference: str) -> float:
    """1 if the response begins with the reference's digits, else 0: how many dots follow is no part of the task."""
    return float(response.startswith(reference.rstrip(".")))
