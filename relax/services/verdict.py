"""Why a run stops although nothing failed: too much was lost, step after step (LO5, LO6, A21).

The controller decides that it stops; the sentences for people are made here.
"""

from collections.abc import Mapping

from relax.core.message import Json

_SHOWN = 5
"""Reasons that a sentence names; the ledger has all of them."""


def lost_in_one_step(lost: int, step: int, stage: str, reasons: Mapping[str, Json]) -> str:
    return (
        f"{lost} groups ended untrained while step {step} of stage {stage!r} was filled, which is all that "
        f"filter.max_per_step allows: {_most(reasons)}; look at them with `relax show group`, change the filter or the task, raise "
        "the limit, or set filter.then: close [LO5]"
    )


def empty_steps(steps: int, max_lost: int, reasons: Mapping[str, Json]) -> str:
    return (
        f"{steps} steps in a row had no group to train (each gave up after {max_lost} lost groups): {_most(reasons)}; look at the "
        "failures with `relax show group`, or change the filter or the task"
    )


def nonfinite_steps(steps: int, stage: str) -> str:
    return f"{steps} steps of stage {stage!r} had a non-finite loss or gradient; lower the learning rate, or inspect the dumped batches"


def _most(reasons: Mapping[str, Json]) -> dict[str, Json]:
    """The most frequent reasons, and how many groups had another one."""
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    rest = sum(count for _, count in ordered[_SHOWN:])
    return dict(ordered[:_SHOWN]) | ({"any other": rest} if rest else {})
