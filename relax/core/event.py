"""Numbered events: every state change of gate, bus and trainer (TQ8).

State objects append through `Log`; projections (ledger, metrics) read. An event is appended before the call that caused it
returns, and its number never repeats in a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from relax.core.message import Json


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is `room/verb`, e.g. `bus/put`; `data` is JSON-ready and carries ids and counts, never bulk."""

    number: int
    time_s: float
    kind: str
    data: Mapping[str, Json]


class Log(Protocol):
    def append(self, kind: str, data: Mapping[str, Json]) -> int:
        """Number and keep an event; returns its number."""
        ...
