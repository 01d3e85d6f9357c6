"""Operations: requests that take a while, each with an id, a state and an error to read. A state object; time is an argument.

Driven by `operator`. Invariants: an id names one request for ever; of one subject at most one operation runs, in the order
asked; a state moves `pending -> running -> done | failed | cancelled` and never back; what is kept is bounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from relax.core.error import UserError
from relax.core.message import Json
from relax.services.control.request import Request, arguments_of, kind_of, subject_of
from relax.services.control.wording import asked

OperationState: TypeAlias = Literal["pending", "running", "done", "failed", "cancelled"]
ENDED: frozenset[OperationState] = frozenset({"done", "failed", "cancelled"})
MAX_ENDED = 200
"""Operations that are over and can still be read, the newest ones."""
MAX_PENDING = 32
"""Operations that wait for their turn; more than that is a client in a loop."""
MAX_SAID = 20
"""Sentences of progress that are kept, the newest ones."""


class ConflictError(UserError):
    """It contradicts what was asked before."""


class CrowdedError(UserError):
    """Too many operations wait."""


class UnknownError(UserError):
    """There is no operation with that id."""


@dataclass(slots=True)
class Operation:
    """Times are seconds since 1970. `plan` is what it was going to do when it was asked; `said` is what it does."""

    id: str
    request: Request
    timeout_s: float
    created_at: float
    plan: tuple[str, ...] = ()
    state: OperationState = "pending"
    is_cancelling: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    said: list[str] = field(default_factory=list)
    result: Mapping[str, Json] | None = None
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def to_json(self) -> dict[str, Json]:
        return {
            "id": self.id,
            "kind": kind_of(self.request),
            "arguments": arguments_of(self.request),
            "state": self.state,
            "cancelling": self.is_cancelling and not self.has_ended,
            "plan": list(self.plan),
            "progress": list(self.said),
            "result": None if self.result is None else dict(self.result),
            "error": self.error,
            "timeout_s": self.timeout_s,
            "created_at": self.created_at,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
        }


class OperationBook:
    """All operations of this controller's process, in the order in which they were asked."""

    def __init__(self) -> None:
        self._operations: dict[str, Operation] = {}
        self._made = 0

    def all(self) -> list[Operation]:
        return list(self._operations.values())

    def get(self, id: str) -> Operation:
        """Raises UnknownError."""
        try:
            return self._operations[id]
        except KeyError:
            raise UnknownError(
                f"there is no operation {id!r}; the newest {MAX_ENDED} that ended are kept, and none of before a restart of the controller"
            ) from None

    def submitted(self, request: Request, id: str | None) -> Operation | None:
        """The operation that was asked for with this id before. Raises ConflictError when it was another request."""
        known = self._operations.get(id) if id is not None else None
        if known is not None and known.request != request:
            raise ConflictError(
                f"operation {id!r} is to {_words(known.request)}, this one is to {_words(request)}; give a new request an id "
                "of its own"
            )
        return known

    def add(self, request: Request, id: str | None, plan: Sequence[str], timeout_s: float, now: float) -> Operation:
        """A new one, pending. Raises CrowdedError."""
        pending = sum(one.state == "pending" for one in self._operations.values())
        if pending >= MAX_PENDING:
            raise CrowdedError(f"{pending} operations wait already; wait until some have ended, or cancel some")
        if id is None:
            id = self._next_id(request)
        operation = self._operations[id] = Operation(id, request, timeout_s, now, tuple(plan))
        return operation

    def startable(self) -> list[Operation]:
        """The first pending operation of every subject of which none runs."""
        busy = {subject_of(one.request) for one in self._operations.values() if one.state == "running"}
        found: dict[str, Operation] = {}
        for one in self._operations.values():
            if one.state == "pending" and subject_of(one.request) not in busy:
                found.setdefault(subject_of(one.request), one)
        return list(found.values())

    def begin(self, operation: Operation, now: float) -> None:
        operation.state, operation.started_at = "running", now

    def say(self, operation: Operation, text: str) -> None:
        operation.said = [*operation.said[1 - MAX_SAID :], text]

    def cancel(self, operation: Operation, now: float) -> bool:
        """True when it runs and has to be interrupted; one that waits is over at once, one that was cancelled stays so.

        Raises ConflictError when it has ended in another way.
        """
        if operation.state == "pending":
            self.end(operation, "cancelled", now)
        elif operation.state == "running":
            operation.is_cancelling = True
            return True
        elif operation.state != "cancelled":
            raise ConflictError(
                f"operation {operation.id!r} is {operation.state} already; ask for the opposite to undo it"
            )
        return False

    def end(
        self,
        operation: Operation,
        state: OperationState,
        now: float,
        result: Mapping[str, Json] | None = None,
        error: str | None = None,
    ) -> None:
        operation.state, operation.ended_at, operation.result, operation.error = state, now, result, error
        ended = [id for id, one in self._operations.items() if one.has_ended]
        for id in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._operations[id]

    def _next_id(self, request: Request) -> str:
        while True:
            self._made += 1
            id = f"{kind_of(request)}-{self._made}"
            if id not in self._operations:
                return id


def _words(request: Request) -> str:
    return asked(kind_of(request), arguments_of(request))
