"""Which versions a run has had evaluated and which it waits for, so that none is evaluated twice, or lost without a word.

Kept by the run. Those that it waits for are a note in the ledger, written with the step; a result is on the disk as soon as it is
there. What the note still has after an interruption, and nobody evaluates again, is counted as `eval/lost`.
"""

import logging
from collections.abc import Sequence

from relax.services.ledger import Ledger
from relax.services.projection import Projection
from relax.services.roles.evaluation import EvaluationResult

NOTE = "evaluations"
"""In the ledger: steps of the versions that are waited for."""
LOST = "eval/lost"

_log = logging.getLogger(__name__)


class EvaluationBook:
    """Steps are those of the versions."""

    def __init__(self, projection: Projection) -> None:
        self._projection = projection
        self._asked: set[int] = set()
        self._waiting: set[int] = set()
        self._unreported: set[int] = set()
        """Asked for before an interruption, and not again so far."""

    def restore(self, ledger: Ledger, sets: Sequence[str]) -> None:
        """Go on from what an interrupted run has left in the ledger."""
        self._asked = evaluated_steps(ledger, sets)
        self._unreported = set(unreported_steps(ledger, sets))

    def knows(self, step: int) -> bool:
        """Whether its evaluation is done, or was asked for."""
        return step in self._asked

    def ask(self, step: int) -> None:
        self._asked.add(step)
        self._unreported.discard(step)
        self._waiting.add(step)
        self._note()

    async def report(self, result: EvaluationResult) -> None:
        """Returns when it is in the ledger: whoever hears of it, or lets its version go, may rely on it."""
        self._waiting.discard(result.step)
        self._projection.evaluated(result.rows)
        self._projection.measure(result.step, result.metrics)
        self._note()
        await self._projection.flush()

    def give_up(self, step: int) -> None:
        """The run goes on from `step`: what was not asked for again by now, of this version or an earlier one, is lost."""
        for lost in sorted(known for known in self._unreported if known <= step):
            _log.warning("the evaluation of version %d was under way when the run was interrupted, and is lost", lost)
            self._projection.measure(lost, {LOST: 1.0})
        self._unreported.clear()
        self._note()

    def _note(self) -> None:
        self._projection.note(NOTE, sorted(self._waiting | self._unreported))


def evaluated_steps(ledger: Ledger, sets: Sequence[str]) -> set[int]:
    """Of the versions that have a result; those of all sets are written together."""
    return {step for step, _ in ledger.metric(f"eval/{sets[0]}/reward")} if sets else set()


def unreported_steps(ledger: Ledger, sets: Sequence[str]) -> list[int]:
    """What was asked for when the run was interrupted, and has no result."""
    return sorted(set(ledger.note(NOTE) or ()) - evaluated_steps(ledger, sets))
